"""Where an experiment runs, how large it is, and which random numbers it draws.

Two environment variables govern every experiment of the book (:mod:`initlib.data` has a third):

``INITLIB_DEVICE``
    ``cpu``, ``cuda``, ``cuda:1``, ``mps`` ... overrides the choice made by :func:`device`.
``INITLIB_SEED``
    An integer (0 if unset) that shifts every seed of the book at once.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import TypeVar

import numpy as np
import torch
from threadpoolctl import threadpool_limits

T = TypeVar("T")


def device() -> torch.device:
    """The device that experiments run on: CUDA if there is one, else MPS, else the CPU.

    ``INITLIB_DEVICE`` overrides the choice.

    Raises
    ------
    ValueError
        If ``INITLIB_DEVICE`` does not name a device that this machine has.

    Notes
    -----
    Introduced in chapter 02.
    """
    wanted = os.environ.get("INITLIB_DEVICE", "").strip()
    if wanted:
        try:
            chosen = torch.device(wanted)
            torch.empty(1, device=chosen).add_(1).item()
        except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
            raise ValueError(
                f"INITLIB_DEVICE={wanted!r} is not a device of this machine; "
                "use cpu, cuda, cuda:<index> or mps, or leave it unset"
            ) from error
        return chosen
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def sized(cpu: T, gpu: T) -> T:
    """The size of an experiment: ``cpu`` on a CPU, ``gpu`` on an accelerator.

    Every experiment of the book names both, so that the same cell runs on a laptop within
    seconds and at full size on a GPU. The checks take their tolerance from the run itself and
    hold for either.

    Notes
    -----
    Introduced in chapter 02.
    """
    return cpu if device().type == "cpu" else gpu


def seed(n: int = 0) -> int:
    """A 63-bit seed made of ``n`` and ``INITLIB_SEED``.

    Different pairs (``n``, ``INITLIB_SEED``) give unrelated seeds: adding the two numbers would
    make experiment 1 under shift 0 the same as experiment 0 under shift 1.

    Parameters
    ----------
    n : int
        Number of the experiment, from 0 to 2**32 - 1. Experiments that must be independent of
        each other need different numbers.

    Raises
    ------
    TypeError, ValueError
        If ``n`` or ``INITLIB_SEED`` is not an integer, if ``n`` is negative, or if either does
        not fit in 32 bits.

    Notes
    -----
    Introduced in chapter 01.
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"the seed n must be an integer, got {n!r}")
    if not 0 <= n < 2**32:
        raise ValueError(f"the seed n must not be negative and must be below 2**32, got {n}")
    text = os.environ.get("INITLIB_SEED", "").strip() or "0"
    try:
        shift = int(text)
    except ValueError:
        raise ValueError(f"INITLIB_SEED must be an integer, got {text!r}") from None
    if abs(shift) >= 2**32:
        raise ValueError(f"INITLIB_SEED must lie between -2**32 and 2**32, got {shift}")
    entropy = [int(n), abs(shift), int(shift < 0)]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(n: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A ``torch.Generator`` on ``device``, seeded with :func:`seed` ``(n)``.

    The global random state is not touched. The same seed gives other numbers on another kind
    of device: torch's CPU and CUDA generators are different algorithms.

    Notes
    -----
    Introduced in chapter 01.
    """
    return torch.Generator(device=device).manual_seed(seed(n))


def rng(n: int = 0) -> np.random.Generator:
    """A NumPy generator seeded with :func:`seed` ``(n)``, for what is done by hand in NumPy.

    Notes
    -----
    Introduced in chapter 01.
    """
    return np.random.default_rng(seed(n))


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """One torch thread on a CPU, for work that runs side by side in threads of its own.

    Stacks of small matrices are slower on several threads, and far slower on busy ones.

    Notes
    -----
    Introduced in chapter 05.
    """
    if device.type != "cpu":
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(threads)


def double(x: torch.Tensor) -> torch.Tensor:
    """A tensor in double precision; on the CPU if its device, as Apple's GPUs, has none.

    Notes
    -----
    Introduced in chapter 02.
    """
    return (x.cpu() if x.device.type == "mps" else x).double()


def norm(x: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    """Euclidean norm along ``dim``, in double precision: squares of single precision may overflow.

    Where they do not, rows along the last dimension are summed in single precision, to a relative error near 1e-7 for
    rows of some thousand entries.

    Notes
    -----
    Introduced in chapter 02.
    """
    x = x.cpu() if x.device.type == "mps" else x
    dims = (dim,) if isinstance(dim, int) else dim
    if x.dtype == torch.float32 and (-1 in dims or x.ndim - 1 in dims):
        rows = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        if rows.isfinite().all() and (rows > 1e-15).all():
            x = rows
    return torch.linalg.vector_norm(x, dim=dim, dtype=torch.float64)


def mean_square(x: torch.Tensor) -> float:
    """Mean of the squares of all entries, in double precision; 0 if there are none.

    Notes
    -----
    Introduced in chapter 16.
    """
    x = x.detach().flatten()
    whole = len(x) // 4096 * 4096  # rows that are short enough for norm
    parts = [part for part in (x[:whole].view(-1, 4096), x[whole:].view(1, -1)) if part.numel()]
    return sum(norm(part, (0, 1)).item() ** 2 / x.numel() for part in parts)


def check_count(name: str, value: int) -> None:
    """Raise the error of an argument that must be a positive integer.

    Parameters
    ----------
    name : str
        Name of the argument.
    value : int

    Raises
    ------
    TypeError
        If ``value`` is not an integer.
    ValueError
        If it is below 1.

    Notes
    -----
    Introduced in chapter 02.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_widths(widths: Sequence[int]) -> list[int]:
    """The widths of a network as a list of integers, or the error of an argument that must be such.

    Raises
    ------
    TypeError
        If ``widths`` is not a sequence of integers.
    ValueError
        If there are fewer than two, or one is below 1.

    Notes
    -----
    Introduced in chapter 02.
    """
    try:
        widths = list(widths)
    except TypeError:
        raise TypeError(f"widths must be a sequence of integers, got {widths!r}") from None
    if len(widths) < 2:
        raise ValueError(f"widths must name at least inputs and outputs, got {widths}")
    for width in widths:
        check_count("each of widths", width)
    return [int(width) for width in widths]


def check_positive(name: str, value: float, *, zero: bool = False) -> None:
    """Raise the error of an argument that must be a positive number.

    Parameters
    ----------
    name : str
        Name of the argument.
    value : float
    zero : bool
        Whether zero is allowed, too.

    Raises
    ------
    TypeError
        If ``value`` is not a real number.
    ValueError
        If it is negative, zero or not finite.

    Notes
    -----
    Introduced in chapter 03.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        wanted = "finite and not negative" if zero else "positive and finite"
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
