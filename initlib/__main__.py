"""The package from the command line: ``python -m initlib probe package.module:factory --input 32,3,32,32``."""

import argparse
import importlib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

import torch
from torch import nn

from initlib import probe, runtime
from initlib.probe import Probe

#: Exit statuses: nothing found, something found, bad usage.
SOUND, FOUND, USAGE = 0, 1, 2

# Modules that look up integers.
_TABLES = (nn.Embedding, nn.EmbeddingBag)


class _Usage(Exception):
    """What is wrong with a command, in one line."""


class _Parser(argparse.ArgumentParser):
    """One that reports a wrong command in one line."""

    def error(self, message: str):
        raise _Usage(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 without findings, 1 with findings, 2 for bad usage.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the process if left out.

    Notes
    -----
    Introduced in chapter 16.
    """
    try:
        options = _parser().parse_args(arguments)
        found = _probe(options)
    except _Usage as error:
        print(f"initlib: error: {error}", file=sys.stderr)
        return USAGE
    print(json.dumps(_finite(found.to_dict()), indent=1) if options.json else found)
    return FOUND if found.findings else SOUND


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m initlib", description="Look at how a model is initialised.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "probe",
        help="signal and gradient at each layer, and what is wrong",
        description="Send a random batch through a model and a random gradient back; say what is wrong with its "
        "initialisation. Exit status: 0 if nothing is, 1 if something is, 2 for bad usage.",
    )
    command.add_argument("model", metavar="module:name", help="a module class, a function that builds one, or a module")
    command.add_argument(
        "--input", action="append", required=True, metavar="SIZES", help="shape of an input, as 32,3,32,32; repeatable"
    )
    command.add_argument(
        "--integers", action="append", type=int, metavar="HIGH", default=[],
        help="draw integers below HIGH, not N(0, 1); given k times, it is for the first k inputs",
    )  # fmt: skip
    command.add_argument("--dtype", default="float32", help="of the model and of real inputs (float32)")
    command.add_argument("--seed", type=int, default=0, help="of the model, the batch and the gradient (0)")
    command.add_argument("--layers", action="append", metavar="PATTERN", help="names of layers; repeatable")
    command.add_argument("--device", default="cpu", help="where to compute (cpu)")
    command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _probe(options: argparse.Namespace) -> Probe:
    dtype = getattr(torch, options.dtype, None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise _Usage(f"--dtype must name a floating-point type of torch, got {options.dtype!r}")
    shapes = [_shape(text) for text in options.input]
    if len(options.integers) > len(shapes):
        raise _Usage(f"--integers is given {len(options.integers)} times for {len(shapes)} inputs")
    if any(high < 1 for high in options.integers):
        raise _Usage(f"--integers must be positive, got {min(options.integers)}")
    try:
        device = torch.device(options.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise _Usage(f"--device {options.device!r} is not there: {_line(error)}") from None
    try:
        generator = runtime.generator(options.seed)
    except (TypeError, ValueError) as error:
        raise _Usage(f"--seed: {_line(error)}") from None
    model = _model(options.model, runtime.seed(options.seed)).to(device, dtype)
    batch = []
    for k, shape in enumerate(shapes):
        if k < len(options.integers):
            values = torch.randint(options.integers[k], shape, generator=generator)
        else:
            values = torch.randn(shape, generator=generator).to(dtype)
        batch.append(values.to(device))
    try:
        with _alone():
            return probe(model, tuple(batch), layers=options.layers or "*", seed=options.seed)
    except (Exception, SystemExit) as error:
        hint = ""
        if len(options.integers) < len(shapes) and any(isinstance(each, _TABLES) for each in model.modules()):
            hint = " (the model has an embedding: --integers HIGH draws integers below HIGH)"
        raise _Usage(f"cannot probe {options.model}: {type(error).__name__}: {_line(error)}{hint}") from None


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise _Usage(f"--input must be positive sizes with commas between them, as 32,3,32,32, got {text!r}")
    return sizes


def _model(where: str, seed: int) -> nn.Module:
    """The module that a place names, or what it builds; both the import and the building start from the seed."""
    module, separator, names = where.partition(":")
    if not (module and separator and names):
        raise _Usage(f"the model must be named as package.module:name, got {where!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    torch.manual_seed(seed)
    try:
        with _alone():
            found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise _Usage(f"cannot import {module!r}: {type(error).__name__}: {_line(error)}") from None
    for name in names.split("."):
        if not hasattr(found, name):
            raise _Usage(f"{module!r} has no {names!r}")
        found = getattr(found, name)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise _Usage(f"{where!r} is neither a torch.nn.Module nor builds one, but {type(found).__name__}")
        torch.manual_seed(seed)
        try:
            with _alone():
                found = found()
        except (Exception, SystemExit) as error:
            raise _Usage(f"{where!r} cannot be built: {type(error).__name__}: {_line(error)}") from None
    if not isinstance(found, nn.Module):
        raise _Usage(f"{where!r} must build a torch.nn.Module, got {type(found).__name__}")
    return found


@contextmanager
def _alone() -> Iterator[None]:
    """A user's code gets none of this command's arguments, and what it prints is no part of the result."""
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv = arguments


def _line(error: BaseException) -> str:
    """The first line of a message."""
    return (str(error).strip().splitlines() or [""])[0]


def _finite(value):
    """The same with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
