"""A scheme over a whole model: what is set, what is left, and what is said about it."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from initlib import Scheme, constant, generator, initialize, schemes

ones = constant(1.0)
twos = constant(2.0)


class Mixed(nn.Module):
    """One of each kind of layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8, padding_idx=3)
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.up = nn.ConvTranspose1d(4, 6, 5, groups=2)
        self.batch = nn.BatchNorm2d(8)
        self.attend = nn.MultiheadAttention(8, 2)
        self.recur = nn.LSTM(8, 4)
        self.cell = nn.GRUCell(8, 4)
        self.pair = nn.Bilinear(2, 3, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.scale = nn.Parameter(torch.tensor(3.0))


SET = {
    *("conv.weight", "conv.bias", "up.weight", "up.bias", "head.weight"),
    *("attend.out_proj.weight", "attend.out_proj.bias"),
    *(f"blocks.{block}.{layer}.{kind}" for block in (0, 1) for layer in (0, 2) for kind in ("weight", "bias")),
}


def values(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def mixed():
    model = Mixed()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    return model


# --- what is set and what is left -------------------------------------------------------------


def test_layers_with_fans_are_set_and_everything_else_is_left(mixed):
    report = initialize(mixed, ones)
    assert set(report.initialised) == SET
    assert {*report.initialised, *report.left} == set(dict(mixed.named_parameters()))
    assert len(report.initialised) + len(report.left) == len(list(mixed.parameters()))
    for name, parameter in mixed.named_parameters():
        expected = 7 if name not in SET else 0 if name.endswith("bias") else 1
        assert (parameter == expected).all(), name


def test_report_gives_a_reason_for_what_is_left(mixed):
    reasons = {name: done for name, _, done in initialize(mixed, ones).rows}
    expected = {
        "embed.weight": "an embedding looks up",
        "batch.weight": "BatchNorm2d is not a layer with fans",
        "attend.in_proj_weight": "query, key and value are packed",
        "recur.weight_ih_l0": "gates are packed",
        "cell.bias_hh": "gates are packed",
        "pair.weight": "Bilinear is not a layer with fans",
        "norm.bias": "LayerNorm is not a layer with fans",
        "scale": "Mixed is not a layer with fans",
    }
    for name, reason in expected.items():
        assert reasons[name].startswith("left: ")
        assert reason in reasons[name]
    assert reasons["conv.weight"] == "constant 1"
    assert reasons["conv.bias"] == "zero"


def test_report_prints_one_line_a_parameter(mixed):
    report = initialize(mixed, "he_normal")
    for text in (str(report), repr(report)):
        lines = text.splitlines()
        assert lines[0].split() == ["parameter", "shape", "done"]
        assert [line.split()[0] for line in lines[2:]] == [name for name, _ in mixed.named_parameters()]
    assert "(8, 3, 3, 3)" in str(report)
    assert "<table>" in report._repr_html_()


def test_weights_get_the_spread_of_their_own_connections():
    model = nn.Sequential(nn.Linear(400, 200), nn.Conv2d(16, 64, 5, stride=2, groups=4), nn.ConvTranspose1d(40, 80, 16))
    initialize(model, "glorot_normal", generator=generator(1))
    connections = [(400, 200), (16 * 25 / 4, 64 * 25 / 16), (640, 1280)]
    for layer, (m, n) in zip(model, connections, strict=True):
        count, expected = layer.weight.numel(), 2 / (m + n)
        variance = layer.weight.detach().double().square().mean().item()
        assert abs(variance - expected) < 6 * expected * math.sqrt(2 / count)


def test_model_may_be_a_single_layer():
    layer = nn.Linear(3, 4)
    report = initialize(layer, ones)
    assert report.initialised == ("weight", "bias")
    assert (layer.weight == 1).all()


def test_model_without_parameters_gives_an_empty_report():
    report = initialize(nn.Sequential(nn.ReLU()), "he_normal")
    assert (report.rows, report.initialised, report.left) == ([], (), ())


def test_buffers_mode_and_gradients_are_untouched(mixed):
    mixed.eval()
    mixed.batch.train()
    mixed.head.weight.requires_grad_(False)
    before = {name: buffer.clone() for name, buffer in mixed.named_buffers()}
    modes = [module.training for module in mixed.modules()]
    initialize(mixed, "he_normal")
    assert same(before, dict(mixed.named_buffers()))
    assert modes == [module.training for module in mixed.modules()]
    for name, parameter in mixed.named_parameters():
        assert parameter.requires_grad == (name != "head.weight")
        assert parameter.is_leaf
        assert parameter.grad is None


def test_zero_size_layer_is_left_empty_with_a_warning():
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(0, 3), nn.Linear(3, 2))
    for scheme in ("he_normal", "torch_default"):
        with torch.no_grad():
            model[0].bias.fill_(7)
        with pytest.warns(UserWarning, match=r"weight of shape \(3, 0\) is empty"):
            report = initialize(model, scheme)
        assert (model[0].bias == 0).all()
        assert len(report.initialised) == 4


# --- torch's default --------------------------------------------------------------------------


def test_torch_default_over_a_model_draws_what_torch_draws():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, groups=1, stride=2),
        nn.BatchNorm2d(8),
        nn.Sequential(nn.ConvTranspose2d(8, 4, 3, bias=False), nn.ReLU()),
        nn.Linear(4, 5),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        expected = values(model)
        torch.manual_seed(2)
        report = initialize(model, "torch_default")
    assert same(values(model), expected)
    assert {done for _, _, done in report.rows} == {"torch_default", "left: BatchNorm2d is not a layer with fans"}


