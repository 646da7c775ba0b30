"""Masks of losses: coarser ones cover every window, and a few bands of an ablation stand for all."""

import pytest
import torch

from patchguard import Patch
from patchguard.errors import InputError
from patchguard.geometry.field import Axis, Field
from patchguard.geometry.windows import Windows
from patchguard.training.augment import BatchRandom
from patchguard.training.masks import coarsen, project_to_regions, sample_regions, subsample_boxes


def random(images: int) -> BatchRandom:
    return BatchRandom(torch.Generator().manual_seed(0), images, slice(0, images))


@pytest.mark.parametrize(("bands", "regions"), [(32, 8), (32, 1), (32, 32), (32, 5), (7, 3)])
def test_regions_are_different_evenly_spaced_and_start_anywhere(bands: int, regions: int) -> None:
    drawn = sample_regions(bands, regions, random(2000))
    assert drawn.shape == (2000, regions)
    assert set(drawn[:, 0].tolist()) == set(range(bands))
    gaps = (drawn.roll(-1, 1) - drawn - 1) % bands + 1
    assert torch.equal(gaps.sum(1), torch.full((2000,), bands))  # once around, so that none comes twice
    assert set(gaps.flatten().tolist()) <= {bands // regions, -(-bands // regions)}


def test_one_region_is_drawn_as_it_always_was() -> None:
    assert torch.equal(sample_regions(32, 1, random(50)), random(50).integers(32, 1))


@pytest.mark.parametrize("bands", [7, 12, 32])
@pytest.mark.parametrize("width", [1, 3, 6])
def test_every_window_is_hidden_by_a_mask_unless_it_crosses_the_seam(bands: int, width: int) -> None:
    windows = Windows.sliding(grid=(1, bands), size=(1, width), wrap=(False, True))
    for regions in range(1, bands + 1):
        if -(-width * regions // bands) == regions:
            continue  # nothing would be left to see
        masks = project_to_regions(windows, regions)
        assert (masks.grid, any(masks.wrap)) == ((1, regions), False)
        hidden = [set(range(start, stop)) for start, stop in masks.columns]
        widest = 0
        for numbers in set(map(tuple, sample_regions(bands, regions, random(200)).tolist())):
            for start in range(bands):
                touched = {cell for cell in range(regions) if (numbers[cell] - start) % bands < width}
                around = {0, regions - 1} <= touched and len(touched) < regions
                assert around or any(touched <= mask for mask in hidden)
                widest = max(widest, len(touched))
        assert widest == len(hidden[0])  # no more than some window can


def test_masks_on_the_bands_of_a_recipe() -> None:
    windows = Windows.sliding(grid=(1, 32), size=(1, 8), wrap=(False, True))
    assert project_to_regions(windows, 8) == Windows.sliding(grid=(1, 8), size=(1, 2))
    assert project_to_regions(windows, 32) == Windows.sliding(grid=(1, 32), size=(1, 8))


def test_bands_of_rows_are_a_row_of_cells_as_well() -> None:
    circle = Axis(tuple(range(16)), (4,) * 16, 16, wrap=True)
    windows = Windows.reached_by(Patch(5), Field(rows=circle, columns=Axis((0,), (16,), 16)))
    assert project_to_regions(windows, 4) == Windows.sliding(grid=(1, 4), size=(1, 2))


@pytest.mark.parametrize(
    ("windows", "regions", "message"),
    [
        (Windows.sliding(grid=(6, 6), size=(2, 2)), 4, "unless bands lie on a circle; got 4"),
        (Windows.sliding(grid=(1, 6), size=(1, 2)), 4, "unless bands lie on a circle; got 4"),
        (Windows.sliding(grid=(1, 6), size=(1, 2), wrap=(False, True)), 7, "at most the 6 bands.*got 7"),
        (Windows.sliding(grid=(1, 6), size=(1, 2), wrap=(False, True)), 1, "leave some of them visible; got 1"),
    ],
)
def test_what_cannot_stand_for_windows_is_refused(windows: Windows, regions: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        project_to_regions(windows, regions)


# -- coarser and subsampled masks --------------------------------------------------------------------------------------

WINDOWS = Windows.sliding(grid=(32, 32), size=(11, 11))


@pytest.mark.parametrize("step", [1, 2, 3, 4, 7, 100])
def test_coarse_masks_cover_every_window(step: int) -> None:
    masks = coarsen(WINDOWS, step)
    assert masks.cover(WINDOWS)
    assert len(masks.rows) == -(-22 // step)


def test_step_one_keeps_the_windows_and_step_four_makes_six_by_six_masks_of_fourteen_cells() -> None:
    assert coarsen(WINDOWS, 1) == WINDOWS
    masks = coarsen(WINDOWS, 4)
    assert len(masks) == 36
    assert max(stop - start for start, stop in masks.rows) == 14


def test_a_subsampled_box_holds_the_even_cells_of_the_box() -> None:
    boxes = torch.tensor([[a, b, a, b] for a in range(9) for b in range(a, 10)])
    for (top, bottom, *_), (start, stop, *_) in zip(boxes.tolist(), subsample_boxes(boxes).tolist(), strict=True):
        assert [2 * cell for cell in range(start, stop)] == [cell for cell in range(top, bottom) if cell % 2 == 0]


@pytest.mark.parametrize(
    ("windows", "step", "message"),
    [(WINDOWS, 0, "`step` must be"), (Windows.sliding(grid=(1, 6), size=(1, 2), wrap=(False, True)), 2, "wrapping")],
)
def test_windows_that_cannot_be_made_coarser_are_refused(windows: Windows, step: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        coarsen(windows, step)
