"""Resizing against Pillow and torch, supports against single changed pixels, and the chain as a whole."""

import itertools
import json
from functools import cache
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.nn import functional

from patchguard.errors import InputError
from patchguard.geometry.field import Field, compose
from patchguard.geometry.preprocess import CenterCrop, Crop, Pad, Preprocess, Resize, Step
from patchguard.geometry.program import trace_field
from patchguard.geometry.resize import resize_matrix

MODES = ("nearest", "bilinear", "bicubic")
PILLOW = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
SIZES = [
    ((8, 8), (48, 48)),
    ((37, 50), (23, 61)),
    ((40, 30), (13, 9)),
    ((21, 19), (21, 19)),
    ((3, 2), (7, 9)),
]


def picture(height: int, width: int, low: int = 0, high: int = 256) -> np.ndarray:
    return np.random.default_rng(0).integers(low, high, (height, width, 3), dtype=np.uint8)


def tensor(image: np.ndarray) -> torch.Tensor:
    return torch.tensor(image).permute(2, 0, 1)[None] / 255


def pillow(image: np.ndarray, height: int, width: int, mode: str) -> np.ndarray:
    """Resize with Pillow, columns first; in one call it may choose to begin with the rows."""
    between = Image.fromarray(image).resize((width, image.shape[0]), PILLOW[mode])
    return np.asarray(between.resize((width, height), PILLOW[mode]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("before", "after"), SIZES)
def test_antialiased_values_are_those_of_pillow_up_to_its_rounding(
    before: tuple[int, int], after: tuple[int, int], mode: Any
) -> None:
    image = picture(*before)
    ours = Resize(height=after[0], width=after[1], mode=mode)(tensor(image))[0].permute(1, 2, 0).numpy()
    # Pillow rounds to whole numbers after each of the two passes; bicubic weights sum to at most 1.5 in size.
    assert np.abs(ours * 255 - pillow(image, *after, mode)).max() <= 0.5 + 0.5 * 1.5
    # In one call, away from black and white where the order of the passes matters for clamping:
    image = picture(*before, 100, 156)
    ours = Resize(height=after[0], width=after[1], mode=mode)(tensor(image))[0].permute(1, 2, 0).numpy()
    once = np.asarray(Image.fromarray(image).resize(after[::-1], PILLOW[mode]))
    assert np.abs(ours * 255 - once).max() <= 0.5 + 0.5 * 1.5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("before", "after"), SIZES)
def test_values_without_antialias_are_those_of_torch(
    before: tuple[int, int], after: tuple[int, int], mode: Any
) -> None:
    images = tensor(picture(*before)).double()
    corners = None if mode == "nearest" else False
    expected = functional.interpolate(images, after, mode=mode, align_corners=corners).clamp(0, 1)
    ours = Resize(height=after[0], width=after[1], mode=mode, antialias=False)(images)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("before", "after"), [(5, 12), (12, 5), (9, 10), (16, 8), (7, 7)])
def test_pillow_moves_no_pixel_outside_our_support(before: int, after: int, mode: Any) -> None:
    axis = Resize(height=after, width=1, mode=mode).support(before, 1).rows
    black, white = np.zeros((before, 1, 3), np.uint8), np.full((before, 1, 3), 255, np.uint8)
    gray = np.full((before, 1, 3), 128, np.uint8)
    moved = np.zeros((after, before), dtype=bool)
    for pixel, (base, value) in itertools.product(range(before), [(black, 255), (white, 0), (gray, 255), (gray, 0)]):
        image = base.copy()
        image[pixel] = value
        change = pillow(image, after, 1, mode) != pillow(base, after, 1, mode)
        moved[:, pixel] |= change.any(axis=(1, 2))
    ours = np.stack([axis.touched_cells(pixel, 1) for pixel in range(before)], axis=1)
    assert not (moved & ~ours).any()
    # All of it is seen to move, but for weights below half a gray level and zeros inside an interval.
    weights = resize_matrix(before, after, mode, True)
    assert (moved | (np.abs(weights) < 1 / 128)).all(where=ours)


