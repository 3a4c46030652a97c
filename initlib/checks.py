r"""Predicted against measured, with the measurement's own standard error.

Independent networks (or seeds) are the replicates. A statistical check asks whether the mean over
:math:`R` replicates lies within

.. math:: t_{R-1}\!\left(1 - \tfrac{\alpha}{2K}\right) \cdot \mathrm{s.e.} + \text{margin}

of the prediction, in all of its :math:`K` components: Student's *t* at the level
:math:`\alpha = 10^{-6}`. For replicates that are nearly normal a true prediction fails once in a million
checks; where they are skewed or few, more often, up to a hundred times for squares of single
normals. A check whose tolerance is wider than a tenth of the prediction (or whatever
``resolution`` says) is itself an error: use more replicates.
"""

import html
import math
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch
from IPython.display import display
from numpy.typing import ArrayLike
from scipy import stats

#: Probability that a true prediction fails a check.
ALPHA = 1e-6


class CheckFailed(AssertionError):
    """A measurement contradicts its prediction, or is too coarse to test it."""


@dataclass(frozen=True)
class Check:
    """The outcome of a check; renders as one line.

    Attributes
    ----------
    label : str
        The claim.
    numbers : str
        Measured and predicted, in words.
    passed : bool
    """

    label: str
    numbers: str
    passed: bool

    def __str__(self) -> str:
        return f"{'✓' if self.passed else '✗'} {self.label}: {self.numbers}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        kind, mark = ("il-pass", "✓") if self.passed else ("il-fail", "✗")
        return (
            f'<div class="il-check {kind}"><span class="il-mark">{mark}</span> '
            f'<span class="il-label">{html.escape(self.label)}</span> '
            f'<span class="il-numbers">{html.escape(self.numbers)}</span></div>'
        )

    def settle(self) -> "Check":
        """Show the line, and raise :class:`CheckFailed` if the check did not pass."""
        display(self)
        if not self.passed:
            raise CheckFailed(f"{self.label}: {self.numbers}")
        return self


