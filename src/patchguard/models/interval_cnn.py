"""A small convolutional network for interval bounds: plain layers, no normalization, one answer per image."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, final

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from patchguard.errors import InputError
from patchguard.models.base import CIFAR10_MEAN, CIFAR10_STD, LocalModel

WIDTHS, KERNELS, STRIDES = (64, 64, 128, 128), (4, 3, 4, 3), (2, 1, 2, 1)


@final
class IntervalCnn(LocalModel):
    """Convolutions with ReLUs, then a linear layer over everything: `z -> relu(W z + b)` all the way.

    The linear layer is a convolution as large as what is left of the image, so that the grid has one cell, which reads
    the whole image. Images must have `side` x `side` pixels.
    """

    def __init__(
        self,
        *,
        classes: int = 10,
        side: int = 32,
        widths: Sequence[int] = WIDTHS,
        kernels: Sequence[int] = KERNELS,
        strides: Sequence[int] = STRIDES,
        mean: Sequence[float] = CIFAR10_MEAN,
        std: Sequence[float] = CIFAR10_STD,
    ) -> None:
        super().__init__(classes=classes, mean=mean, std=std)
        self.name = "interval_cnn"
        self.side = side
        self.settings = {"widths": list(widths), "kernels": list(kernels), "strides": list(strides)}
        if len({len(widths), len(kernels), len(strides)}) != 1 or min(side, *widths, *kernels, *strides) < 1:
            raise InputError(
                "`widths`, `kernels` and `strides` must be positive numbers, one each per layer; "
                f"got {list(widths)}, {list(kernels)}, {list(strides)}."
            )
        left = side
        layers = []
        for (before, after), kernel, stride in zip(pairwise((3, *widths)), kernels, strides, strict=True):
            padding = (kernel - 1) // 2
            left = (left + 2 * padding - kernel) // stride + 1
            layers.append(nn.Conv2d(before, after, kernel, stride=stride, padding=padding))
        if left < 1:
            raise InputError(f"`side` must be larger for these kernels and strides; nothing is left of {side} pixels.")
        self.hidden = nn.ModuleList(layers)
        self.fc = nn.Conv2d(widths[-1], classes, left)
        for layer in self.hidden:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def convolutions(self) -> list[nn.Conv2d]:
        """Return the layers that a ReLU follows."""
        return [layer for layer in self.hidden if isinstance(layer, nn.Conv2d)]

    def local_logits(
        self, normalized: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch classes rows columns"]:
        """Return the class scores of the one cell."""
        features = normalized
        for layer in self.hidden:
            features = F.relu(layer(features))
        logits: Tensor = self.fc(features)
        return logits

    def smallest_input(self) -> tuple[int, int]:
        """Return the only legal size."""
        return self.side, self.side

    def check_size(self, height: int, width: int) -> None:
        """Raise unless images have the size that the linear layer is made for."""
        if (height, width) != (self.side, self.side):
            raise InputError(
                f"`images` must have {self.side} x {self.side} pixels here; got {height} x {width}. Resize them first, "
                "or build the network for another side."
            )

    def config(self) -> dict[str, Any]:
        """Return the settings of `interval_cnn`."""
        return {**super().config(), "side": self.side, **self.settings}


def interval_cnn(
    *,
    classes: int = 10,
    side: int = 32,
    widths: Sequence[int] = WIDTHS,
    kernels: Sequence[int] = KERNELS,
    strides: Sequence[int] = STRIDES,
    mean: Sequence[float] = CIFAR10_MEAN,
    std: Sequence[float] = CIFAR10_STD,
) -> IntervalCnn:
    """Return four convolutions and a linear layer without normalization, for interval bounds."""
    return IntervalCnn(classes=classes, side=side, widths=widths, kernels=kernels, strides=strides, mean=mean, std=std)
