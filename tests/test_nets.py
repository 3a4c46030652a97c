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


def pictures(batch, channels, height, width=None):
    return torch.randn(batch, channels, height, width or height, generator=generator(3102))


def layers(model):
    return {name: part for name, part in model.named_modules() if isinstance(part, (nn.Conv2d, nn.ConvTranspose2d))}


CONVOLUTIONAL = {
    "all_conv": lambda **options: nets.all_conv(3, 10, width=4, **options),
    "unet": lambda **options: nets.unet(3, 2, base=4, levels=2, **options),
}
EITHER = pytest.mark.parametrize("kind", CONVOLUTIONAL)


def test_all_conv_has_ten_convolutions_of_the_published_kernels_strides_and_widths():
    convs = layers(nets.all_conv(3, 10, width=96))
    assert list(convs) == [*(f"unit{k}.conv" for k in range(1, 10)), "head"]
    assert [conv.out_channels for conv in convs.values()] == [96] * 3 + [192] * 6 + [10]
    assert [conv.in_channels for conv in convs.values()] == [3] + [96] * 3 + [192] * 6
    assert [conv.kernel_size[0] for conv in convs.values()] == [3] * 8 + [1, 1]
    assert [name for name, conv in convs.items() if conv.stride == (2, 2)] == ["unit3.conv", "unit6.conv"]
    # the nine of All-CNN-C have 1.37 million; the tenth is one more of 3 x 3, 192 to 192
    parameters = sum(p.numel() for p in nets.all_conv(3, 10, width=96).parameters())
    assert parameters - (9 * 192**2 + 192) == pytest.approx(1.37e6, rel=0.005)


