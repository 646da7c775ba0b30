import jaxtyping
import numpy as np
import pytest
from helpers.oracle import Geometry
from helpers.random_windows import some_windows
from hypothesis import given
from hypothesis import strategies as st

from patchguard.errors import InputError
from patchguard.geometry.field import Axis, Field
from patchguard.geometry.windows import Windows
from patchguard.patch import Patch


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


@st.composite
def some_axis(draw: st.DrawFn) -> Axis:
    size, cells = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    starts = draw(st.lists(st.integers(0, size - 1), min_size=cells, max_size=cells))
    lengths = draw(st.lists(st.integers(0, size // 2), min_size=cells, max_size=cells))
    return Axis(tuple(starts), tuple(lengths), size, wrap=draw(st.booleans()))


def touched(axis: Axis, length: int) -> list[set[int]]:
    """The cells that read one of `length` pixels, for every position of these; pixel by pixel."""
    reads = [{(a + i) % axis.size for i in range(n)} for a, n in zip(axis.starts, axis.lengths, strict=True)]
    positions = [set(range(first, first + length)) for first in range(axis.size - length + 1)]
    return [{cell for cell, its in enumerate(reads) if its & position} for position in positions]


def shortest_runs(hit: set[int], cells: int, wrap: bool) -> set[frozenset[int]]:
    """The shortest runs of neighboring cells that hold some cells."""
    starts = range(cells)
    runs = [
        frozenset((start + i) % cells for i in range(length))
        for length in range(1, cells + 1)
        for start in (starts if wrap else starts[: cells - length + 1])
    ]
    holding = [run for run in runs if hit <= run]
    return {run for run in holding if len(run) == len(holding[0])}


@given(some_axis(), some_axis(), st.data())
def test_a_patch_reaches_just_the_shortest_runs_of_cells_that_it_touches(rows, columns, data) -> None:
    patch = Patch(data.draw(st.integers(1, rows.size)), data.draw(st.integers(1, columns.size)))
    windows = Windows.reached_by(patch, Field(rows, columns))
    assert (windows.grid, windows.wrap) == ((len(rows.starts), len(columns.starts)), (rows.wrap, columns.wrap))
    boxes = [tuple(frozenset(part.tolist()) for part in np.nonzero(box.reshape(windows.grid))) for box in windows.cells]
    hits = [touched(rows, patch.height), touched(columns, patch.width)]
    for above in hits[0]:
        for beside in hits[1]:
            if above and beside:
                assert any(above <= box[0] and beside <= box[1] for box in boxes)
    for number, axis in enumerate((rows, columns)):
        every = [hit for hit in hits[number] if hit] or [{0}]
        allowed = set().union(*(shortest_runs(hit, len(axis.starts), axis.wrap) for hit in every))
        assert {box[number] for box in boxes} <= allowed


def test_on_a_circle_the_longest_run_of_untouched_cells_is_left_out() -> None:
    # Pixels 0 and 1 touch cells 0, 2 and 7 of 8: three gaps, the longest between 2 and 7.
    axis = Axis((0, 3, 1, 3, 3, 3, 3, 0), (1,) * 8, 4, wrap=True)
    windows = Windows.reached_by(Patch(1, 2), Field(Axis.identity(1), axis))
    assert {tuple(np.flatnonzero(box).tolist()) for box in windows.cells} >= {(0, 1, 2, 7)}
