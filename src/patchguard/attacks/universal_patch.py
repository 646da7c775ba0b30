"""`UniversalPatch`: one picture that makes a network predict one class on any image (Brown et al.)."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor

from patchguard.attacks.base import (
    Attack,
    Draws,
    Images,
    PatchedImages,
    Positions,
    Victim,
    find_device,
    gradient_precision,
    offers_gradients,
    patch_mask,
    require_integer,
    round_to_8_bits,
)
from patchguard.attacks.baselines import try_contents
from patchguard.attacks.gradient_ascent import gradient_batch_size
from patchguard.attacks.objectives import Goal, cross_entropy
from patchguard.data.images import validate_images
from patchguard.errors import InputError
from patchguard.patch import Patch
from patchguard.runtime import make_generator

Picture = Float[Tensor, "3 rows columns"]
BATCH = 32  # images per step of learning
logger = logging.getLogger(__name__)


# -- learning ----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class Transformations:
    """Random changes of a patch while it is learned: rotation up to `degrees`, scale and brightness in these bounds."""

    degrees: float = 22.5
    smallest: float = 0.9
    largest: float = 1.1
    brightness: float = 0.1

    def __post_init__(self) -> None:
        if not (0 < self.smallest <= self.largest and 0 <= self.brightness <= 1 and 0 <= self.degrees <= 180):
            raise InputError(
                "transformations must have 0 < `smallest` <= `largest`, `brightness` in [0, 1] and `degrees` in "
                f"[0, 180]; got {self}."
            )


def learn_patch(
    victim: Victim,
    images: Images,
    aim: int,
    patch: Patch,
    *,
    steps: int = 500,
    step: float = 0.02,
    momentum: float = 0.9,
    transformations: Transformations | None = None,
    seed: int = 0,
    half: bool = True,
    progress: Callable[[int, float], None] | None = None,
) -> Picture:
    """Return a patch that drives `images`, and hopefully others, to the class `aim`.

    Every step shows it on `BATCH` images at random positions, rotated, scaled and brightened at random within the
    bounds of `transformations`, and lowers the mean cross-entropy to the aim (expectation over transformations).
    `progress` gets the number of the step and the fraction of these images that the undefended network takes for the
    aim. Rotation and scale happen only here: as an `Attack`, the patch is shown straight, in exactly its own rectangle.
    """
    validate_images(images)
    height, width = images.shape[-2:]
    patch.check_fits(height, width)
    require_integer("steps", steps)
    if not offers_gradients(victim):
        raise InputError(f"`victim` must offer gradients (`differentiable_logits`); got {type(victim).__name__}.")
    bounds = transformations or Transformations()
    device = find_device(victim, images)
    chance = make_generator(seed)
    picture = torch.rand(3, patch.height, patch.width, generator=chance).to(device)
    velocity = torch.zeros_like(picture)
    size = gradient_batch_size(victim, images[:1].to(device), half)
    for number in range(steps):
        rows = torch.randint(len(images), (BATCH,), generator=chance)
        grid = _sample_grids(patch, height, width, bounds, chance).to(device)
        light = 1 + bounds.brightness * (2 * torch.rand(BATCH, 1, 1, 1, generator=chance).to(device) - 1)
        background = images[rows.to(images.device)].to(device)
        shown = picture.clone().requires_grad_(True)
        gradient, taken = torch.zeros_like(picture), 0
        for part in torch.arange(BATCH, device=device).split(size):  # type: ignore[no-untyped-call]
            with torch.enable_grad():
                pasted = _paste(shown, background[part], grid[part], light[part])
                with gradient_precision(device, half):
                    local_logits = victim.differentiable_logits(pasted)
                if not 0 <= aim < local_logits.shape[1]:
                    raise InputError(f"`aim` must be a class from 0 to {local_logits.shape[1] - 1}; got {aim}.")
                towards = torch.full((len(part),), aim, device=device)
                score = cross_entropy(local_logits, Goal(target=towards, aim=towards))
                gradient += torch.autograd.grad(score.sum(), shown)[0]
            taken += int((local_logits.float().mean((2, 3)).argmax(1) == aim).sum())
        velocity = momentum * velocity + gradient / gradient.abs().mean().clamp(min=1e-30)
        picture = (picture + step * velocity.sign()).clamp(0, 1)
        if progress is not None:
            progress(number, taken / BATCH)
        logger.debug("step %d: %d of %d taken for class %d", number, taken, BATCH, aim)
    return round_to_8_bits(picture)


def _sample_grids(
    patch: Patch, height: int, width: int, bounds: Transformations, chance: torch.Generator
) -> Float[Tensor, "batch height width 2"]:
    """Return which point of the patch every pixel of the image shows, in [-1, 1]; beyond that, none."""
    angle = (2 * torch.rand(BATCH, generator=chance) - 1) * math.radians(bounds.degrees)
    scale = bounds.smallest + (bounds.largest - bounds.smallest) * torch.rand(BATCH, generator=chance)
    center = torch.rand(BATCH, 2, generator=chance) * torch.tensor([height - patch.height, width - patch.width])
    center = center + torch.tensor([patch.height, patch.width]) / 2
    row = torch.arange(height).view(1, -1, 1) + 0.5 - center[:, 0].view(-1, 1, 1)
    column = torch.arange(width).view(1, 1, -1) + 0.5 - center[:, 1].view(-1, 1, 1)
    cos, sin = ((f(angle) / scale).view(-1, 1, 1) for f in (torch.cos, torch.sin))
    return torch.stack(
        [(cos * column + sin * row) * 2 / patch.width, (cos * row - sin * column) * 2 / patch.height], -1
    )


def _paste(picture: Picture, background: Images, grid: Tensor, light: Tensor) -> Images:
    """Show the picture where the grid says so, with this brightness."""
    drawn = F.grid_sample(
        picture.expand(len(background), -1, -1, -1), grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    inside = (grid.abs() <= 1).all(-1).unsqueeze(1)
    return torch.where(inside, (drawn * light).clamp(0, 1), background)


# -- files, and use without an attack ----------------------------------------------------------------------------------


def save_patch(picture: Picture, path: Path | str) -> None:
    """Write a patch as a PNG, which holds all that is needed to use it again."""
    pixels = round_to_8_bits(picture).mul(255).round().to(torch.uint8)
    Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy()).save(path, format="PNG")


def load_patch(path: Path | str) -> Picture:
    """Return the picture in a PNG."""
    try:
        with Image.open(path) as file:
            pixels = np.array(file.convert("RGB"))
    except OSError as error:
        raise InputError(f"`path` must be a picture of a patch; {path} cannot be read ({error}).") from None
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def apply_patch(png: Path | str | Picture, images: Images, positions: Positions) -> Images:
    """Return the images with the patch, in its own size, at each of `positions` (top left corners)."""
    validate_images(images)
    picture = (png if isinstance(png, Tensor) else load_patch(png)).to(images)
    patch = Patch(*picture.shape[-2:])
    height, width = images.shape[-2:]
    patch.check_fits(height, width)
    if not isinstance(positions, Tensor) or positions.dim() != 3 or positions.shape[::2] != (len(images), 2):
        raise InputError(f"`positions` must be a tensor of corners, (images, patches, 2) with {len(images)} images.")
    room = torch.tensor([height - patch.height, width - patch.width], device=positions.device)
    if not bool(((positions >= 0) & (positions <= room)).all()):
        raise InputError(f"`positions` must keep the {patch.height} x {patch.width} patch inside the images.")
    patched = images
    for each in positions.to(images.device).unbind(1):
        inside = patch_mask(each.unsqueeze(1), patch, height, width)
        row = torch.arange(height, device=images.device) - each[:, 0, None]
        column = torch.arange(width, device=images.device) - each[:, 1, None]
        rows, columns = row.clamp(0, patch.height - 1), column.clamp(0, patch.width - 1)
        grid = picture[:, rows[:, :, None], columns[:, None, :]].movedim(1, 0)
        patched = torch.where(inside, grid, patched)
    return patched


@final
@dataclass(frozen=True, kw_only=True)
class UniversalPatch(Attack):
    """Show the patch in the PNG at `path` at up to `locations` random positions, until an image is broken.

    Make one with `learn_patch` and `save_patch`. A picture of another size than the threat's rectangle is resized to
    it; several rectangles all show it.
    """

    path: Path | str
    locations: int = 10

    def __post_init__(self) -> None:
        require_integer("locations", self.locations)

    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> PatchedImages:
        """Try random positions."""
        picture = load_patch(self.path).to(images)
        if picture.shape[-2:] != (patch.height, patch.width):
            size = (patch.height, patch.width)
            picture = F.interpolate(picture[None], size, mode="bilinear", align_corners=False, antialias=True)[0]
        picture = round_to_8_bits(picture)

        def fill(images: Tensor, positions: Tensor, draws: Draws, number: int) -> Tensor:
            return apply_patch(picture, images, positions)

        return try_contents(victim, images, target, patch, aim, draws, self.locations, fill)
