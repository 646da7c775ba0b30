"""The one loop of all gradient attacks: sign-gradient steps on the pixels of a patch, images leaving once broken."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchguard.attacks.base import Draws, Found, Places, covered, eight_bits, is_broken
from patchguard.attacks.closeup import Logits, closeup
from patchguard.attacks.objectives import Case
from patchguard.attacks.precision import reduced
from patchguard.attacks.victim import Images, Victim
from patchguard.errors import InputError
from patchguard.guard import Prediction
from patchguard.patch import Patch

PIXELS = 2  # the purpose of these draws
CPU_PIXELS = 2**14  # network pixels in one gradient pass on a CPU: activations should stay near its cache
PROBE = 8  # images whose gradient pass is measured to learn how many fit a GPU's memory
MOST = 2048  # images in one pass: a GPU is busy with fewer

# (local logits, case, rows of the attempt, step) -> what to climb, per image
Objective: TypeAlias = Callable[[Tensor, Case, Tensor, int], Tensor]


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Try:
    """One place and one start for each image, and what to climb there."""

    places: Places
    start: Images  # whole images; only the pixels inside the patch are taken
    case: Case
    objective: Objective


@final
@dataclass(frozen=True, kw_only=True)
class Pace:
    """How to climb: `steps` of `step` along the sign of the gradient, averaged with weight `momentum` over the past.

    `decay` shortens the steps evenly towards the end, which settles an objective that many masks pull at. `half`
    computes gradients in bfloat16 where the device is a GPU; labels are always asked in full precision.
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


def best_of(
    victim: Victim,
    images: Images,
    patch: Patch,
    aim: Int64[Tensor, " batch"] | None,
    pace: Pace,
    attempts: Sequence[Callable[[Tensor], Try]],
    size: int,
) -> Found:
    """Run the attempts one after the other on the images (by row) that none before has broken.

    Of an image that none breaks, the attempt that climbed highest is kept.
    """
    best = images.clone()
    places = torch.zeros(len(images), patch.count, 2, dtype=torch.int64, device=images.device)
    highest = torch.full((len(images),), -torch.inf, device=images.device)
    left = torch.arange(len(images), device=images.device)
    several = len(attempts) > 1
    for attempt in attempts:
        made = attempt(left)
        some = None if aim is None else aim[left]
        # About the result of a single attempt the caller asks the victim anyway.
        shown, broken, height = climb(victim, images[left], patch, some, made, pace, size, judge=several)
        better = broken | (height >= highest[left])
        kept = left[better]
        best[kept], places[kept], highest[kept] = shown[better], made.places[better], height[better]
        left = left[~broken]
        if len(left) == 0:
            break
    return best, places


