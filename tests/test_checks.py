"""Checks: true predictions pass, wrong ones do not, at the rate that is promised."""

import itertools
import math

import numpy as np
import pytest
import torch
from bs4 import BeautifulSoup
from scipy import stats

from initlib import check, check_close, check_exact, check_less, checks, mean_and_se, rng
from initlib.checks import Check, CheckFailed


@pytest.fixture
def quiet(monkeypatch):
    """Collect the outcomes instead of showing them."""
    shown = []
    monkeypatch.setattr(checks, "display", shown.append)
    return shown


def passes(function, *arguments, **options):
    try:
        function("claim", *arguments, **options)
    except CheckFailed:
        return False
    return True


def replicates(mean, spread=0.2, count=400, seed=0):
    mean = np.asarray(mean, dtype=float)
    return mean + spread * rng(seed).standard_normal((count, *mean.shape))


# --- mean and standard error ------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2,), (7,), (5, 3), (4, 2, 3)])
def test_mean_and_standard_error_are_those_of_the_textbook(shape):
    values = rng(1).standard_normal(shape)
    mean, se = mean_and_se(values)
    count = shape[0]
    expected = sum(values) / count
    np.testing.assert_allclose(mean, expected)
    np.testing.assert_allclose(se, np.sqrt(sum((v - expected) ** 2 for v in values) / (count - 1) / count))


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 4],
        torch.tensor([1, 2, 4]),
        torch.tensor([1.0, 2.0, 4.0], dtype=torch.float16),
        torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16, requires_grad=True),
    ],
)
def test_mean_and_standard_error_take_lists_and_tensors_of_any_type(values):
    mean, se = mean_and_se(values)
    assert (float(mean), float(se)) == pytest.approx((7 / 3, math.sqrt(7 / 3 / 3)))


def test_half_precision_is_averaged_in_double_precision():
    mean, _ = mean_and_se(torch.full((100_000,), 60_000.0, dtype=torch.float16))
    assert float(mean) == 60_000  # a sum in half precision overflows


@pytest.mark.parametrize("few", [3.0, [1.0], np.zeros((0, 3)), np.zeros((1, 3)), np.zeros((5, 0)), []])
def test_mean_and_standard_error_need_two_replicates(few):
    with pytest.raises(ValueError, match=r"at least two .* got shape \("):
        mean_and_se(few)


@pytest.mark.parametrize("values", [np.ones(3) * 1j, torch.ones(3, dtype=torch.complex64), [1j, 2j]])
def test_complex_numbers_are_refused(values):
    for function in (check, check_close, check_exact, check_less):
        with pytest.raises(TypeError, match="must be real"):
            function("claim", values, 1.0)


# --- check ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [1.0, -3.0, [1.0, 2.0, 300.0], np.arange(1.0, 7.0).reshape(2, 3)], ids=str)
@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor, np.ndarray.tolist])
def test_true_prediction_passes_and_one_that_is_ten_percent_off_does_not(quiet, mean, convert):
    mean = np.asarray(mean)
    measured = convert(replicates(mean, spread=0.1 * np.abs(mean)))
    assert passes(check, measured, mean)
    for factor in (0.9, 1 / 0.9, -1, 0):
        assert not passes(check, measured, mean * factor)
    assert [outcome.passed for outcome in quiet] == [True, False, False, False, False]


def test_one_wrong_component_among_many_fails(quiet):
    mean = np.arange(1.0, 101.0)
    measured = replicates(mean, spread=0.1 * mean)
    assert passes(check, measured, mean)
    wrong = mean.copy()
    wrong[37] *= 1.1
    assert not passes(check, measured, wrong)
    assert "(worst of 100)" in quiet[-1].numbers
    assert f"predicted {wrong[37]:.4g}" in quiet[-1].numbers


