"""Attacks without gradients: noise, solid colours, and pieces of other pictures. What they break needs no skill."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from jaxtyping import Int64
from torch import Tensor

from patchguard.attacks.base import Attack, Draws, Found, check_count, covered, eight_bits, is_broken
from patchguard.attacks.placement import random_places
from patchguard.attacks.victim import Images, Victim
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
