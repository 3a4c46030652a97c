"""Many members at once: each trained as a plain loop of torch would, alone, and what is refused."""

import copy
import dataclasses
import importlib
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from initlib import generator, initialize, nets, schemes
from initlib.data import Dataset
from initlib.train import OPTIMIZERS, Runs, train

MODULE = importlib.import_module("initlib.train")  # `initlib.train` is the function
FIELDS = ("rates", "steps", "loss", "test_loss", "test_accuracy", "diverged_at")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("INITLIB_DEVICE", "cpu")


def classes(samples=24, tested=260, inputs=5, kinds=3, n=0):
    """Classes that depend on the inputs; more test samples than are evaluated at once."""
    x = torch.randn(samples + tested, inputs, generator=generator(3200 + n))
    y = (x[:, :kinds] + 0.3 * torch.randn(len(x), kinds, generator=generator(3300 + n))).argmax(1)
    return Dataset("classes", x[:samples], y[:samples], x[samples:], y[samples:], (inputs,), kinds)


def targets(samples=24, tested=260, inputs=5, outputs=2):
    x = torch.randn(samples + tested, inputs, generator=generator(3210))
    y = torch.sin(x[:, :outputs])
    return Dataset("targets", x[:samples], y[:samples], x[samples:], y[samples:], (inputs,), 0)


def images(samples=24, tested=20, pixels=6, segmented=False):
    """Images of two channels; a class for each, or one for each pixel, that depends on the first channel."""
    x = torch.randn(samples + tested, 2, pixels, pixels, generator=generator(3220))
    y = (x[:, 0] > 0.3).long() if segmented else (x[:, 0].mean((1, 2)) > 0).long()
    return Dataset("images", x[:samples], y[:samples], x[samples:], y[samples:], (pixels, pixels), 2)


MODEL = nets.mlp([5, 6, 3], "tanh")
CLASSES = classes()
ARMS = {"he": "he_normal", "lecun": schemes.lecun_uniform}
DEFAULT = {"arms": ARMS, "rates": [0.1, 0.5], "seeds": 3, "steps": 7, "batch": 8, "seed": 4}


def run(model=MODEL, dataset=CLASSES, **options):
    options = {**DEFAULT, **options}
    return train(model, dataset, options.pop("arms"), **options)


def same(one, other):
    """Whether two runs hold the same numbers to the last bit."""
    return one.arms == other.arms and all(
        np.array_equal(getattr(one, field), getattr(other, field), equal_nan=True) for field in FIELDS
    )


def order_of(samples, **options):
    """Which samples each step of each replicate used, (seeds, steps, samples), read off its losses."""
    assert samples <= 24  # a mean of powers of two is exact in single precision, and tells which they were
    x, y = torch.zeros(samples, 1), 2.0 ** torch.arange(samples)
    dataset = Dataset("order", x, y, x[:1], y[:1], (1,), 0)
    options = {**DEFAULT, **options}
    found = run(nn.Linear(1, 1), dataset, loss=lambda outputs, y: y.mean() + 0 * outputs.sum(), **options)
    assert (found.loss == found.loss[:1, :1]).all()  # every arm and rate the same
    total = np.rint(found.loss[0, 0] * options["batch"]).astype(int)
    return (total[..., None] >> np.arange(samples)) & 1


def keeping(start, scheme="he_normal"):
    """An arm that draws by a scheme, and keeps what it has drawn."""

    def arm(model, source):
        initialize(model, scheme, generator=source)
        start.append(copy.deepcopy(model.state_dict()))

    return arm


def plain_loop(model, dataset, start, order, optimizer, loss, records):
    """One member in double precision: losses, test losses and test accuracies."""
    model = copy.deepcopy(model).double()
    model.load_state_dict(start)
    stepper = optimizer(list(model.parameters()))
    x, y, x_test, y_test = (
        part.double() if part.is_floating_point() else part
        for part in (dataset.x, dataset.y, dataset.x_test, dataset.y_test)
    )
    losses, tested = [], []

    def evaluate():
        model.eval()
        with torch.no_grad():
            outputs = model(x_test)
            right = math.nan if y_test.is_floating_point() else (outputs.argmax(1) == y_test).double().mean().item()
            tested.append((loss(outputs, y_test).item(), right))

    if 0 in records:
        evaluate()
    for step, chosen in enumerate(order, 1):
        mask = torch.from_numpy(chosen).bool()
        model.train()
        value = loss(model(x[mask]), y[mask])
        losses.append(value.item())
        stepper.zero_grad()
        value.backward()
        stepper.step()
        if step in records:
            evaluate()
    return np.array(losses), *np.array(tested).T


OF_TORCH = {
    "sgd": lambda rate: lambda parameters: torch.optim.SGD(parameters, lr=rate),
    "momentum": lambda rate: lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    "adam": lambda rate: lambda parameters: torch.optim.Adam(parameters, lr=rate),
}

