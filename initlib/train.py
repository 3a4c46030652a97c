r"""Training many networks at once: seeds × schemes × learning rates in one batched computation.

One network is a draw. What a scheme does to training is a statement about a distribution, so each arm of an
experiment is trained from many seeds, and at its own best learning rate. The members' weights are stacked and their
losses computed together (``torch.func.vmap``), so that one backward pass gives every gradient. Replicate :math:`k` has
the same random numbers in every arm and at every rate, for the weights and for the order of the samples: arms are
compared pair by pair. All random numbers are drawn before the first step, so that the seeds may be trained anywhere: in
two threads of this process, or by the workers of an executor.
"""

import copy
import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Real

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from tqdm import tqdm

from initlib import runtime, schemes
from initlib.data import Dataset
from initlib.model import initialize
from initlib.runtime import check_count
from initlib.schemes import Initializer
from initlib.tables import Table

#: How an arm initialises: a scheme, its name, or a function that fills a model in place.
Arm = str | Initializer | Callable[[nn.Module, torch.Generator], object]

#: The named optimisers, at a learning rate of one.
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=1.0),
    "momentum": functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=1.0),
}

# Test samples that are evaluated at once, and the most inputs they may have together.
_EVALUATED, _INPUTS = 250, 2**16

# Convolutional members that are computed together on a CPU. Larger groups are no faster and need more memory.
_GROUP = 4


@dataclass(frozen=True, repr=False)
class Runs:
    """What :func:`train` measured.

    Attributes
    ----------
    arms : tuple of str
    rates : array, shape (arms, rates)
        Learning rates.
    steps : array, shape (records,)
        Numbers of steps after which the test set was evaluated; 0 is before the first.
    loss : array, shape (arms, rates, seeds, steps)
        Loss of each mini-batch, before its step.
    test_loss : array, shape (arms, rates, seeds, records)
    test_accuracy : array, shape (arms, rates, seeds, records)
        Share of the test set, of pixels if those are classified, that is classified correctly; not a number
        if targets are not classes.
    diverged_at : array of int, shape (arms, rates, seeds)
        First step whose loss was not finite, counted from 1; -1 if none was. From there on the
        member's losses are infinite and its accuracy is zero.
    """

    arms: tuple[str, ...]
    rates: np.ndarray
    steps: np.ndarray
    loss: np.ndarray
    test_loss: np.ndarray
    test_accuracy: np.ndarray
    diverged_at: np.ndarray

    @property
    def diverged(self) -> np.ndarray:
        """Which members diverged, shape (arms, rates, seeds)."""
        return self.diverged_at >= 0

    def best_rate(self, record: int = -1) -> np.ndarray:
        """Index of the rate with the lowest test loss, averaged over seeds, for each arm.

        A rate at which any seed diverged has an infinite mean. Report on other seeds than
        those that chose the rate: the lowest of several noisy numbers is too low.

        Parameters
        ----------
        record : int
            Index into ``steps``.

        Raises
        ------
        ValueError
            If an arm diverged at every rate.
        """
        mean = self.test_loss[..., record].mean(-1)
        for arm, losses in zip(self.arms, mean, strict=True):
            if not np.isfinite(losses).any():
                raise ValueError(f"no rate to choose: arm {arm!r} diverged at every one, with some seed")
        return mean.argmin(-1)

    def __repr__(self) -> str:
        arms, rates, seeds, steps = self.loss.shape
        return (
            f"Runs({arms} arms x {rates} rates x {seeds} seeds, {steps} steps; "
            f"{int(self.diverged.sum())} of {self.diverged.size} diverged)"
        )


@dataclass(frozen=True, repr=False)
class Tuned(Table):
    """What :func:`tune` measured, a row for each arm; prints as a table.

    Attributes
    ----------
    runs : Runs
        The runs to report, each arm at its chosen rate: its arrays have one rate.
    rates : array, shape (arms,)
        Chosen rates.
    at_edge : array of bool, shape (arms,)
        Whether the chosen rate is the lowest or the highest of its arm's: a better one may lie beyond.
    tuning : Runs
        The runs that chose, at all rates and from other seeds.
    """

    runs: Runs
    rates: np.ndarray
    at_edge: np.ndarray
    tuning: Runs


