"""The networks of the experiments: what they compute, what their parts are called, what they refuse."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from initlib import generator, initialize, nets
from initlib.activations import ACTIVATIONS
from initlib.nets import Elementwise, bottleneck, mlp


def inputs(samples, width):
    return torch.randn(samples, width, generator=generator(3100))


@pytest.mark.parametrize("widths", [[5, 3], [4, 7, 2], [6, 5, 5, 3], (2, 1, 1), np.array([3, 4, 2])])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_has_a_linear_layer_a_pair_of_widths_and_activations_between(widths, bias):
    model = mlp(widths, "tanh", bias=bias)
    kinds = [type(part) for part in model]
    assert kinds == ([nn.Linear, Elementwise] * (len(widths) - 1))[:-1]
    layers = [part for part in model if isinstance(part, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == list(itertools.pairwise(widths))
    assert all((layer.bias is not None) == bias for layer in layers)


@pytest.mark.parametrize("bias", [True, False])
def test_mlp_computes_what_a_plain_loop_does(bias):
    model, x = mlp([6, 9, 8, 4], "tanh", bias=bias), inputs(5, 6)
    h = x
    for k in (0, 2, 4):
        h = h @ model[k].weight.T + (model[k].bias if bias else 0)
        if k < 4:
            h = torch.tanh(h)
    torch.testing.assert_close(model(x), h)
    assert not torch.equal(model(x), torch.tanh(h))  # nothing acts behind the last layer


def test_activation_of_an_mlp_is_the_rectifier_unless_it_is_named():
    model, x = mlp([6, 9, 4]), inputs(5, 6)
    torch.testing.assert_close(model(x), model[2](torch.relu(model[0](x))))
    block = bottleneck(6, 5, 3, 1, 4)
    middle = block.blocks[0]
    torch.testing.assert_close(middle(inputs(4, 5)), middle[2](torch.relu(middle[0](inputs(4, 5)))))


@pytest.mark.parametrize(
    "activation",
    [*ACTIVATIONS, torch.sin, nn.PReLU(), lambda u: u**3],
    ids=[*ACTIVATIONS, "function", "module", "lambda"],
)
def test_elementwise_is_the_activation_as_a_module(activation):
    module, u = Elementwise(activation), inputs(3, 4)
    function = ACTIVATIONS[activation] if isinstance(activation, str) else activation
    assert torch.equal(module(u), function(u))


@pytest.mark.parametrize(
    ("activation", "name"),
    [("leaky_relu_0.2", "leaky_relu_0.2"), (torch.tanh, "tanh"), (nn.PReLU(), "activation")],
    ids=["name", "function", "module"],
)
def test_elementwise_shows_which_activation_it_is(activation, name):
    assert f"Elementwise({name}" in repr(mlp([3, 2, 1], activation)).replace("\n", "").replace(" ", "")
    assert Elementwise(activation).name == name


def test_layers_share_an_activation_with_parameters():
    slope = nn.PReLU()
    model = mlp([4, 4, 4, 4], slope)
    assert model[1].function is model[3].function is slope
    assert sum(parameter is slope.weight for parameter in model.parameters()) == 1
    assert len(list(model.parameters())) == 7


@pytest.mark.parametrize(("width", "hidden"), [(8, 3), (3, 8), (4, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_bottleneck_is_a_stack_of_blocks_between_a_read_in_and_a_head(width, hidden, bias):
    model = bottleneck(6, width, hidden, 3, 5, "tanh", bias=bias)
    assert [name for name, _ in model.named_children()] == ["read_in", "blocks", "head"]
    assert (model.read_in.in_features, model.read_in.out_features) == (6, width)
    assert (model.head.in_features, model.head.out_features) == (width, 5)
    assert len(model.blocks) == 3
    for block in model.blocks:
        assert [type(part) for part in block] == [nn.Linear, Elementwise, nn.Linear]
        assert tuple(block[0].weight.shape) == (hidden, width)
        assert tuple(block[2].weight.shape) == (width, hidden)
    assert len(list(model.parameters())) == (2 if bias else 1) * 8
    assert len({id(parameter) for parameter in model.parameters()}) == len(list(model.parameters()))


@pytest.mark.parametrize("bias", [True, False])
def test_bottleneck_acts_only_in_the_middle_of_its_blocks(bias):
    model, x = bottleneck(6, 7, 3, 2, 5, "relu", bias=bias), inputs(4, 6)
    h = model.read_in(x)
    for block in model.blocks:
        h = block[2](torch.relu(block[0](h)))
    torch.testing.assert_close(model(x), model.head(h))
    linear = bottleneck(6, 7, 3, 2, 5, "linear", bias=False)
    matrices = [linear.read_in.weight, *(part.weight for block in linear.blocks for part in (block[0], block[2]))]
    product = linear.head.weight @ torch.linalg.multi_dot(matrices[::-1])
    torch.testing.assert_close(linear(x), x @ product.T, rtol=1e-4, atol=1e-6)


def test_parts_of_a_bottleneck_can_be_named_when_it_is_initialised():
    model = bottleneck(6, 40, 20, 2, 5)
    overrides = {"read_in": "lecun_normal", "blocks.*": "geometric_normal", "blocks.1.2": "he_normal", "head": "zeros"}
    report = initialize(model, "orthogonal", overrides=overrides, generator=generator(3101))
    done = {row[0]: row[2] for row in report.rows}
    assert {name: done[name] for name in done if name.endswith("weight")} == {
        "read_in.weight": "lecun_normal",
        "blocks.0.0.weight": "geometric_normal",
        "blocks.0.2.weight": "geometric_normal",
        "blocks.1.0.weight": "geometric_normal",
        "blocks.1.2.weight": "he_normal",
        "head.weight": "zeros",
    }
    assert len(report.initialised) == 12
    assert report.left == ()
    assert (model.head.weight == 0).all()
    assert all((parameter == 0).all() for name, parameter in model.named_parameters() if name.endswith("bias"))


def test_parameters_of_an_activation_are_left_and_reported():
    report = initialize(mlp([4, 4, 4], nn.PReLU()), "he_normal")
    assert report.left == ("1.function.weight",)
    assert "PReLU is not a layer with fans" in str(report)


@pytest.mark.parametrize("build", [lambda: mlp([20, 30, 10]), lambda: bottleneck(20, 30, 10, 1, 5)])
def test_weights_are_those_of_torch(build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = build()
        torch.manual_seed(5)
        for layer in (part for part in model.modules() if isinstance(part, nn.Linear)):
            expected = nn.Linear(layer.in_features, layer.out_features)
            assert torch.equal(layer.weight, expected.weight)
            assert torch.equal(layer.bias, expected.bias)


BAD_WIDTHS = [
    ([4, 0, 3], ValueError, "each of widths must be at least 1, got 0"),
    ([4, -2], ValueError, "each of widths must be at least 1, got -2"),
    ([4, 3.0], TypeError, "each of widths must be an integer, got 3.0"),
    ([True, 3], TypeError, "each of widths must be an integer, got True"),
    (["4", 3], TypeError, "each of widths must be an integer, got '4'"),
    ([4, None], TypeError, "each of widths must be an integer, got None"),
    ([4], ValueError, r"widths must name at least inputs and outputs, got \[4\]"),
    ([], ValueError, r"widths must name at least inputs and outputs, got \[\]"),
]


@pytest.mark.parametrize(("widths", "error", "message"), BAD_WIDTHS)
def test_widths_that_no_network_has_are_refused(widths, error, message):
    with pytest.raises(error, match=message):
        mlp(widths)


@pytest.mark.parametrize("name", ["inputs", "width", "hidden", "blocks", "outputs"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), (None, TypeError)])
def test_sizes_that_no_bottleneck_has_are_refused_by_name(name, value, error):
    sizes = {"inputs": 4, "width": 3, "hidden": 2, "blocks": 1, "outputs": 2, name: value}
    with pytest.raises(error, match=f"^{name} must be .*, got {value}"):
        bottleneck(**sizes)


@pytest.mark.parametrize(
    "build",
    [Elementwise, lambda a: mlp([3, 2], a), lambda a: mlp([3, 2, 1], a), lambda a: bottleneck(3, 2, 2, 1, 1, a)],
)
def test_unknown_activation_is_refused(build):
    with pytest.raises(ValueError, match=r"activation must be one of linear, .*, got 'swish'"):
        build("swish")
    with pytest.raises(TypeError, match="activation must be a name, a module or a function"):
        build(nn.ReLU)


def test_integers_of_numpy_are_sizes():
    assert nets.bottleneck(*map(np.int64, (4, 3, 2, 1, 2)))(inputs(1, 4)).shape == (1, 2)
