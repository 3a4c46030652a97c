"""The layers of any model in call order, what leaves them, and that looking changes nothing."""

import copy
import math
import random
import warnings
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from untouched import random_states, snapshot

from initlib import check_close, constant, generator, initialize, layer_moments, nets, probe, propagate
from initlib.layers import KINDS, preserved, run, select, watch

T = 40


def normal(*shape, n=1, **options):
    return torch.randn(*shape, generator=generator(n), **options)


def seen(model, batch, **options):
    """Labels of the calls of a model."""
    calls = []
    with watch(model, lambda call: calls.append(call), **options):
        run(model, batch)
    return calls


# --- the numbers ------------------------------------------------------------------------------


def test_moments_are_those_of_a_formula_written_out():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = normal(T, 3)
    found = layer_moments(model, x)
    u = model[0](x).detach().double().numpy()
    v = model(x).detach().double().numpy()
    for k, values in enumerate((u, v)):
        assert found.forward[k] == pytest.approx((values**2).mean(), rel=1e-12)
        assert found.mean_squared[k] == pytest.approx((values.mean(0) ** 2).mean(), rel=1e-12)
        assert found.variance[k] == pytest.approx(values.var(0).mean(), rel=1e-12)  # divided by T, not T - 1
    np.testing.assert_allclose(found.forward, found.mean_squared + found.variance, rtol=1e-12)