# --- against a plain loop ---------------------------------------------------------------------


def agrees_with_plain_loops(model, dataset, optimizer, make, rates, loss, records=(0, 2, 7), steps=7):
    """Single precision, and rate times displacement rather than a sum of small steps: a few thousand roundings."""
    start = []
    arms = {"he": keeping(start), "lecun": keeping(start, "lecun_uniform")}
    options = {"optimizer": optimizer, "loss": loss, "record": list(records), "steps": steps}
    found = run(model, dataset, arms=arms, rates=rates, **options)
    order = order_of(len(dataset.x), steps=steps)
    assert len(start) == 6  # one for each replicate and arm
    for k in range(3):
        for a in range(2):
            for r, rate in enumerate(rates):
                losses, test_losses, accuracies = plain_loop(
                    model, dataset, start[2 * k + a], order[k], make(rate), loss, records
                )
                np.testing.assert_allclose(found.loss[a, r, k], losses, rtol=5e-4)
                np.testing.assert_allclose(found.test_loss[a, r, k], test_losses, rtol=5e-4)
                # two outputs may be equal to within rounding for a sample or two
                off = np.abs(found.test_accuracy[a, r, k] - accuracies)
                assert (np.isnan(accuracies) == np.isnan(off)).all()
                assert (np.nan_to_num(off) <= 2.1 / len(dataset.x_test)).all()
    assert (found.diverged_at == -1).all()
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_member_is_trained_as_by_a_plain_loop(optimizer):
    rates = [0.003, 0.03] if optimizer == "adam" else [0.05, 0.5]
    found = agrees_with_plain_loops(MODEL, CLASSES, optimizer, OF_TORCH[optimizer], rates, F.cross_entropy)
    assert (found.loss[:, 1] != found.loss[:, 0])[..., 1:].all()
    assert (found.loss[:, 1] == found.loss[:, 0])[..., 0].all()


def test_optimizer_of_one_s_own_is_used():
    def nesterov(rate):
        return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.5, nesterov=True)

    agrees_with_plain_loops(MODEL, CLASSES, nesterov(1.0), nesterov, [0.1, 0.3], F.cross_entropy)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_requires_no_gradient_stays_as_it_started(optimizer):
    model = nets.mlp([5, 6, 3], "tanh")
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    only_first = run(model, optimizer=optimizer)
    everything = run(copy.deepcopy(model).requires_grad_(True), optimizer=optimizer)
    assert np.array_equal(only_first.loss[..., 0], everything.loss[..., 0])
    assert not np.array_equal(only_first.loss[..., 1], everything.loss[..., 1])
    nothing = run(copy.deepcopy(model).requires_grad_(False), optimizer=optimizer, record=[0, 7])
    assert np.array_equal(nothing.test_loss[..., 0], nothing.test_loss[..., 1])


def test_targets_that_are_no_classes_are_regressed():
    model = nets.mlp([5, 6, 2], "tanh", bias=False)
    found = agrees_with_plain_loops(model, targets(), "sgd", OF_TORCH["sgd"], [0.05, 0.3], F.mse_loss)
    assert np.isnan(found.test_accuracy).all()
    assert np.isfinite(found.test_loss).all()


def test_convolutions_and_activations_with_parameters_are_trained_too():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.slope, self.head = nn.Conv1d(1, 3, 3, stride=2), nn.PReLU(), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.slope(self.conv(x[:, None])).flatten(1))

    agrees_with_plain_loops(Small(), CLASSES, "sgd", OF_TORCH["sgd"], [0.1], F.cross_entropy)


class Normalised(nn.Module):
    """Convolutions with batch normalisation, one of them with a momentum of its own, and a head."""

    def __init__(self, head):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, momentum=0.4, affine=False), nn.ReLU()),
        )
        self.head = head

    def forward(self, x):
        return self.head(self.body(x))


RECOGNISER = Normalised(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)))
SEGMENTER = Normalised(nn.Conv2d(4, 2, 1))


@pytest.mark.parametrize("training", [True, False])
def test_batch_normalisation_trains_on_the_batch_and_is_tested_on_running_statistics(training):
    model = copy.deepcopy(RECOGNISER).train(training)
    agrees_with_plain_loops(model, images(), "sgd", OF_TORCH["sgd"], [0.1, 0.3], F.cross_entropy)


def test_pixels_are_classified_one_by_one():
    found = agrees_with_plain_loops(
        SEGMENTER, images(segmented=True), "adam", OF_TORCH["adam"], [0.03], F.cross_entropy, (0, 30), 30
    )
    assert (found.test_accuracy[..., -1] > 0.75).all()
    assert (found.test_loss[..., -1] < found.test_loss[..., 0]).all()


