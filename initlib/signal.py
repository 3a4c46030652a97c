r"""Signals in random networks: draw many, send a batch forward and a gradient back, keep moments.

A network of depth :math:`L` has widths :math:`n_0, \dots, n_L`. With :math:`x^0` the input, layer
:math:`l = 1, \dots, L` computes

.. math:: u^l = W^l x^{l-1} + b^l, \qquad x^l = \phi(u^l),

and the gradient of a loss :math:`\ell` travels back from a :math:`\partial\ell/\partial x^L` that is drawn at random.
Nothing is trained: this is the network as it was initialised.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from initlib import activations, runtime, schemes
from initlib.activations import Activation
from initlib.checks import mean_and_se
from initlib.fans import Fans
from initlib.runtime import check_count
from initlib.schemes import Initializer

#: Largest stack of weights held at once, in bytes: networks are drawn in chunks of this size.
CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Moments:
    r"""Moments by layer, averaged over units and samples.

    All but the last have an entry for :math:`l = 0, \dots, L`, where entry 0 belongs to the input
    :math:`x^0`; the last has one for each weight matrix, :math:`l = 1, \dots, L`, at index :math:`l - 1`.

    Attributes
    ----------
    forward
        Second moment of the pre-activations, :math:`q_l = E[(u^l)^2]`.
    mean_squared
        Squared sample mean: the mean over samples, squared, averaged over units.
    variance
        Sample variance: the variance over samples (divided by the number of samples), averaged
        over units. ``forward = mean_squared + variance``, exactly.
    activations
        Second moment of the activations, :math:`p_l = E[(x^l)^2]`.
    backward
        Second moment of the gradient, :math:`\tilde q_l = E[(\partial\ell/\partial u^l)^2]`; entry 0
        is that of :math:`\partial\ell/\partial x^0`.
    weight_gradient
        Second moment of one sample's gradient with respect to a weight,
        :math:`E[(\partial\ell/\partial w^l_{ji})^2] = E[(\partial\ell/\partial u^l_j)^2 (x^{l-1}_i)^2]`.
    """

    forward: np.ndarray
    mean_squared: np.ndarray
    variance: np.ndarray
    activations: np.ndarray
    backward: np.ndarray
    weight_gradient: np.ndarray


@dataclass(frozen=True)
class Trace(Moments):
    """Moments of many independent networks: arrays of shape (networks, layers).

    Attributes
    ----------
    observed : dict of str to array, shape (networks, L, ...)
        What ``observe`` computed of the pre-activations of layers 1 to L.
    mean, standard_error : Moments
        Mean over networks and its standard error, by layer.
    """

    observed: Mapping[str, np.ndarray]

    @property
    def mean(self) -> Moments:
        """Mean over networks, by layer."""
        return Moments(*(mean_and_se(getattr(self, f.name))[0] for f in fields(Moments)))

    @property
    def standard_error(self) -> Moments:
        """Standard error of the mean over networks, by layer."""
        return Moments(*(mean_and_se(getattr(self, f.name))[1] for f in fields(Moments)))


def propagate(
    widths: Sequence[int],
    scheme: str | Initializer | Sequence[str | Initializer],
    activation: Activation = "linear",
    *,
    networks: int,
    samples: int | None = None,
    inputs: Tensor | None = None,
    bias_std: float = 0.0,
    observe: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Trace:
    r"""Send samples forward and a random gradient back through many independent networks.

    Parameters
    ----------
    widths : sequence of int
        :math:`n_0, \dots, n_L`.
    scheme : str, Initializer or a sequence of :math:`L` of them
        Draws the weights; one for all layers or one a layer.
    activation : str, torch.nn.Module or function
        :math:`\phi`: a name of :data:`initlib.activations.ACTIVATIONS`, or a torch function or module, tensor in,
        tensor of the same shape out. It acts behind every layer, the last one included.
    networks : int
        Number :math:`R` of independent networks, the replicates of every standard error.
    samples : int, optional
        Number :math:`T` of inputs drawn from :math:`N(0, 1)`, anew for each network.
    inputs : Tensor, shape (T, n_0) or (networks, T, n_0), optional
        Inputs given instead of drawn; the first form is shared by all networks.
    bias_std : float
        Standard deviation of the normal biases; no biases if 0.
    observe : mapping of str to callable, optional
        Further statistics: each gets the pre-activations of a layer, (networks, T, n_l), and
        returns one entry per network, (networks, ...).
    seed : int
        Number of the experiment, see :func:`initlib.runtime.seed`.
    dtype : torch.dtype
        Floating-point type of the computation; moments are averaged in double precision.

    Returns
    -------
    Trace

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it and its value.

    Notes
    -----
    The gradient that enters is :math:`\partial\ell/\partial x^L \sim N(0, 1)`, independent for each
    sample and unit and of the network: :math:`\ell` is a random linear read-out of :math:`x^L`,
    summed over the samples. Then :math:`\partial\ell/\partial u^L = \phi'(u^L)\,\partial\ell/\partial x^L`. Runs on
    :func:`initlib.runtime.device`. The networks are drawn in chunks of at most ``CHUNK_BYTES``.

    Introduced in chapter 02.

    Examples
    --------
    >>> trace = propagate([64] * 3, "lecun_normal", networks=50, samples=8)
    >>> trace.forward.shape
    (50, 3)
    """
    widths = _check_widths(widths)
    layer_schemes = _check_schemes(scheme, len(widths) - 1)
    check_count("networks", networks)
    if (samples is None) == (inputs is None):
        raise ValueError("give either samples, a number, or inputs, a tensor")
    if samples is not None:
        check_count("samples", samples)
    if inputs is not None:
        _check_inputs(inputs, networks, widths[0])
    activation = activations.get(activation)
    if observe is not None and not isinstance(observe, Mapping):
        raise TypeError(f"observe must map names to callables, got {type(observe).__name__}")
    if not 0 <= bias_std < float("inf"):
        raise ValueError(f"bias_std must be finite and not negative, got {bias_std!r}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, got {dtype}")

    device = runtime.device()
    generator = runtime.generator(seed, device)
    size = torch.empty(0, dtype=dtype).element_size()
    bytes_per_network = size * sum(m * n for m, n in pairwise(widths))
    chunk = max(1, min(networks, CHUNK_BYTES // bytes_per_network))
    parts = []
    for start in range(0, networks, chunk):
        count = min(chunk, networks - start)
        if inputs is None:
            x = torch.empty(count, samples, widths[0], dtype=dtype, device=device)
            x.normal_(generator=generator)
        else:
            x = inputs.detach().to(device, dtype)
            x = x.expand(count, *x.shape) if x.ndim == 2 else x[start : start + count]
        parts.append(_explicit(x, widths, layer_schemes, activation, bias_std, dict(observe or {}), generator))
    moments, observed = (_merge(column) for column in zip(*parts, strict=True))
    return Trace(**moments, observed=observed)


@torch.no_grad()  # an activation's own parameters must not start a graph
def _explicit(x, widths, layer_schemes, activation, bias_std, observe, generator):
    """Moments of one chunk of networks whose weight matrices are all drawn and kept."""
    count = len(x)
    weights, pullbacks, squares = [], [], [_square(x)]
    forward = [_sample_moments(x)]
    observed = {name: [] for name in observe}
    for layer, (m, n) in enumerate(pairwise(widths)):
        w = torch.empty(count, n, m, dtype=x.dtype, device=x.device)
        layer_schemes[layer].fill_(w, Fans(m, n), generator=generator)
        u = x @ w.mT
        if bias_std:
            b = torch.empty(count, 1, n, dtype=x.dtype, device=x.device)
            u = u + b.normal_(0, bias_std, generator=generator)
        forward.append(_sample_moments(u))
        for name, statistic in observe.items():
            observed[name].append(_check_observed(name, statistic(u), count))
        x, pullback = _activate(activation, u)
        weights.append(w)
        pullbacks.append(pullback)
        squares.append(_square(x))

    gradient = torch.empty_like(x).normal_(generator=generator)
    backward, weight_gradient = [], []
    for w, pullback, x_squared in zip(reversed(weights), reversed(pullbacks), reversed(squares[:-1]), strict=True):
        delta = pullback(gradient)
        delta_squared = _square(delta)
        backward.append(delta_squared.mean(1))
        weight_gradient.append((delta_squared * x_squared).mean(1))
        gradient = delta @ w
    backward.append(_square(gradient).mean(1))

    q, mean_squared, variance = (torch.stack(column, 1) for column in zip(*forward, strict=True))
    moments = {
        "forward": q,
        "mean_squared": mean_squared,
        "variance": variance,
        "activations": torch.stack([x_squared.mean(1) for x_squared in squares], 1),
        "backward": torch.stack(backward[::-1], 1),
        "weight_gradient": torch.stack(weight_gradient[::-1], 1),
    }
    return moments, {name: torch.stack(values, 1) for name, values in observed.items()}


def _merge(chunks: Sequence[Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
    whole = {name: torch.cat([chunk[name] for chunk in chunks]).cpu() for name in chunks[0]}
    # NumPy has no bfloat16
    return {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in whole.items()}


def _activate(activation, u):
    """``activation(u)`` and the function that pulls a gradient back through it."""
    x, pullback = torch.func.vjp(lambda v: activation(v.clone()), u)  # a copy: it may act in place
    if not isinstance(x, Tensor) or x.shape != u.shape:
        raise ValueError(
            f"activation must return a tensor of the shape it gets, {tuple(u.shape)}, "
            f"got {tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}"
        )
    return x, lambda gradient: pullback(gradient)[0]


def _double(x: Tensor) -> Tensor:
    """In double precision, which Apple's GPUs lack."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def _square(x: Tensor) -> Tensor:
    """Second moment over units: (networks, samples)."""
    return _double(x).square().mean(-1)