def test_moments_equal_a_trace_where_nothing_is_random():
    widths, x = [5, 4, 4, 3], normal(T, 5)
    trace = propagate(widths, constant(0.4), "tanh", networks=1, inputs=x)
    model = nets.mlp(widths, "tanh", bias=False)
    initialize(model, constant(0.4))
    found = layer_moments(model, x)
    for name in ("forward", "mean_squared", "variance"):
        np.testing.assert_allclose(getattr(found, name), getattr(trace, name)[0, 1:], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_moments_agree_with_a_trace(activation):
    depth, width, networks = 3, 30, 100
    x = normal(T, width, n=2)
    trace = propagate([width] * (depth + 1), "lecun_normal", activation, networks=networks, inputs=x, seed=7)
    found = np.empty((3, networks, depth))
    model = nets.mlp([width] * (depth + 1), activation, bias=False)
    g = generator(8)
    for k in range(networks):
        initialize(model, "lecun_normal", generator=g)
        moments = layer_moments(model, x)
        found[:, k] = moments.forward, moments.mean_squared, moments.variance
    expected = trace.forward[:, 1:], trace.mean_squared[:, 1:], trace.variance[:, 1:]
    for ours, theirs in zip(found, expected, strict=True):
        error = np.hypot(ours.std(0), theirs.std(0)) / np.sqrt(networks)
        assert (np.abs(ours.mean(0) - theirs.mean(0)) < 5.5 * error).all()


LAYERS = {
    "linear": (nn.Linear(3, 4), (T, 3), 1),
    "linear_on_tokens": (nn.Linear(3, 4), (6, 7, 3), 2),
    "linear_without_batch": (nn.Linear(3, 4), (3,), 0),
    "conv1d": (nn.Conv1d(3, 4, 2), (6, 3, 7), 1),
    "conv2d": (nn.Conv2d(4, 6, 3, groups=2, stride=2), (5, 4, 7, 7), 1),
    "conv2d_without_batch": (nn.Conv2d(4, 6, 3), (4, 7, 7), 0),
    "conv3d": (nn.Conv3d(2, 3, 2), (4, 2, 3, 3, 3), 1),
    "transposed1d": (nn.ConvTranspose1d(4, 6, 3, groups=2), (5, 4, 3), 1),
    "transposed2d": (nn.ConvTranspose2d(4, 6, 3, stride=2), (5, 4, 3, 3), 1),
    "transposed3d": (nn.ConvTranspose3d(2, 3, 2), (4, 2, 3, 3, 3), 1),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_unit_is_an_output_feature_or_a_channel(kind):
    layer, shape, dimension = LAYERS[kind]
    x = normal(*shape) + 1
    u = layer(x).detach().double()
    units = [u.select(dimension, j) for j in range(u.shape[dimension])]
    found = layer_moments(layer, x)
    mean_squared = np.mean([each.mean().item() ** 2 for each in units])
    assert found.names == ("",)
    check_close(kind, found.mean_squared, [mean_squared], rtol=1e-12)
    check_close(kind, found.variance, [np.mean([each.numpy().var() for each in units])], rtol=1e-12, atol=1e-30)
    (call,) = seen(layer, x)
    assert call.samples == units[0].numel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_moments_survive_numbers_whose_squares_overflow(dtype):
    layer = nn.Linear(1, 1, bias=False).to(dtype)
    large = {torch.float16: 6e4, torch.float64: 1e150}.get(dtype, 1e38)
    nn.init.constant_(layer.weight, 1.0)
    x = torch.tensor([[large], [-large]], dtype=dtype)
    found = layer_moments(layer, x)
    assert found.forward[0] == pytest.approx(x[0].item() ** 2)
    assert found.variance[0] == pytest.approx(x[0].item() ** 2)


def test_small_variance_beside_a_large_mean_is_seen():
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(layer.weight, 1.0)
    x = torch.tensor([[1e6 - 1e-3], [1e6 + 1e-3]], dtype=torch.float64)
    assert layer_moments(layer, x).variance[0] == pytest.approx(1e-6, rel=1e-6)


def test_what_is_not_finite_is_reported_as_such():
    model = nets.mlp([2, 3, 1])
    found = layer_moments(model, torch.tensor([[float("nan"), 1.0], [1.0, 1.0]]))
    assert np.isnan(found.forward).all()


# --- which layers, and when -------------------------------------------------------------------


class Backwards(nn.Module):
    """Calls its layers in another order than it lists them, one twice and one never, and adds a skip connection."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)
        self.also = self.shared
        self.embed = nn.Embedding(5, 4)
        self.first = nn.Linear(3, 4)

    def forward(self, x, *, scale=1.0, index=None):
        x = self.first(x) if index is None else self.embed(index)
        x = x + F.relu_(self.shared(x)) * scale
        return self.last(x + self.shared(x))


def test_layers_come_in_the_order_of_their_calls():
    found = layer_moments(Backwards(), normal(T, 3))
    assert found.names == ("first", "shared", "shared (2)", "last")
    calls = seen(Backwards(), normal(T, 3))
    assert [(call.name, call.times) for call in calls] == [("first", 1), ("shared", 1), ("shared", 2), ("last", 1)]
    assert [call.module.in_features for call in calls] == [3, 4, 4, 4]
    assert all(len(call.args) == 1 and call.kwargs == {} for call in calls)


def test_calls_are_counted_anew_in_each_pass():
    model = Backwards()
    for _ in range(2):
        assert layer_moments(model, normal(T, 3)).names[1:3] == ("shared", "shared (2)")


def test_embeddings_and_layers_that_are_not_called_have_no_row():
    found = layer_moments(Backwards(), {"x": None, "index": torch.tensor([[0, 1], [2, 3]])})
    assert found.names == ("shared", "shared (2)", "last")
    assert nn.Embedding not in KINDS


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ("first", ["first"]),
        ("*st", ["last", "first"]),
        (["first", "un*"], ["unused", "first"]),
        (("*",), ["last", "unused", "shared", "first"]),
        ("also", ["also"]),
    ],
)
def test_layers_are_chosen_by_name(layers, names):
    assert list(select(Backwards(), layers)) == names


def test_module_with_two_names_goes_by_the_one_that_was_asked_for():
    assert layer_moments(Backwards(), normal(T, 3), layers="also").names == ("also", "also (2)")


@pytest.mark.parametrize("kind", ["module", "function"])
def test_pre_activation_is_read_before_an_activation_in_place(kind):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 50)

        def forward(self, x):
            return F.relu_(self.layer(x))

    model = nn.Sequential(nn.Linear(3, 50), nn.ReLU(inplace=True)) if kind == "module" else Functional()
    x = normal(T, 3)
    u = next(iter(select(model).values()))(x).detach().double()
    assert (u < 0).any()
    found = layer_moments(model, x)
    assert found.forward[0] == pytest.approx(u.square().mean().item(), rel=1e-12)


def test_own_output_of_a_layer_is_seen_before_the_hooks_of_others():
    layer = nn.Linear(2, 3)
    x = normal(T, 2)
    expected = layer_moments(layer, x).forward
    layer.register_forward_hook(lambda module, args, output: output.zero_())
    assert layer_moments(layer, x).forward == expected


def test_callback_can_replace_what_a_layer_returns():
    model = nets.mlp([2, 3, 1])
    outputs = []
    with watch(model, lambda call: torch.zeros_like(call.output), layers="0"):
        outputs.append(run(model, normal(4, 2)))
    assert torch.equal(outputs[0], model[2].bias.expand(4, 1))


def test_backward_moments_can_be_read_at_the_same_place():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    x, gradients = normal(4, 2), {}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def note(call):
        call.output.register_hook(lambda g: gradients.__setitem__(call.label, g.clone()))

    before = snapshot(model)
    with watch(model, note):
        run(model, x).sum().backward()
        assert not any((parameter.grad == 1).all() for parameter in (model[0].weight, model[0].bias))
    assert snapshot(model) == before
    u = (x @ model[0].weight.T + model[0].bias).detach()
    assert torch.equal(gradients["2"], torch.ones(4, 1))
    torch.testing.assert_close(gradients["0"], (u > 0) * model[2].weight.detach())


# --- batches ----------------------------------------------------------------------------------


def test_batch_may_be_a_tensor_arguments_or_keywords():
    model, x = Backwards(), normal(T, 3)
    one = layer_moments(model, x)
    for batch in ((x,), {"x": x}, {"x": x, "scale": 1.0}):
        assert layer_moments(model, batch) == one
    assert layer_moments(model, {"x": x, "scale": 2.0}) != one


def test_two_measurements_of_the_same_give_the_same_table():
    model, x = nets.mlp([3, 4, 2]), normal(T, 3)
    assert layer_moments(model, x) == layer_moments(model, x)


def test_batch_is_not_changed_by_a_model_that_works_in_place():
    class Greedy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, more):
            more["deep"][0].zero_()
            return self.layer(x.mul_(2))

    x, deep = normal(T, 3), [torch.ones(2)]
    kept = x.clone()
    layer_moments(Greedy(), (x, {"deep": deep}))
    layer_moments(Greedy(), {"x": x, "more": {"deep": deep}})
    layer_moments(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)), x)
    assert torch.equal(x, kept)
    assert (deep[0] == 1).all()


@pytest.mark.parametrize(
    "batch", [[1.0], 3, None, np.ones((2, 3)), {1: 2}], ids=["list", "int", "none", "numpy", "keys"]
)
def test_other_batches_are_refused(batch):
    with pytest.raises(TypeError, match="batch must be a tensor, a tuple"):
        layer_moments(nn.Linear(3, 2), batch)


def test_empty_batch_is_refused():
    with pytest.raises(ValueError, match=r"batch gives layer '0' no sample: an output of shape \(0, 4\)"):
        layer_moments(nets.mlp([3, 4, 2]), torch.empty(0, 3))


# --- what is refused --------------------------------------------------------------------------


def test_model_must_be_a_module_with_layers_that_it_calls():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got Tensor"):
        layer_moments(normal(2), normal(2))
    with pytest.raises(ValueError, match="no linear layer or convolution, got Sequential"):
        layer_moments(nn.Sequential(nn.ReLU(), nn.Embedding(2, 3)), normal(2))
    with pytest.raises(ValueError, match="model calls none of its layers 'unused'"):
        layer_moments(Backwards(), normal(T, 3), layers="unused")


def test_pattern_that_fits_nothing_is_refused_and_the_layers_are_named():
    with pytest.raises(ValueError, match=r"layers: 'frist' fits no layer; there are 'last', .*'first'"):
        layer_moments(Backwards(), normal(T, 3), layers=["first", "frist"])
    with pytest.raises(ValueError, match="at least one pattern"):
        layer_moments(Backwards(), normal(T, 3), layers=[])
    for layers in (3, [3], None):
        with pytest.raises(TypeError, match="layers must be a name pattern or a sequence of them"):
            layer_moments(Backwards(), normal(T, 3), layers=layers)


def test_lazy_model_is_refused():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'0.weight' of the model has no shape yet"):
        layer_moments(model, normal(2, 4))
    assert isinstance(model[0], nn.LazyLinear)


def test_layer_that_returns_no_real_tensor_is_named():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    with pytest.raises(TypeError, match="layer '0' must return a real tensor, got tuple"):
        layer_moments(nn.Sequential(Pair(2, 3)), normal(4, 2))
    with pytest.raises(TypeError, match=r"layer '' must return a real tensor, got torch\.complex64"):
        layer_moments(nn.Linear(2, 3, dtype=torch.complex64), torch.ones(2, 2, dtype=torch.complex64))


# --- nothing changes --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_model_and_random_states_are_as_before(mixed, mode):
    getattr(mixed, mode)()
    mixed[1].train()
    before = snapshot(mixed)
    layer_moments(mixed, normal(6, 3, 4, 4))
    assert snapshot(mixed) == before


def test_batch_norm_and_dropout_act_in_the_mode_of_the_model(mixed):
    x, found = normal(6, 3, 4, 4), []
    for mode in (True, False):
        mixed.train(mode)
        found.append(layer_moments(mixed, x).forward[1])
        with preserved(mixed), torch.no_grad():  # the same random numbers again
            expected = mixed(x).double().square().mean().item()
        assert found[-1] == pytest.approx(expected, rel=1e-12)
    assert found[0] != found[1]


class Restless(nn.Module):
    """Changes all that a model can change while it runs, and then fails if it is told to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.log, self.optional = "quiet", None
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("counted", torch.tensor(float("nan")))

    def forward(self, x, fail=False):
        y = self.layer(x)
        self.log, self.optional = "busy", nn.Linear(1, 1)
        self.replaced = self.replaced + 1
        self.counted.add_(1)
        self.another = 3
        self.register_buffer("late", torch.ones(1))
        self.layer.eval()
        self.layer.weight.data.mul_(2)
        self.layer.bias.requires_grad_(False)
        with torch.enable_grad():
            self.layer(torch.ones(3, requires_grad=True)).sum().backward()
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
        if fail:
            raise RuntimeError("on purpose")
        return y


@pytest.mark.parametrize("fail", [False, True])
def test_restless_model_is_as_before_also_if_it_raises(fail):
    model = Restless()
    model.layer.weight.grad = torch.ones(3, 3)
    before = snapshot(model)
    before["values"].pop("counted")  # NaN is not equal to itself
    if fail:
        with pytest.raises(RuntimeError, match="on purpose"):
            layer_moments(model, (normal(4, 3), True))
    else:
        layer_moments(model, normal(4, 3))
    after = snapshot(model)
    assert np.isnan(after["values"].pop("counted"))
    assert after == before
    assert (model.log, model.optional) == ("quiet", None)
    assert list(model.state_dict()) == ["replaced", "counted", "layer.weight", "layer.bias"]


def test_callback_that_raises_leaves_no_hook():
    model = nets.mlp([2, 3, 1])
    before = snapshot(model)

    def fail(call):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), watch(model, fail):
        run(model, normal(4, 2))
    assert snapshot(model) == before


def test_hooks_of_others_stay_and_work():
    model, seen = nets.mlp([2, 3, 1]), []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    layer_moments(model, normal(4, 2))
    model(normal(4, 2))
    assert len(seen) == 2
    assert len(model[0]._forward_hooks) == 1


def test_backward_pass_that_is_pending_still_works(mixed):
    mixed.eval()
    loss = mixed(normal(2, 3, 4, 4)).sum()
    layer_moments(mixed, normal(2, 3, 4, 4))
    loss.backward()


def test_measuring_records_no_gradient():
    calls = seen(nets.mlp([2, 3, 1]), normal(4, 2))
    assert calls[0].output.requires_grad  # a watcher may want it
    model, recorded = nets.mlp([2, 3, 1]), []
    model[0].register_forward_hook(lambda module, args, output: recorded.append(output.requires_grad))
    layer_moments(model, normal(4, 2))
    assert recorded == [False]


def test_random_states_are_restored_if_the_block_raises():
    def draw_and_fail():
        torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
        raise ZeroDivisionError

    model = nn.Linear(1, 1)
    states = random_states()
    with pytest.raises(ZeroDivisionError), preserved(model):
        draw_and_fail()
    assert random_states() == states


# --- models of all kinds ----------------------------------------------------------------------


def test_parametrised_layers_are_read():
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU(), parametrizations.spectral_norm(nn.Linear(4, 2))
    )
    x = normal(T, 3)
    model.train()
    before = snapshot(model)
    found = layer_moments(model, x)
    assert snapshot(model) == before
    assert found.names == ("0", "2")
    assert found.forward[0] == pytest.approx(model[0](x).double().square().mean().item(), rel=1e-12)


