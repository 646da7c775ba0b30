"""Attacks without gradients: noise, solid colors, pieces of other images, and the search in a black box.

What the first three break needs no skill. The last serves gradient attacks on guards that offer no gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from patchguard.attacks.base import (
    Attack,
    Draws,
    Images,
    PatchedImages,
    Positions,
    Victim,
    is_broken,
    patch_mask,
    require_integer,
    round_to_8_bits,
)
from patchguard.attacks.positions import random_positions
from patchguard.data import sample
from patchguard.data.images import validate_images
from patchguard.errors import InputError
from patchguard.guard import Guard
from patchguard.patch import Patch

CONTENTS = 1  # the purpose of these draws

# (images, positions, draws, try) -> whole images, from which only the pixels of the patch are taken
Fill: TypeAlias = Callable[[Tensor, Tensor, Draws, int], Tensor]
# (rows of the images, their draws, try) -> where to put the patch
Place: TypeAlias = Callable[[Tensor, Draws, int], Tensor]


@torch.no_grad()
def try_contents(
    victim: Victim,
    images: Images,
    target: Int64[Tensor, " batch"],
    patch: Patch,
    aim: Int64[Tensor, " batch"] | None,
    draws: Draws,
    tries: int,
    fill: Fill,
    place: Place | None = None,
) -> PatchedImages:
    """Fill the patch `tries` times, by default at random positions; keep what breaks the image, else the last try."""
    height, width = images.shape[-2:]
    best, where = images.clone(), torch.zeros(len(images), patch.count, 2, dtype=torch.int64, device=images.device)
    rows = torch.arange(len(images), device=images.device)  # of the images that are not broken yet
    for number in range(tries):
        row_draws = draws[rows]
        if place is None:
            positions = random_positions(row_draws, patch, height, width, number)
        else:
            positions = place(rows, row_draws, number)
        contents = round_to_8_bits(fill(images[rows], positions, row_draws, number))
        patched = torch.where(patch_mask(positions, patch, height, width), contents, images[rows])
        best[rows], where[rows] = patched, positions
        broken = is_broken(victim.predict(patched), target[rows], None if aim is None else aim[rows])
        rows = rows[~broken]
        if len(rows) == 0:
            break
    return best, where


def fill_noise(images: Tensor, positions: Tensor, draws: Draws, number: int) -> Tensor:
    """Draw every pixel and channel uniformly."""
    return draws.uniform((CONTENTS, number), *images.shape[1:])


def fill_color(images: Tensor, positions: Tensor, draws: Draws, number: int) -> Tensor:
    """Take one color for the whole patch: the corners of the color cube first, then random colors."""
    if number < 8:
        corner = torch.tensor([number >> shift & 1 for shift in range(3)], device=images.device)
        color = corner.to(images.dtype).view(1, 3, 1, 1)
    else:
        color = draws.uniform((CONTENTS, number), 3, 1, 1)
    return color.expand_as(images)


# -- guards without gradients ------------------------------------------------------------------------------------------


def search_black_box(
    victim: Victim,
    images: Images,
    target: Int64[Tensor, " batch"],
    patch: Patch,
    aim: Int64[Tensor, " batch"] | None,
    draws: Draws,
    tries: int,
) -> PatchedImages:
    """Query a victim that offers no gradients: solid colors and noise, where its certificate is weakest and at random.

    This is what gradient attacks do to such a victim, with as many queries as they would take steps. It is weak: that
    it fails says little.
    """
    weakest = find_weakest_positions(victim, images, target, patch)

    def place(rows: Tensor, row_draws: Draws, number: int) -> Tensor:
        if weakest is not None and number % 2 == 0:
            return weakest[rows]
        return random_positions(row_draws, patch, images.shape[-2], images.shape[-1], number)

    def fill(images: Tensor, positions: Tensor, row_draws: Draws, number: int) -> Tensor:
        kind = fill_noise if number // 2 % 2 else fill_color
        return kind(images, positions, row_draws, number // 4)

    return try_contents(victim, images, target, patch, aim, draws, tries, fill, place)


@torch.no_grad()
def find_weakest_positions(
    victim: Victim, images: Images, target: Int64[Tensor, " batch"], patch: Patch
) -> Positions | None:
    """Return where the certificate of `target` is weakest; None for a victim that cannot tell."""
    if not isinstance(victim, Guard):
        return None
    try:
        weakest = victim.certify(images, patch, target).weakest
    except InputError:  # nothing can be certified for such a patch
        return None
    height, width = images.shape[-2:]
    corners = []
    for numbers in [] if weakest is None else weakest.reshape(len(images), -1).tolist():
        boxes = [victim.locate(patch, height, width, number)[0] for number in numbers]
        known = [box[:2] for box in boxes if box is not None]
        if len(known) < len(boxes):
            return None
        corners.append([*known, *known[-1:] * (patch.count - len(known))])
    return torch.tensor(corners, device=images.device) if corners else None


# -- attacks -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class Noise(Attack):
    """Every pixel and channel drawn uniformly, `tries` times, at random positions."""

    tries: int = 10

    def __post_init__(self) -> None:
        require_integer("tries", self.tries)

    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> PatchedImages:
        """Fill the patch with noise."""
        return try_contents(victim, images, target, patch, aim, draws, self.tries, fill_noise)


@final
@dataclass(frozen=True, kw_only=True)
class Colors(Attack):
    """One color for the whole patch: the corners of the color cube first, then random colors, at random positions."""

    tries: int = 10

    def __post_init__(self) -> None:
        require_integer("tries", self.tries)

    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> PatchedImages:
        """Fill the patch with solid colors."""
        return try_contents(victim, images, target, patch, aim, draws, self.tries, fill_color)


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Copy(Attack):
    """A piece of another image, at random positions.

    Pieces are cut out at random from `donors` (count, 3, height, width), enlarged where they are smaller than the
    images; without donors, from the embedded sample. Other images of the batch are never used, so that a result does
    not depend on them.
    """

    tries: int = 10
    donors: Float[Tensor, "donors 3 rows columns"] | None = None

    def __post_init__(self) -> None:
        require_integer("tries", self.tries)
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
    ) -> PatchedImages:
        """Fill the patch with pieces of donors."""
        height, width = images.shape[-2:]
        donors = (sample.load().images.float() / 255 if self.donors is None else self.donors).to(images)
        if donors.shape[-2] < height or donors.shape[-1] < width:
            donors = F.interpolate(donors, (height, width), mode="bilinear", align_corners=False).clamp(0, 1)

        def fill(images: Tensor, positions: Tensor, draws: Draws, number: int) -> Tensor:
            fractions = draws.uniform((CONTENTS, number), 3).double()
            counts = torch.tensor([len(donors), *donors.shape[-2:]], device=images.device)
            donor, down, right = torch.minimum((fractions * counts).long(), counts - 1).unbind(1)
            # The whole donor, rolled: the patch then shows a piece that starts anywhere in it.
            rows = (torch.arange(height, device=images.device) + down[:, None]) % donors.shape[-2]
            columns = (torch.arange(width, device=images.device) + right[:, None]) % donors.shape[-1]
            return donors[donor[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

        return try_contents(victim, images, target, patch, aim, draws, self.tries, fill)
