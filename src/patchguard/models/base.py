"""`LocalModel`: a network whose every output cell reads one bounded box of pixels."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from patchguard.errors import InputError
from patchguard.geometry.field import Field

if TYPE_CHECKING:
    from patchguard.geometry.program import Program

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class LocalModel(nn.Module, ABC):
    """Maps pixels in [0, 1] to local logits, one vector of class scores for each cell of a grid.

    A subclass writes `local_logits`, which gets normalized images, and `smallest_input`. `name` is its entry
    in `patchguard.models.REGISTRY`: `build(model.name, **model.config())` has the same architecture. It is
    empty for a model that cannot be rebuilt.
    """

    name: str = ""

    def __init__(self, *, classes: int, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
            raise InputError(f"`classes` must be a whole number of at least 1; got {classes!r}.")
        self.classes = classes
        self.normalize = Normalize(mean, std)

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch classes rows columns"]:
        """Return the local logits of images with pixels in [0, 1]."""
        self.check_size(images.shape[-2], images.shape[-1])
        return self.local_logits(self.normalize(images))

    @abstractmethod
    def local_logits(
        self, normalized: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch classes rows columns"]:
        """Return the local logits of images that are already normalized."""

    @abstractmethod
    def smallest_input(self) -> tuple[int, int]:
        """Return the smallest legal (height, width)."""

    def check_size(self, height: int, width: int) -> None:
        """Raise unless images of `height` x `width` pixels are large enough."""
        rows, columns = self.smallest_input()
        if height < rows or width < columns:
            raise InputError(
                f"`images` must have at least {rows} x {columns} pixels here; got {height} x {width}. "
                "Enlarge them first, or take a model with a smaller field."
            )

    def field(self, height: int, width: int) -> Field:
        """Return which pixels of a `height` x `width` image each cell reads, derived from the exported graph.

        A subclass that overrides this declares its field, and guards take it on trust: `audit` it.
        """
        return self.program(height, width).field

    def program(self, height: int, width: int) -> "Program":
        """Return what guards run on images of `height` x `width` pixels, and the field of that."""
        from patchguard.geometry.program import Program, export_program  # here, because torch.export is slow to import

        self.check_size(height, width)
        if type(self).field is not LocalModel.field:
            return Program(self, self.field(height, width))
        return export_program(self, (height, width))

    def config(self) -> dict[str, Any]:
        """Return the settings, as JSON values, with which the registry rebuilds this model from `name`."""
        return {"classes": self.classes, **self.normalize.config()}


@final
class Normalize(nn.Module):
    """Computes (pixels - mean) / std per channel.

    The two constants are buffers, so that they follow the model to its device, but not part of its state
    dict, so that a checkpoint of the bare network loads strictly.
    """

    mean: Float[Tensor, "3 1 1"]
    std: Float[Tensor, "3 1 1"]

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise InputError(f"`mean` and `std` must be three numbers each, `std` above 0; got {mean} and {std}.")
        self.values = {"mean": [float(value) for value in mean], "std": [float(value) for value in std]}
        for key, value in self.values.items():
            self.register_buffer(key, torch.tensor(value).view(3, 1, 1), persistent=False)

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch 3 height width"]:
        """Return the normalized images."""
        return (images - self.mean) / self.std

    def config(self) -> dict[str, list[float]]:
        """Return `mean` and `std` as they were given, before rounding to the precision of the buffers."""
        return {key: list(value) for key, value in self.values.items()}


def apply_linear_at_cells(
    linear: nn.Linear, features: Float[Tensor, "batch channels rows columns"]
) -> Float[Tensor, "batch classes rows columns"]:
    """Apply one linear layer to the feature vector of every cell, as a 1x1 convolution with its weights."""
    return F.conv2d(features, linear.weight[:, :, None, None], linear.bias)


def scale_channels(channels: int, width: float) -> int:
    """Return `channels` times the width multiplier, rounded down, and at least one."""
    if not width > 0:
        raise InputError(f"`width` must be a positive multiplier of the channels; got {width}. 1.0 is the usual.")
    return max(1, int(channels * width))


def initialize(module: nn.Module) -> None:
    """Draw convolution weights with the variance 2 / fan-out that keeps gradients level through ReLUs."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
