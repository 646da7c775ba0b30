"""Masks on pixels: the published strides and sides, and coverage by trying every position."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchguard.errors import InputError
from patchguard.geometry.mask_sets import MaskSet
from patchguard.patch import Patch


def inside_some_mask(masks: MaskSet, top: int, left: int, patch: Patch) -> bool:
    """Written out, pixel by pixel."""
    pixels = set(product(range(top, top + patch.height), range(left, left + patch.width)))
    return any(pixels <= set(product(range(t, t + h), range(u, u + w))) for t, u, h, w in masks.boxes)


@pytest.mark.parametrize(
    ("length", "side", "stride", "mask"), [(224, 32, 33, 64), (224, 23, 34, 56), (224, 39, 31, 69), (32, 5, 5, 9)]
)
def test_strides_and_sides_are_the_published_ones(length, side, stride, mask) -> None:
    masks = MaskSet.covering((length, length), Patch(side), 6)
    starts = sorted({top for top, _, _, _ in masks.boxes})
    assert starts[:2] == [0, stride]
    assert {(rows, columns) for _, _, rows, columns in masks.boxes} == {(mask, mask)}
    assert starts[-1] == length - mask
    assert len(masks.boxes) == 36
    assert masks.covers(Patch(side))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_every_position_of_the_patch_lies_in_some_mask(height, width, rows, columns, masks) -> None:
    patch = Patch(min(rows, height), min(columns, width))
    made = MaskSet.covering((height, width), patch, masks)
    assert made.covers(patch)
    for top, left in product(range(height - patch.height + 1), range(width - patch.width + 1)):
        assert inside_some_mask(made, top, left, patch)


@given(st.integers(2, 7), st.integers(2, 7), st.data())
def test_cover_says_whether_each_position_lies_in_some_mask(height, width, data) -> None:
    def draw_box() -> tuple[int, int, int, int]:
        top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
        return top, left, data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))

    boxes = dict.fromkeys(draw_box() for _ in range(data.draw(st.integers(1, 5))))
    masks = MaskSet((height, width), tuple(boxes))
    patch = Patch(data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)))
    positions = list(product(range(height - patch.height + 1), range(width - patch.width + 1)))
    assert masks.covers(patch) == all(inside_some_mask(masks, top, left, patch) for top, left in positions)


def test_rectangles_of_an_area_are_all_covered() -> None:
    masks = MaskSet.of_area((8, 10), 6, 3)
    for rows, columns in product(range(1, 9), range(1, 11)):
        if rows * columns <= 6:
            assert masks.covers(Patch(rows, columns)), (rows, columns)
    assert not masks.covers(Patch(8, 8))


@pytest.mark.parametrize(("size", "area"), [((4, 5), 1), ((8, 8), 8), ((6, 9), 7), ((3, 12), 20)])
def test_only_rectangles_that_fit_into_no_other_of_the_area_get_masks(size, area) -> None:
    shapes = [shape for shape in product(*(range(1, side + 1) for side in size)) if shape[0] * shape[1] <= area]
    largest = [a for a in shapes if not any(a != b and a[0] <= b[0] and a[1] <= b[1] for b in shapes)]
    boxes = {box for shape in largest for box in MaskSet.covering(size, Patch(*shape), 3).boxes}
    masks = MaskSet.of_area(size, area, 3)
    assert set(masks.boxes) == boxes
    assert len(masks.boxes) == len(boxes)


@given(st.integers(2, 6), st.integers(2, 6), st.integers(1, 3), st.data())
def test_each_position_is_served_by_the_masks_that_contain_it(height, width, per_axis, data) -> None:
    patch = Patch(data.draw(st.integers(1, height)), data.draw(st.integers(1, width)))
    masks = MaskSet.covering((height, width), Patch(1), per_axis)
    served = masks.positions(patch)
    patterns = {tuple(row) for row in served.covering.tolist()}
    columns = width - patch.width + 1
    for top, left in product(range(height - patch.height + 1), range(columns)):
        inside = [
            t <= top and top + patch.height <= t + h and u <= left and left + patch.width <= u + w
            for t, u, h, w in masks.boxes
        ]
        assert tuple(inside) in patterns
        for row in (served.number == top * columns + left).nonzero()[0]:
            assert served.covering[row].tolist() == inside


def test_a_patch_larger_than_the_masks_or_the_image_is_not_covered() -> None:
    masks = MaskSet.covering((8, 8), Patch(2), 3)
    assert not masks.covers(Patch(8))
    assert not masks.covers(Patch(9))
    assert not masks.covers(Patch(1, count=2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaskSet.covering((8, 8), Patch(9), 3), "must fit the image"),
        (lambda: MaskSet.covering((8, 8), Patch(2, count=2), 3), "must be a single one"),
        (lambda: MaskSet.covering((8, 8), Patch(2), 0), "`masks` must be"),
        (lambda: MaskSet.covering((8, 8), Patch(2), True), "`masks` must be"),
        (lambda: MaskSet((8, 8), ()), "from 1 to 1024 masks"),
        (lambda: MaskSet((8, 8), ((0, 0, 2, 2), (0, 0, 2, 2))), "each of them once"),
        (lambda: MaskSet((8, 8), ((7, 0, 2, 2),)), "inside images of 8 x 8"),
        (lambda: MaskSet.of_area((8, 8), 0, 3), "`area` must be"),
        (lambda: MaskSet.of_area((224, 224), 1004, 6), "fewer masks"),
    ],
)
def test_sets_that_make_no_sense_are_refused(make, message) -> None:
    with pytest.raises(InputError, match=message):
        make()