def test_single_prediction_serves_all_components(quiet):
    assert passes(check, replicates([2.0] * 5), 2)
    assert not passes(check, replicates([2.0] * 4 + [2.5]), 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_tensors_of_every_precision_are_checked(quiet, dtype):
    measured = torch.as_tensor(replicates(1.0)).to(dtype).requires_grad_()
    assert passes(check, measured, torch.tensor(1.0, dtype=dtype))
    assert not passes(check, measured, torch.tensor(1.125, dtype=dtype))


@pytest.mark.parametrize("components", [1, 6])
def test_false_alarms_come_at_the_rate_that_alpha_says(quiet, monkeypatch, components):
    monkeypatch.setattr(checks, "ALPHA", 0.1)
    count, size = 1500, 5  # few replicates: a normal quantile in place of Student's would give 0.17 and more
    measured = 1 + 0.1 * rng(2).standard_normal((count, size, components))
    failed = sum(not passes(check, each, 1.0, resolution=100) for each in measured)
    expected = 1 - (1 - 0.1 / components) ** components
    assert stats.binomtest(failed, count, expected).pvalue > 1e-6


def test_alpha_of_the_book_is_one_in_a_million():
    assert checks.ALPHA == 1e-6


@pytest.mark.parametrize(("size", "components"), [(2, 1), (5, 1), (30, 1), (30, 4), (1000, 50)])
def test_tolerance_is_student_t_with_bonferroni(quiet, size, components):
    measured = replicates([1.0] * components, count=size, seed=3)
    mean, se = mean_and_se(measured)
    edge = stats.t.ppf(1 - 1e-6 / 2 / components, size - 1)
    for side in (-1, 1):
        assert passes(check, measured, mean + side * 0.999 * edge * se, resolution=1e9)
        assert not passes(check, measured, mean + side * 1.001 * edge * se, resolution=1e9)


def test_message_says_by_how_many_standard_errors_it_failed():
    measured = np.array([0.9, 1.1] * 50)
    mean, se = mean_and_se(measured)
    with pytest.raises(CheckFailed) as caught:
        check("the mean is one half", measured, 0.5)
    message = str(caught.value)
    assert message.startswith("the mean is one half: measured 1 ± 0.01, predicted 0.5")
    assert f"off by {(mean - 0.5) / se:.1f} standard errors, allowed {stats.t.isf(5e-7, 99):.1f}" in message


def test_measurement_that_is_too_coarse_fails_and_says_so(quiet):
    measured = replicates(1.0, spread=0.5, count=100)  # sees 5.2 * 0.05 = 26 %
    with pytest.raises(CheckFailed, match=r"an error of \d\d\.\d% would pass and 10% must not: use more replicates"):
        check("claim", measured, 1.0, resolution=0.1)
    assert passes(check, measured, 1.0, resolution=0.5)
    assert not passes(check, replicates([1.0, 100.0], spread=[0.5, 1]), [1, 100.0], resolution=0.1)


def test_prediction_of_zero_is_resolved_against_the_largest_or_one(quiet):
    assert passes(check, replicates([0.0, 10.0]), [0.0, 10.0])
    assert not passes(check, replicates([0.0, 10.0], spread=8), [0.0, 10.0])
    assert passes(check, replicates(0.0), 0.0)
    assert not passes(check, replicates(0.0, spread=4), 0.0)
    assert not passes(check, replicates(0.2), 0.0)


def test_margin_is_added_to_the_tolerance(quiet):
    measured = replicates([1.0, 2.0], spread=0.02)
    assert not passes(check, measured, [1.05, 2.0])
    assert passes(check, measured, [1.05, 2.0], margin=0.06)
    assert passes(check, measured, [1.05, 2.0], margin=[0.06, 0.0])
    assert "a margin of 0.06" in quiet[-1].numbers
    assert not passes(check, measured, [1.05, 2.0], margin=[0.0, 0.06])
    assert not passes(check, measured, [1.2, 2.0], margin=0.06)


def test_margin_counts_against_the_resolution(quiet):
    assert not passes(check, replicates(1.0, spread=0.02), 1.0, margin=0.2)


@pytest.mark.parametrize("margin", [-0.1, [0.1, -0.1], [0.1], [0.1] * 3, [[0.1], [0.1]], math.nan])
def test_margin_that_makes_no_sense_is_refused(margin):
    with pytest.raises(ValueError, match="margin must"):
        check("claim", replicates([1.0, 2.0]), [1.0, 2.0], margin=margin)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_fails(quiet, bad):
    measured = replicates([1.0, 2.0])
    assert not passes(check, measured, [1.0, bad])
    measured[5, 1] = bad
    assert not passes(check, measured, [1.0, 2.0])
    assert "1 of 2 means not finite" in quiet[-1].numbers
    measured[6, 1] = -bad
    assert not passes(check, measured, [1.0, 2.0])
    assert not passes(check, measured, [1.0, bad])


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e-30, 1e30])
def test_replicates_that_do_not_vary_are_refused(value):
    with pytest.raises(ValueError, match="does not vary"):
        check("claim", np.full(50, value), value)
    varying = replicates([1.0, 1.0])
    varying[:, 1] = value
    with pytest.raises(ValueError, match="does not vary"):
        check("claim", varying, [1.0, value])


