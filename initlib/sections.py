"""Generated sections that look like electron microscopy of nerve tissue, with the cells' membranes marked.

Nothing is traced from a micrograph: cells, their membranes and what lies in them are drawn at random, and a
microscope's blur and noise put over them. A membrane is a thin dark line *between* cells, and that is what a network
must learn: mitochondria, vesicles and tubules in the cells are dark as well, and a membrane that was cut obliquely is
faint.
"""

import numpy as np
import torch
from scipy import ndimage
from torch.nn import functional as F

from initlib.runtime import check_count

_BORDER = 32  # pixels around a section in which cells are drawn as well: borders are displaced by less
_SMALLEST = 128  # side of the smallest section that is drawn, and then cut: some cells must fit


def draw(count: int, side: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Sections of ``side`` × ``side`` pixels, and which of their pixels belong to a membrane.

    Cells, some large and some in bundles of small ones, are regions of the points that lie nearest to a seed, their
    borders displaced by smooth noise. The sizes are those of a section at some 4 nanometres a pixel: cells 20 to 90
    pixels across, membranes of 6 pixels as they are marked. Grey values are about 100 on membranes and 145 elsewhere,
    with a standard deviation of 35 on each.

    Parameters
    ----------
    count, side : int
    rng : numpy.random.Generator
        Source of all randomness.

    Returns
    -------
    images : array of uint8, shape (count, side, side)
    masks : array of bool, shape (count, side, side)
        True on membranes, about 22 % of the pixels.

    Raises
    ------
    TypeError, ValueError
        If ``count`` or ``side`` is not a positive integer, or ``rng`` not a generator of NumPy.

    Notes
    -----
    Introduced in chapter 08b.
    """
    check_count("count", count)
    check_count("side", side)
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"rng must be a numpy.random.Generator, got {type(rng).__name__}")
    images, masks = (np.empty((count, side, side), dtype) for dtype in (np.uint8, bool))
    together = max(1, 2**20 // max(side, _SMALLEST) ** 2)  # memory stays small
    for k in range(0, count, together):
        drawn = _draw(min(together, count - k), max(side, _SMALLEST), rng)
        images[k : k + together], masks[k : k + together] = (part[:, :side, :side] for part in drawn)
    return images, masks


def _draw(count, side, rng):
    def noise(scale):
        return _noise(count, side, scale, rng)

    which = np.arange(count)[:, None, None]
    distance, cell = map(np.stack, zip(*(_cells(side + 2 * _BORDER, rng) for _ in range(count)), strict=True))
    # Straight borders between cells, read at places that are displaced, become curved and rough.
    grid = np.indices((side, side), dtype=np.float32) + _BORDER
    moved = [np.rint(line + 6 * noise(22) + 1.2 * noise(6)).astype(int) for line in grid]
    at = which, *(np.clip(line, 0, side + 2 * _BORDER - 1) for line in moved)
    distance, cell = ndimage.gaussian_filter(distance[at], (0, 1.5, 1.5)), cell[at]

    half = 3.0 * np.exp(0.15 * noise(10))
    oblique = 1 / (1 + np.exp(-6 * (noise(16) - 1.4)))
    depth = (105 + 18 * noise(8)) * (1 - 0.55 * oblique)
    image = 158 + 12 * rng.standard_normal((count, cell.max() + 1))[which, cell] + 13 * noise(12) + 12 * noise(2.4)
    image -= depth * np.exp(-((distance / (half * (0.8 + 0.6 * oblique))) ** 2))
    image -= _organelles(distance, rng) + _tubules(distance, noise)
    image *= 1 + 0.05 * noise(60)
    image = ndimage.gaussian_filter(image, (0, 0.7, 0.7)) + 17 * noise(0.9) + 8 * noise(0)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8), distance < half


def _noise(count, side, scale, rng):
    """Gaussian noise of unit variance, smooth over ``scale`` pixels; coarse where that suffices."""
    step = max(1, int(scale / 3))
    small = -(-side // step)
    z = rng.standard_normal((count, small, small), dtype=np.float32)
    if scale:
        z = ndimage.gaussian_filter(z, (0, scale / step, scale / step), mode="wrap")
        z *= np.sqrt(4 * np.pi) * scale / step  # squares of the weights of a Gaussian sum to 1 / (4 pi scale^2)
    if step > 1:
        z = F.interpolate(torch.from_numpy(z)[None], scale_factor=step, mode="bilinear")[0].numpy()
    return z[:, :side, :side]


def _cells(side, rng):
    """Distance of each pixel from the border of its cell, and the number of the cell; some large, some in bundles."""
    large = rng.random((round((side / 76) ** 2) + 1, 2)) * side
    bundles = rng.random((round((side / 190) ** 2) + 1, 2)) * side
    small = (bundles[:, None] + 22 * rng.standard_normal((len(bundles), 5, 2))).reshape(-1, 2)
    points = np.unique(np.vstack([large, small]).clip(0, side - 1).astype(int), axis=0)
    free, numbers = np.ones((side, side), bool), np.zeros((side, side), int)
    free[tuple(points.T)], numbers[tuple(points.T)] = False, np.arange(len(points))
    nearest = ndimage.distance_transform_edt(free, return_distances=False, return_indices=True)
    cell = numbers[tuple(nearest)]
    inside = np.ones((side, side), bool)
    inside[:-1] &= cell[:-1] == cell[1:]
    inside[:, :-1] &= cell[:, :-1] == cell[:, 1:]
    return ndimage.distance_transform_edt(inside).astype(np.float32), cell


def _organelles(distance, rng):
    """How much darker mitochondria (large, dark, with a membrane of their own) and vesicles (small rings) are."""
    dark = np.zeros_like(distance)
    count, side, _ = dark.shape
    for radius, density, room in ((14, 4e-4, 17), (2.8, 6e-3, 6)):
        places = rng.integers(side, size=(rng.poisson(density * dark.size), 2))
        slices = rng.integers(count, size=len(places))
        fits = distance[slices, *places.T] > room
        for k, (r, c) in zip(slices[fits], places[fits], strict=True):
            size, other = radius * rng.uniform(0.6, 1.4, 2)
            reach = int(max(size, other)) + 4
            rows, columns = (slice(max(0, p - reach), min(side, p + reach + 1)) for p in (r, c))
            y, x = np.arange(rows.start, rows.stop)[:, None] - r, np.arange(columns.start, columns.stop) - c
            angle = rng.uniform(0, np.pi)
            u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
            out = (np.hypot(u / size, v / other) - 1) * np.sqrt(size * other)  # pixels from its membrane, about
            stain = rng.uniform(25, 80) * np.exp(-((out / 1.4) ** 2))
            if radius > 5:
                stain += rng.uniform(30, 65) * (1 + 0.3 * np.sin(1.2 * u)) / (1 + np.exp(2 * out))
            dark[k, rows, columns] = np.maximum(dark[k, rows, columns], stain)
    return dark


def _tubules(distance, noise):
    """How much darker thin lines through the inside of large cells are."""
    return 50 * np.exp(-((noise(11) / 0.08) ** 2)) * ((noise(20) > 0.7) & (distance > 7))