def test_torch_default_resets_an_embedding_that_is_named():
    model = nn.Sequential(nn.Embedding(9, 5, padding_idx=4))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model[0].reset_parameters()
        expected = values(model)
        torch.manual_seed(2)
        initialize(model, "zeros", overrides={"0": "torch_default"})
    assert same(values(model), expected)


# --- overrides --------------------------------------------------------------------------------


def test_overrides_name_other_schemes_and_the_last_that_fits_decides(mixed):
    report = initialize(mixed, ones, overrides={"blocks.*": twos, "blocks.1.*": constant(3.0), "head": None})
    assert (mixed.blocks[0][2].weight == 2).all()
    assert (mixed.blocks[1][0].weight == 3).all()
    assert (mixed.head.weight == 7).all()
    assert (mixed.conv.weight == 1).all()
    assert dict((name, done) for name, _, done in report.rows)["head.weight"] == "left: as overrides says"
    assert "head.weight" in report.left


def test_overrides_take_names_of_schemes(mixed):
    initialize(mixed, ones, overrides={"head": "zeros"})
    assert (mixed.head.weight == 0).all()


def test_overrides_reach_an_embedding_only_by_its_name(mixed):
    initialize(mixed, ones, overrides={"embed": twos})
    assert mixed.embed.weight[:, 0].tolist() == [2, 2, 2, 0, 2, 2, 2, 2, 2, 2]


def test_layer_left_by_overrides_keeps_its_bias_too(mixed):
    initialize(mixed, ones, overrides={"conv": None})
    assert (mixed.conv.bias == 7).all()


@pytest.mark.parametrize("pattern", ["heads", "norm", "blocks", "blocks.2.*", "head.weight", "", "recur"])
def test_pattern_that_fits_nothing_is_refused_and_the_layers_are_named(mixed, pattern):
    before = values(mixed)
    with pytest.raises(ValueError) as caught:
        initialize(mixed, ones, overrides={"head": twos, pattern: twos})
    assert f"{pattern!r} fits no layer" in str(caught.value)
    for name in ("'conv'", "'embed'", "'blocks.1.2'", "'head'", "'attend.out_proj'"):
        assert name in str(caught.value)
    assert same(values(mixed), before)


# --- shared and nested ------------------------------------------------------------------------


def test_weight_that_layers_share_is_set_once_by_the_first():
    first, second = nn.Linear(400, 100), nn.Linear(400, 100)
    second.weight = first.weight
    model = nn.Sequential(first, second, nn.Linear(100, 400, bias=False))
    model[2].weight = nn.Parameter(first.weight.detach().clone().T)
    report = initialize(model, "lecun_normal", generator=generator(2))
    variance = first.weight.detach().double().square().mean().item()
    assert abs(variance - 1 / 400) < 6 / 400 * math.sqrt(2 / 40000)
    assert report.initialised == ("0.weight", "0.bias", "1.bias", "2.weight")
    again = copy.deepcopy(model)
    initialize(again, "lecun_normal", generator=generator(2))
    assert same(values(again), values(model))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4, padding_idx=0)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def test_embedding_tied_to_a_head_takes_the_scheme_of_the_head_and_keeps_its_padding_row():
    model = Tied()
    report = initialize(model, ones)
    assert report.initialised == ("embed.weight",)
    assert (model.head.weight[1:] == 1).all()
    assert (model.embed.weight[0] == 0).all()


def test_override_decides_over_a_weight_that_is_shared():
    for overrides in ({"embed": twos}, {"head": twos}, {"embed": None, "head": twos}):
        model = Tied()
        initialize(model, ones, overrides=overrides)
        assert (model.head.weight[1:] == 2).all()


def test_weight_that_is_shared_is_left_if_overrides_leaves_one_layer_alone():
    for name in ("embed", "head"):
        model = Tied()
        before = values(model)
        report = initialize(model, ones, overrides={name: None})
        assert same(values(model), before)
        assert report.rows == [("embed.weight", (10, 4), "left: as overrides says")]
        assert report.left == ("embed.weight",)


def test_module_used_twice_is_set_once():
    inner = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": inner, "b": nn.Sequential(inner)})
    report = initialize(model, "he_normal", generator=generator(3))
    assert report.initialised == ("a.weight", "a.bias")
    alone = nn.Linear(4, 4)
    initialize(alone, "he_normal", generator=generator(3))
    assert torch.equal(alone.weight, inner.weight)