def _sample_moments(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Second moment, squared sample mean and sample variance, averaged over units."""
    variance, mean = torch.var_mean(_double(u), dim=1, correction=0)
    mean_squared, variance = mean.square().mean(-1), variance.mean(-1)
    return mean_squared + variance, mean_squared, variance


def _check_observed(name: str, values: Tensor, count: int) -> Tensor:
    if not isinstance(values, Tensor) or values.ndim == 0 or len(values) != count:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"observe[{name!r}] must return one entry per network, ({count}, ...), got {shape}")
    return values.detach()


def _check_widths(widths: Sequence[int]) -> list[int]:
    try:
        widths = list(widths)
    except TypeError:
        raise TypeError(f"widths must be a sequence of integers, got {widths!r}") from None
    if len(widths) < 2:
        raise ValueError(f"widths must name at least an input and one layer, got {widths}")
    for width in widths:
        check_count("each of widths", width)
    return [int(width) for width in widths]


def _check_schemes(scheme, depth: int) -> list[Initializer]:
    if isinstance(scheme, str) or not isinstance(scheme, Sequence):
        return [schemes.get(scheme)] * depth
    chosen = [schemes.get(each) for each in scheme]
    if len(chosen) != depth:
        raise ValueError(f"scheme must be one, or one for each of {depth} layers, got {len(chosen)}")
    return chosen


def _check_inputs(inputs: Tensor, networks: int, width: int) -> None:
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        kind = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
        raise TypeError(f"inputs must be a floating-point tensor, got {kind}")
    shape = tuple(inputs.shape)
    fits = len(shape) == 2 or (len(shape) == 3 and shape[0] == networks)
    if not fits or shape[-1] != width or 0 in shape:
        raise ValueError(f"inputs must have shape (samples, {width}) or ({networks}, samples, {width}), got {shape}")
