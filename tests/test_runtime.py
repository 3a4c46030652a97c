"""Device, size and seeds of an experiment."""

import itertools
import re

import numpy as np
import pytest
import torch

from initlib import propagate, runtime


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv("INITLIB_DEVICE", "cpu")


def test_device_can_be_overridden(monkeypatch):
    for text in ("cpu", "  cpu "):
        monkeypatch.setenv("INITLIB_DEVICE", text)
        assert runtime.device() == torch.device("cpu")


@pytest.mark.parametrize("unset", ["", "  ", None])
@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_device_prefers_cuda_then_mps_then_cpu(monkeypatch, unset, cuda, mps, expected):
    if unset is None:
        monkeypatch.delenv("INITLIB_DEVICE", raising=False)
    else:
        monkeypatch.setenv("INITLIB_DEVICE", unset)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert runtime.device() == torch.device(expected)


@pytest.mark.parametrize("name", ["banana", "gpu", "meta", "hpu", "cuda:99", "cuda:-1", "0", "cpu,cuda"])
def test_device_that_is_not_there_is_named(monkeypatch, name):
    monkeypatch.setenv("INITLIB_DEVICE", name)
    with pytest.raises(ValueError, match=f"INITLIB_DEVICE='{name}'"):
        runtime.device()


def test_sized_takes_the_size_of_the_device(monkeypatch):
    for device, size in (("cpu", 3), ("cuda", 500), ("mps", 500)):
        monkeypatch.setattr(runtime, "device", lambda device=device: torch.device(device))
        assert runtime.sized(cpu=3, gpu=500) == size


def test_seeds_of_all_pairs_of_number_and_shift_differ(monkeypatch):
    numbers = [*range(40), 2**16, 2**31, 2**32 - 1]
    shifts = [*range(-40, 41), 2**16, 2**32 - 1, -(2**32) + 1]
    seeds = set()
    for shift in shifts:
        monkeypatch.setenv("INITLIB_SEED", str(shift))
        seeds |= {runtime.seed(n) for n in numbers}
    assert len(seeds) == len(numbers) * len(shifts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seed_is_the_same_every_time_and_shift_zero_is_the_default(monkeypatch):
    monkeypatch.delenv("INITLIB_SEED", raising=False)
    unset = [runtime.seed(n) for n in range(5)]
    for text in ("0", "", "  ", "-0", " 0 "):
        monkeypatch.setenv("INITLIB_SEED", text)
        assert [runtime.seed(n) for n in range(5)] == unset
    assert runtime.seed() == unset[0]


def test_seed_accepts_integers_of_numpy():
    assert runtime.seed(np.int32(7)) == runtime.seed(np.uint64(7)) == runtime.seed(7)


@pytest.mark.parametrize("n", [-1, 2**32, 2**80])
def test_seed_refuses_numbers_out_of_range(n):
    with pytest.raises(ValueError, match=str(n)):
        runtime.seed(n)


@pytest.mark.parametrize("n", [1.0, "1", None, True, np.float64(1), torch.tensor(1)])
def test_seed_refuses_what_is_not_an_integer(n):
    with pytest.raises(TypeError, match="n must be an integer"):
        runtime.seed(n)


@pytest.mark.parametrize("text", ["one", "1.5", "0x10", "1 2", str(2**32), str(-(2**32))])
def test_seed_refuses_a_bad_shift_and_names_it(monkeypatch, text):
    monkeypatch.setenv("INITLIB_SEED", text)
    with pytest.raises(ValueError, match=f"INITLIB_SEED.*{text}"):
        runtime.seed(0)


def test_generators_repeat_themselves_and_differ_by_number():
    draws = {n: torch.rand(64, generator=runtime.generator(n)) for n in range(4)}
    arrays = {n: runtime.rng(n).random(64) for n in range(4)}
    for n in range(4):
        assert torch.equal(draws[n], torch.rand(64, generator=runtime.generator(n)))
        np.testing.assert_array_equal(arrays[n], runtime.rng(n).random(64))
    for a, b in itertools.combinations(range(4), 2):
        assert not torch.equal(draws[a], draws[b])
        assert not np.array_equal(arrays[a], arrays[b])


def test_generators_leave_the_global_random_state_alone():
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    torch.rand(5, generator=runtime.generator(1))
    runtime.rng(1).random(5)
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


def test_generator_lives_on_the_device_asked_for():
    assert runtime.generator(0, "cpu").device == torch.device("cpu")
    assert runtime.generator(0, torch.device("cpu")).initial_seed() == runtime.seed(0)


def test_shift_moves_every_random_number(monkeypatch, on_cpu):
    def everything():
        trace = propagate([8, 8, 8], "lecun_normal", torch.tanh, networks=3, samples=2, seed=5)
        return trace.forward, trace.backward, torch.rand(4, generator=runtime.generator(5)), runtime.rng(5).random(4)

    results = []
    for shift in ("0", "1", "-1"):
        monkeypatch.setenv("INITLIB_SEED", shift)
        results.append(everything())
    for one, other in itertools.combinations(results, 2):
        for a, b in zip(one, other, strict=True):
            assert (np.asarray(a) != np.asarray(b)).all()


@pytest.mark.parametrize("value", [1, 7, 2**70, np.int64(3), np.uint8(1)])
def test_counts_are_positive_integers(value):
    assert runtime.check_count("networks", value) is None


@pytest.mark.parametrize("value", [0, -1, -(2**70), np.int32(0)])
def test_count_below_one_is_refused_and_named(value):
    with pytest.raises(ValueError, match=f"^networks must be at least 1, got {value}$"):
        runtime.check_count("networks", value)


@pytest.mark.parametrize("value", [True, False, np.True_, 1.0, np.float64(2), "3", None, [1], torch.tensor(2)])
def test_count_that_is_no_integer_is_refused_and_named(value):
    with pytest.raises(TypeError, match=f"^networks must be an integer, got {re.escape(repr(value))}$"):
        runtime.check_count("networks", value)
