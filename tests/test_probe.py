"""Probe reads the moments of the book off any model, sees which activation follows, and changes nothing."""

import dataclasses
import json
import math
import time
import warnings
from collections import OrderedDict, deque, namedtuple

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from untouched import snapshot, without
from zoo import HEALTHY, drawn, integers, mlp, normal

from initlib import constant, generator, initialize, layer_moments, meanfield, nets, probe, propagate
from initlib.fans import fans
from initlib.follow import ACTIVATIONS, SATURATED, Follow

plt.switch_backend("agg")

T = 40


def square(output):
    return output.square().sum()


# --- the numbers ------------------------------------------------------------------------------


def test_numbers_are_those_of_autograd_written_out():
    model, x = drawn(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))), normal(T, 3)
    u1 = model[0](x)
    u2 = model[2](u1.tanh())
    slopes = torch.autograd.grad(u2.square().sum(), [u1, u2, model[0].weight, model[2].weight])
    found = probe(model, x, square)
    assert found.names == ("0", "2")
    assert found.loss == pytest.approx(u2.square().sum().item(), rel=1e-6)
    for k, u in enumerate((u1, u2)):
        assert found.forward[k] == pytest.approx(u.square().mean().item(), rel=1e-5)
        assert found.backward[k] == pytest.approx(slopes[k].square().mean().item(), rel=1e-5)
        assert found.weight_gradient[k] == pytest.approx(slopes[2 + k].square().mean().sqrt().item(), rel=1e-5)
        assert found.weight[k] == pytest.approx(model[2 * k].weight.square().mean().sqrt().item(), rel=1e-5)
    assert found.saturated[0] == pytest.approx((u1.abs() > SATURATED["tanh"]).double().mean().item())
    assert np.isnan(found.saturated[1])
    assert found.activation == ("tanh", "")


def test_forward_moments_are_those_of_layer_moments():
    model, x = mlp([5, 20, 20, 3]), normal(T, 5)
    found, expected = probe(model, x), layer_moments(model, x)
    for name in ("names", "forward", "mean_squared", "variance"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_all_moments_agree_with_a_trace_of_random_networks():
    width, depth, networks, samples = 30, 4, 150, 20
    widths, x = [width] * (depth + 1), normal(20, width)
    trace = propagate(widths, "he_normal", "relu", networks=networks, inputs=x, seed=7)
    model = nn.Sequential(*nets.mlp(widths, bias=False), nn.ReLU())  # a trace has an activation behind the last layer
    found = {name: np.empty((networks, depth)) for name in ("forward", "variance", "backward", "weight_gradient")}
    g = generator(8)
    for k in range(networks):
        initialize(model, "he_normal", generator=g)
        measured = probe(model, x, seed=k)
        for name, values in found.items():
            values[k] = getattr(measured, name)
    # The gradient of a weight is a sum over samples, whose read-outs are independent.
    found["weight_gradient"] = found["weight_gradient"] ** 2 / samples
    for name, ours in found.items():
        theirs = getattr(trace, name)[:, -depth:]
        error = np.hypot(ours.std(0), theirs.std(0)) / np.sqrt(networks)
        assert (np.abs(ours.mean(0) - theirs.mean(0)) < 5.5 * error).all(), name
        assert (error < 0.2 * theirs.mean(0)).all(), name


def test_wide_networks_have_the_sample_variance_of_the_mean_field():
    width, networks = 400, 32
    found = (probe(mlp([width] * 6, n=100 + k), normal(40, width, n=k)) for k in range(networks))
    share = np.array([each.variance / each.forward * 40 / 39 for each in found])
    rho, expected = 0.0, []
    for _ in range(5):
        expected.append(1 - rho)
        rho = meanfield.relu_correlation(rho)
    # 8 / width: of the order of what layers of finite width change
    tolerance = 5.5 * share.std(0) / np.sqrt(networks) + 8 / width * np.array(expected)
    assert (np.abs(share.mean(0) - expected) < tolerance).all()
    assert (tolerance < 0.15 * np.array(expected)).all()


LAYERS = {
    "linear": (lambda: nn.Linear(5, 4), (6, 5)),
    "linear_on_tokens": (lambda: nn.Linear(5, 4), (3, 2, 5)),
    "linear_without_batch": (lambda: nn.Linear(5, 4), (5,)),
    "conv1d_padded": (lambda: nn.Conv1d(2, 3, 3, padding=2), (4, 2, 5)),
    "conv2d_strided_grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2, padding=1), (3, 4, 6, 6)),
    "conv2d_dilated_same": (lambda: nn.Conv2d(2, 3, 3, dilation=2, padding="same"), (3, 2, 5, 5)),
    "conv2d_circular": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), (3, 2, 4, 4)),
    "conv2d_without_batch": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, padding=1), (2, 2, 3, 3, 3)),
    "transposed1d_grouped": (lambda: nn.ConvTranspose1d(4, 4, 3, groups=2), (3, 4, 5)),
    "transposed2d": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1), (2, 3, 4, 4)),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 2, 2, stride=2), (2, 2, 2, 2, 2)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_prediction_is_the_exact_mean_over_independent_weights(kind):
    build, shape = LAYERS[kind]
    layer, x = build().double(), normal(*shape).double() + 0.5
    found = probe(layer, x)
    bias = layer.bias.detach().clone()
    flat, total = layer.weight.detach().reshape(-1), 0.0
    second = flat.square().mean().item()
    with torch.no_grad():
        layer.bias.zero_()
        for k in range(len(flat)):  # uncorrelated weights add up, one by one
            layer.weight.zero_().view(-1)[k] = 1.0
            total += layer(x).square().mean().item()
    assert found.predicted[0] == pytest.approx(second * total + bias.square().mean().item(), rel=1e-9)


