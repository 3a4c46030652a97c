r"""Initialisation from data: a batch is sent through a model, and each layer is corrected by what leaves it.

Layers are corrected in the order in which the model calls them, so that each sees what the corrected ones below it
make of the batch. A layer is linear in weight and bias together: both divided by :math:`s`, what leaves it is too.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from initlib import schemes
from initlib.layers import Batch, Call, LayerMoments, layer_moments, run, select, watch
from initlib.runtime import check_count, check_positive, double
from initlib.tables import Table

# How far from its target, relative to it, a corrected layer may be: rounding in half precision stays far below.
_FOLLOWS = 0.05


@dataclass(frozen=True, repr=False, eq=False)
class Calibration(Table):
    r"""What a calibration did, a row for each call of a layer; prints as a table.

    Attributes
    ----------
    names : tuple of str
        Layers in the order of their calls, then those that were not called.
    before, after : LayerMoments
        Moments of the pre-activations in the model as it was given and as it is now, one entry
        for each name; NaN for a layer that was not called.
    iterations : array of int, shape (layers,)
        How many times the layer was corrected.
    done : tuple of str
        What was done, or why the layer was left as it was.
    """

    names: tuple[str, ...] = ()
    before: LayerMoments = None
    after: LayerMoments = None
    iterations: np.ndarray = None
    done: tuple[str, ...] = ()


def scale_only(
    model: nn.Module, batch: Batch, *, target: float = 1.0, layers: str | Sequence[str] = "*"
) -> Calibration:
    r"""Scale each layer of a model, in place, so that its pre-activations have a given second moment.

    With the average over the units :math:`j` of a layer and over their samples :math:`t`,

    .. math:: W \to W / s, \quad b \to b / s, \qquad s^2 = \langle u_{tj}^2 \rangle_{tj} / q,

    one number a layer. It leaves the shares of sample mean and sample variance in the second moment as they are.

    Parameters
    ----------
    model : torch.nn.Module
        Any model with linear layers or convolutions, in the mode in which it is to be calibrated.
    batch : Tensor, tuple or dict
        Argument of the model, its positional arguments, or its keyword arguments.
    target : float
        The second moment :math:`q`, positive.
    layers : str or sequence of str
        Names of layers, with wildcards as in file names: all of them if left out.

    Returns
    -------
    Calibration

    Raises
    ------
    TypeError
        If an argument is not of the kind described.
    ValueError
        If ``target`` is not positive and finite, a weight is computed from other parameters, no
        layer can be calibrated, or as for :func:`initlib.layers.layer_moments`.

    Warns
    -----
    UserWarning
        If a layer is left as it was, because its output is zero or not finite, or because it
        does not scale with its weight and bias.

    Notes
    -----
    This holds for all calibrations. Only linear layers and convolutions change, by one number a layer or a unit; the
    parameters stay the same objects. Everything else is left alone, as by
    :func:`initlib.layers.layer_moments`. If anything raises, the model is as before.

    A layer that is called several times is calibrated on its first call: later ones may depend on what it made of
    the first. Layers that share a parameter are one layer in this respect. A layer is left, and the table says so, if
    it is frozen, if it shares a parameter with a module that is not calibrated (an embedding, say), or if it is not
    called.

    Introduced in chapter 10.
    """
    check_positive("target", target)

    def rule(call: Call) -> _Step:
        mean, _, second = _moments(call)
        second = second.mean()
        return _Step(abs(second.item() / target - 1), (second / target).sqrt().expand_as(mean))

    return _calibrate(model, batch, layers, rule)


def lsuv(
    model: nn.Module,
    batch: Batch,
    *,
    tolerance: float = 0.01,
    iterations: int = 10,
    layers: str | Sequence[str] = "*",
    generator: torch.Generator | None = None,
) -> Calibration:
    r"""Layer-sequential unit variance: orthonormal weights, zero biases, then one number a layer.

    The variance is the pooled one, over all units and samples of a layer at once:

    .. math:: W \to W / s, \qquad s^2 = \langle u_{tj}^2 \rangle_{tj} - \langle u_{tj} \rangle_{tj}^2,

    repeated until :math:`|s^2 - 1|` is at most ``tolerance``. For a layer that is linear in its weight once is enough.

    Parameters
    ----------
    model : torch.nn.Module
        Any model with linear layers or convolutions, in the mode in which it is to be calibrated.
    batch : Tensor, tuple or dict
        Argument of the model, its positional arguments, or its keyword arguments.
    tolerance : float
        Largest distance of the variance from 1, positive.
    iterations : int
        Largest number of corrections of a layer.
    layers : str or sequence of str
        Names of layers, with wildcards as in file names: all of them if left out.
    generator : torch.Generator, optional
        Source of the orthonormal weights; torch's global one if left out.

    Returns
    -------
    Calibration

    Raises
    ------
    TypeError
        If an argument is not of the kind described.
    ValueError
        If ``tolerance`` or ``iterations`` is out of range, or as for :func:`scale_only`.

    Warns
    -----
    UserWarning
        If a layer is left as it was, as for :func:`scale_only` or because all that leaves it is
        one number, or if its variance is not within the tolerance.

    Notes
    -----
    Source: :cite:p:`mishkin2016all`. Other properties as for :func:`scale_only`. The orthonormal weights are those of
    :data:`initlib.schemes.orthogonal`.

    Introduced in chapter 10.
    """
    check_positive("tolerance", tolerance)
    check_count("iterations", iterations)

    def rule(call: Call) -> _Step:
        mean, variance, second = _moments(call)
        pooled = variance.mean() + mean.var(correction=0)
        _constant(call, pooled, second.mean())
        return _Step(abs(pooled.item() - 1), pooled.sqrt().expand_as(mean))

    def start(layer: nn.Module) -> Tensor:
        weight = torch.empty_like(layer.weight)
        return schemes.orthogonal.fill_(weight, schemes.orthogonal.connections(layer), generator=generator)

    return _calibrate(model, batch, layers, rule, tolerance=tolerance, iterations=iterations, start=start)


def scale_and_bias(
    model: nn.Module, batch: Batch, *, target: float = 1.0, layers: str | Sequence[str] = "*"
) -> Calibration:
    r"""Scale and shift each unit of a model, in place: sample mean 0 and a given sample variance.

    For each unit :math:`j`, with averages over its samples,

    .. math:: w_j \to w_j / s_j, \quad b_j \to (b_j - \langle u_j \rangle) / s_j,
              \qquad s_j^2 = \big(\langle u_j^2 \rangle - \langle u_j \rangle^2\big) / v.

    On this batch the layers do what batch normalisation would, and afterwards they are fixed.

    Parameters
    ----------
    model : torch.nn.Module
        Any model with linear layers or convolutions, in the mode in which it is to be calibrated.
    batch : Tensor, tuple or dict
        Argument of the model, its positional arguments, or its keyword arguments.
    target : float
        The sample variance :math:`v`, positive.
    layers : str or sequence of str
        Names of layers, with wildcards as in file names: all of them if left out.

    Returns
    -------
    Calibration

    Raises
    ------
    TypeError
        If an argument is not of the kind described.
    ValueError
        If a layer has no bias or its units have one sample, or as for :func:`scale_only`.

    Warns
    -----
    UserWarning
        If a layer or some of its units are left as they were, as for :func:`scale_only` or
        because they give the same for every sample.

    Notes
    -----
    Source: Algorithm 1 of :cite:t:`krahenbuhl2016data`, from the weights that the model has. Other properties as for
    :func:`scale_only`.

    Introduced in chapter 10.
    """
    check_positive("target", target)

    def rule(call: Call) -> _Step:
        mean, variance, second = _moments(call)
        if call.samples < 2:
            raise ValueError(
                f"batch gives the units of layer {call.name!r} one sample each, which has no variance: "
                "use a larger batch, or scale_only"
            )
        constant = _constant(call, variance, second)
        off = (variance / target - 1).abs() + mean.square() / target
        scale = torch.where(constant, 1.0, (variance / target).sqrt())
        return _Step(off[~constant].mean().item(), scale, torch.where(constant, 0.0, mean), int(constant.sum()))

    return _calibrate(model, batch, layers, rule, needs_bias=True)


class _Step(NamedTuple):
    """How far a layer is from its target, relative to it, and what would bring it there, a number a unit."""

    error: float
    scale: Tensor
    shift: Tensor | float = 0.0
    constant: int = 0  # units that are left because they give the same for every sample


class _Left(Exception):
    """Why a layer cannot be calibrated, and what to do."""


_ZERO = "all that leaves it is zero: look for weights that are zero, or for dead units below it"
_NOT_FINITE = "what leaves it is not finite: look for overflow in the layers below it, or NaN in the batch"
_SAME = "it gives the same for every sample: use a batch of different samples, or look at the layers below it"
_ROGUE = (
    "what leaves it does not follow its weight and bias, or their dtype cannot hold the result: "
    "leave it out, by naming the other layers in layers"
)


def _moments(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Sample mean, sample variance and second moment of each unit, if they are of use."""
    mean, variance = call.moments()
    second = mean.square() + variance
    if not second.isfinite().all():
        raise _Left(_NOT_FINITE)
    if not second.any():
        raise _Left(_ZERO)
    return mean, variance, second


