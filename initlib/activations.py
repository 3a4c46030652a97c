r"""An activation as its Gaussian moments: what it leaves of a signal, and of a gradient.

A pre-activation is a sum over many inputs with random weights, so :math:`u = \sqrt q\,z` with
:math:`z \sim N(0, 1)`. All that a layer's second moment can see of its activation :math:`\phi` is then

.. math:: \mathrm{E}[\phi(u)^2] \quad\text{forward,}\qquad \mathrm{E}[\phi'(u)^2] \quad\text{backward.}

Everything here follows from these integrals, which SciPy computes by adaptive quadrature in double precision.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.integrate import cubature
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor, nn
from torch.nn import functional as F

from initlib.runtime import check_positive

#: An activation: a name, a module, or a function of torch tensors that acts on each entry by itself.
Activation = str | nn.Module | Callable[[Tensor], Tensor]

#: Every named activation.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda u: u,
    "relu": F.relu,
    "relu_squared": lambda u: F.relu(u) ** 2,
    "leaky_relu": F.leaky_relu,
    "leaky_relu_0.2": lambda u: F.leaky_relu(u, 0.2),
    "prelu_0.25": lambda u: F.leaky_relu(u, 0.25),
    "abs": torch.abs,
    "tanh": torch.tanh,
    "lecun_tanh": lambda u: 1.7159 * torch.tanh(2 / 3 * u),
    "hardtanh": F.hardtanh,
    "sigmoid": torch.sigmoid,
    "softsign": F.softsign,
    "erf": torch.erf,
    "sin": torch.sin,
    "gelu": F.gelu,
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "softplus": F.softplus,
}

# A normal density is below 1e-297 beyond this many standard deviations.
_REACH = 37.0


@dataclass(frozen=True)
class ActivationMoments:
    r"""Gaussian moments of an activation at :math:`u = \sqrt q\,z`; every field has the shape of ``q``.

    Attributes
    ----------
    mean, second
        :math:`\mathrm{E}[\phi(u)]` and :math:`\mathrm{E}[\phi(u)^2]`.
    derivative_mean, derivative_second
        :math:`\mathrm{E}[\phi'(u)]` and :math:`\mathrm{E}[\phi'(u)^2]`.
    second_slope
        :math:`\mathrm d\,\mathrm{E}[\phi(\sqrt q\,z)^2] / \mathrm dq = \mathrm{E}[u\,\phi(u)\,\phi'(u)]\,/\,q`.
    variance
        :math:`\mathrm{E}[\phi(u)^2] - \mathrm{E}[\phi(u)]^2`: not what a layer needs, as chapter 06 shows.
    """

    mean: np.ndarray
    second: np.ndarray
    derivative_mean: np.ndarray
    derivative_second: np.ndarray
    second_slope: np.ndarray

    @property
    def variance(self) -> np.ndarray:
        """Second moment less squared mean."""
        return self.second - self.mean**2


@dataclass(frozen=True)
class FixedPoint:
    """A second moment that a layer reproduces.

    Attributes
    ----------
    q : float
        Second moment of the pre-activations.
    slope : float
        Derivative of the variance map there.
    kind : str
        ``stable``: deviations shrink from layer to layer; ``unstable``: they grow; ``neutral``: every
        second moment is kept, as by He's scheme, and ``q`` is one example of them.
    """

    q: float
    slope: float
    kind: str


def get(activation: Activation) -> Callable[[Tensor], Tensor]:
    """The function behind a name of :data:`ACTIVATIONS`; a module or a function as it is.

    Raises
    ------
    TypeError
        If ``activation`` is neither a name nor callable.
    ValueError
        If the name is unknown.

    Notes
    -----
    Introduced in chapter 07.
    """
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        return ACTIVATIONS[activation]
    if not callable(activation) or isinstance(activation, type):
        raise TypeError(f"activation must be a name, a module or a function, got {activation!r}")
    return activation


def moments(activation: Activation, q: ArrayLike = 1.0) -> ActivationMoments:
    r"""Gaussian moments of an activation and of its derivative.

    Parameters
    ----------
    activation : str, torch.nn.Module or function
        :math:`\phi`: a name of :data:`ACTIVATIONS`, a module, or a function of a torch tensor, which acts on
        each entry by itself and is continuous. It is evaluated in double precision on the CPU; a
        module is copied first.
    q : float or array
        Second moment of the pre-activations, positive: :math:`u = \sqrt q\,z`, :math:`z \sim N(0, 1)`.

    Returns
    -------
    ActivationMoments

    Raises
    ------
    TypeError
        If ``activation`` is neither a name nor callable.
    ValueError
        If a ``q`` is not positive and finite. If the function does not keep the shape, mixes
        entries, is random, returns values that are not finite, or jumps: the derivative of a jump
        has no second moment. If a moment diverges or the quadrature does not converge.

    Notes
    -----
    The derivative is autograd's, and must satisfy :math:`q\,\mathrm{E}[\phi'(u)] = \mathrm{E}[u\,\phi(u)]` (Stein).
    Kinks need not be known: they are located to rounding, and the panels of the quadrature end there. What is
    narrower than a hundredth of both :math:`\sqrt q` and one may be missed.

    Introduced in chapter 07.

    Examples
    --------
    >>> float(moments("relu").second.round(12))
    0.5
    >>> float(moments(nn.LeakyReLU(0.2), q=4.0).derivative_second.round(12))
    0.52
    """
    function, variances = get(activation), _check_q(q)
    distinct, where = np.unique(variances, return_inverse=True)
    with _apart(function) as function:
        _check_function(function, distinct)
        integrals = _integrate(function, distinct)
    mean, second, derivative_mean, derivative_second, slope, stein = integrals
    size = np.sqrt(second / distinct) + np.sqrt(derivative_second)
    if np.any(np.abs(stein - derivative_mean) > 1e-7 * size):
        raise ValueError(
            "activation must be differentiable by autograd: its derivative does not belong to its values, "
            f"E[phi'] = {derivative_mean[0]:.6g} where its values imply {stein[0]:.6g} at q = {distinct[0]:.6g}"
        )
    fields = (mean, second, derivative_mean, derivative_second, slope)
    return ActivationMoments(*(field[where].reshape(variances.shape) for field in fields))


def gain(activation: Activation, q: float = 1.0, direction: str = "forward") -> float:
    r"""The gain that keeps the second moment of a signal, or of a gradient.

    Forward :math:`g = \sqrt{q / \mathrm{E}[\phi(u)^2]}`, so that weights of variance :math:`g^2/m` give the
    next pre-activations the second moment :math:`q` again. Backward
    :math:`g = 1/\sqrt{\mathrm{E}[\phi'(u)^2]}`, so that weights of variance :math:`g^2/n` keep that of the
    gradient. Whether deviations die out is another matter: see
    :func:`fixed_points`.

    Parameters
    ----------
    activation : str, torch.nn.Module or function
        As for :func:`moments`.
    q : float
        Second moment of the pre-activations.
    direction : str
        ``forward`` or ``backward``.

    Raises
    ------
    TypeError, ValueError
        As for :func:`moments`; if ``q`` is not a single number; if ``direction`` is neither of the two; if the
        moment is zero.

    Notes
    -----
    Introduced in chapter 07.

    Examples
    --------
    >>> round(gain("tanh"), 8)
    1.59253742
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction must be forward or backward, got {direction!r}")
    if np.ndim(q) != 0:
        raise ValueError(f"q must be a single number, got {q!r}")
    of = moments(activation, q)
    size = of.second / q if direction == "forward" else of.derivative_second
    if not size > 0:
        raise ValueError(f"activation is zero everywhere that matters: no gain keeps its {direction} second moment")
    return float(1 / np.sqrt(size))


def variance_map(activation: Activation, q: ArrayLike, *, gain: float = 1.0, bias_std: float = 0.0) -> np.ndarray:
    r"""Second moment of the next pre-activations: :math:`g^2\,\mathrm{E}[\phi(\sqrt q\,z)^2] + \sigma_b^2`.

    It is their variance over the weights, hence the name; over samples alone it is not.

    Parameters
    ----------
    activation : str, torch.nn.Module or function
        As for :func:`moments`.
    q : float or array
        Second moment of the pre-activations, positive.
    gain : float
        :math:`g`, with weights of variance :math:`g^2/m`.
    bias_std : float
        :math:`\sigma_b`, standard deviation of the biases.

    Returns
    -------
    array of the shape of ``q``

    Raises
    ------
    TypeError, ValueError
        As for :func:`moments`; if the gain is not positive, or ``bias_std`` negative.

    Notes
    -----
    Introduced in chapter 07.
    """
    check_positive("gain", gain)
    check_positive("bias_std", bias_std, zero=True)
    return gain**2 * moments(activation, q).second + bias_std**2


def variance_map_slope(activation: Activation, q: ArrayLike, *, gain: float = 1.0) -> np.ndarray:
    r"""Derivative of :func:`variance_map` with respect to ``q``, whatever the biases.

    :math:`g^2\,\mathrm{E}[u\,\phi(u)\,\phi'(u)]/q`, which for smooth :math:`\phi` equals
    :math:`g^2\,\mathrm{E}[\phi'(u)^2 + \phi(u)\phi''(u)]`.

    Parameters
    ----------
    activation, q, gain
        As for :func:`variance_map`.

    Raises
    ------
    TypeError, ValueError
        As for :func:`variance_map`.

    Notes
    -----
    Introduced in chapter 07.
    """
    check_positive("gain", gain)
    return gain**2 * moments(activation, q).second_slope


def fixed_points(
    activation: Activation,
    *,
    gain: float = 1.0,
    bias_std: float = 0.0,
    search: tuple[float, float] = (1e-5, 1e5),
) -> tuple[FixedPoint, ...]:
    r"""The second moments that a layer reproduces, in ascending order.

    The solutions of :math:`q = g^2\,\mathrm{E}[\phi(\sqrt q\,z)^2] + \sigma_b^2`.

    Parameters
    ----------
    activation : str, torch.nn.Module or function
        As for :func:`moments`.
    gain, bias_std : float
        As for :func:`variance_map`.
    search : (float, float)
        Range of ``q``. Zero is looked at besides, whatever the range.

    Returns
    -------
    tuple of FixedPoint
        Empty if there is none. Where the map keeps every ``q`` of the range, one of kind ``neutral`` at
        the range's geometric middle stands for all.

    Raises
    ------
    TypeError, ValueError
        As for :func:`variance_map`; if ``search`` is not an ascending pair of positive numbers.

    Notes
    -----
    Sign changes of :math:`\mathrm{map}(q) - q` on a logarithmic grid of eight points a decade and the turning points
    between them, refined by Brent's method. A fixed point where the map only touches the diagonal can be
    missed. What is stable is decided by the sign on either side, so also where the slope is one.

    Introduced in chapter 07.

    Examples
    --------
    >>> [round(point.q, 6) for point in fixed_points("tanh", gain=5 / 3)]
    [0.0, 1.17848]
    >>> fixed_points("relu", gain=2**0.5)[0].kind
    'neutral'
    """
    check_positive("gain", gain)
    check_positive("bias_std", bias_std, zero=True)
    low, high = _check_search(search)
    # An even number of points, so that the middle, where a fixed point often is, is none of them.
    grid = np.geomspace(low, high, 2 * max(4, math.ceil(4 * math.log10(high / low))) + 2)

    def excess(q):
        return variance_map(activation, q, gain=gain, bias_std=bias_std) / q - 1

    grid, values = _with_turns(excess, grid)
    values[np.abs(values) < 1e-10] = 0.0
    if not values.any():
        middle = math.sqrt(low * high)
        return (FixedPoint(middle, float(variance_map_slope(activation, middle, gain=gain)), "neutral"),)
    signs = _carry_back(np.sign(values))
    found = []
    at_zero, slope = _at_zero(get(activation))
    if bias_std == 0 and abs(at_zero) < 1e-15:
        slope *= gain**2  # where it is one, the nearest point of the grid decides
        shrinks = slope < 1 if abs(slope - 1) > 1e-9 else signs[0] < 0
        found.append(FixedPoint(0.0, slope, "stable" if shrinks else "unstable"))
    for (left, right), (before, after) in zip(pairwise(grid), pairwise(signs), strict=True):
        if before != after:
            q = _root(excess, left, right)
            kind = "stable" if before > after else "unstable"
            found.append(FixedPoint(q, float(variance_map_slope(activation, q, gain=gain)), kind))
    return tuple(found)


@contextmanager
def prepared(activation: Activation, q: ArrayLike) -> Iterator[tuple[Callable[[np.ndarray], np.ndarray], np.ndarray]]:
    r"""What a quadrature of one's own needs: the activation in double precision, and where it has kinks.

    A context manager, within which the activation's own state and the global random state stay as they are.

    Parameters
    ----------
    activation : str, torch.nn.Module or function
        As for :func:`moments`.
    q : float or array
        Second moments of the pre-activations that will be asked for.

    Yields
    ------
    evaluate : function of an array of shape (n,)
        Returns :math:`\phi(u)` and :math:`\phi'(u)`, shape (2, n).
    kinks : array
        Zero, and every place where :math:`\phi'` jumps, ascending.

    Raises
    ------
    TypeError, ValueError
        As for :func:`moments`, except for a moment that diverges.

    Notes
    -----
    Introduced in chapter 08.

    Examples
    --------
    >>> with prepared("hardtanh", 1.0) as (evaluate, kinks):
    ...     kinks.round(12).tolist(), evaluate(np.array([0.5, 2.0])).tolist()
    ([-1.0, 0.0, 1.0], [[0.5, 1.0], [1.0, 0.0]])
    """
    function, distinct = get(activation), np.unique(_check_q(q))
    with _apart(function) as function:
        _check_function(function, distinct)
        value_size, slope_size = (size.min() for size in _sizes(function, distinct))
        kinks = np.unique(_kinks(function, _panels(distinct), value_size, slope_size))
        yield lambda u: _evaluate(function, u), kinks


@contextmanager
def _apart(function: Callable[[Tensor], Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """The function in double precision with gradients, whose own state and the global random state stay as they are."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        yield copy.deepcopy(function).cpu().double() if isinstance(function, nn.Module) else function


def _integrate(function: Callable[[Tensor], Tensor], q: np.ndarray) -> np.ndarray:
    """The integrals of one function for every q at once, shape (6, len(q)).

    In the variable u rather than z, kinks lie at the same place for all q.
    """
    root, derivative_root = _sizes(function, q)  # in their units every integral is of order one
    second, derivative_second = root**2, derivative_root**2
    unit = np.stack(
        [root, second, derivative_root, derivative_second, root * derivative_root / np.sqrt(q), root / np.sqrt(q)]
    )

    def integrand(nodes):
        u = nodes[:, 0]
        value, derivative = (array[:, None] for array in _evaluate(function, u))
        weight = np.exp(-(u[:, None] ** 2) / (2 * q)) / np.sqrt(2 * np.pi * q)
        u = u[:, None] / np.sqrt(q)
        value, derivative = value / root, derivative / derivative_root
        squared = value**2
        parts = (value, squared, derivative, derivative**2, value * derivative * u, value * u)
        with np.errstate(invalid="ignore"):
            products = np.stack([np.where(weight > 0, part * weight, 0.0) for part in parts], axis=1)
        if not np.isfinite(products).all():
            raise ValueError("activation grows too fast: its square, times the normal density, overflows")
        return products

    half = _panels(q)
    reach = half[-1]
    edges = np.unique([*np.negative(half), *_kinks(function, half, root.min(), derivative_root.min()), *half])
    total = np.zeros_like(unit)
    with np.errstate(over="ignore"):
        ends = np.abs(integrand(np.array([[-reach], [reach]]))[:, :, -1]).max()
        if ends * reach > 1e-12:
            raise ValueError(f"activation grows too fast: its moments diverge, or nearly so, at q = {q.max():.6g}")
        # A call for each panel: given several at once, SciPy may refine others than the worst.
        for left, right in pairwise(edges):
            panel = cubature(integrand, [left], [right], rtol=1e-12, atol=1e-13, max_subdivisions=2000)
            if panel.status != "converged":
                raise ValueError(
                    f"moments of activation did not converge between u = {left:.4g} and {right:.4g}, with an error of "
                    f"{np.max(panel.error):.1g} of their size: they may diverge"
                )
            total += panel.estimate
    return total * unit


def _sizes(function: Callable[[Tensor], Tensor], q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Roughly, the root mean squares of the values and of the derivatives for every q; one where they are zero."""
    u = np.sqrt(q)[:, None] * np.linspace(-8, 8, 257)
    density = np.exp(-(u**2) / (2 * q[:, None]))
    density /= density.sum(1, keepdims=True)
    second = (_evaluate(function, u.ravel()).reshape(2, *u.shape) ** 2 * density).sum(2)
    return tuple(np.sqrt(np.where(second > 0, second, 1.0)))


def _panels(q: np.ndarray) -> list[float]:
    """Where panels end to the right of zero: from the scale of the signal, or of the function, growing by four."""
    smallest, largest, reach = min(np.sqrt(q.min()), 1.0), 12 * np.sqrt(q.max()), _REACH * np.sqrt(q.max())
    return [*np.geomspace(smallest, largest, math.ceil(math.log(largest / smallest, 4)) + 1), reach]


def _kinks(
    function: Callable[[Tensor], Tensor], edges: Sequence[float], value_size: float, slope_size: float
) -> np.ndarray:
    """Zero, and where the derivative jumps: cells in which it changes, halved down to rounding.

    What is left of a cell on either side of a kink is searched again, for a kink close to the first.
    """
    positive = np.geomspace(edges[0] / 100, edges[-1], 20 * len(edges) + 100)
    grid = np.concatenate([-positive[::-1], [0.0], positive])
    cells, found = (grid[:-1], grid[1:]), [np.zeros(1)]
    for _ in range(6):
        start, left, right, end = _jumps(function, *cells, value_size, slope_size)
        if not left.size:
            break
        found.append(left)
        cells = np.concatenate([start, right]), np.concatenate([left, end])
    return np.concatenate(found)


def _jumps(
    function: Callable[[Tensor], Tensor], start: np.ndarray, end: np.ndarray, value_size: float, slope_size: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Those cells in which the derivative jumps: start, left and right of the largest jump, end."""
    left, right = start, end
    low, high = _evaluate(function, left), _evaluate(function, right)
    scale = np.maximum(right - left, 1.0)
    change = _change(low, high, right - left, scale)
    for step in range(60):
        middle = (left + right) / 2
        between = _evaluate(function, middle)
        width = (right - left) / 2
        in_left = _change(low, between, width, scale) > _change(between, high, width, scale)
        left, right = np.where(in_left, left, middle), np.where(in_left, middle, right)
        low, high = np.where(in_left, low, between), np.where(in_left, between, high)
        if step == 24:  # smooth changes have halved 25 times by now
            keep = _change(low, high, right - left, scale) > 1e-6 * change
            start, left, right, end, scale = (each[keep] for each in (start, left, right, end, scale))
            low, high = low[:, keep], high[:, keep]
    (values, slopes), sizes = np.abs(high - low), np.abs(high) + np.abs(low)
    jumps = values > 1e3 * sizes[1] * (right - left) + 1e-9 * (sizes[0] + value_size)
    if jumps.any():
        where = round(float(left[jumps][0]), 12) + 0.0
        raise ValueError(
            f"activation must be continuous: it jumps at u = {where:.6g}, where its derivative has no second moment"
        )
    kinks = slopes > 1e-8 * (sizes[1] + slope_size)
    return start[kinks], left[kinks], right[kinks], end[kinks]


def _change(before: np.ndarray, after: np.ndarray, width: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Change of the derivative, and of the values beyond what the derivatives at both ends account for."""
    values, slopes = after - before
    return np.abs(values - width * (before[1] + after[1]) / 2) / scale + np.abs(slopes)


def _evaluate(function: Callable[[Tensor], Tensor], u: np.ndarray) -> np.ndarray:
    """Values and derivatives in double precision, shape (2, len(u))."""
    points = torch.from_numpy(np.ascontiguousarray(u)).requires_grad_()
    try:
        value = function(points.clone())  # a copy: it may act in place
    except Exception as error:
        raise ValueError(f"activation must take a float64 tensor; it raised {type(error).__name__}: {error}") from error
    if not isinstance(value, Tensor) or value.shape != points.shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"activation must return a tensor of the shape it gets, {tuple(points.shape)}, got {got}")
    if value.is_complex():
        raise ValueError(f"activation must return real numbers, got {value.dtype}")
    derivative = torch.zeros_like(points)
    if value.requires_grad:
        (found,) = torch.autograd.grad(value.sum(), points, allow_unused=True)
        derivative = derivative if found is None else found
    value, derivative = value.detach().double().numpy(), derivative.numpy()
    finite = np.isfinite(value) & np.isfinite(derivative)
    if not finite.all():
        bad = u[~finite][np.argmin(np.abs(u[~finite]))]
        raise ValueError(f"activation must be finite, with a finite derivative: at u = {bad:.6g} it is not")
    return np.stack([value, derivative])


def _check_function(function: Callable[[Tensor], Tensor], q: np.ndarray) -> None:
    """Each entry by itself, and every time the same."""
    u = np.sqrt(q.max()) * np.linspace(-3, 3, 61)
    value, _ = _evaluate(function, u)
    tolerance = 1e-12 * max(1.0, np.abs(value).max())
    again, _ = _evaluate(function, u)
    if np.abs(again - value).max() > tolerance:
        raise ValueError("activation must give the same value every time: this one is random or changes its state")
    part, _ = _evaluate(function, u[10:30][::-1])
    if np.abs(part[::-1] - value[10:30]).max() > tolerance:
        raise ValueError("activation must act on each entry by itself: this one mixes entries")


def _at_zero(function: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Value at zero, and the mean square of the derivatives on either side of it."""
    with _apart(function) as function:
        value, derivative = _evaluate(function, np.array([-1e-12, 0.0, 1e-12]))
    return float(value[1]), float((derivative[0] ** 2 + derivative[2] ** 2) / 2)


def _with_turns(excess: Callable, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The grid and its values, with the points at which the excess turns round just past zero: two roots are near."""
    values = excess(grid)
    turns = []
    for k in range(1, len(grid) - 1):
        sign = np.sign(values[k])
        before, here, after = sign * values[k - 1 : k + 2]
        if 1e-10 < here < min(before, after):
            ends = np.log(grid[[k - 1, k + 1]])
            turn = minimize_scalar(lambda t, s=sign: s * float(excess(math.exp(t))), bounds=ends, method="bounded")
            if turn.fun < 0:
                turns.append(math.exp(turn.x))
    grid = np.sort(np.concatenate([grid, turns]))
    return grid, excess(grid) if turns else values


def _carry_back(signs: np.ndarray) -> np.ndarray:
    """Zeros take the next sign to their right, or else the last one to their left."""
    signs = signs.copy()
    for k in reversed(range(len(signs) - 1)):
        signs[k] = signs[k] or signs[k + 1]
    for k in range(1, len(signs)):
        signs[k] = signs[k] or signs[k - 1]
    return signs


def _root(excess: Callable[[float], float], left: float, right: float) -> float:
    """Root of ``excess`` between two points; an end where it is zero to within rounding counts."""
    ends = float(excess(left)), float(excess(right))
    if ends[0] * ends[1] >= 0:
        return float((left, right)[int(abs(ends[1]) < abs(ends[0]))])
    return float(math.exp(brentq(lambda t: float(excess(math.exp(t))), math.log(left), math.log(right), xtol=1e-13)))


def _check_q(q: ArrayLike) -> np.ndarray:
    variances = np.asarray(q, dtype=float)
    if not (np.isfinite(variances).all() and (variances > 0).all()):
        raise ValueError(f"q must be positive and finite, got {q!r}")
    if variances.size == 0:
        raise ValueError("q is empty: there is nothing to compute")
    return variances


def _check_search(search: Sequence[float]) -> tuple[float, float]:
    if np.shape(search) != (2,) or not 0 < search[0] < search[1] < math.inf:
        raise ValueError(f"search must be two ascending positive numbers, got {search!r}")
    return tuple(search)
