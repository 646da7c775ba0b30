"""The one loop of all gradient attacks: sign-gradient steps on the pixels of a patch. Broken images leave the batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchguard.attacks.base import (
    DifferentiableVictim,
    Draws,
    Images,
    PatchedImages,
    Positions,
    gradient_precision,
    is_broken,
    patch_mask,
    round_to_8_bits,
)
from patchguard.attacks.cropped_forward import Logits, crop_forward
from patchguard.attacks.objectives import Goal
from patchguard.errors import InputError
from patchguard.guard import Prediction
from patchguard.patch import Patch

PIXELS = 2  # the purpose of these draws
CPU_PIXELS = 2**14  # network pixels in one gradient pass on a CPU: activations should stay near its cache
PROBE = 8  # images whose gradient pass is measured to learn how many fit the memory of a GPU
LARGEST_PASS = 2048  # images: a GPU is busy with fewer

# (local logits, goal, rows of the attempt, step) -> what to increase, per image
Objective: TypeAlias = Callable[[Tensor, Goal, Tensor, int], Tensor]


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Attempt:
    """One position and one start for each image, and the objective to increase there."""

    positions: Positions
    start: Images  # whole images; only the pixels inside the patch are taken
    goal: Goal
    objective: Objective


@final
@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """`steps` of length `step` along the sign of the gradient, averaged with weight `momentum` over the past.

    `decay` shortens the steps linearly, which helps an objective converge that depends on many masks. `half` computes
    gradients in bfloat16 on GPUs; labels are always predicted in full precision.
    """

    steps: int = 100
    step: float = 0.05
    momentum: float = 0.9
    decay: bool = False
    half: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InputError(f"`steps` must be a whole number of at least 1; got {self.steps!r}.")
        if isinstance(self.step, bool) or not 0 < self.step <= 1:
            raise InputError(f"`step` must lie above 0 and be at most 1, the range of a pixel; got {self.step}.")
        if isinstance(self.momentum, bool) or not 0 <= self.momentum < 1:
            raise InputError(f"`momentum` must be at least 0 and below 1; got {self.momentum}.")

    def length(self, number: int) -> float:
        """Return the length of step `number`: at least one of the 255 levels of a pixel."""
        return max(self.step * (1 - number / self.steps), min(self.step, 1 / 255)) if self.decay else self.step


def run_attempts(
    victim: DifferentiableVictim,
    images: Images,
    patch: Patch,
    aim: Int64[Tensor, " batch"] | None,
    schedule: StepSchedule,
    attempts: Sequence[Callable[[Tensor], Attempt]],
    size: int,
) -> PatchedImages:
    """Run the attempts in turn, each on the images (by row) that none before has broken.

    Of an image that none breaks, the attempt with the highest objective is returned.
    """
    best = images.clone()
    positions = torch.zeros(len(images), patch.count, 2, dtype=torch.int64, device=images.device)
    highest = torch.full((len(images),), -torch.inf, device=images.device)
    rows = torch.arange(len(images), device=images.device)  # of the images that are not broken yet
    several = len(attempts) > 1
    for make_attempt in attempts:
        attempt = make_attempt(rows)
        row_aims = None if aim is None else aim[rows]
        # The caller checks the result of a single attempt anyway.
        patched, broken, score = ascend(
            victim, images[rows], patch, row_aims, attempt, schedule, size, check_last=several
        )
        better = broken | (score >= highest[rows])
        improved = rows[better]
        best[improved], positions[improved] = patched[better], attempt.positions[better]
        highest[improved] = score[better]
        rows = rows[~broken]
        if len(rows) == 0:
            break
    return best, positions


def ascend(
    victim: DifferentiableVictim,
    images: Images,
    patch: Patch,
    aim: Int64[Tensor, " batch"] | None,
    attempt: Attempt,
    schedule: StepSchedule,
    size: int,
    *,
    check_last: bool = True,
) -> tuple[Images, Bool[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Return the images after the attempt, which of them the victim was seen to get wrong, and their objective.

    Labels are first read off the gradient pass, and only candidates are shown to the victim. Images that are unbroken
    after the last step are shown to it, and their objective computed, only if `check_last`.
    """
    inside = patch_mask(attempt.positions, patch, *images.shape[-2:])
    cropped = crop_forward(victim, images, attempt.positions, patch, size=size, half=schedule.half)
    result = torch.where(inside, round_to_8_bits(attempt.start), images)
    broken = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    scores = torch.full((len(images),), -torch.inf, device=images.device)
    rows = torch.arange(len(images), device=images.device)  # of the unbroken images; what follows is their state
    rounded, state, velocity = result, result, torch.zeros_like(result)
    for step in range(schedule.steps):
        gradient, candidates = _compute_gradients(
            victim, rounded, attempt.goal, attempt.objective, aim, rows, step, size, schedule.half, cropped
        )
        unbroken = _check_candidates(victim, candidates, rounded, attempt, aim, rows, result, broken)
        if unbroken is not None:
            rows, state, velocity, gradient = rows[unbroken], state[unbroken], velocity[unbroken], gradient[unbroken]
            inside = inside[unbroken]
            if len(rows) == 0:
                return result, broken, scores
        # Scaled to their own mean, so that early and late gradients weigh alike.
        scale = gradient.abs().mean((1, 2, 3), keepdim=True).clamp(min=1e-30)
        velocity = schedule.momentum * velocity + gradient / scale
        state = torch.where(inside, (state + schedule.length(step) * velocity.sign()).clamp(0, 1), state)
        rounded = torch.where(inside, round_to_8_bits(state), state)
    result[rows] = rounded
    if check_last:
        everything = torch.ones_like(rows, dtype=torch.bool)
        _check_candidates(victim, everything, rounded, attempt, aim, rows, result, broken)
        for part, part_rows in zip(torch.split(rounded, size), torch.split(rows, size), strict=True):
            with torch.no_grad(), gradient_precision(images.device, schedule.half):
                local_logits = victim.differentiable_logits(part) if cropped is None else cropped(part, part_rows)
                score = attempt.objective(local_logits, attempt.goal[part_rows], part_rows, schedule.steps)
            scores[part_rows] = score.float().nan_to_num(nan=-torch.inf)
    return result, broken, scores