def train(
    model: nn.Module,
    dataset: Dataset,
    arms: Mapping[str, Arm],
    *,
    rates: Sequence[float] | Mapping[str, float | Sequence[float]],
    seeds: int,
    steps: int,
    batch: int = 64,
    optimizer: str | Callable[[list[Tensor]], torch.optim.Optimizer] = "sgd",
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    record: int | Sequence[int] = 1,
    seed: int = 0,
    executor: Executor | None = None,
    jobs: int | None = None,
) -> Runs:
    r"""Train every arm at every learning rate from every seed, all at once.

    Parameters
    ----------
    model : torch.nn.Module
        The network, as a template: it is copied, not changed. What an arm does not set starts as it is
        here, running statistics too; what does not require a gradient stays as it started.
    dataset : Dataset
        ``y`` holds classes, of samples or of their pixels, or targets of another kind for another loss.
    arms : mapping of str to scheme, name or callable
        How the weights are drawn: a scheme for all layers, as :func:`initlib.model.initialize`
        applies it, or a function ``arm(model, generator)`` that fills a model in place.
    rates : sequence of float, or a mapping of arm to float or sequence
        Learning rates, for all arms alike or for each its own, equally many.
    seeds : int
        Number of replicates: networks with their own weights and their own order of the samples.
    steps, batch : int
        Steps, and samples a step. Each replicate goes through shuffled epochs.
    optimizer : str or callable
        ``sgd``, ``momentum`` (0.9) or ``adam``; or a function of a list of tensors that returns a
        ``torch.optim`` optimiser of learning rate 1 whose step is proportional to that rate (so without
        weight decay). If it has several groups of tensors, their rates are relative to ``rates``.
    loss : callable
        ``loss(outputs, targets)``, a mean over samples.
    record : int or sequence of int
        Numbers of steps at which the test set is evaluated; a single number asks for so many, evenly
        spaced, the last one at the end.
    seed : int
        Number of the experiment, see :func:`initlib.runtime.seed`.
    executor : concurrent.futures.Executor, optional
        Who trains: a pool of processes, or the workers of a cluster, as ``Client.get_executor()`` of
        ``dask.distributed`` gives them. What is sent (model, data, loss, optimiser) must pickle. Threads of
        this process if left out.
    jobs : int, optional
        Pieces that the seeds are split into, at most one a seed; two on a CPU and one on another device if
        left out. The numbers depend on it, by rounding; they do not depend on who computes a piece.

    Returns
    -------
    Runs

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or a module of the model is random (dropout); the message names it and
        its value. Nothing has been trained then.

    Notes
    -----
    Weights are :math:`\theta = \theta_0 + \eta\,d`, and torch's optimiser moves the displacement :math:`d` at a
    learning rate of one: its state does not depend on :math:`\eta`, so that a single optimiser serves every
    rate. Members do not mix: one that blows up leaves the others as they would have been, to within
    rounding. Computed in single precision, whatever the model's, on the :func:`initlib.runtime.device` of the
    process that computes; on a CPU on one thread a piece (small matrices are multiplied faster that way).

    Whatever mode the template is in, the losses of mini-batches are those of training mode and the test set is
    evaluated in evaluation mode. Each member has buffers of its own: running statistics start as the arm left
    them. Batch normalisation without running statistics sees the test samples that are evaluated together.

    Members are computed all together, but on a CPU those with convolutions in groups of four.

    Introduced in chapter 05; executors in chapter 10.
    """
    arms = _check_arms(arms)
    table = _check_rates(rates, arms)
    for name, value in (("seeds", seeds), ("steps", steps), ("batch", batch)):
        check_count(name, value)
    _check_model(model)
    _check_dataset(dataset)
    if not callable(loss):
        raise TypeError(f"loss must be a function of outputs and targets, got {loss!r}")
    if batch > len(dataset.x):
        raise ValueError(f"batch must be at most the {len(dataset.x)} training samples, got {batch}")
    make_optimizer = _check_optimizer(optimizer)
    records = _check_records(record, steps)
    if executor is not None and (isinstance(executor, type) or not callable(getattr(executor, "submit", None))):
        raise TypeError(f"executor must have submit(), as those of concurrent.futures have, got {executor!r}")
    if jobs is not None:
        check_count("jobs", jobs)

    device = runtime.device()
    # The same pieces, and so the same numbers, whether there are cores for them or not.
    pieces = min(jobs or (2 if device.type == "cpu" else 1), seeds)
    with torch.inference_mode(False), torch.enable_grad(), runtime.one_thread(device):
        numbers = torch.randint(2**62, (seeds,), generator=runtime.generator(seed))
        generators = [torch.Generator().manual_seed(int(number)) for number in numbers]
        start, buffers = _draw(model, arms, generators)
        order = torch.stack([_shuffled(len(dataset.x), batch, steps, generator) for generator in generators], 1)
        here = executor is None
        pool = ThreadPoolExecutor(min(pieces, os.cpu_count() or 1)) if here else nullcontext(executor)
        with pool as workers:
            futures = []
            for k, part in enumerate(torch.arange(seeds).tensor_split(pieces)):
                states = [{name: values[part] for name, values in each.items()} for each in (start, buffers)]
                shown = here and k == 0 and _watched()
                futures.append(
                    workers.submit(
                        _train, model, dataset, table, *states, order[:, part], make_optimizer, loss, records, shown
                    )
                )
            try:
                done = [each.result() for each in tqdm(futures, disable=here or not _watched(), leave=False)]
            finally:
                for future in futures:
                    future.cancel()  # what has not begun, if one has failed
    columns = zip(*done, strict=True)
    return Runs(tuple(arms), table, np.array(records), *(np.concatenate(parts, 2) for parts in columns))