def test_measured_over_predicted_is_one_on_average_where_samples_are_alike():
    ratios = []
    for n in range(200):
        found = probe(mlp([20, 20, 5], n=n), normal(10, 20) + 1)
        ratios.append(found.forward / found.predicted)
    ratios = np.array(ratios)
    error = ratios.std(0, ddof=1) / np.sqrt(len(ratios))
    assert (error < 0.05).all()
    assert (np.abs(ratios.mean(0) - 1) < 5.5 * error).all()


def test_scheme_is_recognised():
    widths, x = [300, 200, 400], normal(20, 300)
    for scheme, name in {
        "he_normal": "he", "he_uniform": "he", "he_truncated": "he", "lecun_normal": "lecun",
        "lecun_uniform": "lecun", "glorot_normal": "glorot", "glorot_uniform": "glorot",
        "torch_default": "torch default", "orthogonal": "orthogonal", "zeros": "zero",
    }.items():  # fmt: skip
        assert probe(mlp(widths, scheme), x).scheme == (name, name), scheme
    assert probe(mlp(widths, constant(0.01)), x).scheme == ("constant", "constant")
    model = nets.mlp(widths)
    for layer in model[::2]:
        nn.init.trunc_normal_(layer.weight, std=0.02, generator=generator(1))  # bounds of ±2: no truncation at all
    found = probe(model, x)
    assert found.scheme == ("none", "none")
    np.testing.assert_allclose(found.weight, 0.02, rtol=0.02)


def test_grouped_convolution_has_the_fan_of_its_group():
    model = nn.Sequential(nn.Conv2d(32, 64, 3, groups=4), nn.ReLU(), nn.Conv2d(64, 64, 3, groups=64))
    found = probe(drawn(model), normal(2, 32, 8, 8))
    assert found.scheme == ("he", "he")
    assert found.weight[0] ** 2 * fans(model[0]).n_in == pytest.approx(2, rel=0.1)


# --- which activation follows -----------------------------------------------------------------


