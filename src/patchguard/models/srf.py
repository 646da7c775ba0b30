"""Srf: small residual networks with a small receptive field, for small images.

A few 3x3 convolutions look around, all others are 1x1: capacity without a wider field. Zero padding keeps a
cell at every pixel (stride 1) or at every second one (stride 2).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from patchguard.errors import InputError
from patchguard.models.base import CIFAR10_MEAN, CIFAR10_STD, LocalModel, apply_linear_at_cells, initialize

WIDTHS = (128, 256, 256, 512, 512, 512)
WIDE = (208, 416, 416, 832, 832, 832)


@final
class Srf(LocalModel):
    """A 3x3 stem, then one residual block for each of `widths`, then a linear layer at each cell.

    Cell (u, v) reads the field x field pixels centered on (stride * u, stride * v), as far as they lie inside
    the image. The field is 1 + 2 n for stride 1, with n the number of 3x3 convolutions, and 1 + 2 n_1 + 4 n_2
    for stride 2, with n_1 of them up to and including the one that carries the stride and n_2 after it. n_1
    is 1 or 2, whichever makes the field come out: to halve the resolution early is cheapest. The stem is
    always 3x3; `choose_3x3_blocks` says which blocks get the others.
    """

    def __init__(
        self,
        *,
        classes: int = 10,
        field: int = 7,
        stride: int = 1,
        widths: Sequence[int] = WIDTHS,
        mean: Sequence[float] = CIFAR10_MEAN,
        std: Sequence[float] = CIFAR10_STD,
    ) -> None:
        super().__init__(classes=classes, mean=mean, std=std)
        self.name = "srf"
        self.field_size, self.stride, self.widths = field, stride, tuple(widths)
        if not self.widths or min(self.widths) < 1:
            raise InputError(f"`widths` must be one positive channel count per block; got {widths}.")
        convolutions, strided = count_convolutions(field, stride)
        inputs = (self.widths[0], *self.widths[:-1])
        mixing = choose_3x3_blocks(self.widths, convolutions - 1)
        stride_at = None if stride == 1 or strided == 0 else mixing[strided - 1]
        self.stem = ConvNorm(3, inputs[0], kernel=3, stride=stride if strided == 0 else 1)
        self.blocks = nn.Sequential(
            *(
                Block(before, after, kernel=3 if i in mixing else 1, stride=2 if i == stride_at else 1)
                for i, (before, after) in enumerate(zip(inputs, self.widths, strict=True))
            )
        )
        self.fc = nn.Linear(self.widths[-1], classes)
        initialize(self)

    def local_logits(
        self, normalized: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch classes rows columns"]:
        """Return the class scores of every cell."""
        return apply_linear_at_cells(self.fc, self.features(normalized))

    def features(
        self, normalized: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch channels rows columns"]:
        """Return what the last layer reads at every cell."""
        features: Tensor = self.blocks(F.relu(self.stem(normalized), inplace=True))
        return features

    def keep_every(self, step: int) -> None:
        """Compute only each `step`-th cell of every row and column, the first included, until told otherwise.

        All convolutions after the last 3x3 one are 1x1 and look at single cells: that one takes the stride, and each
        cell that is left is what it was. For learning faster; a field that was traced before holds no longer.
        """
        looking = [block for block in self.blocks if isinstance(block, Block) and block.look.conv.kernel_size != (1, 1)]
        if looking:
            looking[-1].step = step
        elif step != 1:
            raise InputError("`field` must be at least 5 pixels for cells to be left out; here only the stem is 3x3.")

    def smallest_input(self) -> tuple[int, int]:
        """One field: on smaller images no cell would see only pixels."""
        return self.field_size, self.field_size

    def config(self) -> dict[str, Any]:
        """Return the settings of `srf`."""
        return {
            **super().config(),
            "field": self.field_size,
            "stride": self.stride,
            "widths": list(self.widths),
        }


def count_convolutions(field: int, stride: int) -> tuple[int, int]:
    """Return how many 3x3 convolutions make up `field`, and the index of the one that carries the stride.

    >>> count_convolutions(7, 1), count_convolutions(7, 2), count_convolutions(9, 2)
    ((3, 0), (2, 0), (3, 1))
    """
    if stride not in (1, 2):
        raise InputError(f"`stride` must be 1 or 2; got {stride}.")
    if isinstance(field, bool) or not isinstance(field, int) or field < 3 or field % 2 == 0:
        raise InputError(f"`field` must be an odd number of pixels of at least 3; got {field}.")
    steps = (field - 1) // 2
    if stride == 1:
        return steps, 0
    before = 1 if steps % 2 else 2
    return before + (steps - before) // 2, before - 1


def choose_3x3_blocks(widths: Sequence[int], count: int) -> list[int]:
    """Return the blocks, in order, whose first convolution is 3x3.

    Blocks that widen come first, so that new channels go with new context, then the others; in both groups
    from the front, where a 3x3 convolution costs least.

    >>> [choose_3x3_blocks((128, 256, 256, 512, 512, 512), count) for count in (2, 4)]
    [[1, 3], [0, 1, 2, 3]]
    """
    if count > len(widths):
        raise InputError(
            f"`widths` must name at least {count} blocks for this `field` and `stride`; got {len(widths)}. "
            "Give more widths or a smaller field."
        )
    widens = [False] + [after > before for before, after in pairwise(widths)]
    return sorted(sorted(range(len(widths)), key=lambda i: (not widens[i], i))[:count])


@final
class Block(nn.Module):
    """Computes relu(x' + f(x)): f looks around (`kernel`), then widens (1x1).

    x' is x, projected where the shape changes. Looking around before widening keeps the 3x3 convolution at
    the smaller of the two widths.
    """

    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int) -> None:
        super().__init__()
        self.look = ConvNorm(inputs, inputs, kernel=kernel, stride=stride)
        self.widen = ConvNorm(inputs, outputs)
        self.step = 1
        self.shortcut: ConvNorm | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = ConvNorm(inputs, outputs, stride=stride)

    def forward(
        self, inputs: Float[Tensor, "batch inputs height width"]
    ) -> Float[Tensor, "batch outputs rows columns"]:
        """Return the features after this block."""
        step = self.step
        features = self.widen(F.relu(self.look(inputs, step), inplace=True))
        if self.shortcut is not None:
            features += self.shortcut(inputs, step)
        else:
            features += inputs if step == 1 else inputs[..., ::step, ::step]
        return F.relu(features, inplace=True)


@final
class ConvNorm(nn.Module):
    """A convolution without bias, zero-padded to keep the size, and batch normalization.

    With frozen statistics the two are one affine map, and are computed as one convolution:

        gamma (w * x - mean) / sigma + beta  =  (s w) * x + (beta - s mean),    s = gamma / sigma.

    The scaled weights are made anew in each pass, at a small part of its cost: nothing to keep in step.
    """

    def __init__(self, inputs: int, outputs: int, *, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(
        self, inputs: Float[Tensor, "batch inputs height width"], step: int = 1
    ) -> Float[Tensor, "batch outputs rows columns"]:
        """Return the normalized features, of each `step`-th position only."""
        norm, mean, variance = self.norm, self.norm.running_mean, self.norm.running_var
        stride, padding = self.conv.stride[0] * step, self.conv.padding[0]
        if self.training or mean is None or variance is None:
            normalized: Tensor = norm(F.conv2d(inputs, self.conv.weight, stride=stride, padding=padding))
            return normalized
        scale = norm.weight * torch.rsqrt(variance + norm.eps)
        weight, bias = self.conv.weight * scale[:, None, None, None], norm.bias - scale * mean
        return F.conv2d(inputs, weight, bias, stride=stride, padding=padding)


def srf(
    *,
    classes: int = 10,
    field: int = 7,
    stride: int = 1,
    widths: Sequence[int] = WIDTHS,
    mean: Sequence[float] = CIFAR10_MEAN,
    std: Sequence[float] = CIFAR10_STD,
) -> Srf:
    """Return a network of 2.3 million parameters at the default settings."""
    return Srf(classes=classes, field=field, stride=stride, widths=widths, mean=mean, std=std)


def srf_wide(
    *,
    classes: int = 10,
    field: int = 7,
    stride: int = 1,
    mean: Sequence[float] = CIFAR10_MEAN,
    std: Sequence[float] = CIFAR10_STD,
) -> Srf:
    """Return the same network with 1.6 times the channels: 6 million parameters."""
    return Srf(classes=classes, field=field, stride=stride, widths=WIDE, mean=mean, std=std)