def tune(
    model: nn.Module,
    dataset: Dataset,
    arms: Mapping[str, Arm],
    *,
    rates: Sequence[float] | Mapping[str, float | Sequence[float]],
    seeds: int,
    tuning_seeds: int = 3,
    steps: int,
    record: int | Sequence[int] = 1,
    at: int = -1,
    seed: int = 0,
    **options,
) -> Tuned:
    """Choose each arm's learning rate on seeds of their own, then train at it from fresh ones.

    The rate with the lowest test loss, averaged over the tuning seeds, is chosen. That loss is the lowest of several
    noisy ones and so too low on average: what is reported comes from seeds that had no part in the choice.

    Parameters
    ----------
    model : torch.nn.Module
    dataset : Dataset
    arms : mapping of str to scheme, name or callable
    rates : sequence of float, or a mapping of arm to float or sequence
        The grid, for all arms alike or for each its own, equally many rates.
    seeds, tuning_seeds : int
        Replicates that are reported, and those that choose the rate.
    steps : int
    record : int or sequence of int
        When the test set is evaluated, as for :func:`train`.
    at : int
        The record that chooses, as an index: the last one if left out.
    seed : int
        Number of the experiment whose seeds tune; those of ``seed + 1`` are reported.
    **options
        ``batch``, ``optimizer``, ``loss``, ``executor`` and ``jobs``, as for :func:`train`.

    Returns
    -------
    Tuned

    Raises
    ------
    TypeError, ValueError
        As for :func:`train`, before anything is trained; ValueError also, after tuning, if an arm diverged at
        every rate.

    Notes
    -----
    Replicates are paired between arms, in tuning and in what is reported, as in :func:`train`.

    Introduced in chapter 10.
    """
    for name, value in (("seeds", seeds), ("steps", steps), ("tuning_seeds", tuning_seeds)):
        check_count(name, value)
    records = _check_records(record, steps)
    if isinstance(at, bool) or not isinstance(at, (int, np.integer)):
        raise TypeError(f"at must be an integer, got {at!r}")
    if not -len(records) <= at < len(records):
        raise ValueError(f"at must be the index of one of {len(records)} records, got {at}")
    for number in (seed, seed + 1 if isinstance(seed, (int, np.integer)) else seed):
        runtime.seed(number)
    options |= {"steps": steps, "record": records}
    tuning = train(model, dataset, arms, rates=rates, seeds=tuning_seeds, seed=seed, **options)
    chosen = tuning.rates[range(len(arms)), tuning.best_rate(at)]
    at_edge = (chosen == tuning.rates.min(1)) | (chosen == tuning.rates.max(1))
    best = dict(zip(tuning.arms, chosen.tolist(), strict=True))
    runs = train(model, dataset, arms, rates=best, seeds=seeds, seed=seed + 1, **options)
    ends = runs.test_loss[:, 0, :, at]
    rows = [
        (arm, rate, "yes" if edge else "", loss.mean(), int(diverged.sum()))
        for arm, rate, edge, loss, diverged in zip(runs.arms, chosen, at_edge, ends, runs.diverged[:, 0], strict=True)
    ]
    headers = ("arm", "rate", "at an edge", "test loss", "diverged")
    return Tuned(headers, rows, runs, chosen, at_edge, tuning)