class Counting(nn.Module):
    """A layer that counts its batches, and an offset that is no parameter."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("offset", torch.arange(3.0) / 4, persistent=False)

    def forward(self, x):
        if self.training:
            self.batches = self.batches + 1  # another tensor, where batch normalisation fills the same one
        return self.layer(x) / (1 + self.batches) + self.offset


def test_other_buffers_are_members_own_too():
    agrees_with_plain_loops(Counting(), CLASSES, "sgd", OF_TORCH["sgd"], [0.1, 0.5], F.cross_entropy)


def test_buffers_start_where_an_arm_leaves_them():
    def counted(model, source):
        assert model.batches == 0  # whatever the arm before has done
        assert model.offset[0] == 0
        initialize(model, "he_normal", generator=source)
        model.batches.fill_(3)
        model.offset.fill_(1.0)

    found = run(Counting(), arms={"counted": counted, "he": "he_normal", "again": counted}, record=[0, 7])
    assert np.array_equal(found.loss[0], found.loss[2])
    assert np.array_equal(found.test_loss[0], found.test_loss[2])
    assert not np.isclose(found.loss[0, 0, :, 0], found.loss[1, 0, :, 0]).any()
    layer, start = nn.Linear(5, 3), []
    run(layer, arms={"he": keeping(start)}, seeds=1, steps=1)
    layer.load_state_dict(start[0])
    expected = F.cross_entropy(layer(CLASSES.x_test) / 4 + 1, CLASSES.y_test).item()
    np.testing.assert_allclose(found.test_loss[0, :, 0, 0], expected, rtol=1e-5)


def test_running_statistics_that_an_arm_sets_are_used():
    def informed(model, source):
        initialize(model, "he_normal", generator=source)
        model.train()
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.momentum = 1.0
        model(images().x)

    arms = {"informed": informed, "he": "he_normal"}
    found = run(RECOGNISER, images(), arms=arms, record=[0])
    assert not np.isclose(found.test_loss[0, 0], found.test_loss[1, 0], rtol=1e-3).all()
    np.testing.assert_allclose(found.loss[0, ..., 0], found.loss[1, ..., 0], rtol=1e-6)


@pytest.mark.parametrize("group", [1, 3, 1000])
@pytest.mark.parametrize("segmented", [False, True])
def test_groups_of_members_change_nothing_but_rounding(group, segmented, monkeypatch):
    model, data = (SEGMENTER, images(segmented=True)) if segmented else (RECOGNISER, images())
    options = {"arms": {**ARMS, "wild": "he_normal"}, "record": [0, 7]}
    options["rates"] = {"he": [0.1, 0.3], "lecun": [0.1, 0.3], "wild": [0.1, 1e38]}
    expected = run(model, data, **options)
    monkeypatch.setattr(MODULE, "_GROUP", group)
    found = run(model, data, **options)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-4)
    np.testing.assert_allclose(found.test_loss, expected.test_loss, rtol=1e-4)
    np.testing.assert_array_equal(found.diverged_at, expected.diverged_at)
    assert not found.diverged[:, 0].any()


def test_test_set_is_evaluated_in_pieces_that_change_nothing(monkeypatch):
    expected = run(RECOGNISER, images(), record=2)
    monkeypatch.setattr(MODULE, "_INPUTS", 3 * images().x[0].numel())
    found = run(RECOGNISER, images(), record=2)
    np.testing.assert_allclose(found.test_loss, expected.test_loss, rtol=1e-6)
    np.testing.assert_allclose(found.test_accuracy, expected.test_accuracy, rtol=1e-6)
    monkeypatch.setattr(MODULE, "_INPUTS", 1)  # images larger than that go one by one
    np.testing.assert_allclose(run(RECOGNISER, images()).test_loss, expected.test_loss[..., -1:], rtol=1e-6)


def test_integers_that_are_no_classes_have_no_accuracy():
    dataset = Dataset("counts", CLASSES.x, CLASSES.y, CLASSES.x_test, CLASSES.y_test, (5,), 0)
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))
    found = run(model, dataset, rates=[0.01], loss=lambda outputs, y: (outputs - y).square().mean())
    assert np.isnan(found.test_accuracy).all()
    assert np.isfinite(found.test_loss).all()


def test_training_lowers_the_loss():
    found = run(dataset=classes(samples=240), rates=[0.5], steps=60, batch=24, record=[0, 60])
    assert (found.test_loss[..., 1] < found.test_loss[..., 0] - 0.1).all()
    assert (found.test_accuracy[..., 1] > 0.5).all()


# --- random numbers ---------------------------------------------------------------------------


def test_epochs_are_shuffled_and_every_replicate_has_its_own_order():
    order = order_of(20, batch=8, steps=7, seeds=5)
    assert (order.sum(-1) == 8).all()
    for replicate in order:
        for epoch in (replicate[0:2], replicate[2:4], replicate[4:6]):  # 16 of 20 samples, in whole batches
            assert epoch.sum(0).max() == 1
    assert len({each.tobytes() for each in order}) == 5
    assert len({step.tobytes() for step in order[0]}) > 3
    whole = order_of(24, batch=8, steps=6, seeds=5)  # the batches too are shuffled, not only the samples left out
    assert len({replicate[0].tobytes() for replicate in whole}) > 2
    assert (whole[:, :3].sum(1) == 1).all()
    assert (whole[:, :3] != whole[:, 3:]).any()
    full = order_of(24, batch=24, steps=3)
    assert (full == 1).all()


def test_order_depends_on_the_seed_alone(monkeypatch):
    order = order_of(20)
    assert np.array_equal(order, order_of(20, arms={"one": "zeros"}, rates=[1.0, 2.0, 3.0]))
    assert np.array_equal(order, order_of(20, arms={"greedy": lambda model, source: torch.rand(99, generator=source)}))
    assert not np.array_equal(order, order_of(20, seed=5))
    monkeypatch.setenv("INITLIB_SEED", "77")
    assert not np.array_equal(order, order_of(20))


def test_replicates_are_paired_over_arms_and_rates():
    start = []
    run(arms={"a": keeping(start), "b": keeping(start), "c": keeping(start, "lecun_normal")}, steps=1)
    for k in range(3):
        a, b, c = start[3 * k : 3 * k + 3]
        for name in a:
            assert torch.equal(a[name], b[name])
            torch.testing.assert_close(a[name], math.sqrt(2) * c[name])
    assert len({each["0.weight"].numpy().tobytes() for each in start[::3]}) == 3
    found = run(arms={"a": "he_normal", "b": "he_normal"}, rates=[0.1, 0.1])
    assert np.array_equal(found.loss[0], found.loss[1])
    assert np.array_equal(found.loss[:, 0], found.loss[:, 1])
    assert (found.loss[0, 0, 0] != found.loss[0, 0, 1]).all()


def test_runs_repeat_themselves_exactly():
    assert same(run(record=3), run(record=3))
    assert not same(run(), run(seed=5))


def test_shift_moves_every_number(monkeypatch):
    first = run()
    monkeypatch.setenv("INITLIB_SEED", "123")
    second = run()
    assert (first.loss != second.loss).all()


def test_members_do_not_depend_on_which_others_run_along():
    arms = {"zeros": "zeros", **ARMS, "torch": "torch_default"}
    many = run(arms=arms, rates=[0.01, 0.1, 0.5, 3.0], record=2)
    few = run(rates=[0.1, 0.5], record=2)
    for field in ("loss", "test_loss"):
        np.testing.assert_allclose(getattr(many, field)[1:3, 1:3], getattr(few, field), rtol=1e-5)
    np.testing.assert_allclose(many.test_accuracy[1:3, 1:3], few.test_accuracy, atol=1.1 / 260)


def test_longer_runs_begin_like_shorter_ones():
    short, long = run(steps=4), run(steps=9, record=[4, 9])
    np.testing.assert_allclose(long.loss[..., :4], short.loss, rtol=1e-6)
    np.testing.assert_allclose(long.test_loss[..., 0], short.test_loss[..., 0], rtol=1e-6)


# --- arms and rates ---------------------------------------------------------------------------


def test_arms_are_schemes_names_or_functions():
    def by_hand(model, source):
        initialize(model, "he_normal", generator=source)

    found = run(arms={"name": "he_normal", "scheme": schemes.he_normal, "function": by_hand})
    assert found.arms == ("name", "scheme", "function")
    assert np.array_equal(found.loss[0], found.loss[1])
    assert np.array_equal(found.loss[0], found.loss[2])


def test_what_an_arm_does_not_set_starts_as_in_the_template():
    def head_only(model, source):
        nn.init.zeros_(model[2].weight)
        seen.append(copy.deepcopy(model.state_dict()))

    seen = []
    run(arms={"lecun": "lecun_normal", "head": head_only}, steps=1)
    for state in seen:
        assert (state["2.weight"] == 0).all()
        for name in ("0.weight", "0.bias", "2.bias"):
            assert torch.equal(state[name], MODEL.state_dict()[name])


def test_rates_may_differ_by_arm():
    found = run(rates={"lecun": [0.2, 0.4], "he": [0.1, 0.3]}, record=2)
    assert found.rates.tolist() == [[0.1, 0.3], [0.2, 0.4]]
    alike = run(rates=[0.1, 0.2, 0.3, 0.4], record=2)
    np.testing.assert_allclose(found.loss[0], alike.loss[0, [0, 2]], rtol=1e-5)
    np.testing.assert_allclose(found.loss[1], alike.loss[1, [1, 3]], rtol=1e-5)
    single = run(rates={"he": 0.1, "lecun": 0.4})
    assert single.rates.tolist() == [[0.1], [0.4]]
    assert run(rates=(0.25,)).rates.tolist() == [[0.25], [0.25]]


# --- records ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "steps", "expected"),
    [
        (1, 7, [7]),
        (2, 8, [4, 8]),
        (3, 9, [3, 6, 9]),
        (7, 7, [1, 2, 3, 4, 5, 6, 7]),
        (50, 3, [1, 2, 3]),
        (np.int64(2), 6, [3, 6]),
        ([0], 3, [0]),
        ([0, 2, 3], 3, [0, 2, 3]),
        ((3, 1), 3, [1, 3]),
        (range(4), 3, [0, 1, 2, 3]),
        (np.array([1, 2]), 3, [1, 2]),
    ],
)
def test_record_says_when_the_test_set_is_evaluated(record, steps, expected):
    found = run(record=record, steps=steps)
    assert found.steps.tolist() == expected
    assert found.test_loss.shape == found.test_accuracy.shape == (2, 2, 3, len(expected))
    every = run(record=range(steps + 1), steps=steps)
    np.testing.assert_allclose(found.test_loss, every.test_loss[..., expected], rtol=1e-6)
    assert np.array_equal(found.loss, every.loss)


def test_shapes_and_types():
    found = run(arms={"a": "he_normal"}, rates=[0.1, 0.2, 0.3], seeds=4, steps=5, record=2)
    assert found.loss.shape == (1, 3, 4, 5)
    assert found.test_loss.shape == found.test_accuracy.shape == (1, 3, 4, 2)
    assert found.diverged_at.shape == found.diverged.shape == (1, 3, 4)
    assert found.rates.shape == (1, 3)
    assert found.diverged_at.dtype.kind == "i"
    assert found.diverged.dtype == bool
    assert all(isinstance(getattr(found, field), np.ndarray) for field in FIELDS)
    assert repr(found) == "Runs(1 arms x 3 rates x 4 seeds, 5 steps; 0 of 12 diverged)"


def test_record_before_the_first_step_is_that_of_the_initial_weights():
    found = run(arms={"zeros": "zeros"}, record=[0])
    np.testing.assert_allclose(found.test_loss, math.log(3), rtol=1e-6)
    share = (CLASSES.y_test == 0).double().mean().item()  # the first of equal outputs
    np.testing.assert_allclose(found.test_accuracy, share, rtol=1e-6)


# --- divergence -------------------------------------------------------------------------------

RECTIFIER = nets.mlp([5, 8, 8, 3], "relu")


def diverging_step(rate, **options):
    """First step at which a plain loop's loss is not finite, in single precision."""
    start = []
    arms = {"he": keeping(start)}
    run(RECTIFIER, arms=arms, rates=[rate], steps=1, **options)
    order = order_of(24, steps=7)
    steps = []
    for k in range(3):
        model = copy.deepcopy(RECTIFIER)
        model.load_state_dict(start[k])
        stepper = torch.optim.SGD(model.parameters(), lr=rate)
        for step in range(1, 8):
            mask = torch.from_numpy(order[k, step - 1]).bool()
            loss = F.cross_entropy(model(CLASSES.x[mask]), CLASSES.y[mask])
            if not loss.isfinite():
                break
            stepper.zero_grad()
            loss.backward()
            stepper.step()
        else:
            step = -1
        steps.append(step)
    return steps


