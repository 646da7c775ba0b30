"""Attacks without gradients: noise, solid colors, and pieces of other pictures. What they break needs no skill."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from patchguard.attacks.base import Attack, Draws, Found, check_count, covered, eight_bits, is_broken
from patchguard.attacks.placement import random_places
from patchguard.attacks.victim import Images, Victim
from patchguard.data import sample
from patchguard.data.images import validate_images
from patchguard.patch import Patch

CONTENTS = 1  # the purpose of these draws

# (images, places, draws, try) -> whole images, from which only the pixels of the patch are taken
Fill: TypeAlias = Callable[[Tensor, Tensor, Draws, int], Tensor]


@torch.no_grad()
def guess(
    victim: Victim,
    images: Images,
    target: Int64[Tensor, " batch"],
    patch: Patch,
    aim: Int64[Tensor, " batch"] | None,
    draws: Draws,
    tries: int,
    fill: Fill,
) -> Found:
    """Fill the patch `tries` times at random places, and keep what breaks the image, else the last try."""
    height, width = images.shape[-2:]
    best, where = images.clone(), torch.zeros(len(images), patch.count, 2, dtype=torch.int64, device=images.device)
    left = torch.arange(len(images), device=images.device)
    for number in range(tries):
        mine = draws[left]
        places = random_places(mine, patch, height, width, number)
        shown = eight_bits(fill(images[left], places, mine, number))
        tried = torch.where(covered(places, patch, height, width), shown, images[left])
        best[left], where[left] = tried, places
        broken = is_broken(victim.predict(tried), target[left], None if aim is None else aim[left])
        left = left[~broken]
        if len(left) == 0:
            break
    return best, where


@final
@dataclass(frozen=True, kw_only=True)
class Noise(Attack):
    """Every pixel and channel drawn uniformly, `tries` times, at random places."""

    tries: int = 10

    def __post_init__(self) -> None:
        check_count("tries", self.tries)

    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> Found:
        """Guess with noise."""

        def fill(images: Tensor, places: Tensor, draws: Draws, number: int) -> Tensor:
            return draws.uniform((CONTENTS, number), *images.shape[1:])

        return guess(victim, images, target, patch, aim, draws, self.tries, fill)


@final
@dataclass(frozen=True, kw_only=True)
class Colors(Attack):
    """One color for the whole patch: the corners of the color cube first, then random colors, at random places."""

    tries: int = 10

    def __post_init__(self) -> None:
        check_count("tries", self.tries)

    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> Found:
        """Guess with solid colors."""

        def fill(images: Tensor, places: Tensor, draws: Draws, number: int) -> Tensor:
            if number < 8:
                corner = torch.tensor([number >> shift & 1 for shift in range(3)], device=images.device)
                color = corner.to(images.dtype).view(1, 3, 1, 1)
            else:
                color = draws.uniform((CONTENTS, number), 3, 1, 1)
            return color.expand_as(images)

        return guess(victim, images, target, patch, aim, draws, self.tries, fill)


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Copy(Attack):
    """A piece of another picture, at random places.

    Pieces are cut out at random from `donors` (count, 3, height, width), enlarged where they are smaller than the
    images; without donors, from the embedded sample. Other images of the batch are never used, so that an answer does
    not depend on them.
    """

    tries: int = 10
    donors: Float[Tensor, "donors 3 rows columns"] | None = None

    def __post_init__(self) -> None:
        check_count("tries", self.tries)
        if self.donors is not None:
            validate_images(self.donors)

    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> Found:
        """Guess with pieces of donors."""
        height, width = images.shape[-2:]
        donors = (sample.load().images.float() / 255 if self.donors is None else self.donors).to(images)
        if donors.shape[-2] < height or donors.shape[-1] < width:
            donors = F.interpolate(donors, (height, width), mode="bilinear", align_corners=False).clamp(0, 1)

        def fill(images: Tensor, places: Tensor, draws: Draws, number: int) -> Tensor:
            shares = draws.uniform((CONTENTS, number), 3).double()
            counts = torch.tensor([len(donors), *donors.shape[-2:]], device=images.device)
            chosen, down, right = torch.minimum((shares * counts).long(), counts - 1).unbind(1)
            # The whole donor, rolled: the patch then shows a piece that starts anywhere in it.
            rows = (torch.arange(height, device=images.device) + down[:, None]) % donors.shape[-2]
            columns = (torch.arange(width, device=images.device) + right[:, None]) % donors.shape[-1]
            return donors[chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

        return guess(victim, images, target, patch, aim, draws, self.tries, fill)