@pytest.mark.parametrize(
    ("measured", "predicted"),
    [((9,), (9,)), ((9,), (1,)), ((9, 3), (9, 3)), ((9, 3), (1,)), ((9, 3), (3, 1)), ((9, 3), (1, 3)), ((9, 3), (2,))],
)
def test_prediction_must_have_the_shape_of_a_replicate(measured, predicted):
    with pytest.raises(ValueError) as caught:
        check("claim", rng(4).random(measured), np.ones(predicted))
    assert str(caught.value) == f"predicted must have shape {measured[1:]}, got {predicted}"


@pytest.mark.parametrize("few", [1.0, [1.0], np.ones((0, 2))])
def test_check_needs_two_replicates(few):
    with pytest.raises(ValueError, match="at least two"):
        check("claim", few, 1.0)


# --- check_less -------------------------------------------------------------------------------


def test_clearly_smaller_passes_and_the_reverse_does_not(quiet):
    low, high = replicates([1.0, 2.0]), replicates([1.5, 2.5], seed=1)
    assert passes(check_less, low, high)
    assert passes(check_less, torch.as_tensor(low), torch.as_tensor(high))
    assert not passes(check_less, high, low)
    assert not passes(check_less, low, low)


def test_one_component_that_is_not_smaller_fails(quiet):
    low = replicates([1.0, 2.0, 3.0])
    assert passes(check_less, low, low + replicates([0.5, 0.6, 0.7], 0.01, seed=1))
    assert not passes(check_less, low, low + replicates([0.5, -0.6, 0.7], 0.01, seed=1))
    assert "(closest of 3)" in quiet[-1].numbers
    assert f"{low[:, 1].mean():.4g} against" in quiet[-1].numbers


def test_number_may_stand_for_the_larger_side(quiet):
    assert passes(check_less, replicates(1.0), 1.2)
    assert not passes(check_less, replicates(1.0), 0.8)


def test_pairs_are_compared_with_each_other(quiet):
    shared = np.tile([-100.0, 100.0], 100)
    assert passes(check_less, shared, shared + replicates(1.0, count=200))
    assert not passes(check_less, shared, -shared + replicates(1.0, count=200))


def test_noise_passes_less_than_once_in_a_thousand(quiet):
    values = rng(6).standard_normal((3000, 2, 4))
    passed = sum(passes(check_less, low, high) for low, high in values)
    assert stats.binomtest(passed, 3000, 1e-3, alternative="greater").pvalue > 1e-6


@pytest.mark.parametrize("size", [3, 10, 100])
def test_difference_needed_is_student_t(quiet, size):
    low = replicates(0.0, count=size)
    mean, se = mean_and_se(low)
    edge = mean + stats.t.ppf(1 - 1e-3, size - 1) * se
    assert passes(check_less, low, float(edge) + 1e-9)
    assert not passes(check_less, low, float(edge) - 1e-9)
    with pytest.raises(
        CheckFailed, match=rf"difference -?\d+\.\d standard errors, needed {stats.t.isf(1e-3, size - 1):.1f}"
    ):
        check_less("claim", low, float(mean))


