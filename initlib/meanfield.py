r"""Infinitely wide random networks: how alike two samples become, layer by layer, and what gradients do.

Two samples of second moment :math:`q` and correlation :math:`\rho` leave an activation with half the mean squared
difference

.. math:: D(\rho) = \tfrac12\,\mathrm{E}[(\phi(u_1) - \phi(u_2))^2]
    = \mathrm{E}[\phi(u)^2] - \mathrm{E}[\phi(u_1)\,\phi(u_2)],

and the next layer sees them at the correlation :math:`1 - g^2 D(\rho)/q'`. :mod:`initlib.pairs` integrates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from initlib import activations, pairs
from initlib.activations import Activation, prepared
from initlib.runtime import check_count, check_positive

# What is closer than this to one counts as one.
_CRITICAL = 1e-9


@dataclass(frozen=True)
class SampleMoments:
    r"""Moments by layer, :math:`l = 0, \dots, L`, in the limit of infinite width.

    Attributes
    ----------
    forward
        Second moment of the pre-activations, :math:`q_l`.
    mean_squared, variance
        Squared sample mean and sample variance, as :class:`initlib.signal.Moments` measures them;
        ``forward = mean_squared + variance``.
    correlation
        :math:`\rho_l`, of the pre-activations of two samples.
    """

    forward: np.ndarray
    mean_squared: np.ndarray
    variance: np.ndarray
    correlation: np.ndarray


@dataclass(frozen=True)
class Phase:
    r"""Where a deep network ends up, and how many layers that takes.

    Attributes
    ----------
    name : str
        ``ordered``: :math:`\chi < 1`, samples become alike and gradients vanish; ``chaotic``: :math:`\chi > 1`, close
        samples come apart and gradients explode; ``critical``: :math:`\chi = 1`.
    q : float
        :math:`q^*`, the second moment of deep pre-activations.
    chi : float
        :math:`\chi = g^2\,\mathrm{E}[\phi'(\sqrt{q^*}z)^2]`: factor a layer puts on the second moment of a gradient.
    depth_q : float
        :math:`\xi_q`: deviations of :math:`q_l` shrink like :math:`\mathrm e^{-l/\xi_q}`.
    correlation : float
        :math:`\rho^*`, the correlation between deep pre-activations of two samples.
    correlation_slope : float
        Slope of the correlation map there.
    depth_c : float
        :math:`\xi_c`: deviations of :math:`\rho_l` shrink like :math:`\mathrm e^{-l/\xi_c}`; infinite where critical.
    """

    name: str
    q: float
    chi: float
    depth_q: float
    correlation: float
    correlation_slope: float
    depth_c: float


def cross_moment(activation: Activation, rho: ArrayLike, *, q: ArrayLike = 1.0) -> np.ndarray:
    r"""Mean product of the activations of two samples: :math:`\mathrm{E}[\phi(u_1)\,\phi(u_2)]`.

    Parameters
    ----------
    activation : str, torch.nn.Module or function
        As for :func:`initlib.activations.moments`.
    rho : float or array
        Correlation of the jointly normal :math:`u_1, u_2`, from -1 to 1.
    q : float or array
        Their second moment, positive.

    Returns
    -------
    array of the shape of ``rho`` and ``q``, broadcast

    Raises
    ------
    TypeError, ValueError
        As for :func:`initlib.activations.moments`; if a ``rho`` is not a number from -1 to 1; if ``rho`` and ``q`` do
        not broadcast; if the quadrature does not converge.

    Notes
    -----
    See :mod:`initlib.pairs` for the quadrature.

    Introduced in chapter 08.

    Examples
    --------
    >>> float(cross_moment("relu", 0.0).round(8))  # 1/(2 pi)
    0.15915494
    """
    of = pairs.normal(activation, rho, q)
    return of.second - of.apart


def decorrelation(activation: Activation, rho: ArrayLike, *, q: ArrayLike = 1.0) -> np.ndarray:
    r"""Half the mean squared difference between the activations of two samples, :math:`D(\rho)`.

    Computed as such, not as a difference of moments: close samples stay accurate.

    Parameters
    ----------
    activation, rho, q
        As for :func:`cross_moment`.

    Returns
    -------
    array of the shape of ``rho`` and ``q``, broadcast

    Raises
    ------
    TypeError, ValueError
        As for :func:`cross_moment`.

    Notes
    -----
    Introduced in chapter 08.
    """
    return pairs.normal(activation, rho, q).apart


def correlation_map(
    activation: Activation, rho: ArrayLike, *, q: ArrayLike = 1.0, gain: float = 1.0, bias_std: float = 0.0
) -> np.ndarray:
    r"""Correlation of the next pre-activations of two samples.

    .. math:: C(\rho) = \frac{g^2\,\mathrm{E}[\phi(u_1)\phi(u_2)] + \sigma_b^2}{g^2\,\mathrm{E}[\phi(u)^2] + \sigma_b^2}

    Parameters
    ----------
    activation, rho, q
        As for :func:`cross_moment`.
    gain : float
        :math:`g`, with weights of variance :math:`g^2/m`.
    bias_std : float
        :math:`\sigma_b`, standard deviation of the biases.

    Returns
    -------
    array of the shape of ``rho`` and ``q``, broadcast

    Raises
    ------
    TypeError, ValueError
        As for :func:`cross_moment`; if the gain is not positive or ``bias_std`` negative; if the next second moment is
        zero, so that there is nothing to correlate.

    Notes
    -----
    Computed as :math:`1 - g^2 D(\rho)/q'`. From Poole et al. (2016) :cite:p:`poole2016exponential`.

    Introduced in chapter 08.

    Examples
    --------
    >>> correlation_map("relu", [-1.0, 0.0, 1.0]).round(8).tolist()  # 0, 1/pi, 1
    [0.0, 0.31830989, 1.0]
    """
    check_positive("gain", gain)
    check_positive("bias_std", bias_std, zero=True)
    of = pairs.normal(activation, rho, q)
    return 1 - gain**2 * of.apart / _next_second(of.second, gain, bias_std)


def correlation_map_slope(
    activation: Activation, rho: ArrayLike, *, q: ArrayLike = 1.0, gain: float = 1.0, bias_std: float = 0.0
) -> np.ndarray:
    r"""Derivative of :func:`correlation_map` with respect to ``rho``.

    :math:`g^2 q\,\mathrm{E}[\phi'(u_1)\phi'(u_2)]\,/\,q'` with :math:`q' = g^2\,\mathrm{E}[\phi(u)^2] + \sigma_b^2`. At
    :math:`\rho = 1` and a fixed point :math:`q' = q` it is :math:`\chi`, the factor a layer puts on a
    gradient.

    Parameters
    ----------
    activation, rho, q, gain, bias_std
        As for :func:`correlation_map`.

    Returns
    -------
    array of the shape of ``rho`` and ``q``, broadcast

    Raises
    ------
    TypeError, ValueError
        As for :func:`correlation_map`.

    Notes
    -----
    From Schoenholz et al. (2017) :cite:p:`schoenholz2017deep`.

    Introduced in chapter 08.
    """
    check_positive("gain", gain)
    check_positive("bias_std", bias_std, zero=True)
    activations.moments(activation, q)  # looks at the derivative, too
    of = pairs.normal(activation, rho, q)
    product = of.derivative_second - of.derivative_apart
    return gain**2 * np.asarray(q) * product / _next_second(of.second, gain, bias_std)


def relu_correlation(rho: ArrayLike, slope: float = 0.0) -> np.ndarray:
    r"""The correlation map of leaky rectifiers without biases, in closed form.

    .. math:: K_a(\rho) = \frac{(1 - a)^2 K(\rho) + 2a\rho}{1 + a^2}, \qquad
        K(\rho) = \frac{\sin\theta + (\pi - \theta)\cos\theta}{\pi}, \quad \cos\theta = \rho

    Parameters
    ----------
    rho : float or array
        Correlation of the pre-activations, from -1 to 1.
    slope : float
        :math:`a`, slope of the rectifier left of zero; any gain and any ``q`` give the same map.

    Returns
    -------
    array of the shape of ``rho``

    Raises
    ------
    ValueError
        If a ``rho`` is not a number from -1 to 1; if ``slope`` is not finite.

    Notes
    -----
    From Luther and Seung (2020) :cite:p:`luther2020reexamining`, who find it for :math:`a = 0`. The angle is taken from
    :math:`\sin^2(\theta/2) = (1 - \rho)/2`, so that it is accurate where :math:`\rho` is close to one.

    Introduced in chapter 08.

    Examples
    --------
    >>> float(relu_correlation(0.0).round(8))
    0.31830989
    """
    rho = pairs.check_rho(rho)
    if not math.isfinite(slope):
        raise ValueError(f"slope must be finite, got {slope!r}")
    theta = 2 * np.arcsin(np.sqrt((1 - rho) / 2))
    fall = (1 - rho) - (np.sqrt((1 - rho) * (1 + rho)) - theta * rho) / np.pi  # 1 - K
    return 1 - ((1 - slope) ** 2 * fall + 2 * slope * (1 - rho)) / (1 + slope**2)


def sample_moments(
    activation: Activation,
    depth: int,
    *,
    gain: float,
    bias_std: float = 0.0,
    q: float = 1.0,
    rho: float = 0.0,
    samples: int | None = None,
) -> SampleMoments:
    r"""Squared sample mean and sample variance of every layer, from the recursion of :math:`q_l` and :math:`\rho_l`.

    .. math:: q_{l+1} = g^2\,\mathrm{E}[\phi(u)^2] + \sigma_b^2, \qquad
        1 - \rho_{l+1} = \frac{g^2 D(\rho_l)}{q_{l+1}}.

    Parameters
    ----------
    activation : str, torch.nn.Module or function
        As for :func:`initlib.activations.moments`.
    depth : int
        :math:`L`, the number of steps.
    gain, bias_std : float
        As for :func:`correlation_map`.
    q, rho : float
        Second moment of the pre-activations at :math:`l = 0`, and their correlation between any two samples.
    samples : int, optional
        Number :math:`T` of samples; infinitely many if left out.

    Returns
    -------
    SampleMoments
        With :math:`\langle u\rangle^2 = q\,(\rho + (1 - \rho)/T)` and
        :math:`\langle u^2\rangle - \langle u\rangle^2 = q\,(1 - \rho)(1 - 1/T)`.

    Raises
    ------
    TypeError, ValueError
        As for :func:`correlation_map`; if ``depth`` or ``samples`` is not a positive integer; if ``q`` or ``rho`` is
        not a single number; if no ``samples`` vectors can all have the correlation ``rho``; if a second moment leaves
        the range of floating-point numbers.

    Notes
    -----
    Inputs drawn from :math:`N(0, 1)` have ``rho=0``, and so has the first layer's :math:`u^1` without biases. From
    Luther and Seung (2020) :cite:p:`luther2020reexamining`.

    Introduced in chapter 08.

    Examples
    --------
    >>> sample_moments("relu", 2, gain=2**0.5).mean_squared.round(6).tolist()
    [0.0, 0.31831, 0.493731]
    """
    check_count("depth", depth)
    check_positive("gain", gain)
    check_positive("bias_std", bias_std, zero=True)
    if samples is not None:
        check_count("samples", samples)
    share = 0.0 if samples is None else 1 / samples  # 1/T
    if np.ndim(q) or np.ndim(rho):
        raise ValueError(f"q and rho must be single numbers, got q={q!r} and rho={rho!r}")
    if not 0 < q < math.inf:
        raise ValueError(f"q must be positive and finite, got {q!r}")
    distance = float(1 - pairs.check_rho(rho))
    if (1 - distance) + distance * share < -1e-15:
        lowest = 0 if samples is None else -1 / (samples - 1)
        raise ValueError(f"rho must be at least {lowest:.6g} among {samples or 'infinitely many'} samples, got {rho!r}")
    second, steps = float(q), [(q, distance)]
    while len(steps) <= depth:
        near = second  # the kinks found for one second moment serve down to a hundredth and up to twice of it
        with prepared(activation, np.multiply(near, [0.01, 1, 2])) as (evaluate, kinks):
            while len(steps) <= depth and near / 100 <= second <= near * 2:
                of = pairs.integrate(evaluate, kinks, second, distance)
                second = float(_next_second(float(of.second), gain, bias_std))
                distance = gain**2 * float(of.apart) / second
                if not 1e-250 < second < 1e250:
                    raise ValueError(f"gain={gain!r} takes the second moment to {second:.3g} in layer {len(steps)}")
                steps.append((second, distance))
    forward, distance = np.array(steps).T
    variance = forward * distance * (1 - share)
    return SampleMoments(forward, forward * (1 - distance + distance * share), variance, 1 - distance)


def phase(activation: Activation, *, gain: float, bias_std: float = 0.0) -> Phase:
    r"""The fixed point that a deep network reaches, and whether it is ordered, critical or chaotic.

    Parameters
    ----------
    activation : str, torch.nn.Module or function
        As for :func:`initlib.activations.moments`.
    gain, bias_std : float
        As for :func:`correlation_map`.

    Returns
    -------
    Phase
        :math:`\xi_q = -1/\ln|s|` with :math:`s` the slope of the variance map at :math:`q^*`, likewise :math:`\xi_c`
        with the slope of the correlation map at :math:`\rho^*`; infinite where the slope is within 1e-9 of one.

    Raises
    ------
    TypeError, ValueError
        As for :func:`initlib.activations.fixed_points` and :func:`correlation_map`. If there is not exactly one stable
        fixed point, or it is zero: the message says which there are. If the network is so close to
        critical that :math:`\rho^*` cannot be told from one.

    Notes
    -----
    The expansion of the map in powers of :math:`\rho` has no negative coefficient, so it is convex on
    :math:`[0, 1]`: there :math:`\rho^* = 1` attracts if :math:`\chi \le 1`, and else exactly one
    :math:`\rho^* < 1`. Where every ``q`` is kept, as by He's scheme, ``q`` is one example. From Poole et al. (2016)
    :cite:p:`poole2016exponential` and Schoenholz et al. (2017) :cite:p:`schoenholz2017deep`.

    Introduced in chapter 11.

    Examples
    --------
    >>> found = phase("tanh", gain=2**0.5, bias_std=0.05**0.5)
    >>> found.name, round(found.correlation, 5), round(found.depth_c, 2)
    ('chaotic', 0.74408, 25.21)
    """
    point = _only_stable(activation, gain, bias_std)
    q = point.q
    of = activations.moments(activation, q)
    chi = gain**2 * float(of.derivative_second)
    name = "critical" if abs(chi - 1) <= _CRITICAL else "ordered" if chi < 1 else "chaotic"
    distance, slope = 0.0, chi
    if name == "chaotic":
        with prepared(activation, q) as (evaluate, kinks):

            def excess(distance):  # (C - rho) / (1 - rho)
                return 1 - gain**2 * pairs.integrate(evaluate, kinks, q, distance).apart / (q * distance)

            at_zero = (gain**2 * float(of.mean) ** 2 + bias_std**2) / q  # C(0)
            distance = 1.0 if at_zero < 1e-14 else _root(excess, chi)
            pair = pairs.integrate(evaluate, kinks, q, distance)
        slope = gain**2 * float(pair.derivative_second - pair.derivative_apart)
    return Phase(name, q, chi, _depth(point.slope), 1 - distance, slope, _depth(slope))


def critical_line(activation: Activation, q: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    r"""The networks with :math:`\chi = 1`, by the second moment ``q`` that they keep.

    :math:`g = 1/\sqrt{\mathrm{E}[\phi'(u)^2]}` and :math:`\sigma_b^2 = q - g^2\,\mathrm{E}[\phi(u)^2]`, with
    :math:`u = \sqrt q\,z`.

    Parameters
    ----------
    activation : str, torch.nn.Module or function
        As for :func:`initlib.activations.moments`.
    q : float or array
        Second moment of the pre-activations, positive.

    Returns
    -------
    gain, bias_std : arrays of the shape of ``q``

    Raises
    ------
    TypeError, ValueError
        As for :func:`initlib.activations.moments`; if the biases would need a negative variance for some ``q``; if the
        derivative is zero.

    Notes
    -----
    Whether a network returns to that ``q`` is another matter: see :func:`initlib.activations.variance_map_slope`. From
    Schoenholz et al. (2017) :cite:p:`schoenholz2017deep`.

    Introduced in chapter 11.

    Examples
    --------
    >>> gain, bias_std = critical_line("tanh", 0.5700478816)
    >>> round(float(gain**2), 5), round(float(bias_std**2), 5)
    (1.76095, 0.05)
    """
    gain, variance = _critical(activation, q)
    q = np.asarray(q, dtype=float)
    wrong = variance < -1e-10 * q
    if wrong.any():
        some = ", ".join(f"{each:.6g}" for each in np.unique(q[wrong])[:5])
        raise ValueError(f"q must leave room for biases: their variance would be negative at q = {some}")
    return gain, np.sqrt(np.where(variance > 1e-10 * q, variance, 0.0))


def critical_gain(activation: Activation, bias_std: float = 0.0) -> float:
    r"""The gain with :math:`\chi = 1` at the stable fixed point, for biases of a given size.

    Parameters
    ----------
    activation : str, torch.nn.Module or function
        As for :func:`initlib.activations.moments`.
    bias_std : float
        :math:`\sigma_b`, standard deviation of the biases.

    Returns
    -------
    float

    Raises
    ------
    TypeError, ValueError
        As for :func:`initlib.activations.moments`; if ``bias_std`` is negative; if there is no such gain, or more than
        one.

    Notes
    -----
    Solves :math:`q - \mathrm{E}[\phi(u)^2]/\mathrm{E}[\phi'(u)^2] = \sigma_b^2` on a logarithmic grid of ``q`` from
    1e-5, or the variance of the biases, to 1e5. Without biases :math:`q = 0` counts if
    :math:`\phi(0) = 0`, with the gain :math:`1/|\phi'(0)|`, and rectifiers are critical at every ``q``.

    Introduced in chapter 11.

    Examples
    --------
    >>> round(critical_gain("tanh", 0.05**0.5) ** 2, 5), round(critical_gain("tanh"), 6)
    (1.76095, 1.0)
    """
    check_positive("bias_std", bias_std, zero=True)
    low = bias_std**2 or 1e-5
    high = 1e5 * max(1.0, low)
    grid = np.geomspace(low, high, 8 * math.ceil(math.log10(high / low)))

    def excess(q):
        return (_critical(activation, q)[1] - bias_std**2) / q

    values = excess(grid)
    clear = np.abs(values) > 1e-10
    if not clear.any():
        return float(_critical(activation, 1.0)[0])
    gains, unstable = [], []
    for k in pairwise(np.flatnonzero(clear)):
        if values[k[0]] * values[k[1]] < 0:
            q = math.exp(brentq(lambda t: float(excess(math.exp(t))), *np.log(grid[list(k)]), xtol=1e-13))
            gain = float(_critical(activation, q)[0])
            steady = activations.variance_map_slope(activation, q, gain=gain) < 1
            (gains if steady else unstable).append((gain, q))
    if bias_std == 0:
        with prepared(activation, 1.0) as (evaluate, _):
            (_, at_zero, _), (left, _, right) = evaluate(np.array([-1e-100, 0.0, 1e-100]))
        slope = (left**2 + right**2) / 2
        if abs(at_zero) < 1e-15 and slope > 1e-20:
            gain = 1 / math.sqrt(slope)
            steady = activations.variance_map(activation, low, gain=gain) < low * (1 + 1e-10)
            (gains if steady else unstable).append((gain, 0.0))
    if len(gains) != 1:
        found = "; ".join(f"gain = {gain:.6g} at q = {q:.6g}" for gain, q in gains or unstable)
        why = f"more than one: {found}" if gains else f"the fixed point is unstable: {found}" if found else "none found"
        raise ValueError(f"activation has no single critical gain at bias_std={bias_std!r}: {why}")
    return gains[0][0]


def batch_growth(activation: Activation, samples: int | None = None, *, normalize: str = "batch") -> float:
    r"""Factor a layer puts on the second moment of a gradient, on its way to the input, where batches are normalised.

    Every unit is shifted and scaled to mean zero and variance one over the :math:`T` samples, in an infinitely wide
    network. Then :math:`\hat u` is uniform on the sphere of all such vectors, and with
    :math:`\Delta[f] = \tfrac12\mathrm{E}[(f(\hat u_1) - f(\hat u_2))^2]` the factors are

    .. math:: \frac{T}{T-3}\,\frac{\mathrm{E}[\phi'(\hat u)^2]}{\Delta[\phi]} \quad\text{and}\quad
        \frac{T}{T-3}\,\frac{\mathrm{E}[\phi'(\hat u)^2] - (\Delta[\phi'] + \Delta[\hat u\phi'])/T}{\Delta[\phi]},

    the first if scale and bias count as constants, the second if gradients flow through the statistics as well.

    Parameters
    ----------
    activation : str, torch.nn.Module or function
        As for :func:`initlib.activations.moments`.
    samples : int, optional
        :math:`T`, at least 5; infinitely many if left out: :math:`\mathrm{E}[\phi'(z)^2]/\operatorname{Var}[\phi(z)]`.
    normalize : str
        ``scale_and_bias`` for the first factor, ``batch`` for the second, as of :func:`initlib.signal.propagate`.

    Returns
    -------
    float

    Raises
    ------
    TypeError, ValueError
        As for :func:`cross_moment`; if ``samples`` is not an integer of at least 5; if ``normalize`` is neither of the
        two; if the activation is constant.

    Notes
    -----
    Over the weights, :math:`T` times a sample variance is a multiple of :math:`\chi^2_{T-1}`, and the mean of
    :math:`1/\chi^2_{T-1}` is :math:`1/(T-3)`: hence :math:`T > 3`; at :math:`T = 4` the density of two samples is
    unbounded. Gradients are taken to be independent of the forward pass. The layer next to the loss, whose gradients do
    not yet sum to zero over the batch, has another factor. For ReLU the second is theorem 8 of Yang et al. (2019).

    Introduced in chapter 09.

    Examples
    --------
    >>> round(batch_growth("relu", 16), 4), round(batch_growth("linear", 16), 4)
    (1.59, 1.0769)
    """
    if normalize not in ("batch", "scale_and_bias"):
        raise ValueError(f"normalize must be batch or scale_and_bias, got {normalize!r}")
    of = activations.moments(activation)
    if samples is None:
        growing, spread, scale = of.derivative_second, of.variance, 1.0
    else:
        check_count("samples", samples)
        if samples < 5:
            raise ValueError(f"samples must be at least 5, got {samples}: the mean of 1/variance grows like T/(T - 3)")
        with prepared(activation, 1.0) as (evaluate, kinks):
            pair = pairs.integrate(evaluate, kinks, 1.0, samples / (samples - 1), samples - 1)
        growing, spread, scale = pair.derivative_second, pair.apart, samples / (samples - 3)
        if normalize == "batch":
            growing = growing - (pair.derivative_apart + pair.product_apart) / samples
    if not spread > 1e-14 * of.second:
        raise ValueError("activation is constant: its batch has no variance to divide by")
    return float(scale * growing / spread)


def _root(excess: Callable[[float], float], chi: float) -> float:
    """The distance from one at which the map meets the diagonal again."""
    low = 1e-12
    if excess(low) >= 0:
        raise ValueError(f"gain is too close to the critical one to tell what samples converge to: chi = {chi:.12g}")
    if excess(1.0) <= 0:
        return 1.0
    return math.exp(brentq(lambda t: excess(math.exp(t)), math.log(low), 0.0, xtol=1e-12))


def _only_stable(activation: Activation, gain: float, bias_std: float) -> activations.FixedPoint:
    """The fixed point that a network with this gain and these biases reaches from any start."""
    low, high = min(1e-5, bias_std**2 / 2) or 1e-5, 1e5 * max(1.0, bias_std**2)  # no q is below that of the biases
    found = activations.fixed_points(activation, gain=gain, bias_std=bias_std, search=(low, high))
    stable = [point for point in found if point.kind != "unstable"]
    reason = f"gain={gain!r}, bias_std={bias_std!r} has no phase"
    if not stable:
        raise ValueError(
            f"{reason}: no fixed point of the second moment is stable, between q = {low:.3g} and {high:.3g}"
        )
    if len(stable) > 1:
        some = ", ".join(f"{point.q:.6g}" for point in stable)
        raise ValueError(f"{reason}: where the signal ends depends on where it starts, at q = {some}")
    if stable[0].q == 0:
        raise ValueError(f"{reason}: the only stable fixed point is q = 0, where the signal dies out")
    return stable[0]


def _critical(activation: Activation, q: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Gain with chi = 1 at q, and the variance of the biases that makes q a fixed point."""
    of = activations.moments(activation, q)
    if not (of.derivative_second > 0).all():
        raise ValueError("activation has a derivative of zero: no gain keeps a gradient")
    return 1 / np.sqrt(of.derivative_second), q - of.second / of.derivative_second


def _depth(slope: float) -> float:
    """Layers in which a deviation shrinks by e, where each multiplies it by the slope."""
    if abs(slope - 1) <= _CRITICAL:
        return math.inf
    return -1 / math.log(abs(slope)) if slope else 0.0


def _next_second(second: np.ndarray, gain: float, bias_std: float) -> np.ndarray:
    following = gain**2 * second + bias_std**2
    if not np.all(following > 0):
        raise ValueError("activation is zero everywhere that matters: there is nothing left to correlate")
    return following
