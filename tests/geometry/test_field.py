"""Axes, fields and their composition against sets of pixels written out one by one."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from patchguard.errors import InputError
from patchguard.geometry.field import Axis, Field, compose, middle_position
from patchguard.geometry.program import trace_field


def pixels(axis: Axis, cell: int) -> set[int]:
    return {(axis.starts[cell] + step) % axis.size for step in range(axis.lengths[cell])}


def sliding(size: int, field: int, stride: int) -> Axis:
    cells = (size - field) // stride + 1
    return Axis(tuple(range(0, cells * stride, stride)), (field,) * cells, size)


def widest(axis: Axis, patch: int) -> int:
    return max(int(axis.touched_cells(start, patch).sum()) for start in range(axis.size - patch + 1))


@st.composite
def settings(draw: st.DrawFn, *, size: int | None = None, circle: bool = True) -> dict[str, Any]:
    """Draw what an axis is made of; the axis itself is made in the test, where its types may be checked."""
    size = size or draw(st.integers(1, 9))
    starts = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))
    lengths = [draw(st.integers(0, size if circle else size - start)) for start in starts]
    return {"starts": tuple(starts), "lengths": tuple(lengths), "size": size}


@given(settings(), st.data())
def test_a_cell_is_touched_when_it_reads_one_of_the_pixels(drawn: dict[str, Any], data: st.DataObject) -> None:
    axis = Axis(**drawn)
    start = data.draw(st.integers(0, axis.size - 1))
    length = data.draw(st.integers(1, axis.size - start))
    patch = set(range(start, start + length))
    expected = [bool(pixels(axis, cell) & patch) for cell in range(axis.cells)]
    assert axis.touched_cells(start, length).tolist() == expected


@given(st.data())
def test_a_composed_cell_reads_what_its_pixels_read_and_hardly_more(data: st.DataObject) -> None:
    support = Axis(**data.draw(settings(circle=False)))
    cells = Axis(**data.draw(settings(size=support.cells)))
    whole = compose(Field(cells, cells), Field(support, support)).rows
    for cell in range(cells.cells):
        union = set().union(*(pixels(support, pixel) for pixel in pixels(cells, cell)))
        read = pixels(whole, cell)
        assert union <= read
        assert bool(union) == bool(read)
        if union and cells.starts[cell] + cells.lengths[cell] <= cells.size:
            assert read == set(range(min(union), max(union) + 1))


def test_an_arc_over_the_border_stays_an_arc_in_source_pixels() -> None:
    band = Axis((0, 2, 3), (2, 2, 2), size=4, wrap=True)
    support = Axis((0, 3, 6, 9), (3, 3, 3, 3), size=12)
    whole = compose(Field(band, band), Field(support, support)).columns
    assert whole == Axis((0, 6, 9), (6, 6, 6), size=12, wrap=True)


def test_an_arc_that_comes_all_the_way_around_reads_everything() -> None:
    band = Axis((1,), (3,), size=3, wrap=True)
    support = Axis((0, 1, 2), (3, 3, 3), size=5)
    assert compose(Field(band, band), Field(support, support)).rows == Axis((0,), (5,), size=5, wrap=True)


@given(size=st.integers(20, 80), field=st.integers(1, 17), stride=st.integers(1, 9), patch=st.integers(1, 20))
def test_a_patch_owns_at_most_as_many_cells_as_equation_one_says(
    size: int, field: int, stride: int, patch: int
) -> None:
    axis = sliding(size, field, stride)
    bound = math.ceil((patch + field - 1) / stride)
    assert widest(axis, patch) <= bound
    if size >= patch + 2 * (field + stride):  # away from both borders the bound is attained
        assert widest(axis, patch) == bound


def bagnet_17() -> nn.Module:
    """Return a small stack with the field of BagNet-17: 17 pixels, stride 8."""
    strides = (1, 2, 2, 2)
    return nn.Sequential(*(nn.Conv2d(3, 3, 3, stride=stride) for stride in strides))


def test_bagnet_17_at_224_pixels_has_26_cells_of_17_pixels_at_stride_8() -> None:
    field = trace_field(bagnet_17(), (224, 224))
    assert (field.grid, field.size, field.stride) == ((26, 26), (17, 17), (8, 8))
    assert [widest(field.rows, patch) for patch in (23, 32, 39)] == [5, 6, 7]


def test_stride_and_reach_leave_out_cells_that_a_border_cuts_short() -> None:
    axis = trace_field(nn.Conv2d(3, 3, 5, stride=2, padding=2), (17, 17)).rows
    assert axis.lengths[0] < axis.field_size
    assert (axis.field_size, axis.stride) == (5, 2)


@pytest.mark.parametrize("axis", [Axis((0, 1, 4), (2, 2, 2), 9), Axis((3,), (2,), 9), Axis((0, 2, 4), (3, 2, 3), 9)])
def test_an_uneven_axis_has_no_stride(axis: Axis) -> None:
    assert axis.stride is None


def test_a_circle_of_cells_has_a_stride() -> None:
    assert Axis((4, 6, 0, 2), (3, 3, 3, 3), 8, wrap=True).stride == 2


def test_a_field_knows_its_grid_and_the_cells_that_a_box_touches() -> None:
    field = Field(sliding(9, 3, 2), sliding(7, 3, 2))
    assert (field.grid, field.source, field.size, field.stride) == ((4, 3), (9, 7), (3, 3), (2, 2))
    touched = field.touched_cells((0, 6, 2, 1))
    assert np.argwhere(touched).tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (((), (), 4), "at least one cell"),
        (((0, 1), (1,), 4), "2 starts and 1 lengths"),
        (((4,), (1,), 4), "cell 0 must start inside"),
        (((-1,), (1,), 4), "cell 0 must start inside"),
        (((0, 0), (4, 5), 4), "cell 1 must start inside the 4 pixels"),
        (((0,), (-1,), 4), "got start 0, length -1"),
        (((0,), (0,), 0), "at least 1 pixel"),
    ],
)
def test_an_impossible_axis_is_refused(drawn: tuple[tuple[int, ...], tuple[int, ...], int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Axis(*drawn)


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (8, 2), (0, 0), (0, 10)])
def test_pixels_outside_the_axis_are_refused(start: int, length: int) -> None:
    with pytest.raises(InputError, match="pixels of the axis, 0 to 8"):
        sliding(9, 3, 2).touched_cells(start, length)


def test_fields_of_different_sizes_do_not_compose() -> None:
    with pytest.raises(InputError, match="the 9 x 9 pixels that the cells read; it describes 4 x 4"):
        compose(Field(sliding(9, 3, 2), sliding(9, 3, 2)), Field.identity(4, 4))


def test_a_support_that_wraps_does_not_compose() -> None:
    support = Axis((3, 0), (2, 1), size=4)
    with pytest.raises(InputError, match="must not wrap around"):
        compose(Field.identity(2, 2), Field(support, support))


def test_neighboring_pixels_have_a_stride_of_1_and_equal_cells_none() -> None:
    assert Axis.identity(4).stride == 1
    assert Axis((2, 2, 2), (3, 3, 3), 9).stride is None


def test_an_arc_that_begins_in_a_border_reads_only_what_follows() -> None:
    border = Axis((0, 1, 2, 0), (1, 1, 1, 0), 3)  # pixel 3 reads nothing
    composed = compose(Field(Axis((3, 3), (2, 1), 4), Axis.identity(4)), Field(border, border))
    assert (composed.rows.starts, composed.rows.lengths) == ((0, 0), (1, 0))


def test_a_tall_box_touches_many_rows_and_a_wide_one_many_columns() -> None:
    field = Field.identity(5, 6)
    for box in ((1, 2, 3, 1), (1, 2, 1, 3), (0, 1, 5, 2)):
        top, left, height, width = box
        expected = np.zeros((5, 6), dtype=bool)
        expected[top : top + height, left : left + width] = True
        assert (field.touched_cells(box) == expected).all()


def test_every_position_touches_the_cells_of_its_own_pixels() -> None:
    axis = Axis((0, 2, 4, 3), (3, 3, 1, 0), 5)
    for length in (1, 2, 5):
        positions = [axis.touched_cells(start, length) for start in range(6 - length)]
        assert (axis.touched_cells_by_position(length) == np.stack(positions)).all()


def test_the_middle_position_touches_just_the_cells_asked_for() -> None:
    axis = Axis((0, 4, 8), (4, 4, 4), 12)
    assert middle_position(axis, 2, 1, 2) == 5  # pixels 4 to 7 from 4, 5 or 6
    assert middle_position(axis, 2, 1, 3) == 7  # the one position on both cells
    assert middle_position(axis, 4, 0, 2) == 2