@pytest.mark.parametrize("rate", [1e14, 1e20, 1e30])
def test_divergence_is_recorded_where_it_happens(rate):
    found = run(RECTIFIER, arms={"he": "he_normal"}, rates=[0.1, rate], record=range(8))
    expected = diverging_step(rate)
    assert found.diverged_at[0, 0].tolist() == [-1, -1, -1]
    assert found.diverged_at[0, 1].tolist() == expected
    assert (np.array(expected) > 1).all()
    for k, step in enumerate(expected):
        assert np.isfinite(found.loss[0, 1, k, : step - 1]).all()
        assert (found.loss[0, 1, k, step - 1 :] == np.inf).all()
        assert np.isfinite(found.test_loss[0, 1, k, 0])
        assert (found.test_loss[0, 1, k, step:] == np.inf).all()
        assert (found.test_accuracy[0, 1, k, step:] == 0).all()
    assert found.diverged.tolist() == [[[False] * 3, [True] * 3]]
    assert repr(found).endswith("3 of 6 diverged)")


def test_divergence_of_some_is_not_felt_by_the_others():
    calm = run(RECTIFIER, record=3)
    for optimizer in OPTIMIZERS:
        wild = run(RECTIFIER, rates=[0.1, 1e30, 0.5, 1e38], record=3, optimizer=optimizer)
        calm = run(RECTIFIER, record=3, optimizer=optimizer)
        np.testing.assert_allclose(wild.loss[:, ::2], calm.loss, rtol=1e-5)
        np.testing.assert_allclose(wild.test_loss[:, ::2], calm.test_loss, rtol=1e-5)
        assert (wild.diverged_at[:, ::2] == -1).all()
        assert (wild.diverged_at[:, 3] > 1).all()
        assert not np.isnan(wild.loss).any()
        assert not np.isnan(wild.test_loss).any()


