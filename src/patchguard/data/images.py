"""The boundary check of images: everything behind it may rely on (batch, 3, height, width) pixels in [0, 1]."""

import torch
from torch import Tensor

from patchguard.errors import InputError


def validate_images(images: Tensor) -> None:
    """Raise unless `images` is a batch of at least one color image with finite pixels in [0, 1]."""
    if not isinstance(images, Tensor):
        raise InputError(
            f"`images` must be a torch tensor (batch, 3, height, width); got {type(images).__name__}. "
            "Use torch.from_numpy or torch.stack."
        )
    if images.dim() == 3:
        raise InputError(
            f"`images` must be a batch (batch, 3, height, width); got shape {tuple(images.shape)}. "
            "Give one image a batch axis: images[None]."
        )
    if images.dim() != 4 or images.shape[1] != 3:
        last = images.dim() == 4 and images.shape[3] == 3
        raise InputError(
            f"`images` must have shape (batch, 3, height, width); got {tuple(images.shape)}. "
            + ("Move the channels forward: images.permute(0, 3, 1, 2)." if last else "Convert them to RGB first.")
        )
    if images.numel() == 0:
        raise InputError(f"`images` must hold at least one image with at least one pixel; got {tuple(images.shape)}.")
    if not images.is_floating_point():
        hint = "Divide 8-bit pixels by 255" if images.dtype == torch.uint8 else "Convert them with .float()"
        raise InputError(f"`images` must be floating point in [0, 1]; got {images.dtype}. {hint}.")
    # One reduction and one transfer from the device; NaN comes through both extremes.
    low, high = torch.stack(images.detach().aminmax()).tolist()
    if not (low >= 0 and high <= 1):
        if low != low or high != high:
            raise InputError("`images` must be finite; got NaN. Find the image that holds it and load it anew.")
        raise InputError(
            f"`images` must lie in [0, 1]; got {low:.3g} to {high:.3g}. "
            "Divide 8-bit pixels by 255; the model normalizes itself."
        )