def _compute_gradients(
    victim: DifferentiableVictim,
    images: Tensor,
    goal: Goal,
    objective: Objective,
    aim: Tensor | None,
    rows: Tensor,
    step: int,
    size: int,
    half: bool,
    cropped: Logits | None = None,
) -> tuple[Tensor, Bool[Tensor, " some"]]:
    """Return the gradient, and whether the image looks broken in the same pass, in parts that fit the memory."""
    gradients, candidates = [], []
    for first in range(0, len(rows), size):
        part_rows = rows[first : first + size]
        part_goal = goal[part_rows]
        pixels = images[first : first + size].detach().requires_grad_(True)
        with torch.enable_grad(), gradient_precision(pixels.device, half):
            local_logits = victim.differentiable_logits(pixels) if cropped is None else cropped(pixels, part_rows)
        with torch.enable_grad():
            score = objective(local_logits, part_goal, part_rows, step)
        gradients.append(torch.autograd.grad(score.sum(), pixels)[0])
        answer = predict_from_logits(victim, local_logits.detach())
        candidates.append(is_broken(answer, part_goal.target, None if aim is None else aim[part_rows]))
    return torch.cat(gradients), torch.cat(candidates)


def _check_candidates(
    victim: DifferentiableVictim,
    candidates: Tensor,
    images: Tensor,
    attempt: Attempt,
    aim: Tensor | None,
    rows: Tensor,
    result: Tensor,
    broken: Tensor,
) -> Bool[Tensor, " some"] | None:
    """Show the victim the candidates and store those it gets wrong; return which are left, or None where all are."""
    shown = candidates.nonzero().squeeze(1)
    if len(shown) == 0:
        return None
    numbers = rows[shown]
    answer = victim.predict(images[shown])
    wrong = is_broken(answer, attempt.goal.target[numbers], None if aim is None else aim[numbers])
    successes = shown[wrong]
    if len(successes) == 0:
        return None
    result[rows[successes]], broken[rows[successes]] = images[successes], True
    unbroken = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    unbroken[successes] = False
    return unbroken