def test_extra_parameter_of_a_layer_is_left_and_not_called_an_embedding():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(3, 4)
            self.scale = nn.Parameter(torch.full((4,), 7.0))

    model = nn.Sequential(Scaled())
    rows = {name: done for name, _, done in initialize(model, ones).rows}
    assert (model[0].scale == 7).all()
    assert rows == {
        "0.weight": "constant 1",
        "0.bias": "zero",
        "0.scale": "left: neither the weight nor the bias of its layer",
    }


# --- weights that are computed ----------------------------------------------------------------


def test_parametrised_weights_are_left():
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Conv1d(4, 4, 3)),
        nn.Linear(4, 4),
    )
    before = values(model)
    report = initialize(model, ones)
    after = values(model)
    assert report.initialised == ("3.weight", "3.bias")
    assert all(torch.equal(before[name], after[name]) for name in report.left)


def test_old_weight_norm_is_left():
    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = nn.utils.weight_norm(nn.Linear(3, 4))
    before = values(layer)
    report = initialize(layer, ones)
    assert report.initialised == ()
    assert same(values(layer), before)
    assert {done for _, _, done in report.rows} == {"left: its weight is computed from other parameters"}


def test_parametrised_bias_is_left_while_the_weight_is_set():
    class Itself(nn.Module):
        def forward(self, bias):
            return bias

    layer = nn.Linear(3, 4)
    parametrize.register_parametrization(layer, "bias", Itself())
    before = layer.bias.detach().clone()
    report = initialize(layer, ones)
    assert report.initialised == ("weight",)
    assert torch.equal(layer.bias, before)


# --- random numbers ---------------------------------------------------------------------------


def test_generator_makes_a_model_repeatable_and_spares_the_global_state(mixed):
    other = copy.deepcopy(mixed)
    before = torch.get_rng_state()
    initialize(mixed, "glorot_uniform", generator=generator(4))
    initialize(other, "glorot_uniform", generator=generator(4))
    assert same(values(mixed), values(other))
    initialize(other, "glorot_uniform", generator=generator(5))
    assert not torch.equal(mixed.conv.weight, other.conv.weight)
    assert torch.equal(before, torch.get_rng_state())


def test_layers_of_one_shape_differ(mixed):
    initialize(mixed, "he_normal", generator=generator(6))
    assert not torch.equal(mixed.blocks[0][0].weight, mixed.blocks[1][0].weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_models_of_other_precision_are_set(mixed, dtype):
    mixed.to(dtype)
    initialize(mixed, "torch_default", overrides={"head": "orthogonal", "embed": "lecun_truncated"})
    assert all(parameter.dtype == dtype and parameter.isfinite().all() for parameter in mixed.parameters())
    assert not (mixed.head.weight == 7).any()


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [torch.ones(2, 3), nn.Linear, None, [nn.Linear(2, 2)]], ids=lambda t: str(type(t)))
def test_thing_that_is_no_module_is_refused(thing):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn.Module"):
        initialize(thing, "he_normal")


@pytest.mark.parametrize(
    ("scheme", "overrides", "error", "message"),
    [
        ("he", None, ValueError, "scheme must be one of"),
        (None, None, TypeError, "a name or a scheme"),
        (nn.init.zeros_, None, TypeError, "a name or a scheme"),
        (ones, {"head": "he"}, ValueError, "scheme must be one of"),
        (ones, {"head": 2.0}, TypeError, "a name or a scheme"),
        (ones, {"head": schemes.he_normal.replace(gain=1e30)}, ValueError, "cannot hold"),
        (Scheme("huge", gain=1e30), None, ValueError, "cannot hold"),
    ],
)
def test_wrong_scheme_is_refused_and_nothing_changes(mixed, scheme, overrides, error, message):
    mixed.half()
    before = values(mixed)
    with pytest.raises(error, match=message):
        initialize(mixed, scheme, overrides=overrides)
    assert same(values(mixed), before)


@pytest.mark.parametrize("scheme", ["he_normal", "orthogonal", "torch_default", "zeros"])
def test_lazy_layer_is_refused_before_anything_changes(scheme):
    model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(5))
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match="lazy"):
        initialize(model, scheme)
    assert torch.equal(model[0].weight, before)
    model(torch.ones(1, 3))
    assert len(initialize(model, scheme).initialised) == 4


def test_generator_of_another_device_is_refused_before_anything_changes():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4, device="meta"))
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match="generator must be on the device of weight"):
        initialize(model, "he_normal", generator=generator())
    assert torch.equal(model[0].weight, before)


def test_overrides_and_generator_are_checked():
    layer = nn.Linear(3, 2)
    before = layer.weight.clone()
    with pytest.raises(TypeError, match=r"overrides must map names to schemes, got \['a'\]"):
        initialize(layer, "he_normal", overrides=["a"])
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator, got 3"):
        initialize(layer, "he_normal", generator=3)
    assert torch.equal(layer.weight, before)
