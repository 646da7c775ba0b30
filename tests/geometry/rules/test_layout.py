"""Layouts on their own: one image, one row and one column for every entry, and views that keep them in place."""

import numpy as np
import pytest

from patchguard.geometry.rules.layout import (
    Call,
    Constant,
    Factor,
    Layout,
    RuleError,
    channel_dimension,
    describe,
    image_dimension,
    join,
    pixel_dimension,
)

IMAGE = Layout.of_images(7, 6, 4, 5)


def kinds(layout: Layout) -> list[str]:
    return [describe(dimension) for dimension in layout.dimensions]


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        (
            (image_dimension(7), image_dimension(7), pixel_dimension("row", 4), pixel_dimension("column", 5)),
            "pairs every image with every other image",
        ),
        (
            (image_dimension(7), pixel_dimension("row", 4), pixel_dimension("row", 4), pixel_dimension("column", 5)),
            "pairs every row with every other row",
        ),
        ((image_dimension(7), pixel_dimension("row", 4)), "drops the column that its result belongs to"),
        ((pixel_dimension("column", 4), pixel_dimension("row", 4)), "drops the image that its result belongs to"),
    ],
)
def test_an_entry_belongs_to_one_image_row_and_column(dimensions: tuple, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        Layout(dimensions)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((7, 6, 20), ["images of the batch", "channels", "rows and columns"]),
        ((42, 4, 5), ["images of the batch and channels", "rows", "columns"]),
        ((7, 2, 3, 4, 5), ["images of the batch", "channels", "channels", "rows", "columns"]),
        ((14, 12, 5), ["images of the batch and channels", "channels and rows", "columns"]),
        (
            (1, 7, 1, 6, 4, 5, 1),
            ["nothing", "images of the batch", "nothing", "channels", "rows", "columns", "nothing"],
        ),
        ((7, 120), ["images of the batch", "channels and rows and columns"]),
    ],
)
def test_a_view_keeps_the_factors_in_their_order(shape: tuple[int, ...], wanted: list[str]) -> None:
    there = IMAGE.view(shape)
    assert there.shape == shape
    assert kinds(there) == wanted
    assert kinds(there.view(IMAGE.shape)) == kinds(IMAGE)


def test_single_rows_and_columns_are_kept_by_a_view() -> None:
    small = Layout.of_images(7, 3, 1, 1)
    assert kinds(small.view((7, 3))) == ["images of the batch", "channels and rows and columns"]
    assert kinds(small.view((7, 3, 1, 1, 1))) == ["images of the batch", "channels", "rows", "columns", "nothing"]
    assert kinds(small.view((21, 1))) == ["images of the batch and channels", "rows and columns"]
    assert kinds(small.view((7, 3, 1))) == ["images of the batch", "channels", "rows and columns"]
    single = Layout.of_images(7, 1, 1, 5)
    assert kinds(single.view((7, 1, 1, 5))) == ["images of the batch", "nothing", "rows", "columns"]


@pytest.mark.parametrize("shape", [(6, 7, 4, 5), (7, 4, 6, 5), (7, 6, 5, 4), (7, 6, 2, 10), (7, 4, 30), (7, 9, 4, 5)])
def test_a_view_that_cuts_a_factor_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuleError, match=r"cuts its|changes the number"):
        IMAGE.view(shape)


def test_joined_positions_read_what_either_reads() -> None:
    low, high = (
        Factor("row", 2, np.array([0, 3]), np.array([1, 9])),
        Factor("row", 2, np.array([2, 1]), np.array([4, 5])),
    )
    for one, two in ((low, high), (high, low)):
        joined = one.union(two)
        assert (joined.low.tolist(), joined.high.tolist()) == ([0, 1], [4, 9])


def test_tensors_with_other_factors_are_not_joined() -> None:
    turned = Layout((image_dimension(7), channel_dimension(6), pixel_dimension("column", 4), pixel_dimension("row", 5)))
    with pytest.raises(RuleError, match="combines rows with columns"):
        join([IMAGE, turned], IMAGE.shape)
    merged = Layout(
        (image_dimension(7), channel_dimension(6), (*pixel_dimension("row", 2), *pixel_dimension("column", 10)), ())
    )
    other = Layout(
        (image_dimension(7), channel_dimension(6), (*pixel_dimension("row", 4), *pixel_dimension("column", 5)), ())
    )
    with pytest.raises(RuleError, match="combines rows and columns with rows and columns"):
        join([merged, other], merged.shape)


def test_an_argument_that_depends_on_the_image_comes_first_and_alone() -> None:
    constant = Constant((2, 6, 1, 1))
    assert Call("conv2d", {"input": IMAGE, "weight": constant}, (IMAGE.shape,)).only_input() is IMAGE
    for arguments in (
        {"input": constant, "weight": IMAGE},
        {"input": IMAGE, "weight": IMAGE},
        {"input": IMAGE, "weights": [constant, IMAGE]},
        {"input": [IMAGE]},
        {"input": constant, "weight": constant},
    ):
        with pytest.raises(RuleError, match="takes weights or settings that depend on the image"):
            Call("conv2d", arguments, (IMAGE.shape,)).only_input()