@given(
    before=st.integers(1, 40),
    after=st.integers(1, 40),
    mode=st.sampled_from(MODES),
    antialias=st.booleans(),
)
@settings(max_examples=200)
def test_a_resize_matrix_averages_and_its_support_has_no_weight_outside(
    before: int, after: int, mode: Any, antialias: bool
) -> None:
    matrix = resize_matrix(before, after, mode, antialias)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-12)
    axis = Resize(height=after, width=1, mode=mode, antialias=antialias).support(before, 1).rows
    inside = np.stack([axis.touched_cells(pixel, 1) for pixel in range(before)], axis=1)
    assert not matrix[~inside].any()
    assert matrix[np.arange(after), axis.starts].all()
    # No weight is a rounding error of one that should vanish.
    assert np.abs(matrix[matrix != 0]).min() > 1e-9
    if before == after:
        assert (matrix == np.eye(before)).all()


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_chain_moves_no_pixel_outside_its_support(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(4, 12)), data.draw(st.integers(4, 12))
    steps: list[Step] = [
        Resize(
            height=data.draw(st.integers(4, 16)),
            width=data.draw(st.integers(4, 16)),
            mode=data.draw(st.sampled_from(MODES)),
            antialias=data.draw(st.booleans()),
        ),
        Pad(top=1, right=2, value=0.5),
        CenterCrop(height=3, width=4),
        Crop(top=0, left=1, height=2, width=2),
        Resize(shorter=5, mode="bicubic"),
    ]
    chain = Preprocess(tuple(steps[: data.draw(st.integers(0, 5))]))
    field = chain.support(height, width)
    assert field.grid == chain.output_size(height, width)
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(1, 3, height, width, generator=generator, dtype=torch.float64)
    boxes = list(itertools.product(range(height), range(width)))
    images = base.repeat(len(boxes), 1, 1, 1)
    for image, (row, column) in zip(images, boxes, strict=True):
        image[:, row, column] = 1 - image[:, row, column].round()
    # In equal batches: the rounding of a matrix product depends on its shape and strides.
    moved = (chain(images) != chain(base.repeat(len(boxes), 1, 1, 1))).any(dim=1).numpy()
    reached = np.stack([field.touched_cells((row, column, 1, 1)) for row, column in boxes])
    assert not (moved & ~reached).any()
    assert moved.any() or chain.steps[-1:] != ()


@cache
def bagnet_17() -> Field:
    """Return the field of BagNet-17 at 192 pixels, from a small stack with the same field."""
    return trace_field(nn.Sequential(*(nn.Conv2d(3, 3, 3, stride=stride) for stride in (1, 2, 2, 2))), (192, 192))


@pytest.mark.parametrize(("mode", "cells"), [("bicubic", [6, 8, 11]), ("bilinear", [5, 7, 9]), ("nearest", [4, 6, 8])])
@pytest.mark.parametrize("antialias", [False, True])
def test_enlarging_cifar_for_bagnet_17_widens_the_windows(mode: Any, cells: list[int], antialias: bool) -> None:
    support = Preprocess((Resize(height=192, width=192, mode=mode, antialias=antialias),)).support(32, 32)
    field = compose(bagnet_17(), support)
    assert field.grid == (22, 22)
    for axis in (field.rows, field.columns):
        widest = [max(axis.touched_cells(start, patch).sum() for start in range(33 - patch)) for patch in (2, 5, 8)]
        assert widest == cells


@pytest.mark.parametrize("size", range(2, 12))
def test_a_center_crop_leaves_equal_borders_or_starts_at_an_even_pixel(size: int) -> None:
    images = torch.arange(121.0).view(1, 1, 11, 11) / 121
    for height, width in itertools.product((1, 2, size), repeat=2):
        step = CenterCrop(height=height, width=width)
        axes = step.support(11, 11)
        for axis, length in ((axes.rows, height), (axes.columns, width)):
            before, after = axis.starts[0], 11 - axis.starts[0] - length
            assert before == after if (11 - length) % 2 == 0 else abs(before - after) == 1 and before % 2 == 0
        top, left = axes.rows.starts[0], axes.columns.starts[0]
        assert torch.equal(step(images), images[..., top : top + height, left : left + width])


def test_no_steps_change_nothing() -> None:
    images = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    assert Preprocess()(images) is images
    assert Preprocess().support(5, 7) == Field.identity(5, 7)
    assert Preprocess().output_size(5, 7) == (5, 7)


