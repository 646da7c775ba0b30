"""The few regions of each image that an ablation learns from: evenly spaced, from a random one on.

Of V bands on a circle, `regions` r of them stand for all: those numbered first + floor(j V / r) modulo V. In this order
they are a row of r cells. A window of n neighbouring bands holds at most ceil(n r / V) of them, side by side on the
circle. Masks of so many neighbouring cells therefore hide from a loss what any window does, but for those windows that
hold both ends of the row: its seam lies somewhere else in the next image.
"""

import math

import torch
from jaxtyping import Int64
from torch import Tensor

from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.training.augment import Draws


def drawn(count: int, regions: int, draws: Draws) -> Int64[Tensor, "part regions"]:
    """Return the numbers, out of `count`, of the regions that each image shows."""
    first = draws.whole(count)
    return (first + torch.arange(regions, device=first.device) * count // regions) % count


def masks(windows: Windows, regions: int) -> Windows:
    """Return the masks on a row of `regions` bands that stand for `windows` on all of them."""
    bands = max(windows.grid)
    if min(windows.grid) > 1 or not any(windows.wrap):
        raise InputError(f"`regions` must be 0 where losses hide masks, unless bands lie on a circle; got {regions}.")
    along = windows.columns if windows.wrap[1] else windows.rows
    widest = max(stop - start for start, stop in along)
    hidden = math.ceil(widest * regions / bands)
    if not hidden < regions <= bands:
        raise InputError(
            f"`regions` must be at most the {bands} bands, and enough that windows of {widest} bands leave some of "
            f"them to see; got {regions}."
        )
    return Windows.sliding(grid=(1, regions), size=(1, hidden), count=windows.count)