def climb(
    victim: Victim,
    images: Images,
    patch: Patch,
    aim: Int64[Tensor, " batch"] | None,
    attempt: Try,
    pace: Pace,
    size: int,
    *,
    judge: bool = True,
) -> tuple[Images, Bool[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Return what the attempt made of the images, which of them the victim has been seen to get wrong, and its height.

    The label is first read off the gradient pass, and only candidates are shown to the victim. What is unbroken after
    the last step is shown to it, and its height (the objective there) measured, only to `judge` it.
    """
    inside = covered(attempt.places, patch, *images.shape[-2:])
    near = closeup(victim, images, attempt.places, patch, size=size, half=pace.half)
    result = torch.where(inside, eight_bits(attempt.start), images)
    broken = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    height = torch.full((len(images),), -torch.inf, device=images.device)
    rows = torch.arange(len(images), device=images.device)  # those still climbing; what follows are their states
    shown, state, velocity = result, result, torch.zeros_like(result)
    for step in range(pace.steps):
        gradient, candidate = _passes(
            victim, shown, attempt.case, attempt.objective, aim, rows, step, size, pace.half, near
        )
        stays = _show(victim, candidate, shown, attempt, aim, rows, result, broken)
        if stays is not None:
            rows, state, velocity, gradient = rows[stays], state[stays], velocity[stays], gradient[stays]
            inside = inside[stays]
            if len(rows) == 0:
                return result, broken, height
        # Scaled to their own mean, so that early and late gradients weigh alike.
        scale = gradient.abs().mean((1, 2, 3), keepdim=True).clamp(min=1e-30)
        velocity = pace.momentum * velocity + gradient / scale
        state = torch.where(inside, (state + pace.length(step) * velocity.sign()).clamp(0, 1), state)
        shown = torch.where(inside, eight_bits(state), state)
    result[rows] = shown
    if judge:
        _show(victim, torch.ones_like(rows, dtype=torch.bool), shown, attempt, aim, rows, result, broken)
        for part, here in zip(torch.split(shown, size), torch.split(rows, size), strict=True):
            with torch.no_grad(), reduced(images.device, pace.half):
                local_logits = victim.differentiable_logits(part) if near is None else near(part, here)
                score = attempt.objective(local_logits, attempt.case[here], here, pace.steps)
            height[here] = score.float().nan_to_num(nan=-torch.inf)
    return result, broken, height


def _passes(
    victim: Victim,
    shown: Tensor,
    case: Case,
    objective: Objective,
    aim: Tensor | None,
    rows: Tensor,
    step: int,
    size: int,
    half: bool,
    near: Logits | None = None,
) -> tuple[Tensor, Bool[Tensor, " some"]]:
    """The gradient, and whether the image looks broken in the same pass, in parts that fit the memory."""
    gradients, candidates = [], []
    for first in range(0, len(rows), size):
        here = rows[first : first + size]
        some = case[here]
        pixels = shown[first : first + size].detach().requires_grad_(True)
        with torch.enable_grad(), reduced(pixels.device, half):
            local_logits = victim.differentiable_logits(pixels) if near is None else near(pixels, here)
        with torch.enable_grad():
            score = objective(local_logits, some, here, step)
        gradients.append(torch.autograd.grad(score.sum(), pixels)[0])
        answer = quick_answer(victim, local_logits.detach())
        candidates.append(is_broken(answer, some.target, None if aim is None else aim[here]))
    return torch.cat(gradients), torch.cat(candidates)


def _show(
    victim: Victim,
    candidate: Tensor,
    shown: Tensor,
    attempt: Try,
    aim: Tensor | None,
    rows: Tensor,
    result: Tensor,
    broken: Tensor,
) -> Bool[Tensor, " some"] | None:
    """Show the victim the candidates and note those it gets wrong; return which stay, or None where all do."""
    asked = candidate.nonzero().squeeze(1)
    if len(asked) == 0:
        return None
    numbers = rows[asked]
    answer = victim.predict(shown[asked])
    wrong = is_broken(answer, attempt.case.target[numbers], None if aim is None else aim[numbers])
    won = asked[wrong]
    if len(won) == 0:
        return None
    result[rows[won]], broken[rows[won]] = shown[won], True
    stays = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    stays[won] = False
    return stays


def start_pixels(draws: Draws, images: Images, restart: int, number: int) -> Images:
    """Return where a try starts: the first of several restarts from the image as it is, further ones from noise."""
    return images if restart == 0 else draws.uniform((PIXELS, number), *images.shape[1:]).to(images.dtype)


def gradient_weights(
    victim: Victim, images: Images, case: Case, objective: Objective, size: int, half: bool
) -> Float[Tensor, "batch height width"]:
    """Return how much the objective feels each pixel: the absolute gradient at the image as it is, over channels."""
    rows = torch.arange(len(images), device=images.device)
    gradient, _ = _passes(victim, images, case, objective, None, rows, 0, size, half)
    return gradient.abs().sum(1)


@torch.no_grad()
def occluded_scores(
    victim: Victim,
    images: Images,
    patch: Patch,
    case: Case,
    objective: Objective,
    stride: int,
    size: int,
    half: bool,
) -> Float[Tensor, "batch top left"]:
    """Return the objective with one rectangle of the image in negative, at every position on a stride; 0 elsewhere."""
    batch, _, height, width = images.shape
    scores = images.new_zeros(batch, height - patch.height + 1, width - patch.width + 1)
    one, rows = Patch(patch.height, patch.width), torch.arange(batch, device=images.device)
    for top in range(0, scores.shape[1], stride):
        for left in range(0, scores.shape[2], stride):
            place = torch.tensor([[[top, left]]], device=images.device)
            shown = torch.where(covered(place, one, height, width), 1 - images, images)
            for first in range(0, batch, size):
                some = slice(first, first + size)
                with reduced(images.device, half):
                    local_logits = victim.differentiable_logits(shown[some])
                scores[some, top, left] = objective(local_logits, case[rows[some]], rows[some], 0).float()
    return scores


def quick_answer(victim: Victim, local_logits: Float[Tensor, "batch classes rows columns"]) -> Prediction:
    """Return what the victim would answer to such local logits, which may come from a pass of less precision."""
    defense: Any = getattr(victim, "defense", None)
    evidence: Any = getattr(victim, "evidence", None)
    if defense is not None and evidence is not None:
        answer: Prediction = defense.predict(evidence(local_logits.float()))
        return answer
    scores = local_logits.float().mean((2, 3))
    return Prediction(label=scores.argmax(1), scores=scores.double())


def part_size(victim: Victim, images: Images, half: bool) -> int:
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
    with torch.enable_grad(), reduced(images.device, half):
        total = victim.differentiable_logits(probe).float().sum()
    torch.autograd.grad(total, probe)
    each = (torch.cuda.max_memory_allocated(images.device) - before) / len(probe)
    free = torch.cuda.mem_get_info(images.device)[0] + torch.cuda.memory_reserved(images.device) - before
    return max(1, min(MOST, int(0.5 * free / max(each, 1))))
