"""`CroppedForward`: local logits computed from a crop around the patch alone. All other cells cannot change."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchguard.attacks.base import Images, Positions, Victim, gradient_precision
from patchguard.attacks.positions import owned_cells, touched_cells_by_position
from patchguard.errors import InputError
from patchguard.geometry.field import Axis, Field
from patchguard.guards.local import LocalGuard
from patchguard.patch import Patch

LARGEST_CROP = 0.6  # fraction of the image's pixels above which a crop saves too little
CHECKED = 4  # images on which a crop is compared with the whole image
TOLERANCE = 1e-2  # by how much they may differ, relative to the largest logit

Logits: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(whole images, their rows in the attempt) -> local logits of whole images, with gradients."""


@final
@dataclass(frozen=True)
class CropAxis:
    """Along one axis: the pixels of a crop, its start for each position of the patch, and the cells' stride."""

    length: int
    starts: tuple[int, ...]
    stride: int


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class CroppedForward:
    """Runs the network on the pixels that the cells under the patch read, and puts the result into the image's logits.

    The network must compute such a cell alike in a crop and in the whole image. This holds for convolutions with a
    bounded field: the crop holds all that the cells read, and where it ends before the image does, its padding is read
    by other cells only. `crop_forward` checks it on some images all the same.
    """

    guard: LocalGuard[Any]
    tops: Int64[Tensor, " batch"]
    lefts: Int64[Tensor, " batch"]
    axes: tuple[CropAxis, CropAxis]
    owned: Bool[Tensor, "batch rows columns"]
    rest: Float[Tensor, "batch classes rows columns"]  # logits of the unchanged images

    def __call__(self, images: Images, rows: Tensor) -> Float[Tensor, "batch classes rows columns"]:
        """Return the local logits of images that differ from the originals only inside the patch."""
        top, left, rest = self.tops[rows], self.lefts[rows], self.rest[rows]
        crop = _crop(_crop(images, 2, top, self.axes[0].length), 3, left, self.axes[1].length)
        logits = self.guard.differentiable_logits(crop)
        logits = _paste(logits, 2, top // self.axes[0].stride, rest.shape[2])
        logits = _paste(logits, 3, left // self.axes[1].stride, rest.shape[3])
        return torch.where(self.owned[rows].unsqueeze(1), logits, rest.to(logits.dtype))


def crop_forward(
    victim: Victim, images: Images, positions: Positions, patch: Patch, *, size: int, half: bool
) -> Logits | None:
    """Return the cropped forward pass for patches at these positions; None where it saves little or does not hold."""
    height, width = images.shape[-2:]
    if not isinstance(victim, LocalGuard) or patch.count > 1 or len(images) == 0:
        return None
    guard: LocalGuard[Any] = victim
    if guard.preprocess.support(height, width) != Field.identity(height, width):
        return None
    try:
        field = guard.field(height, width)
    except InputError:  # a network that mixes positions
        return None
    rows, columns = _plan_crop(field.rows, patch.height), _plan_crop(field.columns, patch.width)
    if rows is None or columns is None or rows.length * columns.length > LARGEST_CROP * height * width:
        return None
    bare = guard.without_preprocess()
    try:
        bare.model.check_size(rows.length, columns.length)
    except InputError:
        return None
    with torch.no_grad(), gradient_precision(images.device, half):
        rest = torch.cat([guard.differentiable_logits(part) for part in torch.split(images, size)])
    cropped = CroppedForward(
        guard=bare,
        tops=torch.tensor(rows.starts, device=images.device)[positions[:, 0, 0]],
        lefts=torch.tensor(columns.starts, device=images.device)[positions[:, 0, 1]],
        axes=(rows, columns),
        owned=owned_cells(positions, field, patch),
        rest=rest,
    )
    with torch.no_grad():
        some = torch.arange(min(CHECKED, len(images)), device=images.device)
        whole = guard.differentiable_logits(images[some])
        difference = (cropped(images[some], some) - whole).abs() * cropped.owned[some].unsqueeze(1)
    return cropped if bool(difference.max() <= TOLERANCE * whole.abs().max()) else None


@lru_cache(maxsize=64)
def _plan_crop(axis: Axis, length: int) -> CropAxis | None:
    """Return crops of one length that hold what the touched cells read, starting at multiples of the stride."""
    stride = axis.stride
    if stride is None or axis.wrap or axis.runs_past_the_end:
        return None
    starts, stops = np.array(axis.starts), np.array(axis.starts) + np.array(axis.lengths)
    first, last = [], []
    for touched in touched_cells_by_position(axis, length):
        first.append(int(starts[touched].min()) // stride * stride if touched.any() else 0)
        last.append(int(stops[touched].max()) if touched.any() else 0)
    needed = max(stop - start for start, stop in zip(first, last, strict=True))
    needed += (axis.size - needed) % stride  # so that the last crop, too, starts at a multiple
    if needed < 1 or needed > axis.size:
        return None
    return CropAxis(needed, tuple(min(start, axis.size - needed) for start in first), stride)


def _crop(values: Tensor, axis: int, starts: Tensor, length: int) -> Tensor:
    """Cut `length` entries out along one axis, from another start in each image."""
    index = starts[:, None] + torch.arange(length, device=values.device)
    return torch.gather(values, axis, _expand_index(index, values, axis))


def _paste(values: Tensor, axis: int, starts: Tensor, length: int) -> Tensor:
    """Lay entries out along one axis of `length` places, from another start in each image; elsewhere is anything."""
    index = torch.arange(length, device=values.device) - starts[:, None]
    return torch.gather(values, axis, _expand_index(index.clamp(0, values.shape[axis] - 1), values, axis))


def _expand_index(index: Int64[Tensor, "batch some"], values: Tensor, axis: int) -> Tensor:
    shape = [len(values), *values.shape[1:]]
    shape[axis] = index.shape[1]
    return index.view(len(index), *(-1 if each == axis else 1 for each in range(1, 4))).expand(shape)