def test_padding_reads_nothing() -> None:
    axis = Preprocess((Pad(top=2, bottom=1),)).support(3, 3).rows
    assert axis.lengths == (0, 0, 1, 1, 1, 0)
    assert axis.starts[2:5] == (0, 1, 2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((375, 500), (256, 341)),
        ((500, 375), (341, 256)),
        ((100, 100), (256, 256)),
        ((3, 5), (256, 426)),  # 426.67, rounded down
        ((5, 3), (426, 256)),
        ((257, 300), (256, 298)),  # 298.83
    ],
)
def test_the_shorter_side_keeps_the_shape(before: tuple[int, int], after: tuple[int, int]) -> None:
    assert Resize(shorter=256).output_size(*before) == after


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_resizing_keeps_type_and_range(dtype: torch.dtype) -> None:
    images = tensor(picture(9, 9) // 128 * 255).to(dtype)
    result = Resize(height=31, width=31, mode="bicubic")(images)
    assert result.dtype == dtype
    assert result.min() == 0
    assert result.max() == 1


def test_gradients_flow_through_the_chain() -> None:
    images = torch.full((1, 3, 8, 8), 0.5, requires_grad=True)
    chain = Preprocess((Resize(height=20, width=20, mode="bicubic"), CenterCrop(height=20, width=20)))
    with torch.inference_mode():
        chain(images)  # leaves nothing behind that would stop the gradient below
    chain(images).sum().backward()
    assert images.grad is not None
    torch.testing.assert_close(images.grad.sum(), torch.tensor(3 * 400.0))


def test_a_chain_survives_json() -> None:
    chain = Preprocess(
        (
            Resize(shorter=32, mode="bicubic", antialias=False),
            Pad(top=1, value=0.25),
            CenterCrop(height=30, width=30),
            Crop(top=1, left=2, height=5, width=6),
        )
    )
    assert Preprocess.from_json(json.loads(json.dumps(chain.to_json()))) == chain
    assert Preprocess.from_json({"steps": []}) == Preprocess()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "an object with the one entry"),
        ({"steps": [], "more": 1}, "an object with the one entry"),
        ({"steps": ["crop"]}, "must have a `kind` out of resize, crop, center_crop, pad"),
        ({"steps": [{"kind": "warp"}]}, "must have a `kind` out of"),
        ({"steps": [{"kind": ["crop"]}]}, "must have a `kind` out of"),
        ({"steps": [{"kind": "center_crop", "height": 3}]}, "exactly the settings height, width; got height"),
        (
            {"steps": [{"kind": "center_crop", "height": 3, "width": 0}]},
            "`width` of CenterCrop must be a whole number",
        ),
    ],
)
def test_other_json_is_refused(value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Preprocess.from_json(value)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (CenterCrop(height=9, width=4), "at least 9 x 6 pixels to be cropped; got 8 x 8"),
        (CenterCrop(height=12, width=4), "at least 12 x 6 pixels to be cropped; got 8 x 8"),
        (Crop(top=5, left=0, height=4, width=8), "at least 9 x 8 pixels"),
    ],
)
def test_an_image_smaller_than_the_crop_is_refused(step: Step, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Preprocess((step,))(torch.zeros(1, 3, 8, 8))
    with pytest.raises(InputError, match=message):
        Preprocess((step,)).support(8, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "`height` of Resize"),
        ({"height": 4}, "`width` of Resize"),
        ({"height": 4, "width": 4, "shorter": 4}, "got both"),
        ({"shorter": 0}, "`shorter` of Resize must be a whole number, 1 or more; got 0"),
    ],
)
def test_an_incomplete_resize_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Resize(**settings)


@pytest.mark.parametrize(
    ("step", "after"),
    [
        (Crop(top=1, left=2, height=3, width=5), (3, 5)),
        (Crop(top=4, left=0, height=3, width=2), (3, 2)),
        (CenterCrop(height=2, width=6), (2, 6)),
        (Pad(top=1, bottom=2, left=3, right=5), (10, 17)),
        (Resize(shorter=5), (5, 6)),
        (Resize(height=4, width=11), (4, 11)),
    ],
)
def test_a_step_keeps_rows_and_columns_apart(step: Step, after: tuple[int, int]) -> None:
    images = torch.rand(1, 3, 7, 9)
    field = step.support(7, 9)
    assert step.output_size(7, 9) == field.grid == tuple(step(images).shape[2:]) == after
    assert field.source == (7, 9)
    changed = images.clone()
    changed[..., -1, -1] = 1 - changed[..., -1, -1]
    moved = (step(changed) != step(images)).any(1)[0].numpy()
    assert not (moved & ~field.touched_cells((6, 8, 1, 1))).any()


@pytest.mark.parametrize("value", [True, "0", -0.01, 1.01, float("nan"), None])
def test_a_border_of_what_is_no_pixel_value_is_refused(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # only tests check types
    with pytest.raises(InputError, match="`value` of Pad must be a pixel value"):
        Pad(top=1, value=value)
    assert [Pad(top=1, value=pixel).value for pixel in (0, 0.5, 1)] == [0, 0.5, 1]


@pytest.mark.parametrize("sides", [{"height": 3}, {"width": 3}, {"height": 3, "width": 4}])
def test_a_resize_by_the_shorter_side_takes_no_other(sides: dict[str, int]) -> None:
    with pytest.raises(InputError, match="got both"):
        Resize(shorter=4, **sides)  # type: ignore[arg-type]
