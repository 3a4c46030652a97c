"""Data: where they come from, in which scale, and how they are split."""

import io
import os
import socket
import subprocess
import sys
import types
import urllib.error
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from initlib import data, generator, initialize, nets, runtime

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
        patch.delenv("INITLIB_DATA", raising=False)
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


@pytest.mark.parametrize("pixels", [0, 1, 10, 56, -28, 14.0, 14.5, "28", None, True])
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


# Images.


@EVERY
def test_images_are_the_same_pixels_in_rows_and_columns(kind):
    flat = SETS[kind][0]()
    found = flat.images()
    assert found.x.shape == (len(flat.x), 1, *flat.image)
    assert found.x_test.shape == (len(flat.x_test), 1, *flat.image)
    assert torch.equal(found.x.flatten(1), flat.x)
    assert torch.equal(found.x_test.flatten(1), flat.x_test)
    assert found.y is flat.y
    assert (found.name, found.image, found.classes) == (flat.name, flat.image, flat.classes)
    assert flat.x.ndim == 2  # and the original is as it was


def test_images_may_be_images_already_and_have_channels():
    x = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    made = data.Dataset("made", x, torch.zeros(2).long(), x[:1], torch.zeros(1).long(), (4, 5), 2)
    assert torch.equal(made.images().x, x)
    flat = data.Dataset("made", x.flatten(1), made.y, x[:1].flatten(1), made.y_test, (4, 5), 2)
    assert torch.equal(flat.images().x, x)


@pytest.mark.parametrize("image", [(5, 5), (7,), (), (2, 2, 15)])
def test_samples_that_are_no_images_are_refused(image):
    x = torch.zeros(2, 60)
    made = data.Dataset("made", x, torch.zeros(2).long(), x, torch.zeros(2).long(), image, 2)
    with pytest.raises(ValueError, match=r"samples of shape \(60,\) are not images of"):
        made.images()


# Generated sections.


def test_membranes_are_images_with_a_class_for_each_pixel():
    found = data.membranes()
    assert (found.name, found.image, found.classes) == ("membranes", (64, 64), 2)
    assert (found.x.shape, found.x_test.shape) == ((240, 1, 64, 64), (60, 1, 64, 64))
    assert (found.y.shape, found.y_test.shape) == ((240, 64, 64), (60, 64, 64))
    assert (found.x.dtype, found.y.dtype) == (torch.float32, torch.int64)
    assert set(found.y.unique().tolist()) == {0, 1}
    assert found.y.float().mean().item() == pytest.approx(0.22, abs=0.04)
    x = found.x.double()
    assert abs(x.mean().item()) < 1e-6
    assert x.square().mean().item() == pytest.approx(1, abs=1e-6)
    assert x[:, 0][found.y == 1].mean() < x[:, 0][found.y == 0].mean() - 0.7  # membranes are dark


