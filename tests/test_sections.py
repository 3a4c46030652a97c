"""Generated sections: what they look like in numbers, and that a threshold does not find the membranes."""

import numpy as np
import pytest
import torch
from scipy import ndimage

from initlib import rng, sections


@pytest.fixture(scope="module")
def drawn():
    return sections.draw(8, 256, rng(3200))


def test_sections_are_bytes_with_a_mask(drawn):
    images, masks = drawn
    assert (images.shape, images.dtype) == ((8, 256, 256), np.uint8)
    assert (masks.shape, masks.dtype) == ((8, 256, 256), bool)


def test_about_22_percent_of_the_pixels_belong_to_membranes(drawn):
    share = drawn[1].mean((1, 2))
    assert share.mean() == pytest.approx(0.22, abs=0.03)
    assert len(set(share)) == len(share)


def test_membranes_are_dark_and_grey_values_those_the_docstring_says(drawn):
    images, masks = drawn
    assert images[masks].mean() == pytest.approx(100, abs=12)
    assert images[~masks].mean() == pytest.approx(145, abs=15)
    assert images[masks].std() == pytest.approx(35, abs=5)
    assert images[~masks].std() == pytest.approx(35, abs=5)
    assert np.isin(images, (0, 255)).mean() < 0.01  # nothing is cut off


def test_cells_are_closed_and_of_different_sizes(drawn):
    _, masks = drawn
    sizes = np.concatenate([np.bincount(ndimage.label(~mask)[0].ravel())[1:] for mask in masks])
    large = sizes[sizes > 50]
    assert len(large) > 8 * 10
    assert sizes.max() < 256**2 / 2  # a membrane with gaps would leave one region
    assert large.std() > 0.5 * large.mean()


def test_membranes_are_some_six_pixels_wide_and_uneven(drawn):
    width = 2 * np.concatenate([ndimage.distance_transform_edt(mask)[_ridge(mask)] for mask in drawn[1]])
    assert np.median(width) == pytest.approx(6, abs=1.5)
    assert np.percentile(width, 90) - np.percentile(width, 10) > 1


def _ridge(mask):
    """Middle lines: where the distance to the outside is largest around."""
    distance = ndimage.distance_transform_edt(mask)
    return mask & (distance == ndimage.maximum_filter(distance, 5))


def test_no_threshold_is_much_better_than_calling_nothing_a_membrane(drawn):
    images, masks = drawn
    darker = np.bincount(images[masks], minlength=256).cumsum() + (
        np.bincount(images[~masks], minlength=256)[::-1].cumsum()[::-1] - np.bincount(images[~masks], minlength=256)
    )
    best, nothing = darker.max() / masks.size, 1 - masks.mean()
    assert best == max(((images <= t) == masks).mean() for t in range(256))
    assert best - nothing < 0.08


def test_cells_have_dark_things_that_are_no_membranes_and_some_membranes_are_faint(drawn):
    images, masks = drawn
    smooth = ndimage.gaussian_filter(images.astype(float), (0, 1.5, 1.5))
    inside = smooth[np.stack([ndimage.distance_transform_edt(~mask) > 4 for mask in masks])]
    middle = smooth[np.stack([_ridge(mask) for mask in masks])]
    assert (inside < np.median(middle)).mean() > 0.01
    assert (middle > np.percentile(inside, 25)).mean() > 0.05


def test_same_generator_gives_the_same_sections_and_another_gives_others():
    first, again, other = (sections.draw(2, 130, rng(n)) for n in (3201, 3201, 3202))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert not np.array_equal(first[0][0], first[0][1])


@pytest.mark.parametrize("side", [1, 7, 127, 128, 129, 300])
def test_sections_have_any_size(side):
    images, masks = sections.draw(3, side, rng(3203))
    assert images.shape == masks.shape == (3, side, side)
    if side > 100:
        assert 0.1 < masks.mean() < 0.35
        assert 90 < images.mean() < 170


def test_global_random_state_stays_as_it_is():
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    sections.draw(1, 64, rng(3204))
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("name", ["count", "side"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_sizes_that_no_section_has_are_refused_by_name(name, value, error):
    with pytest.raises(error, match=f"^{name} must be .*, got {value}"):
        sections.draw(**{"count": 1, "side": 64, name: value}, rng=rng(3205))


@pytest.mark.parametrize("value", [None, 3, "0"])
def test_randomness_comes_from_a_generator(value):
    with pytest.raises(TypeError, match=r"rng must be a numpy.random.Generator, got \w+"):
        sections.draw(1, 64, value)