def test_arm_whose_weights_are_no_numbers_diverges_at_once():
    def broken(model, source):
        initialize(model, "he_normal", generator=source)
        model[2].weight.data[0, 0] = math.nan

    found = run(arms={"broken": broken, **ARMS}, record=[0, 7])
    assert (found.diverged_at[0] == 1).all()
    assert (found.loss[0] == np.inf).all()
    assert (found.test_loss[0] == np.inf).all()
    assert (found.test_accuracy[0] == 0).all()
    np.testing.assert_allclose(found.loss[1:], run().loss, rtol=1e-5)


def test_diverged_regression_has_no_accuracy_either():
    found = run(nets.mlp([5, 6, 2], "relu"), targets(), rates=[0.01, 1e25], loss=F.mse_loss)
    assert np.isnan(found.test_accuracy).all()
    assert (found.test_loss[:, 1] == np.inf).all()
    assert np.isfinite(found.test_loss[:, 0]).all()


# --- best rate --------------------------------------------------------------------------------


def runs(test_loss, arms=("a", "b")):
    numbers = np.array(test_loss, dtype=float)
    shape = numbers.shape
    none = np.zeros(shape[:3], dtype=int)
    return Runs(arms, np.ones(shape[:2]), np.arange(shape[3]), numbers, numbers, numbers, none)


