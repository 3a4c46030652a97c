r"""The layers of any model in the order in which it calls them, and the statistics of what leaves each.

A layer is a linear layer or a convolution; what leaves it is its pre-activation :math:`u`, read before an activation
that works in place can overwrite it. A unit is an output feature of a linear layer or an output channel of a
convolution. Its samples are all the rest: the samples of the batch, and their positions or tokens.
"""

import fnmatch
import math
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from initlib.fans import SUPPORTED
from initlib.runtime import double
from initlib.tables import Table

#: The kinds of layer that are looked at. An embedding looks up, it has no pre-activation.
KINDS = tuple(kind for kind in SUPPORTED if kind is not nn.Embedding)

#: Modules of torch that compute inside of one function: only what leaves them can be looked at.
CLOSED = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)

# Attributes of modules whose entries a forward pass may change. (A scripted module has others.)
_CONTAINERS = (dict, list, set, OrderedDict, defaultdict, Counter, deque)

#: A batch: one tensor, the positional arguments of the model, or its keyword arguments.
Batch = Tensor | tuple | Mapping[str, Any]


class Call(NamedTuple):
    """One call of a layer.

    Attributes
    ----------
    name : str
        Name of the layer in the model; empty if the model is the layer.
    times : int
        1 for the first call of this layer in the pass, 2 for the second ...
    module : torch.nn.Module
    args, kwargs : tuple, dict
        What the layer was called with.
    output : Tensor
        The pre-activation, before anything in place has changed it. Of the several tensors that a recurrent layer or
        attention returns, the first.
    """

    name: str
    times: int
    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    output: Tensor

    @property
    def label(self) -> str:
        """The name, with the number of the call behind it from the second one on."""
        return self.name if self.times == 1 else f"{self.name} ({self.times})".lstrip()

    @property
    def samples(self) -> int:
        """Samples of each unit."""
        return math.prod(self.output.shape[: self.unit] + self.output.shape[self.unit + 1 :])

    @property
    def unit(self) -> int:
        """Dimension of the output that counts units."""
        return self.output.ndim - 1 - len(getattr(self.module, "kernel_size", ()))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Sample mean and sample variance (divided by the number of samples) of each unit, in double precision.

        Raises
        ------
        TypeError
            If what the layer returns is not a real tensor.
        ValueError
            If it holds no sample.
        """
        u = self.output
        if not (isinstance(u, Tensor) and u.is_floating_point()):
            what = u.dtype if isinstance(u, Tensor) else type(u).__name__
            raise TypeError(f"layer {self.name!r} must return a real tensor, got {what}: leave it out with layers=")
        if self.samples == 0:
            raise ValueError(f"batch gives layer {self.name!r} no sample: an output of shape {tuple(u.shape)}")
        dimensions = [d for d in range(u.ndim) if d != self.unit]
        u = double(u.detach())
        if not dimensions or not u.numel():  # one sample, given without a batch dimension; no units
            return u.flatten(), torch.zeros_like(u).flatten()
        mean = u.mean(dimensions, keepdim=True)  # faster than torch.var_mean over other than the last dimension
        return mean.flatten(), (u - mean).square().mean(dimensions)


@dataclass(frozen=True, repr=False, eq=False)
class LayerMoments(Table):
    r"""Moments of the pre-activations of each layer, averaged over its units; prints as a table.

    Attributes
    ----------
    names : tuple of str
        The layers in the order of the calls. A layer that is called twice has two rows,
        ``"name"`` and ``"name (2)"``.
    forward : array, shape (layers,)
        Second moment, :math:`E[u^2]`.
    mean_squared, variance : arrays, shape (layers,)
        Squared sample mean, and sample variance (divided by the number of samples).
        ``forward = mean_squared + variance``.
    """

    names: tuple[str, ...] = ()
    forward: np.ndarray = None
    mean_squared: np.ndarray = None
    variance: np.ndarray = None

    @classmethod
    def of(cls, moments: Mapping[str, tuple[float, float, float]]) -> "LayerMoments":
        """From second moment, squared sample mean and sample variance of each layer, by name."""
        columns = np.array(list(moments.values()), dtype=float).reshape(-1, 3).T
        rows = [(name, *map(float, values)) for name, values in moments.items()]
        return cls(("layer", "second moment", "squared sample mean", "sample variance"), rows, tuple(moments), *columns)


@torch.no_grad()
def layer_moments(model: nn.Module, batch: Batch, *, layers: str | Sequence[str] = "*") -> LayerMoments:
    r"""Second moment, squared sample mean and sample variance of what leaves each layer of a model.

    For a unit :math:`j` of a layer and its samples :math:`t = 1, \dots, T`,

    .. math:: \frac1T\sum_t u_{tj}^2 = \langle u_j\rangle^2 + \big(\langle u_j^2\rangle - \langle u_j\rangle^2\big),

    and each of the three is averaged over the units of the layer.

    Parameters
    ----------
    model : torch.nn.Module
        Any model with linear layers or convolutions. It runs once, in the mode that it is in.
    batch : Tensor, tuple or dict
        Argument of the model, its positional arguments, or its keyword arguments.
    layers : str or sequence of str
        Names of layers, with wildcards as in file names: all of them if left out.

    Returns
    -------
    LayerMoments
        One row a call, in the order of the calls.

    Raises
    ------
    TypeError
        If ``model`` is not a module, or ``batch`` or ``layers`` is not as described.
    ValueError
        If the model has no such layer or calls none of them, if a pattern fits no layer, if a
        part of the model is lazy, or if the batch is empty.

    Notes
    -----
    Sums are in double precision. Parameters, gradients, buffers, modes, the batch and the global random state are
    afterwards what they were, also if the model raises.

    Introduced in chapter 08.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(inplace=True))
    >>> _ = nn.init.constant_(model[0].weight, 2.0)
    >>> print(layer_moments(model, torch.tensor([[-1.0], [2.0]])))
    layer      second moment    squared sample mean    sample variance
    -------  ---------------  ---------------------  -----------------
    0                     10                      1                  9
    """
    found = {}

    def note(call: Call) -> None:
        mean, variance = call.moments()
        squared, spread = mean.square().mean().item(), variance.mean().item()
        found[call.label] = (squared + spread, squared, spread)

    with watch(model, note, layers=layers):
        run(model, batch)
    if not found:
        raise ValueError("model calls none of its layers " + ", ".join(map(repr, select(model, layers))))
    return LayerMoments.of(found)


def select(
    model: nn.Module, layers: str | Sequence[str] = "*", kinds: tuple[type, ...] = KINDS
) -> dict[str, nn.Module]:
    """The layers of a model whose names fit, by name: linear layers and convolutions, if no other kinds are given.

    A module that has several names is found by any of them, and goes by the first that fits.

    Parameters
    ----------
    model : torch.nn.Module
    layers : str or sequence of str
        Names, with wildcards as in file names.
    kinds : tuple of type
        Classes of modules.

    Raises
    ------
    TypeError
        If ``model`` is not a module, or ``layers`` is neither a string nor a sequence of strings.
    ValueError
        If the model has no such layer, if a pattern fits none of them, or if there is no pattern.

    Notes
    -----
    Introduced in chapter 08.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    patterns = [layers] if isinstance(layers, str) else layers
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"layers must be a name pattern or a sequence of them, got {layers!r}")
    found = {name: module for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, kinds)}
    if not found:
        hint = "a scripted, exported or quantised one hides them, and so does a Python list that is no nn.ModuleList"
        more = "" if kinds == KINDS else ", attention or recurrent layer of torch"
        raise ValueError(f"model has no linear layer or convolution{more}, got {type(model).__name__}; {hint}")
    if not patterns:
        raise ValueError("layers must name at least one pattern, got none")
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in found):
            raise ValueError(f"layers: {pattern!r} fits no layer; there are " + ", ".join(map(repr, found)))
    chosen: dict[str, nn.Module] = {}
    for name, module in found.items():
        fits = any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        if fits and not any(module is other for other in chosen.values()):
            chosen[name] = module
    return chosen


