"""`Attack`: changes the pixels of a patch so that a victim errs. The base class checks; a subclass writes `run`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchguard.attacks.victim import Images, Victim, device_of
from patchguard.data.images import validate_images
from patchguard.errors import InputError, nearest
from patchguard.guard import Prediction
from patchguard.patch import Patch
from patchguard.runtime import make_generator

Places: TypeAlias = Int64[Tensor, "batch count 2"]
Found: TypeAlias = tuple[Tensor, Tensor]
"""Attacked images, and the places of their rectangles."""


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Attacked:
    """What an attack made of a batch.

    `images` differ from the originals only inside the rectangles whose top left corners (row, column) are `places`,
    and hold whole 8-bit values there, so that a PNG reproduces them. `label` is the victim's answer to them, and
    `broken` says that it is wrong (targeted: that it is the aim) and that no alert was raised.
    """

    images: Images
    label: Int64[Tensor, " batch"]
    broken: Bool[Tensor, " batch"]
    places: Places


@final
@dataclass(frozen=True)
class Draws:
    """Random numbers for each image of a batch: a function of the seed, the image's number and the purpose alone."""

    seed: int
    numbers: tuple[int, ...]
    device: torch.device

    def uniform(self, purpose: tuple[int, ...], *shape: int) -> Float[Tensor, "batch ..."]:
        """Return numbers from [0, 1), one tensor of `shape` per image."""
        drawn = [torch.rand(shape, generator=make_generator(self.seed, number, *purpose)) for number in self.numbers]
        return torch.stack(drawn).to(self.device)

    def whole(self, purpose: tuple[int, ...], below: int, *shape: int) -> Int64[Tensor, "batch ..."]:
        """Return whole numbers from 0 to below - 1, one tensor of `shape` per image."""
        return (self.uniform(purpose, *shape).double() * below).long().clamp(max=below - 1)

    def __getitem__(self, rows: Tensor) -> "Draws":
        """Return the draws of some images."""
        return Draws(self.seed, tuple(self.numbers[row] for row in rows.tolist()), self.device)


class Attack(ABC):
    """A way to choose the contents and the place of a patch; the settings are the fields of a frozen dataclass.

        attacked = PatchPGD(steps=20)(guard, images, target, Patch(5))
        attacked.broken.float().mean()

    The budget is exact: whatever `run` returns, an image that differs from the original in one pixel outside the
    rectangles it names is refused. A failed attack proves nothing; `Guard.certify` does.
    """

    def __call__(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        *,
        aim: Int64[Tensor, " batch"] | int | None = None,
        seed: int = 0,
        numbers: Sequence[int] | None = None,
    ) -> Attacked:
        """Attack each image whose label is still `target`; with `aim`, until the victim answers that class.

        `numbers` names the images (their places in a data set; default 0, 1, ...): all randomness of an image is a
        function of `seed` and its number, so the batch it comes in does not matter. Images that the victim gets wrong
        as they are count as broken and stay as they are; those whose `target` is the aim are left alone.
        """
        if not isinstance(patch, Patch):
            raise InputError(f"`patch` must be a Patch, such as Patch(5); got {patch!r}.")
        if not callable(getattr(victim, "predict", None)):
            raise InputError(f"`victim` must have a method `predict`, as a Guard has; got {type(victim).__name__}.")
        validate_images(images)
        patch.check_fits(*images.shape[-2:])
        home, device = images.device, device_of(victim, images)
        original = images.detach().to(device)
        answer = victim.predict(original)
        goal = _classes("target", target, len(original), answer).to(device)
        aims = None if aim is None else _classes("aim", aim, len(original), answer).to(device)
        draws = Draws(seed, _numbers(numbers, len(original)), device)

        result = original.clone()
        places = torch.zeros(len(original), patch.count, 2, dtype=torch.int64, device=device)
        label, broken = answer.label.to(device).clone(), is_broken(answer, goal, aims)
        alone = torch.zeros_like(broken) if aims is None else aims == goal
        broken &= ~alone
        rows = (~broken & ~alone).nonzero().squeeze(1)
        if len(rows):
            some = None if aims is None else aims[rows]
            found, where = self.run(victim, original[rows], goal[rows], patch, some, draws[rows])
            found = _checked(self, original[rows], found, where, patch)
            reply = victim.predict(found)
            result[rows], places[rows] = found, where
            label[rows], broken[rows] = reply.label.to(device), is_broken(reply, goal[rows], some)
        return Attacked(images=result.to(home), label=label.to(home), broken=broken.to(home), places=places.to(home))

    @abstractmethod
    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> Found:
        """Return attacked images and the top left corners (batch, count, 2) of the rectangles that were changed.

        Everything lies on the victim's device, and all images are still to be broken.
        """


