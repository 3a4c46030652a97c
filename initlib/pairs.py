r"""Two samples in one unit: integrals over pairs of pre-activations.

In a wide layer the pre-activations :math:`u_1, u_2` that two samples cause in one unit are jointly normal over the
random weights, with second moment :math:`q` and correlation :math:`\rho`. In rotated coordinates

.. math:: u_{1,2} = a\,s \pm b\,d, \qquad a = \sqrt{q\,(1 + \rho)/2}, \quad b = \sqrt{q\,(1 - \rho)/2},

:math:`s` and :math:`d` are independent, which leaves a product rule: Gauss–Legendre panels over :math:`s`, and for each
of its nodes over :math:`d > 0`. A kink of :math:`\phi` is a line of the plane; panels end there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import roots_legendre

from initlib.activations import Activation, prepared

# Nodes in each panel, tried one after the other, and the most pairs of nodes.
_ORDERS = (8, 12, 17, 24, 34, 48, 68, 96)
_MOST_PAIRS = 2**25
# Distances 1 - rho below this are extrapolated.
_CLOSE = 1e-16


@dataclass(frozen=True)
class PairMoments:
    r"""Moments of the activations of two samples.

    Half a mean squared difference, :math:`\Delta[f] = \tfrac12\mathrm{E}[(f(u_1) - f(u_2))^2]`, is
    :math:`\mathrm{E}[f(u)^2] - \mathrm{E}[f(u_1)f(u_2)]` without the cancellation.

    Attributes
    ----------
    second, derivative_second
        :math:`\mathrm{E}[\phi(u)^2]` and :math:`\mathrm{E}[\phi'(u)^2]`.
    apart, derivative_apart, product_apart
        :math:`\Delta[\phi]`, :math:`\Delta[\phi']` and :math:`\Delta[u\phi'(u)]`.
    """

    second: np.ndarray
    derivative_second: np.ndarray
    apart: np.ndarray
    derivative_apart: np.ndarray
    product_apart: np.ndarray


def normal(activation: Activation, rho: ArrayLike, q: ArrayLike = 1.0) -> PairMoments:
    r"""Moments of two samples in an infinitely wide layer, where pre-activations are normal.

    Parameters
    ----------
    activation : str, torch.nn.Module or function
        As for :func:`initlib.activations.moments`.
    rho : float or array
        Correlation of the two pre-activations, from -1 to 1.
    q : float or array
        Their second moment, positive.

    Returns
    -------
    PairMoments
        Fields have the shape of ``rho`` and ``q``, broadcast.

    Raises
    ------
    TypeError, ValueError
        As for :func:`initlib.activations.prepared` and :func:`integrate`; if a ``rho`` is not a number from -1 to 1; if
        ``rho`` and ``q`` do not broadcast.

    Notes
    -----
    Introduced in chapter 08.
    """
    rho, q = check_rho(rho), np.asarray(q, dtype=float)
    try:
        rho, q = np.broadcast_arrays(rho, q)
    except ValueError:
        raise ValueError(f"rho and q must broadcast, got shapes {rho.shape} and {q.shape}") from None
    distinct, where = np.unique(np.stack([q.ravel(), 1 - rho.ravel()]), axis=1, return_inverse=True)
    with prepared(activation, distinct[0]) as (evaluate, kinks):
        found = [integrate(evaluate, kinks, *each) for each in distinct.T]
    names = PairMoments.__dataclass_fields__
    return PairMoments(*(np.array([getattr(f, n) for f in found])[where.ravel()].reshape(rho.shape) for n in names))


def integrate(
    evaluate: Callable[[np.ndarray], np.ndarray],
    kinks: np.ndarray,
    q: float,
    distance: float,
    dimension: int | None = None,
) -> PairMoments:
    r"""Moments of one pair, of an activation made ready by :func:`initlib.activations.prepared`.

    Parameters
    ----------
    evaluate, kinks
        The activation.
    q : float
        Second moment of the two pre-activations.
    distance : float
        :math:`1 - \rho`, so that close samples stay accurate: to 1e-10 down to a distance of 1e-12, to 1e-8 below.
    dimension : int, optional
        If given, :math:`k \ge 4`: not normal, but :math:`\sqrt{kq}` times the components of a uniform unit vector in
        :math:`k` dimensions along two directions at that correlation.

    Returns
    -------
    PairMoments

    Raises
    ------
    ValueError
        If the activation grows too fast for its moments to exist. If the quadrature does not converge: orders go up
        until two agree to 1e-11 of the second moment, and to 1e-10 of each :math:`\Delta` but for rounding.

    Notes
    -----
    Introduced in chapter 08.
    """
    if 0 < distance < _CLOSE:  # rounding would spoil differences that small, and they are in proportion
        of = integrate(evaluate, kinks, q, _CLOSE, dimension)
        return replace(of, apart=of.apart * distance / _CLOSE)
    a, b = math.sqrt(q * max(0.0, 1 - distance / 2)), math.sqrt(q * distance / 2)
    reach = _reach(evaluate, q)
    # Lines at which panels end: kinks, and from the scale of the signal, or of the function, growing by four.
    largest = reach * math.sqrt(q)
    smallest = min(math.sqrt(q), 1.0)
    half = np.geomspace(smallest, largest, math.ceil(math.log(largest / smallest, 4)) + 1)
    kinks = kinks[np.abs(kinks) < largest]
    lines = np.unique(np.concatenate([-half, kinks, half]))
    before, error = None, math.inf
    for order in _ORDERS:
        now, pairs = _product_rule(evaluate, lines, kinks, a, b, reach, order, dimension, math.sqrt(q))
        if before is not None:
            difference = np.abs(now - before)
            allowed = np.stack([1e-11 * now[0], 1e-10 * now[1] + 1e-13 * np.sqrt(now[0]) * np.sqrt(now[1])])
            allowed[1, 1:] += 1e-14 * now[0, 1:]  # kinks are known to rounding
            if (difference <= allowed).all():
                (second, slope, _), (apart, slope_apart, product_apart) = now
                return PairMoments(second, slope, apart, slope_apart, product_apart)
            error = np.max(difference / np.where(now[0] > 0, now[0], 1))
        before = now
        if 2 * pairs > _MOST_PAIRS:
            break
    raise ValueError(
        f"integrals over pairs of activations did not converge at q = {q:.6g}, rho = {1 - distance:.6g}: "
        f"their error is about {error:.1g} of their size, with {len(kinks)} kinks"
    )


def check_rho(rho: ArrayLike) -> np.ndarray:
    """Correlations as an array, or the error of what is none.

    Parameters
    ----------
    rho : float or array

    Raises
    ------
    ValueError
        If one of them is not a number from -1 to 1.

    Notes
    -----
    Introduced in chapter 08.
    """
    values = np.asarray(rho, dtype=float)
    if not (np.abs(values) <= 1).all():
        raise ValueError(f"rho must lie between -1 and 1, got {rho!r}")
    return values


def _product_rule(evaluate, lines, kinks, a, b, reach, order, dimension, unit):
    """Mean squares and half mean squared differences of phi, phi', u phi', and how many pairs of nodes it took.

    On the sphere, s = r sin(t) and d = r cos(t) sin(v) with r the square root of the dimension, which makes the density
    a product again: cos(t)^(dimension - 2) cos(v)^(dimension - 3).
    """
    x, w = _legendre(order)
    # The inner integral is smooth between those s at which two lines meet, or one enters the range of d.
    with np.errstate(divide="ignore", invalid="ignore"):
        meet = (kinks[:, None] + kinks)[np.triu_indices(len(kinks))] / (2 * a)
        enter = [(kinks - b * reach) / a, (kinks + b * reach) / a]
        outer = [lines / a, meet, *enter, reach * np.array([-1, -1 / 3, 1 / 3, 1])]
    if dimension is None:
        outer, outer_reach, inner_reach = np.concatenate(outer), reach, reach
    else:
        radius, height = math.sqrt(dimension), kinks / unit
        rest = np.sqrt(np.maximum(0, dimension - height**2))  # where a line leaves the disc
        outer = np.concatenate([*outer, (a * height - b * rest) / unit, (a * height + b * rest) / unit])
        outer = np.arcsin(np.clip(outer / radius, -1, 1))
        outer_reach = min(math.pi / 2, reach / math.sqrt(dimension - 2))
        inner_reach = min(math.pi / 2, reach / math.sqrt(dimension - 3))
    edges = np.unique(np.clip(outer[np.isfinite(outer)], -outer_reach, outer_reach))
    left, width = edges[:-1, None], np.diff(edges)[:, None]
    if dimension is None:
        s = (left + width * x).ravel()
        size, outer_weight = np.ones_like(s), (width * w).ravel() * np.exp(-(s**2) / 2)
    else:  # nodes that make smooth what starts like a square root at the ends of a panel
        t = (left + width * x**2 * (3 - 2 * x)).ravel()
        s, size = radius * np.sin(t), radius * np.cos(t)
        outer_weight = (width * w * 6 * x * (1 - x)).ravel() * _cosine_power(t, dimension - 2)
    total, mass, pairs = np.zeros((2, 3)), 0.0, 0
    step = max(1, 2**17 // (order * (len(lines) + 2)))
    for start in range(0, len(s), step):
        block = slice(start, start + step)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ends = np.abs(lines - a * s[block, None]) / (b * size[block, None])
        ends = np.nan_to_num(ends, nan=reach)
        ends = ends if dimension is None else np.arcsin(np.minimum(ends, 1))
        fixed = np.broadcast_to(inner_reach * np.array([0, 1 / 3, 1]), (len(ends), 3))
        ends = np.sort(np.minimum(np.concatenate([ends, fixed], axis=1), inner_reach), axis=1)
        row, column = np.nonzero(np.diff(ends) > 0)
        left, width = ends[row, column, None], np.diff(ends)[row, column, None]
        v = left + width * x
        if dimension is None:
            d, density = v, np.exp(-(v**2) / 2)
        else:
            d, density = size[block][row, None] * np.sin(v), _cosine_power(v, dimension - 3)
        weight = (outer_weight[block][row, None] * width * w * density).ravel()
        centre, offset = a * s[block][row, None], b * d
        u = np.stack([centre + offset, centre - offset]).reshape(2, -1)
        value, derivative = evaluate(u.ravel()).reshape(2, 2, -1)
        for k, (one, two) in enumerate([value, derivative, u * derivative]):
            total[:, k] += ((one**2 + two**2) / 2) @ weight, ((one - two) ** 2 / 2) @ weight
        mass += weight.sum()
        pairs += weight.size
    return total / mass, pairs


def _cosine_power(angle: np.ndarray, power: int) -> np.ndarray:
    """Accurate also where the power is large and the angle small."""
    return np.exp(power / 2 * np.log1p(-(np.sin(angle) ** 2)))


def _reach(evaluate: Callable[[np.ndarray], np.ndarray], q: float) -> float:
    """Standard deviations beyond which there is nothing to integrate, to rounding."""
    z = np.linspace(-37, 37, 741)
    with np.errstate(over="ignore", invalid="ignore"):
        value, derivative = evaluate(math.sqrt(q) * z)
        parts = np.stack([value**2, derivative**2]) * np.exp(-(z**2) / 2)
    parts /= np.maximum(parts.max(1, keepdims=True), np.finfo(float).tiny)
    reach = float(np.abs(z[(parts > 1e-17).any(0)]).max(initial=6.0))
    if not np.isfinite(parts).all() or reach > 36:
        raise ValueError(f"activation grows too fast: its moments diverge, or nearly so, at q = {q:.6g}")
    return reach + 0.1


@lru_cache
def _legendre(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights on [0, 1]."""
    x, w = roots_legendre(order)
    return (x + 1) / 2, w / 2
