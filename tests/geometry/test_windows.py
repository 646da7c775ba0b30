import jaxtyping
import numpy as np
import pytest
from helpers.oracle import Geometry
from helpers.random_windows import some_windows
from hypothesis import given
from hypothesis import strategies as st

from patchguard.errors import InputError
from patchguard.geometry.windows import Windows


@pytest.mark.parametrize("wrap", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (3, 4), (1, 4)])
def test_sliding_windows_are_all_boxes_of_one_size(size, wrap) -> None:
    geometry = Geometry("any", (3, 4), wrap)
    found = {tuple(row) for row in Windows.sliding(grid=(3, 4), size=size, wrap=wrap).cells.astype(int).tolist()}
    assert found == {tuple(row) for row in geometry.boxes(size).tolist()}


@given(some_windows())
def test_maximal_keeps_just_the_boxes_that_lie_in_no_other(windows) -> None:
    every = {frozenset(np.flatnonzero(row)) for row in windows.cells}
    expected = {box for box in every if not any(box < other for other in every)}
    kept = [frozenset(np.flatnonzero(row)) for row in windows.maximal().cells]
    assert set(kept) == expected
    assert len(kept) == len(expected)


@given(some_windows(grid=(2, 5), wrap=(False, True)), some_windows(grid=(2, 5), wrap=(False, True)))
def test_cover_says_whether_each_window_lies_in_a_mask(masks, windows) -> None:
    expected = all(any((mask | ~window).all() for mask in masks.cells) for window in windows.cells)
    assert masks.cover(windows) == expected


@given(some_windows(), st.integers(1, 3))
def test_regions_are_unions_of_count_boxes(windows, count) -> None:
    several = Windows(
        **{name: getattr(windows, name) for name in ("grid", "rows", "columns", "pairs", "wrap")}, count=count
    )
    assert several.regions == len(several.members) == len(several.cells)
    for members, cells in zip(several.members, several.cells, strict=True):
        assert (windows.cells[members].any(0) == cells).all()
    assert (several.areas == several.cells.sum(1)).all()
    assert several.largest_area == several.areas.max()


def test_single_masks_do_not_cover_several_windows() -> None:
    windows = Windows.sliding(grid=(4, 4), size=(2, 2))
    two = Windows.sliding(grid=(4, 4), size=(2, 2), count=2)
    assert not windows.cover(two)
    assert two.cover(two)
    assert two.cover(windows)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Windows.sliding(grid=(4, 4), size=(0, 2)), "between 1 and the grid's 4"),
        (lambda: Windows.sliding(grid=(4, 4), size=(5, 2)), "between 1 and the grid's 4"),
        (lambda: Windows.sliding(grid=(0, 4), size=(1, 1)), "between 1 and the grid's 0"),
        (lambda: Windows(grid=(4, 4), rows=(), columns=((0, 1),)), "at least one box"),
        (lambda: Windows.from_boxes([], grid=(4, 4)), "at least one box"),
        (lambda: Windows(grid=(4, 4), rows=((3, 5),), columns=((0, 1),)), "inside 4 cells"),
        (lambda: Windows(grid=(4, 4), rows=((-1, 2),), columns=((0, 1),)), "inside 4 cells"),
        (lambda: Windows(grid=(4, 4), rows=((2, 2),), columns=((0, 1),)), "inside 4 cells"),
        (lambda: Windows.sliding(grid=(4, 4), size=(1, 1), count=0), "`count` must be"),
    ],
)
def test_windows_that_make_no_sense_are_refused(build, message) -> None:
    with pytest.raises(InputError, match=message):
        build()


def test_too_many_unions_are_refused_before_memory_is_taken() -> None:
    windows = Windows.sliding(grid=(26, 26), size=(6, 6), count=4)
    with pytest.raises(InputError, match="too many to enumerate"):
        _ = windows.cells
    assert windows.largest_area == 144


@pytest.mark.parametrize("grid", [(True, 4), (4, 4.0), (4, 3.7), (4,), (4, 4, 4), (4, -1)])
def test_a_grid_is_two_whole_numbers(grid, monkeypatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # only tests check types
    with pytest.raises(InputError, match="`grid` must be two sizes of at least 1"):
        Windows(grid=grid, rows=((0, 1),), columns=((0, 1),))