def test_best_rate_has_the_lowest_mean_over_seeds_at_a_record():
    first = [[[3, 1], [1, 1]], [[2, 9], [2, 9]]]  # an arm: rates, seeds, records
    second = [[[1, 4], [1, 4]], [[5, 0], [5, 1]]]
    found = runs([first, second])
    assert found.best_rate().tolist() == [0, 1]
    assert found.best_rate(-1).tolist() == [0, 1]
    assert found.best_rate(0).tolist() == [0, 0]
    assert found.best_rate(record=1).tolist() == [0, 1]


def test_rate_at_which_a_seed_diverged_is_never_the_best():
    found = runs([[[[0], [math.inf]], [[7], [8]]]], arms=("a",))
    assert found.best_rate().tolist() == [1]
    lost = runs([[[[1], [1]]], [[[0], [math.inf]]]])
    with pytest.raises(ValueError, match="no rate to choose: arm 'b' diverged at every one"):
        lost.best_rate()


def test_best_rate_of_a_run():
    found = run(RECTIFIER, rates=[1e-5, 0.3, 1e30], steps=30)
    assert found.best_rate().tolist() == [1, 1]
    with pytest.raises(ValueError, match="arm 'he' diverged at every one"):
        run(RECTIFIER, rates=[1e30]).best_rate()


# --- nothing else changes ---------------------------------------------------------------------


