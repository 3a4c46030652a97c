"""What becomes of a tensor while a model runs: which activation acts on it, and which weight made it.

torch shows its functions to a mode before it calls them, whether a module calls them or a function. Tensors are
followed by identity, through what keeps the units apart: normalisation, dropout, pooling, changes of shape.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from initlib.runtime import double, mean_square

#: Activations that are zero for every negative pre-activation.
RECTIFIERS = frozenset(["relu", "relu6"])

#: Where the derivative of a bounded activation is below 5 % of its largest value: :math:`|u|` above this. From
#: :math:`\mathrm{sech}^2 u`, :math:`4\sigma(u)(1-\sigma(u)) = \mathrm{sech}^2(u/2)`, :math:`(1+|u|)^{-2}` and
#: :math:`e^{-u^2}`; beyond the corners of the last two the derivative is 0.
SATURATED = {
    "tanh": math.acosh(math.sqrt(20)),
    "sigmoid": 2 * math.acosh(math.sqrt(20)),
    "softsign": math.sqrt(20) - 1,
    "erf": math.sqrt(math.log(20)),
    "hardsigmoid": 3.0,
    "hardtanh": 1.0,
}

#: What an activation is part of where a tensor is multiplied by its own, or by one plus its own.
WRITTEN_OUT = {"sigmoid": "silu", "erf": "gelu"}

_SMOOTH = ("leaky_relu", "rrelu", "prelu", "elu", "celu", "selu", "gelu", "silu", "mish", "softplus", "logsigmoid")
_OTHER = ("hardswish", "softshrink", "hardshrink", "tanhshrink", "sin", "cos")

#: All activations that are known, by the name that torch gives the function.
ACTIVATIONS = RECTIFIERS | frozenset(SATURATED) | frozenset([*_SMOOTH, *_OTHER])

_NORMS = frozenset(["batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"])
_COPIES = ("clone", "contiguous", "to", "type_as", "float", "half", "double", "bfloat16", "requires_grad")
_DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_POOLS = [f"{kind}_pool{d}d" for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for d in (1, 2, 3)]
_KEEP = frozenset([*_COPIES, *_DROPOUT, *_POOLS, "interpolate", "neg"])
_SCALE = frozenset(["add", "radd", "sub", "mul", "rmul", "div", "truediv"])
_RESHAPE = frozenset(["reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"])
_MOVE = frozenset(["permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims"])
_TURNS = tuple(getattr(Tensor, name).__get__ for name in ("T", "H", "mT", "mH"))  # attributes, and moves all the same
_PART = frozenset(["chunk", "split", "unbind", "tensor_split", "getitem", "narrow"])
_LAYERS = frozenset(["linear", *(f"{kind}{d}d" for kind in ("conv", "conv_transpose") for d in (1, 2, 3))])


@dataclass(frozen=True)
class Path:
    """Where a tensor comes from.

    Attributes
    ----------
    source : object
        What it was registered under.
    unit : int or None
        Dimension that counts the units, if that is known.
    normalised : bool
        Whether a normalisation layer was on the way.
    """

    source: Any
    unit: int | None
    normalised: bool = False


class Entropy(NamedTuple):
    """A cross-entropy that was computed.

    Attributes
    ----------
    value : float
        Its mean over the targets.
    classes : int
    error : float
        Standard error of the mean, from the spread of the logits.
    second : float
        Second moment of the logits; NaN if only their log-softmax was seen.
    source : object
        What the logits were registered under; None if they were not followed.
    """

    value: float
    classes: int
    error: float
    second: float = math.nan
    source: Any = None


class Follow(TorchFunctionMode):
    """While it is entered, tracks tensors and tells which activation acts on each first.

    Parameters
    ----------
    seen : callable
        Gets the :class:`Path` of a tensor, the name of the activation and what the activation is about to act on.
    passed : callable
        Gets the :class:`Path` of a tensor that a normalisation layer acts on.

    Attributes
    ----------
    weights : mapping of Tensor to Tensor
        The weight that made the output of a linear layer or a convolution.
    own : dict of int to Parameter
        By their identity, the parameters that a linear layer or a convolution got as its weight.
    used : set of int
        Identities of the parameters that any function got.
    entropies : list of Entropy
        The cross-entropies with class indices that were computed.

    Notes
    -----
    Introduced in chapter 16.
    """

    def __init__(self, seen: Callable[[Path, str, Tensor], None], passed: Callable[[Path], None]):
        super().__init__()
        self.seen, self.passed = seen, passed
        self.paths, self.weights = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.own: dict[int, nn.Parameter] = {}
        self._gates = WeakTensorKeyDictionary()
        self.used: set[int] = set()
        self.entropies: list[Entropy] = []
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block, torch's functions are those of the measurement, and are let pass."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def track(self, tensor: Tensor, source: Any, unit: int | None) -> None:
        """Follow a tensor from here on."""
        self.paths[tensor] = Path(source, unit)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Called by torch in place of one of its functions."""
        kwargs = kwargs or {}
        if self._paused:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "").strip("_")
        if name == "get" and function in _TURNS:
            name = "transpose"
        if name in ("get", "set"):  # another attribute of a tensor
            return function(*args, **kwargs)
        self.used.update(id(each) for each in (*args, *kwargs.values()) if isinstance(each, nn.Parameter))
        tensor, path = self._tracked(args, kwargs)
        if path is not None:
            activation = _activation(name, args, kwargs)
            if activation:
                self.seen(path, activation, tensor)
        result = function(*args, **kwargs)
        self._gate(name, args, tensor, path, result)
        if path is not None:
            if result is tensor:  # in place, or nothing to do
                self.paths.pop(tensor, None)
            self._pass_on(name, path, tensor, result, function, args, kwargs)
        if name in _LAYERS and isinstance(result, Tensor):
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            if isinstance(weight, Tensor):
                self.weights[result] = weight
            if isinstance(weight, nn.Parameter):
                self.own[id(weight)] = weight
        elif name in ("cross_entropy", "nll_loss"):
            found = _entropy(name, args, kwargs, result)
            if found:
                self.entropies.append(found._replace(source=path.source if path else None))
        return result

    def _tracked(self, args, kwargs) -> tuple[Tensor | None, Path | None]:
        """The first tensor among the arguments that is followed."""
        for each in (*args[:2], kwargs.get("input")):
            if isinstance(each, Tensor):
                path = self.paths.get(each)
                if path is not None:
                    return each, path
        return None, None

    def _gate(self, name: str, args: tuple, tensor: Tensor | None, path: Path | None, result) -> None:
        """Tell of SiLU and GELU that are written out: a tensor times its own sigmoid, or its own 1 + erf."""
        if path is not None and path.unit is not None and name in WRITTEN_OUT:
            self._gates[result] = (path.source, name)
            return
        gates = [(each, self._gates[each]) for each in args[:2] if isinstance(each, Tensor) and each in self._gates]
        if len(gates) != 1 or name not in _SCALE:
            return
        [(gate, (source, kind))] = gates
        if path is None:  # 1 + erf, and a factor
            if all(each is gate or isinstance(each, int | float) for each in args):
                self._gates[result] = (source, kind)
        elif path.source is source and path.unit is not None and name in ("mul", "rmul"):
            self.seen(path, WRITTEN_OUT[kind], tensor)

    def _pass_on(self, name, path, tensor, result, function, args, kwargs) -> None:
        if name in _NORMS:
            self.passed(path)
            path = replace(path, normalised=True)
        elif name in _SCALE:
            others = [each for each in (*args, *kwargs.values()) if each is not tensor]
            if not all(isinstance(each, int | float | nn.Parameter) or _single(each) for each in others):
                return
        elif name in _RESHAPE:
            path = replace(path, unit=_reshaped(path.unit, tensor, result))
        elif name in _MOVE:
            path = replace(path, unit=_moved(path.unit, tensor, function, args, kwargs))
        elif name in _PART:
            path = replace(path, unit=None)
        elif name not in _KEEP:
            return
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.paths[each] = path