@pytest.mark.parametrize(("pixels", "samples"), [(16, 5), (48, 31), (100, 6), (257, 5)])
def test_membranes_have_the_size_that_is_asked_for(pixels, samples):
    found = data.membranes(pixels=pixels, samples=samples)
    assert found.x.shape == (samples - samples // 5, 1, pixels, pixels)
    assert found.y_test.shape == (samples // 5, pixels, pixels)


def test_membranes_do_not_repeat():
    found = data.membranes(pixels=32, samples=200)
    images = torch.cat([found.x, found.x_test]).flatten(1)
    assert len(images.unique(dim=0)) == 200


def test_membranes_follow_seed_and_shift(monkeypatch):
    def drawn(shift, **options):
        monkeypatch.setenv("INITLIB_SEED", shift)
        return data.membranes(pixels=32, samples=5, **options).x

    first = drawn("0")
    assert torch.equal(drawn("0", seed=0), first)
    assert not any(torch.equal(drawn(*case), first) for case in (("1",), ("-1",)))
    assert not torch.equal(drawn("0", seed=1), first)


def test_a_unet_finds_membranes_better_than_any_threshold():
    """After 200 steps of eight images: what the task is for."""
    found = data.membranes(pixels=32, samples=500, seed=3300)
    model = nets.unet(1, 2, base=8, levels=2, normalize=True)
    initialize(model, "he_normal", generator=generator(3301))
    optimizer, g = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), generator(3302)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.02, 200)
    for _ in range(200):
        chosen = torch.randint(len(found.x), (8,), generator=g)
        optimizer.zero_grad()
        F.cross_entropy(model(found.x[chosen]), found.y[chosen]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        right = (model.eval()(found.x_test).argmax(1) == found.y_test).float().mean().item()
    grey, y = found.x_test[:, 0].flatten(), found.y_test.flatten()
    best = max(((grey <= t) == (y == 1)).float().mean().item() for t in torch.linspace(-3, 3, 61))
    assert right > best


# Archives of one's own.


def pictures(*shape):
    return runtime.rng(3310).integers(0, 256, shape, dtype=np.uint8)


def recognition(**changes):
    """Arrays of an archive for recognition: colour images of 8 x 12 in three classes."""
    arrays = {
        "x_train": pictures(9, 8, 12, 3),
        "y_train": np.arange(9) % 3,
        "x_test": pictures(6, 8, 12, 3),
        "y_test": np.arange(6) % 3,
        "classes": np.array(["cat", "dog", "frog"]),
    } | changes
    return {name: array for name, array in arrays.items() if array is not None}


def segmentation(**changes):
    """Arrays of an archive for segmentation: ten slices of 40 x 52, each pixel tells its slice and place."""
    images = np.arange(10 * 40 * 52).reshape(10, 40, 52)
    arrays = {"images": images, "membrane": (images // 7 % 3 == 0).astype(np.uint8)} | changes
    return {name: array for name, array in arrays.items() if array is not None}


@pytest.fixture
def save(tmp_path):
    def save(name="mine", **arrays):
        np.savez_compressed(tmp_path / f"{name}.npz", **arrays)
        return tmp_path / f"{name}.npz"

    return save


def test_recognition_archive_gives_its_images_channels_first(save):
    arrays = recognition()
    found = data.archive(save("animals", **arrays))
    assert (found.name, found.image, found.classes) == ("animals", (8, 12), 3)
    assert (found.x.shape, found.x_test.shape) == ((9, 3, 8, 12), (6, 3, 8, 12))
    assert (found.x.dtype, found.y.dtype) == (torch.float32, torch.int64)
    assert found.y.tolist() == arrays["y_train"].tolist()
    assert found.y_test.tolist() == arrays["y_test"].tolist()
    raw, tested = arrays["x_train"].astype(float), arrays["x_test"].astype(float)
    for part, given in ((found.x, raw), (found.x_test, tested)):
        np.testing.assert_allclose(part.permute(0, 2, 3, 1), (given - raw.mean()) / raw.std(), atol=1e-6)


@pytest.mark.parametrize("channels", [None, 1, 4])
def test_recognition_archive_may_be_grey_or_have_an_opacity(save, channels):
    shape = (8, 12) if channels is None else (8, 12, channels)
    path = save(**recognition(x_train=pictures(9, *shape), x_test=pictures(6, *shape)))
    assert data.archive(path).x.shape == (9, channels or 1, 8, 12)


@pytest.mark.parametrize("reduce", [1, 2, 4])
def test_reduce_averages_over_squares(save, reduce):
    arrays = recognition()
    found = data.archive(save(**arrays), reduce=reduce)
    assert found.image == (8 // reduce, 12 // reduce)
    means = (
        sum(arrays["x_train"][:, i::reduce, j::reduce].astype(float) for i in range(reduce) for j in range(reduce))
        / reduce**2
    )
    expected = (means - means.mean()) / means.std()
    np.testing.assert_allclose(found.x.permute(0, 2, 3, 1), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.float16, np.float32, np.float64])
def test_type_of_the_pixels_does_not_matter(save, dtype):
    arrays = recognition()
    expected = data.archive(save(**arrays))
    given = {name: arrays[name].astype(dtype) for name in ("x_train", "x_test")}
    found = data.archive(save(**recognition(**given)))
    torch.testing.assert_close(found.x, expected.x, atol=1e-6, rtol=0)
    cut = {"images": (segmentation()["images"] % 199).astype(dtype), "membrane": segmentation()["membrane"]}
    assert data.archive(save(**cut), pixels=8).x.dtype == torch.float32


def test_recognition_needs_no_names_of_classes(save):
    assert data.archive(save(**recognition(classes=None))).classes == 3
    five = recognition(classes=np.array(list("abcde")))
    assert data.archive(save(**five)).classes == 5


def test_large_sets_are_standardised_in_pieces(save):
    """More pixels than one piece holds: the pieces join without a seam."""
    x = pictures(700, 64, 128)
    x[:300] //= 4
    found = data.archive(
        save(**recognition(x_train=x, y_train=np.arange(700) % 3, x_test=x[:5], y_test=np.zeros(5, int)))
    )
    np.testing.assert_allclose(found.x[:, 0], (x - x.mean()) / x.std(), atol=1e-5)
    assert torch.equal(found.x_test, found.x[:5])


@pytest.fixture
def unscaled(monkeypatch):
    """Crops, their masks, and the slice of each crop, of the training and of the test set."""

    def cut(path, **options):
        with monkeypatch.context() as patch:
            patch.setattr(
                data, "_standardised", lambda name, x, y, x_test, y_test, image, classes: (x, y, x_test, y_test)
            )
            x, y, x_test, y_test = data.archive(path, **options)
        return [(crops[:, 0], masks, crops[:, 0, 0, 0] // (40 * 52)) for crops, masks in ((x, y), (x_test, y_test))]

    return cut


def test_segmentation_archive_gives_images_with_a_class_for_each_pixel(save, unscaled):
    path = save("stack", **segmentation())
    found = data.archive(path, pixels=8)
    assert (found.name, found.image, found.classes) == ("stack", (8, 8), 2)
    assert (found.x.shape, found.x_test.shape) == ((8 * 5 * 6, 1, 8, 8), (2 * 5 * 6, 1, 8, 8))
    assert (found.x.dtype, found.y.dtype, found.y.shape) == (torch.float32, torch.int64, (240, 8, 8))
    (x, _, _), (x_test, _, _) = unscaled(path, pixels=8)
    for part, raw in ((found.x, x), (found.x_test, x_test)):
        np.testing.assert_allclose(part[:, 0], (raw - x.mean()) / x.std(), atol=1e-5)


@pytest.mark.parametrize("pixels", [1, 8, 13, 20, 40])
@pytest.mark.parametrize("samples", [None, 5, 9])
def test_crops_are_squares_of_the_slices_without_overlap_and_with_their_own_masks(save, unscaled, pixels, samples):
    arrays = segmentation()
    parts = unscaled(save(**arrays), pixels=pixels, samples=samples)
    crops, masks, _ = (np.concatenate(both) for both in zip(*parts, strict=True))
    assert len(np.unique(crops)) == crops.size
    np.testing.assert_array_equal(masks, arrays["membrane"].ravel()[crops])
    assert (np.diff(crops, axis=2) == 1).all()
    assert (np.diff(crops, axis=1) == 52).all()
    assert (crops[:, 0, 0] % 52 <= 52 - pixels).all()  # none runs over the edge of its slice
    whole = (40 // pixels) * (52 // pixels)
    counts = (8 * whole, 2 * whole) if samples is None else (samples - samples // 5, samples // 5)
    assert [len(part[0]) for part in parts] == list(counts)


@pytest.mark.parametrize("seed", range(8))
def test_test_crops_come_from_slices_of_their_own_that_are_neighbours(save, unscaled, seed):
    (_, _, trained), (_, _, tested) = unscaled(save(**segmentation()), pixels=20, seed=seed)
    assert sorted(set(trained) | set(tested)) == list(range(10))
    assert not set(trained) & set(tested)
    assert max(tested) - min(tested) == 1


def test_seed_and_its_shift_decide_which_slices_and_crops_are_taken(save, unscaled, monkeypatch):
    path = save(**segmentation())

    def taken(shift, **options):
        monkeypatch.setenv("INITLIB_SEED", shift)
        return unscaled(path, pixels=8, samples=50, **options)[0][0].tolist()

    first = taken("0")
    assert taken("0", seed=0) == first
    others = [taken("0", seed=1), taken("1"), taken("-1")]
    assert all(other != first for other in others)
    slices = {unscaled(path, pixels=40, seed=seed)[1][2].min() for seed in range(40)}
    assert len(slices) > 3


def test_an_archive_may_have_fewer_crops_than_asked_for(save):
    found = data.archive(save(**segmentation()), pixels=20, samples=10_000)
    assert (len(found.x), len(found.x_test)) == (8 * 4, 2 * 4)


def test_two_slices_suffice(save):
    arrays = {name: array[:2] for name, array in segmentation().items()}
    found = data.archive(save(**arrays), pixels=40)
    assert (len(found.x), len(found.x_test)) == (1, 1)


@pytest.mark.parametrize("scale", [1, 255, bool])
def test_masks_are_of_zeros_and_ones_or_of_255_or_of_truths(save, scale):
    arrays = segmentation()
    expected = data.archive(save(**arrays), pixels=8)
    masks = arrays["membrane"].astype(bool) if scale is bool else arrays["membrane"] * np.uint8(scale)
    found = data.archive(save(**segmentation(membrane=masks)), pixels=8)
    assert torch.equal(found.y, expected.y)
    assert set(found.y.unique().tolist()) == {0, 1}


def test_crops_have_64_pixels_unless_named(save):
    images = pictures(5, 70, 140)
    assert data.archive(save(images=images, membrane=images > 128)).x.shape == (8, 1, 64, 64)


def test_paths_may_be_text_and_other_arrays_may_be_there(save):
    path = save(**recognition(note=np.array("nothing"), extra=np.zeros(3)))
    assert torch.equal(data.archive(str(path)).x, data.archive(path).x)


class Payload:
    """Would leave a file behind if it were unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("recognition", name) for name in ("x_train", "y_test", "classes")),
        *(("segmentation", name) for name in ("images", "membrane")),
    ],
)
def test_python_objects_are_never_unpickled(save, tmp_path, kind, name):
    objects = np.empty(9, object)
    objects[:] = [Payload(tmp_path / "ran")] * 9
    path = save(**{"recognition": recognition, "segmentation": segmentation}[kind](**{name: objects}))
    with pytest.raises(ValueError, match=f"{name} of .*mine.npz .*Python objects"):
        data.archive(path)
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nothing\.npz; an archive is a \.npz file"):
        data.archive(tmp_path / "nothing.npz")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        data.archive(tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 not really", b"\x93NUMPY"])
def test_a_file_that_is_no_archive_is_refused(tmp_path, content):
    (tmp_path / "broken.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.npz is not a \.npz file"):
        data.archive(tmp_path / "broken.npz")


def test_an_array_alone_is_refused(tmp_path):
    np.save(tmp_path / "alone.npy", pictures(4, 8, 8))
    with pytest.raises(ValueError, match=r"alone\.npy is not a \.npz file"):
        data.archive(tmp_path / "alone.npy")


def test_a_damaged_archive_is_refused(save, tmp_path):
    whole = save(**recognition()).read_bytes()
    for name, content in {"short": whole[: len(whole) // 2], "wrong": whole[:60] + bytes(40) + whole[100:]}.items():
        (tmp_path / f"{name}.npz").write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}\.npz (is not a \.npz file|cannot be read)"):
            data.archive(tmp_path / f"{name}.npz")


def test_files_in_an_archive_that_are_no_arrays_are_refused(save, tmp_path):
    path = save(**{name: array for name, array in segmentation().items() if name == "images"})
    with zipfile.ZipFile(path, "a") as found:
        found.writestr("membrane.npy", "0 1 0 1")
    with pytest.raises(ValueError, match=r"membrane of .* (must hold real numbers|cannot be read)"):
        data.archive(path, pixels=8)


@pytest.mark.parametrize("missing", ["x_train", "y_train", "x_test", "y_test"])
def test_an_archive_without_an_array_says_what_is_needed_and_what_is_there(save, missing):
    with pytest.raises(
        ValueError, match="x_train, y_train, x_test, y_test for recognition; images, membrane for"
    ) as info:
        data.archive(save(**recognition(**{missing: None})))
    there = str(info.value).partition("it holds ")[2]
    assert missing not in there
    assert "classes" in there


BAD_RECOGNITION = {
    "flat": ({"x_train": pictures(9, 96)}, r"x_train of .* must have shape .* got \(9, 96\)"),
    "one image": ({"x_test": pictures(8, 12)}, "x_test of .* must have shape"),
    "channels first": (
        {"x_train": pictures(9, 3, 8, 12), "x_test": pictures(6, 3, 8, 12)},
        r"with 1, 3 or 4 channels, got \(9, 3, 8, 12\)",
    ),
    "other size": ({"x_test": pictures(6, 8, 10, 3)}, r"alike in shape, got \(8, 12, 3\) and \(8, 10, 3\)"),
    "grey and colour": ({"x_test": pictures(6, 8, 12)}, r"alike in shape, got \(8, 12, 3\) and \(8, 12\)"),
    "empty": ({"x_train": pictures(0, 8, 12, 3), "y_train": np.zeros(0, int)}, "x_train of .* not empty"),
    "no pixels": ({"x_test": pictures(6, 0, 12, 3)}, "x_test of .* not empty"),
    "not a number": ({"x_test": np.full((6, 8, 12, 3), np.nan)}, "x_test of .* must be finite"),
    "infinite": ({"x_train": np.full((9, 8, 12, 3), np.inf)}, "x_train of .* must be finite"),
    "complex": ({"x_train": np.zeros((9, 8, 12, 3), complex)}, "x_train of .* must hold real numbers, got complex128"),
    "words": ({"y_train": np.array(["cat"] * 9)}, "y_train of .* must hold real numbers, got <U3"),
    "dates": ({"x_train": np.zeros((9, 8, 12, 3), "M8[s]")}, "x_train of .* must hold real numbers"),
    "too few labels": ({"y_train": np.arange(8) % 3}, r"y_train of .* each of 9 images, got int64 of shape \(8,\)"),
    "column of labels": ({"y_test": np.zeros((6, 1), int)}, r"y_test of .* of shape \(6, 1\)"),
    "fractions": ({"y_train": np.arange(9) / 3}, "y_train of .* must hold an integer .* got float64"),
    "truths": ({"y_test": np.arange(6) > 3}, "y_test of .* must hold an integer .* got bool"),
    "negative": ({"y_train": np.arange(9) % 3 - 1}, "y_train of .* between 0 and 2, got -1 to 1"),
    "more than names": ({"y_train": np.arange(9) % 4}, "y_train of .* between 0 and 2, got 0 to 3"),
    "new in the test": ({"y_test": np.arange(6), "classes": None}, "y_test of .* between 0 and 2, got 0 to 5"),
    "all the same": ({"x_train": np.full((9, 8, 12, 3), 7)}, "mine: all pixels of the training set are 7"),
}


@pytest.mark.parametrize("case", BAD_RECOGNITION)
def test_archives_for_recognition_that_make_no_sense_are_refused(save, case):
    changes, message = BAD_RECOGNITION[case]
    with pytest.raises(ValueError, match=message):
        data.archive(save(**recognition(**changes)))


BAD_SEGMENTATION = {
    "colours": ({"images": pictures(10, 40, 52, 3)}, r"images of .* \(slices, height, width\), got \(10, 40, 52, 3\)"),
    "one slice": ({"images": pictures(1, 40, 52), "membrane": np.zeros((1, 40, 52))}, "at least two slices"),
    "other shape": (
        {"membrane": np.zeros((10, 52, 40))},
        r"membrane of .* shape \(10, 40, 52\) of images, got \(10, 52",
    ),
    "three classes": ({"membrane": np.arange(20800).reshape(10, 40, 52) % 3}, "membrane of .* must be 0 and 1"),
    "mixed": ({"membrane": np.tile([0, 1, 255, 0], 5200).reshape(10, 40, 52)}, "membrane of .* or 0 and 255, got"),
    "shares": ({"membrane": np.full((10, 40, 52), 0.5)}, r"membrane of .* or 0 and 255, got \[0.5\]"),
    "negative": ({"membrane": np.full((10, 40, 52), -1)}, "membrane of .* or 0 and 255"),
    "not a number": ({"membrane": np.full((10, 40, 52), np.nan)}, "membrane of .* must be finite"),
    "empty": ({"images": pictures(10, 0, 52), "membrane": pictures(10, 0, 52)}, "images of .* not empty"),
    "all the same": ({"images": np.ones((10, 40, 52))}, "all pixels of the training set are 1"),
}


@pytest.mark.parametrize("case", BAD_SEGMENTATION)
def test_archives_for_segmentation_that_make_no_sense_are_refused(save, case):
    changes, message = BAD_SEGMENTATION[case]
    with pytest.raises(ValueError, match=message):
        data.archive(save(**segmentation(**changes)), pixels=8)


def test_crops_larger_than_the_slices_are_refused(save):
    path = save(**segmentation())
    for options, pixels in (({}, 64), ({"pixels": 41}, 41)):
        with pytest.raises(ValueError, match=rf"pixels must be at most the sides \(40, 52\) .* got {pixels}"):
            data.archive(path, **options)


@pytest.mark.parametrize("reduce", [3, 5, 16])
def test_squares_that_do_not_fill_an_image_are_refused(save, reduce):
    with pytest.raises(ValueError, match=rf"reduce must divide the sides \(8, 12\) .* got {reduce}"):
        data.archive(save(**recognition()), reduce=reduce)


def test_options_of_the_other_kind_are_refused(save):
    images, slices = save("images", **recognition()), save("slices", **segmentation())
    for path, options in ((images, {"pixels": 8}), (images, {"samples": 8}), (slices, {"reduce": 1})):
        (name,) = options
        with pytest.raises(ValueError, match=f"{name} does not apply to .*{path.name}, an archive for"):
            data.archive(path, **options)


@pytest.mark.parametrize(
    ("load", "name"),
    [
        *(("archive", name) for name in ("reduce", "pixels", "samples")),
        ("recognition", "reduce"),
        *((load, name) for load in ("segmentation", "membranes") for name in ("pixels", "samples")),
    ],
)
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-2, ValueError), (2.0, TypeError), (True, TypeError), ("8", TypeError)]
)
def test_sizes_that_are_none_are_refused_by_name(load, name, value, error):
    where = ("nothing.npz",) if load == "archive" else ()
    with pytest.raises(error, match=f"^{name} must be .*, got {value!r}"):
        getattr(data, load)(*where, **{name: value})


@pytest.mark.parametrize("load", ["archive", "segmentation", "membranes"])
def test_a_fifth_of_the_samples_is_at_least_one(load):
    where = ("nothing.npz",) if load == "archive" else ()
    with pytest.raises(ValueError, match=r"samples must be at least 5, .* got 4"):
        getattr(data, load)(*where, samples=4)


# What INITLIB_DATA names.


def test_without_archives_the_tasks_are_mnist_and_membranes(monkeypatch):
    for value in (None, "", "  "):
        if value is not None:
            monkeypatch.setenv("INITLIB_DATA", value)
        found = data.recognition(seed=5)
        expected = data.mnist(pixels=14, seed=5).images()
        assert torch.equal(found.x, expected.x)
        assert torch.equal(found.y_test, expected.y_test)
    assert data.recognition(reduce=4).image == (7, 7)
    found, expected = data.segmentation(pixels=32, samples=10, seed=5), data.membranes(pixels=32, samples=10, seed=5)
    assert torch.equal(found.x, expected.x)
    assert torch.equal(found.y_test, expected.y_test)


@pytest.mark.parametrize("reduce", [3, 7, 28])
def test_mnist_is_reduced_to_sizes_that_it_has(reduce):
    with pytest.raises(ValueError, match=f"reduce must be 1, 2 or 4 for MNIST, got {reduce}"):
        data.recognition(reduce=reduce)


@pytest.mark.parametrize("how", ["files", "folder", "folders", "trailing"])
def test_initlib_data_names_files_and_folders(save, tmp_path, monkeypatch, how):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    images, stack = save("a/images", **recognition()), save("b/stack", **segmentation())
    (tmp_path / "a" / "notes.txt").write_text("not data")
    named = {
        "files": [images, stack],
        "folder": [save("images", **recognition()).parent, save("stack", **segmentation())],
        "folders": [tmp_path / "b", tmp_path / "a"],
        "trailing": [stack, images, ""],
    }[how]
    monkeypatch.setenv("INITLIB_DATA", os.pathsep.join(map(str, named)))
    found, expected = data.recognition(seed=2), data.archive(images, reduce=2)
    assert found.name == "images"
    assert torch.equal(found.x, expected.x)
    found, expected = data.segmentation(pixels=8, samples=20, seed=2), data.archive(stack, pixels=8, samples=20, seed=2)
    assert found.name == "stack"
    assert torch.equal(found.x, expected.x)
    assert torch.equal(found.y, expected.y)


def test_the_first_archive_of_a_kind_is_taken(save, tmp_path, monkeypatch):
    later, first = save("b", **recognition()), save("a", **recognition())
    save("0 other", other=np.zeros(3))
    monkeypatch.setenv("INITLIB_DATA", str(tmp_path))
    assert data.recognition().name == "a"
    monkeypatch.setenv("INITLIB_DATA", os.pathsep.join(map(str, (later, first))))
    assert data.recognition().name == "b"


def test_a_path_that_does_not_exist_is_named(save, tmp_path, monkeypatch):
    monkeypatch.setenv("INITLIB_DATA", os.pathsep.join([str(save(**recognition())), str(tmp_path / "gone")]))
    for load in (data.recognition, data.segmentation):
        with pytest.raises(ValueError, match=r"INITLIB_DATA=.* names '.*gone', which does not exist; unset it for"):
            load()


def test_paths_without_an_archive_of_the_kind_are_refused(save, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("INITLIB_DATA", str(tmp_path / "empty"))
    with pytest.raises(
        ValueError, match=r"no archive for recognition, .* x_train, .* among no \.npz files; .* for MNIST"
    ):
        data.recognition()
    monkeypatch.setenv("INITLIB_DATA", str(save(**recognition())))
    with pytest.raises(ValueError, match=r"no archive for segmentation, .* images, membrane, among mine\.npz; add one"):
        data.segmentation()
    (tmp_path / "empty" / "text.npz").write_text("text")
    monkeypatch.setenv("INITLIB_DATA", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"text\.npz is not a \.npz file"):
        data.recognition()


def test_home_folder_may_be_abbreviated(save, tmp_path, monkeypatch):
    save(**recognition())
    monkeypatch.setattr(Path, "expanduser", lambda path: Path(str(path).replace("~", str(tmp_path))))
    monkeypatch.setenv("INITLIB_DATA", "~/mine.npz")
    assert data.recognition().name == "mine"


def test_digits_and_mnist_do_not_look_at_initlib_data(monkeypatch):
    monkeypatch.setenv("INITLIB_DATA", "/gone")
    assert data.digits().name == "digits"
    assert data.mnist(pixels=7).name == "mnist"


# CIFAR-10, which is fetched: here from a stand-in.


@pytest.fixture
def openml(monkeypatch):
    """Six hundred rows in place of 60,000, and what was asked for."""
    asked = []
    labels = np.repeat(np.arange(10), 60)
    rows = pictures(600, 3072)
    rows[:, 0], rows[:, 1] = labels, np.tile(np.arange(60), 10)

    def fetch(**options):
        asked.append(options)
        return types.SimpleNamespace(data=rows.copy(), target=labels.astype(str).astype(object))

    data._cifar10.cache_clear()
    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    yield rows, asked
    data._cifar10.cache_clear()


def test_cifar10_is_images_with_channels_first(openml):
    rows, asked = openml
    found = data.cifar10()
    assert (found.name, found.image, found.classes) == ("cifar10", (32, 32), 10)
    assert (found.x.shape, found.x_test.shape) == ((480, 3, 32, 32), (120, 3, 32, 32))
    assert (found.x.dtype, found.y.dtype) == (torch.float32, torch.int64)
    assert np.bincount(found.y).tolist() == [48] * 10
    assert asked[0]["data_id"] == 40927
    scale = rows.max() / (found.x.max() - found.x.min()).item()
    restored = np.rint((torch.cat([found.x, found.x_test]) - found.x.min()).numpy() * scale).astype(int)
    expected = {(row[0], row[1]): row.reshape(3, 32, 32) for row in rows}
    for image, label in zip(restored, torch.cat([found.y, found.y_test]).tolist(), strict=True):
        np.testing.assert_array_equal(image, expected.pop((label, image[0, 0, 1])))


@pytest.mark.parametrize("samples", [50, 100, 333, 600])
def test_part_of_cifar10_has_all_classes_alike(openml, samples):
    found = data.cifar10(samples=samples)
    counts = np.bincount(torch.cat([found.y, found.y_test]), minlength=10)
    assert counts.sum() == samples
    assert counts.max() - counts.min() <= 1
    assert len(found.x_test) == -(-samples // 5)


def test_cifar10_is_fetched_once_and_follows_the_seed(openml):
    _, asked = openml
    first, again, other = data.cifar10(samples=50), data.cifar10(samples=50), data.cifar10(samples=50, seed=1)
    assert len(asked) == 1
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)
    expected = first.x.clone()
    first.x.zero_()
    assert torch.equal(data.cifar10(samples=50).x, expected)


@pytest.mark.parametrize(
    ("samples", "error"), [(49, ValueError), (60_001, ValueError), (0, ValueError), (1e3, TypeError), ("99", TypeError)]
)
def test_numbers_of_images_that_cifar10_has_not_are_refused_before_it_is_fetched(openml, samples, error):
    with pytest.raises(error, match=f"samples must .*, got {samples!r}"):
        data.cifar10(samples=samples)
    assert openml[1] == []


def test_without_a_network_cifar10_says_what_to_do(monkeypatch, tmp_path):
    """scikit-learn's own fetcher, with an empty cache and nobody to answer."""

    def unreachable(*args, **kwargs):
        raise urllib.error.URLError("unreachable")

    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(tmp_path))
    monkeypatch.setattr("sklearn.datasets._openml.urlopen", unreachable)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    data._cifar10.cache_clear()
    with pytest.warns(UserWarning, match="network error"), pytest.raises(RuntimeError, match="could not be fetched"):
        data.cifar10()


def test_a_damaged_download_of_cifar10_says_what_to_do(monkeypatch):
    def damaged(**options):
        raise ValueError("md5 checksum does not match")

    data._cifar10.cache_clear()
    monkeypatch.setattr("sklearn.datasets.fetch_openml", damaged)
    with pytest.raises(RuntimeError, match=r"md5 checksum does not match\). The first time this needs a network"):
        data.cifar10()


@pytest.mark.parametrize("quote", ["", "'"])
def test_cifar10_gets_through_the_parser_of_scikit_learn_as_bytes(monkeypatch, quote):
    from sklearn.datasets._arff_parser import load_arff_from_gzip_file

    columns = {name: {"data_type": "numeric", "name": name} for name in map("a{}".format, range(3072))}
    columns["class"] = {"data_type": "nominal", "name": "class"}
    rows, labels = pictures(60, 3072), np.arange(60) % 10
    lines = [",".join(map(str, row)) + f",{quote}{label}{quote}\n" for row, label in zip(rows, labels, strict=True)]
    file = io.BytesIO("".join(["@RELATION cifar\n", "@DATA\n", *lines]).encode())

    def fetch(data_id, as_frame, parser, read_csv_kwargs):
        features = [*columns][:-1]
        x, y, _, _ = load_arff_from_gzip_file(
            file, parser, "pandas" if as_frame else "numpy", columns, features, ["class"], None, read_csv_kwargs
        )
        return types.SimpleNamespace(data=x, target=np.ravel(y))

    data._cifar10.cache_clear()
    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    x, y = data._cifar10()
    assert x.dtype == np.uint8
    np.testing.assert_array_equal(x, rows.reshape(60, 3, 32, 32))
    assert y.tolist() == labels.tolist()
    assert data.cifar10(samples=60).x.shape == (48, 3, 32, 32)
    data._cifar10.cache_clear()