def test_transformer_is_read_also_where_torch_has_a_fast_path():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    found = layer_moments(model, normal(3, 5, 8))
    assert found.names == ("linear1", "linear2")


def test_compiled_model_is_read_without_compiling_for_it():
    model = nets.mlp([3, 4, 2])
    x = normal(T, 3)
    expected = layer_moments(model, x)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the compiler
        compiled(x)
    found = layer_moments(compiled, x)
    assert len(graphs) == 1
    assert found.names == ("_orig_mod.0", "_orig_mod.2")
    assert (found.forward == expected.forward).all()


def test_table_has_a_line_a_call():
    found = layer_moments(Backwards(), normal(T, 3))
    lines = str(found).splitlines()
    assert lines[0].split("  ")[0] == "layer"
    assert [line.split("  ")[0] for line in lines[2:]] == list(found.names)
    assert "<table>" in found._repr_html_()
    assert found.forward.shape == found.mean_squared.shape == found.variance.shape == (4,)


class Changing(nn.Module):
    """Writes wherever a forward pass can write."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("grows", torch.zeros(0))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("gaps", torch.full((1,), math.nan).expand(5))
        self.log, self.cache, self.seen = [1], OrderedDict(a=1), {2}
        self.plain, self.drawn = torch.ones(2), torch.Generator().manual_seed(3)

    def forward(self, x):
        h = self.layer(x)
        self.grows.resize_(3).fill_(1.0)
        self.average.mul_(0.9).add_(0.1 * h.mean(0))
        self.log.append(2)
        self.cache["h"] = h
        self.seen.add(4)
        self.plain += 1
        torch.rand(1, generator=self.drawn)
        return h


@pytest.mark.parametrize("measure", [layer_moments, probe])
def test_whatever_forward_writes_into_a_module_is_put_back(measure):
    model, x = Changing(), torch.randn(5, 3)
    model.layer(x).sum().backward()
    objects = [model.log, model.cache, model.seen, model.plain, model.grows]
    gradient, state = model.layer.weight.grad, model.drawn.get_state()
    measure(model, x)
    now = [model.log, model.cache, model.seen, model.plain, model.grows]
    assert all(one is other for one, other in zip(objects, now, strict=True))
    assert (model.log, model.cache, model.seen) == ([1], OrderedDict(a=1), {2})
    assert torch.equal(model.plain, torch.ones(2))
    assert model.grows.shape == (0,)
    assert torch.equal(model.average, torch.zeros(4))
    assert model.layer.weight.grad is gradient
    assert torch.equal(model.drawn.get_state(), state)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_buffer_is_in_no_graph_afterwards(frozen):
    model, x = Changing(), torch.randn(5, 3)
    model.layer.requires_grad_(not frozen)
    head = nn.Sequential(model, nn.Linear(4, 2))
    probe(head, x)
    assert not model.average.requires_grad
    with torch.no_grad():
        model(x)
    copy.deepcopy(model.average)


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize("wrap", [lambda x: (Pair(x, x),), lambda x: ([x, (x,)],), lambda x: (OrderedDict(first=x),)])
def test_tensors_of_a_batch_are_copied_in_any_container(wrap):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, pair):
            first = pair["first"] if isinstance(pair, dict) else pair[0]
            return self.layer(first.add_(1))

    x = torch.randn(4, 3)
    before = x.clone()
    layer_moments(Writes(), wrap(x))
    assert torch.equal(x, before)


def test_a_packed_sequence_is_a_batch():
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 2), torch.randn(2, 2)])
    found = probe(nn.LSTM(2, 4), packed)
    assert found.names == ("",)
    assert found.forward[0] > 0
