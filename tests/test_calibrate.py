"""Initialisation from data: what each layer becomes, in which order, what is left, and that nothing else changes."""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from untouched import snapshot, without

from initlib import calibrate, generator, initialize, layer_moments, nets, schemes
from initlib.calibrate import lsuv, scale_and_bias, scale_only

METHODS = {"scale_only": scale_only, "lsuv": lsuv, "scale_and_bias": scale_and_bias}
T = 60

every = pytest.mark.parametrize("method", METHODS)


def normal(*shape, n=1, **options):
    return torch.randn(*shape, generator=generator(n), **options)


def apply(method, model, batch, **options):
    """A method on a batch; random weights from a generator of the book."""
    if method == "lsuv":
        options["generator"] = generator(2)
    return METHODS[method](model, batch, **options)


def drawn(model, n=3, bias=0.3):
    """A model with normal weights, and biases that are not zero."""
    initialize(model, "he_normal", generator=generator(n))
    g = generator(n + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, bias, generator=g)
    return model


def assert_met(method, found, target=1.0, rtol=1e-4):
    """The promise of a method, on moments of calibrated layers."""
    if method == "scale_only":
        np.testing.assert_allclose(found.forward, target, rtol=rtol)
    elif method == "scale_and_bias":
        np.testing.assert_allclose(found.variance, target, rtol=rtol)
        np.testing.assert_allclose(found.mean_squared, 0, atol=target * rtol)


def pooled(u):
    return u.detach().double().var(correction=0).item()


# --- by hand ----------------------------------------------------------------------------------


def test_scale_only_is_what_one_writes_by_hand():
    model, x = drawn(nets.mlp([5, 20, 20, 3])), normal(T, 5) + 0.5
    weights = [(layer.weight.detach().double(), layer.bias.detach().double()) for layer in model[::2]]
    found = scale_only(model, x, target=2.0)
    signal, factors = x.double(), []
    for layer, (weight, bias) in zip(model[::2], weights, strict=True):
        u = signal @ weight.T + bias
        s = (u.square().mean() / 2.0).sqrt()
        factors.append(s.item())
        torch.testing.assert_close(layer.weight.double(), weight / s, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer.bias.double(), bias / s, rtol=1e-5, atol=1e-6)
        signal = (u / s).relu()
    assert found.names == ("0", "2", "4")
    assert found.done == tuple(f"divided by {s:.4g}" for s in factors)
    assert found.iterations.tolist() == [1, 1, 1]
    assert_met("scale_only", layer_moments(model, x), target=2.0)


def test_scale_and_bias_is_what_one_writes_by_hand():
    model, x = drawn(nets.mlp([5, 20, 20, 3])), normal(T, 5) + 0.5
    weights = [(layer.weight.detach().double(), layer.bias.detach().double()) for layer in model[::2]]
    scale_and_bias(model, x, target=2.0)
    signal = x.double()
    for layer, (weight, bias) in zip(model[::2], weights, strict=True):
        u = signal @ weight.T + bias
        mean, s = u.mean(0), (u.var(0, correction=0) / 2.0).sqrt()
        torch.testing.assert_close(layer.weight.double(), weight / s[:, None], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.bias.double(), (bias - mean) / s, rtol=1e-4, atol=1e-5)
        signal = ((u - mean) / s).relu()


def test_lsuv_is_orthonormal_weights_zero_biases_and_one_number_a_layer():
    model, x = drawn(nets.mlp([5, 20, 20, 3])), normal(T, 5) + 0.5
    found = lsuv(model, x, generator=generator(2), tolerance=1e-5)
    g, signal = generator(2), x
    for layer in model[::2]:
        weight = schemes.orthogonal(torch.empty_like(layer.weight), generator=g)
        s = math.sqrt(pooled(signal @ weight.T))
        torch.testing.assert_close(layer.weight.detach(), weight / s, rtol=1e-4, atol=1e-6)
        assert (layer.bias == 0).all()
        u = layer(signal)
        assert pooled(u) == pytest.approx(1, abs=1e-4)
        signal = u.relu()
    assert all(done.startswith("orthonormal, divided by ") for done in found.done)


