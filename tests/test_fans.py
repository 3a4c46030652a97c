"""Counts of connections, against the Jacobian of layers whose weights are all one, and their averages."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.init import _calculate_fan_in_and_fan_out as torch_counts

from initlib import Fans, average, fans
from initlib.fans import AVERAGES

stable = settings(derandomize=True, deadline=None, database=None, max_examples=60)

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@st.composite
def convolutions(draw, kinds):
    """A convolution of any dimension, kernel, stride, dilation and groups, without padding."""
    dimension = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    c_in, c_out = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    each = {name: tuple(draw(st.integers(1, top)) for _ in range(dimension)) for name, top in LIMITS.items()}
    return kinds[dimension](c_in, c_out, **each, groups=groups, bias=False)


LIMITS = {"kernel_size": 4, "stride": 3, "dilation": 2}


def ones_on_a_ring(layer):
    """All-ones input on a torus that the strides divide, with all weights one."""
    reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    sizes = [s * math.ceil((r + 1) / s) for r, s in zip(reach, layer.stride, strict=True)]
    with torch.no_grad():
        layer.weight.fill_(1)
    return torch.ones(1, layer.in_channels, *sizes, requires_grad=True), reach


def sums_of_jacobian(inputs, outputs):
    """Mean number of inputs that reach an output, and of outputs that an input reaches."""
    (reached,) = torch.autograd.grad(outputs.sum(), inputs)
    return outputs.mean().item(), reached.mean().item()


def fold(outputs, dim, period):
    """Wrap a dimension around a ring."""
    shape = [*outputs.shape]
    shape[dim] = period
    return torch.zeros(shape).index_add(dim, torch.arange(outputs.shape[dim]) % period, outputs)


@stable
@given(convolutions(CONVOLUTIONS))
def test_convolution_counts_the_connections_of_its_jacobian(layer):
    x, reach = ones_on_a_ring(layer)
    padding = [each for r in reversed(reach) for each in (r, 0)]
    y = layer(nn.functional.pad(x, padding, mode="circular"))
    assert fans(layer) == pytest.approx(sums_of_jacobian(x, y), rel=1e-5)


@stable
@given(convolutions(TRANSPOSED))
def test_transposed_convolution_counts_the_connections_of_its_jacobian(layer):
    x, _ = ones_on_a_ring(layer)
    y = layer(x)
    for dim, stride in enumerate(layer.stride, start=2):
        y = fold(y, dim, stride * x.shape[dim])
    assert fans(layer) == pytest.approx(sums_of_jacobian(x, y), rel=1e-5)


@stable
@given(st.integers(1, 50), st.integers(1, 50))
def test_linear_counts_the_connections_of_its_jacobian(m, n):
    layer = nn.Linear(m, n)
    jacobian = torch.autograd.functional.jacobian(layer, torch.zeros(m))
    assert jacobian.shape == (n, m)
    assert fans(layer) == Fans(m, n) == fans(layer.weight) == fans(layer.weight.T, transposed=True)


@stable
@given(st.one_of(convolutions(CONVOLUTIONS), convolutions(TRANSPOSED)))
def test_bare_weight_and_module_agree(layer):
    transposed = isinstance(layer, tuple(TRANSPOSED.values()))
    bare = fans(layer.weight, groups=layer.groups, stride=layer.stride, transposed=transposed)
    assert bare == fans(layer)


@stable
@given(convolutions(CONVOLUTIONS))
def test_dilation_and_padding_change_nothing(layer):
    kind, size = type(layer), layer.kernel_size
    other = kind(
        layer.in_channels, layer.out_channels, size, layer.stride, 5, 7, layer.groups, padding_mode="replicate"
    )
    assert fans(other) == fans(layer)


@stable
@given(convolutions(CONVOLUTIONS))
def test_transposed_convolution_is_the_convolution_backwards(layer):
    kind = TRANSPOSED[len(layer.kernel_size)]
    back = kind(layer.out_channels, layer.in_channels, layer.kernel_size, layer.stride, groups=layer.groups)
    assert fans(back) == fans(layer)[::-1]


@stable
@given(convolutions(CONVOLUTIONS))
def test_torch_agrees_on_fan_in_and_on_fan_out_without_stride_and_groups(layer):
    n_in, n_out = fans(layer)
    torch_in, torch_out = torch_counts(layer.weight)
    assert n_in == torch_in
    assert n_out * layer.groups * math.prod(layer.stride) == pytest.approx(torch_out)


def test_torch_agrees_on_linear_layers_and_swaps_transposed_convolutions():
    assert fans(nn.Linear(5, 7)) == torch_counts(nn.Linear(5, 7).weight)
    layer = nn.ConvTranspose2d(4, 6, 3)
    assert fans(layer) == torch_counts(layer.weight)[::-1] == (36, 54)


def test_grouped_strided_example():
    # C_in k^2 / groups = 16 * 9 / 4, and C_out k^2 / (groups stride^2) = 32 * 9 / (4 * 4)
    assert fans(nn.Conv2d(16, 32, 3, stride=2, groups=4)) == (36, 18)
    assert fans(nn.Conv1d(8, 8, 3, stride=2, groups=8)) == (3, 1.5)
    assert fans(nn.ConvTranspose1d(8, 8, 3, stride=2, groups=8)) == (1.5, 3)


def test_zero_padding_keeps_the_share_of_connections_that_the_documentation_states():
    layer = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    with torch.no_grad():
        share = nn.init.ones_(layer.weight).new_ones(1, 1, 8, 8)
        share = layer(share).mean().item() / fans(layer).n_in
    assert share == pytest.approx((22 / 24) ** 2, rel=1e-6)


def test_embedding_looks_one_row_up():
    assert fans(nn.Embedding(100, 16)) == (1, 16)


def test_subclasses_count_like_their_layer():
    class Mine(nn.Linear):
        pass

    assert fans(Mine(3, 4)) == (3, 4)


def test_matrix_used_from_the_right_has_its_fans_swapped_on_request():
    weight = torch.empty(3, 4)  # torch stores (out, in); x @ weight would have 3 inputs
    assert fans(weight) == (4, 3)
    assert fans(weight, transposed=True) == (3, 4)


@pytest.mark.parametrize("layer", [nn.Linear(3, 4), nn.Conv2d(3, 4, 3), nn.Embedding(3, 4)])
def test_whole_counts_are_integers(layer):
    assert [type(count) for count in fans(layer)] == [int, int]


def test_layer_without_inputs_or_outputs_has_fan_zero():
    assert fans(torch.empty(3, 0)) == (0, 3)
    assert fans(torch.empty(0, 3)) == (3, 0)
    assert fans(torch.empty(0, 3, 5)) == (15, 0)
    assert fans(torch.empty(4, 3, 0)) == (0, 0)


@pytest.mark.parametrize("shape", [(), (5,), (0,), (1, 2, 3, 4, 5, 6)])
def test_tensor_that_is_no_weight_is_refused_with_its_shape(shape):
    with pytest.raises(ValueError) as caught:
        fans(torch.empty(shape))
    assert f"got shape {shape}" in str(caught.value)


@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(4), nn.LSTM(3, 4), nn.Bilinear(2, 3, 4), nn.Sequential(nn.Linear(2, 2))]
)
def test_module_without_fans_is_refused_by_name(layer):
    with pytest.raises(TypeError, match=f"got {type(layer).__name__}"):
        fans(layer)


@pytest.mark.parametrize("thing", [np.ones((2, 3)), [[1.0, 2.0]], (3, 4), 5, None, "weight"])
def test_thing_that_is_no_layer_is_refused_by_name(thing):
    with pytest.raises(TypeError, match=f"got {type(thing).__name__}"):
        fans(thing)


@pytest.mark.parametrize("layer", [nn.LazyLinear(4), nn.LazyConv2d(4, 3), nn.LazyLinear(4).weight])
def test_lazy_layer_is_refused_until_it_has_a_shape(layer):
    with pytest.raises(ValueError, match="lazy"):
        fans(layer)


@pytest.mark.parametrize("geometry", [{"groups": 2}, {"stride": 2}, {"stride": (1, 2)}, {"transposed": True}])
def test_module_brings_its_own_geometry(geometry):
    with pytest.raises(ValueError, match="Conv2d brings its own"):
        fans(nn.Conv2d(4, 4, 3), **geometry)


@pytest.mark.parametrize("groups", [0, -1, 3, 1.0, True, "2", None])
def test_groups_must_divide_the_first_dimension(groups):
    with pytest.raises(ValueError) as caught:
        fans(torch.empty(4, 2, 3), groups=groups)
    assert f"first dimension 4, got {groups!r}" in str(caught.value)


@pytest.mark.parametrize("stride", [0, -2, 1.5, None, True, (1,), (1, 2, 3), (1, 0), (2.0, 2), "22"])
def test_stride_must_be_positive_whole_and_fit_the_kernel(stride):
    with pytest.raises(ValueError) as caught:
        fans(torch.empty(4, 2, 3, 3), stride=stride)
    assert f"got {stride!r}" in str(caught.value)


@pytest.mark.parametrize("geometry", [{"groups": 2}, {"stride": 2}, {"stride": (2,)}, {"stride": None}])
def test_linear_weight_has_neither_groups_nor_stride(geometry):
    with pytest.raises(ValueError, match=str(*geometry)):
        fans(torch.empty(4, 2), **geometry)


def test_averages_written_out():
    m, n = 3.0, 12.0
    assert {kind: average(m, n, kind) for kind in AVERAGES} == pytest.approx(
        {
            "fan_in": 3.0,
            "fan_out": 12.0,
            "arithmetic": 7.5,
            "geometric": 6.0,
            "contraharmonic": (9 + 144) / 15,
            "harmonic": 2 / (1 / 3 + 1 / 12),
        },
        rel=1e-14,
    )


positive = st.floats(1e-3, 1e8)


@stable
@given(positive, positive)
def test_averages_are_ordered_and_lie_between_the_fans(m, n):
    ordered = [average(m, n, kind) for kind in ("harmonic", "geometric", "arithmetic", "contraharmonic")]
    for smaller, larger in zip([min(m, n), *ordered], [*ordered, max(m, n)], strict=True):
        assert smaller <= larger * (1 + 1e-12)
    if not math.isclose(m, n, rel_tol=1e-3):
        assert all(a < b for a, b in itertools.pairwise(ordered))


@stable
@given(positive, positive, positive)
def test_averages_are_symmetric_homogeneous_and_keep_equal_fans(m, n, factor):
    for kind in set(AVERAGES) - {"fan_in", "fan_out"}:
        assert average(m, n, kind) == pytest.approx(average(n, m, kind), rel=1e-12)
        assert average(factor * m, factor * n, kind) == pytest.approx(factor * average(m, n, kind), rel=1e-12)
    for kind in AVERAGES:
        assert average(m, m, kind) == pytest.approx(m, rel=1e-12)


@stable
@given(positive, positive)
def test_harmonic_and_contraharmonic_mirror_each_other_at_the_arithmetic_mean(m, n):
    mirrored = average(m, n, "harmonic") + average(m, n, "contraharmonic")
    assert mirrored == pytest.approx(2 * average(m, n, "arithmetic"), rel=1e-12)


def test_averages_of_arrays_are_taken_entry_by_entry():
    m, n = np.array([1, 100_000, 3]), np.array([4, 100_000, 12])
    for kind in AVERAGES:
        expected = [average(float(a), float(b), kind) for a, b in zip(m, n, strict=True)]
        np.testing.assert_allclose(average(m, n, kind), expected, rtol=1e-14)


@pytest.mark.parametrize("kind", ["quadratic", "fan_avg", "", "FAN_IN", None])
def test_unknown_average_is_refused_and_the_known_ones_are_named(kind):
    with pytest.raises(ValueError, match="fan_in, fan_out, arithmetic, geometric") as caught:
        average(1, 2, kind)
    assert f"got {kind!r}" in str(caught.value)


@pytest.mark.parametrize(("m", "n"), [(-1, 2), (2, 0), (math.nan, 1), (np.array([1, -1]), 2)], ids=str)
def test_fans_that_are_not_positive_have_no_average(m, n):
    with pytest.raises(ValueError, match="n_in and n_out must be positive"):
        average(m, n, "geometric")


def test_numbers_of_numpy_describe_a_weight_too():
    weight = torch.empty(8, 2, 3)
    assert fans(weight, groups=np.int64(4), stride=np.int64(2)) == fans(weight, groups=4, stride=2)
    with pytest.raises(ValueError, match="groups must be a positive divisor"):
        fans(weight, groups=True)
