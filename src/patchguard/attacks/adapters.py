"""Attacks of others, as an `Attack`: any function of images and classes, and the adversarial-robustness-toolbox."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from patchguard.attacks.base import Attack, Draws, Found, check_count, covered, eight_bits, is_broken
from patchguard.attacks.placement import random_places
from patchguard.attacks.victim import Images, Victim
from patchguard.errors import InputError
from patchguard.patch import Patch


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Called(Attack):
    """Use `function(images, targets) -> images` as an attack; a targeted run calls it with the aims instead.

    The function places its patch itself. Where the pixels it changed do not fit into `patch.count` rectangles of the
    patch's size, the result is refused: this is another threat than the one that was asked about.
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
    ) -> Found:
        """Call the function and see what it changed."""
        found = self.function(images.clone(), target if aim is None else aim)
        return admitted(images, found, patch)


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Toolbox(Attack):
    """Use an attack of the adversarial-robustness-toolbox that takes a mask, such as its projected gradient descent.

        classifier = toolbox_classifier(guard, size=(32, 32), classes=10)
        Toolbox(attack=ProjectedGradientDescent(classifier, eps=1.0, eps_step=0.05))

    It is called as ``attack.generate(x, y, mask=...)`` with a mask of the shape of x that is 1 inside the patch, at
    `locations` random places. Make the toolbox's attack with a large `eps`: inside a patch every change is allowed. One
    that says whether it is `targeted` must be so exactly where there is an aim: else it climbs away from it.
    """

    attack: Any
    locations: int = 1

    def __post_init__(self) -> None:
        check_count("locations", self.locations)
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
    ) -> Found:
        """Generate at each place what is not yet broken."""
        if getattr(self.attack, "targeted", aim is not None) != (aim is not None):
            wanted = (
                "one made with targeted=False" if aim is None else "one made with targeted=True, since there is an aim"
            )
            raise InputError(f"`attack` must be {wanted}; got {type(self.attack).__name__}.")
        height, width = images.shape[-2:]
        best, where = images.clone(), torch.zeros(len(images), patch.count, 2, dtype=torch.int64, device=images.device)
        left = torch.arange(len(images), device=images.device)
        for number in range(self.locations):
            places = random_places(draws[left], patch, height, width, number)
            inside = covered(places, patch, height, width)
            mask = inside.expand_as(images[left])
            towards = (target if aim is None else aim)[left]
            made = self.attack.generate(
                images[left].cpu().numpy(), towards.cpu().numpy(), mask=mask.cpu().numpy().astype(np.float32)
            )
            found = torch.as_tensor(np.asarray(made)).to(images)
            _check_answer(images[left], found)
            _refuse((found != images[left]).any(1) & ~inside.squeeze(1), patch)
            shown = torch.where(inside, eight_bits(found), images[left])
            best[left], where[left] = shown, places
            broken = is_broken(victim.predict(shown), target[left], None if aim is None else aim[left])
            left = left[~broken]
            if len(left) == 0:
                break
        return best, where


def toolbox_classifier(victim: Victim, *, size: tuple[int, int], classes: int) -> Any:
    """Return the undefended network of a victim as a PyTorchClassifier of the adversarial-robustness-toolbox."""
    try:
        from art.estimators.classification import PyTorchClassifier
    except ImportError:
        raise InputError(
            "the adversarial-robustness-toolbox is not installed. Install it with `pip install "
            "adversarial-robustness-toolbox`, or give any function as `Called(function=...)`."
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


def admitted(images: Images, found: Tensor, patch: Patch) -> Found:
    """Return the images and the rectangles that hold all changes; raise where no such rectangles exist."""
    found = found.detach().to(images) if isinstance(found, Tensor) else found
    _check_answer(images, found)
    changed = (found != images).any(1)
    places = []
    for number, each in enumerate(changed):
        corners = rectangles(each, patch)
        if corners is None:
            best = _cover_most(each, patch)
            outside = each & ~covered(best.unsqueeze(0), patch, *each.shape)[0, 0]
            _refuse(outside.unsqueeze(0), patch, number)
        places.append(corners if corners is not None else torch.zeros(patch.count, 2, dtype=torch.int64))
    return found, torch.stack(places).to(images.device)


def rectangles(changed: Bool[Tensor, "height width"], patch: Patch) -> Int64[Tensor, "count 2"] | None:
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

    found = cover(pixels, patch.count)
    return None if found is None else torch.tensor(found, dtype=torch.int64)


def _cover_most(changed: Bool[Tensor, "height width"], patch: Patch) -> Int64[Tensor, "count 2"]:
    """Rectangles that, one after the other, hold most of the changes: to say how far off a result is."""
    rest, corners = changed.float().cpu(), []
    for _ in range(patch.count):
        held = torch.nn.functional.avg_pool2d(rest[None, None], (patch.height, patch.width), stride=1)[0, 0]
        place = int(held.argmax())
        top, left = place // held.shape[1], place % held.shape[1]
        rest[top : top + patch.height, left : left + patch.width] = 0
        corners.append((top, left))
    return torch.tensor(corners, dtype=torch.int64, device=changed.device)


def _check_answer(images: Images, found: object) -> None:
    if not isinstance(found, Tensor) or found.shape != images.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"an attack must return images of the shape it was given, {tuple(images.shape)}; got {shape}.")
    if not bool(((found >= 0) & (found <= 1)).all()):
        raise InputError("an attack must return pixels in [0, 1]; some left it or are NaN.")


def _refuse(outside: Bool[Tensor, "batch height width"], patch: Patch, first: int = 0) -> None:
    """Raise for the first image with changes outside the patch."""
    counts = outside.flatten(1).sum(1)
    if bool(counts.any()):
        number = int(counts.nonzero()[0])
        what = f"{patch.count} rectangles" if patch.count > 1 else "one rectangle"
        raise InputError(
            f"an attack must change only {what} of {patch.height} x {patch.width} pixels; in image {first + number} of "
            f"the batch it changed {int(counts[number])} pixels outside. Give the patch it is made for, or restrict it."
        )
