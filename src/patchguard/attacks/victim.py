"""`Victim`: what an attack can be run against. A `Guard` is one; so is any wrapper with the same two methods."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from patchguard.guard import Prediction
from patchguard.runtime import device_and_dtype

Images = Float[Tensor, "batch 3 height width"]


@runtime_checkable
class Victim(Protocol):
    """Answers images with labels, and lets gradients through to their pixels.

    Attacks that follow a defense also look for the attributes `evidence`, `defense` and the method `certify` of a
    `Guard`; without them they attack the plain sum of the local logits.
    """

    def predict(self, images: Images) -> Prediction:
        """Return the label of each image."""
        ...

    def differentiable_logits(self, images: Images) -> Float[Tensor, "batch classes rows columns"]:
        """Return the local logits, with gradients to `images`."""
        ...


def device_of(victim: Victim, images: Tensor) -> torch.device:
    """Return where the victim computes: the device of its `model` where it has one, else that of the images."""
    model = getattr(victim, "model", None)
    return images.device if model is None else device_and_dtype(model)[0]
