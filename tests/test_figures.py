"""The look of the figures."""

import itertools

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from initlib import figures, rng

plt.switch_backend("agg")


@pytest.fixture
def ax():
    with mpl.rc_context():
        fig, axes = plt.subplots()
        yield axes
        plt.close(fig)


@pytest.fixture
def replicates():
    return rng(0).normal(size=(20, 4)) + np.arange(4)


def test_style_is_applied_when_it_is_asked_for():
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.use("agg")
        before = dict(mpl.rcParams)
        figures.use_style()
        changed = {key for key in before if mpl.rcParams[key] != before[key]}
        assert mpl.rcParams["axes.prop_cycle"].by_key()["color"] == list(figures.COLORS)
        assert mpl.rcParams["savefig.facecolor"] == mpl.rcParams["figure.facecolor"] == "white"
    assert {"axes.prop_cycle", "axes.grid", "figure.dpi", "font.size"} <= changed
    assert changed <= set(figures._STYLE)


def test_drawing_does_not_change_the_style(ax, replicates):
    before = dict(mpl.rcParams)
    figures.theory(ax, range(4), range(4))
    figures.measured(ax, range(4), replicates)
    figures.densities(ax, replicates, list("abcd" * 5), bins=np.linspace(-3, 6, 10))
    fig, _ = figures.subplots()
    plt.close(fig)
    assert dict(mpl.rcParams) == before


def test_every_colour_and_marker_is_different():
    assert len(set(figures.COLORS)) == len(figures.COLORS) == len(figures.MARKERS) == len(set(figures.MARKERS))
    for one, other in itertools.combinations(figures.COLORS, 2):
        assert np.linalg.norm(np.subtract(to_rgb(one), to_rgb(other))) > 0.2


def test_subplots_have_the_width_of_a_page():
    fig, axes = figures.subplots(2, 3, height=5, sharex=True)
    assert axes.shape == (2, 3)
    assert tuple(fig.get_size_inches()) == (6.4, 5)
    plt.close(fig)


def test_theory_is_a_line(ax):
    line = figures.theory(ax, [0, 1, 2], [1, 4, 9], "squares", color="C3", linestyle="--")
    np.testing.assert_array_equal(line.get_xydata(), [[0, 1], [1, 4], [2, 9]])
    assert (line.get_label(), line.get_color(), line.get_linestyle()) == ("squares", "C3", "--")
    assert line.get_marker() == "None"


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor, np.ndarray.tolist])
def test_measurement_is_points_with_bars_of_two_standard_errors(ax, replicates, convert):
    points, caps, (bars,) = figures.measured(ax, np.arange(4), convert(replicates), "runs")
    mean, se = replicates.mean(0), replicates.std(0, ddof=1) / np.sqrt(20)
    np.testing.assert_allclose(points.get_ydata(), mean)
    assert points.get_linestyle() == "None"
    assert points.get_marker() == "o"
    assert caps
    for x, segment in enumerate(bars.get_segments()):
        np.testing.assert_allclose(segment, [[x, mean[x] - 2 * se[x]], [x, mean[x] + 2 * se[x]]])
    assert ax.get_legend_handles_labels()[1] == ["runs"]


def test_measurement_passes_its_style_on(ax, replicates):
    points, *_ = figures.measured(ax, np.arange(4), replicates, color="red", marker="s", markersize=9)
    assert (points.get_color(), points.get_marker(), points.get_markersize()) == ("red", "s", 9)


def test_points_lie_in_front_of_lines(ax, replicates):
    points, *_ = figures.measured(ax, np.arange(4), replicates)
    assert points.get_zorder() > figures.theory(ax, [0, 1], [0, 1]).get_zorder()


@pytest.mark.parametrize("x", [np.arange(3), np.arange(5), 0, np.zeros((4, 1))])
def test_measurement_refuses_positions_that_do_not_fit(ax, replicates, x):
    with pytest.raises(ValueError, match="replicates must have shape"):
        figures.measured(ax, x, replicates)


@pytest.mark.parametrize("few", [np.zeros((1, 4)), np.zeros((0, 4)), np.float64(3)])
def test_measurement_needs_two_replicates(ax, few):
    with pytest.raises(ValueError, match="at least two"):
        figures.measured(ax, np.arange(4), few)


def test_densities_stack_histograms_from_the_top_and_collect_the_tails(ax):
    values = [np.array([-9.0, 0.1, 0.2, 0.3]), torch.tensor([0.5, 9.0])]
    figures.densities(ax, values, ["first", "second"], bins=[-1, 0, 1, 2])
    first, second = (patch.get_data() for patch in ax.patches)
    np.testing.assert_allclose(first.values, 1 + 0.9 * np.array([1, 3, 0]) / 3)
    np.testing.assert_allclose(second.values, 0.9 * np.array([0, 1, 1]))
    assert (first.baseline, second.baseline) == (1, 0)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["first", "second"]
    np.testing.assert_array_equal(ax.get_yticks(), [1, 0])


def test_densities_refuse_a_wrong_number_of_labels(ax):
    with pytest.raises(ValueError, match="labels"):
        figures.densities(ax, [[0.0], [1.0]], ["one"], bins=[0, 1])


def test_density_of_nothing_is_flat(ax):
    figures.densities(ax, [[]], ["none"], bins=[0, 1, 2])
    np.testing.assert_array_equal(ax.patches[0].get_data().values, 0)