def test_what_does_not_vary_is_compared_as_it_is(quiet):
    assert passes(check_less, [1.0, 1.0], [2.0, 2.0])
    assert not passes(check_less, [1.0, 1.0], [1.0, 1.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_comparison_with_what_is_not_finite_fails(quiet, bad):
    low = replicates(1.0)
    assert not passes(check_less, low, bad)
    low[3] = bad
    assert not passes(check_less, low, 2.0)
    assert not passes(check_less, low, low)


def test_comparison_needs_shapes_that_fit_and_two_replicates():
    with pytest.raises(ValueError, match=r"larger must have shape \(9,\), got \(8,\)"):
        check_less("claim", np.ones(9), np.ones(8))
    with pytest.raises(ValueError, match="at least two"):
        check_less("claim", [1.0], [2.0])


# --- check_close and check_exact --------------------------------------------------------------


def test_close_numbers_pass_and_others_do_not(quiet):
    assert passes(check_close, 1 + 0.9e-6, 1.0)
    assert not passes(check_close, 1 + 1.1e-6, 1.0)
    assert passes(check_close, -2.0 * (1 - 0.9e-2), -2.0, rtol=1e-2)
    assert not passes(check_close, -2.0 * (1 - 1.1e-2), -2.0, rtol=1e-2)
    assert not passes(check_close, 1e-12, 0.0)
    assert passes(check_close, 1e-12, 0.0, atol=1e-11)
    assert not passes(check_close, [1.0, 2.0, 3.1], [1.0, 2.0, 3.0], rtol=0.01)
    assert "3.1, predicted 3, difference 0.1, allowed 0.03 (worst of 3)" in quiet[-1].numbers
    assert passes(check_close, torch.ones(2, 3, requires_grad=True), 1)


@pytest.mark.parametrize(
    ("value", "target"), [p for p in itertools.product([1.0, math.nan, math.inf, -math.inf], repeat=2)][1:]
)
def test_closeness_to_what_is_not_finite_fails(quiet, value, target):
    assert not passes(check_close, value, target)
    assert not passes(check_close, [1.0, value], [1.0, target], rtol=0.1)


@pytest.mark.parametrize(
    "options",
    [{"rtol": 0.5}, {"rtol": -1e-3}, {"rtol": math.nan}, {"atol": math.inf}, {"atol": -1}, {"atol": math.nan}],
)
def test_tolerance_that_accepts_anything_is_refused(options):
    with pytest.raises(ValueError, match="rtol must be in"):
        check_close("claim", 1.0, 1.0, **options)


def test_equal_results_pass_and_the_rest_does_not(quiet):
    assert passes(check_exact, [1.0, 2.0], torch.tensor([1.0, 2.0]))
    assert passes(check_exact, torch.zeros(3, dtype=torch.bfloat16), 0)
    assert passes(check_exact, True, 1)
    assert not passes(check_exact, [1.0, np.nextafter(2, 3)], [1.0, 2.0])
    assert "1 of 2 entries differ" in quiet[-1].numbers
    assert not passes(check_exact, math.nan, math.nan)
    assert not passes(check_exact, np.float32(0.1), 0.1)


@pytest.mark.parametrize("convert", [int, np.int64, torch.tensor])
def test_large_integers_are_compared_exactly(quiet, convert):
    assert passes(check_exact, convert(2**60 + 1), convert(2**60 + 1))
    assert not passes(check_exact, convert(2**60 + 1), convert(2**60))


@pytest.mark.parametrize("function", [check_close, check_exact])
@pytest.mark.parametrize(("measured", "predicted"), [((3,), (1,)), ((3,), (3, 1)), ((), (1,)), ((2, 3), (3,))])
def test_results_must_have_one_shape(function, measured, predicted):
    with pytest.raises(ValueError) as caught:
        function("claim", np.ones(measured), np.ones(predicted))
    assert f"must have shape {measured}, got {predicted}" in str(caught.value)


@pytest.mark.parametrize("function", [check_close, check_exact])
def test_nothing_is_not_a_result(function):
    with pytest.raises(ValueError, match="empty"):
        function("claim", [], 1.0)


# --- what is shown ----------------------------------------------------------------------------


def test_every_check_shows_one_line_whether_it_passes_or_not(capsys):
    check("first", replicates(1.0), 1.0)
    check_close("second", 2.0, 2.0)
    check_exact("third", [1, 2], [1, 2])
    check_less("fourth", replicates(1.0), 2.0)
    for function, values in ((check, (replicates(1.0), 2.0)), (check_close, (1.0, 2.0)), (check_exact, (1.0, 2.0))):
        with pytest.raises(CheckFailed, match="false"):
            function("false", *values)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["✓ first", "✓ second", "✓ third", "✓ fourth"] + ["✗ false"] * 3


def test_failure_is_an_assertion_error():
    assert issubclass(CheckFailed, AssertionError)


@pytest.mark.parametrize("passed", [True, False])
def test_notebook_form_escapes_and_marks_the_outcome(passed):
    outcome = Check("E[x²] < 1 & <script>", "1 < 2", passed)
    soup = BeautifulSoup(outcome._repr_html_(), "html.parser")
    assert soup.div["class"] == ["il-check", "il-pass" if passed else "il-fail"]
    assert soup.find("script") is None
    assert soup.find(class_="il-label").text == "E[x²] < 1 & <script>"
    assert soup.find(class_="il-numbers").text == "1 < 2"
    assert soup.find(class_="il-mark").text == ("✓" if passed else "✗")
    assert str(outcome) == repr(outcome) == f"{'✓' if passed else '✗'} E[x²] < 1 & <script>: 1 < 2"


@pytest.mark.parametrize("resolution", [math.inf, 0.0, -1.0, math.nan, True, "a"])
def test_resolution_must_be_positive_and_finite(resolution):
    with pytest.raises(ValueError, match="resolution must be a positive and finite number"):
        check("x", [1.0, 1.1, 0.9], 1.0, resolution=resolution)


def test_spread_beyond_the_largest_number_is_infinite_and_no_warning():
    assert np.isinf(mean_and_se([1e200, -1e200, 1e300])[1])
