"""The masks that losses search: windows made coarser, on a subsampled grid, or on a few regions of an ablation.

Of V bands on a circle, `regions` r of them stand for all: those numbered first + floor(j V / r) modulo V, from a random
`first` on. In this order they are a row of r cells. A window of n neighboring bands holds at most ceil(n r / V) of
them, side by side on the circle. Masks of that many neighboring cells therefore hide what any window hides, except for
windows that hold both ends of the row: the seam lies elsewhere in the next image.
"""

import math

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from patchguard.errors import InputError
from patchguard.geometry.windows import Interval, Windows
from patchguard.training.augment import BatchRandom


def coarsen(windows: Windows, step: int) -> Windows:
    """Return fewer, larger masks: on each axis the hull of up to `step` neighboring intervals, evenly divided.

    Each window lies in one of them. With `step` 1 these are the windows.
    """
    if step < 1:
        raise InputError(f"`step` must be a whole number of at least 1; got {step}.")
    if any(windows.wrap) or windows.pairs is not None:
        raise InputError("`windows` must be rows crossed with columns, without wrapping around, to be made coarser.")
    return Windows(
        grid=windows.grid,
        rows=_merge_intervals(windows.rows, step),
        columns=_merge_intervals(windows.columns, step),
        count=windows.count,
    )


def subsample_boxes(boxes: Int64[Tensor, "masks 4"]) -> Int64[Tensor, "masks 4"]:
    """Return each box on the grid of every second cell, the first included: the cells of it that lie in the box."""
    return -(-boxes // 2)


def sample_regions(count: int, regions: int, random: BatchRandom) -> Int64[Tensor, "part regions"]:
    """Return the numbers, out of `count`, of the regions that each image shows."""
    first = random.integers(count)
    return (first + torch.arange(regions, device=first.device) * count // regions) % count


def project_to_regions(windows: Windows, regions: int) -> Windows:
    """Return the masks on a row of `regions` bands that stand for `windows` on all of them."""
    bands = max(windows.grid)
    if min(windows.grid) > 1 or not any(windows.wrap):
        raise InputError(
            f"`loss.regions` must be 0 where losses use masks, unless bands lie on a circle; got {regions}."
        )
    intervals = windows.columns if windows.wrap[1] else windows.rows
    widest = max(stop - start for start, stop in intervals)
    hidden = math.ceil(widest * regions / bands)
    if not hidden < regions <= bands:
        raise InputError(
            f"`loss.regions` must be at most the {bands} bands, and enough that windows of {widest} bands leave some "
            f"of them visible; got {regions}."
        )
    return Windows.sliding(grid=(1, regions), size=(1, hidden), count=windows.count)


def _merge_intervals(intervals: tuple[Interval, ...], step: int) -> tuple[Interval, ...]:
    ordered = np.array(sorted(intervals))
    groups = np.array_split(ordered, math.ceil(len(ordered) / step))
    return tuple((int(group[0, 0]), int(group[:, 1].max())) for group in groups)
