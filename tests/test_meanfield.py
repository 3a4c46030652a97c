"""Pairs of samples in infinitely wide networks: closed forms, other integrals, simulations, and what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats
from torch import nn
from torch.nn import functional as F

from initlib import activations, meanfield, pairs, rng
from initlib.activations import ACTIVATIONS, moments, prepared, variance_map_slope
from initlib.meanfield import (
    batch_growth,
    correlation_map,
    correlation_map_slope,
    critical_gain,
    critical_line,
    cross_moment,
    decorrelation,
    phase,
    relu_correlation,
    sample_moments,
)

stable = settings(derandomize=True, deadline=None, database=None, max_examples=12)

RHO = np.array([-1, -0.999999, -0.5, 0, 0.3, 0.9, 0.999, 1 - 1e-8, 1])
LEAKS = {"relu": 0.0, "leaky_relu": 0.01, "leaky_relu_0.2": 0.2, "prelu_0.25": 0.25, "abs": -1.0, "linear": 1.0}
NAMES = pytest.mark.parametrize("name", ACTIVATIONS)
correlations = st.floats(-1, 1)
sizes = st.floats(-3, 3).map(lambda x: 10**x)


def close(actual, expected, rtol=1e-11, atol=1e-13):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def density(z):
    return np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


# --- pairs: closed forms ----------------------------------------------------------------------


@pytest.mark.parametrize("name", LEAKS)
@pytest.mark.parametrize("q", [1e-9, 1.0, 300.0])
def test_rectifiers_have_the_map_of_the_closed_form(name, q):
    close(correlation_map(name, RHO, q=q), relu_correlation(RHO, LEAKS[name]))


@pytest.mark.parametrize("q", [1e-6, 0.3, 1.7, 40.0, 1e4])
def test_error_function_has_the_arcsine_of_williams(q):
    expected = 2 / np.pi * np.arcsin(2 * q * RHO / (1 + 2 * q))
    close(cross_moment("erf", RHO, q=q), expected, atol=1e-13 * abs(expected[-1]))


@pytest.mark.parametrize("q", [1e-6, 0.3, 1.7])
def test_sine_and_exponential_have_those_of_their_characteristic_functions(q):
    close(cross_moment("sin", RHO, q=q), np.exp(-q) * np.sinh(q * RHO), atol=1e-13 * min(1, q))
    close(cross_moment(torch.cos, RHO, q=q), np.exp(-q) * np.cosh(q * RHO), rtol=1e-10)
    close(cross_moment(torch.exp, RHO, q=q), np.exp(q + q * RHO))
    slope = correlation_map_slope("sin", RHO, q=q, gain=1.5, bias_std=0.4)
    of = 1.5**2 * np.exp(-q) * np.sinh(q) + 0.4**2
    close(slope, 1.5**2 * q * np.exp(-q) * np.cosh(q * RHO) / of)


def test_powers_have_wicks_moments():
    close(cross_moment(lambda u: u**2, RHO, q=2.0), 4 * (1 + 2 * RHO**2))
    close(cross_moment(lambda u: u**3, RHO, q=2.0), 8 * (9 * RHO + 6 * RHO**3))
    close(cross_moment("relu_squared", 0.0), 1 / 4)
    of = pairs.normal(lambda u: u**2, RHO, q=2.0)
    close(of.derivative_apart, 8 * (1 - RHO), rtol=1e-10)
    close(of.product_apart, 4 * of.apart, rtol=1e-10)
    close(of.apart, 8 * (1 - RHO) * (1 + RHO), rtol=1e-10)
    close(decorrelation(lambda u: u**3, RHO), 15 - 9 * RHO - 6 * RHO**3, rtol=1e-10)


@pytest.mark.parametrize("distance", [1.0, 1e-4, 1e-8, 1e-12])
def test_close_samples_keep_their_relative_distance(distance):
    q = 1.3
    with prepared("sin", q) as (evaluate, kinks):
        sine = pairs.integrate(evaluate, kinks, q, distance)
    with prepared("relu", 1.0) as (evaluate, kinks):
        rectified = pairs.integrate(evaluate, kinks, 1.0, distance)
    close(sine.apart, 2 * math.exp(-q) * math.cosh(q * (1 - distance / 2)) * math.sinh(q * distance / 2), rtol=1e-10)
    if distance < 0.1:
        theta = 2 * math.asin(math.sqrt(distance / 2))
        close(rectified.derivative_apart, theta / (2 * math.pi), rtol=1e-10)
        # sin t - t cos t = t³/3 - t⁵/30 + ...
        expected = (distance - (theta**3 / 3 - theta**5 / 30 + theta**7 / 840) / math.pi) / 2
        close(rectified.apart, expected, rtol=1e-10)


@pytest.mark.parametrize("distance", [1e-20, 1e-16, 1e-15])
def test_samples_as_close_as_rounding_allows(distance):
    q = 3.7
    with prepared("hardtanh", q) as (evaluate, kinks):
        of = pairs.integrate(evaluate, kinks, q, distance)
    close(of.apart / distance, q * moments("hardtanh", q).derivative_second, rtol=1e-7)


def test_decorrelation_of_two_floats_is_accurate_and_is_what_the_moments_leave():
    close(decorrelation("linear", 1 - 1e-8, q=3.0), 3 * (1 - (1 - 1e-8)), rtol=1e-13)
    rho = np.array([-0.7, 0.2, 0.9])
    close(decorrelation("gelu", rho), moments("gelu").second - cross_moment("gelu", rho))


# --- pairs: independent integrals -------------------------------------------------------------


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "softplus", "gelu", "silu", "mish"])
@pytest.mark.parametrize(("q", "rho"), [(0.4, 0.6), (1.0, -0.8), (2.0, 0.97)])
def test_smooth_functions_agree_with_gauss_hermite(name, q, rho):
    z, w = np.polynomial.hermite_e.hermegauss(160)
    w = w / w.sum()
    u_1, u_2 = math.sqrt(q) * z[:, None], math.sqrt(q) * (rho * z[:, None] + math.sqrt(1 - rho**2) * z)

    def values(u):
        return ACTIVATIONS[name](torch.tensor(u)).numpy()

    close(cross_moment(name, rho, q=q), w @ (values(u_1) * values(u_2)) @ w, rtol=1e-8)


def quadrant(k, rho):
    """Probability that both of two standard normals exceed k."""
    root = math.sqrt(1 - rho**2)
    return integrate.quad(lambda z: density(z) * special.ndtr((rho * z - k) / root), k, 12, epsabs=1e-14, epsrel=1e-12)[
        0
    ]


@pytest.mark.parametrize("k", [-1.5, 0.4, 2.0])
@pytest.mark.parametrize("rho", [-0.9, 0.0, 0.5, 0.99])
def test_kink_anywhere_has_the_probability_that_both_samples_pass(k, rho):
    q = 2.5
    of = pairs.normal(lambda u: F.relu(u - k * math.sqrt(q)), rho, q)
    close(of.derivative_second, special.ndtr(-k))
    close(of.derivative_second - of.derivative_apart, quadrant(k, rho), rtol=1e-9)


def test_several_kinks_have_the_slope_of_price():
    q, rhos = 0.7, np.array([-0.95, -0.3, 0.4, 0.9])

    def inside(rho):  # both samples between -1 and 1
        root, k = math.sqrt(1 - rho**2), 1 / math.sqrt(q)

        def given(z):
            return density(z) * (special.ndtr((k - rho * z) / root) - special.ndtr((-k - rho * z) / root))

        return integrate.quad(given, -k, k, epsabs=1e-13)[0]

    slopes = correlation_map_slope("hardtanh", rhos, q=q)
    close(slopes, [q * inside(r) / moments("hardtanh", q).second for r in rhos], rtol=1e-9)
    nodes, weights = np.polynomial.legendre.leggauss(30)
    integral = sum(w * 0.2 * inside(0.2 + 0.2 * x) for x, w in zip(nodes, weights, strict=True))  # from 0 to 0.4
    close(cross_moment("hardtanh", 0.4, q=q), q * integral, rtol=1e-9)


@NAMES
def test_identical_and_independent_samples_have_the_moments_of_one(name):
    q, rho = np.array([0.1, 8.0]), np.array([[0.0], [1.0]])
    of, cross, slopes = moments(name, q), cross_moment(name, rho, q=q), correlation_map_slope(name, rho, q=q)
    close(cross / of.second, [of.mean**2 / of.second, [1, 1]], rtol=1e-10, atol=1e-12)
    expected = q / of.second * np.array([of.derivative_mean**2, of.derivative_second])
    close(slopes / expected[1], expected / expected[1], rtol=1e-10, atol=1e-12)


@NAMES
def test_slope_is_that_of_a_finite_difference(name):
    rho, step = np.array([-0.6, 0.1, 0.7]), 1e-3
    values = correlation_map(name, rho[:, None] + step * np.array([-2, -1, 1, 2]), q=1.5, gain=1.2, bias_std=0.3)
    numerical = values @ [1, -8, 8, -1] / (12 * step)
    close(correlation_map_slope(name, rho, q=1.5, gain=1.2, bias_std=0.3), numerical, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("gap", [1e-1, 1e-5, 1e-9, 1e-13])
def test_kinks_close_to_each_other(gap):
    def function(u):
        return F.relu(u - 0.7) - 2 * F.relu(u - 0.7 - gap) + 3 * F.relu(u + 1.3)

    of, single = pairs.normal(function, 0.3), moments(function)
    close([of.second, of.derivative_second], [single.second, single.derivative_second])
    numerical = cross_moment(function, 0.3 + np.array([-2, -1, 1, 2]) * 1e-3) @ [1, -8, 8, -1] / 12e-3
    close(of.derivative_second - of.derivative_apart, numerical, rtol=1e-8)


# --- pairs: properties ------------------------------------------------------------------------


@stable
@given(st.sampled_from([name for name in ACTIVATIONS if name != "sin"]), sizes, st.floats(0.1, 3), st.floats(0, 2))
def test_map_increases_and_is_convex_on_positive_correlations(name, q, gain, bias_std):
    rho = np.linspace(0, 1, 9)
    values = correlation_map(name, rho, q=q, gain=gain, bias_std=bias_std)
    slopes = correlation_map_slope(name, rho, q=q, gain=gain, bias_std=bias_std)
    assert values[-1] == 1
    assert values[0] > -1e-12
    assert (np.diff(values) > -1e-12).all()
    assert (np.diff(values, 2) > -1e-11).all()
    assert (slopes > -1e-11 * slopes[-1]).all()
    assert (np.diff(slopes) > -1e-10 * slopes[-1]).all()


@stable
@given(correlations, sizes, st.floats(0.1, 3), st.floats(0, 2))
def test_linear_layer_keeps_correlations_but_for_the_biases(rho, q, gain, bias_std):
    expected = (gain**2 * q * rho + bias_std**2) / (gain**2 * q + bias_std**2)
    close(correlation_map("linear", rho, q=q, gain=gain, bias_std=bias_std), expected, atol=1e-12)
    close(cross_moment("linear", rho, q=q), q * rho, atol=1e-13 * q)


@stable
@given(st.sampled_from(list(LEAKS)), correlations, sizes, sizes)
def test_map_of_rectifiers_knows_no_scale(name, rho, q, gain):
    close(correlation_map(name, rho, q=q, gain=gain), correlation_map(name, rho), atol=1e-12)


@stable
@given(st.sampled_from(["gelu", "relu", "hardtanh", "tanh", "elu"]), correlations, st.floats(0.2, 5))
def test_mirror_images_and_scales(name, rho, q):
    function, b = ACTIVATIONS[name], 1.7
    of = float(moments(name, q).second)
    close(cross_moment(lambda u: -2 * function(-u), rho, q=q), 4 * cross_moment(name, rho, q=q), atol=1e-11 * of)
    close(cross_moment(lambda u: function(b * u), rho, q=q / b**2), cross_moment(name, rho, q=q), atol=1e-11 * of)


def test_arrays_broadcast_and_repeat():
    q = np.array([[0.5], [2.0]])
    values = correlation_map("tanh", RHO, q=q, gain=1.3, bias_std=0.2)
    assert values.shape == (2, len(RHO))
    close(values[1, 4], correlation_map("tanh", 0.3, q=2.0, gain=1.3, bias_std=0.2))
    assert np.shape(cross_moment("relu", 0.5)) == ()
    same = cross_moment("relu", [0.5, 0.5, -0.5])
    assert same[0] == same[1] != same[2]


def test_module_keeps_its_state_and_random_numbers_stay():
    module = nn.PReLU(init=0.25)
    before = torch.get_rng_state()
    close(correlation_map(module, 0.2), relu_correlation(0.2, 0.25))
    assert module.weight.dtype == torch.float32
    assert module.weight.grad is None
    assert torch.equal(torch.get_rng_state(), before)


def test_closed_form_of_rectifiers():
    close(relu_correlation([-1, 0, 1]), [0, 1 / math.pi, 1])
    close(relu_correlation(RHO, 1.0), RHO)
    close(relu_correlation(RHO, 3.0), relu_correlation(RHO, 1 / 3))
    distance, theta = 1e-6, 2 * math.asin(math.sqrt(1e-6 / 2))
    close(1 - relu_correlation(1 - distance), distance - theta**3 / (3 * math.pi), rtol=1e-9, atol=2e-16)


# --- layers -----------------------------------------------------------------------------------

# K iterated, by layer.
RELU = {0: 0.0, 1: 0.3183098861837907, 2: 0.4937310902003716, 5: 0.7359463506276366, 50: 0.9878619449373456}


def test_fifty_layers_of_rectifiers():
    found = sample_moments("relu", 50, gain=math.sqrt(2))
    layers = list(RELU)
    close(found.mean_squared[layers], list(RELU.values()), rtol=1e-12)
    close(found.variance, 1 - found.correlation, rtol=1e-12)
    close(found.forward, 1, rtol=1e-12)
    rho = 0.0
    for l in range(51):
        close(found.correlation[l], rho, rtol=1e-12)
        rho = relu_correlation(rho)


@pytest.mark.parametrize("samples", [None, 1, 2, 7])
def test_samples_share_what_they_have_in_common(samples):
    found = sample_moments("linear", 4, gain=0.5, bias_std=0.3, q=2.0, rho=0.4, samples=samples)
    share = 0 if samples is None else 1 / samples
    q, covariance = 2.0, 0.8
    for l in range(5):
        close([found.forward[l], found.correlation[l]], [q, covariance / q])
        close(found.mean_squared[l], covariance + (q - covariance) * share)
        close(found.variance[l], (q - covariance) * (1 - share))
        q, covariance = 0.25 * q + 0.09, 0.25 * covariance + 0.09


def late_kink(u):
    return u + 9 * F.relu(u - 50)


@pytest.mark.parametrize(("function", "gain", "q"), [("tanh", 1.4, 3.0), (late_kink, 1.9, 0.5)])
def test_layers_follow_the_maps(function, gain, q):
    found = sample_moments(function, 10, gain=gain, bias_std=0.1, q=q, rho=-0.2, samples=4)
    rho = -0.2
    for l in range(11):
        close([found.forward[l], found.correlation[l]], [q, rho], rtol=1e-10)
        rho = correlation_map(function, rho, q=q, gain=gain, bias_std=0.1)
        q = float(activations.variance_map(function, q, gain=gain, bias_std=0.1))


def test_layers_stay_accurate_where_the_signal_fades_or_grows_by_orders_of_magnitude():
    fades = sample_moments("hardtanh", 30, gain=0.5, rho=0.1)
    close(fades.forward[-1] / fades.forward[-2], 0.25)
    assert 1e-19 < fades.forward[-1] < 1e-17
    grows = sample_moments("relu", 12, gain=4.0, rho=0.1)
    close(grows.forward, 8.0 ** np.arange(13), rtol=1e-10)
    close(grows.correlation, sample_moments("relu", 12, gain=0.1, rho=0.1).correlation, rtol=1e-10)


@pytest.mark.parametrize("name", ["tanh", "hardtanh"])
def test_distance_of_close_samples_shrinks_by_chi_down_to_nothing(name):
    q = phase(name, gain=0.5, bias_std=0.5).q
    found = sample_moments(name, 40, gain=0.5, bias_std=0.5, q=q, rho=1 - 1e-6)
    chi = 0.25 * float(moments(name, q).derivative_second)
    close(found.forward, q)
    close(found.variance[1:] / found.variance[:-1], chi, rtol=1e-3)
    close(found.variance[20:] / found.variance[19:-1], chi, rtol=1e-7)
    assert 0 < found.variance[-1] < 1e-25


# --- phases -----------------------------------------------------------------------------------

# tanh by Gauss–Hermite quadrature of 200 points: σ_w², σ_b², q*, χ, ξ_q, ρ*, slope, ξ_c.
TANH = [
    (0.5, 0.05, 0.0875798651868, 0.4319873818209, 1.0088529224601, 1.0, 0.4319873818209, 1.1913854730132),
    (1.5, 0.05, 0.4180372005335, 0.9386362681989, 1.6828283887065, 1.0, 0.9386362681989, 15.790994034123),
    (2.0, 0.05, 0.7217618726521, 1.0476659995757, 1.3879757482574, 0.7440824195012, 0.9611147919740, 25.213414789157),
    (2.5, 0.05, 1.0639583774168, 1.1335156987043, 1.1798729164793, 0.4468042323443, 0.9187167749138, 11.795597515878),
    (1.2, 0.0, 0.1070787479798, 1.0093777959156, 5.8264920717052, 0.0, 0.9953973859311, 216.76745184674),
    (2.0, 0.0, 0.6179647697685, 1.1055288204394, 1.6855649819346, 0.0, 0.9550106888005, 21.723665969571),
]  # fmt: skip


@pytest.mark.parametrize("row", TANH, ids=str)
def test_phases_of_tanh(row):
    weights, biases, *expected = row
    found = phase("tanh", gain=math.sqrt(weights), bias_std=math.sqrt(biases))
    actual = [found.q, found.chi, found.depth_q, found.correlation, found.correlation_slope, found.depth_c]
    close(actual, expected, rtol=1e-9, atol=0)
    assert found.name == ("ordered" if found.chi < 1 else "chaotic")


@pytest.mark.parametrize(("name", "gain"), [("hardtanh", 0.8), ("erf", 2.5), ("sigmoid", 3.0)])
def test_deep_networks_arrive_where_the_phase_says_and_as_fast(name, gain):
    found = phase(name, gain=gain, bias_std=0.3)
    layers = sample_moments(name, 40, gain=gain, bias_std=0.3, q=found.q, rho=0.3)
    close(layers.forward, found.q, rtol=1e-9)
    left = np.abs(layers.correlation - found.correlation)
    layer = np.flatnonzero(left > 1e-7)[-1]
    assert left[layer] < 1e-3
    close(-1 / math.log(left[layer] / left[layer - 1]), found.depth_c, rtol=0.01)
    aside = sample_moments(name, 1, gain=gain, bias_std=0.3, q=found.q * 1.0001).forward / found.q - 1
    slope = variance_map_slope(name, found.q, gain=gain)
    close(aside[1] / aside[0], slope, rtol=1e-3)
    close(found.depth_q, -1 / math.log(abs(float(slope))), rtol=1e-9)


@pytest.mark.parametrize("bias_std", [1e-2, 1e-4])
def test_small_biases_leave_a_small_correlation(bias_std):
    found = phase("tanh", gain=1.5, bias_std=bias_std)
    at_zero, slope = bias_std**2 / found.q, correlation_map_slope("tanh", 0.0, q=found.q, gain=1.5, bias_std=bias_std)
    close(found.correlation, at_zero / (1 - slope), rtol=2e-2)


def test_rectifiers_are_critical_at_the_gain_of_he_and_ordered_below():
    for name in ("relu", "linear"):
        found = phase(name, gain=activations.gain(name))
        assert (found.name, found.correlation, found.depth_q, found.depth_c) == ("critical", 1, math.inf, math.inf)
        close([found.chi, found.correlation_slope], 1)
    found = phase("relu", gain=1.0, bias_std=0.5)
    assert found.name == "ordered"
    close([found.q, found.chi, found.depth_q, found.depth_c], [0.5, 0.5, 1 / math.log(2), 1 / math.log(2)])


@pytest.mark.parametrize("excess", [1e-3, 1e-7])
def test_near_the_edge_the_correlation_leaves_one_in_proportion(excess):
    gain = critical_gain("tanh", 0.3) * (1 + excess)
    found = phase("tanh", gain=gain, bias_std=0.3)
    assert found.name == "chaotic"
    with prepared("tanh", found.q) as (evaluate, kinks):
        curvature = (found.chi - gain**2 * _product(pairs.integrate(evaluate, kinks, found.q, 1e-4))) / 1e-4
    close(1 - found.correlation, 2 * (found.chi - 1) / curvature, rtol=0.02)
    close(1 / found.depth_c, found.chi - 1, rtol=0.02)


def _product(of):
    return of.derivative_second - of.derivative_apart


# --- criticality ------------------------------------------------------------------------------

CRITICAL = {
    1e-6: (1.0182526185118064, 0.009250388923064033),
    0.001: (1.1891895852346712, 0.10729235614752662),
    0.01: (1.4242052904887992, 0.27330091345834734),
    0.05: (1.7609546396067384, 0.5700478816407638),
    0.1: (1.9860726411358578, 0.8057991819134824),
    0.2: (2.2851524737206512, 1.1644962874582852),
    0.3: (2.5051271897023755, 1.4611694469472942),
}


@pytest.mark.parametrize("biases", CRITICAL)
def test_critical_gain_of_tanh(biases):
    close(critical_gain("tanh", math.sqrt(biases)) ** 2, CRITICAL[biases][0], rtol=1e-10)


def test_critical_line_of_tanh():
    weights, q = np.array(list(CRITICAL.values())).T
    gain, bias_std = critical_line("tanh", q)
    close(gain**2, weights, rtol=1e-10)
    close(bias_std**2, list(CRITICAL), rtol=1e-9, atol=1e-10)
    assert critical_line("relu", 7.0)[1] == 0
    close(critical_line("leaky_relu_0.2", [[0.1], [10.0]])[0], [[math.sqrt(2 / 1.04)]] * 2)


@pytest.mark.parametrize("name", ["hardtanh", "elu"])
def test_network_at_the_critical_gain_is_critical(name):
    gain = critical_gain(name, 0.3)
    found = phase(name, gain=gain, bias_std=0.3)
    assert (found.name, found.depth_c) == ("critical", math.inf)
    line_gain, line_bias = critical_line(name, found.q)
    close([line_gain, line_bias], [gain, 0.3], rtol=1e-8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("tanh", 1), ("hardtanh", 1), ("softsign", 1), ("erf", math.sqrt(math.pi) / 2)),
        *(("lecun_tanh", 1.5 / 1.7159), ("relu", math.sqrt(2)), ("leaky_relu_0.2", math.sqrt(2 / 1.04))),
        ("selu", math.sqrt(2 / (1 + 1.6732632423543773**2)) / 1.0507009873554805),  # a kink at zero
        ("sigmoid", 10.14926371001954),  # at q > 0
    ],
)
def test_critical_gain_without_biases(name, expected):
    close(critical_gain(name), expected, rtol=1e-9)


# --- batches ----------------------------------------------------------------------------------

BATCHES = [5, 6, 7, 16, 256, 10**6, 10**9]


@pytest.mark.parametrize("samples", BATCHES)
def test_growth_of_rectifiers_is_that_of_yang(samples):
    c = -1 / (samples - 1)
    j, slope = float(relu_correlation(c)), 1 - math.acos(c) / math.pi
    close(batch_growth("relu", samples), (slope + samples - 1) / ((samples - 3) * (1 - j)) - 1 / (samples - 3))
    close(batch_growth("relu", samples, normalize="scale_and_bias"), samples / ((samples - 3) * (1 - j)))
    leaky = float(relu_correlation(c, 0.2))
    close(batch_growth("leaky_relu_0.2", samples, normalize="scale_and_bias"), samples / ((samples - 3) * (1 - leaky)))


@pytest.mark.parametrize("samples", BATCHES)
def test_growth_of_linear_layers(samples):
    close(batch_growth("linear", samples), (samples - 2) / (samples - 3))
    close(batch_growth("linear", samples, normalize="scale_and_bias"), (samples - 1) / (samples - 3))


def test_published_growths():
    for samples, growth in {6: 2.004, 8: 1.788, 16: 1.590, 64: 1.493, 256: 1.473}.items():
        assert round(batch_growth("relu", samples), 3) == growth
    close(batch_growth("relu"), math.pi / (math.pi - 1))
    close(batch_growth("relu", normalize="scale_and_bias"), math.pi / (math.pi - 1))
    close(batch_growth("leaky_relu_0.2"), 1.2436, rtol=5e-5)
    of = moments("gelu")
    close(batch_growth("gelu"), of.derivative_second / (of.second - of.mean**2))


@pytest.mark.parametrize("name", ["tanh", "hardtanh", "gelu", "softplus", "relu_squared"])
def test_growth_in_large_batches_is_that_of_normal_samples_up_to_one_over_their_number(name):
    limit, at_1e4, at_1e6 = (batch_growth(name, samples) for samples in (None, 10**4, 10**6))
    close(at_1e6, limit, rtol=1e-4)
    close((at_1e4 / limit - 1) / (at_1e6 / limit - 1), 100, rtol=0.1)


def on_sphere(function, samples):
    with prepared(function, 1.0) as (evaluate, kinks):
        return pairs.integrate(evaluate, kinks, 1.0, samples / (samples - 1), samples - 1)


@pytest.mark.parametrize("samples", [5, 6, 9, 40])
def test_powers_on_the_sphere_have_their_moments(samples):
    k, c = samples - 1, -1 / (samples - 1)
    square = on_sphere(lambda u: u**2, samples)
    close(square.second, 3 * k / (k + 2))
    close(square.derivative_second, 4)
    close(square.apart, 3 * k / (k + 2) - k * (1 + 2 * c**2) / (k + 2))
    close(square.derivative_apart, 4 * (1 - c))
    close(square.product_apart, 4 * square.apart)
    cube = on_sphere(lambda u: u**3, samples)
    close(cube.second, 15 * k**2 / ((k + 2) * (k + 4)))
    close(cube.apart, cube.second - k**2 * (9 * c + 6 * c**3) / ((k + 2) * (k + 4)), rtol=1e-10)


@pytest.mark.parametrize("samples", [5, 6, 11, 300])
def test_kinks_on_the_sphere_have_the_probability_of_the_beta_distribution(samples):
    k = samples - 1
    of = on_sphere("hardtanh", samples)
    close(of.derivative_second, stats.beta(1 / 2, (k - 1) / 2).cdf(1 / k), rtol=1e-10)


@pytest.mark.parametrize("samples", [5, 6, 10])
def test_pairs_on_the_sphere_agree_with_another_quadrature(samples):
    k, c = samples - 1, -1 / (samples - 1)
    shift = math.acos(c)

    def around(r):
        """Mean over the angle of half the squared difference of hardtanh."""
        theta = (np.arange(40000) + 0.5) * 2 * np.pi / 40000
        one, two = (np.clip(math.sqrt(k) * r * np.cos(t), -1, 1) for t in (theta, theta - shift))
        return ((one - two) ** 2).mean() / 2

    def radial(t):  # r = sin t
        return around(math.sin(t)) * (k - 2) * math.sin(t) * math.cos(t) ** (k - 3)

    edge = math.asin(1 / math.sqrt(k))
    expected = sum(integrate.quad(radial, a, b, epsabs=1e-8)[0] for a, b in [(0, edge), (edge, math.pi / 2)])
    close(on_sphere("hardtanh", samples).apart, expected, rtol=1e-7)


@pytest.mark.parametrize("name", ["tanh", "leaky_relu_0.2"])
@pytest.mark.parametrize("normalize", ["batch", "scale_and_bias"])
def test_growth_agrees_with_gradients_of_simulated_batches(name, normalize):
    random, samples, repeats, units = rng(29), 8, 50, 3000
    function, ratios = ACTIVATIONS[name], []

    def hat(u, statistics):
        return (u - statistics.mean(1, keepdim=True)) / statistics.std(1, correction=0, keepdim=True)

    for _ in range(repeats):
        before, z, g = (torch.tensor(random.standard_normal((units, samples))) for _ in range(3))
        variance = function(hat(before, before)).var(1).mean()  # of the next pre-activations over the samples
        u = (variance.sqrt() * z + 3).requires_grad_()
        statistics = u if normalize == "batch" else u.detach()
        # a gradient from a normalised layer sums to zero over the batch
        g = g - g.mean(1, keepdim=True) if normalize == "batch" else g
        (delta,) = torch.autograd.grad((g * function(hat(u, statistics))).sum(), u)
        ratios.append(float((delta**2).sum() / (g**2).sum()))
    error = np.std(ratios, ddof=1) / math.sqrt(repeats)
    predicted = batch_growth(name, samples, normalize=normalize)
    assert error < 0.01 * predicted
    assert abs(np.mean(ratios) - predicted) < 5 * error + 3e-4 * predicted  # a ratio is biased by one over the units


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("function", [cross_moment, decorrelation, correlation_map, correlation_map_slope])
def test_pairs_refuse(function):
    for rho in (1.5, -1.1, math.nan, [0, 2]):
        with pytest.raises(ValueError, match=r"rho must lie between -1 and 1, got"):
            function("relu", rho)
    for q in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="q must be positive and finite"):
            function("relu", 0.5, q=q)
    with pytest.raises(ValueError, match=r"rho and q must broadcast, got shapes \(3,\) and \(2,\)"):
        function("relu", [0, 0.1, 0.2], q=[1, 2])
    with pytest.raises(ValueError, match="q is empty"):
        function("relu", [])
    with pytest.raises(TypeError, match="activation must be a name"):
        function(3, 0.5)
    with pytest.raises(ValueError, match="activation must be one of"):
        function("rleu", 0.5)
    with pytest.raises(ValueError, match="must be continuous"):
        function(torch.sign, 0.5)
    with pytest.raises(ValueError, match="grows too fast"):
        function(lambda u: torch.exp(u**2 / 3.9), 0.5)


@pytest.mark.parametrize("function", [correlation_map, correlation_map_slope])
def test_maps_refuse(function):
    for gain in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="gain must be positive"):
            function("relu", 0.5, gain=gain)
    with pytest.raises(ValueError, match="bias_std must be finite and not negative, got -1"):
        function("relu", 0.5, bias_std=-1)
    with pytest.raises(ValueError, match="nothing left to correlate"):
        function(lambda u: 0 * u, 0.5)
    assert np.isfinite(function(lambda u: 0 * u, 0.5, bias_std=1.0))


def test_what_does_not_converge_is_refused():
    with pytest.raises(ValueError, match=r"did not converge at q = 1, rho = 0.5: their error is about"):
        cross_moment(lambda u: torch.sin(3000 * u), 0.5)


def test_derivative_that_autograd_does_not_see_is_refused():
    with pytest.raises(ValueError, match="differentiable by autograd"):
        correlation_map_slope(lambda u: torch.tanh(u.detach()) + 0 * u, 0.5)


def test_closed_form_refuses():
    with pytest.raises(ValueError, match=r"rho must lie between -1 and 1, got 1.01"):
        relu_correlation(1.01)
    for slope in (math.inf, math.nan):
        with pytest.raises(ValueError, match="slope must be finite"):
            relu_correlation(0.5, slope)


def test_layers_refuse():
    def run(**change):
        return sample_moments(**({"activation": "relu", "depth": 3, "gain": 1.0} | change))

    for depth, error in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="depth must be"):
            run(depth=depth)
    for samples, error in ((0, ValueError), (2.5, TypeError)):
        with pytest.raises(error, match="samples must be"):
            run(samples=samples)
    with pytest.raises(ValueError, match="gain must be positive"):
        run(gain=0)
    with pytest.raises(ValueError, match="bias_std"):
        run(bias_std=-0.1)
    for change in ({"q": [1.0]}, {"rho": [0.0, 0.1]}):
        with pytest.raises(ValueError, match="q and rho must be single numbers"):
            run(**change)
    for q in (0.0, -2.0, math.nan):
        with pytest.raises(ValueError, match="q must be positive and finite, got"):
            run(q=q)
    with pytest.raises(ValueError, match="rho must lie between"):
        run(rho=1.1)
    with pytest.raises(ValueError, match=r"rho must be at least 0 among infinitely many samples, got -0.1"):
        run(rho=-0.1)
    with pytest.raises(ValueError, match=r"rho must be at least -0.5 among 3 samples"):
        run(rho=-0.51, samples=3)
    close(run(rho=-0.5, samples=3, activation="linear").mean_squared, 0, atol=1e-15)
    with pytest.raises(ValueError, match=r"gain=1e\+130 takes the second moment to 5e\+259 in layer 1"):
        run(gain=1e130)
    with pytest.raises(ValueError, match="nothing left to correlate"):
        run(activation=lambda u: 0 * u)


def test_networks_without_a_phase_are_refused():
    with pytest.raises(ValueError, match=r"gain=0.5, bias_std=0.0 has no phase: the only stable fixed point is q = 0"):
        phase("tanh", gain=0.5)
    with pytest.raises(ValueError, match=r"gain=2.0, bias_std=0.1 has no phase: no fixed point .* is stable"):
        phase("relu", gain=2.0, bias_std=0.1)
    with pytest.raises(ValueError, match=r"depends on where it starts, at q = 0, 2.61076"):
        phase(lambda u: torch.tanh(u) * u**2 / (1 + u**2), gain=3.0)
    with pytest.raises(ValueError, match="too close to the critical one to tell"):
        phase("hardtanh", gain=critical_gain("hardtanh", 0.3) * (1 + 1e-8), bias_std=0.3)
    with pytest.raises(ValueError, match="gain must be positive"):
        phase("tanh", gain=-1.0)


def test_critical_networks_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"variance would be negative at q = 0.5, 1"):
        critical_line(lambda u: F.relu(u) + 1, [1.0, 0.5, 0.5])
    with pytest.raises(ValueError, match="derivative of zero"):
        critical_line(lambda u: 0 * u + 1, 1.0)
    with pytest.raises(ValueError, match="q must be positive"):
        critical_line("tanh", 0.0)
    with pytest.raises(ValueError, match=r"no single critical gain at bias_std=0.3: none found"):
        critical_gain("relu", 0.3)
    with pytest.raises(ValueError, match=r"no single critical gain at bias_std=0.0: none found"):
        critical_gain("relu_squared")
    with pytest.raises(ValueError, match=r"the fixed point is unstable: gain = 1.45047 at q = 1.42487"):
        critical_gain("gelu", 0.3)
    with pytest.raises(ValueError, match=r"the fixed point is unstable: gain = 2 at q = 0"):
        critical_gain("gelu")
    with pytest.raises(ValueError, match="bias_std must be finite and not negative"):
        critical_gain("tanh", -1.0)


def test_several_critical_gains_are_named(monkeypatch):
    def wavy(activation, q):
        return 1 + 0 * q, q * (1 + np.sin(3 * np.log(q)))

    monkeypatch.setattr(meanfield, "_critical", wavy)
    with pytest.raises(ValueError, match=r"more than one: gain = 1 at q = .*; gain = 1 at q = "):
        critical_gain("tanh", 1.0)


def test_batches_refuse():
    with pytest.raises(ValueError, match="normalize must be batch or scale_and_bias, got 'layer'"):
        batch_growth("relu", 16, normalize="layer")
    for samples in (0, 2, 4):
        with pytest.raises(ValueError, match="samples must be at least"):
            batch_growth("relu", samples)
    with pytest.raises(TypeError, match=r"samples must be an integer, got 8.0"):
        batch_growth("relu", 8.0)
    for samples in (None, 8):
        with pytest.raises(ValueError, match="activation is constant"):
            batch_growth(lambda u: 0 * u + 2, samples)


@pytest.mark.parametrize(("activation", "gain", "q"), [("tanh", 0.5, 4e-6 / 3), ("relu", 1.0, 2e-6)])
def test_phase_where_small_biases_hold_the_signal(activation, gain, q):
    """q = g² q + σ_b² for tanh, whose slope at zero is one, and g² q / 2 + σ_b² for the rectifier."""
    assert meanfield.phase(activation, gain=gain, bias_std=1e-3).q == pytest.approx(q, rel=1e-4)


def test_phase_where_large_biases_hold_the_signal():
    assert meanfield.phase("tanh", gain=1.0, bias_std=400.0).q == pytest.approx(400.0**2 + 1, rel=1e-4)