def test_scale_and_bias_does_on_its_batch_what_batch_norm_does():
    x = normal(T, 5) * 3 + 1
    plain, normalised = drawn(nn.Linear(5, 7)), nn.Sequential(drawn(nn.Linear(5, 7)), nn.BatchNorm1d(7, eps=1e-12))
    scale_and_bias(plain, x)
    torch.testing.assert_close(plain(x), normalised(x), rtol=1e-4, atol=1e-5)


def test_lsuv_leaves_a_layer_within_the_tolerance_orthonormal():
    x = normal(4000, 30)
    model = nn.Linear(30, 30)
    found = lsuv(model, x, tolerance=0.1, generator=generator(2))
    assert found.iterations.tolist() == [0]
    assert found.done == ("orthonormal, nothing to correct",)
    torch.testing.assert_close(model.weight @ model.weight.T, torch.eye(30), atol=1e-5, rtol=0)
    assert lsuv(model, x, tolerance=1e-6, generator=generator(2)).iterations.tolist() == [1]


def test_lsuv_draws_from_the_generator_alone_or_else_from_the_global_state():
    x = normal(T, 5)
    models = [nets.mlp([5, 8, 3]) for _ in range(3)]
    state = torch.get_rng_state()
    for model in models[:2]:
        lsuv(model, x, generator=generator(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(models[0][0].weight, models[1][0].weight)
    lsuv(models[2], x)
    assert not torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(models[2][0].weight, models[1][0].weight)


def test_pooled_variance_and_second_moment_differ_when_the_layer_has_a_mean():
    x = normal(T, 5) + 5
    one, other = nn.Linear(5, 30), nn.Linear(5, 30)
    found = lsuv(one, x, generator=generator(2), tolerance=1e-5)
    assert pooled(one(x)) == pytest.approx(1, abs=1e-4)
    assert found.after.forward[0] > 1  # the mean over all entries is not exactly zero
    found = scale_only(other, x)
    assert found.after.forward[0] == pytest.approx(1, abs=1e-4)
    assert pooled(other(x)) < 1


# --- order and report -------------------------------------------------------------------------


class Net(nn.Module):
    """Layers out of order, in-place activations, a skip connection, normalisation, dropout, a layer without a call."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 4)
        self.unused = nn.Linear(2, 2)
        self.mid = nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.down = nn.Conv2d(6, 12, 3, stride=2, groups=3)
        self.stem = nn.Conv2d(3, 6, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = F.relu_(self.stem(x))
        x = x + F.relu_(self.norm(self.mid(x)))
        return self.head(self.drop(F.relu_(self.down(x)).mean((2, 3))))


@every
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_every_layer_of_a_real_model_meets_its_target(method, mode):
    model, x = getattr(drawn(Net()), mode)(), normal(8, 3, 10, 10) * 2 + 1
    options = {"tolerance": 1e-4} if method == "lsuv" else {"target": 0.7}
    found = apply(method, model, x, **options)
    assert found.names == ("stem", "mid", "down", "head", "unused")
    assert found.done[-1] == "not called"
    assert found.iterations.tolist() == [1, 1, 1, 1, 0]
    now = layer_moments(model, x)
    assert_met(method, now, 0.7)
    for part in ("forward", "mean_squared", "variance"):
        assert np.array_equal(getattr(found.after, part)[:4], getattr(now, part))
        assert np.isnan(getattr(found.after, part)[4])
        assert np.isnan(getattr(found.before, part)[4])


@every
def test_calibrating_twice_changes_nothing_more(method):
    model, x = drawn(nets.mlp([5, 20, 20, 3])), normal(T, 5)
    apply(method, model, x)
    weights = [p.detach().clone() for p in model.parameters()]
    apply(method, model, x)
    torch.testing.assert_close([p.detach() for p in model.parameters()], weights, rtol=1e-4, atol=1e-5)


@every
def test_before_is_the_model_as_it_was_given(method):
    model, x = drawn(nets.mlp([5, 20, 3])), normal(T, 5)
    expected = layer_moments(model, x)
    found = apply(method, model, x)
    assert found.before == expected
    assert found.after == layer_moments(model, x) != expected


def test_table_has_a_line_a_call():
    model, x = drawn(Net()), normal(8, 3, 10, 10)
    found = scale_only(model, x)
    lines = str(found).splitlines()
    assert lines[0].split()[:3] == ["layer", "second", "moment"]
    assert [line.split()[0] for line in lines[3:]] == list(found.names)
    assert [row[2] for row in found.rows][:4] == pytest.approx([1.0] * 4, rel=1e-4)
    assert "<table>" in found._repr_html_()


def test_layers_names_the_layers_that_change():
    model, x = drawn(Net()), normal(8, 3, 10, 10)
    before = snapshot(model)
    found = scale_only(model, x, layers=["st*", "head"])
    assert found.names == ("stem", "head")
    after = snapshot(model)
    changed = {name for name, value in after["values"].items() if value != before["values"][name]}
    assert changed == {"stem.weight", "stem.bias", "head.weight", "head.bias"}


@every
def test_a_layer_may_be_the_model(method):
    layer = drawn(nn.Linear(5, 8))
    found = apply(method, layer, normal(T, 5))
    assert found.names == ("",)
    assert_met(method, found.after)


# --- kinds of layers --------------------------------------------------------------------------

LAYERS = {
    "tokens": (lambda: nn.Linear(4, 6), (5, 7, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), (5, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (5, 4, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 6, 2), (4, 2, 3, 3, 3)),
    "unbatched": (lambda: nn.Conv2d(4, 6, 3), (4, 9, 9)),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3), (5, 4, 5)),
    "transposed2d": (lambda: nn.ConvTranspose2d(6, 6, 3, groups=3, stride=2), (5, 6, 4, 4)),
    "transposed3d": (lambda: nn.ConvTranspose3d(2, 8, 2, groups=2), (4, 2, 3, 3, 3)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), (5, 6, 5, 5)),
}


@every
@pytest.mark.parametrize("kind", LAYERS)
def test_each_unit_of_each_kind_of_layer_meets_its_target(method, kind):
    build, shape = LAYERS[kind]
    layer, x = drawn(build()), normal(*shape) * 3 + 1
    options = {"tolerance": 1e-5} if method == "lsuv" else {"target": 4.0}
    apply(method, layer, x, **options)
    u = layer(x).detach().double()
    if method == "scale_only":
        assert u.square().mean().item() == pytest.approx(4, rel=1e-4)
    elif method == "lsuv":
        assert pooled(u) == pytest.approx(1, rel=1e-4)
    else:
        dimension = -1 if kind == "tokens" else 0 if kind == "unbatched" else 1
        for unit in u.movedim(dimension, 0):
            assert unit.mean().item() == pytest.approx(0, abs=1e-4)
            assert pooled(unit) == pytest.approx(4, rel=1e-4)


@every
def test_output_size_of_a_transposed_convolution_is_kept(method):
    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 4, 3, stride=2)

        def forward(self, x):
            return self.up(x, output_size=(10, 10))

    model, x = drawn(Up()), normal(5, 3, 4, 4)
    assert_met(method, apply(method, model, x).after)
    assert model(x).shape == (5, 4, 10, 10)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_precisions(method, dtype):
    model, x = drawn(nets.mlp([8, 30, 30, 4])).to(dtype), normal(T, 8).to(dtype)
    found = apply(method, model, x)
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    assert_met(method, found.after, rtol=1e-10 if dtype == torch.float64 else 0.03)


def test_half_precision_whose_squares_overflow():
    model = nn.Linear(8, 30).half()
    x = (normal(T, 8) * 3000).half()
    assert np.isfinite(scale_only(model, x).before.forward).all()
    assert layer_moments(model, x).forward[0] == pytest.approx(1, rel=0.02)


@every
def test_layers_without_bias(method):
    model, x = drawn(nets.mlp([5, 20, 3], bias=False)), normal(T, 5)
    if method == "scale_and_bias":
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"layers '0', '2' have no bias to shift: build them with bias=True"):
            scale_and_bias(model, x)
        assert snapshot(model) == before
    else:
        assert_met(method, apply(method, model, x).after)


@every
def test_layer_right_before_batch_norm_is_calibrated_and_its_statistics_stay(method):
    model = drawn(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3)))
    x = normal(4, 3, 8, 8) + 2
    assert_met(method, apply(method, model, x).after)
    assert (model[1].running_mean == 0).all()
    assert model[1].num_batches_tracked == 0


@every
def test_shared_layer_is_calibrated_on_its_first_call(method):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(6, 6)

        def forward(self, x):
            return self.cell(torch.tanh(self.cell(x)))

    model, x = drawn(Loop()), normal(T, 6) * 2
    found = apply(method, model, x)
    assert found.names == ("cell", "cell (2)")
    assert found.done[1] == "as at its first call"
    assert found.iterations.tolist() == [1, 0]
    one = layer_moments(model.cell, x)
    assert_met(method, one)
    assert found.after.forward[0] == one.forward[0]
    assert abs(found.after.forward[1] - 1) > 0.01


def transposed(layer):
    return nn.Parameter(layer.weight.detach().t())


@pytest.mark.parametrize("tie", ["same_object", "same_memory"])
def test_layers_that_share_a_weight_are_calibrated_once(tie):
    model = drawn(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    model[2].weight = model[0].weight if tie == "same_object" else transposed(model[0])
    bias, x = model[2].bias.detach().clone(), normal(T, 6)
    found = scale_only(model, x)
    assert found.done[1] == "left: shares a parameter with '0'"
    assert found.after.forward[0] == pytest.approx(1, rel=1e-4)
    assert torch.equal(model[2].bias, bias)


@every
@pytest.mark.parametrize("layers", ["*", ["body", "head"]])
def test_head_that_shares_its_weight_with_an_embedding_is_left(method, layers):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 6)
            self.body = nn.Linear(6, 6)
            self.head = nn.Linear(6, 9)
            self.head.weight = self.embed.weight

        def forward(self, words):
            return self.head(torch.tanh(self.body(self.embed(words))))

    model = drawn(Tied())
    words = torch.randint(9, (5, 7), generator=generator(5))
    embedded, bias = model.embed.weight.detach().clone(), model.head.bias.detach().clone()
    found = apply(method, model, words, layers=layers)
    assert dict(zip(found.names, found.done, strict=True))["head"] == "left: shares a parameter with 'embed'"
    assert torch.equal(model.embed.weight, embedded)
    assert torch.equal(model.head.bias, bias)
    assert_met(method, layer_moments(model, words, layers="body"))


@every
def test_frozen_layers_are_left(method):
    model, x = drawn(nets.mlp([5, 20, 20, 3])), normal(T, 5)
    model[2].weight.requires_grad_(False)
    weight, bias = model[2].weight.clone(), model[2].bias.detach().clone()
    found = apply(method, model, x)
    assert found.done[1] == "left: frozen"
    assert torch.equal(model[2].weight, weight)
    assert torch.equal(model[2].bias, bias)
    assert_met(method, layer_moments(model, x, layers=["0", "4"]))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no layer to calibrate: '0' left: frozen; '2' left: frozen"):
        apply(method, model, x)


@every
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "pruned"])
def test_weights_that_are_computed_are_refused_before_anything_changes(method, kind):
    model, x = drawn(nets.mlp([5, 20, 3])), normal(T, 5)
    change = {
        "weight_norm": parametrizations.weight_norm,
        "spectral_norm": parametrizations.spectral_norm,
        "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
    }[kind]
    change(model[2])
    before = without(snapshot(model), "random")
    with pytest.raises(ValueError, match=r"weights or biases of '2' are computed from other parameters"):
        apply(method, model, x)
    assert without(snapshot(model), "random") == before
    assert apply(method, model, x, layers="0").names == ("0",)


def test_embedding_and_packed_projections_are_left():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 8)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, words):
            return self.block(self.embed(words))

    model = Attend().eval()
    words = torch.randint(9, (5, 7), generator=generator(5))
    before = snapshot(model)["values"]
    found = scale_only(model, words)
    assert found.names == ("block.linear1", "block.linear2", "block.self_attn.out_proj")
    assert_met("scale_only", layer_moments(model, words))
    after = snapshot(model)["values"]
    assert {name for name in after if after[name] != before[name]} == {
        f"block.linear{k}.{kind}" for k in (1, 2) for kind in ("weight", "bias")
    }


class Standardised(nn.Linear):
    """What leaves it does not depend on the scale of its weight."""

    def forward(self, x):
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, weight / weight.std(1, keepdim=True))


class Equalised(nn.Linear):
    """Affine in its weight and bias, with a forward of its own."""

    def forward(self, x):
        return F.linear(x, self.weight * 3, self.bias)


class Rectified(nn.Linear):
    """Not affine: it rectifies what leaves it."""

    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize("method", ["scale_only", "lsuv"])
def test_layer_that_does_not_follow_its_weight_is_left_with_a_warning(method):
    model, x = drawn(nn.Sequential(Standardised(5, 20), nn.Tanh(), nn.Linear(20, 4))), normal(T, 5)
    old = [p.detach().clone() for p in model[0].parameters()]
    with pytest.warns(
        UserWarning, match="layer '0': left as it was, because what leaves it does not follow its weight"
    ):
        found = apply(method, model, x)
    assert all(torch.equal(a, b) for a, b in zip(old, model[0].parameters(), strict=True))
    assert found.done[0].startswith("left: what leaves it does not follow")
    assert found.iterations.tolist() == [0, 1]
    assert_met(method, layer_moments(model, x, layers="2"))


def test_layers_with_a_forward_of_their_own_are_calibrated_if_they_follow():
    x = normal(T, 5)
    model = drawn(nn.Sequential(Equalised(5, 20), Rectified(20, 20), nn.Linear(20, 4)))
    assert_met("scale_only", scale_only(model, x).after)
    with pytest.warns(UserWarning, match="layer '1': left as it was, because what leaves it does not follow"):
        found = scale_and_bias(model, x)
    for k in (0, 2):
        assert found.after.variance[k] == pytest.approx(1, rel=1e-4)


def test_layer_that_is_left_is_so_in_its_later_calls_too():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.top = Rectified(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.top(self.cell(self.cell(x) - 1))

    model, x = drawn(Loop()), normal(T, 6) * 3
    with pytest.warns(UserWarning, match="layer 'cell': left as it was"):
        found = scale_and_bias(model, x)
    assert found.done[1] == found.done[0] != found.done[2]
    assert found.after.variance[2] == pytest.approx(1, rel=1e-4)


# --- dead, constant, overflowing --------------------------------------------------------------


def dead(method):
    """The second of three layers gives zero throughout; the third has a bias to live on."""
    model = drawn(nets.mlp([5, 20, 20, 3]))
    with torch.no_grad():
        if method == "lsuv":  # which draws weights anew: what enters the layer is zero
            model[1] = nets.Elementwise(torch.zeros_like)
        else:
            model[2].weight.zero_()
            model[2].bias.zero_()
    return model


@every
def test_dead_layer_is_left_with_a_warning_that_names_it(method):
    model, x = dead(method), normal(T, 5)
    old = [p.detach().clone() for p in model[2].parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = apply(method, model, x)
    messages = [str(warning.message) for warning in caught]
    assert messages[0].startswith("layer '2': left as it was, because all that leaves it is zero: look for")
    if method == "scale_and_bias":  # the layer above gets nothing but zeros
        assert messages[1].startswith("layer '4': left as it was, because it gives the same for every sample: use a")
    assert len(messages) == 1 + (method == "scale_and_bias")
    assert all(warning.category is UserWarning for warning in caught)
    assert found.done[1] == "left: all that leaves it is zero"
    assert all(torch.equal(a, b) for a, b in zip(old, model[2].parameters(), strict=True))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert found.done[0] not in ("", found.done[1])
    assert found.iterations[0] == 1


@every
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_batch_that_is_not_finite_leaves_the_model_finite_and_names_its_layers(method, value):
    model, x = drawn(nets.mlp([5, 20, 20, 3])), normal(T, 5)
    x[3, 2] = value
    before = snapshot(model)["values"]
    with pytest.warns(UserWarning, match="layers '0', '2', '4': left as it was, because what leaves it is not finite"):
        apply(method, model, x)
    assert snapshot(model)["values"] == before


def test_layers_above_one_that_overflows_only_for_itself_go_on():
    class Rescue(nn.Module):
        def forward(self, x):
            return torch.nan_to_num(x.sign(), 1.0)

    model = nn.Sequential(drawn(nn.Linear(5, 20)), Rescue(), drawn(nn.Linear(20, 4)))
    with torch.no_grad():
        model[0].weight.mul_(1e38)
    x = normal(T, 5) * 10
    with pytest.warns(UserWarning, match="layer '0': left as it was, because what leaves it is not finite"):
        scale_only(model, x)
    assert layer_moments(model, x).forward[1] == pytest.approx(1, rel=1e-4)


def test_result_that_the_dtype_cannot_hold_is_not_kept():
    model, x = drawn(nn.Linear(5, 20)).half(), (normal(T, 5) * 1e-3).half()
    before = snapshot(model)["values"]
    with pytest.warns(UserWarning, match="their dtype cannot hold the result"):
        scale_only(model, x, target=1e12)
    assert snapshot(model)["values"] == before
    layer = nn.Linear(5, 20, bias=False)
    with pytest.warns(UserWarning, match="their dtype cannot hold the result"):
        scale_only(layer, normal(T, 5) * 1e-30, target=1e38)
    assert layer.weight.isfinite().all()


def test_constant_layer():
    x = normal(1, 5).expand(T, 5)
    assert scale_only(drawn(nn.Linear(5, 20)), x).after.forward[0] == pytest.approx(1, rel=1e-4)
    model = drawn(nets.mlp([5, 20, 3]))
    before = snapshot(model)["values"]
    with pytest.warns(UserWarning, match="layers '0', '2': left as it was, because it gives the same for every sample"):
        scale_and_bias(model, x)
    assert snapshot(model)["values"] == before
    single = nn.Linear(5, 1)
    before = snapshot(single)["values"]
    with pytest.warns(UserWarning, match="layer '': left as it was, because it gives the same for every sample"):
        lsuv(single, x, generator=generator(2))
    assert snapshot(single)["values"] == before


def test_rounding_beside_a_large_mean_counts_as_constant():
    layer = drawn(nn.Linear(1, 4))
    x = 1e6 + torch.arange(T)[:, None] % 2 * 0.0625  # one unit in the last place
    with pytest.warns(UserWarning, match="gives the same for every sample"):
        scale_and_bias(layer, x)


def test_constant_units_beside_others_are_left_and_counted():
    model, x = drawn(nn.Linear(5, 20)), normal(T, 5)
    with torch.no_grad():
        model.weight[[2, 7, 11]] = 0
    old = model.bias.detach().clone()
    with pytest.warns(UserWarning, match="layer '': 3 of 20 units are left as they were, because they give the same"):
        scale_and_bias(model, x)
    u = model(x).detach().double()
    alive = [j for j in range(20) if j not in (2, 7, 11)]
    assert (model.weight[[2, 7, 11]] == 0).all()
    assert torch.equal(model.bias[[2, 7, 11]], old[[2, 7, 11]])
    torch.testing.assert_close(u[:, alive].var(0, correction=0), torch.ones(17).double(), rtol=1e-4, atol=0)


def test_lsuv_ends_and_says_when_a_layer_is_not_within_the_tolerance():
    model, x = nn.Linear(5, 20), normal(T, 5)
    with pytest.warns(UserWarning, match=r"layer '': variance still off by .* after 4 iterations"):
        found = lsuv(model, x, tolerance=1e-30, iterations=4, generator=generator(2))
    assert found.iterations.tolist() == [4]
    assert pooled(model(x)) == pytest.approx(1, rel=1e-4)


def test_warnings_point_to_the_line_that_called():
    model = dead("scale_only")
    with pytest.warns(UserWarning, match="is zero") as caught:
        scale_only(model, normal(T, 5))
    assert {warning.filename for warning in caught} == {__file__}


@every
def test_model_is_as_before_if_warnings_are_errors(method):
    model = dead(method)
    before = without(snapshot(model), "random")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="is zero"):
            apply(method, model, normal(T, 5))
    assert without(snapshot(model), "random") == before


def test_no_warning_without_a_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in METHODS:
            apply(method, drawn(Net()), normal(8, 3, 10, 10))


@pytest.mark.parametrize("shape", [(1, 5), (5,)])
def test_one_sample(shape):
    model, x = drawn(nets.mlp([5, 20, 3])), normal(*shape)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"batch gives the units of layer '0' one sample each.*larger batch"):
        scale_and_bias(model, x)
    assert snapshot(model) == before
    assert scale_only(model, x).after.forward == pytest.approx([1, 1], rel=1e-4)
    scale_and_bias(drawn(nn.Conv2d(1, 2, 3)), normal(1, 1, 5, 5))  # one image has many positions


@every
def test_empty_layers_are_left(method):
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 0))
    found = apply(method, model, 10 * normal(T, 5))  # far from one, so that every method corrects
    assert found.iterations.tolist() == [1, 0]
    assert found.done[1] == "left: it has no weights"
    assert np.isnan(found.after.forward[1])


def test_layer_that_reads_nothing_is_left():
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(0, 5), nn.Linear(5, 3))
    assert scale_only(model, torch.empty(4, 0)).done[0] == "left: it has no weights"


@every
def test_normalisation_without_weights_is_no_obstacle(method):
    norms = (
        nn.BatchNorm2d(6, affine=False),
        nn.GroupNorm(2, 6, affine=False),
        nn.LayerNorm(96, elementwise_affine=False),
    )
    layers = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 6, 3), nn.Linear(96, 4)
    model = nn.Sequential(layers[0], norms[0], nn.ReLU(), layers[1], norms[1], nn.Flatten(), norms[2], layers[2])
    found = apply(method, drawn(model), normal(8, 2, 8, 8))
    assert found.names == ("0", "3", "7")
    assert found.iterations.max() == 1
    assert_met(method, layer_moments(model, normal(8, 2, 8, 8)))


# --- nothing else changes ---------------------------------------------------------------------


@every
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_only_parameters_of_layers_change_and_stay_the_same_objects(method, mode):
    model, x = drawn(Net()), normal(8, 3, 10, 10)
    model(x).square().sum().backward()
    getattr(model, mode)()
    model.norm.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, batch = snapshot(model), x.clone()
    apply(method, model, x)
    after = snapshot(model)
    assert without(after, "values") == without(before, "values")
    changed = {name for name in after["values"] if after["values"][name] != before["values"][name]}
    assert changed == {f"{layer}.{kind}" for layer in ("stem", "mid", "down", "head") for kind in ("weight", "bias")}
    assert torch.equal(x, batch)
    for ours, theirs in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True):
        assert ours is theirs
    model(x).sum().backward()


@every
@pytest.mark.parametrize("after", [1, 2, 3])
def test_model_is_as_before_if_it_raises_on_any_pass(method, after):
    class Fragile(nn.Module):
        passes = 0

        def __init__(self):
            super().__init__()
            self.one, self.norm, self.two = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.two(torch.relu(self.norm(self.one(x))))
            Fragile.passes += 1
            if Fragile.passes == after:
                raise RuntimeError("on purpose")
            return x

    model = drawn(Fragile())
    before = without(snapshot(model), "random" if method == "lsuv" else "")
    with pytest.raises(RuntimeError, match="on purpose"):
        apply(method, model, normal(T, 5))
    assert Fragile.passes == after
    assert without(snapshot(model), "random" if method == "lsuv" else "") == before


@every
def test_number_of_passes_does_not_grow_with_depth(method):
    passes = []
    model = drawn(nets.mlp([5] * 12, "tanh"))
    model.register_forward_hook(lambda module, args, output: passes.append(1))
    apply(method, model, normal(T, 5))
    assert len(passes) == 3


@every
def test_batch_may_be_arguments_or_keywords(method):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 8)

        def forward(self, x, factor):
            return self.layer(input=x * factor)

    x, weights = normal(T, 5), []
    for batch in ((x, 3.0), {"factor": 3.0, "x": x}):
        model = drawn(Two())
        assert_met(method, apply(method, model, batch).after)
        weights.append(model.layer.weight.detach())
    assert torch.equal(*weights)


@every
def test_calibration_is_reproducible_to_the_bit(method):
    models = [drawn(Net()), drawn(Net())]
    tables = [apply(method, model, normal(8, 3, 10, 10)) for model in models]
    assert str(tables[0]) == str(tables[1])
    assert snapshot(models[0])["values"] == snapshot(models[1])["values"]


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["scale_only", "scale_and_bias"])
def test_target_must_be_positive_and_finite(method):
    model, x = drawn(nn.Linear(5, 3)), normal(T, 5)
    for target in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=rf"target must be positive and finite, got {target}"):
            METHODS[method](model, x, target=target)
    for target in ("1", None, True, torch.tensor(1.0)):
        with pytest.raises(TypeError, match="target must be a number, got"):
            METHODS[method](model, x, target=target)
    METHODS[method](model, x, target=np.float32(2))


def test_tolerance_and_iterations_of_lsuv_are_checked():
    model, x = nn.Linear(5, 3), normal(T, 5)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"tolerance must be positive and finite, got 0"):
        lsuv(model, x, tolerance=0)
    with pytest.raises(TypeError, match="tolerance must be a number"):
        lsuv(model, x, tolerance=None)
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        lsuv(model, x, iterations=0)
    with pytest.raises(TypeError, match="iterations must be an integer"):
        lsuv(model, x, iterations=2.5)
    assert snapshot(model) == before


@every
def test_what_is_no_model_batch_or_layer_is_refused(method):
    x = normal(T, 5)
    with pytest.raises(TypeError, match="model must be"):
        apply(method, [nn.Linear(5, 3)], x)
    with pytest.raises(ValueError, match="no linear layer or convolution"):
        apply(method, nn.Sequential(nn.ReLU()), x)
    with pytest.raises(TypeError, match="batch must be a tensor"):
        apply(method, nn.Linear(5, 3), [x])
    with pytest.raises(ValueError, match="fits no layer"):
        apply(method, nn.Linear(5, 3), x, layers="head")
    with pytest.raises(ValueError, match="model calls none of its layers"):
        apply(method, Net(), normal(2, 3, 10, 10), layers="unused")


def test_methods_are_reached_through_the_package():
    assert {name: getattr(calibrate, name) for name in METHODS} == METHODS
