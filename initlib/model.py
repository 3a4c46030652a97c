"""Initialise a whole model, and say what was set and what was left."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from initlib import schemes
from initlib.fans import SUPPORTED
from initlib.schemes import Initializer
from initlib.tables import Table


@dataclass(frozen=True, repr=False)
class Report(Table):
    """What :func:`initialize` did, a row for each parameter of the model; prints as a table.

    Attributes
    ----------
    initialised, left : tuple of str
        Names of the parameters that were set, and of those that were not.
    """

    initialised: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def initialize(
    model: nn.Module,
    scheme: str | Initializer,
    *,
    overrides: Mapping[str, str | Initializer | None] | None = None,
    generator: torch.Generator | None = None,
) -> Report:
    """Initialise the linear layers and convolutions of a model in place; biases become zero.

    Every parameter is set at most once: a weight that layers share takes the scheme of one that
    ``overrides`` names, is left if it names none but with ``None``, and else takes the fans of
    the first linear layer or convolution that uses it.
    Left as they are, with the reason in the report: embeddings (they look up, they do not sum),
    normalisation layers, recurrent and attention layers with packed weights, weights that are
    computed from others (weight norm and other parametrisations), and whatever else is not a
    layer that :func:`initlib.fans.fans` knows.
    ``torch_default`` draws the biases as torch does. The padding row of an embedding that is
    set, itself or through a layer that shares its weight, is zero.

    Parameters
    ----------
    model : torch.nn.Module
    scheme : str or Initializer
        A scheme, or the name of one in :data:`initlib.schemes.SCHEMES`.
    overrides : mapping of str to scheme, name or None, optional
        Other schemes by module name (``"head"``, ``"blocks.*.out"``; wildcards as in file
        names); ``None`` leaves a layer alone. The last pattern that fits decides. An embedding
        is set only when it is named here.
    generator : torch.Generator, optional
        Source of the random numbers; torch's global one if left out.

    Returns
    -------
    Report

    Raises
    ------
    TypeError
        If ``model`` is not a module, or a scheme is neither scheme nor name.
    ValueError
        If a name is unknown, if a pattern of ``overrides`` fits no layer that could be set, or
        if a layer is lazy or cannot hold the scheme's scale. Nothing has been changed then.

    Notes
    -----
    Introduced in chapter 04.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if overrides is not None and not isinstance(overrides, Mapping):
        raise TypeError(f"overrides must map names to schemes, got {overrides!r}")
    plan, kept, reasons = _plan(model, schemes.get(scheme), overrides or {})
    for layer, chosen in plan:
        chosen.check(layer.weight, chosen.connections(layer), generator)
    done: dict[int, str] = {}
    for layer, chosen in plan:
        _fill_layer(layer, chosen, generator, done, kept)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and id(module.weight) in done:
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()
    rows, initialised, left = [], [], []
    for name, parameter in model.named_parameters():
        (initialised if id(parameter) in done else left).append(name)
        what = done.get(id(parameter)) or _reason(name, parameter, kept, reasons)
        rows.append((name, tuple(parameter.shape), what))
    return Report(("parameter", "shape", "done"), rows, tuple(initialised), tuple(left))


def _plan(
    model: nn.Module, scheme: Initializer, overrides: Mapping[str, str | Initializer | None]
) -> tuple[list[tuple[nn.Module, Initializer]], set[int], dict[str, str]]:
    """The layers to set with their schemes, those named in overrides first; parameters to keep; why others are left."""
    chosen_by_pattern = {pattern: None if each is None else schemes.get(each) for pattern, each in overrides.items()}
    first, plan, kept, reasons, used = [], [], set(), {}, set()
    for name, module in model.named_modules():
        reason = _why_not(module)
        if reason:
            reasons[name] = reason
            continue
        chosen, named = scheme, False
        reasons[name] = "neither the weight nor the bias of its layer"
        if isinstance(module, nn.Embedding):
            chosen = None
            reasons[name] = "an embedding looks up: name it in overrides"
        for pattern, other in chosen_by_pattern.items():
            if fnmatch.fnmatchcase(name, pattern):
                chosen, named = other, True
                used.add(pattern)
        if chosen is not None:
            (plan if not named else first).append((module, chosen))
        elif named:
            kept.update(map(id, module.parameters(recurse=False)))
    for module, _ in first:  # named with a scheme: this outweighs a None elsewhere
        kept.difference_update(map(id, module.parameters(recurse=False)))
    for pattern in overrides:
        if pattern not in used:
            raise ValueError(
                f"overrides: {pattern!r} fits no layer that can be initialised; these can: "
                + ", ".join(repr(n) for n, m in model.named_modules() if not _why_not(m))
            )
    return first + plan, kept, reasons


def _why_not(module: nn.Module) -> str:
    """Why a module cannot be initialised by its fans; empty if it can."""
    if isinstance(module, nn.MultiheadAttention):
        return "query, key and value are packed in one matrix"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "gates are packed in one matrix"
    if not isinstance(module, SUPPORTED):
        return f"{type(module).__name__} is not a layer with fans"
    if module._parameters.get("weight") is None:
        return "its weight is computed from other parameters"
    return ""


def _fill_layer(
    layer: nn.Module,
    scheme: Initializer,
    generator: torch.Generator | None,
    done: dict[int, str],
    kept: set[int],
) -> None:
    if id(layer.weight) not in done and id(layer.weight) not in kept:
        connections = scheme.connections(layer)
        scheme.fill_(layer.weight, connections, generator=generator)
        done[id(layer.weight)] = scheme.name
    bias = layer._parameters.get("bias")
    if bias is not None and id(bias) not in done and id(bias) not in kept:
        done[id(bias)] = scheme.fill_bias_(layer, generator=generator)


def _reason(parameter_name: str, parameter: nn.Parameter, kept: set[int], reasons: Mapping[str, str]) -> str:
    """Why a parameter was left: the reason of the innermost module that has one."""
    if id(parameter) in kept:
        return "left: as overrides says"
    module_name = parameter_name
    while module_name:
        module_name = module_name.rpartition(".")[0]
        if module_name in reasons:
            return f"left: {reasons[module_name]}"
    return f"left: {reasons.get('', 'not a layer with fans')}"