def initial_pixels(draws: Draws, images: Images, restart: int, number: int) -> Images:
    """Return where an attempt starts: the first of several restarts from the image, further ones from noise."""
    return images if restart == 0 else draws.uniform((PIXELS, number), *images.shape[1:]).to(images.dtype)


def compute_saliency(
    victim: DifferentiableVictim, images: Images, goal: Goal, objective: Objective, size: int, half: bool
) -> Float[Tensor, "batch height width"]:
    """Return the absolute gradient of the objective at the unchanged image, summed over channels."""
    rows = torch.arange(len(images), device=images.device)
    gradient, _ = _compute_gradients(victim, images, goal, objective, None, rows, 0, size, half)
    return gradient.abs().sum(1)


@torch.no_grad()
def occlusion_scores(
    victim: DifferentiableVictim,
    images: Images,
    patch: Patch,
    goal: Goal,
    objective: Objective,
    stride: int,
    size: int,
    half: bool,
) -> Float[Tensor, "batch top left"]:
    """Return the objective with one rectangle of the image inverted, at every position on a stride; 0 elsewhere."""
    batch, _, height, width = images.shape
    scores = images.new_zeros(batch, height - patch.height + 1, width - patch.width + 1)
    one, rows = Patch(patch.height, patch.width), torch.arange(batch, device=images.device)
    for top in range(0, scores.shape[1], stride):
        for left in range(0, scores.shape[2], stride):
            corner = torch.tensor([[[top, left]]], device=images.device)
            occluded = torch.where(patch_mask(corner, one, height, width), 1 - images, images)
            for first in range(0, batch, size):
                part = slice(first, first + size)
                with gradient_precision(images.device, half):
                    local_logits = victim.differentiable_logits(occluded[part])
                scores[part, top, left] = objective(local_logits, goal[rows[part]], rows[part], 0).float()
    return scores


def predict_from_logits(
    victim: DifferentiableVictim, local_logits: Float[Tensor, "batch classes rows columns"]
) -> Prediction:
    """Return what the victim would answer to such local logits, which may come from a pass of less precision."""
    defense: Any = getattr(victim, "defense", None)
    evidence: Any = getattr(victim, "evidence", None)
    if defense is not None and evidence is not None:
        answer: Prediction = defense.predict(evidence(local_logits.float()))
        return answer
    scores = local_logits.float().mean((2, 3))
    return Prediction(label=scores.argmax(1), scores=scores.double())


def gradient_batch_size(victim: DifferentiableVictim, images: Images, half: bool) -> int:
    """Return how many images one gradient pass takes: on a GPU as many as half of its free memory holds."""
    pixels = images.shape[-2] * images.shape[-1]
    preprocess = getattr(victim, "preprocess", None)
    if preprocess is not None:
        height, width = preprocess.output_size(*images.shape[-2:])
        pixels = max(pixels, height * width)
    if images.device.type != "cuda":
        return max(1, CPU_PIXELS // pixels)
    torch.cuda.reset_peak_memory_stats(images.device)
    before = torch.cuda.memory_allocated(images.device)
    probe = images[:PROBE].detach().requires_grad_(True)
    with torch.enable_grad(), gradient_precision(images.device, half):
        total = victim.differentiable_logits(probe).float().sum()
    torch.autograd.grad(total, probe)
    each = (torch.cuda.max_memory_allocated(images.device) - before) / len(probe)
    free = torch.cuda.mem_get_info(images.device)[0] + torch.cuda.memory_reserved(images.device) - before
    return max(1, min(LARGEST_PASS, int(0.5 * free / max(each, 1))))
