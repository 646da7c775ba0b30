"""What training looks at, when: plain warm-up, then masks from coarse to fine; and the learning rate."""

import math
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from patchguard.errors import InputError
from patchguard.geometry.windows import Interval, Windows
from patchguard.training.recipe import Recipe

FINAL_RATE = 1e-3  # of the peak, at the last step of one cycle


@final
@dataclass(frozen=True)
class Stage:
    """A part of training with one loss; `mask_step` of None is the plain warm-up.

    `thin` leaves out every second row and column of cells. `radius` is the share of its way to 0 and to 1 that a pixel
    under the patch goes in interval bounds.
    """

    start: float
    mask_step: int | None
    thin: bool = False
    radius: float = 1.0


def stages(recipe: Recipe) -> list[Stage]:
    """Return the stages in order; each lasts until the next one starts, as a share of all epochs."""
    plain = [Stage(0.0, None)] if recipe.plain_share > 0 else []
    masked = [Stage(max(start, recipe.plain_share), step) for start, step in recipe.mask_steps]
    # Of several stages that the warm-up has swallowed, only the last still happens.
    last = {stage.start: stage for stage in masked if stage.start < 1}
    return _thinned([*plain, *last.values()], recipe.thin_share)


def _thinned(plan: list[Stage], share: float) -> list[Stage]:
    """Let the first `share` of training be thin; the stage in which that ends is cut in two."""
    before = [replace(stage, thin=True) for stage in plan if stage.start < share]
    after = [stage for stage in plan if stage.start >= share]
    if before and share < 1 and not (after and after[0].start == share):
        after = [replace(before[-1], start=share, thin=False), *after]
    return [*before, *after]


def stage_at(recipe: Recipe, progress: float) -> Stage:
    """Return the stage at `progress`, the share of training that is done."""
    stage = [stage for stage in stages(recipe) if stage.start <= progress][-1]
    if recipe.ramp == 0 or progress >= recipe.plain_share + recipe.ramp:
        return stage
    return replace(stage, radius=max(0.0, progress - recipe.plain_share) / recipe.ramp)


def shares(recipe: Recipe) -> list[tuple[Stage, float]]:
    """Return each stage with the share of training that it takes."""
    plan = stages(recipe)
    stops = [*(stage.start for stage in plan[1:]), 1.0]
    return [(stage, stop - stage.start) for stage, stop in zip(plan, stops, strict=True)]


def rate(recipe: Recipe, progress: float) -> float:
    """Return the learning rate at `progress`.

    Both schedules rise linearly from 0 over the first `warm_up`. Then one cycle falls to a thousandth of the peak along
    half a cosine; the step schedule multiplies it by `rate_factor` at each of `rate_steps`.
    """
    if progress < recipe.warm_up:
        return recipe.peak_rate * progress / recipe.warm_up
    if recipe.schedule == "step":
        return recipe.peak_rate * recipe.rate_factor ** sum(progress >= step for step in recipe.rate_steps)
    done = (progress - recipe.warm_up) / (1 - recipe.warm_up)
    share = (1 + math.cos(math.pi * done)) / 2
    return recipe.peak_rate * (FINAL_RATE + (1 - FINAL_RATE) * share)


def coarse(windows: Windows, step: int) -> Windows:
    """Return fewer, larger masks: on each axis the hull of up to `step` neighbouring intervals, evenly divided.

    Each window lies in one of them. With `step` 1 these are the windows.
    """
    if step < 1:
        raise InputError(f"`step` must be a whole number of at least 1; got {step}.")
    if any(windows.wrap) or windows.pairs is not None:
        raise InputError("`windows` must be rows crossed with columns, without wrapping around, to be made coarser.")
    return Windows(
        grid=windows.grid, rows=_hulls(windows.rows, step), columns=_hulls(windows.columns, step), count=windows.count
    )


def thinned(boxes: Int64[Tensor, "masks 4"]) -> Int64[Tensor, "masks 4"]:
    """Return each box on the grid of every second cell, the first included: the cells of it that lie in the box."""
    return -(-boxes // 2)


def _hulls(intervals: tuple[Interval, ...], step: int) -> tuple[Interval, ...]:
    ordered = np.array(sorted(intervals))
    groups = np.array_split(ordered, math.ceil(len(ordered) / step))
    return tuple((int(group[0, 0]), int(group[:, 1].max())) for group in groups)