class Then(nn.Module):
    """A layer, and whatever a function makes of what leaves it."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function
        self.norm = nn.BatchNorm1d(6)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.function(self, self.layer(x))


BEHIND = {
    "module": ("relu", lambda model, u: nn.ReLU()(u)),
    "in_place": ("relu", lambda model, u: nn.ReLU(inplace=True)(u)),
    "function": ("relu", lambda model, u: F.relu(u)),
    "function_in_place": ("relu", lambda model, u: torch.relu_(u)),
    "method": ("relu", lambda model, u: u.relu()),
    "clamp": ("relu", lambda model, u: u.clamp(min=0)),
    "clamp_min": ("relu", lambda model, u: torch.clamp_min(u, 0)),
    "threshold": ("relu", lambda model, u: F.threshold(u, 0, 0)),
    "relu6": ("relu6", lambda model, u: nn.ReLU6()(u)),
    "tanh": ("tanh", lambda model, u: torch.tanh(u)),
    "tanh_in_place": ("tanh", lambda model, u: u.tanh_()),
    "sigmoid": ("sigmoid", lambda model, u: u.sigmoid()),
    "softsign": ("softsign", lambda model, u: nn.Softsign()(u)),
    "hardtanh": ("hardtanh", lambda model, u: nn.Hardtanh()(u)),
    "hardsigmoid": ("hardsigmoid", lambda model, u: F.hardsigmoid(u)),
    "erf": ("erf", lambda model, u: torch.erf(u)),
    "gelu": ("gelu", lambda model, u: nn.GELU()(u)),
    "elementwise": ("tanh", lambda model, u: nets.Elementwise("lecun_tanh")(u)),
    "norm": ("relu", lambda model, u: F.relu(model.norm(u))),
    "dropout": ("relu", lambda model, u: F.relu(F.dropout(u, 0.5))),
    "reshape": ("relu", lambda model, u: F.relu(u.reshape(2, -1, 6))),
    "transpose": ("relu", lambda model, u: F.relu(u.transpose(0, 1))),
    "turned": ("relu", lambda model, u: F.relu(u.mT)),
    "turned_whole": ("relu", lambda model, u: F.relu(u.T)),
    "adjoint": ("relu", lambda model, u: F.relu(u.mH)),
    "permute": ("relu", lambda model, u: u.permute(dims=(1, 0)).relu()),
    "unsqueeze": ("relu", lambda model, u: F.relu(u.unsqueeze(-1))),
    "gain_and_shift": ("relu", lambda model, u: F.relu(2 * u * model.gain + 0.1 - model.gain)),
    "clone": ("relu", lambda model, u: F.relu(u.clone().contiguous())),
    "first_of_two": ("tanh", lambda model, u: u.tanh() + u.relu()),
    "none": ("", lambda model, u: u),
    "unknown": ("", lambda model, u: F.relu(u.cumsum(0))),
    "sum_of_branches": ("", lambda model, u: F.relu(u + u.square())),
    "scale_of_another": ("", lambda model, u: F.relu(u * u.detach().exp())),
    "other_clamp": ("", lambda model, u: u.clamp(-1, 1)),
}


@pytest.mark.parametrize("case", BEHIND)
def test_activation_behind_a_layer_is_found(case):
    name, function = BEHIND[case]
    model = Then(nn.Linear(5, 6), function)
    with torch.no_grad():  # one unit that is exactly zero, and one just below: both are dead
        model.layer.weight[:2] = 0.0
        model.layer.bias[:2] = torch.tensor([0.0, -1e-3])
    found = probe(model, normal(T, 5))
    assert found.activation == (name,)
    u = model.layer(normal(T, 5)).detach()
    if case in ("gain_and_shift", "norm", "dropout"):
        return
    dead = (u <= 0).all(0).double().mean().item() if name.startswith("relu") else math.nan
    np.testing.assert_equal(found.dead, [dead])
    saturated = (u.abs() > SATURATED[name]).double().mean().item() if name in SATURATED else math.nan
    if case != "elementwise":
        np.testing.assert_allclose(found.saturated, [saturated])


def test_limits_of_saturation_are_where_the_slope_is_a_twentieth():
    for name, limit in SATURATED.items():
        function = getattr(torch, name, None) or getattr(F, name)
        u = torch.tensor([0.0, limit - 1e-6, limit + 1e-6], dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(function(u).sum(), u)
        assert slope[1] / slope[0] >= 0.05 - 1e-5
        assert slope[2] / slope[0] <= 0.05 + 1e-5
    assert set(SATURATED) < ACTIVATIONS


@pytest.mark.parametrize(
    "function",
    [
        lambda u: F.relu(u),
        lambda u: F.relu(u.permute(0, 2, 3, 1)),
        lambda u: F.relu(F.max_pool2d(u, 2)),
        lambda u: F.relu(u.flatten(2).transpose(1, 2)),
        lambda u: F.relu(u.flatten(2)),
        lambda u: F.relu(F.adaptive_max_pool2d(u, 1).flatten(1)),
        lambda u: F.relu(F.interpolate(u, scale_factor=2)),
    ],
    ids=["plain", "channels_last", "pooled", "tokens", "flat_positions", "global", "interpolated"],
)
def test_dead_channels_are_counted_wherever_the_channels_went(function):
    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 8, 3, padding=1)

        def forward(self, x):
            return function(self.conv(x))

    model = Conv()
    nn.init.constant_(model.conv.bias, 0.0)
    with torch.no_grad():
        model.conv.bias[:3] = -100.0
    assert probe(model, normal(8, 2, 8, 8)).dead == [3 / 8]


def test_units_that_cannot_be_told_apart_any_more_are_not_counted():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3)

        def forward(self, x):
            return F.relu(self.conv(x).flatten(1))

    found = probe(Flat(), normal(5, 2, 6, 6))
    assert found.activation == ("relu",)
    assert np.isnan(found.dead).all()


def test_tracking_does_not_keep_tensors_alive():
    follow = Follow(lambda *seen: None, lambda path: None)
    with follow:
        u = torch.ones(2)
        follow.track(u, "row", 0)
        v = u * 2
        assert len(follow.paths) == 2
        del u, v
    assert len(follow.paths) == 0


def test_scripted_part_is_no_error():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.ReLU())
    model = nn.Sequential(nn.Linear(3, 4), scripted, nn.Linear(4, 2))
    found = probe(model, normal(T, 3))
    assert found.names == ("0", "2")
    assert np.isfinite(found.backward).all()


# --- models of all kinds ----------------------------------------------------------------------


class Returns(nn.Module):
    """A layer whose output is wrapped."""

    def __init__(self, wrap):
        super().__init__()
        self.layer, self.wrap = nn.Linear(3, 4), wrap

    def forward(self, x, *, index=None):
        return self.wrap(self.layer(x))


@dataclasses.dataclass
class Record:
    logits: torch.Tensor
    hidden: object = None


Pair = namedtuple("Pair", "one other")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda u: u,
        lambda u: (u, u > 0),
        lambda u: [u, {"deep": [None, 3]}],
        lambda u: {"logits": u, "again": u},
        lambda u: OrderedDict(logits=u),
        lambda u: Record(u),
        lambda u: Pair(u, "text"),
    ],
    ids=["tensor", "tuple", "list", "dict", "ordered", "dataclass", "namedtuple"],
)
def test_outputs_of_all_kinds_are_read_out_with_unit_coefficients(wrap):
    found = probe(Returns(wrap), normal(2000, 3))
    assert found.backward[0] == pytest.approx(1, abs=6 * math.sqrt(2 / 8000))


def test_output_that_contains_itself_and_its_model_is_read_out_once():
    class Answer:
        def __init__(self, model, logits):
            self.model, self.logits, self.again, self.me = model, logits, [logits], self

    model = Returns(lambda u: u)
    expected = probe(model, normal(T, 3))
    model.wrap = lambda u: Answer(model, u)
    np.testing.assert_array_equal(probe(model, normal(T, 3)).backward, expected.backward)


def test_read_out_is_fixed_by_its_seed_and_by_nothing_else():
    model, x = mlp([4, 8, 3]), normal(T, 4)
    first = probe(model, x)
    torch.manual_seed(1)
    again, other = probe(model, x), probe(model, x, seed=1)
    assert (again.backward == first.backward).all()
    assert (other.backward != first.backward).all()


def test_layer_that_is_called_twice_has_two_rows():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(F.relu(self.layer(x)))

    found = probe(Twice(), normal(T, 4))
    assert found.names == ("layer", "layer (2)")
    assert found.weight_gradient[0] == found.weight_gradient[1] > 0
    assert found.activation == ("relu", "")


def test_tied_weight_gets_the_gradient_of_both_uses():
    model = nets.transformer(20, 8, 16, 1, heads=2, tied=True)
    nn.init.normal_(model.token.weight, std=0.1, generator=generator(1))
    tokens = torch.randint(20, (4, 8), generator=generator(2))
    found = probe(model, tokens, square)
    model(tokens).square().sum().backward()
    expected = model.head.weight.grad.square().mean().sqrt().item()
    assert found.weight_gradient[-1] == pytest.approx(expected, rel=1e-4)


def test_frozen_layers_have_a_gradient_at_their_output_and_none_at_their_weight():
    model, x = mlp([4, 8, 8, 3]), normal(T, 4)
    expected = probe(model, x)
    model.requires_grad_(False)
    found = probe(model, x)
    np.testing.assert_allclose(found.backward, expected.backward, rtol=1e-6)
    assert np.isnan(found.weight_gradient).all()
    assert found.findings == ()


def test_frozen_layer_may_be_rectified_in_place():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)), normal(T, 4)
    expected = probe(model, x)
    found = probe(model.requires_grad_(False), x)
    np.testing.assert_allclose(found.backward, expected.backward, rtol=1e-6)
    assert found.activation == expected.activation == ("relu", "")


def test_part_without_gradients_is_measured_forward():
    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = mlp([4, 8, 8]), nn.Linear(8, 2)

        def forward(self, x):
            with torch.no_grad():
                x = self.body(x)
            return self.head(x)

    model = Backbone()
    model.body.requires_grad_(False)
    found = probe(model, normal(T, 4))
    assert np.isnan(found.backward).tolist() == [True, True, False]
    assert np.isfinite(found.forward).all()
    assert found.findings == ()
    model.body.requires_grad_(True)
    assert [finding.kind for finding in probe(model, normal(T, 4)).findings] == ["no gradient"]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_surrounding_context_without_gradients_does_not_matter(context):
    model, x = mlp([4, 8, 3]), normal(T, 4)
    expected = probe(model, x)
    with context():
        found = probe(model, x)
    assert (found.backward == expected.backward).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_precisions_are_measured(dtype):
    model, x = mlp([32, 64, 64, 10]), normal(T, 32)
    expected, found = probe(model, x), probe(model.to(dtype), x.to(dtype))
    for name in ("forward", "variance", "backward", "weight", "weight_gradient", "predicted"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0.05)
    assert found.scheme == expected.scheme


def test_autocast_is_measured():
    class Auto(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp([32, 64, 10])

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x)

    found = probe(Auto(), normal(T, 32))
    assert np.isfinite(found.weight_gradient).all()
    assert found.findings == ()


def test_layers_that_a_checkpoint_calls_again_have_one_row():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = mlp([4, 8, 8]), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    model = Checkpointed()
    found = probe(model, normal(T, 4))
    assert found.names == ("body.0", "body.2", "head")
    assert np.isfinite(found.backward).all()


def test_checkpoint_that_cannot_be_differentiated_so_says_what_to_do():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body = nn.Linear(4, 4), mlp([4, 8, 2])

        def forward(self, x):
            return checkpoint(self.body, self.first(x), use_reentrant=True)

    model = Checkpointed()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        probe(model, normal(T, 4))
    assert snapshot(model) == before


class Product(nn.Module):
    """A linear layer that is written out, and a pooled embedding."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(9, 4)
        self.weight, self.bias = nn.Parameter(normal(4, 8)), nn.Parameter(torch.zeros(1, 8))
        self.own = nn.Parameter(normal(2, 2))
        self.cells, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, words):
        return self.head(self.cells((self.table(words) @ self.weight + self.bias)[:, None])[0])


