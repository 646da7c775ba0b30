"""Which cells move when one pixel changes, observed; and which may, from field arithmetic alone."""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn


def build_random(factory: Callable[..., nn.Module], **settings: object) -> nn.Module:
    """A model in float64 and evaluation mode, with random batch norm statistics; the same one every time."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = factory(**settings).double().eval()
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.5, 2.0)
                layer.weight.data.uniform_(0.5, 1.5)
                layer.bias.data.normal_()
    return model


def intervals(count: int, pixels: int, *, size: int, stride: int, first: int) -> list[tuple[int, int]]:
    """Per cell of one axis, the first pixel and the number of pixels that it reads inside the image."""
    ends = [(first + stride * cell, first + stride * cell + size) for cell in range(count)]
    return [(max(0, low), min(pixels, high) - max(0, low)) for low, high in ends]


def random_image(height: int, width: int, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height * width)
    return torch.rand(batch, 3, height, width, generator=generator, dtype=torch.float64)


def changed_cells(model: nn.Module, height: int, width: int, pixel: tuple[int, int]) -> np.ndarray:
    """Cells whose logits differ in any bit once one pixel takes one of a few far-off values."""
    image = random_image(height, width)
    with torch.inference_mode():
        before = model(image)
        differs = torch.zeros(before.shape[-2:], dtype=torch.bool)
        for value in (-50.0, 50.0, 1000.0):
            changed = image.clone()
            changed[:, :, pixel[0], pixel[1]] = value
            differs |= (model(changed) != before).any(1)[0]
    return differs.numpy()


def expected_cells(cells: tuple[int, int], pixel: tuple[int, int], *, size: int, stride: int, first: int) -> np.ndarray:
    """Cells whose field holds the pixel, if cell u reads `size` pixels from first + stride * u on."""
    rows, columns = (
        (first + stride * np.arange(count) <= at) & (at < first + stride * np.arange(count) + size)
        for count, at in zip(cells, pixel, strict=True)
    )
    return rows[:, None] & columns[None, :]
