"""Victims for the studies: attacked through their evidence, with progress, or beyond their first wrong answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int64
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

LocalLogits = Float[Tensor, "batch classes rows columns"]

EXTENDED = 3  # the purpose of these draws: positions for images that were wrong before the attack


@final
@dataclass(frozen=True, eq=False)
class StudyVictim:
    """A victim put together from its network and its two verbs."""

    model: LocalModel | None
    predict: Callable[[Images], Prediction]
    differentiable_logits: Callable[[Images], LocalLogits]


def through_evidence(guard: LocalGuard[Any]) -> StudyVictim:
    """Return a guard whose attacker follows the evidence, with its clipping, and not only the logits before it.

    Values are those of the evidence; where it is clipped a part of the gradient passes all the same.
    """

    def differentiable_evidence(images: Images) -> LocalLogits:
        return soft_evidence(guard.evidence, guard.differentiable_logits(images))

    return StudyVictim(guard.model, guard.predict, differentiable_evidence)


def with_progress(victim: Any, tick: Callable[[int], None]) -> StudyVictim:
    """Return the same victim; `tick` is told how many images each gradient pass has."""

    def differentiable_logits(images: Images) -> LocalLogits:
        tick(len(images))
        local_logits: Tensor = victim.differentiable_logits(images)
        return local_logits

    return StudyVictim(getattr(victim, "model", None), victim.predict, differentiable_logits)


def _always_alert(images: Images) -> Prediction:
    """Answer every image with an alert, so that nothing ever counts as broken and no image leaves the attack."""
    zeros = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    return Prediction(label=zeros, scores=zeros.double().unsqueeze(1), alert=zeros == 0)


def extend_attack(
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
    """Continue an attack, at the positions it found, for all steps of `schedule`; return what has the higher loss.

    An attack of this library stops at an image as soon as it is broken. That of the paper's case study climbs the
    cross-entropy to the end and keeps the best, which is what local predictions and logits are looked at for. Images
    that were wrong without an attack get a patch at a random place here.
    """
    home, device = images.device, find_device(victim, images)
    original, target = images.to(device), target.to(device)
    start, positions = attacked.images.to(device), attacked.positions.to(device)
    untouched = (start == original).flatten(1).all(1)
    draws = Draws(seed, tuple(range(len(images)) if numbers is None else numbers), device)
    elsewhere = random_positions(draws, patch, images.shape[-2], images.shape[-1], EXTENDED)
    size = gradient_batch_size(victim, original, schedule.half)
    attempt = Attempt(
        positions=torch.where(untouched.view(-1, 1, 1), elsewhere, positions),
        start=start,
        goal=Goal(target=target),
        objective=lambda local_logits, goal, rows, step: cross_entropy(local_logits, goal),
    )
    never_broken = StudyVictim(None, _always_alert, victim.differentiable_logits)
    extended, *_ = ascend(never_broken, original, patch, None, attempt, schedule, size, check_last=False)

    @torch.no_grad()
    def losses(some: Images) -> Float[Tensor, " batch"]:
        logits = [victim.differentiable_logits(part).float().mean((2, 3)) for part in torch.split(some, size)]
        return functional.cross_entropy(torch.cat(logits), target, reduction="none")

    worse = losses(extended) > losses(start)
    return torch.where(worse.view(-1, 1, 1, 1), extended, start).to(home)
