"""What training minimizes, when: a plain warmup, then masks from coarse to fine; and the learning rate."""

import math
from dataclasses import dataclass, replace
from typing import final

from patchguard.training.recipe import Recipe, ScheduleSettings

FINAL_LR = 1e-3  # of the maximum, at the last step of one cycle


@final
@dataclass(frozen=True)
class Stage:
    """A part of training with one loss; `mask_step` of None is the plain warmup.

    `subsampled` leaves out every second row and column of cells. `radius` is the fraction of its way to 0 and to 1 that
    a pixel under the patch goes in interval bounds.
    """

    start: float
    mask_step: int | None
    subsampled: bool = False
    radius: float = 1.0


def plan_stages(recipe: Recipe) -> list[Stage]:
    """Return the stages in order; each lasts until the next one starts, as a fraction of all epochs."""
    warmup = recipe.loss.warmup_fraction
    plain = [Stage(0.0, None)] if warmup > 0 else []
    masked = [Stage(max(start, warmup), step) for start, step in recipe.loss.mask_steps]
    # Of several stages that start during the warmup, only the last remains.
    last = {stage.start: stage for stage in masked if stage.start < 1}
    return _subsample([*plain, *last.values()], recipe.loss.subsample_fraction)


def _subsample(stages: list[Stage], fraction: float) -> list[Stage]:
    """Subsample the first `fraction` of training; the stage in which that ends is split in two."""
    before = [replace(stage, subsampled=True) for stage in stages if stage.start < fraction]
    after = [stage for stage in stages if stage.start >= fraction]
    if before and fraction < 1 and not (after and after[0].start == fraction):
        after = [replace(before[-1], start=fraction, subsampled=False), *after]
    return [*before, *after]


def stage_at(recipe: Recipe, progress: float) -> Stage:
    """Return the stage at `progress`, the fraction of training that is done."""
    stage = [stage for stage in plan_stages(recipe) if stage.start <= progress][-1]
    warmup, ramp = recipe.loss.warmup_fraction, recipe.loss.ramp
    if ramp == 0 or progress >= warmup + ramp:
        return stage
    return replace(stage, radius=max(0.0, progress - warmup) / ramp)


def stage_fractions(recipe: Recipe) -> list[tuple[Stage, float]]:
    """Return each stage with the fraction of training that it takes."""
    stages = plan_stages(recipe)
    stops = [*(stage.start for stage in stages[1:]), 1.0]
    return [(stage, stop - stage.start) for stage, stop in zip(stages, stops, strict=True)]


def learning_rate(schedule: ScheduleSettings, progress: float) -> float:
    """Return the learning rate at `progress`, the fraction of training that is done."""
    warmup = schedule.lr_warmup_fraction
    if progress < warmup:
        return schedule.max_lr * progress / warmup
    if schedule.name == "step":
        return schedule.max_lr * schedule.lr_gamma ** sum(progress >= each for each in schedule.lr_milestones)
    fraction = (progress - warmup) / (1 - warmup)
    cosine = (1 + math.cos(math.pi * fraction)) / 2
    return schedule.max_lr * (FINAL_LR + (1 - FINAL_LR) * cosine)