def test_matrices_outside_of_layers_are_named_as_not_measured():
    found = probe(Product(), integers(9, T, 3))
    assert found.names == ("cells", "head")
    assert found.unseen == ("weight", "own")
    assert found.to_dict()["unseen"] == list(found.unseen)
    expected = "Not measured, as no layer that has a row holds them: weight, own."
    for page in (str(found), found._repr_html_()):
        assert expected in " ".join(page.split())
    assert probe(mlp([4, 8]), normal(T, 4)).unseen == ()
    found = dataclasses.replace(found, unseen=tuple("abcde"))
    assert "holds them: a, b, c and 2 more." in str(found)


ODD = {
    "functional_call": lambda layer, x: torch.func.functional_call(layer, dict(layer.named_parameters()), (x,)),
    "distribution": lambda layer, x: torch.distributions.Normal(layer(x), 1.0),
    "gradient_inside": lambda layer, x: torch.autograd.grad(layer(y := x.requires_grad_()).sum(), y, create_graph=True),
    "one_sample": lambda layer, x: layer(x[:1]),
    "empty_beside": lambda layer, x: (layer(x), x.new_zeros(0), None),
    "twice": lambda layer, x: layer(x) - layer(-x),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_models_are_measured_and_left_alone(kind):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = drawn(nn.Linear(4, 4)), 0
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            self.steps += 1
            self.last = x
            return ODD[kind](self.layer, x)

    model = Odd()
    for wrapped in (model, nn.DataParallel(model)):
        before = snapshot(model)
        found = probe(wrapped, normal(T, 4))
        assert np.isfinite(found.backward).all()
        assert found.findings == ()
        assert snapshot(model) == before
        assert model.calls == 0


def test_hook_of_the_user_acts_behind_the_measurement():
    model = mlp([4, 8, 3])
    expected = probe(model, normal(T, 4))
    handle = model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    found = probe(model, normal(T, 4))
    assert found.forward[0] == expected.forward[0]
    np.testing.assert_allclose(found.forward[1], 4 * expected.forward[1], rtol=1e-5)
    assert found.activation == expected.activation
    handle.remove()


def test_compiled_model_is_measured_without_compiling_for_it():
    model, x, graphs = mlp([3, 4, 2]), normal(T, 3), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the compiler
        compiled(x)
    found = probe(compiled, x)
    assert len(graphs) == 1
    assert (found.backward == probe(model, x).backward).all()
    assert found.activation == ("relu", "")


@pytest.mark.parametrize("training", [True, False])
def test_attention_of_torch_has_the_row_of_its_last_layer(training):
    model, x = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).train(training), normal(6, 5, 8)
    found = probe(model, x, square)
    u, _ = model.self_attn(x, x, x)
    assert found.names == ("self_attn", "linear1", "linear2")
    assert found.forward[0] == pytest.approx(u.square().mean().item(), rel=1e-5)
    assert np.isnan(found.predicted[0])
    assert found.weight[0] == pytest.approx(model.self_attn.out_proj.weight.square().mean().sqrt().item(), rel=1e-5)
    slope = torch.autograd.grad(model(x).square().sum(), model.self_attn.out_proj.weight)[0]
    assert found.weight_gradient[0] == pytest.approx(slope.square().mean().sqrt().item(), rel=1e-4)
    assert found.unseen == ("self_attn.in_proj_weight",)
    assert "not called" not in [finding.kind for finding in found.findings]
    assert probe(model, x, layers="linear*").names == ("linear1", "linear2")


