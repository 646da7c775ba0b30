"""`Adaptive`: an attack that knows the defense, and goes where and for what the certificate says it is weakest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

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
    require_integer,
)
from patchguard.attacks.baselines import search_black_box
from patchguard.attacks.gradient_ascent import (
    Attempt,
    Objective,
    StepSchedule,
    compute_saliency,
    gradient_batch_size,
    initial_pixels,
    run_attempts,
)
from patchguard.attacks.objectives import Goal, Scores, cross_entropy, defended_score, witness_score
from patchguard.attacks.positions import owned_cells, positions_reaching, random_positions, salient_positions
from patchguard.attacks.weak_spot import WeakSpot, find_weak_spot
from patchguard.errors import InputError
from patchguard.patch import Patch


@final
@dataclass(frozen=True, kw_only=True)
class Adaptive(Attack):
    r"""Increase the defense's own objective, first at the weakest window of the certificate, then at random positions.

    Per image, the certificate of `target` names the window where the label is closest to falling and the rival it
    would fall to. The patch is put where it reaches that window, and aims at that rival (or at `aim`):

    * for the first fraction `matching` of the steps, it draws the evidence in the window towards the witness, the
      contents that an attacker of the evidence itself would write there;
    * then it increases `objectives.defended_score`, the margin of the defended rule.

    Steps begin with length `step` and shrink to one level of a pixel. Further `locations` are random, and aim at
    whatever class is strongest. A plain sum of logits is attacked by cross-entropy, first where its gradient is
    largest. The certificate is only a hint: certified images are attacked, too. A guard that offers no gradients is
    searched as a black box, see `search_black_box`.
    """

    steps: int = 100
    step: float = 0.1
    momentum: float = 0.9
    locations: int = 2
    restarts: int = 1
    matching: float = 0.25
    half: bool = True

    def __post_init__(self) -> None:
        for name in ("locations", "restarts"):
            require_integer(name, getattr(self, name))
        if isinstance(self.matching, bool) or not 0 <= self.matching <= 1:
            raise InputError(f"`matching` must be a fraction of the steps from 0 to 1; got {self.matching}.")
        _ = self.schedule

    @property
    def schedule(self) -> StepSchedule:
        """The steps of each attempt."""
        return StepSchedule(steps=self.steps, step=self.step, momentum=self.momentum, decay=True, half=self.half)

    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> PatchedImages:
        """Attack the weakest window, then random positions."""
        count = self.locations * self.restarts
        if not offers_gradients(victim):
            return search_black_box(victim, images, target, patch, aim, draws, self.steps * count)
        height, width = images.shape[-2:]
        size = gradient_batch_size(victim, images, self.half)
        spot = find_weak_spot(victim, images, patch, target, size=size, half=self.half) if has_rule(victim) else None
        rival = aim if spot is None or aim is not None else spot.rival
        objective = make_objective(victim)
        first = self._first_positions(victim, images, patch, Goal(target=target, aim=rival), spot, objective, size)

        def attempt(number: int) -> Callable[[Tensor], Attempt]:
            def make(rows: Tensor) -> Attempt:
                location, row_draws = number // self.restarts, draws[rows]
                weakest = location == 0
                positions = first[rows] if weakest else random_positions(row_draws, patch, height, width, location)
                label = rival if weakest else aim
                goal = Goal(
                    target=target[rows],
                    aim=None if label is None else label[rows],
                    owned=None if spot is None else owned_cells(positions, spot.field, patch),
                )
                matches = weakest and spot is not None and aim is None
                return Attempt(
                    positions=positions,
                    start=initial_pixels(row_draws, images[rows], number % self.restarts, number),
                    goal=goal,
                    objective=self._match_witness(victim, spot, rows, objective) if matches else objective,
                )

            return make

        attempts = [attempt(number) for number in range(count)]
        return run_attempts(victim, images, patch, aim, self.schedule, attempts, size)

    def _first_positions(
        self,
        victim: DifferentiableVictim,
        images: Images,
        patch: Patch,
        goal: Goal,
        spot: WeakSpot | None,
        objective: Objective,
        size: int,
    ) -> Positions:
        """Return where the patch reaches the weakest window; of several positions, or without one, the most salient."""

        def saliency() -> Tensor:
            return compute_saliency(victim, images, goal, objective, size, self.half)

        if spot is None or spot.boxes is None:
            return salient_positions(saliency(), patch, 1, 1)[0]
        return positions_reaching(spot.boxes, spot.windows, spot.field, patch, saliency)

    def _match_witness(self, victim: Any, spot: WeakSpot | None, rows: Tensor, objective: Objective) -> Objective:
        """Return the objective that goes towards the witness first, then follows the defense."""
        witness = None if spot is None or spot.witness is None else spot.witness[rows]
        until = round(self.matching * self.steps)

        def score(local_logits: Tensor, goal: Goal, part_rows: Tensor, step: int) -> Scores:
            if witness is None or step >= until:
                return objective(local_logits, goal, part_rows, step)
            return witness_score(victim.evidence, local_logits, goal, witness[part_rows])

        return score


def has_rule(victim: Any) -> bool:
    """Whether the victim has a rule to follow: a defense, or a sum of anything but the unclipped logits."""
    defense, evidence = getattr(victim, "defense", None), getattr(victim, "evidence", None)
    if defense is None or evidence is None:
        return False
    return defense.defends or (evidence.kind, evidence.low, evidence.high) != ("logits", None, None)


def make_objective(victim: Any) -> Objective:
    """Return the objective that follows the victim's defense; cross-entropy where there is none."""
    known = has_rule(victim)

    def score(local_logits: Tensor, goal: Goal, rows: Tensor, step: int) -> Scores:
        if known:
            return defended_score(victim.defense, victim.evidence, local_logits, goal)
        return cross_entropy(local_logits, goal)

    return score