def _constant(call: Call, variance: Tensor, second: Tensor) -> Tensor:
    """Which variances are no more than the rounding of numbers of this size; not all may be."""
    constant = variance <= (4 * torch.finfo(call.output.dtype).eps) ** 2 * second
    if constant.all():
        raise _Left(_SAME)
    return constant


def _calibrate(
    model: nn.Module,
    batch: Batch,
    layers: str | Sequence[str],
    rule: Callable[[Call], _Step],
    *,
    tolerance: float = 0.0,
    iterations: int = 1,
    start: Callable[[nn.Module], Tensor] | None = None,
    needs_bias: bool = False,
) -> Calibration:
    """Apply a rule to each layer in the order of the calls; see :func:`scale_only` for what is promised."""
    before = layer_moments(model, batch, layers=layers)
    chosen = select(model, layers)
    left = _plan(model, chosen, set(before.names), needs_bias)
    starts = {name: start(layer) for name, layer in chosen.items() if name not in left} if start else {}
    calls: dict[str, tuple[str, int]] = {}  # by label: what was done, and how often
    owners: dict[tuple, str] = {}  # of a parameter: the first layer that used it
    changed: list[nn.Parameter] = []
    warned: dict[str, list[str]] = {}

    @torch.no_grad()
    def correct(call: Call) -> Tensor | None:
        name = call.name
        parameters = _parameters(call.module)
        shared = [owners[_key(parameter)] for parameter in parameters if _key(parameter) in owners]
        if call.times > 1:
            what, _ = calls[name]
            calls[call.label] = what if what.startswith("left") else "as at its first call", 0
            return None
        if name in left or shared:
            calls[name] = left.get(name) or f"left: shares a parameter with {shared[0]!r}", 0
            return None
        owners.update({_key(parameter): name for parameter in parameters})
        old = [parameter.clone() for parameter in parameters]
        try:
            call, what, count, problem = _correct(call, rule, starts.get(name), tolerance, iterations)
        except _Left as reason:
            for parameter, value in zip(parameters, old, strict=True):
                parameter.copy_(value)
            what, _, advice = str(reason).partition(": ")
            warned.setdefault(f"left as it was, because {what}: {advice}", []).append(name)
            calls[name] = f"left: {what}", 0
            return None
        if problem:
            warned.setdefault(problem, []).append(name)
        changed.extend(parameters)
        calls[name] = what, count
        return call.output

    with watch(model, correct, layers=layers), torch.no_grad():
        run(model, batch)
        new = [parameter.clone() for parameter in changed]
    # The model is again as it was given. Only now that all has worked it changes.
    old = [parameter.detach().clone() for parameter in changed]
    try:
        _set_(changed, new)
        after = layer_moments(model, batch, layers=layers)
        for message, names in warned.items():
            listed = ", ".join(map(repr, names))
            warnings.warn(f"layer{'s' * (len(names) > 1)} {listed}: {message}", UserWarning, stacklevel=3)
    except BaseException:
        _set_(changed, old)
        raise
    calls |= {name: (left.get(name, "not called"), 0) for name in chosen if name not in calls}
    return _report(before, after, calls)