CELLS = {
    "lstm": lambda: nn.LSTM(5, 6, num_layers=2, bidirectional=True),
    "lstm_batch_first": lambda: nn.LSTM(5, 6, batch_first=True),
    "lstm_without_biases": lambda: nn.LSTM(5, 6, bias=False),
    "gru": lambda: nn.GRU(5, 6),
    "rnn": lambda: nn.RNN(5, 6),
}


@pytest.mark.parametrize("kind", CELLS)
def test_recurrent_layer_has_a_row_for_what_leaves_it_at_each_step(kind):
    layer, x = CELLS[kind](), normal(7, T, 5)
    found = probe(layer, x, lambda out: out[0].square().sum())
    out = layer(x)[0]
    matrices = [p for name, p in layer.named_parameters() if name.startswith("weight")]
    slopes = torch.autograd.grad(out.square().sum(), [out, *matrices])
    assert found.forward[0] == pytest.approx(out.square().mean().item(), rel=1e-5)
    assert found.variance[0] == pytest.approx(out.flatten(0, 1).var(0, correction=0).mean().item(), rel=1e-5)
    assert found.backward[0] == pytest.approx(slopes[0].square().mean().item(), rel=1e-5)
    for measured, tensors in ((found.weight, matrices), (found.weight_gradient, slopes[1:])):
        whole = torch.cat([each.flatten() for each in tensors])
        assert measured[0] == pytest.approx(whole.square().mean().sqrt().item(), rel=1e-5)
    assert np.isnan(found.predicted[0])
    assert found.scheme == ("torch default",)
    assert found.unseen == found.findings == ()


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cell_has_a_row_for_each_call(cell):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell(5, 6)

        def forward(self, x):
            state = None
            for each in x:
                state = self.cell(each, state)
            return state

    found = probe(Steps(), normal(3, T, 5))
    assert found.names == ("cell", "cell (2)", "cell (3)")
    assert (found.forward > 0).all()
    assert found.findings == ()