def _activation(name: str, args: tuple, kwargs: dict) -> str:
    """The activation that a function is, if any: a clamp from zero upward is a rectifier."""
    if name in ("clamp", "clip"):
        low = kwargs.get("min", args[1] if len(args) > 1 else None)
        high = kwargs.get("max", args[2] if len(args) > 2 else None)
        return "relu" if _is_zero(low) and high is None else ""
    if name in ("clamp_min", "maximum"):
        low = kwargs.get("min", args[1] if len(args) > 1 else None)
        return "relu" if _is_zero(low) else ""
    if name == "threshold":
        numbers = [*args[1:3], *(kwargs[key] for key in ("threshold", "value") if key in kwargs)]
        return "relu" if numbers == [0, 0] else ""
    if name in ("hardtanh", "relu6"):
        bounds = [*args[1:3], *(kwargs[key] for key in ("min_val", "max_val") if key in kwargs)]
        return "relu6" if name == "relu6" or bounds == [0.0, 6.0] else "hardtanh" if bounds in ([], [-1.0, 1.0]) else ""
    return name if name in ACTIVATIONS else ""


def _is_zero(value) -> bool:
    return (_single(value) or isinstance(value, int | float)) and float(value) == 0


def _single(value) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


def _reshaped(unit: int | None, before: Tensor, after: Tensor) -> int | None:
    """Where the units are after a change of shape that keeps the order of the entries."""
    if unit is None or not isinstance(after, Tensor):
        return None
    size, ahead = before.shape[unit], math.prod(before.shape[:unit])
    fits = [d for d in range(after.ndim) if after.shape[d] == size and math.prod(after.shape[:d]) == ahead]
    return fits[-1] if fits else None


def _moved(unit: int | None, before: Tensor, function, args: tuple, kwargs: dict) -> int | None:
    """Where the units are after dimensions have changed places: tried on a tensor that is long along one of them."""
    if unit is None or not args or args[0] is not before:
        return None
    marker = torch.empty([2 if d == unit else 1 for d in range(before.ndim)])
    return function(marker, *args[1:], **kwargs).shape.index(2)


def _entropy(name: str, args: tuple, kwargs: dict, result) -> Entropy | None:
    """The mean cross-entropy that a call computes, if its targets are class indices of equal weight."""
    try:
        given = inspect.signature(getattr(F, name)).bind(*args, **kwargs)
    except TypeError:
        return None
    given.apply_defaults()
    given = given.arguments
    scores, target = given["input"], given["target"]
    if given["weight"] is not None or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    targets = int((target != given["ignore_index"]).sum())
    if not targets or given.get("label_smoothing"):
        return None
    value = double(result.detach()).sum().item()
    if given["reduction"] != "mean":
        value /= targets
    logits = double(scores.detach())
    error = float(logits.std(correction=0)) / math.sqrt(targets)
    second = mean_square(logits) if name == "cross_entropy" else math.nan
    return Entropy(value, scores.shape[1 if scores.ndim > 1 else 0], error, second)