def is_broken(answer: Prediction, target: Tensor, aim: Tensor | None) -> Bool[Tensor, " batch"]:
    """Return whether the answer is wrong, or the aim where there is one, and was given without an alert."""
    label = answer.label.to(target.device)
    wrong = label != target if aim is None else label == aim
    return wrong if answer.alert is None else wrong & ~answer.alert.to(target.device)


def covered(places: Places, patch: Patch, height: int, width: int) -> Bool[Tensor, "batch 1 height width"]:
    """Return which pixels the rectangles at `places` cover together."""
    row = torch.arange(height, device=places.device)
    column = torch.arange(width, device=places.device)
    top, left = places[..., 0, None], places[..., 1, None]
    rows = (row >= top) & (row < top + patch.height)  # batch, count, height
    columns = (column >= left) & (column < left + patch.width)
    return (rows[..., :, None] & columns[..., None, :]).any(1, keepdim=True)


def eight_bits(pixels: Tensor) -> Tensor:
    """Return the nearest pixels that a file of 8 bits per channel can hold."""
    return pixels.clamp(0, 1).mul(255).round().div(255)


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise unless a setting is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"`{name}` must be a whole number of at least {least}; got {value!r}.")


def check_word(name: str, value: str, known: Sequence[str]) -> None:
    """Raise unless a setting is one of the known words."""
    if value not in known:
        raise InputError(f"`{name}` must be one of {', '.join(known)}; got {value!r}. {nearest(value, list(known))}")


def _checked(attack: Attack, original: Images, found: Tensor, places: Tensor, patch: Patch) -> Images:
    """Return what was found, rounded inside the patch; raise where the attack broke its budget."""
    name = type(attack).__name__
    height, width = original.shape[-2:]
    if found.shape != original.shape or places.shape != (len(original), patch.count, 2):
        raise RuntimeError(
            f"{name}.run must return images {tuple(original.shape)} and places {(len(original), patch.count, 2)}; got "
            f"{tuple(found.shape)} and {tuple(places.shape)}."
        )
    limit = torch.tensor([height - patch.height, width - patch.width], device=places.device)
    if not bool(((places >= 0) & (places <= limit)).all()):
        raise RuntimeError(f"{name}.run must place every rectangle inside the image; some lie outside.")
    found = found.detach().to(original)
    inside = covered(places, patch, height, width)
    outside = int(((found != original).any(1, keepdim=True) & ~inside).sum())  # NaN differs from everything
    if outside:
        raise RuntimeError(f"{name}.run must change no pixel outside the patch; it changed {outside}.")
    if not bool(((found >= 0) & (found <= 1)).all()):
        raise RuntimeError(f"{name}.run must keep pixels in [0, 1]; some left it or are NaN.")
    return torch.where(inside, eight_bits(found), original)


def _classes(name: str, value: Tensor | int, count: int, answer: Prediction) -> Tensor:
    if isinstance(value, int) and not isinstance(value, bool):
        value = torch.full((count,), value)
    whole = isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool
    if not isinstance(value, Tensor) or not whole or value.shape != (count,):
        raise InputError(f"`{name}` must be one class number per image, {count} in all.")
    classes = answer.scores.shape[1]
    low, high = int(value.min()), int(value.max())
    if low < 0 or high >= classes:
        raise InputError(f"`{name}` must lie between 0 and {classes - 1}; got {low} to {high}.")
    return value.long()


def _numbers(numbers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    named = tuple(range(count)) if numbers is None else tuple(int(number) for number in numbers)
    if len(named) != count or min(named) < 0:
        raise InputError(f"`numbers` must be one whole number of at least 0 per image; got {len(named)} for {count}.")
    return named
