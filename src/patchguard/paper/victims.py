"""Victims for studies: attacked through their evidence, watched, or pressed on when they are already broken."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from patchguard.attacks.base import AttackResult, DifferentiableVictim, Draws, Images, find_device
from patchguard.attacks.gradient_ascent import Attempt, StepSchedule, ascend, gradient_batch_size
from patchguard.attacks.objectives import Goal, cross_entropy, soft_evidence
from patchguard.attacks.positions import random_positions
from patchguard.guard import Prediction
from patchguard.guards.local import LocalGuard
from patchguard.models.base import LocalModel
from patchguard.patch import Patch

Maps = Float[Tensor, "batch classes rows columns"]
Tick = Callable[[int], None]

PRESSING = 3  # the purpose of these draws: positions for images that were wrong as they are


@final
@dataclass(frozen=True, eq=False)
class Through:
    """A guard whose attacker follows the evidence, with its clipping, and not only the logits before it.

    Values are those of the evidence; where it is clipped a part of the gradient passes all the same.
    """

    guard: LocalGuard[Any]

    @property
    def model(self) -> LocalModel:
        """The network."""
        return self.guard.model

    def predict(self, images: Images) -> Prediction:
        """Return the guard's own answer."""
        return self.guard.predict(images)

    def differentiable_logits(self, images: Images) -> Maps:
        """Return the evidence, which takes the place of the local logits."""
        return soft_evidence(self.guard.evidence, self.guard.differentiable_logits(images))


@final
@dataclass(frozen=True, eq=False)
class Watched:
    """The same victim; `tick` is told how many images each gradient pass has."""

    victim: Any
    tick: Tick

    @property
    def model(self) -> LocalModel | None:
        """The network of the victim, where it has one."""
        model: LocalModel | None = getattr(self.victim, "model", None)
        return model

    def predict(self, images: Images) -> Prediction:
        """Return the victim's answer."""
        answer: Prediction = self.victim.predict(images)
        return answer

    def differentiable_logits(self, images: Images) -> Maps:
        """Return the victim's local logits."""
        self.tick(len(images))
        local_logits: Tensor = self.victim.differentiable_logits(images)
        return local_logits


@final
@dataclass(frozen=True, eq=False)
class _Tireless:
    """A victim that meets everything with an alert, so that nothing ever counts as broken and no image leaves."""

    victim: DifferentiableVictim

    def predict(self, images: Images) -> Prediction:
        """Return an alert, without a look at the images."""
        nothing = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        return Prediction(label=nothing, scores=nothing.double().unsqueeze(1), alert=nothing == 0)

    def differentiable_logits(self, images: Images) -> Maps:
        """Return the victim's local logits."""
        return self.victim.differentiable_logits(images)


def press(
    victim: DifferentiableVictim,
    images: Images,
    target: Int64[Tensor, " batch"],
    patch: Patch,
    attacked: AttackResult,
    schedule: StepSchedule,
    *,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
) -> Images:
    """Go on with an attack, at the positions it found, for all steps of `schedule`; return what has the higher loss.

    An attack of this library leaves an image as soon as it is broken. That of the paper's case study climbs the
    cross-entropy to the end and keeps the best, which is what local predictions and logits are looked at for. Images
    that were wrong without an attack get a patch at a random place here.
    """
    home, device = images.device, find_device(victim, images)
    original, target = images.to(device), target.to(device)
    start, positions = attacked.images.to(device), attacked.positions.to(device)
    untouched: Bool[Tensor, " batch"] = (start == original).flatten(1).all(1)
    draws = Draws(seed, tuple(range(len(images)) if numbers is None else numbers), device)
    elsewhere = random_positions(draws, patch, images.shape[-2], images.shape[-1], PRESSING)
    positions = torch.where(untouched.view(-1, 1, 1), elsewhere, positions)
    size = gradient_batch_size(victim, original, schedule.half)
    attempt = Attempt(
        positions=positions,
        start=start,
        goal=Goal(target=target),
        objective=lambda local_logits, goal, rows, step: cross_entropy(local_logits, goal),
    )
    found, *_ = ascend(_Tireless(victim), original, patch, None, attempt, schedule, size, check_last=False)
    worse = _losses(victim, found, target, size) > _losses(victim, start, target, size)
    return torch.where(worse.view(-1, 1, 1, 1), found, start).to(home)


@torch.no_grad()
def _losses(victim: DifferentiableVictim, images: Images, target: Tensor, size: int) -> Float[Tensor, " batch"]:
    found = []
    for part, classes in zip(torch.split(images, size), torch.split(target, size), strict=True):
        logits = victim.differentiable_logits(part).float().mean((2, 3))
        found.append(functional.cross_entropy(logits, classes, reduction="none"))
    return torch.cat(found)
