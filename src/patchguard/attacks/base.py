"""`Attack`: changes the pixels of a patch so that a guard errs. The base class checks; a subclass writes `run`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeGuard, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchguard.data.images import validate_images
from patchguard.errors import InputError, nearest
from patchguard.guard import Prediction
from patchguard.patch import Patch
from patchguard.runtime import device_and_dtype, make_generator

Images: TypeAlias = Float[Tensor, "batch 3 height width"]
Positions: TypeAlias = Int64[Tensor, "batch count 2"]
"""The top left corner (row, column) of every rectangle."""
PatchedImages: TypeAlias = tuple[Tensor, Tensor]
"""Attacked images, and the positions of their rectangles."""


# -- victims -----------------------------------------------------------------------------------------------------------


@runtime_checkable
class Victim(Protocol):
    """What an attack is run against: every `Guard` is a victim, and so is anything else that predicts."""

    def predict(self, images: Images) -> Prediction:
        """Return the label of each image."""
        ...


@runtime_checkable
class DifferentiableVictim(Victim, Protocol):
    """A victim that lets gradients through to the pixels; all others are attacked as black boxes.

    Attacks that follow a defense also look for the attributes `evidence` and `defense` of a `LocalGuard`; without them
    they attack the mean of the local logits.
    """

    def differentiable_logits(self, images: Images) -> Float[Tensor, "batch classes rows columns"]:
        """Return the local logits, with gradients to `images`."""
        ...


def offers_gradients(victim: Victim) -> TypeGuard[DifferentiableVictim]:
    """Whether gradients flow from the victim's answers to pixels; around a black box, a guard says that none do."""
    return isinstance(victim, DifferentiableVictim) and getattr(victim, "differentiable", True)


def find_device(victim: Victim, images: Tensor) -> torch.device:
    """Return where the victim computes: the device of its `model` if it has one, else that of the images."""
    model = getattr(victim, "model", None)
    return images.device if model is None else device_and_dtype(model)[0]


def gradient_precision(device: torch.device, half: bool) -> AbstractContextManager[object]:
    """Return the context of a gradient pass: bfloat16 on a GPU if `half`. Labels never come from such a pass."""
    return torch.autocast("cuda", torch.bfloat16) if half and device.type == "cuda" else nullcontext()


# -- attacks -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class AttackResult:
    """The attacked images of a batch.

    `images` differ from the originals only inside the rectangles at `positions`, and hold whole 8-bit values there, so
    that a PNG reproduces them. `label` is the victim's answer to them, and `broken` says that it is wrong (targeted:
    that it is the aim) and that no alert was raised.
    """

    images: Images
    label: Int64[Tensor, " batch"]
    broken: Bool[Tensor, " batch"]
    positions: Positions


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

    def __getitem__(self, rows: Tensor) -> "Draws":
        """Return the draws of some images."""
        return Draws(self.seed, tuple(self.numbers[row] for row in rows.tolist()), self.device)


