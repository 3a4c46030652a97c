"""Device, size and seeds of an experiment."""

import itertools
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

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


@pytest.mark.parametrize("value", [1, 1e-300, 0.5, np.float64(2), np.float32(3), np.int64(4)])
def test_positive_numbers_are_let_through(value):
    assert runtime.check_positive("gain", value) is None
    assert runtime.check_positive("gain", value, zero=True) is None


@pytest.mark.parametrize("value", [0, -1.5, math.nan, math.inf, -math.inf, np.float64(-1)])
def test_number_that_is_not_positive_is_refused_and_named(value):
    with pytest.raises(ValueError, match=f"^gain must be positive and finite, got {re.escape(repr(value))}$"):
        runtime.check_positive("gain", value)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_zero_is_let_through_where_it_is_allowed(value):
    assert runtime.check_positive("bias_std", 0.0, zero=True) is None
    with pytest.raises(ValueError, match=f"^bias_std must be finite and not negative, got {value}$"):
        runtime.check_positive("bias_std", value, zero=True)


@pytest.mark.parametrize("value", [True, np.True_, "1", None, [1.0], 1j, torch.tensor(1.0)])
def test_positive_number_that_is_none_is_refused_and_named(value):
    for zero in (False, True):
        with pytest.raises(TypeError, match=f"^gain must be a number, got {re.escape(repr(value))}$"):
            runtime.check_positive("gain", value, zero=zero)


def threads():
    """Numbers of threads of torch, and of every library of linear algebra that is loaded."""
    return torch.get_num_threads(), [(pool["filepath"], pool["num_threads"]) for pool in threadpool_info()]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield threads()
    torch.set_num_threads(before)


def test_one_thread_holds_inside_and_not_afterwards(two_threads):
    with runtime.one_thread(torch.device("cpu")):
        torch_threads, pools = threads()
        assert torch_threads == 1
        assert pools
        assert {number for _, number in pools} == {1}
    assert threads() == two_threads


def test_one_thread_ends_with_an_error(two_threads):
    with pytest.raises(ZeroDivisionError), runtime.one_thread(torch.device("cpu")):
        raise ZeroDivisionError
    assert threads() == two_threads


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps"])
def test_one_thread_concerns_the_cpu_alone(two_threads, name):
    with runtime.one_thread(torch.device(name)):
        assert threads() == two_threads
    assert threads() == two_threads


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_double_keeps_the_values(dtype):
    x = torch.randn(5, generator=runtime.generator(1)).to(dtype)
    y = runtime.double(x)
    assert y.dtype == torch.float64
    assert y.tolist() == x.tolist()
    assert (y is x) == (dtype == torch.float64)


def test_double_leaves_a_device_that_has_none():
    x = SimpleNamespace(device=torch.device("mps"), cpu=lambda: torch.ones(2))
    assert runtime.double(x).dtype == torch.float64


# what a norm is taken along, in a tensor of shape (3, 4, 5)
ALONG = [-1, 2, 0, 1, -3, (1, 2), (0, 1), (-1, 0), (0, 1, 2), (2,), (-2,)]


@pytest.mark.parametrize("dim", ALONG, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_norm_is_the_euclidean_one_in_double_precision(dim, dtype):
    x = torch.randn(3, 4, 5, generator=runtime.generator(2)).to(dtype)
    expected = np.sqrt(np.square(x.double().numpy()).sum(dim))
    actual = runtime.norm(x, dim)
    assert actual.dtype == torch.float64
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-15 if dtype == torch.float64 else 3e-7)


@pytest.mark.parametrize("dim", ALONG, ids=str)
@pytest.mark.parametrize("size", [1e-43, 1e-38, 1e-25, 1e-16, 1e-14, 1e18, 1e25, 1e38], ids=str)
def test_norm_neither_overflows_nor_underflows(dim, size):
    x = (torch.randn(3, 4, 5, generator=runtime.generator(3), dtype=torch.float64) * size / 4).float()
    expected = np.sqrt(np.square(x.double().numpy()).sum(dim))
    np.testing.assert_allclose(runtime.norm(x, dim), expected, rtol=3e-7)
    x[1] = 1.0  # nor where sizes are mixed
    np.testing.assert_allclose(runtime.norm(x, dim), np.sqrt(np.square(x.double().numpy()).sum(dim)), rtol=3e-7)
    assert (runtime.norm(x, dim) > 0).all()


def test_norm_of_doubles_is_sound_where_their_squares_are_not_singles():
    x = torch.tensor([3e100, 4e100], dtype=torch.float64)
    np.testing.assert_allclose(runtime.norm(x, 0), 5e100, rtol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_norm_of_what_is_zero_or_not_finite(dtype):
    x = torch.tensor([[0.0, 0.0], [math.inf, 1.0], [3.0, 4.0], [math.nan, 1.0], [-math.inf, 0.0]], dtype=dtype)
    np.testing.assert_array_equal(runtime.norm(x, -1), [0, math.inf, 5, math.nan, math.inf])
    assert runtime.norm(torch.zeros(2, 3, dtype=dtype), (0, 1)) == 0
    np.testing.assert_array_equal(runtime.norm(x[[0, 2]], 1), [0, 5])


def test_norm_of_many_entries_is_accurate():
    x = torch.randn(2, 100_000, generator=runtime.generator(4))
    for dim in (-1, (0, 1)):
        np.testing.assert_allclose(runtime.norm(x, dim), np.sqrt(np.square(x.double().numpy()).sum(dim)), rtol=1e-5)
    np.testing.assert_allclose(runtime.norm(torch.full((2, 3000), 0.1), -1), 0.1 * math.sqrt(3000), rtol=2e-6)
    half = torch.full((2, 100_000), 0.1, dtype=torch.float16)
    np.testing.assert_allclose(runtime.norm(half, -1), float(half[0, 0]) * math.sqrt(100_000), rtol=1e-12)


@pytest.mark.parametrize("size", [2**12, 2**22 + 5])
def test_mean_square_of_many_entries_is_that_of_double_precision(size):
    x = torch.randn(size, generator=runtime.generator(5)) * 0.02
    assert runtime.mean_square(x) == pytest.approx(x.double().square().mean().item(), rel=3e-7)
    assert runtime.mean_square(x.view(-1, 1).half()) == pytest.approx(
        x.half().double().square().mean().item(), rel=3e-7
    )


def test_mean_square_of_nothing_is_zero():
    assert runtime.mean_square(torch.empty(0, 3)) == 0


def test_check_widths():
    assert runtime.check_widths((np.int64(2), 3)) == [2, 3]
    with pytest.raises(TypeError, match="widths must be a sequence of integers, got 5"):
        runtime.check_widths(5)
    with pytest.raises(TypeError, match=r"each of widths must be an integer, got 2\.0"):
        runtime.check_widths([1, 2.0])
    with pytest.raises(ValueError, match="at least inputs and outputs"):
        runtime.check_widths([1])
