r"""The loss of interval bounds: cross-entropy of the worst logits for patches at random positions.

Symbols.  M_k(w) is the lower bound of f_y - f_k with a patch on w, of `guards.interval`, not charged for rounding.
          s_k = max over the sampled w of -M_k(w), s_y = 0; the loss is CE(s). It bounds the cross-entropy of every
          image that a patch at one of these positions makes, since f_k - f_y <= s_k there.

Chiang et al. call this training with random patches: a few positions per image and step in place of all.
"""

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from patchguard.guards.interval import bound_leads, bound_network, covered_pixels, positions
from patchguard.models.interval_cnn import IntervalCnn
from patchguard.patch import Patch
from patchguard.training.augment import BatchRandom


@final
class BoundedNetwork(nn.Module):
    """A network that returns its logits and, by interval bounds, what patches can make of them."""

    def __init__(self, model: IntervalCnn) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        pixels: Float[Tensor, "batch 3 height width"],
        inside: Bool[Tensor, "batch places 1 height width"],
        fraction: Float[Tensor, ""],
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch places classes classes"]]:
        """Return the logits, and M for every position; a pixel inside goes the `fraction` of its way to 0 and to 1."""
        model = self.model
        normalized = model.normalize(pixels)
        logits = model.local_logits(normalized).flatten(1)
        black, white = (model.normalize(torch.full_like(pixels[:1, :, :1, :1], each)) for each in (0.0, 1.0))
        clean = normalized.unsqueeze(1)
        gray = (black + white).expand_as(clean) / 2
        center = torch.where(inside, torch.lerp(clean, gray, fraction), clean).flatten(0, 1)
        radius = torch.where(inside, fraction * (white - black) / 2, 0.0).flatten(0, 1)
        center, radius = bound_network(model, center, radius, product=convolve, charge=charge_nothing)
        with torch.autocast(pixels.device.type, enabled=False):
            lead = bound_leads(model.fc, center.float(), radius.float(), charge=charge_nothing)
        return logits, lead.view(*inside.shape[:2], *lead.shape[1:])


def convolve(layer: nn.Conv2d, weight: Tensor, inputs: Tensor) -> Tensor:
    """Return W z by the fastest kernel."""
    return F.conv2d(inputs, weight, None, layer.stride, int(layer.padding[0]))


def charge_nothing(layer: nn.Conv2d) -> float:
    """Return the charge for rounding while a network learns."""
    return 0.0


def sample_patches(
    patch: Patch, size: tuple[int, int], random: BatchRandom, count: int
) -> Bool[Tensor, "batch count 1 height width"]:
    """Return which pixels `count` patches per image cover, each by itself at a random position."""
    places = positions(patch, size[0], size[1], random.generator.device)
    sampled = places[random.integers(len(places), count)]  # batch, count, 2
    return covered_pixels(sampled.flatten(0, 1), patch, *size).view(*sampled.shape[:2], 1, *size)


def worst_scores(
    lead: Float[Tensor, "batch places classes classes"], target: Int64[Tensor, " batch"]
) -> Float[Tensor, "batch classes"]:
    """Return s: how far each class can get ahead of the target at the worst of the positions."""
    own = target.view(-1, 1, 1, 1).expand(-1, lead.shape[1], 1, lead.shape[3])
    return -lead.gather(2, own).squeeze(2).amin(1)