def as_array(values: ArrayLike | torch.Tensor) -> np.ndarray:
    """Numbers, or a tensor on any device, as a float64 array.

    Raises
    ------
    TypeError
        If the numbers are complex.

    Notes
    -----
    Introduced in chapter 03.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()  # first: not every device has double precision
        values = (values if values.is_complex() else values.double()).numpy()
    if np.iscomplexobj(values):
        raise TypeError("values must be real, got complex numbers")
    return np.asarray(values, dtype=float)


def _check_shape(name: str, values: np.ndarray, like: np.ndarray) -> None:
    """One number may stand for all; otherwise the shapes must agree."""
    if values.shape not in ((), like.shape):
        raise ValueError(f"{name} must have shape {like.shape}, got {values.shape}")


def mean_and_se(replicates: ArrayLike | torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    r"""Mean over the first axis, and its standard error :math:`s/\sqrt R`.

    Parameters
    ----------
    replicates : array, shape (R, ...)
        Independent replicates along the first axis, at least two.

    Raises
    ------
    ValueError
        If there are fewer than two replicates.

    Notes
    -----
    Introduced in chapter 01.
    """
    values = as_array(replicates)
    if values.ndim == 0 or len(values) < 2 or values.size == 0:
        raise ValueError(f"replicates must hold at least two along the first axis, got shape {values.shape}")
    with np.errstate(invalid="ignore", over="ignore"):  # infinite replicates have no standard error
        return values.mean(0), values.std(0, ddof=1) / math.sqrt(len(values))


def check(
    label: str,
    measured: ArrayLike | torch.Tensor,
    predicted: ArrayLike | torch.Tensor,
    *,
    resolution: float = 0.1,
    margin: ArrayLike = 0.0,
) -> None:
    """Check the mean over replicates against a prediction; show one line; raise if it fails.

    Parameters
    ----------
    label : str
        The claim, in a few words.
    measured : array, shape (R, ...)
        One value for each independent replicate, along the first axis.
    predicted : array, shape (...)
        What theory says the mean is.
    resolution : float
        The tolerance must not be wider than this fraction of the prediction, in any component,
        so that a measured mean which is off by more is sure to fail; where the prediction is
        zero, of its largest component or, if all are zero, of one.
    margin : float or array, shape (...)
        What the theory leaves out at most (say, a term of order 1/n), added to the statistical tolerance: a bound,
        or an estimate where the text says so.

    Raises
    ------
    CheckFailed
        If the mean is too far from the prediction; the message says by how many standard
        errors. If a value is not finite. If the check could not see an error as large as
        ``resolution``.
    ValueError
        If shapes do not fit, a margin is negative, ``resolution`` is not positive and finite, there are fewer than
        two replicates, or replicates do not vary at all (the same network drawn again and again, or a result that is
        not statistical).

    Notes
    -----
    Introduced in chapter 02.
    """
    if isinstance(resolution, bool) or not isinstance(resolution, Real) or not 0 < resolution < math.inf:
        raise ValueError(f"resolution must be a positive and finite number, got {resolution!r}")
    mean, se = mean_and_se(measured)
    target, margin = as_array(predicted), as_array(margin)
    _check_shape("predicted", target, mean)
    if margin.shape not in ((), mean.shape) or not np.all(margin >= 0):
        raise ValueError(f"margin must have shape {mean.shape} and not be negative, got {margin}")
    target = np.broadcast_to(target, mean.shape)
    if not np.isfinite(mean).all():
        Check(label, f"{np.sum(~np.isfinite(mean))} of {mean.size} means not finite", False).settle()
    if np.any(se <= 1e-14 * np.abs(mean)):
        raise ValueError(
            "measured does not vary between replicates: use check_close for what is not "
            "statistical, and independent seeds for what is"
        )
    replicates, components = len(measured), mean.size
    factor = float(stats.t.isf(ALPHA / (2 * components), replicates - 1))
    allowed = factor * se + margin
    scale = np.abs(target)
    scale = np.where(scale > 0, scale, scale.max() or 1.0)
    off = mean - target
    worst = np.unravel_index(np.argmax(np.abs(off) / allowed), mean.shape)
    numbers = (
        f"measured {mean[worst]:.4g} ± {se[worst]:.1g}, predicted {target[worst]:.4g}; "
        f"off by {abs(off[worst]) / se[worst]:.1f} standard errors, allowed {factor:.1f}"
    )
    if np.any(margin > 0):
        numbers += f" and a margin of {np.broadcast_to(margin, mean.shape)[worst]:.2g}"
    if components > 1:
        numbers += f" (worst of {components})"
    passed = bool(np.all(np.abs(off) <= allowed))
    coarse = float(np.max(allowed / scale))
    if passed and not coarse <= resolution:
        passed = False
        numbers += f"; but an error of {coarse:.1%} would pass and {resolution:.0%} must not: use more replicates"
    Check(label, numbers, passed).settle()


def check_close(
    label: str,
    measured: ArrayLike | torch.Tensor,
    predicted: ArrayLike | torch.Tensor,
    *,
    rtol: float = 1e-6,
    atol: float = 0.0,
) -> None:
    """Check a deterministic result (a formula, an integral) to a relative or absolute tolerance.

    Parameters
    ----------
    label : str
    measured, predicted : array
        Of one shape, or ``predicted`` a number.
    rtol, atol : float
        Passes where \\|measured - predicted\\| <= atol + rtol \\|predicted\\|; ``rtol`` is below
        0.5 and ``atol`` finite.

    Raises
    ------
    CheckFailed
        If they differ by more, or a value is not finite.
    ValueError
        If shapes or tolerances do not fit.

    Notes
    -----
    Introduced in chapter 01.
    """
    value, target = as_array(measured), as_array(predicted)
    _check_shape("predicted", target, value)
    if not (0 <= rtol < 0.5 and 0 <= atol < math.inf):
        raise ValueError(f"rtol must be in [0, 0.5) and atol finite, got {rtol} and {atol}")
    if value.size == 0:
        raise ValueError("measured is empty: there is nothing to check")
    target = np.broadcast_to(target, value.shape)
    with np.errstate(invalid="ignore"):
        off = np.abs(value - target)
        allowed = atol + rtol * np.abs(target)
        worst = np.unravel_index(np.argmax(off - allowed), value.shape)
    passed = bool(np.isfinite(value).all() and np.isfinite(target).all() and np.all(off <= allowed))
    numbers = f"{value[worst]:.8g}, predicted {target[worst]:.8g}, difference {off[worst]:.1g}"
    numbers += f", allowed {allowed[worst]:.1g}"
    if value.size > 1:
        numbers += f" (worst of {value.size})"
    Check(label, numbers, passed).settle()


def check_exact(
    label: str,
    measured: ArrayLike | torch.Tensor,
    expected: ArrayLike | torch.Tensor,
) -> None:
    """Check that two results are equal, bit for bit; numbers of different types, as doubles.

    Raises
    ------
    CheckFailed
        If any entry differs.
    ValueError
        If shapes do not fit or there is nothing to compare.

    Notes
    -----
    Introduced in chapter 01.
    """
    value, target = _as_exact(measured), _as_exact(expected)
    _check_shape("expected", target, value)
    if value.size == 0:
        raise ValueError("measured is empty: there is nothing to check")
    different = int(np.sum(value != target))
    if different == 0:
        numbers = f"exactly {value.item()}" if value.ndim == 0 else f"all {value.size} entries as expected"
    else:
        numbers = f"{different} of {value.size} entries differ from what was expected"
    Check(label, numbers, different == 0).settle()


def _as_exact(values: ArrayLike | torch.Tensor) -> np.ndarray:
    """As :func:`as_array`, but integers stay integers: a double cannot hold all of them."""
    integers = values.detach().cpu() if isinstance(values, torch.Tensor) else values
    if isinstance(integers, torch.Tensor) and integers.is_floating_point():
        return as_array(values)
    integers = np.asarray(integers)
    return integers if integers.dtype.kind in "iub" else as_array(values)


def check_less(
    label: str,
    smaller: ArrayLike | torch.Tensor,
    larger: ArrayLike | torch.Tensor,
) -> None:
    """Check that one quantity is smaller than another, replicate by replicate (paired).

    Parameters
    ----------
    label : str
    smaller : array, shape (R, ...)
    larger : array, shape (R, ...) or a number
        Replicate r of both belongs together (one network, one seed). Passes if the mean
        difference lies beyond Student's *t* at the level 10⁻³ per component, so that noise alone
        passes less than once in a thousand. The other error, a true claim that fails by bad luck,
        is not controlled: claim what is several times clearer than needed. Differences that do not vary are
        compared as they are, which says nothing if the replicates are copies of one draw.

    Raises
    ------
    CheckFailed
        If the difference is not clearly negative.
    ValueError
        If shapes do not fit or there are fewer than two replicates.

    Notes
    -----
    Introduced in chapter 01.
    """
    low, high = as_array(smaller), as_array(larger)
    _check_shape("larger", high, low)
    with np.errstate(invalid="ignore"):
        mean, se = mean_and_se(low - high)
    needed = float(stats.t.isf(1e-3, len(low) - 1))
    passed = bool(np.all(np.isfinite(mean)) and np.all(mean + needed * se < 0))
    worst = np.unravel_index(np.argmax(mean + needed * se), mean.shape)
    left, right = low.mean(0)[worst], np.broadcast_to(high, low.shape).mean(0)[worst]
    numbers = f"{left:.4g} against {right:.4g}"
    if se[worst] > 0:
        numbers += f"; difference {-mean[worst] / se[worst]:.1f} standard errors, needed {needed:.1f}"
    if mean.size > 1:
        numbers += f" (closest of {mean.size})"
    Check(label, numbers, passed).settle()
