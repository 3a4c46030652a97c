"""Schemes: their formulas, the laws they draw from, and what they refuse."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from initlib import Fans, Scheme, constant, fans, generator, schemes
from initlib.schemes import SCHEMES, TRUNCATION, get, table

stable = settings(derandomize=True, deadline=None, database=None, max_examples=100)

P = 1e-7  # a true distribution fails one test in ten million
SIGMAS = 6  # a true mean fails one test in five hundred million

FORMULAS = {
    "zeros": lambda m, n: 0.0,
    "lecun": lambda m, n: 1 / m,
    "glorot": lambda m, n: 2 / (m + n),
    "geometric": lambda m, n: 1 / math.sqrt(m * n),
    "contraharmonic": lambda m, n: (m + n) / (m * m + n * n),
    "he": lambda m, n: 2 / m,
    "orthogonal": lambda m, n: 1 / max(m, n),
    "torch": lambda m, n: 1 / (3 * m),
}
RANDOM = [scheme for scheme in SCHEMES.values() if isinstance(scheme, Scheme)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def named(values):
    return pytest.mark.parametrize("scheme", values, ids=lambda scheme: scheme.name)


def law(distribution, std):
    """The exact law of a weight of this standard deviation."""
    return {
        "normal": stats.norm(scale=std),
        "uniform": stats.uniform(-math.sqrt(3) * std, 2 * math.sqrt(3) * std),
        "truncated_normal": stats.truncnorm(-2, 2, scale=std / stats.truncnorm(-2, 2).std()),
    }[distribution]


def follows(values, distribution, std):
    """Whether numbers follow a law, by its shape, its mean and its variance."""
    exact = law(distribution, std)
    values = values.detach().double().flatten().numpy()
    kurtosis = float(exact.stats("k")) + 2
    mean_error = exact.std() / math.sqrt(len(values))
    variance_error = exact.var() * math.sqrt(kurtosis / len(values))
    assert exact.std() == pytest.approx(std, rel=1e-12)
    assert stats.kstest(values, exact.cdf).pvalue > P
    assert abs(values.mean()) < SIGMAS * mean_error
    assert abs(values.var() - std**2) < SIGMAS * variance_error + 1e-3 * std**2  # rounding of half precision
    return True


# --- formulas ---------------------------------------------------------------------------------


@named(SCHEMES.values())
@pytest.mark.parametrize(("m", "n"), [(256, 1024), (1024, 256), (50, 50), (1, 3), (4.5, 9.0)])
def test_variance_is_the_formula_of_the_literature(scheme, m, n):
    expected = FORMULAS[scheme.name.partition("_")[0]](m, n)
    assert scheme.variance(m, n) == pytest.approx(expected, rel=1e-12)
    if isinstance(scheme, Scheme):
        assert scheme.std(m, n) == pytest.approx(math.sqrt(expected), rel=1e-12)


def test_every_scheme_is_found_under_its_own_name():
    assert all(scheme.name == name and getattr(schemes, name) is scheme for name, scheme in SCHEMES.items())
    assert get("he_normal") is schemes.he_normal
    assert get(schemes.he_normal) is schemes.he_normal


@stable
@given(st.floats(0.1, 10), st.sampled_from(sorted(schemes.DISTRIBUTIONS)), st.integers(1, 10**6), st.integers(1, 10**6))
def test_bound_fits_the_variance(gain, distribution, m, n):
    scheme = Scheme("mine", gain=gain, distribution=distribution, average="geometric")
    assert scheme.variance(m, n) == pytest.approx(gain**2 / math.sqrt(m * n), rel=1e-12)
    assert scheme.bound(m, n) == pytest.approx(law(distribution, scheme.std(m, n)).support()[1], rel=1e-9)


def test_truncation_is_the_standard_deviation_of_a_cut_normal():
    assert pytest.approx(stats.truncnorm(-2, 2).std(), rel=1e-12) == TRUNCATION
    assert pytest.approx(0.87962566, abs=5e-9) == TRUNCATION


def test_he_doubles_lecun_and_glorot_lies_between_fan_in_and_fan_out():
    for m, n in ((30, 70), (70, 30)):
        assert schemes.he_normal.variance(m, n) == pytest.approx(2 * schemes.lecun_normal.variance(m, n))
        backward = schemes.lecun_normal.replace(average="fan_out").variance(m, n)
        low, high = sorted((schemes.lecun_normal.variance(m, n), backward))
        assert low < schemes.glorot_normal.variance(m, n) < high


def test_forward_and_backward_he_differ_by_the_ratio_of_the_fans():
    backward = schemes.he_normal.replace(average="fan_out")
    assert schemes.he_normal.variance(10, 40) / backward.variance(10, 40) == pytest.approx(4)


def test_replace_makes_a_changed_copy_and_checks_it():
    changed = schemes.he_normal.replace(name="mine", average="fan_out")
    assert (changed.name, changed.gain, changed.average) == ("mine", math.sqrt(2), "fan_out")
    assert schemes.he_normal.average == "fan_in"
    with pytest.raises(ValueError, match="gain"):
        schemes.he_normal.replace(gain=-1)
    with pytest.raises(TypeError, match="unexpected keyword"):
        schemes.he_normal.replace(slope=0.2)


# --- laws -------------------------------------------------------------------------------------


@named(RANDOM)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_follow_the_exact_law_in_every_precision(scheme, dtype):
    n, m = 250, 400
    weight = scheme(torch.empty(n, m, dtype=dtype), generator=generator(11))
    std = math.sqrt(FORMULAS[scheme.name.partition("_")[0]](m, n))
    assert follows(weight, scheme.distribution, std)
    slack = 1 + 2 * torch.finfo(dtype).eps
    assert weight.abs().max().item() <= scheme.bound(m, n) * slack


@pytest.mark.parametrize("distribution", schemes.DISTRIBUTIONS)
def test_weights_of_a_grouped_strided_convolution_follow_its_connections(distribution):
    scheme = Scheme("mine", gain=1.5, average="arithmetic", distribution=distribution)
    weight = torch.empty(96, 32, 5, 5)
    scheme(weight, groups=3, stride=2, generator=generator(12))
    m, n = 32 * 25, 96 * 25 / (3 * 4)
    assert follows(weight, distribution, math.sqrt(1.5**2 * 2 / (m + n)))


def test_weights_of_a_transposed_matrix_use_the_first_dimension_as_fan_in():
    weight = schemes.lecun_normal(torch.empty(100, 900), transposed=True, generator=generator(13))
    assert follows(weight, "normal", 0.1)


def test_weights_are_independent_along_rows_and_columns():
    weight = schemes.he_normal(torch.empty(400, 400, dtype=torch.float64), generator=generator(14)) * math.sqrt(200)
    products = (weight @ weight.T / math.sqrt(400), weight.T @ weight / math.sqrt(400))
    for product in products:
        off_diagonal = product[~torch.eye(400, dtype=torch.bool)]
        assert off_diagonal.abs().max() < 7.5  # standard normals, nearly
        assert abs(off_diagonal.var().item() - 1) < 0.05


def test_stack_of_matrices_is_filled_with_independent_ones():
    stack = schemes.glorot_uniform.fill_(torch.empty(50, 40, 60), Fans(60, 40), generator=generator(15))
    assert follows(stack, "uniform", math.sqrt(2 / 100))
    assert len({tuple(each[0].tolist()) for each in stack}) == 50


@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_sets_every_weight(value, dtype):
    weight = constant(value)(torch.full((3, 4), math.nan, dtype=dtype))
    assert (weight == value).all()
    assert constant(value).variance(3, 4) == 0
    assert (schemes.zeros(weight) == 0).all()


# --- orthogonal -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9), (1, 5), (5, 1), (1, 1), (8, 3, 3, 3), (30, 2, 3), (2, 4, 5)])
@pytest.mark.parametrize("gain", [1.0, 0.3])
def test_orthogonal_makes_the_shorter_side_orthonormal(shape, gain):
    scheme = schemes.orthogonal.replace(gain=gain)
    weight = scheme(torch.empty(shape, dtype=torch.float64), generator=generator(21)).flatten(1)
    gram = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
    torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram), dtype=torch.float64))
    if len(shape) == 2:
        mean_square = weight.square().mean().item()
        assert mean_square == pytest.approx(scheme.variance(shape[1], shape[0]), rel=1e-10)


@pytest.mark.parametrize(("rows", "columns"), [(3, 8), (8, 3), (5, 5)])
def test_orthogonal_stack_holds_one_orthogonal_matrix_a_network(rows, columns):
    stack = schemes.orthogonal.fill_(torch.empty(7, rows, columns), Fans(columns, rows), generator=generator(22))
    gram = stack @ stack.mT if rows <= columns else stack.mT @ stack
    torch.testing.assert_close(gram, torch.eye(min(rows, columns)).expand(7, -1, -1), atol=1e-5, rtol=0)
    assert not torch.equal(stack[0], stack[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_orthogonal_in_half_precision_is_rounded_once(dtype):
    exact = schemes.orthogonal(torch.empty(8, 8), generator=generator(23))
    half = schemes.orthogonal(torch.empty(8, 8, dtype=dtype), generator=generator(23))
    assert torch.equal(half, exact.to(dtype))


def haar(rows, columns, count, n):
    """Many orthogonal matrices, as one stack."""
    empty = torch.empty(count, rows, columns, dtype=torch.float64)
    return schemes.orthogonal.fill_(empty, Fans(columns, rows), generator=generator(n)).numpy()


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (6, 3), (3, 6), (2, 2)])
def test_orthogonal_entries_follow_the_law_of_haar_measure(rows, columns):
    stack = haar(rows, columns, 4000, 24)
    dimension = max(rows, columns)  # a row or column is uniform on the sphere
    half = (dimension - 1) / 2
    for i, j in {(0, 0), (rows - 1, columns - 1), (0, columns - 1)}:
        assert stats.kstest((stack[:, i, j] + 1) / 2, stats.beta(half, half).cdf).pvalue > P
    diagonal = np.diagonal(stack, axis1=1, axis2=2)
    assert (np.abs(diagonal.mean(0)) < SIGMAS * np.sqrt(1 / dimension / 4000)).all()


def test_orthogonal_matrices_have_the_moments_of_haar_measure():
    stack = haar(6, 6, 4000, 25)
    traces = np.trace(stack, axis1=1, axis2=2)
    for power, expected in ((1, 0), (2, 1), (3, 0), (4, 3)):  # as of a standard normal
        values = traces**power
        assert abs(values.mean() - expected) < SIGMAS * values.std() / math.sqrt(len(values))
    positive = int((np.linalg.det(stack) > 0).sum())
    assert stats.binomtest(positive, len(stack)).pvalue > P


# --- torch's default --------------------------------------------------------------------------

LAYERS = {
    "linear": lambda: nn.Linear(20, 30),
    "conv1d": lambda: nn.Conv1d(6, 9, 5, stride=2, groups=3),
    "conv2d": lambda: nn.Conv2d(6, 8, (3, 2), dilation=2, groups=2),
    "conv3d": lambda: nn.Conv3d(3, 4, 3, padding=1),
    "transposed1d": lambda: nn.ConvTranspose1d(6, 9, 5, stride=2, groups=3),
    "transposed2d": lambda: nn.ConvTranspose2d(6, 9, 3),
    "embedding": lambda: nn.Embedding(11, 7),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_torch_default_draws_what_torch_draws(name, dtype):
    layer = LAYERS[name]().to(dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layer.reset_parameters()
        expected = [parameter.clone() for parameter in layer.parameters()]
        torch.manual_seed(3)
        default = schemes.torch_default
        default.fill_(layer.weight, default.connections(layer))
        if name != "embedding":
            assert default.fill_bias_(layer) == "torch_default"
    for parameter, value in zip(layer.parameters(), expected, strict=True):
        # torch computes the bound of a weight by way of the gain of a = sqrt(5), which rounds differently
        rounding = 0 if dtype == torch.float32 else 1e-15
        torch.testing.assert_close(parameter.data, value, rtol=rounding, atol=0)


def test_torch_default_is_neither_he_nor_lecun():
    weight = schemes.torch_default(torch.empty(300, 400), generator=generator(31))
    assert follows(weight, "uniform", 1 / math.sqrt(3 * 400))
    assert weight.abs().max() <= 1 / math.sqrt(400)


def test_torch_default_fills_a_bare_weight_as_the_layer_that_owns_it():
    layer = nn.Linear(20, 30)
    bare = schemes.torch_default(torch.empty(30, 20), generator=generator(32))
    with torch.random.fork_rng(devices=[]):
        torch.random.set_rng_state(generator(32).get_state())
        layer.reset_parameters()
    assert torch.equal(layer.weight, bare)


# --- tensors of every kind --------------------------------------------------------------------


@named(SCHEMES.values())
def test_call_fills_in_place_and_returns_the_tensor(scheme):
    weight = torch.full((5, 6), math.nan)
    assert scheme(weight, generator=generator(41)) is weight
    assert weight.isfinite().all()


VIEWS = {
    "transposed": lambda t: t.T,
    "strided": lambda t: t[::2, 1::3],
    "columns": lambda t: t[:, 3:9],
    "permuted": lambda t: t.view(4, 5, 5, 6)[1:].permute(2, 0, 3, 1),
}


@named(SCHEMES.values())
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_non_contiguous_weight_is_filled_and_its_surroundings_are_not(scheme, view):
    owner, inside = torch.full((20, 30), math.nan), torch.zeros(20, 30, dtype=torch.bool)
    view(inside)[...] = True
    weight = view(owner)
    assert not weight.is_contiguous()
    scheme(weight, generator=generator(42))
    assert owner[inside].isfinite().all()
    assert owner[~inside].isnan().all()


@named(RANDOM)
def test_transposed_view_gets_the_fans_of_its_own_shape(scheme):
    owner = torch.empty(400, 250)
    scheme(owner.T, generator=generator(43))
    assert follows(owner, scheme.distribution, math.sqrt(FORMULAS[scheme.name.partition("_")[0]](400, 250)))


@named(SCHEMES.values())
def test_parameter_stays_a_leaf_and_no_gradient_is_recorded(scheme):
    weight = nn.Parameter(torch.full((5, 6), math.nan))
    scheme(weight, generator=generator(44))
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight.grad_fn is None
    assert weight.grad is None
    weight.sum().backward()
    assert (weight.grad == 1).all()


@named(SCHEMES.values())
def test_view_of_a_parameter_can_be_filled(scheme):
    weight = nn.Parameter(torch.full((8, 6), math.nan))
    scheme(weight[2:5], generator=generator(45))
    assert weight.is_leaf
    assert weight.isfinite().any(1).tolist() == [2 <= row < 5 for row in range(8)]


@named(SCHEMES.values())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_generator_makes_a_draw_repeatable_and_spares_the_global_state(scheme, dtype):
    before = torch.get_rng_state()
    draws = [scheme(torch.empty(6, 6, dtype=dtype), generator=generator(n)) for n in (46, 46, 47)]
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2]) == (scheme.name == "zeros")
    assert torch.equal(before, torch.get_rng_state())


@named(RANDOM)
def test_global_state_is_used_without_a_generator(scheme):
    with torch.random.fork_rng(devices=[]):
        draws = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            draws.append(scheme(torch.empty(6, 6)))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@named(SCHEMES.values())
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (4, 3, 0)])
def test_empty_weight_is_left_with_a_warning(scheme, shape):
    weight = torch.empty(shape)
    with pytest.warns(UserWarning, match=rf"{scheme.name}: weight of shape \({shape[0]}, .*is empty") as caught:
        assert scheme(weight) is weight
    assert caught[0].filename == __file__


# --- what is refused --------------------------------------------------------------------------


def refused(error, message, scheme, weight, **arguments):
    """Whether a call raises, with a message, and leaves the weight as it was."""
    before = weight.detach().clone() if not nn.parameter.is_lazy(weight) and weight.device.type == "cpu" else None
    state = torch.get_rng_state()
    with pytest.raises(error) as caught:
        scheme(weight, **arguments)
    assert message in str(caught.value)
    if before is not None:
        assert torch.equal(weight, before)
    assert torch.equal(state, torch.get_rng_state())
    return True


@named(SCHEMES.values())
@pytest.mark.parametrize("shape", [(), (7,), (1, 1, 1, 1, 1, 1)])
def test_tensor_without_fans_is_refused_with_its_shape(scheme, shape):
    assert refused(ValueError, f"got shape {shape}", scheme, torch.ones(shape))


@named(SCHEMES.values())
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_tensor_that_is_not_floating_point_is_refused(scheme, dtype):
    assert refused(TypeError, f"got {dtype}", scheme, torch.ones(3, 4, dtype=dtype))


@named(SCHEMES.values())
@pytest.mark.parametrize("thing", [np.ones((3, 4)), [[1.0]], None, nn.Linear(2, 2)], ids=lambda t: type(t).__name__)
def test_thing_that_is_no_tensor_is_refused(scheme, thing):
    with pytest.raises(TypeError, match=f"weight must be a tensor, got {type(thing).__name__}"):
        scheme(thing)


@named(SCHEMES.values())
def test_lazy_weight_is_refused(scheme):
    assert refused(ValueError, "lazy", scheme, nn.LazyLinear(3).weight)


@named(SCHEMES.values())
def test_generator_of_another_device_is_refused(scheme):
    weight = torch.empty(3, 4, device="meta")
    assert refused(ValueError, "generator must be on the device of weight, meta", scheme, weight, generator=generator())


@pytest.mark.parametrize(
    ("dtype", "gain"),
    [(torch.float16, 1e6), (torch.float16, 1e-6), (torch.float32, 1e39), (torch.float32, 1e-38)],
    ids=str,
)
@pytest.mark.parametrize("kind", [schemes.he_normal, schemes.glorot_uniform, schemes.orthogonal], ids=lambda s: s.name)
def test_scale_that_the_dtype_cannot_hold_is_refused(kind, dtype, gain):
    assert refused(ValueError, f"{dtype} cannot hold", kind.replace(gain=gain), torch.ones(30, 40, dtype=dtype))


@pytest.mark.parametrize("value", [1e6, 1e-7])
def test_constant_that_the_dtype_cannot_hold_is_refused(value):
    assert refused(ValueError, "cannot hold", constant(value), torch.ones(3, 4, dtype=torch.float16))


@pytest.mark.parametrize("arguments", [{"groups": 3}, {"stride": 0}, {"stride": (1, 2)}])
def test_geometry_that_does_not_fit_is_refused(arguments):
    assert refused(ValueError, str(*arguments), schemes.he_normal, torch.ones(4, 2, 3), **arguments)


@pytest.mark.parametrize("gain", [0, -1, -math.sqrt(2), math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [Scheme, schemes.Orthogonal])
def test_gain_must_be_positive_and_finite(kind, gain):
    with pytest.raises(ValueError) as caught:
        kind("mine", gain=gain)
    assert str(caught.value) == f"gain must be positive and finite, got {gain!r}"


@pytest.mark.parametrize("kind", [Scheme, schemes.Orthogonal])
def test_gain_must_be_a_number(kind):
    with pytest.raises(TypeError, match=r"^gain must be a number, got 'relu'$"):
        kind("mine", gain="relu")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_constant_must_be_finite(value):
    with pytest.raises(ValueError, match="value must be finite"):
        constant(value)


def test_unknown_average_and_distribution_are_refused():
    with pytest.raises(ValueError, match=r"average must be one of .*'fan_avg'"):
        Scheme("mine", average="fan_avg")
    with pytest.raises(ValueError, match=r"distribution must be one of normal, uniform.*'gauss'"):
        Scheme("mine", distribution="gauss")


@pytest.mark.parametrize("name", ["xavier", "kaiming_normal_", "", "HE_NORMAL"])
def test_unknown_scheme_is_refused_and_the_known_ones_are_named(name):
    with pytest.raises(ValueError, match="he_normal") as caught:
        get(name)
    assert f"got {name!r}" in str(caught.value)


@pytest.mark.parametrize("thing", [None, 2, nn.init.xavier_normal_, Scheme, ["he_normal"]])
def test_thing_that_is_no_scheme_is_refused(thing):
    with pytest.raises(TypeError, match="a name or a scheme"):
        get(thing)


@named([scheme for scheme in SCHEMES.values() if scheme.name != "zeros"])
@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0), (-1, 3), (3, math.nan)])
def test_fans_must_be_positive(scheme, m, n):
    with pytest.raises(ValueError, match="n_in and n_out must be positive"):
        scheme.variance(m, n)


def test_scheme_cannot_be_changed_by_accident():
    with pytest.raises(AttributeError):
        schemes.he_normal.gain = 1


# --- the table --------------------------------------------------------------------------------


def test_table_lists_every_scheme_with_its_numbers():
    shown = table(100, 400)
    assert [row[0] for row in shown.rows] == list(SCHEMES)
    for name, formula, drawn, std, largest in shown.rows:
        expected = FORMULAS[name.partition("_")[0]](100, 400)
        assert std == pytest.approx(math.sqrt(expected), rel=1e-12)
        assert evaluated(formula, 100, 400) == pytest.approx(expected, rel=1e-3)
        weight = SCHEMES[name](torch.empty(400, 100), generator=generator(51))
        assert weight.abs().max().item() <= largest * (1 + 1e-6)
        if drawn == "uniform":
            assert weight.abs().max().item() > 0.99 * largest
    assert "he_normal" in str(shown)
    assert "<table>" in shown._repr_html_()


@pytest.mark.parametrize("kind", ["fan_in", "fan_out", "arithmetic", "geometric", "contraharmonic", "harmonic"])
def test_table_formula_of_every_average_says_what_is_computed(kind):
    scheme = Scheme("mine", gain=1.5, average=kind)
    row = schemes._row(scheme, 7, 30)
    assert evaluated(row[1], 7, 30) == pytest.approx(scheme.variance(7, 30), rel=1e-12)


def evaluated(formula, m, n):
    """The number that a printed formula stands for."""
    written = formula.replace("√(mn)", "(m*n)**0.5").replace("²", "**2").replace("·", "*")
    written = written.replace("(2mn)", "(2*m*n)").replace("(3m)", "(3*m)")
    return eval(written, {"m": m, "n": n, "max": max})


def test_connections_are_those_of_fans():
    layer = nn.Conv2d(4, 8, 3, stride=2)
    assert schemes.he_normal.connections(layer) == fans(layer)


@pytest.mark.parametrize("value", [None, "a", True])
def test_constant_must_be_a_number(value):
    with pytest.raises(TypeError, match="value must be a number"):
        schemes.constant(value)
