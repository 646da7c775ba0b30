"""Pools, borders and crops against what the network really reads, and at every number of images."""

from collections.abc import Callable

import pytest
import torch
from helpers.field_rules import Layer, check_batch_rows, check_field, derive_layout, refusal_reason
from torch import Tensor, nn
from torch.nn import functional

from patchguard.geometry.rules.layout import (
    Call,
    Layout,
    RuleError,
)
from patchguard.geometry.rules.neighborhood import narrow

SIZE = (7, 8)


def per_line(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Apply a function of (lines, channels, columns) to every row of every image."""

    def apply(x: Tensor) -> Tensor:
        batch, _, rows, _ = x.shape
        lines = function(x.transpose(1, 2).flatten(0, 1))
        return lines.unflatten(0, (batch, rows)).transpose(1, 2)

    return apply


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "means of three": lambda x: functional.avg_pool2d(x, 3, 1, 1),
    "means over the border": lambda x: functional.avg_pool2d(x, (3, 2), (2, 3), ceil_mode=True),
    "means with the kernel for a stride": lambda x: functional.avg_pool2d(x, (2, 3)),
    "means without the channels": lambda x: functional.avg_pool2d(x[:, 0], 2).unsqueeze(1),
    "means along a row": per_line(lambda x: functional.avg_pool1d(x, 3, 2, 1)),
    "maxima of three": lambda x: functional.max_pool2d(x, 3, 2, 1),
    "spread maxima": lambda x: functional.max_pool2d(x, (2, 3), (1, 2), (1, 0), dilation=(2, 3)),
    "maxima over the border": lambda x: functional.max_pool2d(x, 3, 2, ceil_mode=True),
    "maxima along a row": per_line(lambda x: functional.max_pool1d(x, 3, 1, dilation=2)),
    "where the maxima lie": lambda x: functional.max_pool2d(x, 2, return_indices=True)[1].double(),
    "maxima and where they lie": lambda x: sum(functional.max_pool2d(x, 2, return_indices=True)),  # type: ignore[arg-type]
    "adaptive means": lambda x: functional.adaptive_avg_pool2d(x, (3, 5)),
    "adaptive means of the same size": lambda x: functional.adaptive_avg_pool2d(x, (None, 3)),
    "more adaptive means than rows": lambda x: functional.adaptive_avg_pool2d(x, (9, 8)),
    "adaptive maxima": lambda x: functional.adaptive_max_pool2d(x, (2, 7)),
    "where the adaptive maxima lie": lambda x: functional.adaptive_max_pool2d(x, (2, 7), return_indices=True)[
        1
    ].double(),
    "means over channels": lambda x: functional.adaptive_avg_pool2d(x.permute(0, 2, 3, 1), (None, 1)).permute(
        0, 3, 1, 2
    ),
    "a constant border": lambda x: functional.pad(x, (1, 2, 3, 0)),
    "a cut border": lambda x: functional.pad(x, (-1, 2, 0, -3)),
    "constant channels": lambda x: functional.pad(x, (0, 0, 0, 0, 1, 2)),
    "a mirrored border": lambda x: functional.pad(x, (3, 2, 1, 6), mode="reflect"),
    "a mirrored line": per_line(lambda x: functional.pad(x, (7, 2), mode="reflect")),
    "a repeated border": lambda x: functional.pad(x, (3, 2, 0, 9), mode="replicate"),
    "a repeated line": per_line(lambda x: functional.pad(x, (1, 2), mode="replicate")),
    "every second row": lambda x: x[:, :, 1::2],
    "the last columns": lambda x: x[..., -3:],
    "no more columns than there are": lambda x: x[:, :, 2:1000, :-1],
    "a narrow part": lambda x: x.narrow(-1, 2, 4).narrow(2, -3, 2),
    "turned round": lambda x: x.flip(-1, 2),
    "turned channels": lambda x: x.flip(1),
    "the second half of the rows": lambda x: x.chunk(2, 2)[1],
    "uneven pieces": lambda x: x.split([1, 4, 2], -2)[1] + x.split(4, 2)[0],
    "pieces of channels": lambda x: x.split(2, 1)[1],
}


@pytest.mark.parametrize("name", KEPT)
def test_a_rule_allows_just_what_moves_the_cells(name: str) -> None:
    torch.manual_seed(0)
    network = Layer(lambda x, f: KEPT[name](f(x)), nn.Conv2d(3, 3, 1))
    check_field(network, SIZE, exact="max" not in name and "uneven" not in name)
    check_batch_rows(network, SIZE)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "means over images": (lambda x: functional.avg_pool2d(x.permute(1, 2, 3, 0), 2), "runs over images of the batch"),
    "maxima over images": (lambda x: functional.max_pool1d(x.flatten(2).permute(2, 1, 0), 2), "images of the batch"),
    "adaptive means over images": (lambda x: functional.adaptive_avg_pool2d(x.permute(1, 2, 3, 0), 2), "of the batch"),
    "adaptive means over all rows": (lambda x: functional.adaptive_avg_pool2d(x, (1, 3)), "pools over all rows"),
    "adaptive maxima over all columns": (lambda x: functional.adaptive_max_pool2d(x, (3, 1)), "pools over all columns"),
    "means over merged positions": (
        lambda x: functional.avg_pool1d(x.flatten(2), 3),
        "runs over rows and columns, not over rows or columns alone",
    ),
    "interpolated images": (
        lambda x: functional.interpolate(x.permute(1, 2, 3, 0)[..., :], scale_factor=(1.0, 0.5)),
        "runs over images of the batch",
    ),
    "another image": (lambda x: functional.pad(x, (0, 0, 0, 0, 0, 0, 0, 1)), "runs over images of the batch"),
    "every second image": (lambda x: x[::2], "runs over images of the batch"),
    "all images but one": (lambda x: x[1:], "runs over images of the batch"),
    "the first thousand images": (lambda x: x[:1000], "runs over images of the batch"),
    "images turned round": (lambda x: x.flip(0), "runs over images of the batch"),
    "a part of the images": (lambda x: x.split([3, x.shape[0] - 3])[1], "runs over images of the batch"),
    "the opposite border": (lambda x: torch.ops.aten.pad(x, [1, 1, 1, 1], "circular"), "from the opposite border"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_moves_along_images_or_over_all_rows_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    assert message in refusal_reason(Layer(function), SIZE)


def test_a_window_that_lies_in_the_padding_reads_nothing() -> None:
    _, _, (rows,), _ = derive_layout(nn.Conv2d(3, 2, 1, padding=2), SIZE).dimensions
    assert (rows.low > rows.high).tolist() == [True, True, *[False] * 7, True, True]


def test_a_narrowed_dimension_counts_its_start_from_the_end_too() -> None:
    image = Layout.of_images(7, 3, 6, 5)
    part = narrow(Call("narrow", {"self": image, "dim": 2, "start": -4, "length": 3}, ((7, 3, 3, 5),)))
    assert part.dimensions[2][0].low.tolist() == [2, 3, 4]
    with pytest.raises(RuleError, match="images of the batch"):
        narrow(Call("narrow", {"self": image, "dim": 0, "start": 0, "length": 3}, ((3, 3, 6, 5),)))


def test_an_operation_without_a_number_of_axes_is_refused() -> None:
    with pytest.raises(RuleError, match="no rule for its number of axes"):
        _ = Call("pool", {}, ((1,),)).axes
    assert [Call(name, {}, ((1,),)).axes for name in ("avg_pool1d", "_upsample_nearest_exact2d")] == [1, 2]


@pytest.mark.parametrize(("value", "wanted"), [(3, [3, 3]), ([3], [3, 3]), ((3,), [3, 3]), ([1, 2], [1, 2])])
def test_one_setting_stands_for_both_axes(value: object, wanted: list[int]) -> None:
    assert Call("avg_pool2d", {}, ((1,),)).per_axis(value, 2) == wanted
