"""Sweeps: pieces of a run that others compute, with the same numbers; and rates that are tuned."""

import importlib
import math
import multiprocessing
import os
import pickle
import sys
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from initlib import generator, nets, tune
from initlib.data import Dataset
from initlib.train import OPTIMIZERS, Tuned, train

MODULE = importlib.import_module("initlib.train")  # `initlib.train` is the function
FIELDS = ("rates", "steps", "loss", "test_loss", "test_accuracy", "diverged_at")

#: How the book sends a sweep to a cluster: here one of two processes; ``Client("tcp://host:8786")`` is another.
ON_A_CLUSTER = """
from dask.distributed import Client

with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
    runs = train(model, dataset, arms, **options, executor=client.get_executor(), jobs=2)
"""


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("INITLIB_DEVICE", "cpu")


def images(samples=24, tested=40, pixels=6):
    """Two classes, dark and bright, that are easily told apart."""
    y = torch.arange(samples + tested) % 2
    x = torch.randn(len(y), 1, pixels, pixels, generator=generator(3500)) + (y[:, None, None, None] - 0.5)
    return Dataset("images", x[:samples], y[:samples], x[samples:], y[samples:], (pixels, pixels), 2)


def convolutions():
    """A network with running statistics, of torch's own layers, which every worker knows."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
    )


IMAGES, MODEL = images(), convolutions()
ARMS = {"he": "he_normal", "lecun": "lecun_uniform"}
DEFAULT = {"rates": [0.1, 0.5], "seeds": 4, "steps": 6, "batch": 8, "record": [0, 3, 6], "seed": 4}


def run(model=MODEL, dataset=IMAGES, arms=ARMS, **options):
    return train(model, dataset, arms, **{**DEFAULT, **options})


def same(one, other):
    """Whether two runs hold the same numbers to the last bit."""
    return one.arms == other.arms and all(
        np.array_equal(getattr(one, field), getattr(other, field), equal_nan=True) for field in FIELDS
    )


class Elsewhere:
    """An executor that computes at once, from a pickled copy, as another process would."""

    def __init__(self, around=lambda work: work()):
        self.pieces, self.around = 0, around

    def submit(self, function, *arguments):
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        self.pieces += 1
        future = Future()
        try:
            future.set_result(pickle.loads(pickle.dumps(self.around(lambda: function(*arguments)))))
        except Exception as error:
            future.set_exception(error)
        return future


def broken_loss(outputs, y):
    raise ArithmeticError("no more")


def spawned(workers):
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


# --- who computes -----------------------------------------------------------------------------


def test_cluster_gives_the_same_numbers_bit_for_bit():
    names = {"train": train, "model": MODEL, "dataset": IMAGES, "arms": ARMS, "options": DEFAULT}
    exec(ON_A_CLUSTER, names)
    assert same(names["runs"], run(jobs=2))


def test_processes_give_the_same_numbers_bit_for_bit_and_their_errors_as_they_are():
    with spawned(1) as pool:
        assert same(run(executor=pool, jobs=3), run(jobs=3))
        with pytest.raises(ArithmeticError, match="no more"):
            run(executor=pool, loss=broken_loss)
        with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
            run(executor=pool, loss=lambda outputs, y: F.cross_entropy(outputs, y))
        assert same(run(executor=pool), run())  # it works on


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("jobs", [None, 1, 3])
def test_threads_of_somebody_else_give_the_same_numbers_bit_for_bit(workers, jobs):
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(workers) as pool:
        assert same(run(executor=pool, jobs=jobs), run(jobs=jobs))
        assert pool.submit(lambda: 3).result() == 3
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["convolutions", "mlp"])
def test_all_that_is_sent_pickles(optimizer, model):
    model = MODEL if model == "convolutions" else nn.Sequential(nn.Flatten(), *nets.mlp([36, 5, 2], "relu"))
    there = Elsewhere()
    assert same(run(model, optimizer=optimizer, executor=there, jobs=4), run(model, optimizer=optimizer, jobs=4))
    assert there.pieces == 4


def test_arms_and_what_they_draw_on_stay_here():
    def arm(model, source):
        processes.append(os.getpid())
        nn.init.normal_(model[0].weight, std=0.3, generator=source)

    processes = []
    assert run(arms={"mine": arm}, executor=Elsewhere()).loss.shape == (1, 2, 4, 6)
    assert processes == [os.getpid()] * 4


def test_workers_need_no_seed_and_touch_no_random_state(monkeypatch):
    def with_another_seed(work):
        with monkeypatch.context() as there:
            there.setenv("INITLIB_SEED", "not a number")
            before = torch.get_rng_state()
            done = work()
            assert torch.equal(before, torch.get_rng_state())
            return done

    monkeypatch.setenv("INITLIB_SEED", "3")
    shifted = run()
    assert same(run(executor=Elsewhere(with_another_seed)), shifted)
    monkeypatch.delenv("INITLIB_SEED")
    assert (run().loss[..., 0] != shifted.loss[..., 0]).all()


def test_each_worker_computes_on_the_device_of_its_own(monkeypatch):
    def without_device(work):
        with monkeypatch.context() as there:
            there.setenv("INITLIB_DEVICE", "abacus")
            return work()

    with pytest.raises(ValueError, match="INITLIB_DEVICE='abacus' is not a device of this machine"):
        run(executor=Elsewhere(without_device))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_workers_may_be_in_any_mode_of_torch(mode):
    def in_mode(work):
        with mode():
            return work()

    assert same(run(executor=Elsewhere(in_mode)), run())


# --- pieces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2, 3, 4])
def test_pieces_change_the_numbers_by_rounding_only(jobs):
    there, expected = Elsewhere(), run()
    found = run(jobs=jobs, executor=there)
    assert there.pieces == jobs
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-4)
    np.testing.assert_allclose(found.test_loss, expected.test_loss, rtol=1e-4)


def test_there_are_two_pieces_on_a_cpu_and_at_most_one_a_seed():
    there = Elsewhere()
    run(executor=there)
    assert there.pieces == 2
    assert same(run(jobs=np.int64(50), executor=there), run(jobs=4))
    assert there.pieces == 2 + 4
    assert run(seeds=1).loss.shape == (2, 2, 1, 6)


def test_what_has_not_begun_is_cancelled_when_a_piece_fails():
    class Slow:
        def __init__(self):
            self.futures = []

        def submit(self, function, *arguments):
            self.futures.append(Future())
            if len(self.futures) == 1:
                self.futures[0].set_exception(MemoryError("too small"))
            return self.futures[-1]

    there = Slow()
    with pytest.raises(MemoryError, match="too small"):
        run(executor=there, jobs=3)
    assert [future.cancelled() for future in there.futures] == [False, True, True]


def test_progress_counts_pieces_if_others_compute(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    for name in ("JPY_SESSION_NAME", "CI"):
        monkeypatch.delenv(name, raising=False)
    run(executor=Elsewhere(), jobs=3)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run(executor=Elsewhere(), jobs=3)
    output = capsys.readouterr()
    assert output.out == ""
    assert "/3" in output.err
    assert "/6" not in output.err


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"executor": "threads"}, TypeError, r"executor must have submit\(\), .*, got 'threads'"),
        ({"executor": 4}, TypeError, r"executor must have submit\(\), .*, got 4"),
        ({"executor": ThreadPoolExecutor}, TypeError, r"executor must have submit\(\), .*ThreadPoolExecutor"),
        ({"executor": map}, TypeError, r"executor must have submit\(\), .*map"),
        ({"jobs": 0}, ValueError, "jobs must be at least 1, got 0"),
        ({"jobs": -1}, ValueError, "jobs must be at least 1, got -1"),
        ({"jobs": 2.0}, TypeError, "jobs must be an integer, got 2.0"),
        ({"jobs": True}, TypeError, "jobs must be an integer, got True"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_is_drawn(options, error, message):
    def arm(model, source):
        raise AssertionError("drawing has begun")

    with pytest.raises(error, match=message):
        run(arms={"mine": arm}, **options)


# --- tuned rates ------------------------------------------------------------------------------

TUNING = {"rates": [0.001, 0.1, 1e30], "seeds": 5, "steps": 20, "batch": 8, "seed": 7}
RECTIFIER = nn.Sequential(nn.Flatten(), *nets.mlp([36, 8, 8, 2], "relu"))


def tuned(model=RECTIFIER, dataset=IMAGES, arms=ARMS, **options):
    return tune(model, dataset, arms, **{**TUNING, **options})


def test_tuning_is_two_trainings_with_seeds_of_their_own():
    found = tuned(tuning_seeds=2, record=2, optimizer="momentum")
    fixed = {"steps": 20, "batch": 8, "record": 2, "optimizer": "momentum"}
    first = train(RECTIFIER, IMAGES, ARMS, rates=TUNING["rates"], seeds=2, seed=7, **fixed)
    assert same(found.tuning, first)
    best = [TUNING["rates"][k] for k in first.best_rate()]
    assert found.rates.tolist() == best
    rates = dict(zip(ARMS, best, strict=True))
    assert same(found.runs, train(RECTIFIER, IMAGES, ARMS, rates=rates, seeds=5, seed=8, **fixed))
    assert not np.isclose(found.runs.loss[:, 0, :2, 0], found.tuning.loss[:, 0, :, 0]).any()


def test_rate_at_an_end_of_its_grid_is_marked_in_whatever_order_it_stands():
    grids = {"he": [1e30, 0.1, 0.001], "lecun": [0.1, 1e25, 1e30]}
    found = tuned(rates=grids)
    assert found.rates.tolist() == [0.1, 0.1]
    assert found.at_edge.tolist() == [False, True]
    assert tuned(rates=[0.001, 1e30]).at_edge.all()
    assert tuned(rates=0.1).at_edge.all()  # nothing is known on either side


def test_record_that_chooses_may_be_an_early_one():
    found = tuned(rates=[1e-4, 0.1], record=[0, 20], at=0)
    assert found.rates.tolist() == [1e-4, 1e-4]  # all are equal before the first step: the first of them
    assert tuned(rates=[1e-4, 0.1], record=[0, 20]).rates.tolist() == [0.1, 0.1]
    assert tuned(rates=[1e-4, 0.1], record=[0, 20], at=-2).runs.test_loss.shape == (2, 1, 5, 2)


def test_tuned_prints_as_a_table():
    found = tuned(record=[0, 20])
    assert isinstance(found, Tuned)
    assert found.headers == ("arm", "rate", "at an edge", "test loss", "diverged")
    ends = found.runs.test_loss[:, 0, :, -1].mean(1)
    for row, arm, end in zip(found.rows, ARMS, ends, strict=True):
        assert row == (arm, 0.1, "", end, 0)
        assert arm in repr(found)
    assert "yes" in repr(tuned(rates=[0.1]))
    assert "<table>" in found._repr_html_()


def test_tuning_goes_to_workers_too():
    there = Elsewhere()
    found = tuned(executor=there, jobs=2)
    assert there.pieces == 4
    assert same(found.runs, tuned(jobs=2).runs)


def test_arm_without_any_rate_is_named():
    with pytest.raises(ValueError, match="no rate to choose: arm 'he' diverged at every one"):
        tuned(rates={"he": [1e30], "lecun": [0.1]})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seeds": 0}, ValueError, "^seeds must be at least 1, got 0"),
        ({"tuning_seeds": 0}, ValueError, "^tuning_seeds must be at least 1, got 0"),
        ({"tuning_seeds": 1.0}, TypeError, "^tuning_seeds must be an integer, got 1.0"),
        ({"steps": None}, TypeError, "^steps must be an integer, got None"),
        ({"at": 1}, ValueError, "at must be the index of one of 1 records, got 1"),
        ({"at": -3, "record": 2}, ValueError, "at must be the index of one of 2 records, got -3"),
        ({"at": 0.0}, TypeError, "at must be an integer, got 0.0"),
        ({"at": True}, TypeError, "at must be an integer, got True"),
        ({"record": [99]}, ValueError, "record must hold different numbers of steps from 0 to 20"),
        ({"seed": -1}, ValueError, "must not be negative"),
        ({"seed": 2**32 - 1}, ValueError, "must be below"),
        ({"seed": "7"}, TypeError, "must be an integer, got '7'"),
        ({"rates": [math.nan]}, ValueError, "rates must be positive and finite"),
        ({"rates": {"he": [1]}}, ValueError, "rates must name the arms"),
        ({"arms": ["he_normal"]}, TypeError, "arms must map names to schemes, got list"),
        ({"jobs": 0}, ValueError, "jobs must be at least 1"),
        ({"optimiser": "sgd"}, TypeError, "unexpected keyword argument 'optimiser'"),
    ],
)  # fmt: skip
def test_what_cannot_be_tuned_is_refused_before_anything_is_trained(options, error, message, monkeypatch):
    def train_nothing(*arguments):
        raise AssertionError("training has begun")

    monkeypatch.setattr(MODULE, "_train", train_nothing)
    with pytest.raises(error, match=message):
        tuned(**options)