class Reader(nn.Module):
    """A recurrent layer; the head gets its last state, or what leaves it at each step, as a packed sequence."""

    def __init__(self, last):
        super().__init__()
        self.last, self.cells, self.head = last, nn.LSTM(5, 6), nn.Linear(6, 2)

    def forward(self, x):
        out, (state, _) = self.cells(nn.utils.rnn.pack_padded_sequence(x, [4] * T))
        return self.head(state[-1] if self.last else nn.utils.rnn.pad_packed_sequence(out)[0])


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_recurrent_layer_that_is_read_at_the_end_alone_is_no_fault(last, frozen):
    model, x = Reader(last), normal(4, T, 5)
    model.cells.requires_grad_(not frozen)
    before = snapshot(model)
    found = probe(model, x)
    assert snapshot(model) == before
    assert found.names == ("cells", "head")
    assert found.forward[0] == pytest.approx(model.cells(x)[0].square().mean().item(), rel=1e-5)
    assert np.isnan(found.backward[0]) == last
    assert np.isnan(found.weight_gradient[0]) == frozen
    assert found.findings == ()


def test_what_is_wrong_with_a_recurrent_layer_is_found():
    def first(change, loss=None):
        model = Reader(False)
        change(model)
        return probe(model, normal(4, T, 5), loss).findings[0]

    with torch.no_grad():
        found = first(lambda model: model.cells.weight_hh_l0.mul_(math.nan))
    assert (found.kind, found.layers) == ("not finite", ("cells",))
    found = first(lambda model: model.cells.register_forward_hook(lambda m, x, out: (nn.utils.rnn.PackedSequence(
        out[0].data.detach(), *out[0][1:]), out[1])))  # fmt: skip
    assert (found.kind, found.layers) == ("no gradient", ("cells",))


def test_layers_are_chosen_by_name():
    model, x = mlp([4, 8, 8, 3]), normal(T, 4)
    found, whole = probe(model, x, layers=["2", "4"]), probe(model, x)
    assert found.names == ("2", "4")
    assert (found.backward == whole.backward[1:]).all()


def test_weight_norm_and_spectral_norm_are_read_as_the_layer_uses_them():
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 40)), nn.ReLU(), parametrizations.spectral_norm(nn.Linear(40, 20))
    )
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(5)
    found = probe(model, normal(T, 3))
    assert np.isfinite(found.weight_gradient).all()
    assert found.weight[0] == pytest.approx(model[0].weight.square().mean().sqrt().item(), rel=1e-5)


def test_empty_layers_are_passed_over():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 4), nn.Linear(4, 2))
    found = probe(model, normal(T, 3))
    assert found.names == ("0", "1", "2")
    assert np.isnan(found.forward[0])
    assert "not finite" not in [finding.kind for finding in found.findings]


# --- nothing changes --------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [None, square])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_model_and_random_states_are_as_before(mixed, mode, loss):
    getattr(mixed, mode)()
    before = snapshot(mixed)
    probe(mixed, normal(6, 3, 4, 4), loss)
    assert snapshot(mixed) == before


@pytest.mark.parametrize("kind", HEALTHY)
def test_every_kind_of_model_is_as_before(kind):
    model, batch, loss = HEALTHY[kind](0)
    before, kept = snapshot(model), batch.clone()
    probe(model, batch, loss)
    assert snapshot(model) == before
    assert torch.equal(batch, kept)