class Attack(ABC):
    """A way to choose the contents and the position of a patch; its settings are the fields of a frozen dataclass.

        result = PatchPGD(steps=20)(guard, images, target, Patch(5))
        result.broken.float().mean()

    The budget is exact: an image that differs from the original in one pixel outside the rectangles that `run` names
    is an error. A failed attack proves nothing; `Guard.certify` does.
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
    ) -> AttackResult:
        """Attack each image whose label is still `target`; with `aim`, until the victim answers that class.

        `numbers` identifies the images (their index in a data set; default 0, 1, ...). All randomness of an image is a
        function of `seed` and its number, so the batch it comes in does not matter. Images that the victim gets wrong
        without an attack count as broken and stay as they are; images whose `target` is the aim are left alone.
        """
        if not isinstance(patch, Patch):
            raise InputError(f"`patch` must be a Patch, such as Patch(5); got {patch!r}.")
        if not callable(getattr(victim, "predict", None)):
            raise InputError(f"`victim` must have a method `predict`, as a Guard has; got {type(victim).__name__}.")
        validate_images(images)
        patch.check_fits(*images.shape[-2:])
        home, device = images.device, find_device(victim, images)
        original = images.detach().to(device)
        answer = victim.predict(original)
        goal = _validate_classes("target", target, len(original), answer).to(device)
        aims = None if aim is None else _validate_classes("aim", aim, len(original), answer).to(device)
        draws = Draws(seed, _validate_numbers(numbers, len(original)), device)

        result = original.clone()
        positions = torch.zeros(len(original), patch.count, 2, dtype=torch.int64, device=device)
        label, broken = answer.label.to(device).clone(), is_broken(answer, goal, aims)
        exempt = torch.zeros_like(broken) if aims is None else aims == goal
        broken &= ~exempt
        rows = (~broken & ~exempt).nonzero().squeeze(1)
        if len(rows):
            row_aims = None if aims is None else aims[rows]
            patched, where = self.run(victim, original[rows], goal[rows], patch, row_aims, draws[rows])
            patched = _enforce_budget(self, original[rows], patched, where, patch)
            reply = victim.predict(patched)
            result[rows], positions[rows] = patched, where
            label[rows], broken[rows] = reply.label.to(device), is_broken(reply, goal[rows], row_aims)
        return AttackResult(
            images=result.to(home), label=label.to(home), broken=broken.to(home), positions=positions.to(home)
        )

    @abstractmethod
    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> PatchedImages:
        """Return attacked images and the top left corners (batch, count, 2) of the rectangles that were changed.

        Everything lies on the victim's device, and no image is broken yet.
        """


def is_broken(answer: Prediction, target: Tensor, aim: Tensor | None) -> Bool[Tensor, " batch"]:
    """Return whether the answer is wrong, or the aim where there is one, and was given without an alert."""
    label = answer.label.to(target.device)
    wrong = label != target if aim is None else label == aim
    return wrong if answer.alert is None else wrong & ~answer.alert.to(target.device)


def patch_mask(positions: Positions, patch: Patch, height: int, width: int) -> Bool[Tensor, "batch 1 height width"]:
    """Return which pixels the rectangles at `positions` cover together."""
    row = torch.arange(height, device=positions.device)
    column = torch.arange(width, device=positions.device)
    top, left = positions[..., 0, None], positions[..., 1, None]
    rows = (row >= top) & (row < top + patch.height)  # batch, count, height
    columns = (column >= left) & (column < left + patch.width)
    return (rows[..., :, None] & columns[..., None, :]).any(1, keepdim=True)


def round_to_8_bits(pixels: Tensor) -> Tensor:
    """Return the nearest pixels that a file of 8 bits per channel can hold."""
    return pixels.clamp(0, 1).mul(255).round().div(255)


def require_integer(name: str, value: object, least: int = 1) -> None:
    """Raise unless a setting is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"`{name}` must be a whole number of at least {least}; got {value!r}.")


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise unless a setting is one of the choices."""
    if value not in choices:
        hint = nearest(value, list(choices))
        raise InputError(f"`{name}` must be one of {', '.join(choices)}; got {value!r}. {hint}")


def _enforce_budget(attack: Attack, original: Images, patched: Tensor, positions: Tensor, patch: Patch) -> Images:
    """Return the attacked images, rounded inside the patch; raise where the attack exceeded its budget."""
    name = type(attack).__name__
    height, width = original.shape[-2:]
    if patched.shape != original.shape or positions.shape != (len(original), patch.count, 2):
        raise RuntimeError(
            f"{name}.run must return images {tuple(original.shape)} and positions {(len(original), patch.count, 2)}; "
            f"got {tuple(patched.shape)} and {tuple(positions.shape)}."
        )
    limit = torch.tensor([height - patch.height, width - patch.width], device=positions.device)
    if not bool(((positions >= 0) & (positions <= limit)).all()):
        raise RuntimeError(f"{name}.run must place every rectangle inside the image; some lie outside.")
    patched = patched.detach().to(original)
    inside = patch_mask(positions, patch, height, width)
    outside = int(((patched != original).any(1, keepdim=True) & ~inside).sum())  # NaN differs from everything
    if outside:
        raise RuntimeError(f"{name}.run must change no pixel outside the patch; it changed {outside}.")
    if not bool(((patched >= 0) & (patched <= 1)).all()):
        raise RuntimeError(f"{name}.run must keep pixels in [0, 1]; some lie outside or are NaN.")
    return torch.where(inside, round_to_8_bits(patched), original)


def _validate_classes(name: str, value: Tensor | int, count: int, answer: Prediction) -> Tensor:
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


def _validate_numbers(numbers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    valid = tuple(range(count)) if numbers is None else tuple(int(number) for number in numbers)
    if len(valid) != count or min(valid) < 0:
        raise InputError(f"`numbers` must be one whole number of at least 0 per image; got {len(valid)} for {count}.")
    return valid