def run(model: nn.Module, batch: Batch):
    """Call a model on a copy of a batch, so that nothing in place reaches the original; return what it returns.

    Parameters
    ----------
    model : torch.nn.Module
    batch : Tensor, tuple or dict
        Argument of the model, its positional arguments, or its keyword arguments.

    Raises
    ------
    TypeError
        If ``batch`` is none of these.

    Notes
    -----
    Introduced in chapter 08.
    """
    if isinstance(batch, Tensor | PackedSequence):
        return model(_fresh(batch))
    if isinstance(batch, tuple):
        return model(*map(_fresh, batch))
    if isinstance(batch, Mapping) and all(isinstance(name, str) for name in batch):
        return model(**{name: _fresh(value) for name, value in batch.items()})
    raise TypeError(
        "batch must be a tensor, a tuple of positional arguments or a dict of keyword arguments, "
        f"got {type(batch).__name__}"
    )


def _fresh(value):
    """Copies of the tensors in an argument."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*map(_fresh, value))
    if type(value) in (list, tuple):
        return type(value)(map(_fresh, value))
    if type(value) in (dict, OrderedDict):
        return type(value)((name, _fresh(each)) for name, each in value.items())
    return value


@contextmanager
def watch(
    model: nn.Module,
    callback: Callable[[Call], Tensor | None],
    *,
    layers: str | Sequence[str] = "*",
    kinds: tuple[type, ...] = KINDS,
) -> Iterator[None]:
    """Inside the block, each call of a layer is shown to ``callback``; afterwards all is as before.

    The callback sees the calls in their order, and the layer's own output: before the hooks of others, and before an
    activation in place. A tensor that it returns takes the place of the output. Inside the block the parameters have
    no gradients: a backward pass there fills fresh ones.

    Parameters
    ----------
    model : torch.nn.Module
    callback : callable
        Gets a :class:`Call`, returns None or another output.
    layers, kinds
        As for :func:`select`.

    Raises
    ------
    TypeError, ValueError
        As for :func:`select` and :func:`preserved`.

    Notes
    -----
    Introduced in chapter 08.
    """
    times = Counter()

    def show(name: str):
        def hook(module, args, kwargs, output):
            times[name] += 1
            closed = isinstance(module, CLOSED)
            new = callback(Call(name, times[name], module, args, kwargs, _first(output) if closed else output))
            return _with_first(output, new) if closed and new is not None else new

        return hook

    chosen = select(model, layers, kinds)
    with preserved(model), ExitStack() as hooks:
        if "torch._dynamo" in sys.modules:  # a compiled model may pass over hooks, or be compiled anew for them
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in chosen.items():
            handle = module.register_forward_hook(show(name), prepend=True, with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def _first(output):
    """The first tensor of nested tuples; a packed sequence is such a tuple, too."""
    return _first(output[0]) if isinstance(output, tuple) and output else output


def _with_first(output, new: Tensor):
    """The same nested tuples with another first tensor."""
    if not isinstance(output, tuple):
        return new
    first = _with_first(output[0], new)
    return output._replace(data=first) if isinstance(output, PackedSequence) else (first, *output[1:])


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside the block, a model and the global random states are afterwards as before.

    Restored are values and identity of parameters, gradients and buffers, which of them require gradients, modes and
    other attributes of the modules (the entries of lists, dictionaries and sets, the values of tensors and the states
    of generators among them), and the random states of torch on all devices, of NumPy and of Python. What lies deeper,
    as a tensor in a list does, stays as the model leaves it. Inside, the parameters have no gradients.

    Parameters
    ----------
    model : torch.nn.Module

    Raises
    ------
    ValueError
        If a parameter or buffer is lazy, or on the meta device.

    Notes
    -----
    Introduced in chapter 08.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name!r} of the model has no shape yet (it is lazy): run one forward pass first")
        if tensor.is_meta:
            raise ValueError(f"{name!r} of the model has no values (it is on the meta device): move it with to_empty")
    gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    attributes = [value for module in model.modules() for value in (vars(module), *vars(module).values())]
    held = [value for value in attributes if type(value) in _CONTAINERS]
    contents = [(now, now.copy()) for now in {id(now): now for now in held}.values()]
    generators = [(each, each.get_state()) for each in attributes if isinstance(each, torch.Generator)]
    plain = [each for each in attributes if isinstance(each, Tensor) and not each.is_meta]
    values = [(each, each.requires_grad, each.detach().clone()) for each in (*tensors.values(), *plain)]
    with _random_states():
        try:
            for parameter in model.parameters():
                parameter.grad = None
            yield
        finally:
            for now, before in contents:
                now.clear()
                (now.extend if hasattr(now, "extend") else now.update)(before)
            for parameter, gradient, required in gradients:
                if parameter.requires_grad != required:
                    parameter.requires_grad_(required)
                parameter.grad = gradient
            for each, state in generators:
                each.set_state(state)
            with torch.no_grad():
                for tensor, required, value in values:
                    _put_back(tensor, required, value)


def _put_back(tensor: Tensor, required: bool, value: Tensor) -> None:
    """The value that a tensor had, and no graph if it had none."""
    if tensor.requires_grad and not required:  # something was written into it that depends on parameters
        tensor.detach_()
    if tensor.layout is torch.strided and tensor.shape == value.shape and tensor.dtype == value.dtype:
        floating = value.is_floating_point()
        if not (torch.equal(tensor, value) or (floating and torch.allclose(tensor, value, 0, 0, equal_nan=True))):
            tensor.copy_(value)
    elif tensor.layout is torch.strided:
        tensor.data = value
    else:
        tensor.copy_(value)


@contextmanager
def _random_states() -> Iterator[None]:
    """Put the global random states of torch, NumPy and Python back at the end."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    apple = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    numbers, plain = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(numbers)  # noqa: NPY002
        random.setstate(plain)
        if apple is not None:
            torch.mps.set_rng_state(apple)