def state_of(model):
    return {
        "parameters": {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()},
        "buffers": {name: b.tolist() for name, b in model.named_buffers()},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "modes": [part.training for part in model.modules()],
        "random": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
    }


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits]
)
def test_losses_of_torch_train_as_their_formulas_do(loss):
    formulas = {
        F.mse_loss: lambda e, u, y: e.square(),
        F.l1_loss: lambda e, u, y: e.abs(),
        F.smooth_l1_loss: lambda e, u, y: torch.where(e.abs() < 1, e.square() / 2, e.abs() - 0.5),
        F.huber_loss: lambda e, u, y: torch.where(e.abs() < 1, e.square() / 2, e.abs() - 0.5),
        F.binary_cross_entropy_with_logits: lambda e, u, y: F.softplus(u) - u * y,
    }
    model = nets.mlp([5, 4, 2], "tanh")
    found = run(model, targets(), loss=loss, record=[0, 7])
    plain = run(model, targets(), loss=lambda u, y: formulas[loss](u - y, u, y).mean(), record=[0, 7])
    np.testing.assert_allclose(found.loss, plain.loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.test_loss, plain.test_loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
def test_everything_around_stays_as_it_is_also_when_the_loss_raises(training, raises, normalised, two_threads):
    threads = []

    def loss(outputs, y):
        threads.append(torch.get_num_threads())
        if raises and len(threads) > 2:
            raise ArithmeticError("no more")
        return F.cross_entropy(outputs, y)

    model, data = (RECOGNISER, images()) if normalised else (MODEL, CLASSES)
    model = copy.deepcopy(model).train(training)
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before = state_of(model)
    if raises:
        with pytest.raises(ArithmeticError, match="no more"):
            run(model, data, loss=loss)
    else:
        run(model, data, loss=loss)
    after = state_of(model)
    assert set(threads) == {1}
    for part in ("modes", "buffers", "random", "numpy", "threads", "grad", "dtype"):
        assert before[part] == after[part], part
    for name, (value, wanted) in before["parameters"].items():
        assert torch.equal(value, after["parameters"][name][0])
        assert wanted == after["parameters"][name][1]
        one, other = before["gradients"][name], after["gradients"][name]
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_results_are_the_same_in_every_mode_of_torch(mode):
    expected = run()
    with mode():
        assert same(run(), expected)


def test_results_are_the_same_under_another_default_precision():
    expected, default = run(record=[0, 7]), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = run(record=[0, 7])
    finally:
        torch.set_default_dtype(default)
    assert same(found, expected)
    assert found.loss.dtype == np.float32


def test_template_may_be_in_double_precision():
    assert same(run(copy.deepcopy(MODEL).double()), run())


def test_caller_keeps_arms_rates_and_data():
    arms, rates, data = dict(ARMS), {"lecun": [0.2], "he": [0.1]}, copy.deepcopy(CLASSES)
    run(dataset=data, arms=arms, rates=rates)
    assert arms == ARMS
    assert rates == {"lecun": [0.2], "he": [0.1]}
    for part in ("x", "y", "x_test", "y_test"):
        assert torch.equal(getattr(data, part), getattr(CLASSES, part))


# --- progress ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terminal", "environment", "shown"),
    [
        (False, {}, False),
        (True, {}, True),
        (False, {"JPY_SESSION_NAME": "live"}, True),
        (False, {"JPY_SESSION_NAME": "live", "CI": "1"}, False),
    ],
)
def test_progress_is_shown_to_those_who_watch(terminal, environment, shown, capsys, monkeypatch):
    for name in ("JPY_SESSION_NAME", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    run()
    output = capsys.readouterr()
    assert output.out == ""
    assert ("/7" in output.err) == shown
    assert (output.err == "") == (not shown)


# --- what is refused --------------------------------------------------------------------------

REFUSED = [
    ({"arms": ["he_normal"]}, TypeError, "arms must map names to schemes, got list"),
    ({"arms": "he_normal"}, TypeError, "arms must map names to schemes, got str"),
    ({"arms": {}}, ValueError, "arms is empty"),
    ({"arms": {"a": "kaiming"}}, ValueError, "scheme must be one of .*got 'kaiming'"),
    ({"arms": {"a": None}}, TypeError, "scheme must be a name or a scheme, got NoneType"),
    ({"rates": []}, ValueError, r"rates must be equally many for each arm, at least one, got \[\]"),
    ({"rates": [0.1, 0.0]}, ValueError, r"rates must be positive and finite, got \[0.1, 0.0\]"),
    ({"rates": [-1]}, ValueError, r"rates must be positive and finite, got \[-1\]"),
    ({"rates": [math.nan]}, ValueError, r"rates must be positive and finite, got \[nan\]"),
    ({"rates": [math.inf]}, ValueError, r"rates must be positive and finite, got \[inf\]"),
    ({"rates": [None]}, ValueError, r"rates must be positive and finite, got \[None\]"),
    ({"rates": [[0.1]]}, ValueError, r"rates must be equally many .*, got \[\[0.1\]\]"),
    ({"rates": "fast"}, ValueError, "rates must be numbers, got 'fast'"),
    ({"rates": [0.1, "x"]}, ValueError, r"rates must be numbers, got \[0.1, 'x'\]"),
    ({"rates": [[1], [1, 2]]}, ValueError, "rates must be numbers, got"),
    ({"rates": {"he": 0.1}}, ValueError, "rates must name the arms he, lecun, got he"),
    ({"rates": {"he": 1, "lecun": 1, "x": 1}}, ValueError, "rates must name the arms he, lecun, got he, lecun, x"),
    ({"rates": {"he": [0.1, 0.2], "lecun": [0.1]}}, ValueError, "rates must be equally many for each arm"),
    ({"rates": {"he": [0.1], "lecun": [0.0]}}, ValueError, "rates must be positive and finite"),
    *[
        ({name: value}, error, f"^{name} must be .*, got {value}")
        for name in ("seeds", "steps", "batch")
        for value, error in ((0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError))
    ],
    ({"batch": 25}, ValueError, "batch must be at most the 24 training samples, got 25"),
    ({"model": None}, TypeError, "model must be a torch.nn.Module, got NoneType"),
    ({"model": nn.Linear}, TypeError, "model must be a torch.nn.Module, got type"),
    ({"model": nn.Sequential(nn.Linear(5, 3), nn.Dropout())}, ValueError, r"not be random, got 1: Dropout\(p=0.5"),
    ({"model": nn.Sequential(nn.Dropout2d(0.1), nn.Linear(5, 3))}, ValueError, "not be random, got 0: Dropout2d"),
    ({"model": nn.Sequential(nn.Linear(5, 3), nn.RReLU())}, ValueError, "model must not be random, got 1: RReLU"),
    ({"model": nn.MultiheadAttention(4, 2, dropout=0.1)}, ValueError, "not be random, got model: MultiheadAttention"),
    ({"model": nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, momentum=None))}, ValueError, "give 1 a momentum"),
    ({"model": nn.Sequential(nn.Tanh())}, ValueError, "model has no parameters to train"),
    ({"dataset": None}, TypeError, "dataset must be a Dataset, got NoneType"),
    ({"dataset": (CLASSES.x, CLASSES.y)}, TypeError, "dataset must be a Dataset, got tuple"),
    ({"loss": "cross_entropy"}, TypeError, "loss must be a function of outputs and targets, got 'cross_entropy'"),
    ({"loss": None}, TypeError, "loss must be a function of outputs and targets, got None"),
    ({"optimizer": "rmsprop"}, ValueError, "optimizer must be one of sgd, momentum, adam, .*, got 'rmsprop'"),
    ({"optimizer": None}, ValueError, "optimizer must be one of sgd, momentum, adam, .*, got None"),
    ({"optimizer": ["sgd"]}, ValueError, r"optimizer must be one of sgd, momentum, adam, .*, got \['sgd'\]"),
    ({"record": 0}, ValueError, "record must be at least 1, got 0"),
    ({"record": -1}, ValueError, "record must be at least 1, got -1"),
    ({"record": 1.5}, TypeError, "record must be an integer, got 1.5"),
    ({"record": True}, TypeError, "record must be an integer, got True"),
    ({"record": "all"}, TypeError, "record must be an integer, got 'all'"),
    *[
        ({"record": record}, ValueError, "record must hold different numbers of steps from 0 to 7, got")
        for record in ([], [8], [-1, 3], [2.5], [1, 1], [math.nan], np.array([]), np.array([0, 9]))
    ],
    ({"seed": -1}, ValueError, "must not be negative .*, got -1"),
    ({"seed": 1.5}, TypeError, "must be an integer, got 1.5"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_trained_is_refused_before_anything_is(options, error, message):
    def loss(outputs, y):
        raise AssertionError("training has begun")

    with pytest.raises(error, match=message):
        run(**{"loss": loss, **options})


def test_smallest_run_there_is():
    dataset = Dataset("one", torch.ones(1, 2), torch.zeros(1).long(), torch.ones(1, 2), torch.zeros(1).long(), (2,), 1)
    found = run(nn.Linear(2, 1), dataset, arms={"a": "he_normal"}, rates=0.1, seeds=1, steps=1, batch=1)
    assert found.loss.shape == (1, 1, 1, 1)
    np.testing.assert_allclose(found.loss, 0, atol=1e-7)
    assert found.test_accuracy.tolist() == [[[[1.0]]]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, ValueError, "learning rate 1 and no weight decay"),
        ({"optimizer": lambda p: torch.optim.SGD(p, 1.0, weight_decay=0.1)}, ValueError, "and no weight decay"),
        ({"optimizer": lambda p: None}, TypeError, "must return a torch.optim.Optimizer, got None"),
        ({"loss": lambda o, y: F.cross_entropy(o, y, reduction="none")}, ValueError, r"loss must return one number"),
        ({"record": [1, "b"]}, TypeError, "record must be an integer or a sequence of integers"),
        ({"record": [[1, 2]]}, TypeError, "record must be an integer or a sequence of integers"),
        ({"dataset": dataclasses.replace(CLASSES, x=CLASSES.x.double())}, TypeError, r"dataset.x must be float32"),
        ({"dataset": dataclasses.replace(CLASSES, y=CLASSES.y[1:])}, ValueError, r"dataset.x must have a target"),
        (
            {"dataset": dataclasses.replace(CLASSES, x_test=CLASSES.x[:0], y_test=CLASSES.y[:0])},
            ValueError,
            r"dataset.x_test must have a target",
        ),
    ],
)
def test_what_would_give_wrong_numbers_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        run(**options)


def test_groups_of_an_optimizer_have_rates_relative_to_the_arm_s():
    def groups(tensors):
        return torch.optim.SGD([{"params": tensors[:1], "lr": 2.0}, {"params": tensors[1:], "lr": 0.5}], lr=1.0)

    assert np.isfinite(run(optimizer=groups).loss).all()