def _train(model, dataset, table, start, buffers, order, make_optimizer, loss, records, shown):
    """One piece, in whatever process: the loop, on one thread of a CPU or on the device of that process."""
    device = runtime.device()
    with torch.inference_mode(False), torch.enable_grad(), runtime.one_thread(device):
        return _loop(model, dataset, table, start, buffers, order, make_optimizer, loss, records, device, shown)


def _loop(model, dataset, table, start, buffers, order, make_optimizer, loss, records, device, shown):
    """Steps and records; ``start`` and ``buffers`` map names to tensors of shape (seeds, arms, 1, ...)."""
    steps, seeds = order.shape[:2]
    names, frozen = list(start), {name for name, p in model.named_parameters() if not p.requires_grad}
    start = [start[name].to(device) for name in names]
    eta = torch.tensor(table, dtype=torch.float32, device=device)
    displacement = [w.new_zeros(*w.shape[:2], table.shape[1], *w.shape[3:]) for w in start]
    optimizer = make_optimizer(displacement)
    _check_step(optimizer)
    buffers = {name: b.to(device).repeat_interleave(table.shape[1], 2).flatten(0, 2) for name, b in buffers.items()}
    members = _Members(model, buffers, loss, seeds * eta.numel(), device)

    def weights():
        """Of all members, in the order (seeds, arms, rates)."""
        moved = (w + eta.reshape(*eta.shape, *[1] * (w.ndim - 3)) * d for w, d in zip(start, displacement, strict=True))
        return dict(zip(names, (w.flatten(0, 2) for w in moved), strict=True))

    x, y, order = dataset.x.to(device), dataset.y.to(device), order.to(device)
    losses = eta.new_full((steps, seeds, eta.numel()), math.inf)
    alive = torch.ones(seeds, eta.numel(), dtype=torch.bool, device=device)
    diverged_at = torch.full((seeds, eta.numel()), -1, device=device)
    evaluated = [members.evaluate(weights(), dataset, alive)] if records[0] == 0 else []
    for step in tqdm(range(1, steps + 1), disable=not shown, leave=False):
        sample = order[step - 1].repeat_interleave(eta.numel(), 0)
        values, gradients = members.learn(weights(), x, y, sample)
        values = values.view_as(alive)
        diverged_at[alive & ~values.isfinite()] = step
        alive &= values.isfinite()
        losses[step - 1] = torch.where(alive, values, math.inf)
        for name, d, gradient in zip(names, displacement, gradients, strict=True):
            d.grad = torch.zeros_like(d) if name in frozen else gradient.view_as(d)
        optimizer.step()
        if step in records:
            evaluated.append(members.evaluate(weights(), dataset, alive))

    def tidy(values):  # (records, seeds, arms · rates) to (arms, rates, seeds, records)
        return values.unflatten(2, eta.shape).permute(2, 3, 1, 0).cpu().numpy()

    test_loss, test_accuracy = (tidy(torch.stack(column)) for column in zip(*evaluated, strict=True))
    return tidy(losses), test_loss, test_accuracy, tidy(diverged_at[None])[..., 0]


