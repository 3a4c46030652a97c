r"""Signals in random networks: draw many, send a batch forward and a gradient back, keep moments.

A network of depth :math:`L` has widths :math:`n_0, \dots, n_L`. With :math:`x^0` the input, layer
:math:`l = 1, \dots, L` computes

.. math:: u^l = W^l x^{l-1} + b^l, \qquad x^l = \phi(u^l),

and the gradient of a loss :math:`\ell` travels back from a :math:`\partial\ell/\partial x^L` that is drawn at random.
Nothing is trained: this is the network as it was initialised.

Two samplers give the same law. One draws every weight matrix. The other draws none: with normal weights, what a layer
makes of its input depends on nothing but the input's Gram matrix.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields
from itertools import pairwise
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from initlib import activations, runtime, schemes
from initlib.activations import Activation
from initlib.checks import mean_and_se
from initlib.fans import Fans
from initlib.runtime import check_count, check_positive, check_widths, double, norm
from initlib.schemes import Initializer, Scheme
from initlib.weight_free import WeightFree

#: Largest stack of weights, or of signals, held at once, in bytes: networks are drawn in chunks of this size.
CHUNK_BYTES = 256 * 2**20

#: Added to the sample variance before a normalisation divides by its root, as by ``torch.nn.BatchNorm1d``.
EPS = 1e-5

#: What ``normalize`` may be.
NORMALIZATIONS = (None, "batch", "scale_and_bias")

#: What ``sampler`` may be.
SAMPLERS = ("auto", "explicit", "weight_free")

# Signals of one layer that a CPU thread works on at once: few enough for its cache.
_CACHED = 2**19
# And the chunks, at least, that the networks are split into on a CPU, whatever its number of threads.
_CHUNKS = 4


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
    normalize: str | None = None,
    residual: float | None = None,
    observe: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    sampler: str = "auto",
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
        tensor of the same shape out. It acts behind every layer, the last one included. One that is random draws
        from torch's global state.
    networks : int
        Number :math:`R` of independent networks, the replicates of every standard error.
    samples : int, optional
        Number :math:`T` of inputs drawn from :math:`N(0, 1)`, anew for each network.
    inputs : Tensor, shape (T, n_0) or (networks, T, n_0), optional
        Inputs given instead of drawn; the first form is shared by all networks.
    bias_std : float
        Standard deviation of the normal biases; no biases if 0.
    normalize : {None, "batch", "scale_and_bias"}
        Whether the activation acts on :math:`\hat u = (u - \langle u\rangle) / \sqrt{\langle u^2\rangle -
        \langle u\rangle^2 + \epsilon}`, unit by unit, with means over the samples and :math:`\epsilon` of
        :data:`EPS`. With ``"batch"`` the gradient also flows through the two statistics, as in batch
        normalisation; with ``"scale_and_bias"`` they count as constants, as after data-dependent initialisation.
        The moments of the trace remain those of :math:`u`.
    residual : float, optional
        :math:`\alpha` in :math:`x^l = x^{l-1} + \alpha\,\phi(u^l)`, in every layer whose widths before and
        behind agree. None: no layer has a skip connection.
    observe : mapping of str to callable, optional
        Further statistics: each gets the pre-activations of a layer, (networks, T, n_l), and
        returns one entry per network, (networks, ...).
    seed : int
        Number of the experiment, see :func:`initlib.runtime.seed`.
    dtype : torch.dtype
        Floating-point type of the computation; moments are averaged in double precision.
    sampler : {"auto", "explicit", "weight_free"}
        ``"explicit"`` draws every weight. ``"weight_free"`` draws none where samples are fewer than inputs:
        for schemes of normal distribution, in single or double precision, and activations that are not random.
        ``"auto"``: the faster one.

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

    Both samplers have the same law at every width, up to rounding. For the second, take a layer's input :math:`X`, one
    row a sample, its Gram matrix :math:`K = X X^\top` and weights of variance :math:`\sigma_w^2`. Forward,
    :math:`X W^\top` has the law of :math:`U = \sigma_w C Z` with :math:`C C^\top = K` and :math:`Z` of entries
    :math:`N(0, 1)`. Backward, a gradient :math:`D` that depends on :math:`W` through :math:`U` alone gets

    .. math:: D W = D U^\top K^{-1} X + F\,(1 - X^\top K^{-1} X),

    the conditional mean given :math:`U`, and a fresh :math:`F` of the law of :math:`D W'`, projected onto what
    :math:`X` left open. It is known as the conditioning technique (Bolthausen 2014).

    Introduced in chapter 02; ``sampler`` in chapter 08, ``normalize`` in chapter 09.

    Examples
    --------
    >>> trace = propagate([64] * 3, "lecun_normal", networks=50, samples=8)
    >>> trace.forward.shape
    (50, 3)
    """
    widths = check_widths(widths)
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
    check_positive("bias_std", bias_std, zero=True)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, got {dtype}")

    if normalize not in NORMALIZATIONS:
        raise ValueError(f"normalize must be one of {', '.join(map(repr, NORMALIZATIONS))}, got {normalize!r}")
    samples = samples or inputs.shape[-2]
    if normalize and samples < 2:
        raise ValueError(f"normalize needs at least 2 samples, got {samples}")
    if residual is not None and (isinstance(residual, bool) or not isinstance(residual, Real)):
        raise TypeError(f"residual must be a finite number or None, got {residual!r}")
    if residual is not None and not math.isfinite(residual):
        raise ValueError(f"residual must be a finite number or None, got {residual!r}")
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r}")
    for each, (m, n) in zip(layer_schemes, pairwise(widths), strict=True):
        each.check(torch.empty(1, dtype=dtype), Fans(m, n))
    weight_free = _chooses_weight_free(sampler, widths, layer_schemes, samples, dtype)

    device = runtime.device()
    generator = runtime.generator(seed, device)
    if isinstance(activation, torch.nn.Module):  # the user's stays where and as it is
        activation = copy.deepcopy(activation).to(device, dtype)
    size = torch.empty(0, dtype=dtype).element_size()
    if weight_free:
        if device.type == "cpu":  # several chunks, so that there is something to do side by side
            chunk = max(1, min(_CACHED // (samples * max(widths)), -(-networks // _CHUNKS)))
        else:
            chunk = max(1, CHUNK_BYTES // (size * samples * sum(widths)))
    else:
        chunk = max(1, CHUNK_BYTES // (size * (sum(m * n for m, n in pairwise(widths)) + samples * sum(widths))))
    step = _Step(activation, normalize)

    def of_chunk(start: int, generator: torch.Generator):
        count = min(chunk, networks - start)
        if inputs is None:
            x = torch.empty(count, samples, widths[0], dtype=dtype, device=device)
            x.normal_(generator=generator)
        else:
            x = inputs.detach().to(device, dtype)
            x = x.expand(count, *x.shape) if x.ndim == 2 else x[start : start + count]
        layers = [
            (WeightFree if weight_free and m > samples else _Drawn)(scheme, m, n, generator)
            for scheme, (m, n) in zip(layer_schemes, pairwise(widths), strict=True)
        ]
        return _run(x, layers, step, bias_std, residual, dict(observe or {}), generator)

    starts = range(0, networks, chunk)
    if weight_free:
        # A stream of its own for each chunk, so that the numbers do not depend on how many run side by side.
        numbers = torch.randint(2**62, (len(starts),), generator=runtime.generator(seed))
        streams = [torch.Generator(device).manual_seed(int(number)) for number in numbers]
        workers = torch.get_num_threads() if device.type == "cpu" else 1
        # A single network too large for the cache has all threads for its products; else each chunk has one.
        alone = len(starts) == 1 and samples * max(widths) > _CACHED
        with nullcontext() if alone else runtime.one_thread(device), ThreadPoolExecutor(workers) as pool:
            parts = list(pool.map(of_chunk, starts, streams))
    else:
        parts = [of_chunk(start, generator) for start in starts]
    moments, observed = (_merge(column) for column in zip(*parts, strict=True))
    return Trace(**moments, observed=observed)


@torch.no_grad()  # an activation's own parameters must not start a graph
def _run(x, layers, step, bias_std, residual, observe, generator):
    """Moments of one chunk of networks.

    Of a network without weights only the pre-activations are kept; its activations are computed again on the way back.
    """
    count = len(x)
    again = any(isinstance(layer, WeightFree) for layer in layers)
    entering, skips, us, biases, first, pullbacks = x, [], [], [], [], []
    squares, forward = [_square(x)], [_sample_moments(x)]
    observed = {name: [] for name in observe}
    skipped = [residual is not None and layer.m == layer.n for layer in layers]
    for layer, skip in zip(layers, skipped, strict=True):
        u = layer.forward(x, squares[-1])
        b = None
        if bias_std:
            b = torch.empty(count, 1, layer.n, dtype=x.dtype, device=x.device).normal_(0, bias_std, generator=generator)
            u = u + b
        forward.append(_sample_moments(u))
        for name, statistic in observe.items():
            observed[name].append(_check_observed(name, statistic(u), count))
        if again:
            branch = step(u)
            us.append(u)
            biases.append(b)
            first.append(branch[:, 0].clone())
            skips.append(x if residual is not None else None)
        else:
            branch, pullback = step.vjp(u)
            pullbacks.append(pullback)
        x = x + residual * branch if skip else branch
        squares.append(_square(x))

    gradient = torch.empty_like(x).normal_(generator=generator)
    backward, weight_gradient = [], []
    if again:
        branch, pullback = step.vjp(us[-1], first[-1])
    for l, layer in reversed(list(enumerate(layers))):
        pullback = pullback if again else pullbacks.pop()
        delta = pullback(residual * gradient if skipped[l] else gradient)
        delta_squared = _square(delta)
        backward.append(delta_squared.mean(1))
        weight_gradient.append((delta_squared * squares[l]).mean(1))
        x = u = None  # weights that are drawn need not know what they have shown
        if again:
            u, b = us.pop(), biases.pop()
            u = u if b is None else u - b
            if l > 0:
                branch, pullback = step.vjp(us[-1], first[l - 1])
            x = skips[l] if residual is not None else branch if l > 0 else entering
        into = layer.backward(x, squares[l], u, delta, delta_squared)
        gradient = gradient + into if skipped[l] else into
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


class _Drawn:
    """A layer whose weight matrices, one for each network, are drawn."""

    def __init__(self, scheme: Initializer, m: int, n: int, generator: torch.Generator):
        self.scheme, self.m, self.n, self.generator = scheme, m, n, generator

    def forward(self, x, second):
        w = torch.empty(len(x), self.n, self.m, dtype=x.dtype, device=x.device)
        self.w = self.scheme.fill_(w, Fans(self.m, self.n), generator=self.generator)
        return x @ self.w.mT

    def backward(self, x, second, u, delta, delta_second):
        return delta @ self.w


class _Step:
    """What acts on pre-activations (networks, T, n): the normalisation, if any, and the activation."""

    def __init__(self, activation: Callable[[Tensor], Tensor], normalize: str | None):
        self.activation, self.normalize = activation, normalize

    def __call__(self, u: Tensor) -> Tensor:
        # A copy: the activation may act in place.
        return _check_shape(self.activation(_normalized(u)[0] if self.normalize else u.clone()), u)

    def vjp(self, u: Tensor, first: Tensor | None = None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The activations, of the first samples ``first`` if given, and what pulls a gradient back to ``u``."""
        v, scale = _normalized(u) if self.normalize else (u, None)
        x, pull = torch.func.vjp(lambda v: self.activation(v.clone()), v)
        _check_shape(x, u)
        if first is not None and not torch.equal(x[:, 0].nan_to_num(), first.nan_to_num()):
            raise ValueError(
                "activation must give the same value every time: this one is random or changes its state; "
                "use sampler='explicit'"
            )

        def pullback(gradient):
            (delta,) = pull(gradient)
            if self.normalize == "batch":  # the statistics move too: what is constant or along v has no effect
                delta = delta - delta.mean(1, keepdim=True) - v * (delta * v).mean(1, keepdim=True)
            return delta * scale if self.normalize else delta

        return x, pullback


def _normalized(u: Tensor) -> tuple[Tensor, Tensor]:
    """Unit by unit over the samples, and the factor that did it."""
    v = u - u.mean(1, keepdim=True)
    scale = (v.square().mean(1, keepdim=True) + EPS).rsqrt()
    return v * scale, scale


def _chooses_weight_free(sampler, widths, layer_schemes, samples, dtype) -> bool:
    if sampler == "explicit":
        return False
    strange = [s.name for s in layer_schemes if not (isinstance(s, Scheme) and s.distribution == "normal")]
    possible = not strange and dtype in (torch.float32, torch.float64)
    if sampler == "weight_free" and not possible:
        got = f"scheme {strange[0]!r}" if strange else f"dtype {dtype}"
        raise ValueError(
            "sampler='weight_free' needs schemes of normal distribution and dtype torch.float32 or torch.float64, "
            f"got {got}"
        )
    return possible and (sampler == "weight_free" or _weight_free_cost(widths, samples) < _drawn_cost(widths, samples))


def _drawn_cost(widths: Sequence[int], samples: int) -> float:
    """Rough time for a network on a CPU, in units of one random number; fitted to widths 10 to 3000."""
    return sum(700 + m * n * (1.7 + 0.012 * samples) + 2 * samples * (m + n) for m, n in pairwise(widths))


def _weight_free_cost(widths: Sequence[int], samples: int) -> float:
    """As :func:`_drawn_cost`, where no weights are drawn."""
    factors = 1800 + 14 * samples**2 + 0.066 * samples**3
    return sum(factors + samples * (m + n) * (5.3 + 0.016 * samples) for m, n in pairwise(widths))


def _merge(chunks: Sequence[Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
    whole = {name: torch.cat([chunk[name] for chunk in chunks]).cpu() for name in chunks[0]}
    # NumPy has no bfloat16
    return {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in whole.items()}


def _check_shape(x: Tensor, u: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.shape != u.shape:
        raise ValueError(
            f"activation must return a tensor of the shape it gets, {tuple(u.shape)}, "
            f"got {tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}"
        )
    return x


def _square(x: Tensor) -> Tensor:
    """Second moment over units, in double precision: (networks, samples)."""
    return norm(x, -1).square() / x.shape[-1]


def _sample_moments(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Second moment, squared sample mean and sample variance, averaged over units."""
    u = double(u) if u.dtype in (torch.float16, torch.bfloat16) else u
    mean = u.mean(1, keepdim=True)
    rest = norm(u - mean, (1, 2)).square() / u[0].numel()
    mean_squared = norm(mean, (1, 2)).square() / u.shape[-1]
    return mean_squared + rest, mean_squared, rest


def _check_observed(name: str, values: Tensor, count: int) -> Tensor:
    if not isinstance(values, Tensor) or values.ndim == 0 or len(values) != count:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"observe[{name!r}] must return one entry per network, ({count}, ...), got {shape}")
    return values.detach()


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