def _plan(model: nn.Module, chosen: dict[str, nn.Module], called: set[str], needs_bias: bool) -> dict[str, str]:
    """The layers that are left, and why; an error if some cannot be calibrated, or none is."""
    ours = set(map(id, chosen.values()))
    strangers: dict[tuple, str] = {}  # by parameter: a module that has it and is not calibrated
    for name, module in model.named_modules():
        if id(module) not in ours:
            user = name or "the model"
            strangers |= {_key(parameter): user for parameter in _parameters(module, list(module._parameters))}
    left, computed, without = {}, [], []
    for name, layer in chosen.items():
        parameters = _parameters(layer)
        others = [strangers[_key(parameter)] for parameter in parameters if _key(parameter) in strangers]
        if name not in called:
            left[name] = "not called"
        elif layer._parameters.get("weight") is None or (layer.bias is not None and layer._parameters["bias"] is None):
            computed.append(name)
        elif layer.weight.numel() == 0:
            left[name] = "left: it has no weights"
        elif not all(parameter.requires_grad for parameter in parameters):
            left[name] = "left: frozen"
        elif others:
            left[name] = f"left: shares a parameter with {others[0]!r}"
        elif needs_bias and layer.bias is None:
            without.append(name)
    if computed:
        raise ValueError(
            f"weights or biases of {', '.join(map(repr, computed))} are computed from other parameters (weight norm, "
            "say): calibrate first and parametrise afterwards, or name the other layers in layers"
        )
    if without:
        raise ValueError(
            f"layers {', '.join(map(repr, without))} have no bias to shift: build them with bias=True, name the other "
            "layers in layers, or use scale_only"
        )
    if len(left) == len(chosen):
        raise ValueError("no layer to calibrate: " + "; ".join(f"{name!r} {why}" for name, why in left.items()))
    return left


