"""A crafted network for attacks: a cell sees 3 x 3 pixels and believes in the class whose color is strongest there."""

import torch
from torch import nn

from helpers.small_guards import build_once
from patchguard.defenses import (
    CellMasking,
    ClippedSum,
    Defense,
    DoubleMasking,
    MajorityVote,
    MaskedAgreement,
    Median,
    RobustMasking,
    TrimmedMean,
    Undefended,
)
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.preprocess import Preprocess, Resize
from patchguard.geometry.windows import Windows
from patchguard.guards.local import LocalGuard
from patchguard.models import wrap
from patchguard.patch import Patch

SIDE = 12
PATCH = Patch(3)
ANY_MASKS = Windows.sliding(grid=(1, 1), size=(1, 1))

GUARDS: dict[str, tuple[Defense, Evidence]] = {
    "undefended": (Undefended(), Evidence(low=None)),
    "robust": (RobustMasking(masks=ANY_MASKS), Evidence(low=0.0)),
    "robust above a threshold": (RobustMasking(masks=ANY_MASKS, threshold=0.2), Evidence(low=0.0)),
    "double": (DoubleMasking(masks=ANY_MASKS), Evidence(low=None)),
    "double above tau": (DoubleMasking(masks=ANY_MASKS, tau=20.0), Evidence(low=None)),
    "clipped": (ClippedSum(), Evidence(low=-5.0, high=5.0)),
    "tanh": (ClippedSum(), Evidence(kind="tanh")),
    "confidence": (RobustMasking(masks=ANY_MASKS), Evidence(kind="confidence")),
    "vote": (MajorityVote(), Evidence(kind="vote", threshold=0.4)),
    "prediction": (MajorityVote(), Evidence(kind="prediction")),
    "cells": (CellMasking(cells=1), Evidence(low=0.0)),
    "median": (Median(), Evidence(low=None)),
    "trimmed": (TrimmedMean(trim=1), Evidence(low=None)),
    "agreement": (MaskedAgreement(masks=ANY_MASKS), Evidence(low=None)),
}


class StrongestColor(nn.Module):
    """z_k = gain * tanh-like of (mean of channel k - mean of all channels) over 3 x 3 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Conv2d(3, 3, 3)
        self.bend = nn.Tanh()
        self.gain = nn.Conv2d(3, 3, 1)
        with torch.no_grad():
            self.mean.weight.copy_(6 * (torch.eye(3) - 1 / 3).view(3, 3, 1, 1).expand(3, 3, 3, 3) / 9)
            self.gain.weight.copy_(10 * torch.eye(3).view(3, 3, 1, 1))
            self.mean.bias.zero_()
            self.gain.bias.zero_()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.gain(self.bend(self.mean(images)))


@build_once
def color_guard(name: str, patch: Patch = PATCH, resized: int | None = None) -> LocalGuard:
    """A guard of the crafted network whose masks fit the patch, behind a resize if wanted."""
    defense, evidence = GUARDS[name]
    model = wrap(StrongestColor(), classes=3, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), smallest_input=(3, 3))
    steps = () if resized is None else (Resize(height=resized, width=resized, mode="bicubic"),)
    return LocalGuard(Preprocess(steps), model, evidence, defense).for_patch(patch, SIDE, SIDE)


def tinted_images(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Coarse noise with a tint: of the class, more or less strong. Whole 8-bit pixels, as from a file."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(3, (count,), generator=generator)
    coarse = 0.3 + 0.4 * torch.rand(count, 3, 4, 4, generator=generator)
    images = nn.functional.interpolate(coarse, (SIDE, SIDE), mode="nearest")
    tint = 0.02 + 0.2 * torch.rand(count, generator=generator)
    images[torch.arange(count), target] += tint.view(-1, 1, 1)
    return images.mul(255).round().div(255), target
