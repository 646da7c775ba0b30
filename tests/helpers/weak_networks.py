"""Networks without weights whose weak spots are known, for studies of attacks."""

import torch
from torch import nn

from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import LocalModel

CELL = 8  # pixels


class TwoClassNetwork(LocalModel):
    """Two classes in cells of 8 x 8 pixels: class 0 is a constant, class 1 what a subclass says."""

    constant = 1.0

    def __init__(self) -> None:
        super().__init__(classes=2, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))

    def local_logits(self, normalized):
        other = self.malicious(normalized)
        return torch.cat([torch.full_like(other, self.constant), other], dim=1)

    def smallest_input(self):
        return CELL, CELL


class Spike(TwoClassNetwork):
    """One bright red pixel makes the logit of class 1 enormous."""

    constant = 5.0

    def malicious(self, pixels):
        return 400 * nn.functional.max_pool2d(pixels[:, :1], CELL) ** 2


class Texture(TwoClassNetwork):
    """Red stripes and bright green speak for class 1; green alone is enough."""

    constant = 1.6

    def malicious(self, pixels):
        stripes = nn.functional.pad((pixels[:, :1, :, 1:] - pixels[:, :1, :, :-1]) ** 2, (0, 1))
        return nn.functional.avg_pool2d(30 * stripes + 100 * pixels[:, 1:2] ** 4, CELL)


def undefended_guard(model: LocalModel) -> LocalGuard:
    return LocalGuard(Preprocess(), model.eval(), Evidence(low=None), Undefended())


def dark_images(count: int, side: int = 32) -> torch.Tensor:
    """Images in 8 bits, dark but not flat, all of class 0."""
    drawn = torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))
    return (20 + 4 * drawn).to(torch.uint8)
