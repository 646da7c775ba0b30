"""Attacks from elsewhere: any function of images and classes, and attacks of the adversarial-robustness-toolbox."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from patchguard.attacks.base import (
    Attack,
    DifferentiableVictim,
    Draws,
    Images,
    PatchedImages,
    Victim,
    is_broken,
    patch_mask,
    require_integer,
    round_to_8_bits,
)
from patchguard.attacks.positions import random_positions
from patchguard.errors import InputError
from patchguard.patch import Patch


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class FunctionAttack(Attack):
    """Use `function(images, targets) -> images` as an attack; a targeted run calls it with the aims instead.

    The function places its patch itself. Where the pixels it changed do not fit into `patch.count` rectangles of the
    patch's size, the result is refused: it belongs to another threat.
    """

    function: Callable[[Tensor, Tensor], Tensor]

    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> PatchedImages:
        """Call the function and find the rectangles that it changed."""
        return locate_changes(images, self.function(images.clone(), target if aim is None else aim), patch)


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class ToolboxAttack(Attack):
    """Use an attack of the adversarial-robustness-toolbox that takes a mask, such as its projected gradient descent.

        classifier = as_toolbox_classifier(guard, size=(32, 32), classes=10)
        ToolboxAttack(attack=ProjectedGradientDescent(classifier, eps=1.0, eps_step=0.05))

    It is called as ``attack.generate(x, y, mask=...)`` with a mask of the shape of x that is 1 inside the patch, at
    `locations` random positions. Give the toolbox's attack a large `eps`: inside a patch every change is allowed. If it
    has an attribute `targeted`, that must be true exactly when there is an aim.
    """

    attack: Any
    locations: int = 1

    def __post_init__(self) -> None:
        require_integer("locations", self.locations)
        if not callable(getattr(self.attack, "generate", None)):
            raise InputError(f"`attack` must have a method `generate`; got {type(self.attack).__name__}.")

    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> PatchedImages:
        """Generate a patch at each position, for the images that are not broken yet."""
        if getattr(self.attack, "targeted", aim is not None) != (aim is not None):
            raise InputError(
                f"`attack` must have targeted={aim is not None}, since there is {'no' if aim is None else 'an'} aim; "
                f"got {type(self.attack).__name__} with targeted={aim is None}."
            )
        height, width = images.shape[-2:]
        best, where = images.clone(), torch.zeros(len(images), patch.count, 2, dtype=torch.int64, device=images.device)
        rows = torch.arange(len(images), device=images.device)  # of the images that are not broken yet
        for number in range(self.locations):
            positions = random_positions(draws[rows], patch, height, width, number)
            inside = patch_mask(positions, patch, height, width)
            mask = inside.expand_as(images[rows])
            labels = (target if aim is None else aim)[rows]
            generated = self.attack.generate(
                images[rows].cpu().numpy(), labels.cpu().numpy(), mask=mask.cpu().numpy().astype(np.float32)
            )
            changed = torch.as_tensor(np.asarray(generated)).to(images)
            _validate_images(images[rows], changed)
            _refuse_changes((changed != images[rows]).any(1) & ~inside.squeeze(1), patch)
            patched = torch.where(inside, round_to_8_bits(changed), images[rows])
            best[rows], where[rows] = patched, positions
            broken = is_broken(victim.predict(patched), target[rows], None if aim is None else aim[rows])
            rows = rows[~broken]
            if len(rows) == 0:
                break
        return best, where


def as_toolbox_classifier(victim: DifferentiableVictim, *, size: tuple[int, int], classes: int) -> Any:
    """Return the undefended network of a victim as a PyTorchClassifier of the adversarial-robustness-toolbox."""
    try:
        from art.estimators.classification import PyTorchClassifier
    except ImportError:
        raise InputError(
            "the adversarial-robustness-toolbox is not installed. Install it with `pip install "
            "adversarial-robustness-toolbox`, or give any function as `FunctionAttack(function=...)`."
        ) from None

    class Plain(torch.nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return victim.differentiable_logits(images).mean((2, 3))

    return PyTorchClassifier(
        model=Plain(),
        loss=torch.nn.CrossEntropyLoss(),
        input_shape=(3, *size),
        nb_classes=classes,
        clip_values=(0.0, 1.0),
    )


def locate_changes(images: Images, changed: Tensor, patch: Patch) -> PatchedImages:
    """Return the changed images and rectangles that hold all changes; raise where no such rectangles exist."""
    changed = changed.detach().to(images) if isinstance(changed, Tensor) else changed
    _validate_images(images, changed)
    differs = (changed != images).any(1)
    positions = []
    for number, pixels in enumerate(differs):
        corners = cover_with_rectangles(pixels, patch)
        if corners is None:
            best = _cover_most(pixels, patch)
            outside = pixels & ~patch_mask(best.unsqueeze(0), patch, *pixels.shape)[0, 0]
            _refuse_changes(outside.unsqueeze(0), patch, number)
        positions.append(corners if corners is not None else torch.zeros(patch.count, 2, dtype=torch.int64))
    return changed, torch.stack(positions).to(images.device)


def cover_with_rectangles(changed: Bool[Tensor, "height width"], patch: Patch) -> Int64[Tensor, "count 2"] | None:
    """Return corners of `patch.count` rectangles that cover all changed pixels, or None if there are none.

    Some rectangle holds a pixel of the topmost changed row; moved down until it starts there, and right until it
    starts at a changed column, it still holds all it held. So few corners need to be tried, and the answer is exact.
    """
    pixels = changed.nonzero().tolist()
    height, width = changed.shape

    def cover(rest: list[list[int]], count: int) -> list[tuple[int, int]] | None:
        if not rest:
            return [(0, 0)] * count
        if count == 0:
            return None
        top = min(row for row, _ in rest)
        column = min(column for row, column in rest if row == top)
        lefts = {each for row, each in rest if column - patch.width < each <= column and row < top + patch.height}
        for left in sorted(lefts, reverse=True):
            others = [
                pixel
                for pixel in rest
                if not (top <= pixel[0] < top + patch.height and left <= pixel[1] < left + patch.width)
            ]
            more = cover(others, count - 1)
            if more is not None:
                return [(min(top, height - patch.height), min(left, width - patch.width)), *more]
        return None

    corners = cover(pixels, patch.count)
    return None if corners is None else torch.tensor(corners, dtype=torch.int64)


def _cover_most(changed: Bool[Tensor, "height width"], patch: Patch) -> Int64[Tensor, "count 2"]:
    """Return rectangles that, one after the other, hold most of the changes: for the error message."""
    rest, corners = changed.float().cpu(), []
    for _ in range(patch.count):
        inside = torch.nn.functional.avg_pool2d(rest[None, None], (patch.height, patch.width), stride=1)[0, 0]
        top, left = divmod(int(inside.argmax()), inside.shape[1])
        rest[top : top + patch.height, left : left + patch.width] = 0
        corners.append((top, left))
    return torch.tensor(corners, dtype=torch.int64, device=changed.device)


def _validate_images(images: Images, changed: object) -> None:
    if not isinstance(changed, Tensor) or changed.shape != images.shape:
        shape = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
        raise InputError(f"an attack must return images of the shape it was given, {tuple(images.shape)}; got {shape}.")
    if not bool(((changed >= 0) & (changed <= 1)).all()):
        raise InputError("an attack must return pixels in [0, 1]; some lie outside or are NaN. Clamp them.")


def _refuse_changes(outside: Bool[Tensor, "batch height width"], patch: Patch, first: int = 0) -> None:
    """Raise for the first image with changes outside the patch."""
    counts = outside.flatten(1).sum(1)
    if bool(counts.any()):
        number = int(counts.nonzero()[0])
        what = f"{patch.count} rectangles" if patch.count > 1 else "one rectangle"
        raise InputError(
            f"an attack must change only {what} of {patch.height} x {patch.width} pixels; in image {first + number} of "
            f"the batch it changed {int(counts[number])} pixels outside. Give the patch it is made for, or restrict it."
        )
