"""Moments of random networks: against exact expectations at finite width, and against autograd."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from initlib import constant, generator, initialize, mean_and_se, propagate, rng, schemes, signal
from initlib.schemes import Initializer

P = 1e-7
SIGMAS = 6.5
MOMENTS = ("forward", "mean_squared", "variance", "activations", "backward", "weight_gradient")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("INITLIB_DEVICE", "cpu")
    monkeypatch.setattr(signal, "_CHUNKS", 1)  # a test that follows the random numbers follows one stream


@dataclass(frozen=True)
class Given(Initializer):
    """Weights that are given instead of drawn: one stack (networks, n_out, n_in)."""

    stack: torch.Tensor = None

    def variance(self, n_in, n_out):
        return 1.0

    def _draw_(self, weight, connections, generator):
        weight.copy_(self.stack)


def given(widths, networks, n=0, gain=1.0):
    """Random weights in double precision, as schemes that a test can look into."""
    pairs = enumerate(itertools.pairwise(widths))
    return [
        Given(
            "given", gain / math.sqrt(a) * torch.randn(networks, b, a, generator=generator(1000 + 10 * n + i)).double()
        )
        for i, (a, b) in pairs
    ]


def agrees(replicates, expected):
    """Whether the mean over networks is what is expected, in every layer."""
    mean, se = mean_and_se(replicates)
    assert mean.shape == np.shape(expected)
    off = np.abs(mean - expected)
    assert (off <= SIGMAS * se + 1e-6 * np.abs(expected)).all(), f"{mean} ± {se} is not {expected}"
    assert (SIGMAS * se <= 0.15 * np.abs(expected)).all(), f"{se} is too coarse for {expected}"
    return True


def inputs(samples, width, n=1):
    return torch.randn(samples, width, generator=generator(2000 + n)).double() + 0.5


# --- exact expectations at finite width -------------------------------------------------------

WIDTHS = [40, 60, 30, 80, 50]

SPREADS = {
    "lecun_normal": lambda m, n: 1 / m,
    "glorot_uniform": lambda m, n: 2 / (m + n),
    "he_truncated": lambda m, n: 2 / m,
    "geometric_normal": lambda m, n: 1 / math.sqrt(m * n),
    "contraharmonic_uniform": lambda m, n: (m + n) / (m * m + n * n),
    "torch_default": lambda m, n: 1 / (3 * m),
}


def expected_moments(q_0, widths, spread, kept):
    """Second moments with a share ``kept`` of every signal passing the activation: 1 linear, 1/2 rectifier."""
    pairs = list(itertools.pairwise(widths))
    forward, entering = [q_0], [q_0]  # of u, and of x, which enters the next layer
    for m, n in pairs:
        forward.append(m * spread(m, n) * entering[-1])
        entering.append(kept * forward[-1])
    backward, arriving = [], 1.0
    for m, n in reversed(pairs):
        backward.append(kept * arriving)
        arriving = n * spread(m, n) * backward[-1]
    backward = [arriving, *reversed(backward)]
    weight_gradient = [b * x for b, x in zip(backward[1:], entering, strict=False)]
    return {"forward": forward, "activations": entering, "backward": backward, "weight_gradient": weight_gradient}


@pytest.mark.parametrize("name", SPREADS)
@pytest.mark.parametrize(("activation", "kept"), [("linear", 1.0), (torch.relu, 0.5)], ids=["linear", "relu"])
def test_second_moments_have_their_exact_expectations(name, activation, kept):
    x = inputs(3, WIDTHS[0])
    trace = propagate(WIDTHS, name, activation, networks=1500, inputs=x, seed=1)
    expected = expected_moments(x.square().mean().item(), WIDTHS, SPREADS[name], kept)
    np.testing.assert_allclose(trace.forward[:, 0], expected["forward"][0], rtol=1e-5)
    if kept == 1 and name == "lecun_normal":
        np.testing.assert_allclose(expected["forward"], expected["forward"][0])
    for moment, values in expected.items():
        assert agrees(getattr(trace, moment), values)


@pytest.mark.parametrize("slope", [0.2, 0.5])
def test_leaky_rectifier_keeps_its_share(slope):
    x = inputs(3, WIDTHS[0])
    leaky = nn.LeakyReLU(slope)
    trace = propagate(WIDTHS, "lecun_normal", leaky, networks=1500, inputs=x, seed=2)
    expected = expected_moments(x.square().mean().item(), WIDTHS, SPREADS["lecun_normal"], (1 + slope**2) / 2)
    for moment, values in expected.items():
        assert agrees(getattr(trace, moment), values)


def test_drawn_inputs_are_standard_normal_and_new_for_each_network():
    trace = propagate([25, 4], "he_normal", networks=4000, samples=1, seed=3)
    assert stats.kstest(25 * trace.forward[:, 0], stats.chi2(25).cdf).pvalue > P
    many = propagate([25, 4], "he_normal", networks=2000, samples=4, seed=3)
    assert agrees(many.mean_squared[:, 0], 1 / 4)
    assert agrees(many.variance[:, 0], 3 / 4)


@pytest.mark.parametrize("width", [3, 30])
def test_fluctuations_of_one_layer_are_those_of_chi_square(width):
    x = inputs(1, 7)
    trace = propagate([7, width], "he_normal", networks=4000, inputs=x, seed=4)
    scaled = width * trace.forward[:, 1] / (2 * x.square().mean().item())
    assert stats.kstest(scaled, stats.chi2(width).cdf).pvalue > P
    assert stats.kstest(width * trace.backward[:, 1], stats.chi2(width).cdf).pvalue > P


@pytest.mark.parametrize(("activation", "kurtosis"), [("linear", 2), (torch.relu, 5)], ids=["linear", "relu"])
def test_fourth_moment_of_the_signal_grows_by_a_factor_a_layer(activation, kurtosis):
    # of x^l: E|x|^4 / (E|x|^2)^2 = prod (1 + 2/n) if linear, prod (1 + 5/n) behind a rectifier
    widths = [20, 60, 90, 70]
    squares = {"x": lambda u: (u if activation == "linear" else activation(u)).double().square().sum((1, 2))}
    scheme = "lecun_normal" if activation == "linear" else "he_normal"
    trace = propagate(widths, scheme, activation, networks=12000, inputs=torch.ones(1, 20), observe=squares, seed=5)
    expected = np.cumprod([1 + kurtosis / n for n in widths[1:]])
    assert agrees((trace.observed["x"] / widths[1:]) ** 2, expected)


def test_gradients_that_enter_are_independent_of_each_other():
    trace = propagate([4, 50], "he_normal", networks=1000, samples=3, seed=6)
    assert stats.kstest(150 * trace.backward[:, 1], stats.chi2(150).cdf).pvalue > P


def test_biases_add_their_variance():
    trace = propagate([50, 40, 60], "lecun_normal", networks=2000, samples=2, bias_std=0.7, seed=8)
    assert agrees(trace.forward, [1, 1 + 0.49, 1 + 2 * 0.49])
    assert agrees(trace.backward, [60 / 50, 60 / 40, 1])


def test_bias_is_shared_by_the_samples_of_a_network_and_by_nothing_else():
    trace = propagate([5, 200], "zeros", networks=300, samples=3, bias_std=0.5, observe={"u": lambda u: u}, seed=9)
    u = trace.observed["u"][:, 0]
    assert (u == u[:, :1]).all()
    assert stats.kstest(u[:, 0].ravel(), stats.norm(scale=0.5).cdf).pvalue > P
    np.testing.assert_allclose(trace.variance[:, 1], 0, atol=1e-12)


def test_orthogonal_square_layers_keep_every_norm():
    trace = propagate([30] * 5, "orthogonal", networks=5, samples=4, dtype=torch.float64, seed=10)
    np.testing.assert_allclose(trace.forward, trace.forward[:, :1].repeat(5, 1), rtol=1e-10)
    np.testing.assert_allclose(trace.backward, trace.backward[:, -1:].repeat(5, 1), rtol=1e-10)


def test_zero_weights_stop_everything():
    trace = propagate([6, 5, 4], "zeros", torch.tanh, networks=2, samples=3)
    assert (trace.forward[:, 1:] == 0).all()
    assert (trace.backward[:, :2] == 0).all()
    assert (trace.weight_gradient[:, 1] == 0).all()
    assert (trace.backward[:, 2] > 0).all()


# --- against autograd -------------------------------------------------------------------------


class Swish(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, u):
        return u * torch.sigmoid(self.slope * u)


ACTIVATIONS = {
    "linear": "linear",
    "tanh": torch.tanh,
    "relu": torch.relu,
    "relu in place": nn.ReLU(inplace=True),
    "module with a parameter": Swish(),
    "shared slope": nn.PReLU(dtype=torch.float64),
    "centred over samples": lambda u: u - u.mean(1, keepdim=True),
    "normalised over samples": lambda u: torch.relu((u - u.mean(1, keepdim=True)) / u.std(1, keepdim=True)),
    "softmax over units": lambda u: 5 * torch.softmax(u, -1),
    "sorted over units": lambda u: u.sort(-1).values,
    "constant": torch.ones_like,
    "step": lambda u: (u > 0).to(u),
}


def normalized(u, normalize):
    """What torch makes of pre-activations (networks, samples, units)."""
    if normalize is None:
        return u
    torch_norm = nn.BatchNorm1d(u.shape[-1], affine=False, momentum=None, dtype=u.dtype)
    if normalize == "batch":
        return torch.stack([torch_norm(each) for each in u])
    # scale and bias that the data have set once, and that count as constants
    scale = (u.var(1, correction=0, keepdim=True) + torch_norm.eps).rsqrt().detach()
    bias = -(u.mean(1, keepdim=True) * scale).detach()
    return u * scale + bias


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("widths", [[5, 5, 5, 5], [4, 7, 3, 6]], ids=["square", "tapered"])
@pytest.mark.parametrize("bias_std", [0.0, 0.3])
@pytest.mark.parametrize("normalize", signal.NORMALIZATIONS)
@pytest.mark.parametrize("residual", [None, -0.7])
def test_moments_are_those_of_autograd(name, widths, bias_std, normalize, residual):
    activation, networks, samples = ACTIVATIONS[name], 3, 4
    weights = given(widths, networks)
    x_0 = torch.stack([inputs(samples, widths[0], n) for n in range(networks)])
    options = {"networks": networks, "inputs": x_0, "bias_std": bias_std, "dtype": torch.float64, "seed": 11}
    options |= {"normalize": normalize, "residual": residual}
    observe = {"u": lambda u: nn.functional.pad(u, (0, max(widths) - u.shape[-1]))}
    trace = propagate(widths, weights, activation, observe=observe, **options)
    observed = torch.from_numpy(trace.observed["u"])
    stream = generator(11)
    biases = [bias_std * torch.empty(networks, 1, n).double().normal_(generator=stream) for n in widths[1:] if bias_std]
    gradient = torch.empty(networks, samples, widths[-1]).double().normal_(generator=stream)

    x, entering, us = x_0.clone().requires_grad_(), [], []
    start = x
    for layer, scheme in enumerate(weights):
        entering.append(x)
        u = torch.einsum("rji,rti->rtj", scheme.stack, x)
        if bias_std:
            u = u + biases[layer]
        us.append(u)
        v = normalized(u, normalize)
        branch = v if activation == "linear" else activation(v.clone())
        x = x + residual * branch if residual is not None and x.shape == u.shape else branch
        torch.testing.assert_close(observed[:, layer, :, : u.shape[-1]], u)
    loss = (gradient * x).sum()
    deltas = (
        torch.autograd.grad(loss, [start, *us], allow_unused=True, materialize_grads=True)
        if loss.requires_grad
        else [torch.zeros_like(each) for each in (start, *us)]
    )
    expected = {
        "forward": [each.square().mean((1, 2)) for each in (start, *us)],
        "mean_squared": [each.mean(1).square().mean(1) for each in (start, *us)],
        "variance": [each.var(1, correction=0).mean(1) for each in (start, *us)],
        "activations": [each.square().mean((1, 2)) for each in (*entering, x)],
        "backward": [each.square().mean((1, 2)) for each in deltas],
        "weight_gradient": [
            torch.einsum("rtj,rti->rtji", d, e).square().mean((1, 2, 3))
            for d, e in zip(deltas[1:], entering, strict=True)
        ],
    }
    for moment, values in expected.items():
        actual = torch.from_numpy(getattr(trace, moment))
        torch.testing.assert_close(actual, torch.stack(values, 1).detach(), rtol=1e-9, atol=1e-12)


def test_plain_network_of_torch_gives_the_same_moments():
    torch_model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh()).double()
    initialize(torch_model, "lecun_normal", generator=generator(12))
    stacks = [Given("given", torch_model[layer].weight.detach()[None]) for layer in (0, 2)]
    x = inputs(5, 6)
    trace = propagate([6, 9, 4], stacks, torch.tanh, networks=1, inputs=x, dtype=torch.float64, seed=12)
    gradient = torch.empty(1, 5, 4).double().normal_(generator=generator(12))[0]
    total = torch.zeros(2)
    for sample in range(5):
        torch_model.zero_grad()
        (torch_model(x[sample]) @ gradient[sample]).backward()
        total = total + torch.stack([torch_model[layer].weight.grad.square().mean() for layer in (0, 2)])
    torch.testing.assert_close(torch.from_numpy(trace.weight_gradient[0]), total / 5, rtol=1e-9, atol=0)


def test_batch_normalisation_is_that_of_torch_in_training():
    widths, samples = [6, 9, 4], 7
    weights = given(widths, 1)
    layers = [nn.Linear(a, b, bias=False).double() for a, b in itertools.pairwise(widths)]
    for layer, scheme in zip(layers, weights, strict=True):
        layer.weight.data = scheme.stack[0]
    norms = [nn.BatchNorm1d(n).double() for n in widths[1:]]
    model = nn.Sequential(layers[0], norms[0], nn.Tanh(), layers[1], norms[1], nn.Tanh())
    x = inputs(samples, 6).requires_grad_()
    trace = propagate(widths, weights, "tanh", networks=1, inputs=x, normalize="batch", dtype=torch.float64, seed=12)
    gradient = torch.empty(1, samples, 4).double().normal_(generator=generator(12))[0]
    model(x).backward(gradient)
    np.testing.assert_allclose(trace.backward[0, 0], x.grad.square().mean(), rtol=1e-9)
    np.testing.assert_allclose(trace.activations[0, -1], model(x).square().mean().item(), rtol=1e-9)
    assert norms[0].eps == signal.EPS


@pytest.mark.parametrize("normalize", ["batch", "scale_and_bias"])
def test_normalised_signals_forget_their_size_and_where_they_stand(normalize):
    # but for EPS: where the variance is as small as that, it counts
    x, options = inputs(6, 40), {"networks": 5, "normalize": normalize, "dtype": torch.float64}
    observe = {"u": lambda u: u}
    far = propagate([40] * 4, schemes.he_normal.replace(gain=100), "linear", inputs=x, observe=observe, **options)
    np.testing.assert_allclose(far.activations[:, 1:], 1, rtol=1e-4)
    variance = far.observed["u"].var(2).mean(-1)
    np.testing.assert_allclose(far.variance[:, 1:], variance, rtol=1e-9)  # moments of what enters the normalisation
    assert (far.variance[:, 1:] > 100).all()
    near = propagate([40, 40], schemes.he_normal.replace(gain=1e-3), "linear", inputs=x, observe=observe, **options)
    variance = near.observed["u"].var(2)
    shrunk = (variance / (variance + nn.BatchNorm1d(1).eps)).mean((1, 2))
    np.testing.assert_allclose(near.activations[:, 1], shrunk, rtol=1e-9)
    assert (shrunk < 0.5).all()


@pytest.mark.parametrize("sampler", ["explicit", "weight_free"])
def test_skip_connections_add_their_share_where_widths_agree(sampler):
    # E|x|² and E|g|² grow by 1 + α² in each layer that has one, linear and of variance 1/n
    alpha, options = 0.6, {"networks": 3000, "samples": 2, "residual": 0.6, "sampler": sampler, "seed": 22}
    trace = propagate([30] * 5, "lecun_normal", "linear", **options)
    growth = (1 + alpha**2) ** np.arange(5)
    assert agrees(trace.activations, growth)
    assert agrees(trace.forward[:, 1:], growth[:-1])
    assert agrees(trace.backward[:, 0], growth[-1])
    assert agrees(trace.backward[:, 1:], alpha**2 * growth[-2::-1])
    narrowing = propagate([30, 30, 20, 20], "lecun_normal", "linear", **options)
    assert agrees(narrowing.activations, [1, growth[1], growth[1], growth[2]])


def test_skip_connection_of_zero_carries_the_input_and_nothing_else():
    trace = propagate([8] * 4, "he_normal", "relu", networks=5, samples=3, residual=0, dtype=torch.float64)
    np.testing.assert_array_equal(trace.activations, trace.activations[:, :1].repeat(4, 1))
    assert (trace.backward[:, 1:] == 0).all()
    assert (trace.weight_gradient == 0).all()
    assert (trace.backward[:, 0] > 0).all()


def test_activation_with_parameters_gets_no_gradient_and_records_none():
    activation = nn.PReLU()
    propagate([4, 4, 4], "he_normal", activation, networks=2, samples=3)
    assert activation.weight.grad is None
    assert activation.weight.requires_grad
    assert activation.weight.item() == 0.25


# --- what a trace holds -----------------------------------------------------------------------


def test_forward_is_the_sum_of_squared_mean_and_variance():
    trace = propagate([9, 8, 7], "he_normal", torch.relu, networks=6, samples=5, bias_std=0.1)
    np.testing.assert_array_equal(trace.forward, trace.mean_squared + trace.variance)
    assert (trace.mean_squared > 0).all()
    assert (trace.variance > 0).all()


def test_single_sample_has_no_variance():
    trace = propagate([9, 8, 7], "he_normal", torch.relu, networks=6, samples=1)
    assert (trace.variance == 0).all()


@pytest.mark.parametrize("widths", [[3, 4], [5, 1, 2, 6]])
def test_shapes_are_networks_by_layers(widths):
    trace = propagate(widths, "he_normal", torch.relu, networks=7, samples=2)
    depth = len(widths) - 1
    for moment in MOMENTS:
        assert getattr(trace, moment).shape == (7, depth if moment == "weight_gradient" else depth + 1)
        assert getattr(trace, moment).dtype == np.float64
    assert trace.observed == {}


def test_mean_and_standard_error_are_over_networks():
    trace = propagate([9, 8, 7], "he_normal", torch.relu, networks=12, samples=5)
    for moment in MOMENTS:
        values = getattr(trace, moment)
        np.testing.assert_allclose(getattr(trace.mean, moment), values.mean(0))
        np.testing.assert_allclose(getattr(trace.standard_error, moment), values.std(0, ddof=1) / math.sqrt(12))


def test_single_network_has_no_standard_error():
    trace = propagate([3, 4], "he_normal", networks=1, samples=2)
    with pytest.raises(ValueError, match="at least two"):
        _ = trace.standard_error


@pytest.mark.parametrize("chunk_bytes", [1, 8 * 12 * 3, 8 * 12 * 4, 10**9])
def test_chunks_make_up_all_networks_in_order(monkeypatch, chunk_bytes):
    monkeypatch.setattr(signal, "CHUNK_BYTES", chunk_bytes)
    x = torch.stack([inputs(2, 3, n) for n in range(10)])
    observe = {"first": lambda u: u[:, 0, 0]}
    trace = propagate([3, 2, 3], constant(0.3), torch.tanh, networks=10, inputs=x, observe=observe, dtype=torch.float64)
    u = 0.3 * x.sum(-1)
    np.testing.assert_allclose(trace.forward[:, 0], x.square().mean((1, 2)))
    np.testing.assert_allclose(trace.forward[:, 1], u.square().mean(1))
    np.testing.assert_allclose(trace.observed["first"], torch.stack([u[:, 0], 0.6 * torch.tanh(u)[:, 0]], 1))
    assert len(set(trace.backward[:, 2])) == 10


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 2000 * 7])
def test_networks_of_all_chunks_are_independent_draws(monkeypatch, chunk_bytes):
    monkeypatch.setattr(signal, "CHUNK_BYTES", chunk_bytes)
    trace = propagate([20, 100], "lecun_normal", networks=60, inputs=torch.ones(1, 20), seed=13)
    assert len(set(trace.forward[:, 1])) == 60
    assert stats.kstest(100 * trace.forward[:, 1], stats.chi2(100).cdf).pvalue > P


def test_inputs_may_be_shared_or_one_set_a_network():
    x = inputs(4, 6)
    options = {"networks": 3, "dtype": torch.float64, "seed": 14}
    shared = propagate([6, 5, 4], "he_normal", torch.relu, inputs=x, **options)
    repeated = propagate([6, 5, 4], "he_normal", torch.relu, inputs=x.repeat(3, 1, 1), **options)
    other = propagate([6, 5, 4], "he_normal", torch.relu, inputs=torch.stack([x, 2 * x, 3 * x]), **options)
    for moment in MOMENTS:
        np.testing.assert_allclose(getattr(shared, moment), getattr(repeated, moment), rtol=1e-12)
    factor = np.array([[1], [4], [9]])
    np.testing.assert_allclose(other.forward, factor * shared.forward, rtol=1e-12)
    np.testing.assert_allclose(other.weight_gradient, factor * shared.weight_gradient, rtol=1e-12)
    np.testing.assert_allclose(other.backward, shared.backward, rtol=1e-12)


@pytest.mark.parametrize("activation", ["linear", nn.ReLU(inplace=True)])
@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6)])
def test_inputs_are_only_read(activation, shape):
    x = torch.randn(shape, generator=generator(15)).requires_grad_()
    before = x.detach().clone()
    propagate([6, 6, 6], "he_normal", activation, networks=3, inputs=x)
    assert torch.equal(x, before)
    assert x.grad is None
    assert x.is_leaf


def test_each_layer_may_have_its_own_scheme():
    layers = [constant(1.0), "zeros", schemes.he_normal.replace(gain=3.0)]
    trace = propagate([4, 3, 2, 5], layers, networks=2, inputs=torch.ones(1, 4), bias_std=0)
    np.testing.assert_allclose(trace.forward[:, :3], [[1, 16, 0]] * 2, rtol=1e-6)
    swapped = propagate([40, 50, 60], ["he_normal", "lecun_normal"], networks=1500, samples=4, seed=16)
    assert agrees(swapped.forward, [1, 2, 2])


def test_observed_statistics_stand_beside_the_moments_whatever_their_name():
    observe = {
        "forward": lambda u: u.square().mean((1, 2)),
        "variance": lambda u: u,
        "mean": lambda u: u.mean(1),
        "positive": lambda u: (u > 0).sum((1, 2)),
    }
    trace = propagate([5, 6, 6], "he_normal", torch.relu, networks=3, samples=4, observe=observe, seed=17)
    plain = propagate([5, 6, 6], "he_normal", torch.relu, networks=3, samples=4, seed=17)
    for moment in MOMENTS:
        np.testing.assert_array_equal(getattr(trace, moment), getattr(plain, moment))
    shapes = {name: values.shape for name, values in trace.observed.items()}
    assert shapes == {"forward": (3, 2), "variance": (3, 2, 4, 6), "mean": (3, 2, 6), "positive": (3, 2)}
    np.testing.assert_allclose(trace.observed["forward"], trace.forward[:, 1:], rtol=1e-5)
    u = trace.observed["variance"]
    np.testing.assert_allclose((u.astype(float) ** 2).mean((2, 3)), trace.forward[:, 1:], rtol=1e-5)
    np.testing.assert_array_equal((u > 0).sum((2, 3)), trace.observed["positive"])


def test_observed_pre_activations_survive_an_activation_in_place():
    observe = {"u": lambda u: u}
    trace = propagate([5, 6, 6], "he_normal", nn.ReLU(inplace=True), networks=20, samples=9, observe=observe)
    assert (trace.observed["u"] < 0).any(axis=(0, 2, 3)).all()


# --- precision, seeds, state ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_precision_gives_the_same_moments_up_to_rounding(dtype):
    widths = [16, 16, 16]
    weights = given(widths, 8)
    x = inputs(4, 16)
    options = {"networks": 8, "inputs": x, "observe": {"u": lambda u: u[:, 0]}}
    exact = propagate(widths, weights, torch.tanh, dtype=torch.float64, **options)
    trace = propagate(widths, weights, torch.tanh, dtype=dtype, **options)
    rounding = 40 * torch.finfo(dtype).eps
    np.testing.assert_allclose(trace.forward, exact.forward, rtol=rounding)
    np.testing.assert_allclose(trace.observed["u"], exact.observed["u"], atol=rounding)
    assert np.isfinite(trace.backward).all()
    if dtype != torch.float64:
        assert (trace.forward != exact.forward).all()


def test_moments_are_averaged_in_double_precision():
    x = torch.full((2, 4000), 100.0, dtype=torch.float16)  # the sum of squares overflows in half precision
    trace = propagate([4000, 3], constant(1e-3), networks=2, inputs=x, dtype=torch.float16)
    np.testing.assert_allclose(trace.forward[:, 0], 10_000, rtol=1e-14)


def test_same_seed_gives_the_same_networks_and_others_give_others():
    runs = [
        propagate([6, 5, 4], "he_uniform", torch.tanh, networks=3, samples=2, bias_std=0.1, seed=seed)
        for seed in (18, 18, 19)
    ]
    for moment in MOMENTS:
        np.testing.assert_array_equal(getattr(runs[0], moment), getattr(runs[1], moment))
        assert (getattr(runs[0], moment) != getattr(runs[2], moment)).all()


def test_networks_of_a_run_differ():
    trace = propagate([6, 5, 4], "he_uniform", torch.tanh, networks=50, inputs=torch.ones(2, 6))
    for moment in ("forward", "backward"):
        assert len(set(getattr(trace, moment)[:, 1])) == 50


def test_global_random_state_is_untouched():
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    propagate([6, 5, 4], ["he_normal", "orthogonal"], torch.relu, networks=3, samples=2, bias_std=0.1)
    propagate([6, 5, 4], ["glorot_truncated", "torch_default"], torch.relu, networks=3, samples=2)
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


def test_gradient_mode_of_the_caller_is_kept():
    propagate([3, 3], "he_normal", torch.relu, networks=2, samples=2)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        trace = propagate([3, 3], "he_normal", torch.tanh, networks=2, samples=2)
        assert not torch.is_grad_enabled()
    assert (trace.backward > 0).all()


# --- what is refused --------------------------------------------------------------------------

X = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"widths": []}, ValueError, "widths must name"),
        ({"widths": [3]}, ValueError, "widths must name"),
        ({"widths": 3}, TypeError, "widths must be a sequence"),
        ({"widths": None}, TypeError, "widths must be a sequence"),
        ({"widths": [3, 0]}, ValueError, "each of widths must be at least 1, got 0"),
        ({"widths": [3, -4]}, ValueError, "got -4"),
        ({"widths": [3, 4.0]}, TypeError, "each of widths must be an integer, got 4.0"),
        ({"widths": [3, True]}, TypeError, "got True"),
        ({"widths": "34"}, TypeError, "got '3'"),
        ({"scheme": "he"}, ValueError, "scheme must be one of"),
        ({"scheme": None}, TypeError, "a name or a scheme, got NoneType"),
        ({"scheme": nn.init.zeros_}, TypeError, "a name or a scheme"),
        ({"scheme": []}, ValueError, "one for each of 2 layers, got 0"),
        ({"scheme": ["zeros"]}, ValueError, "one for each of 2 layers, got 1"),
        ({"scheme": ["zeros"] * 3}, ValueError, "one for each of 2 layers, got 3"),
        ({"scheme": ["zeros", None]}, TypeError, "a name or a scheme"),
        ({"scheme": schemes.he_normal.replace(gain=1e39)}, ValueError, "cannot hold"),
        ({"activation": 3}, TypeError, "activation must be a name, a module or a function, got 3"),
        ({"activation": "rleu"}, ValueError, "activation must be one of linear, relu"),
        ({"activation": lambda u: u.mean()}, ValueError, r"shape it gets, \(5, 2, 4\), got \(\)"),
        ({"activation": lambda u: u[:, :, :1]}, ValueError, r"got \(5, 2, 1\)"),
        ({"networks": 0}, ValueError, "networks must be at least 1, got 0"),
        ({"networks": -1}, ValueError, "got -1"),
        ({"networks": 2.0}, TypeError, "networks must be an integer, got 2.0"),
        ({"networks": True}, TypeError, "got True"),
        ({"samples": 0}, ValueError, "samples must be at least 1, got 0"),
        ({"samples": "2"}, TypeError, "samples must be an integer, got '2'"),
        ({"samples": None}, ValueError, "give either samples"),
        ({"inputs": X}, ValueError, "give either samples"),
        ({"samples": None, "inputs": X.numpy()}, TypeError, "inputs must be a floating-point tensor, got ndarray"),
        ({"samples": None, "inputs": X.int()}, TypeError, "got torch.int32"),
        ({"samples": None, "inputs": X.cfloat()}, TypeError, "got torch.complex64"),
        ({"samples": None, "inputs": X[0]}, ValueError, r"inputs must have shape .* got \(3,\)"),
        ({"samples": None, "inputs": X.T}, ValueError, r"got \(3, 4\)"),
        ({"samples": None, "inputs": X[:0]}, ValueError, r"got \(0, 3\)"),
        ({"samples": None, "inputs": X.expand(4, 4, 3)}, ValueError, r"\(5, samples, 3\), got \(4, 4, 3\)"),
        ({"samples": None, "inputs": X.expand(5, 1, 4, 3)}, ValueError, r"got \(5, 1, 4, 3\)"),
        ({"bias_std": -0.1}, ValueError, "bias_std must be finite and not negative, got -0.1"),
        ({"bias_std": math.nan}, ValueError, "got nan"),
        ({"bias_std": math.inf}, ValueError, "got inf"),
        ({"observe": abs}, TypeError, "observe must map names to callables"),
        ({"observe": {"a": lambda u: u.mean()}}, ValueError, r"observe\['a'\] .* \(5, ...\), got \(\)"),
        ({"observe": {"a": lambda u: u.mean(0)}}, ValueError, r"got \(2, 4\)"),
        ({"observe": {"a": lambda u: 1.0}}, ValueError, "got float"),
        ({"normalize": "layer"}, ValueError, "normalize must be one of None, 'batch', 'scale_and_bias', got 'layer'"),
        ({"normalize": True}, ValueError, "normalize must be one of .* got True"),
        ({"normalize": "batch", "samples": 1}, ValueError, "normalize needs at least 2 samples, got 1"),
        ({"normalize": "scale_and_bias", "samples": None, "inputs": X[:1]}, ValueError, "at least 2 samples, got 1"),
        ({"residual": math.nan}, ValueError, "residual must be a finite number or None, got nan"),
        ({"residual": -math.inf}, ValueError, "residual must be .* got -inf"),
        ({"sampler": "fast"}, ValueError, "sampler must be one of auto, explicit, weight_free, got 'fast'"),
        ({"sampler": None}, ValueError, "sampler must be one of .* got None"),
        (
            {"sampler": "weight_free", "scheme": "he_uniform"},
            ValueError,
            "normal distribution .* got scheme 'he_uniform'",
        ),
        ({"sampler": "weight_free", "scheme": "he_truncated"}, ValueError, "got scheme 'he_truncated'"),
        ({"sampler": "weight_free", "scheme": ["he_normal", "orthogonal"]}, ValueError, "got scheme 'orthogonal'"),
        ({"sampler": "weight_free", "scheme": "zeros"}, ValueError, "got scheme 'zeros'"),
        ({"sampler": "weight_free", "dtype": torch.float16}, ValueError, "torch.float64, got dtype torch.float16"),
        ({"sampler": "weight_free", "dtype": torch.bfloat16}, ValueError, "got dtype torch.bfloat16"),
        ({"sampler": "weight_free", "activation": nn.Dropout(0.5)}, ValueError, "same value every time"),
        ({"sampler": "weight_free", "activation": lambda u: u[:, :, :1]}, ValueError, r"got \(5, 2, 1\)"),
        ({"seed": -1}, ValueError, "got -1"),
        ({"seed": None}, TypeError, "n must be an integer"),
        ({"dtype": torch.int64}, ValueError, "dtype must be a floating-point type, got torch.int64"),
        ({"dtype": torch.complex64}, ValueError, "got torch.complex64"),
        ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype, got 'float32'"),
        ({"dtype": np.float64}, TypeError, "dtype must be a torch.dtype"),
    ],
)
def test_bad_argument_is_named_with_its_value(changes, error, message):
    arguments = {"widths": [3, 4, 2], "scheme": "he_normal", "activation": torch.relu, "networks": 5, "samples": 2}
    arguments |= changes
    positional = [arguments.pop(name) for name in ("widths", "scheme", "activation")]
    with pytest.raises(error, match=message):
        propagate(*positional, **arguments)


def test_widths_may_be_any_sequence_of_integers():
    runs = [
        propagate(widths, "he_normal", networks=2, samples=2).forward
        for widths in ([3, 4], (3, 4), range(3, 5), np.array([3, 4]), torch.Size([3, 4]))
    ]
    assert all((run == runs[0]).all() for run in runs)


def test_random_numbers_of_numpy_play_no_part():
    x = torch.from_numpy(rng(20).standard_normal((3, 4)))
    runs = [propagate([4, 3], "he_normal", networks=2, inputs=x, seed=21).forward for _ in range(2)]
    assert (runs[0] == runs[1]).all()


def test_chunks_count_the_signals_too(monkeypatch):
    monkeypatch.setattr(signal, "CHUNK_BYTES", 10 * 4 * (3 * 4 * 4 + 50 * 4 * 4))  # ten networks
    counts = []
    observe = {"count": lambda u: (counts.append(len(u)), u[:, 0, 0])[1]}
    propagate([4] * 4, "he_normal", networks=25, samples=50, observe=observe, sampler="explicit")
    assert set(counts) == {10, 5}


@pytest.mark.parametrize("sampler", ["explicit", "weight_free"])
def test_activation_with_parameters_takes_the_type_of_the_computation_and_stays_as_it_is(sampler):
    class Counting(nn.PReLU):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    activation = Counting()
    options = {"networks": 4, "samples": 3, "sampler": sampler, "seed": 17}
    one = propagate([8, 8, 8], "he_normal", activation, dtype=torch.float64, **options)
    two = propagate([8, 8, 8], "he_normal", lambda u: torch.where(u > 0, u, u / 4), dtype=torch.float64, **options)
    np.testing.assert_allclose(one.backward, two.backward, rtol=1e-12)
    assert activation.calls == 0
    assert activation.weight.dtype == torch.float32


def test_moments_of_half_precision_signals_are_not_rounded_again():
    kept = []
    observe = {"u": lambda u: (kept.append(u.double()), u[:, 0, 0])[1]}
    options = {"networks": 3, "samples": 32, "observe": observe, "dtype": torch.bfloat16}
    trace = propagate([64] * 6, "he_normal", "relu", **options)
    for l, u in enumerate(kept, 1):
        np.testing.assert_allclose(trace.forward[:, l], u.square().mean((1, 2)), rtol=1e-12)


@pytest.mark.parametrize("residual", ["a", True])
def test_residual_must_be_a_number(residual):
    with pytest.raises(TypeError, match="residual must be a finite number or None"):
        propagate([3, 3], "he_normal", networks=2, samples=2, residual=residual)
