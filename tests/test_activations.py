"""Activations as Gaussian moments: against closed forms and independent integrals, and what they refuse."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats
from torch import nn
from torch.nn import functional as F

from initlib import activations
from initlib.activations import ACTIVATIONS, fixed_points, gain, get, moments, variance_map, variance_map_slope

stable = settings(derandomize=True, deadline=None, database=None, max_examples=12)

FIELDS = ("mean", "second", "derivative_mean", "derivative_second", "second_slope")
NAMES = pytest.mark.parametrize("name", ACTIVATIONS)


def fields(of):
    return np.array([getattr(of, field) for field in FIELDS])


def close(actual, expected, rtol=1e-10, atol=1e-13):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def density(t):
    return np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)


def tail(t):
    """Probability that a standard normal exceeds t."""
    return special.ndtr(-np.asarray(t))


# --- values at q = 1 --------------------------------------------------------------------------

# From integrals with 30 digits: mean, second moment, variance, of the derivative: mean, second moment; gains.
REFERENCE = {
    "linear": (0, 1, 1, 1, 1, 1, 1),
    "relu": (0.398942280401, 0.5, 0.340845056908, 0.5, 0.5, 1.41421356237, 1.41421356237),
    "leaky_relu": (0.394952857597, 0.50005, 0.344062240276, 0.505, 0.50005, 1.414142857, 1.414142857),
    "leaky_relu_0.2": (0.319153824321, 0.52, 0.418140836421, 0.6, 0.52, 1.38675049056, 1.38675049056),
    "prelu_0.25": (0.299206710301, 0.53125, 0.441725344511, 0.625, 0.53125, 1.37198868114, 1.37198868114),
    "abs": (0.797884560803, 1, 0.363380227632, 0, 1, 1, 1),
    "tanh": (0, 0.394294490398, 0.394294490398, 0.605705509602, 0.464402902448, 1.59253741972, 1.46741359163),
    "lecun_tanh": (0, 0.750430276305, 0.750430276305, 0.852373888803, 0.80398911332, 1.15436945398, 1.11525689254),
    "sigmoid": (0.5, 0.293379035858, 0.0433790358581, 0.206620964142, 0.0448362413502, 1.84622854534, 4.72264608594),
    "softsign": (0, 0.183014021267, 0.183014021267, 0.412755100339, 0.227671340422, 2.33753336311, 2.09578060894),
    "erf": (0, 0.464559054398, 0.464559054398, 0.651470015871, 0.569410034734, 1.46716695049, 1.32521835286),
    "sin": (0, 0.432332358382, 0.432332358382, 0.606530659713, 0.567667641618, 1.52086662318, 1.32725060028),
    "gelu": (0.282094791774, 0.42522148257, 0.345644011024, 0.5, 0.455850865649, 1.5335304412, 1.48111441271),
    "gelu_tanh": (0.282038588079, 0.425193711033, 0.345647945868, 0.5, 0.455817845963, 1.53358052167, 1.48116805809),
    "silu": (0.206620964142, 0.355775519817, 0.313083296994, 0.5, 0.379482351633, 1.67653247033, 1.62332025795),
    "elu": (0.160520572267, 0.644945417493, 0.619178563372, 0.761578291865, 0.668102001223, 1.2451983007, 1.2234285576),
    "selu": (0, 1, 1, 0.985231116186, 1.07157499246, 1, 0.966025776974),
    "softplus": (0.806059183347, 0.921245908859, 0.271514501801, 0.5, 0.293379035858, 1.04186683554, 1.84622854534),
    "relu_squared": (0.5, 1.5, 1.25, 0.797884560803, 2, 0.816496580928, 0.707106781187),
    "mish": (0.240403888375, 0.452342192376, 0.39454816283, 0.563747557288, 0.479083758374, 1.4868475813, 1.4447552326),
    "hardtanh": (0, 0.516058550961, 0.516058550961, 0.682689492137, 0.682689492137, 1.39203614045, 1.21028706243),
}  # fmt: skip


def test_reference_covers_every_name():
    assert REFERENCE.keys() == ACTIVATIONS.keys()


@NAMES
def test_moments_and_gains_are_those_of_high_precision_integrals(name):
    mean, second, variance, derivative_mean, derivative_second, forward, backward = REFERENCE[name]
    of = moments(name)
    close(of.mean, mean, rtol=2e-11, atol=1e-12)
    close(of.second, second, rtol=2e-11)
    close(of.variance, variance, rtol=3e-11)
    close(of.derivative_mean, derivative_mean, rtol=2e-11, atol=1e-12)
    close(of.derivative_second, derivative_second, rtol=2e-11)
    close(gain(name), forward, rtol=5e-11)
    close(gain(name, direction="backward"), backward, rtol=5e-11)


def test_published_constants():
    scaled = get("lecun_tanh")(torch.ones(1, dtype=torch.float64))
    close(scaled, 0.999997255922, rtol=1e-11)  # LeCun's tanh keeps ±1
    scale, alpha = 1.0507009873554805, 1.6732632423543773  # SELU's
    u = torch.tensor([2.0, -50.0], dtype=torch.float64)
    close(get("selu")(u), [2 * scale, -scale * alpha], rtol=1e-14)
    assert abs(float(moments("selu").mean)) < 1e-13
    assert gain("tanh", direction="forward") == gain("tanh") == pytest.approx(1.59253741972, rel=1e-11)


@pytest.mark.parametrize(
    ("t", "layer_2", "forward", "backward"),
    [
        (1.0, 1.0, 0.42522148257029874, 0.4558508656492873),
        (2 / 3, 4 / 3, 0.35453158611766233, 0.3809928858526282),
        (0.7071067811865475, 1.414213562373095, 0.40282845816006335, 0.4328298639960424),
        (0.6, 1.2, 0.2819918356752509, 0.30306209385749316),
        (0.75, 1.5, 0.4576163977533259, 0.4915886159238547),
        (0.4, 1.6, 0.23289748764781326, 0.24976889608436853),
        (0.13846153846153847, 1.1076923076923078, 0.04657379646539714, 0.04891613936994795),
        (0.5625, 4.5, 0.9801526919973018, 1.0533068974027797),
        (0.06614785992217899, 1.0583657587548638, 0.019493239364189962, 0.02010495236394085),
        (0.53125, 8.5, 1.7307750118943463, 1.8596729610854748),
    ],
)
def test_gelu_between_two_matrices_passes_what_its_moments_say(t, layer_2, forward, backward):
    of = moments("gelu", t)
    close(layer_2 * of.second, forward, rtol=1e-10)
    close(t * layer_2 * of.derivative_second, backward, rtol=1e-10)


# --- closed forms at any q --------------------------------------------------------------------


def rectified(q, a, b=0.0):
    """Of relu(u - a) less b times relu(a - u), as five moments."""
    s = np.sqrt(q)
    t = a / s
    up, down = s * (density(t) - t * tail(t)), s * (density(t) + t * tail(-t))
    up_2, down_2 = (
        q * ((1 + t**2) * tail(t) - t * density(t)),
        q * ((1 + t**2) * tail(-t) + t * density(t)),
    )
    share = tail(t) + b**2 * tail(-t)
    return np.array([up - b * down, up_2 + b**2 * down_2, tail(t) + b * tail(-t), share, share])


def saturating_erf(q):
    return np.array(
        [
            0 * q,
            2 / np.pi * np.arcsin(2 * q / (1 + 2 * q)),
            2 / np.sqrt(np.pi * (1 + 2 * q)),
            4 / np.pi / np.sqrt(1 + 4 * q),
            4 / np.pi / (1 + 2 * q) / np.sqrt(1 + 4 * q),
        ]
    )


def gaussian_error_linear(q):
    phi_2 = 1 / (2 * np.pi * np.sqrt(1 + 2 * q))  # of the density squared
    cdf_2 = 1 / 4 + np.arcsin(q / (1 + q)) / (2 * np.pi)
    mixed = phi_2 * q / (1 + q)
    mean = q / np.sqrt(2 * np.pi * (1 + q))
    second = q * cdf_2 + 2 * q**2 * phi_2 / (1 + q)
    return np.array([mean, second, 0.5 + 0 * q, cdf_2 + 2 * mixed + phi_2 * q / (1 + 2 * q)])


def exponential_linear(q, scale=1.0, alpha=1.0):
    def half(k):  # E[exp(k u); u < 0]
        return special.erfcx(k * np.sqrt(q / 2)) / 2

    return np.array(
        [
            scale * (np.sqrt(q / (2 * np.pi)) + alpha * (half(1) - 0.5)),
            scale**2 * (q / 2 + alpha**2 * (half(2) - 2 * half(1) + 0.5)),
            scale * (0.5 + alpha * half(1)),
            scale**2 * (0.5 + alpha**2 * half(2)),
        ]
    )


def clipped(q, limit=1.0):
    t = limit / np.sqrt(q)
    inside = special.erf(t / math.sqrt(2))
    second = q * (inside - 2 * t * density(t)) + 2 * limit**2 * tail(t)
    return np.array([0 * q, second, inside, inside, inside - 2 * t * density(t)])


FORMS = {
    "linear": lambda q: np.array([0 * q, q, 1 + 0 * q, 1 + 0 * q, 1 + 0 * q]),
    "relu": lambda q: rectified(q, 0.0),
    "relu_squared": lambda q: np.array([q / 2, 1.5 * q**2, np.sqrt(2 * q / np.pi), 2 * q, 3 * q]),
    "leaky_relu": lambda q: rectified(q, 0.0, 0.01),
    "leaky_relu_0.2": lambda q: rectified(q, 0.0, 0.2),
    "prelu_0.25": lambda q: rectified(q, 0.0, 0.25),
    "abs": lambda q: rectified(q, 0.0, -1.0),
    "erf": saturating_erf,
    "gelu": gaussian_error_linear,
    "elu": exponential_linear,
    "selu": lambda q: exponential_linear(q, 1.0507009873554805, 1.6732632423543773),
}
Q = np.logspace(-12, 8, 6)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("together", [True, False], ids=["all q at once", "one q at a time"])
def test_moments_are_exact_over_twenty_orders_of_magnitude(name, together):
    if not together and name not in ("abs", "erf"):
        return
    q = Q[Q > 1e-3] if name in ("elu", "selu") else Q  # their closed forms cancel at small q
    expected = FORMS[name](q)
    actual = fields(moments(name, q)) if together else np.stack([fields(moments(name, each)) for each in q], 1)
    size = np.sqrt(np.stack([expected[1], expected[1] ** 2, expected[3], expected[3] ** 2]))
    for k in range(4):
        assert (np.abs(actual[k] - expected[k]) <= 1e-11 * size[k]).all(), (FIELDS[k], actual[k], expected[k])
    if len(expected) == 5:
        close(actual[4], expected[4], rtol=1e-10)


def test_clipping_is_exact_from_where_it_never_clips_to_where_it_always_does():
    q = np.logspace(-12, 8, 11)
    actual, expected = fields(moments("hardtanh", q)), clipped(q)
    assert (np.abs(actual[0]) <= 1e-14 * np.sqrt(expected[1])).all()
    close(actual[1:4], expected[1:4], rtol=1e-11, atol=0)
    close(actual[4, :-1], expected[4, :-1], rtol=1e-10)
    close(actual[4, -1], math.sqrt(2 / math.pi) / 3 * q[-1] ** -1.5, rtol=1e-7)  # where the closed form cancels


@pytest.mark.parametrize("q", [1e-6, 0.01, 1.0, 30.0, 1e3])
def test_sine_has_the_moments_of_its_characteristic_function(q):
    expected = [0, -math.expm1(-2 * q) / 2, math.exp(-q / 2), (1 + math.exp(-2 * q)) / 2, math.exp(-2 * q)]
    close(fields(moments("sin", q)), expected, rtol=1e-10, atol=1e-12 * min(1, q))


@pytest.mark.parametrize("q", [1e-9, 1e-3, 1.0, 50.0, 1e7])
def test_saturating_and_soft_functions_satisfy_the_identities_of_their_derivatives(q):
    tanh, sigmoid, silu, softplus = (moments(name, q) for name in ("tanh", "sigmoid", "silu", "softplus"))
    close(tanh.derivative_mean, 1 - tanh.second, rtol=1e-9)  # tanh' = 1 - tanh²
    close(sigmoid.derivative_mean, sigmoid.mean - sigmoid.second, rtol=1e-7)  # σ' = σ - σ²
    close(sigmoid.mean, 0.5)
    close(silu.mean, q * sigmoid.derivative_mean, rtol=1e-9)  # Stein
    close(silu.derivative_mean, 0.5)
    close(softplus.derivative_mean, 0.5)
    close(softplus.derivative_second, sigmoid.second)


# --- independent integrals --------------------------------------------------------------------

BREAKS = {"hardtanh": (-1, 1), "softsign": (0,), "elu": (0,), "selu": (0,)}


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name not in FORMS or name in BREAKS])
@pytest.mark.parametrize("q", [0.03, 1.7, 40.0])
def test_moments_agree_with_another_quadrature(name, q):
    function, s = get(name), math.sqrt(q)

    def integral(of):
        points = sorted({-12.0, 12.0, *(b / s for b in BREAKS.get(name, ())), *(np.array([-4, -1, 0, 1, 4]) / s)})
        return sum(
            integrate.quad(lambda z: of(s * z, z) * density(z), a, b, epsabs=1e-13, epsrel=1e-11, limit=200)[0]
            for a, b in itertools.pairwise(p for p in points if abs(p) <= 12)
        )

    def value(u):
        return float(function(torch.tensor(u, dtype=torch.float64)))

    of = moments(name, q)
    close(of.mean, integral(lambda u, z: value(u)), rtol=1e-9, atol=1e-11)
    close(of.second, integral(lambda u, z: value(u) ** 2), rtol=1e-9)
    close(of.derivative_mean, integral(lambda u, z: value(u) * z / s), rtol=1e-8, atol=1e-11)
    close(of.second_slope, integral(lambda u, z: value(u) ** 2 * (z * z - 1) / (2 * q)), rtol=1e-8, atol=1e-11)


@NAMES
def test_slope_is_that_of_a_finite_difference(name):
    q = np.array([[1e-3], [1.0], [20.0]])
    around = moments(name, q + 1e-3 * q * [-2, -1, 0, 1, 2])
    numerical = around.second @ [1, -8, 0, 8, -1] / (12 * 1e-3 * q[:, 0])
    error = np.abs(around.second_slope[:, 2] - numerical)
    assert (error < 1e-8 * (np.abs(numerical) + around.second[:, 2] / q[:, 0])).all()


def test_slope_of_a_smooth_function_is_that_of_its_own_derivatives():
    for q in (0.1, 1.0, 10.0):
        z, weight = np.polynomial.hermite_e.hermegauss(120)
        u = math.sqrt(q) * z
        value, derivative = np.sin(u) + u**2, np.cos(u) + 2 * u
        inner = derivative**2 + value * (2 - np.sin(u))
        expected = weight @ inner / math.sqrt(2 * math.pi)
        close(moments(lambda u: torch.sin(u) + u**2, q).second_slope, expected, rtol=1e-10)


# --- identities -------------------------------------------------------------------------------

PLAIN = [name for name in ACTIVATIONS if name != "sin"]  # which takes long at large q
sizes = st.floats(-3, 3).map(lambda x: 10**x)


@stable
@given(st.sampled_from(PLAIN), st.floats(0.1, 10), st.floats(0.1, 10), st.sampled_from([1, -1]), sizes)
def test_scales_inside_and_outside_come_out_as_powers(name, a, b, sign, q):
    function = get(name)
    inner = moments(name, b**2 * q)
    outer = moments(lambda u: sign * a * function(b * u), q)
    expected = np.stack([sign * a, a**2, sign * a * b, (a * b) ** 2, (a * b) ** 2]) * fields(inner)
    size = np.sqrt([expected[1], expected[1] ** 2, expected[3], expected[3] ** 2, (expected[1] / q) ** 2])
    assert (np.abs(fields(outer) - expected) <= 1e-9 * size).all()


@stable
@given(st.sampled_from(PLAIN), st.floats(-5, 5), sizes)
def test_constant_shifts_the_mean_alone(name, c, q):
    function, of = get(name), moments(name, q)
    shifted = moments(lambda u: function(u) + c, q)
    close(shifted.mean, of.mean + c, rtol=1e-9, atol=1e-10)
    close(shifted.second, of.second + 2 * c * of.mean + c**2, rtol=1e-9, atol=1e-10)
    close(shifted.variance, of.variance, rtol=1e-9, atol=1e-9 * (c**2 + float(of.second)))
    close(shifted.derivative_mean, of.derivative_mean, rtol=1e-9, atol=1e-10)
    close(shifted.derivative_second, of.derivative_second, rtol=1e-9)


@stable
@given(st.sampled_from(PLAIN), sizes)
def test_mirror_image_has_the_mirrored_moments(name, q):
    function, of = get(name), moments(name, q)
    mirrored = moments(lambda u: function(-u), q)
    signs = np.array([1, 1, -1, 1, 1])
    size = np.sqrt([of.second, of.second**2, of.derivative_second, of.derivative_second**2, (of.second / q) ** 2])
    assert (np.abs(fields(mirrored) - signs * fields(of)) <= 1e-9 * size).all()


@pytest.mark.parametrize(("name", "degree"), [("relu", 1), ("leaky_relu_0.2", 1), ("relu_squared", 2)])
def test_gains_of_homogeneous_functions_scale_by_a_power(name, degree):
    for direction in ("forward", "backward"):
        one, other = (gain(name, q, direction) for q in (1.0, 1e6))
        close(other / one, 1e6 ** ((1 - degree) / 2), rtol=1e-11)


# --- kinks ------------------------------------------------------------------------------------


@stable
@given(st.floats(-6, 6), sizes, st.floats(-2, 2))
def test_kink_at_any_place_is_exact(t, q, b):
    a = t * math.sqrt(q)
    of = moments(lambda u: torch.where(u > a, u - a, b * (u - a)), q)
    expected = rectified(q, a, b)
    size = np.sqrt([expected[1], expected[1] ** 2, expected[3], expected[3] ** 2, expected[3] ** 2])
    assert (np.abs(fields(of) - expected) <= 1e-10 * size + 1e-13 * np.array([math.sqrt(q), q, 1, 1, 1])).all()


def broken_line(places, steps, q):
    """First two moments of the sum of steps times relu(u - place), and of its derivative."""
    s = math.sqrt(q)
    one = [rectified(q, a) for a in places]
    mean = sum(c * m[0] for c, m in zip(steps, one, strict=True))
    derivative_mean = sum(c * m[2] for c, m in zip(steps, one, strict=True))
    second = derivative_second = 0.0
    for (i, a), (j, b) in itertools.product(enumerate(places), repeat=2):
        later = i if a >= b else j
        first = one[later]
        second += steps[i] * steps[j] * (first[1] + abs(a - b) * first[0])
        derivative_second += steps[i] * steps[j] * tail(max(a, b) / s)
    return np.array([mean, second, derivative_mean, derivative_second])


def broken(places, steps):
    return lambda u: sum(c * F.relu(u - a) for a, c in zip(places, steps, strict=True))


@stable
@given(st.lists(st.tuples(st.floats(-4, 4), st.floats(-2, 2)), min_size=1, max_size=12), st.floats(0.3, 3))
def test_many_kinks_are_exact(kinks, q):
    places, steps = zip(*kinks, strict=True)
    of = moments(broken(places, steps), q)
    close(fields(of)[:4], broken_line(places, steps, q), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("gap", [1e-1, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-13])
def test_kinks_close_to_each_other_are_exact(gap):
    places, steps = (0.7, 0.7 + gap, -1.3, -1.3 - gap), (1.0, -2.0, 0.5, 3.0)
    of = moments(broken(places, steps))
    close(fields(of)[:4], broken_line(places, steps, 1.0), rtol=1e-12)


@pytest.mark.parametrize("count", [3, 5, 9])
def test_cluster_of_kinks_is_exact(count):
    places = 1.1 + 1e-3 * np.arange(count) ** 1.5
    steps = [(-1.0) ** k * (2 + k) for k in range(count)]
    of = moments(broken(places, steps), 2.0)
    close(fields(of)[:4], broken_line(places, steps, 2.0), rtol=1e-10)


@pytest.mark.parametrize("edge", [1.0, math.sqrt(12), 0.0, 37.0])
@pytest.mark.parametrize("offset", [0.0, -1e-13, 1e-9, -1e-5])
def test_kinks_close_to_where_panels_end_are_exact(edge, offset):
    places, steps = (edge + offset, -edge - offset), (1.0, 0.5)
    of = moments(lambda u: u + broken(places, steps)(u))
    expected = broken_line((-60.0, *places), (1.0, *steps), 1.0)  # relu(u + 60) is u + 60
    close(of.mean, expected[0] - 60, rtol=1e-10, atol=1e-12)
    close(fields(of)[2:4], expected[2:], rtol=1e-11)


def test_staircase_without_jumps_is_integrated_from_kink_to_kink():
    def ramp(u):  # slope 1 and 0 in turn, over intervals of 1/4
        whole = torch.floor(2 * u)
        return whole / 4 + torch.clamp(u - whole / 2, max=0.25)

    edges = np.arange(-40, 40) / 2
    share = (special.ndtr(edges + 0.25) - special.ndtr(edges)).sum()
    close(fields(moments(ramp))[2:4], [share, share], rtol=1e-11)


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1e3, 1e6])
def test_scale_of_a_function_need_not_be_that_of_the_signal(scale):
    steep = fields(moments(lambda u: torch.erf(u / scale))) * [1, 1, scale, scale**2, scale**2]
    close(steep, saturating_erf(1 / scale**2) * [1, 1, 1, 1, 1], rtol=1e-9, atol=1e-12 * min(1, scale))
    close(moments(lambda u: F.hardtanh(u, -scale, scale)).second, clipped(1.0, scale)[1], rtol=1e-10)


def test_function_that_is_nearly_a_jump_is_refused():
    with pytest.raises(ValueError, match="its derivative does not belong to its values"):
        moments(lambda u: torch.erf(u / 1e-6))


# --- names, modules, functions ----------------------------------------------------------------

MODULES = {
    "identity": (nn.Identity(), "linear"),
    "relu": (nn.ReLU(), "relu"),
    "relu in place": (nn.ReLU(inplace=True), "relu"),
    "leaky relu": (nn.LeakyReLU(), "leaky_relu"),
    "leaky relu of another slope, in place": (nn.LeakyReLU(0.2, inplace=True), "leaky_relu_0.2"),
    "prelu": (nn.PReLU(), "prelu_0.25"),
    "prelu in double precision": (nn.PReLU(dtype=torch.float64), "prelu_0.25"),
    "tanh": (nn.Tanh(), "tanh"),
    "hardtanh": (nn.Hardtanh(inplace=True), "hardtanh"),
    "softsign": (nn.Softsign(), "softsign"),
    "gelu": (nn.GELU(), "gelu"),
    "gelu by tanh": (nn.GELU(approximate="tanh"), "gelu_tanh"),
    "silu": (nn.SiLU(inplace=True), "silu"),
    "celu": (nn.CELU(), "elu"),
    "selu": (nn.SELU(), "selu"),
    "softplus": (nn.Softplus(), "softplus"),
    "dropout, asleep": (nn.Dropout(0.5).eval(), "linear"),
    "nested": (nn.Sequential(nn.ReLU(inplace=True), nn.Sequential(nn.Identity(), nn.PReLU())), "relu"),
    "function": (torch.tanh, "tanh"),
    "expression": (lambda u: 2 * torch.sigmoid(2 * u) - 1, "tanh"),
    "function that acts in place": (lambda u: u.tanh_(), "tanh"),
}


@pytest.mark.parametrize("kind", MODULES)
def test_module_or_function_is_as_good_as_a_name(kind):
    activation, name = MODULES[kind]
    close(fields(moments(activation, 3.0)), fields(moments(name, 3.0)), rtol=1e-10, atol=1e-12)


def test_slopes_of_a_module_in_single_precision_are_used_as_they_are():
    slope = nn.PReLU(init=0.1)
    exact = slope.weight.item()  # 0.1 in single precision
    close(moments(slope).second, (1 + exact**2) / 2, rtol=1e-13)


@pytest.mark.parametrize("q", [0.5, 20.0])
def test_relu6_stops_at_six(q):
    one, two = rectified(q, 0.0), rectified(q, 6.0)
    close(fields(moments(nn.ReLU6(), q))[2:4], [one[2] - two[2]] * 2, rtol=1e-11)
    close(moments(nn.ReLU6(), q).mean, one[0] - two[0], rtol=1e-11)


def test_mean_and_slope_of_other_modules_fit_their_values():
    for module in (nn.Hardswish(), nn.Hardsigmoid(), nn.Softshrink(), nn.Tanhshrink(), nn.LogSigmoid()):
        for q in (0.3, 5.0):
            u = math.sqrt(q) * np.linspace(-12, 12, 480001)
            weight = stats.norm(scale=math.sqrt(q)).pdf(u) * (u[1] - u[0])
            value = module(torch.from_numpy(u)).numpy()
            of = moments(module, q)
            close(of.mean, value @ weight, rtol=1e-7)
            close(of.second, value**2 @ weight, rtol=1e-7)
            close(of.derivative_mean, value * u / q @ weight, rtol=1e-7, atol=1e-9)


def test_get_finds_names_and_passes_the_rest():
    module = nn.Tanh()
    assert get(module) is module
    assert get(torch.sin) is torch.sin
    for name, function in ACTIVATIONS.items():
        assert get(name) is function


def test_constant_function_has_moments_and_no_backward_gain():
    of = moments(lambda u: torch.full_like(u, -3.0), 2.0)
    close(fields(of), [-3, 9, 0, 0, 0], atol=1e-14)
    assert gain(lambda u: torch.full_like(u, -3.0), 2.0) == pytest.approx(math.sqrt(2) / 3)
    with pytest.raises(ValueError, match="no gain keeps its backward second moment"):
        gain(lambda u: torch.full_like(u, -3.0), direction="backward")
    for direction in ("forward", "backward"):
        with pytest.raises(ValueError, match=f"no gain keeps its {direction} second moment"):
            gain(torch.zeros_like, direction=direction)


def test_integers_are_values_too():
    close(moments(lambda u: torch.ones_like(u, dtype=torch.int32)).second, 1)


# --- shapes of q ------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [2.0, 2, np.float32(2), np.array(2.0), [2.0], [[1, 2, 3]], np.ones((2, 1, 2)), (3, 1, 3)])
def test_every_field_has_the_shape_of_q(q):
    of = moments("tanh", q)
    for field in (*FIELDS, "variance"):
        assert np.shape(getattr(of, field)) == np.shape(q)
        assert getattr(of, field).dtype == np.float64
    assert np.shape(variance_map("tanh", q)) == np.shape(variance_map_slope("tanh", q)) == np.shape(q)
    assert type(gain("tanh", 2.0)) is float


@pytest.mark.parametrize("name", ["relu", "tanh", "hardtanh", "softplus"])
def test_every_q_of_an_array_has_its_own_moments(name):
    q = np.array([[3.0, 0.01], [100.0, 3.0]])
    together = fields(moments(name, q))
    assert (together[:, 0, 0] == together[:, 1, 1]).all()
    for index in np.ndindex(q.shape):
        close(together[(slice(None), *index)], fields(moments(name, q[index])), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("q", [0, -1.0, math.nan, math.inf, -math.inf, [1.0, 0.0], [1.0, math.nan], None])
@pytest.mark.parametrize("function", [moments, variance_map, variance_map_slope], ids=lambda f: f.__name__)
def test_q_that_no_signal_has_is_refused_and_named(q, function):
    with pytest.raises(ValueError, match="q must be positive and finite, got"):
        function("tanh", q)


@pytest.mark.parametrize("q", [[], np.empty((0, 3))])
def test_empty_q_is_refused(q):
    with pytest.raises(ValueError, match="q is empty"):
        moments("tanh", q)


def test_gain_takes_one_q():
    with pytest.raises(ValueError, match="q must be positive and finite, got -1"):
        gain("tanh", -1)
    with pytest.raises(ValueError, match=r"q must be a single number, got \[1\.0, 2\.0\]"):
        gain("tanh", [1.0, 2.0])


# --- variance map -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["relu", "tanh", "sigmoid"])
def test_variance_map_scales_by_the_squared_gain_and_adds_the_squared_bias(name):
    q = np.array([0.05, 2.0])
    of = moments(name, q)
    close(variance_map(name, q), of.second, rtol=1e-14)
    close(variance_map(name, q, gain=1.7, bias_std=0.3), 1.7**2 * of.second + 0.3**2, rtol=1e-14)
    close(variance_map_slope(name, q), of.second_slope, rtol=1e-14)
    close(variance_map_slope(name, q, gain=0.6), 0.6**2 * of.second_slope, rtol=1e-14)


@pytest.mark.parametrize("name", ["relu_squared", "tanh", "sigmoid", "mish"])
def test_gain_makes_its_q_a_fixed_point(name):
    close(variance_map(name, 7.0, gain=gain(name, 7.0)), 7.0, rtol=1e-12)
    close(gain(name, 7.0, "backward") ** 2 * moments(name, 7.0).derivative_second, 1, rtol=1e-12)


def test_tanh_with_gain_one_fades_as_one_over_twice_the_depth():
    expected = {
        1: 0.3942944903978409,
        2: 0.23645041049929566,
        5: 0.10344060805238542,
        10: 0.05220008278702844,
        20: 0.025901976720270982,
    }
    q = 1.0
    for depth in range(1, 21):
        q = variance_map("tanh", q)
        if depth in expected:
            close(q, expected[depth], rtol=1e-10)
    assert 2 * depth * q == pytest.approx(1, abs=0.04)


def test_gelu_with_the_gain_of_the_rectifier_collapses():
    expected = {1: 0.850, 2: 0.706, 5: 0.327, 10: 0.0293, 20: 3.2e-5}
    q = 1.0
    for depth in range(1, 21):
        q = float(variance_map("gelu", q, gain=math.sqrt(2)))
        if depth in expected:
            assert q == pytest.approx(expected[depth], rel=0.02)


BAD_SCALES = [
    ({"gain": 0}, "gain must be positive and finite, got 0"),
    ({"gain": -1.5}, "gain must be positive and finite, got -1.5"),
    ({"gain": math.nan}, "gain must be positive and finite, got nan"),
    ({"gain": math.inf}, "gain must be positive and finite, got inf"),
    ({"bias_std": -0.1}, "bias_std must be finite and not negative, got -0.1"),
    ({"bias_std": math.nan}, "bias_std must be finite and not negative, got nan"),
    ({"bias_std": math.inf}, "bias_std must be finite and not negative, got inf"),
]


@pytest.mark.parametrize(("options", "message"), BAD_SCALES)
def test_scales_that_no_layer_has_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        variance_map("tanh", 1.0, **options)
    with pytest.raises(ValueError, match=message):
        fixed_points("tanh", **options)
    if "gain" in options:
        with pytest.raises(ValueError, match=message):
            variance_map_slope("tanh", 1.0, **options)


# --- fixed points -----------------------------------------------------------------------------

ANY, STABLE, UNSTABLE = "neutral", "stable", "unstable"
SEARCH = (1e-3, 30.0)

# q and kind with gain 1 and no biases
AT_GAIN_1 = {
    "linear": [(math.sqrt(1e-3 * 30), ANY)],
    "relu": [(0, STABLE)],
    "relu_squared": [(0, STABLE), (2 / 3, UNSTABLE)],
    "leaky_relu": [(0, STABLE)],
    "leaky_relu_0.2": [(0, STABLE)],
    "prelu_0.25": [(0, STABLE)],
    "abs": [(math.sqrt(1e-3 * 30), ANY)],
    "tanh": [(0, STABLE)],
    "lecun_tanh": [(0, UNSTABLE), (0.3824408012976613, STABLE)],
    "hardtanh": [(0, STABLE)],
    "sigmoid": [(0.264687, STABLE)],
    "softsign": [(0, STABLE)],
    "erf": [(0, UNSTABLE), (0.141923765314, STABLE)],
    "sin": [(0, STABLE)],
    "gelu": [(0, STABLE)],
    "gelu_tanh": [(0, STABLE)],
    "silu": [(0, STABLE)],
    "mish": [(0, STABLE)],
    "elu": [(0, STABLE)],
    "selu": [(0, UNSTABLE), (1, STABLE)],
    "softplus": [(0.856305159645, STABLE)],
}
# slope of the map at zero: mean square of the derivatives on either side
SLOPE_AT_ZERO = {
    "relu": 1 / 2,
    "relu_squared": 0,
    "leaky_relu": 0.50005,
    "leaky_relu_0.2": 0.52,
    "prelu_0.25": 0.53125,
    "tanh": 1,
    "lecun_tanh": (1.7159 * 2 / 3) ** 2,
    "hardtanh": 1,
    "softsign": 1,
    "erf": 4 / math.pi,
    "sin": 1,
    "gelu": 1 / 4,
    "gelu_tanh": 1 / 4,
    "silu": 1 / 4,
    "mish": 0.36,
    "elu": 1,
    "selu": 1.0507009873554805**2 * (1 + 1.6732632423543773**2) / 2,
}


def is_fixed_point(point, activation, **scale):
    """Whether the map keeps it, with that slope, and deviations do what its kind says."""
    if point.q > 0:
        slope_scale = {key: value for key, value in scale.items() if key == "gain"}
        close(variance_map(activation, point.q, **scale), point.q, rtol=1e-9)
        close(point.slope, variance_map_slope(activation, point.q, **slope_scale), rtol=1e-9, atol=1e-12)
        below, above = variance_map(activation, point.q * np.array([0.99, 1.01]), **scale) / point.q - [0.99, 1.01]
        expected = {STABLE: (1, -1), UNSTABLE: (-1, 1), ANY: (0, 0)}[point.kind]
        assert [0 if abs(d) < 1e-10 else np.sign(d) for d in (below, above)] == list(expected)
    else:
        small = 0.05
        assert (variance_map(activation, small, **scale) < small) == (point.kind == STABLE)
    return True


@NAMES
def test_fixed_points_of_every_name_at_gain_one(name):
    found = fixed_points(name, search=SEARCH)
    assert [point.kind for point in found] == [kind for _, kind in AT_GAIN_1[name]]
    close([point.q for point in found], [q for q, _ in AT_GAIN_1[name]], rtol=2e-6 if name == "sigmoid" else 1e-10)
    assert all(is_fixed_point(point, name) for point in found)
    if found[0].q == 0:
        assert found[0].slope == pytest.approx(SLOPE_AT_ZERO[name], rel=1e-10, abs=1e-10)
    assert all(type(number) is float for point in found for number in (point.q, point.slope))


@pytest.mark.parametrize("name", ["prelu_0.25", "sigmoid", "mish", "softplus"])
def test_fixed_points_at_the_forward_gain_include_one(name):
    g = gain(name)
    found = fixed_points(name, gain=g, search=(1e-2, 1e2))
    assert all(is_fixed_point(point, name, gain=g) for point in found)
    if found[-1].kind == ANY:
        assert name == "prelu_0.25"
        assert [point.slope for point in found] == [pytest.approx(1)]
    else:
        assert min(abs(point.q - 1) for point in found) < 1e-10
    if found[0].q == 0:
        assert found[0].slope == pytest.approx(g**2 * SLOPE_AT_ZERO[name], rel=1e-9, abs=1e-10)


@pytest.mark.parametrize(
    ("name", "slope", "kind"),
    [
        ("gelu", 1.1441, UNSTABLE),
        ("silu", 1.1726, UNSTABLE),
        ("selu", 0.7827, STABLE),
        ("tanh", 0.4611, STABLE),
    ],
)
def test_gain_keeps_deviations_small_for_some_functions_and_not_for_others(name, slope, kind):
    g = gain(name)
    point = min(fixed_points(name, gain=g, search=(1e-2, 10)), key=lambda point: abs(point.q - 1))
    assert point.kind == kind
    assert point.slope == pytest.approx(slope, abs=6e-4)


# σ_w², σ_b², q, χ₁ and the depth scale ξ_q, and the activations' second moment
MEAN_FIELD = [
    (1.0, 0.05, 0.19359252024529638, 0.759031647185394, 1.7476262429020066, 0.1435925202452964),
    (2.5, 0.05, 1.063958377416811, 1.1335156987042518, 1.1798729164793171, 0.40558335096672443),
    (1.2, 0.0, 0.10707874797984664, 1.0093777959156485, 5.826492071705182, 0.08923228998320554),
    (4.0, 0.0, 2.1214735682404195, 1.3626733360340375, 0.9043748657984763, 0.5303683920601049),
]


@pytest.mark.parametrize(("weights", "biases", "q", "chi", "depth", "second"), MEAN_FIELD)
def test_tanh_settles_where_mean_field_theory_says(weights, biases, q, chi, depth, second):
    scale = {"gain": math.sqrt(weights), "bias_std": math.sqrt(biases)}
    found = fixed_points("tanh", search=(1e-3, 1e2), **scale)
    assert [point.kind for point in found] == [STABLE] if biases else [UNSTABLE, STABLE]
    assert found[-1].q == pytest.approx(q, rel=1e-8)
    of = moments("tanh", found[-1].q)
    assert weights * of.derivative_second == pytest.approx(chi, rel=1e-8)
    assert float(of.second) == pytest.approx(second, rel=1e-8)
    assert -1 / math.log(found[-1].slope) == pytest.approx(depth, rel=1e-7)
    if not biases:
        assert (found[0].q, found[0].slope) == (0, pytest.approx(weights))


@pytest.mark.parametrize(
    ("biases", "weights", "q"),
    [
        (1e-4, 1.0860262924996806, 0.04570907869527557),
        (0.3, 2.5051271897023755, 1.4611694469472942),
    ],
)
def test_tanh_is_critical_where_mean_field_theory_says(biases, weights, q):
    (point,) = fixed_points("tanh", gain=math.sqrt(weights), bias_std=math.sqrt(biases), search=(1e-3, 1e2))
    assert point.q == pytest.approx(q, rel=1e-8)
    assert weights * moments("tanh", point.q).derivative_second == pytest.approx(1, rel=1e-8)


@pytest.mark.parametrize("name", ["hardtanh", "softsign"])
def test_zero_is_stable_at_the_marginal_gain_and_unstable_beyond(name):
    (marginal,) = fixed_points(name, gain=1.0, search=SEARCH)
    assert (marginal.q, marginal.kind) == (0.0, STABLE)
    assert marginal.slope == pytest.approx(1)
    zero, other = fixed_points(name, gain=1.1, search=SEARCH)
    assert (zero.q, zero.kind, zero.slope) == (0.0, UNSTABLE, pytest.approx(1.21))
    assert other.kind == STABLE
    assert is_fixed_point(other, name, gain=1.1)


def test_selu_at_the_gain_of_torch_settles_near_zero():
    zero, point = fixed_points("selu", gain=3 / 4)
    assert (zero.q, zero.kind) == (0.0, UNSTABLE)
    assert point.q == pytest.approx(0.023033784610759004, rel=1e-8)
    assert 0.75**2 * moments("selu", point.q).derivative_second == pytest.approx(1.0036703508393898, rel=1e-8)
    assert moments("selu").derivative_second == pytest.approx(1.071574992455799, rel=1e-10)


def test_tanh_of_lecun_and_the_logistic_function_at_gain_one():
    point = fixed_points("lecun_tanh", search=(1e-2, 10))[-1]
    assert point.q == pytest.approx(0.3824408012976613, rel=1e-8)
    assert moments("lecun_tanh", point.q).derivative_second == pytest.approx(1.0192495039060436, rel=1e-8)
    (logistic,) = fixed_points("sigmoid", search=(1e-2, 10))
    chi = moments("sigmoid", logistic.q).derivative_second
    assert (logistic.q, chi) == (pytest.approx(0.264687, abs=6e-7), pytest.approx(0.0557207, abs=6e-8))


@pytest.mark.parametrize(("name", "share"), [("leaky_relu_0.2", 0.52)])
def test_homogeneous_function_with_biases_settles_at_a_geometric_sum(name, share):
    critical = 1 / math.sqrt(share)
    (point,) = fixed_points(name, gain=0.8 * critical, bias_std=0.5, search=SEARCH)
    assert (point.q, point.kind, point.slope) == (pytest.approx(0.25 / 0.36), STABLE, pytest.approx(0.64))
    assert fixed_points(name, gain=critical, bias_std=0.5, search=SEARCH) == ()
    assert fixed_points(name, gain=1.2 * critical, bias_std=0.5, search=SEARCH) == ()
    (zero,) = fixed_points(name, gain=1.2 * critical, search=SEARCH)
    assert (zero.q, zero.kind, zero.slope) == (0.0, UNSTABLE, pytest.approx(1.44))
    (all_of_them,) = fixed_points(name, gain=critical, search=(1e-2, 1e4))
    assert (all_of_them.q, all_of_them.kind) == (pytest.approx(10), ANY)


@pytest.mark.parametrize("bias", [0.3])
def test_squared_rectifier_with_biases_has_the_two_roots_of_its_parabola(bias):
    low, high = fixed_points("relu_squared", bias_std=bias, search=SEARCH)
    root = math.sqrt(1 - 6 * bias**2)
    assert (low.q, high.q) == (pytest.approx((1 - root) / 3, rel=1e-9), pytest.approx((1 + root) / 3, rel=1e-9))
    assert (low.kind, high.kind) == (STABLE, UNSTABLE)
    assert (low.slope, high.slope) == (pytest.approx(1 - root), pytest.approx(1 + root))
    assert fixed_points("relu_squared", bias_std=0.5, search=SEARCH) == ()


def test_fixed_point_on_the_grid_is_found_once():
    assert [point.q for point in fixed_points("selu", search=(1e-2, 1e2))] == [0.0, pytest.approx(1)]


def test_search_limits_what_is_found_but_zero():
    (zero,) = fixed_points("selu", search=(2, 10))
    assert zero.q == 0
    assert fixed_points("softplus", search=(2, 10)) == ()
    found = fixed_points("selu", search=(0.9, 1.1))
    assert [point.q for point in found] == [0.0, pytest.approx(1)]


@pytest.mark.parametrize(
    "search", [(1, 1), (2, 1), (0, 1), (-1, 1), (1, math.inf), (math.nan, 1), (1, math.nan), (1, 2, 3), (1,), 5, "ab"]
)
def test_search_that_is_no_range_is_refused_and_named(search):
    with pytest.raises(ValueError, match="search must be two ascending positive numbers, got"):
        fixed_points("tanh", search=search)


# --- what is refused --------------------------------------------------------------------------

JUMPS = {
    "sign": (torch.sign, "0"),
    "step": (lambda u: (u > 0).double(), "0"),
    "step of integers": (lambda u: (u > 0.25).long(), "0.25"),
    "step of truth values": (lambda u: u > -1, "-1"),
    "hardshrink": (nn.Hardshrink(), "-0.5"),
    "threshold": (nn.Threshold(1.0, 0.0), "1"),
    "small jump": (lambda u: u + 1e-6 * torch.sign(u - 2), "2"),
    "round": (torch.round, "-?[0-9.]+"),
}


@pytest.mark.parametrize("kind", JUMPS)
@pytest.mark.parametrize("q", [0.5, 1.0, 10.0])
def test_jumps_are_refused_and_located(kind, q):
    function, where = JUMPS[kind]
    with pytest.raises(ValueError, match=rf"must be continuous: it jumps at u = {where}, "):
        moments(function, q)


REFUSED = {
    "numpy function": (np.tanh, "must take a float64 tensor; it raised RuntimeError"),
    "function of the mathematics module": (math.tanh, "must return a tensor of the shape it gets, .*got|it raised"),
    "layer": (nn.Linear(3, 3), "it raised RuntimeError"),
    "layer of one unit": (nn.Linear(1, 1), "it raised RuntimeError"),
    "softmax": (nn.Softmax(0), "must act on each entry by itself"),
    "normalisation over entries": (lambda u: (u - u.mean()) / u.std(), "must act on each entry by itself"),
    "layer normalisation": (nn.LayerNorm(61), "it raised RuntimeError"),
    "layer normalisation as a function": (lambda u: F.layer_norm(u, u.shape), "must act on each entry by itself"),
    "batch normalisation": (nn.BatchNorm1d(3), "it raised ValueError"),
    "cumulative sum": (lambda u: u.cumsum(0), "must act on each entry by itself"),
    "sorting": (lambda u: u.sort().values, "must act on each entry by itself"),
    "reversal": (lambda u: u.flip(0), "must act on each entry by itself"),
    "dropout": (nn.Dropout(0.5), "must give the same value every time"),
    "random slopes": (nn.RReLU(), "must give the same value every time"),
    "noise": (lambda u: u + torch.randn_like(u), "must give the same value every time"),
    "not a number": (lambda u: u * math.nan, "must be finite, with a finite derivative: at u = "),
    "infinite": (lambda u: 1 / u, "must be finite, with a finite derivative: at u = 0 "),
    "logarithm": (torch.log, "must be finite, with a finite derivative: at u = "),
    "square root of the size": (lambda u: u.abs().sqrt(), "must be finite, with a finite derivative: at u = 0 "),
    "derivative infinite elsewhere": (lambda u: (u - 0.3).abs().sqrt(), "at u = 0.3 it is not"),
    "derivative of no second moment": (lambda u: (u - 1).abs() ** 0.4, "at u = 1 it is not"),
    "exponential of the square": (lambda u: torch.exp(u**2), "must be finite|grows too fast"),
    "no gradient": (lambda u: u.detach().tanh(), "must be differentiable by autograd"),
    "gradient of another function": (lambda u: u + (u.tanh() - u).detach(), "must be differentiable by autograd"),
    "complex": (lambda u: u + 1j, "must return real numbers, got torch.complex128"),
    "complex constant": (lambda u: torch.full_like(u, 1j, dtype=torch.complex128), "must return real numbers"),
    "nothing": (lambda u: None, r"must return a tensor of the shape it gets, \(61,\), got NoneType"),
    "number": (lambda u: 1.0, r"must return a tensor of the shape it gets, \(61,\), got float"),
    "another axis": (lambda u: u[None], r"must return a tensor of the shape it gets, \(61,\), got \(1, 61\)"),
    "sum": (torch.sum, r"must return a tensor of the shape it gets, \(61,\), got \(\)"),
    "fewer entries": (lambda u: u[1:], r"must return a tensor of the shape it gets, \(61,\), got \(60,\)"),
    "pair": (lambda u: (u, u), "must return a tensor of the shape it gets, .* got tuple"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
def test_what_is_no_activation_is_refused_with_the_reason(kind):
    function, message = REFUSED[kind]
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        moments(function)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("call", [moments, gain, fixed_points, lambda a: variance_map(a, 1.0)])
@pytest.mark.parametrize("activation", [nn.Tanh, None, 3, ["relu"]], ids=["class", "None", "number", "list"])
def test_classes_and_other_things_are_refused(call, activation):
    with pytest.raises(TypeError, match="activation must be a name, a module or a function, got"):
        call(activation)


@pytest.mark.parametrize("name", ["swish", "ReLU", "", "tanh "])
def test_unknown_name_is_refused_with_those_that_exist(name):
    with pytest.raises(ValueError, match=f"activation must be one of linear, relu, .*softplus, got '{name}'"):
        get(name)


@pytest.mark.parametrize("direction", ["Forward", "both", None])
def test_unknown_direction_is_refused(direction):
    with pytest.raises(ValueError, match=f"direction must be forward or backward, got {direction!r}"):
        gain("tanh", direction=direction)


@pytest.mark.parametrize("q", [0.1, 1.0, 1.5])
def test_exponential_growth_is_exact_while_the_density_outweighs_it(q):
    close(moments(torch.exp, q).second, math.exp(2 * q), rtol=1e-11)
    of = moments(lambda u: torch.exp(u**2 / 8), q)  # E exp(a u²) = (1 - 2 a q)^(-1/2)
    close(of.mean, (1 - q / 4) ** -0.5, rtol=1e-10)
    close(of.second, (1 - q / 2) ** -0.5, rtol=1e-10)
    close(of.derivative_second, q / 16 * (1 - q / 2) ** -1.5, rtol=1e-10)


@pytest.mark.parametrize("q", [2.0, 2.1, 3.0, 100.0, [1.0, 2.0]])
def test_moments_that_diverge_are_refused(q):
    with pytest.raises(ValueError, match=r"grows too fast|must be finite"):
        moments(lambda u: torch.exp(u**2 / 8), q)


@pytest.mark.parametrize("power", [3, 10, 20])
def test_polynomials_have_the_moments_of_a_normal(power):
    for q in (1e-4, 1.0, 1e4):
        of = moments(lambda u: u**power, q)
        close(of.second, special.factorial2(2 * power - 1) * q**power, rtol=1e-10)
        close(of.derivative_second, power**2 * special.factorial2(2 * power - 3) * q ** (power - 1), rtol=1e-10)


# --- nothing else changes ---------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_module_keeps_parameters_mode_and_gradients(training):
    module = nn.Sequential(nn.PReLU(dtype=torch.float32), nn.Tanh()).train(training)
    module[0].weight.grad = torch.tensor([7.0])
    before = copy.deepcopy(module.state_dict())
    moments(module, [0.5, 2.0])
    gain(module)
    fixed_points(module, search=(0.1, 10))
    assert module[0].weight.dtype == torch.float32
    assert torch.equal(module[0].weight, before["0.weight"])
    assert module[0].weight.requires_grad
    assert module[0].weight.grad.item() == 7
    assert all(part.training == training for part in module.modules())


def test_global_random_state_stays_as_it_is():
    def drawing(u):
        torch.rand(3)  # a function may draw, as long as its values do not depend on it
        return u.tanh()

    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    moments(drawing)
    fixed_points(drawing, gain=1.5, search=(0.1, 10))
    assert torch.equal(torch_state, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        (torch.no_grad, torch.float64),
        (torch.inference_mode, torch.float32),
    ],
)
def test_results_are_the_same_every_time_and_in_every_mode_of_torch(mode, dtype):
    def everything():
        module = nn.PReLU(dtype=torch.float64)
        return (
            fields(moments(module, [0.5, 3.0])).tolist(),
            gain(nn.GELU(), 2.0, "backward"),
            fixed_points("relu_squared", search=(0.6, 0.7)),
            fixed_points(module, search=(0.2, 0.3)),
        )

    expected, default, grad = everything(), torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_default_dtype(dtype)
    try:
        with mode():
            assert everything() == expected
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(default)
    assert torch.is_grad_enabled() == grad


def test_caller_keeps_the_array_of_q():
    q = np.array([3.0, 1.0, 3.0])
    moments("tanh", q)
    assert q.tolist() == [3, 1, 3]


def test_moments_and_points_cannot_be_changed():
    for thing in (moments("relu"), activations.FixedPoint(1.0, 0.5, "stable")):
        with pytest.raises(AttributeError):
            thing.q = 3


@pytest.mark.parametrize("name", ["sigmoid", "softplus", "tanh", "gelu"])
def test_slope_keeps_its_digits_where_the_signal_is_tiny(name):
    q = 1e-12
    u = torch.zeros((), dtype=torch.float64, requires_grad=True)
    value = activations.get(name)(u)
    (first,) = torch.autograd.grad(value, u, create_graph=True)
    (second,) = torch.autograd.grad(first, u, allow_unused=True)
    second = 0.0 if second is None else float(second)
    exact = float(first) ** 2 + float(value) * second
    assert float(activations.moments(name, q).second_slope) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("excess", "kind"), [(1e-6, "unstable"), (-1e-6, "stable")])
def test_slope_decides_what_zero_is_even_when_the_search_starts_above_the_next_fixed_point(excess, kind):
    zero = activations.fixed_points("tanh", gain=1 + excess)[0]
    assert (zero.q, zero.kind) == (0.0, kind)


@pytest.mark.parametrize("bias_variance", [0.1265, 0.13, 0.145])
def test_pair_of_fixed_points_closer_than_the_grid_is_found(bias_variance):
    """GELU with biases: stable at one from 0.126 on, and an unstable point above it that moves away."""
    kept = gain("gelu") * math.sqrt(1 - bias_variance)
    low, high = fixed_points("gelu", gain=kept, bias_std=math.sqrt(bias_variance))
    assert (low.kind, high.kind) == ("stable", "unstable")
    assert low.q == pytest.approx(1, rel=1e-6)
    assert low.slope < 1 < high.slope
    mapped = variance_map("gelu", high.q, gain=kept, bias_std=math.sqrt(bias_variance))
    assert high.q == pytest.approx(float(mapped), rel=1e-9)
