"""`PatchPGD`: projected gradient descent on the pixels of a patch (Equations 2 and 3 of the paper; LaVAN)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final, get_args

from jaxtyping import Int64
from torch import Tensor

from patchguard.attacks.base import (
    Attack,
    DifferentiableVictim,
    Draws,
    Images,
    PatchedImages,
    Positions,
    Victim,
    offers_gradients,
    require_choice,
    require_integer,
)
from patchguard.attacks.baselines import search_black_box
from patchguard.attacks.gradient_ascent import (
    Attempt,
    StepSchedule,
    compute_saliency,
    gradient_batch_size,
    initial_pixels,
    occlusion_scores,
    run_attempts,
)
from patchguard.attacks.objectives import Goal, Scores, cross_entropy, sum_score
from patchguard.attacks.positions import Search, positions_reaching, random_positions, salient_positions, top_positions
from patchguard.attacks.weak_spot import find_weak_spot
from patchguard.patch import Patch


@final
@dataclass(frozen=True, kw_only=True)
class PatchPGD(Attack):
    r"""Increase the loss of the undefended network, whatever defends it.

    Rule.     x <- clip(x + step sign(v)) inside the patch,   v <- momentum v + normalized gradient of the objective.
              Untargeted: max CE(mean of local logits, target); targeted: min CE(..., aim).

    The paper's budget is `steps=500, step=0.05, locations=5`. `search` chooses the locations: "random"; "occlusion",
    the positions on a `stride` where inverting the image raises the loss most; "gradient", the most salient positions;
    "certificate", first the position that reaches the weakest window of the certificate, then as "gradient". The first
    of `restarts` starts from the image, further ones from noise. Every location and restart is tried until the image
    is broken. A guard that offers no gradients is searched as a black box, see `search_black_box`.
    """

    steps: int = 100
    step: float = 0.05
    momentum: float = 0.9
    locations: int = 5
    restarts: int = 1
    search: str = "random"
    stride: int = 2
    objective: str = "cross_entropy"
    half: bool = True

    def __post_init__(self) -> None:
        for name in ("locations", "restarts", "stride"):
            require_integer(name, getattr(self, name))
        require_choice("search", self.search, get_args(Search))
        require_choice("objective", self.objective, ("cross_entropy", "margin"))
        _ = self.schedule

    @property
    def schedule(self) -> StepSchedule:
        """The steps of each attempt."""
        return StepSchedule(steps=self.steps, step=self.step, momentum=self.momentum, half=self.half)

    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> PatchedImages:
        """Attack every location, from every start."""
        count = self.locations * self.restarts
        if not offers_gradients(victim):
            return search_black_box(victim, images, target, patch, aim, draws, self.steps * count)
        goal = Goal(target=target, aim=aim)
        size = gradient_batch_size(victim, images, self.half)
        find_positions = self._choose_locations(victim, images, patch, goal, draws, size)

        def attempt(number: int) -> Callable[[Tensor], Attempt]:
            def make(rows: Tensor) -> Attempt:
                return Attempt(
                    positions=find_positions(number // self.restarts, rows),
                    start=initial_pixels(draws[rows], images[rows], number % self.restarts, number),
                    goal=goal[rows],
                    objective=self._score,
                )

            return make

        attempts = [attempt(number) for number in range(count)]
        return run_attempts(victim, images, patch, aim, self.schedule, attempts, size)

    def _score(self, local_logits: Tensor, goal: Goal, rows: Tensor, step: int) -> Scores:
        if self.objective == "margin":
            return sum_score(None, local_logits.float(), goal)
        return cross_entropy(local_logits, goal)

    def _choose_locations(
        self, victim: DifferentiableVictim, images: Images, patch: Patch, goal: Goal, draws: Draws, size: int
    ) -> Callable[[int, Tensor], Positions]:
        """Return a function from the number of a location and rows of images to positions."""
        height, width = images.shape[-2:]
        if self.search == "random":
            return lambda number, rows: random_positions(draws[rows], patch, height, width, number)
        if self.search == "occlusion":
            scores = occlusion_scores(victim, images, patch, goal, self._score, self.stride, size, self.half)
            ranked = top_positions(scores, patch, self.locations, self.stride)
        else:
            saliency = compute_saliency(victim, images, goal, self._score, size, self.half)
            ranked = salient_positions(saliency, patch, self.locations, self.stride)
        if self.search == "certificate":
            spot = find_weak_spot(victim, images, patch, goal.target, size=size, half=self.half)
            if spot is not None and spot.boxes is not None:
                first = positions_reaching(spot.boxes, spot.windows, spot.field, patch, lambda: saliency)
                ranked = [first, *ranked]
        return lambda number, rows: ranked[min(number, len(ranked) - 1)][rows]
