"""One look for every figure: theory is a line, measurement is points with error bars."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from initlib.checks import mean_and_se

#: Eight colours that remain distinct under the common kinds of colour blindness (Okabe and Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")

#: Shapes that go with the colours, so that a figure can be read without them.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

_STYLE = {
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.constrained_layout.use": True,
    "figure.dpi": 150,
    "figure.facecolor": "white",
    "font.size": 11,
    "grid.alpha": 0.25,
    "legend.framealpha": 0.9,
    "legend.fontsize": "small",
    "lines.linewidth": 1.8,
    "savefig.facecolor": "white",
}


def use_style() -> None:
    """Give the figures of this process the look of the book: called first in every notebook.

    Changes matplotlib's ``rcParams``; importing ``initlib`` does not.

    Notes
    -----
    Introduced in chapter 01.
    """
    plt.rcParams.update(_STYLE)


def subplots(
    rows: int = 1, columns: int = 1, *, height: float = 3.6, width: float = 6.4, **keywords
) -> tuple[Figure, Axes | np.ndarray]:
    """``plt.subplots`` at the width of a page; sizes in inches.

    Notes
    -----
    Introduced in chapter 01.
    """
    return plt.subplots(rows, columns, figsize=(width, height), **keywords)


def theory(ax: Axes, x: ArrayLike, y: ArrayLike, label: str | None = None, **line):
    """Draw a prediction, as a line.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
    x, y : array
    label : str, optional
    **line
        Passed on to ``ax.plot``: ``color``, ``linestyle`` ...

    Notes
    -----
    Introduced in chapter 01.
    """
    return ax.plot(x, y, label=label, zorder=2, **line)[0]


def measured(ax: Axes, x: ArrayLike, replicates: ArrayLike, label: str | None = None, **points):
    """Draw a measurement: the mean over replicates as points, with bars of two standard errors.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
    x : array, shape (K,)
    replicates : array, shape (R, K)
        Independent replicates (networks, seeds) along the first axis.
    label : str, optional
    **points
        Passed on to ``ax.errorbar``: ``color``, ``marker`` ...

    Raises
    ------
    ValueError
        If there are fewer than two replicates, or shapes do not fit.

    Notes
    -----
    Introduced in chapter 01.
    """
    mean, se = mean_and_se(replicates)
    x = np.asarray(x)
    if mean.shape != x.shape:
        raise ValueError(f"replicates must have shape {('R', *x.shape)}, got {('R', *mean.shape)}")
    style = {"marker": "o", "markersize": 5, "linestyle": "none", "capsize": 2.5, "zorder": 3}
    return ax.errorbar(x, mean, yerr=2 * se, label=label, **(style | points))


def densities(ax: Axes, values: Sequence[ArrayLike], labels: Sequence[str], *, bins: ArrayLike) -> None:
    """Histograms one above the other, first at the top: one for each layer, say.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
    values : sequence of arrays
        The numbers of each histogram; each is drawn at its own height scale.
    labels : sequence of str
        One for each, written at the left.
    bins : array
        Edges of the bins, in the unit of the values; the outermost collect what lies beyond.

    Notes
    -----
    Introduced in chapter 02.
    """
    edges = np.asarray(bins, dtype=float)
    for row, numbers in enumerate(values):
        clipped = np.clip(np.ravel(numbers), edges[0], edges[-1])
        counts, _ = np.histogram(clipped, edges)
        base = len(values) - 1 - row
        color = plt.cm.viridis(0.85 * row / max(1, len(values) - 1))
        heights = base + 0.9 * counts / max(1, counts.max())
        ax.stairs(heights, edges, baseline=base, fill=True, color=color, alpha=0.85, zorder=2)
    ax.set_yticks(np.arange(len(values))[::-1], labels)
    ax.grid(False, axis="y")
