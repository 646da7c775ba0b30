"""`Adaptive`: an attack that knows the defense, and goes where and for what the certificate says it is weakest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from jaxtyping import Int64
from torch import Tensor

from patchguard.attacks import placement
from patchguard.attacks.base import Attack, Draws, Found, Places, check_count
from patchguard.attacks.climb import Objective, Pace, Try, best_of, gradient_weights, part_size, start_pixels
from patchguard.attacks.guide import Guide, find_guide
from patchguard.attacks.objectives import Case, Scores, cross_entropy, defended_score, witness_score
from patchguard.attacks.victim import Images, Victim
from patchguard.defenses import Undefended
from patchguard.errors import InputError
from patchguard.patch import Patch


@final
@dataclass(frozen=True, kw_only=True)
class Adaptive(Attack):
    r"""Climb the defense's own decision, first at the weakest window of the certificate, then at random places.

    Per image, the certificate of `target` names the window where the label is closest to falling and the rival it
    would fall to. The patch is put where it reaches that window, and aims at that rival (or at `aim`):

    * for the first `matching` share of the steps, it draws the evidence in the window towards the witness, the contents
      that an attacker of the evidence itself would write there;
    * then it climbs `objectives.defended_score`, the margin of the defended rule.

    Steps begin with length `step` and shrink to one level of a pixel. Further `locations` are random, and aim at
    whatever class is strongest. A plain sum of logits is attacked by cross-entropy, first where its gradient is
    largest. The certificate is only a guide: certified images are attacked, too.
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
            check_count(name, getattr(self, name))
        if isinstance(self.matching, bool) or not 0 <= self.matching <= 1:
            raise InputError(f"`matching` must be a share of the steps from 0 to 1; got {self.matching}.")
        _ = self.pace

    @property
    def pace(self) -> Pace:
        """How to climb."""
        return Pace(steps=self.steps, step=self.step, momentum=self.momentum, decay=True, half=self.half)

    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> Found:
        """Climb at the weakest window, then elsewhere."""
        height, width = images.shape[-2:]
        size = part_size(victim, images, self.half)
        guide = find_guide(victim, images, patch, target, size=size, half=self.half) if defends(victim) else None
        rival = aim if guide is None or aim is not None else guide.rival
        field = None if guide is None else guide.field
        follow = following(victim)
        first = self._first(victim, images, patch, Case(target=target, aim=rival), guide, follow, size)

        def attempt(number: int) -> Callable[[Tensor], Try]:
            def make(rows: Tensor) -> Try:
                location, mine = number // self.restarts, draws[rows]
                weakest = location == 0
                places = first[rows] if weakest else placement.random_places(mine, patch, height, width, location)
                wanted = rival if weakest else aim
                case = Case(
                    target=target[rows],
                    aim=None if wanted is None else wanted[rows],
                    owned=None if field is None else placement.owned_cells(places, field, patch),
                )
                matched = weakest and guide is not None and aim is None
                objective = self._matching(victim, guide, rows, follow) if matched else follow
                start = start_pixels(mine, images[rows], number % self.restarts, number)
                return Try(places=places, start=start, case=case, objective=objective)

            return make

        attempts = [attempt(number) for number in range(self.locations * self.restarts)]
        return best_of(victim, images, patch, aim, self.pace, attempts, size)

    def _first(
        self,
        victim: Victim,
        images: Images,
        patch: Patch,
        case: Case,
        guide: Guide | None,
        follow: Objective,
        size: int,
    ) -> Places:
        """The place that reaches the weakest window; of several, and where there is none, the heaviest gradient."""

        def weights() -> Tensor:
            return gradient_weights(victim, images, case, follow, size, self.half)

        if guide is None or guide.boxes is None:
            return placement.heaviest_places(weights(), patch, 1, 1)[0]
        return placement.window_places(guide.boxes, guide.windows, guide.field, patch, weights)

    def _matching(self, victim: Any, guide: Guide | None, rows: Tensor, follow: Objective) -> Objective:
        """First towards the witness, then as the defense decides."""
        witness = None if guide is None or guide.witness is None else guide.witness[rows]
        until = round(self.matching * self.steps)

        def climbed(local_logits: Tensor, case: Case, here: Tensor, step: int) -> Scores:
            if witness is None or step >= until:
                return follow(local_logits, case, here, step)
            return witness_score(victim.evidence, local_logits, case, witness[here])

        return climbed


def defends(victim: Any) -> bool:
    """Whether the victim names a rule to follow: a defense, or a plain sum of anything but the logits as they are."""
    defense, evidence = getattr(victim, "defense", None), getattr(victim, "evidence", None)
    if defense is None or evidence is None:
        return False
    plain = (evidence.kind, evidence.low, evidence.high) == ("logits", None, None)
    return not (plain and isinstance(defense, Undefended))


def following(victim: Any) -> Objective:
    """Return the objective that follows the victim's defense; cross-entropy where there is none."""
    known = defends(victim)

    def climbed(local_logits: Tensor, case: Case, rows: Tensor, step: int) -> Scores:
        if known:
            return defended_score(victim.defense, victim.evidence, local_logits, case)
        return cross_entropy(local_logits, case)

    return climbed