@pytest.mark.parametrize("side", [1, 2, 7, 14, 16, 32, (14, 9)])
def test_all_conv_takes_images_of_any_size(side):
    height, width = side if isinstance(side, tuple) else (side, side)
    model = nets.all_conv(1, 5, width=3)
    assert model(pictures(2, 1, height, width)).shape == (2, 5)
    coarse = model[:9](pictures(2, 1, height, width))
    assert coarse.shape == (2, 6, -(-height // 4), -(-width // 4))


def test_all_conv_averages_its_head_over_all_positions():
    model, x = nets.all_conv(2, 4, width=3), pictures(3, 2, 14)
    torch.testing.assert_close(model(x), model[:10](x).mean((2, 3)))


def test_unet_computes_what_is_written_out_here():
    model, x = nets.unet(3, 2, base=4, levels=2, activation="tanh"), pictures(2, 3, 12, 8)

    def unit(part, h):
        return torch.tanh(part.conv(h))

    def pair(part, h):
        return unit(part.second, unit(part.first, h))

    fine = pair(model.encoder[0], x)
    middle = pair(model.encoder[1], nn.functional.max_pool2d(fine, 2))
    h = pair(model.bottom, nn.functional.max_pool2d(middle, 2))
    assert h.shape == (2, 16, 3, 2)
    h = pair(model.decoder[1], torch.cat([middle, unit(model.up[1], h)], 1))
    h = pair(model.decoder[0], torch.cat([fine, unit(model.up[0], h)], 1))
    torch.testing.assert_close(model(x), model.head(h))


def test_unet_has_the_published_widths():
    model = nets.unet(1, 2, base=64, levels=4)
    widths = [64, 128, 256, 512]
    assert [block.second.conv.out_channels for block in model.encoder] == widths
    assert model.bottom.second.conv.out_channels == 1024
    assert [(part.conv.in_channels, part.conv.out_channels) for part in model.up] == [(2 * n, n) for n in widths]
    assert [block.first.conv.in_channels for block in model.decoder] == [2 * n for n in widths]
    assert len(layers(model)) == 23


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_unet_has_five_layers_a_level_and_three_more(levels):
    assert len(layers(nets.unet(1, 2, base=2, levels=levels))) == 5 * levels + 3


def test_each_output_of_a_transposed_convolution_sums_over_exactly_its_input_channels():
    up = nets.unet(1, 2, base=4, levels=1).up[0].conv
    with torch.no_grad():
        up.weight.fill_(1)
        up.bias.zero_()
        assert torch.equal(up(torch.ones(1, 8, 5, 3)), torch.full((1, 4, 10, 6), 8.0))


@pytest.mark.parametrize("side", [8, 16, 24, (8, 40)])
def test_unet_gives_logits_for_each_pixel(side):
    height, width = side if isinstance(side, tuple) else (side, side)
    assert nets.unet(1, 3, base=2)(pictures(2, 1, height, width)).shape == (2, 3, height, width)


@pytest.mark.parametrize("shape", [(1, 1, 12, 8), (1, 1, 8, 20), (1, 1, 4, 4), (1, 1, 0, 8), (1, 8, 8), (8, 8)])
def test_images_whose_sides_do_not_divide_are_refused_with_what_is_allowed(shape):
    with pytest.raises(ValueError, match=r"multiples of 8 \(2 \*\* levels\), got \(" + ", ".join(map(str, shape))):
        nets.unet(1, 2, base=2, levels=3)(torch.zeros(shape))


@EITHER
def test_an_output_depends_on_pixels_far_away_and_on_every_channel(kind):
    model = CONVOLUTIONAL[kind](activation="tanh")
    x = pictures(1, 3, 16).requires_grad_()
    model(x).sum().backward()
    assert (x.grad != 0).all()


@EITHER
@pytest.mark.parametrize("normalize", [True, False])
def test_units_are_convolution_norm_and_activation_by_name(kind, normalize):
    model = CONVOLUTIONAL[kind](normalize=normalize)
    convs = layers(model)
    *units, head = convs
    assert head == "head"
    assert model.head.bias is not None
    for name in units:
        unit = model.get_submodule(name.removesuffix(".conv"))
        assert name.endswith(".conv")
        assert [part for part, _ in unit.named_children()] == ["conv", *["norm"] * normalize, "activation"]
        assert (unit.conv.bias is None) == normalize
        assert isinstance(unit.activation, Elementwise)
        if normalize:
            assert isinstance(unit.norm, nn.BatchNorm2d)
            assert unit.norm.num_features == unit.conv.out_channels
    assert sum(isinstance(part, nn.BatchNorm2d) for part in model.modules()) == normalize * len(units)
    assert all(conv.padding_mode == "zeros" for conv in convs.values())


@EITHER
@pytest.mark.parametrize("normalize", [True, False])
def test_pre_activations_are_still_there_after_the_activation(kind, normalize):
    model, seen = CONVOLUTIONAL[kind](normalize=normalize), {}
    for name, part in layers(model).items():
        part.register_forward_hook(lambda module, args, out, name=name: seen.update({name: (out, out.clone())}))
    model(pictures(2, 3, 8))
    assert set(seen) == set(layers(model))
    assert all(torch.equal(after, before) for after, before in seen.values())


@EITHER
def test_every_layer_can_be_initialised_with_its_fans(kind):
    model = CONVOLUTIONAL[kind]()
    report = initialize(model, "he_normal", generator=generator(3103))
    assert report.left == ()
    assert {row[0] for row in report.rows if row[0].endswith("weight")} == {f"{name}.weight" for name in layers(model)}


@EITHER
@pytest.mark.parametrize("normalize", [True, False])
def test_members_can_be_stacked(kind, normalize):
    """A stack of networks under vmap computes what each of them computes."""
    model = CONVOLUTIONAL[kind](normalize=normalize).eval()
    x = pictures(2, 3, 8)
    states = [{name: p + k / 50 for name, p in model.state_dict().items() if p.is_floating_point()} for k in range(2)]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    both = torch.func.vmap(lambda state: torch.func.functional_call(model, state, (x,)))(stacked)
    for out, state in zip(both, states, strict=True):
        torch.testing.assert_close(out, torch.func.functional_call(model, state, (x,)), rtol=1e-4, atol=1e-5)


@EITHER
@pytest.mark.parametrize("name", ["channels", "classes", "width", "outputs", "base", "levels"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-3, ValueError), (1.5, TypeError), (True, TypeError)])
def test_sizes_that_no_convolutional_network_has_are_refused_by_name(kind, name, value, error):
    build = getattr(nets, kind)
    sizes = {"all_conv": {"channels": 1, "classes": 2, "width": 3}, "unet": {"channels": 1, "outputs": 2}}[kind]
    sizes |= {"base": 2, "levels": 1} if kind == "unet" else {}
    if name not in sizes:
        with pytest.raises(TypeError, match=name):
            build(**sizes, **{name: 3})
        return
    with pytest.raises(error, match=f"^{name} must be .*, got {value}"):
        build(**sizes | {name: value})


@EITHER
def test_options_that_mean_nothing_are_refused(kind):
    with pytest.raises(TypeError, match="normalize must be True or False, got 'batch'"):
        CONVOLUTIONAL[kind](normalize="batch")
    with pytest.raises(ValueError, match=r"activation must be one of .*, got 'swish'"):
        CONVOLUTIONAL[kind](activation="swish")


@pytest.fixture
def tokens():
    return torch.randint(11, (3, 6), generator=generator(3160))


def by_hand(model, tokens, *, norm, skip, causal, heads=2):
    """What a transformer with tanh computes, token by token and head by head."""
    x = model.token.weight[tokens] + model.place.weight[: tokens.shape[-1]]

    def normed(x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()

    def attention(block, x):
        q, k, v = (x @ getattr(block, name).weight.T for name in ("query", "key", "value"))
        size = q.shape[-1] // heads
        parts = []
        for head in range(heads):
            at = slice(head * size, (head + 1) * size)
            rows = []
            for s in range(x.shape[1]):
                seen = slice(0, s + 1) if causal else slice(None)
                logits = (k[:, seen, at] * q[:, s : s + 1, at]).sum(-1) / size**0.5
                rows.append((logits.softmax(-1)[..., None] * v[:, seen, at]).sum(1))
            parts.append(torch.stack(rows, 1))
        return torch.cat(parts, -1) @ block.out.weight.T

    def two_layers(block, x):
        return torch.tanh(x @ block.up.weight.T) @ block.down.weight.T

    for block in model.blocks:
        for branch in (attention, two_layers):
            x = skip * x + branch(block, normed(x)) if norm == "pre" else normed(skip * x + branch(block, x))
    return (normed(x) if norm == "pre" else x) @ model.head.weight.T


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("skip", [1.0, 1.7])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_transformer_computes_what_is_written_out_here(tokens, norm, skip, causal, tied):
    options = dict(norm=norm, skip=skip, causal=causal)
    model = nets.transformer(11, 8, 12, 2, heads=2, tied=tied, activation="tanh", **options)
    torch.testing.assert_close(model(tokens), by_hand(model, tokens, **options), rtol=1e-4, atol=1e-4)


def test_causal_transformer_does_not_see_the_future(tokens):
    model = nets.transformer(11, 8, 12, 2)
    other = tokens.clone()
    other[:, 4] = (other[:, 4] + 1) % 11
    torch.testing.assert_close(model(other)[:, :4], model(tokens)[:, :4])
    assert (model(other)[:, 4:] - model(tokens)[:, 4:]).abs().amin((0, 2)).min() > 0
    free = nets.transformer(11, 8, 12, 2, causal=False)
    assert (free(other)[:, :4] - free(tokens)[:, :4]).abs().amax() > 1e-4


def test_stream_of_a_post_norm_transformer_is_normalised_and_that_of_pre_norm_is_not(tokens):
    post, pre = (nets.transformer(11, 8, 12, 3, norm=norm).stream(tokens) for norm in ("post", "pre"))
    torch.testing.assert_close(post.square().mean(-1), torch.ones(3, 6), rtol=1e-3, atol=1e-3)
    assert pre.square().mean() > 1.5  # the embeddings, of variance 1 each, and what six branches add


def test_tied_head_is_the_table_of_the_tokens():
    tied, own = (nets.transformer(11, 8, 12, 1, tied=each) for each in (True, False))
    assert tied.head.weight is tied.token.weight
    assert own.head.weight is not own.token.weight
    names = [name for name, _ in own.named_parameters()]
    assert [name for name in names if name not in dict(tied.named_parameters())] == ["head.weight"]


def test_every_layer_of_a_transformer_can_be_initialised_by_name():
    model = nets.transformer(11, 8, 12, 2)
    table = initialize(
        model,
        "lecun_normal",
        overrides={"token": "lecun_normal", "place": "lecun_normal", "*.down": "he_normal"},
        generator=generator(3161),
    )
    assert all("norm" in name for name in table.left)
    assert "blocks.1.down.weight" in table.initialised


def test_members_of_a_transformer_can_be_stacked(tokens):
    models = [nets.transformer(11, 8, 12, 2) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    together = torch.func.vmap(lambda p, b: torch.func.functional_call(models[0], (p, b), (tokens,)))
    for one, logits in zip(models, together(parameters, buffers), strict=True):
        torch.testing.assert_close(logits, one(tokens))


@pytest.mark.parametrize("length", [0, 9])
def test_sentences_that_do_not_fit_the_context_are_refused(length):
    model = nets.transformer(11, 8, 12, 1)
    with pytest.raises(ValueError, match=f"1 to 8 .* got {length}"):
        model(torch.zeros(2, length, dtype=torch.long))


@pytest.mark.parametrize("name", ["vocabulary", "context", "width", "blocks", "heads"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-3, ValueError), (1.5, TypeError), (True, TypeError)])
def test_sizes_that_no_transformer_has_are_refused_by_name(name, value, error):
    sizes = dict(vocabulary=11, context=8, width=12, blocks=1, heads=2) | {name: value}
    with pytest.raises(error, match=f"{name} must be"):
        nets.transformer(**sizes)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(heads=5), ValueError, "heads must divide width 12, got 5"),
        (dict(norm="both"), ValueError, "norm must be 'pre' or 'post', got 'both'"),
        (dict(norm=None), ValueError, "norm must be"),
        (dict(skip=0), ValueError, "skip must be positive and finite, got 0"),
        (dict(skip=float("nan")), ValueError, "skip must be positive"),
        (dict(skip="1"), TypeError, "skip must be a number"),
        (dict(skip=True), TypeError, "skip must be a number"),
        (dict(causal=1), TypeError, "causal must be True or False"),
        (dict(tied=None), TypeError, "tied must be True or False"),
        (dict(activation="gelo"), ValueError, "gelo"),
    ],
)
def test_options_that_no_transformer_has_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        nets.transformer(11, 8, 12, 1, **options)