def _correct(
    call: Call, rule: Callable[[Call], _Step], start: Tensor | None, tolerance: float, iterations: int
) -> tuple[Call, str, int, str]:
    """Correct one layer in place: the call as it is now, what was done, how often, and what is to be warned of."""
    layer = call.module
    if start is not None:
        layer.weight.copy_(start)
        if layer.bias is not None:
            layer.bias.zero_()
        call = _again(call)
    step, count, divisor = rule(call), 0, 1.0
    while step.error > tolerance and count < iterations:
        _divide_(layer, step)
        divisor, count = divisor * step.scale[0].item(), count + 1
        call = _again(call)
        try:
            step = rule(call)
        except _Left:
            raise _Left(_ROGUE) from None
    if not step.error <= max(tolerance, _FOLLOWS):
        raise _Left(_ROGUE)
    warned = ""
    if tolerance and step.error > tolerance:
        warned = f"variance still off by {step.error:.2g} after {count} iterations: allow more, or a larger tolerance"
    if step.constant:
        warned = (
            f"{step.constant} of {len(step.scale)} units are left as they were, because they give the same for every "
            "sample: use a batch of different samples, or look at the layers below"
        )
    what = f"divided by {divisor:.4g}" if isinstance(step.shift, float) else "units shifted and scaled"
    if not count:
        what = "nothing to correct"
    return call, what if start is None else f"orthonormal, {what}", count, warned


def _again(call: Call) -> Call:
    """The same call of a layer whose parameters have changed."""
    return call._replace(output=call.module.forward(*call.args, **call.kwargs))


def _divide_(layer: nn.Module, step: _Step) -> None:
    """Divide what leaves each unit by a number, after shifting it."""
    weight, scale = double(layer.weight), step.scale
    if getattr(layer, "transposed", False):  # (inputs, outputs of a group, *kernel), inputs group by group
        grouped = weight.unflatten(0, (layer.groups, -1))
        divided = grouped / scale.reshape(layer.groups, 1, -1, *[1] * (weight.ndim - 2))
        layer.weight.copy_(divided.flatten(0, 1))
    else:
        layer.weight.copy_(weight / scale.reshape(-1, *[1] * (weight.ndim - 1)))
    if layer.bias is not None:
        layer.bias.copy_((double(layer.bias) - step.shift) / scale)


def _parameters(module: nn.Module, names: Sequence[str] = ("weight", "bias")) -> list[nn.Parameter]:
    """Parameters of a module itself, by name, that exist and are not empty."""
    found = [module._parameters.get(name) for name in names]
    return [parameter for parameter in found if parameter is not None and parameter.numel()]


def _key(parameter: nn.Parameter) -> tuple[torch.device, int]:
    """The same for parameters that share their memory from the start."""
    return parameter.device, parameter.data_ptr()


def _set_(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _report(before: LayerMoments, after: LayerMoments, calls: dict[str, tuple[str, int]]) -> Calibration:
    """A row a call, in the order of the model as it is now."""
    names = [*after.names, *(name for name in calls if name not in after.names)]
    moments = []
    for found in (before, after):
        known = {name: values for name, *values in found.rows}
        moments.append(LayerMoments.of({name: known.get(name, (math.nan,) * 3) for name in names}))
    done, counts = zip(*(calls.get(name, ("not called", 0)) for name in names), strict=True)
    columns = [getattr(each, part) for part in ("forward", "mean_squared", "variance") for each in moments]
    headers = (
        "layer",
        *(f"{what}\n{when}" for what in ("second moment", "squared mean", "variance") for when in ("before", "after")),
        "times",
        "done",
    )
    rows = [tuple(row) for row in zip(names, *(map(float, column) for column in columns), counts, done, strict=True)]
    return Calibration(headers, rows, tuple(names), *moments, np.array(counts), done)