class _Members:
    """Many networks of one architecture, with stacked weights and buffers, in groups that are computed together."""

    def __init__(self, model, buffers, loss, members, device):
        self.template, self.buffers, self.loss = copy.deepcopy(model).to(device), buffers, loss
        together = _GROUP if device.type == "cpu" and _has_convolutions(model) else members
        self.groups = [slice(k, k + together) for k in range(0, members, together)]

    def call(self, weights, buffers, x, y):
        """Outputs and loss of one member, and its buffers afterwards."""
        state = {**weights, **buffers}
        outputs = functional_call(self.template, state, (x,))
        loss = self.loss(outputs, y)
        if not isinstance(loss, Tensor) or loss.ndim:
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss must return one number, the mean over samples, as a tensor, got {what}")
        return outputs, loss, {name: state[name] for name in buffers}

    def learn(self, weights, x, y, sample):
        """Losses of the members and gradients of their weights, in training mode; ``sample`` is (members, batch)."""
        self.template.train()
        of_members = vmap(lambda *arguments: self.call(*arguments)[1:])
        values, gradients = [], []
        for group in self.groups:
            parameters = {name: w[group].requires_grad_() for name, w in weights.items()}
            buffers = {name: b[group] for name, b in self.buffers.items()}
            value, buffers = of_members(parameters, buffers, x[sample[group]], y[sample[group]])
            values.append(value.detach())
            gradients.append(torch.autograd.grad(value.sum(), list(parameters.values()), materialize_grads=True))
            for name, b in buffers.items():
                self.buffers[name][group] = b.detach()
        if len(self.groups) == 1:
            return values[0], gradients[0]
        return torch.cat(values), [torch.cat(parts) for parts in zip(*gradients, strict=True)]

    @torch.no_grad()
    def evaluate(self, weights, dataset, alive) -> tuple[Tensor, Tensor]:
        """Loss and accuracy on the test set, each (seeds, arms · rates), in evaluation mode."""
        self.template.eval()
        classes = not dataset.y_test.is_floating_point()

        def of_member(weights, buffers, x, y):
            outputs, loss, _ = self.call(weights, buffers, x, y)
            classified = classes and outputs.ndim == y.ndim + 1
            return loss, (outputs.argmax(1) == y).float().mean() if classified else outputs.new_full((), math.nan)

        # Targets are batched over members too: torch's batching rules for some losses (mse_loss) need it.
        both = vmap(of_member, in_dims=(0, 0, None, 0))
        total = torch.zeros(2, alive.numel(), dtype=torch.float64, device="cpu")
        samples = max(1, min(_EVALUATED, _INPUTS // dataset.x_test[0].numel()))
        for x, y in zip(dataset.x_test.split(samples), dataset.y_test.split(samples), strict=True):
            x, y = x.to(alive.device), y.to(alive.device)
            for group in self.groups:
                state = [{name: w[group] for name, w in each.items()} for each in (weights, self.buffers)]
                part = torch.stack(both(*state, x, y.expand(len(total[0, group]), *y.shape)))
                total[:, group] += len(x) * part.cpu().double()
        values, right = total.view(2, *alive.shape) / len(dataset.x_test)
        fine = alive.cpu() & values.isfinite()
        return torch.where(fine, values, math.inf), torch.where(fine | right.isnan(), right, 0.0)


def _has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())


def _draw(model, arms, generators) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and buffers of every seed and arm, (seeds, arms, 1, ...): the same random numbers in each arm."""
    template = copy.deepcopy(model).cpu().float()
    members = []
    for generator in generators:
        state = generator.get_state()
        for arm in arms.values():
            scratch = copy.deepcopy(template)
            generator.set_state(state)
            if isinstance(arm, Initializer):
                initialize(scratch, arm, generator=generator)
            else:
                arm(scratch, generator)
            members.append((dict(scratch.named_parameters()), dict(scratch.named_buffers())))
    shape = (len(generators), len(arms), 1)
    return tuple(
        {name: torch.stack([m[name].detach() for m in each]).unflatten(0, shape) for name in each[0]}
        for each in zip(*members, strict=True)
    )


def _shuffled(samples: int, batch: int, steps: int, generator: torch.Generator) -> Tensor:
    """Indices of the samples of each step, (steps, batch): shuffled epochs of whole batches."""
    # Arms may draw different amounts of random numbers; the order must not depend on that.
    generator.manual_seed(generator.initial_seed() + 1)
    whole = samples // batch
    epochs = [torch.randperm(samples, generator=generator)[: whole * batch] for _ in range(-(-steps // whole))]
    return torch.cat(epochs).reshape(-1, batch)[:steps]


def _watched() -> bool:
    """Whether somebody looks at the progress: in a terminal or in a live notebook, not in a build."""
    return sys.stderr.isatty() or ("JPY_SESSION_NAME" in os.environ and "CI" not in os.environ)


def _check_arms(arms: Mapping[str, Arm]) -> dict[str, Arm]:
    if not isinstance(arms, Mapping):
        raise TypeError(f"arms must map names to schemes, got {type(arms).__name__}")
    if not arms:
        raise ValueError("arms is empty: there is nothing to train")
    named = {}
    for name, arm in arms.items():
        named[name] = arm if callable(arm) and not isinstance(arm, Initializer) else schemes.get(arm)
    return named


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not any(True for _ in model.parameters()):
        raise ValueError(f"model has no parameters to train: {model}")
    for name, module in model.named_modules():
        packed = isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.dropout > 0
        dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if packed or dropout or isinstance(module, nn.RReLU):
            raise ValueError(f"model must not be random, got {name or 'model'}: {module}")
        norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        if norm and module.momentum is None:  # its weight is a number that differs by step, which vmap cannot read
            raise ValueError(
                f"model must not average over all batches: give {name or 'model'} a momentum, got {module}"
            )


def _check_rates(rates, arms: Mapping[str, Arm]) -> np.ndarray:
    """Rates as an array (arms, rates)."""
    if isinstance(rates, Mapping) and set(rates) != set(arms):
        raise ValueError(f"rates must name the arms {', '.join(arms)}, got {', '.join(map(str, rates))}")
    of_arms = [rates[name] if isinstance(rates, Mapping) else rates for name in arms]
    try:
        rows = [np.atleast_1d(np.asarray(each, dtype=float)) for each in of_arms]
    except (TypeError, ValueError) as error:
        raise ValueError(f"rates must be numbers, got {rates!r}") from error
    if len({row.shape for row in rows}) > 1 or rows[0].ndim != 1 or rows[0].size == 0:
        raise ValueError(f"rates must be equally many for each arm, at least one, got {rates!r}")
    table = np.stack(rows)
    if not (np.isfinite(table).all() and (table > 0).all()):
        raise ValueError(f"rates must be positive and finite, got {rates!r}")
    return table


def _check_optimizer(optimizer) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    if callable(optimizer):
        return optimizer
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, or a function, got {optimizer!r}")
    return OPTIMIZERS[optimizer]


def _check_dataset(dataset: Dataset) -> None:
    if not isinstance(dataset, Dataset):
        raise TypeError(f"dataset must be a Dataset, got {type(dataset).__name__}")
    for name in ("x", "x_test"):
        x, y = getattr(dataset, name), getattr(dataset, name.replace("x", "y"))
        if x.is_floating_point() and x.dtype != torch.float32:
            raise TypeError(f"dataset.{name} must be float32, or integers, got {x.dtype}")
        if len(x) != len(y) or not len(x):
            raise ValueError(
                f"dataset.{name} must have a target for each sample, and a sample, got {len(x)} and {len(y)}"
            )


def _check_step(optimizer) -> None:
    """Whether what an optimiser does is proportional to the rate that multiplies it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must return a torch.optim.Optimizer, got {optimizer!r}")
    groups = optimizer.param_groups
    if (len(groups) == 1 and groups[0]["lr"] != 1) or any(group.get("weight_decay") for group in groups):
        raise ValueError(f"optimizer must have learning rate 1 and no weight decay, got {optimizer}")


def _check_records(record: int | Sequence[int], steps: int) -> list[int]:
    """Ascending numbers of steps."""
    if np.ndim(record) == 0:
        check_count("record", record)
        return sorted({round(steps * (k + 1) / record) for k in range(record)} - {0})
    if np.ndim(record) != 1 or any(isinstance(k, bool) or not isinstance(k, Real) for k in record):
        raise TypeError(f"record must be an integer or a sequence of integers, got {record!r}")
    records = sorted(record)
    if not records or len(set(records)) < len(records) or not set(records) <= set(range(steps + 1)):
        raise ValueError(f"record must hold different numbers of steps from 0 to {steps}, got {record!r}")
    return [int(number) for number in records]