class Failing(torch.autograd.Function):
    """Works forward and fails backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("on the way back")


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_model_is_as_before_if_something_raises(mixed, where):
    def fail(*ignored):
        raise RuntimeError(f"in {where}")

    loss = {"loss": fail, "backward": lambda output: Failing.apply(output).sum()}.get(where)
    handle = mixed[5].register_forward_hook(fail) if where == "forward" else None
    before = snapshot(mixed)
    with pytest.raises(RuntimeError, match=r"in forward|in loss|on the way back"):
        probe(mixed, normal(6, 3, 4, 4), loss)
    assert snapshot(mixed) == before
    assert torch.overrides._get_current_function_mode() is None
    if handle:
        handle.remove()


def test_pending_backward_pass_and_hooks_of_others_still_work(mixed):
    mixed.eval()
    fired = []
    mixed[5].weight.register_hook(fired.append)
    mixed[5].weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("stepped"))
    loss = mixed(normal(2, 3, 4, 4)).sum()
    probe(mixed, normal(2, 3, 4, 4))
    assert "stepped" not in fired  # an optimiser in the backward pass must not step
    fired.clear()
    loss.backward()
    assert fired[1:] == ["stepped"]


def test_own_loss_of_the_model_is_found_inside():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp([8, 64, 5])
            nn.init.normal_(self.net[2].weight, std=3, generator=generator(1))

        def forward(self, x, labels):
            logits = self.net(x)
            return Record(logits, F.cross_entropy(logits, labels))

    batch = {"x": normal(400, 8), "labels": integers(5, 400)}
    found = probe(WithLoss(), batch, lambda output: output.hidden)
    assert found.findings[0].kind == "loss at start"


# --- what is refused --------------------------------------------------------------------------


def test_arguments_are_checked():
    model, x = mlp([3, 4, 2]), normal(T, 3)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got Tensor"):
        probe(x, x)
    with pytest.raises(TypeError, match="batch must be a tensor, a tuple"):
        probe(model, [x])
    with pytest.raises(ValueError, match=r"batch gives layer '0' no sample"):
        probe(model, x[:0])
    with pytest.raises(ValueError, match="has no shape yet"):
        probe(nn.Sequential(nn.LazyLinear(3)), x)
    with torch.device("meta"), pytest.raises(ValueError, match=r"'0\.weight' of the model has no values .*to_empty"):
        probe(nets.mlp([3, 2]), x)
    with pytest.raises(ValueError, match=r"got ReLU; a scripted, exported or quantised one hides them"):
        probe(nn.ReLU(), x)
    with pytest.raises(ValueError, match="'zz' fits no layer"):
        probe(model, x, layers="zz")
    with pytest.raises(ValueError, match="must not be negative"):
        probe(model, x, seed=-1)


def test_loss_is_checked():
    model, x = mlp([3, 4, 2]), normal(T, 3)
    with pytest.raises(TypeError, match="loss must be a function of what the model returns, got Tensor"):
        probe(model, x, x)
    with pytest.raises(TypeError, match="loss must give a tensor, got float"):
        probe(model, x, lambda output: output.sum().item())
    with pytest.raises(ValueError, match=r"loss must give one real number, got shape \(40, 2\)"):
        probe(model, x, lambda output: output)
    with pytest.raises(ValueError, match=r"got shape \(\) and torch\.int64"):
        probe(model, x, lambda output: output.argmax())
    with pytest.raises(ValueError, match="loss must depend on the parameters"):
        probe(model, x, lambda output: output.detach().sum())


def test_output_without_a_real_tensor_asks_for_a_loss():
    for wrap in (lambda u: u.argmax(-1), lambda u: None, lambda u: "text"):
        with pytest.raises(ValueError, match=r"model returns no real tensor, got .*: give a loss"):
            probe(Returns(wrap), normal(T, 3))


def test_model_that_calls_no_layer_is_refused():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return x

    with pytest.raises(ValueError, match="model calls none of its layers 'layer'"):
        probe(Idle(), normal(T, 2))


# --- what comes out ---------------------------------------------------------------------------


@pytest.fixture
def found():
    return probe(mlp([8, 16, 16, 3]), normal(T, 8))


def test_table_has_a_line_a_call_and_no_empty_column(found):
    text = str(found)
    assert text == repr(found)
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["0", "2", "4"]
    assert "dead" in text
    assert "satu" not in text  # there is no bounded activation
    assert "nan" not in text
    assert text.endswith("Nothing found.")
    assert max(map(len, lines)) <= 110


def test_loss_is_printed_where_one_was_given(found):
    given = probe(mlp([8, 16, 3]), normal(T, 8), square)
    for page in (str(given), given._repr_html_()):
        assert f"Loss at the start: {given.loss:.4g}." in page
    assert "Loss" not in str(found)


def test_findings_are_printed_and_escaped():
    model = nn.Sequential(OrderedDict({"<a&b>": nn.Linear(4, 4), "act": nn.ReLU(), "end": nn.Linear(4, 2)}))
    model.act.extra = nn.Linear(2, 2)
    found = probe(model, normal(T, 4))
    assert "! Not called. The model has layer 'act.extra'" in str(found)
    page = found._repr_html_()
    assert "<table>" in page
    assert '<ul class="il-findings">' in page
    assert "<a&b>" not in page


def test_columns_become_a_data_frame_and_plain_lists(found):
    import pandas as pd

    frame = found.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame.index) == list(found.names)
    np.testing.assert_array_equal(frame["forward"], found.forward)
    columns = found.to_dict()
    assert json.loads(json.dumps(columns["forward"])) == found.forward.tolist()
    assert columns["findings"] == []


def test_data_frame_without_pandas_says_what_to_install(found, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas"):
        found.to_pandas()


def test_plot_shows_three_quantities_on_logarithmic_axes(found):
    fig = found.plot()
    assert len(fig.axes) == 3
    for ax, values in zip(fig.axes, (found.forward, found.variance, found.backward), strict=True):
        assert ax.get_yscale() == "log"
        assert ax.get_ylabel()
        np.testing.assert_array_equal(ax.lines[-1].get_ydata(), values)
    np.testing.assert_array_equal(fig.axes[0].lines[0].get_ydata(), found.predicted)
    assert [label.get_text() for label in fig.axes[-1].get_xticklabels()] == ["0", "2", "4"]
    plt.close(fig)


def test_plot_of_zeros_and_infinities_draws_without_warning():
    fig = probe(mlp([4, 4, 2], "zeros"), normal(T, 4)).plot()
    fig.canvas.draw()
    plt.close(fig)


@pytest.mark.parametrize("samples", [64, 256])
def test_whole_measurement_costs_at_most_three_passes(samples):
    model, x = mlp([512] * 8 + [10]), normal(samples, 512)

    def seconds(work):
        start = time.process_time()
        work()
        return time.process_time() - start

    def plain():
        torch.autograd.grad(model(x).sum(), list(model.parameters()))

    ours, theirs = math.inf, math.inf  # the least of several: others use the processor too
    for _ in range(40):
        ours, theirs = min(ours, seconds(lambda: probe(model, x))), min(theirs, seconds(plain))
        if ours < 3 * theirs:
            return
    pytest.fail(f"a probe takes {ours / theirs:.2f} times the time of a pass forward and back")


def test_snapshot_sees_what_a_probe_could_change(mixed):
    before = snapshot(mixed)
    mixed(normal(6, 3, 4, 4))
    assert without(snapshot(mixed), "random") != without(before, "random")


# --- models that do something of their own ----------------------------------------------------


def test_one_sample_without_a_batch_dimension_is_looked_at_behind_any_activation():
    for activation in ("relu", "tanh"):
        model = drawn(nets.mlp([4, 5, 2], activation))
        assert probe(model, normal(4)).names == ("0", "2")


@pytest.mark.parametrize("low", [torch.zeros(6), torch.zeros(T, 6), torch.tensor(0.0), 0])
def test_clamp_may_have_any_lower_end(low):
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(self.first(x).clamp(min=low))

    found = probe(drawn(Clamped()), normal(T, 4))
    single = not isinstance(low, torch.Tensor) or low.ndim == 0
    assert found.activation[0] == ("relu" if single else "")


def test_expert_that_gets_no_sample_has_an_empty_row():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            parts = [self.experts[k](x[k::2] if k < 2 else x[:0]) for k in range(3)]
            return self.head(torch.cat(parts))

    found = probe(drawn(Experts()), normal(T, 4))
    assert found.names == ("experts.0", "experts.1", "experts.2", "head")
    assert np.isnan(found.forward[2])
    assert np.isfinite(found.forward[[0, 1, 3]]).all()
    assert "experts.2" not in str(found.findings)


class Causal(nn.Conv1d):
    """Pads on the left only."""

    def forward(self, x):
        return super().forward(F.pad(x, (self.dilation[0] * (self.kernel_size[0] - 1), 0)))


class Sliced(nn.Linear):
    """Uses as many of its inputs as there are."""

    def forward(self, x):
        return F.linear(x, self.weight[:, : x.shape[-1]], self.bias)


class Scaled(nn.Linear):
    """Multiplies by a constant of its own."""

    def forward(self, x):
        return super().forward(x) / 16


class Cropped(nn.ConvTranspose1d):
    def forward(self, x):
        return super().forward(x)[..., : x.shape[-1]]


@pytest.mark.parametrize(
    ("layer", "shape", "predicted"),
    [
        (Causal(3, 4, 5, dilation=8), (T, 3, 20), False),
        (Causal(3, 4, 3), (T, 3, 20), False),
        (Sliced(8, 4), (T, 6), True),
        (Scaled(8, 4), (T, 8), False),
        (Cropped(3, 4, 5), (T, 3, 20), False),
        (nn.Conv1d(3, 4, 3, padding="same", dilation=2), (T, 3, 20), True),
        (nn.Conv2d(3, 4, (3, 5), stride=(2, 1), padding=(1, 0), padding_mode="circular"), (T, 3, 9, 8), True),
        (nn.ConvTranspose1d(3, 4, 5, stride=3, output_padding=2), (T, 3, 7), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_prediction_is_made_only_for_what_the_kind_of_layer_does(layer, shape, predicted):
    found = probe(drawn(layer), normal(*shape))
    assert np.isfinite(found.predicted[0]) == predicted
    assert found.forward[0] > 0


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (lambda u: u * torch.sigmoid(u), "silu"),
        (lambda u: torch.sigmoid(u) * u, "silu"),
        (lambda u: 0.5 * u * (1 + torch.erf(u / math.sqrt(2))), "gelu"),
        (lambda u: u * 0.5 * (1.0 + torch.erf(u / 2**0.5)), "gelu"),
        (torch.sigmoid, "sigmoid"),
        (lambda u: u[:, :3] * torch.sigmoid(u[:, 3:]), "sigmoid"),  # a gate: GLU
    ],
)
def test_activations_that_are_written_out_are_known(written, expected):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.LazyLinear(2)

        def forward(self, x):
            return self.last(written(self.first(x)))

    model, x = Net(), normal(T, 4)
    model(x)
    found = probe(drawn(model), x)
    assert found.activation[0] == expected
    assert np.isnan(found.saturated[0]) == (expected in ("silu", "gelu"))


def test_what_a_model_returns_may_be_in_any_container():
    @dataclasses.dataclass(slots=True)
    class Out:
        logits: torch.Tensor

    class Wrapped(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.layer, self.wrap = nn.Linear(3, 2), wrap

        def forward(self, x):
            return self.wrap(self.layer(x))

    for wrap in (Out, lambda u: {u}, lambda u: deque([u]), lambda u: [{"a": (u,)}]):
        assert probe(drawn(Wrapped(wrap)), normal(T, 3)).backward[0] == pytest.approx(1, abs=0.8)
    with pytest.raises(ValueError, match=r"no real tensor, got torch\.complex64"):
        probe(Wrapped(lambda u: u.to(torch.complex64)), normal(T, 3))
    with pytest.raises(ValueError, match="the seed n must not be negative"):
        probe(Wrapped(Out), normal(T, 3), square, seed=-1)


def test_large_weights_are_recognised():
    model = nn.Linear(4096, 4096, bias=False)
    initialize(model, "he_normal", generator=generator(31))
    assert probe(model, normal(4, 4096)).scheme == ("he",)
