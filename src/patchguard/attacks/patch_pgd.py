"""`PatchPGD`: projected gradient descent on the pixels of a patch (Equations 2 and 3 of the paper; LaVAN)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final, get_args

from jaxtyping import Int64
from torch import Tensor

from patchguard.attacks import placement
from patchguard.attacks.base import Attack, Draws, Found, Places, check_count, check_word
from patchguard.attacks.climb import Pace, Try, best_of, gradient_weights, occluded_scores, part_size, start_pixels
from patchguard.attacks.guide import find_guide
from patchguard.attacks.objectives import Case, Scores, cross_entropy, margin, sum_scores
from patchguard.attacks.victim import Images, Victim
from patchguard.patch import Patch


@final
@dataclass(frozen=True, kw_only=True)
class PatchPGD(Attack):
    r"""Climb the loss of the undefended network, whatever defends it.

    Rule.     x <- clip(x + step sign(v)) inside the patch,   v <- momentum v + normalised gradient of the objective.
              Untargeted: max CE(mean of local logits, target); targeted: min CE(..., aim).

    The paper's budget is `steps=500, step=0.05, locations=5`. `search` chooses the locations: "random"; "occlusion",
    all positions on a `stride`, those first where the negative of the image raises the loss most; "gradient", those
    first whose pixels the loss feels most; "certificate", first the position that reaches the weakest window of the
    certificate, then as "gradient". The first of `restarts` starts from the image,
    further ones from noise. Every place and restart is tried until the image is broken.
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
            check_count(name, getattr(self, name))
        check_word("search", self.search, get_args(placement.Search))
        check_word("objective", self.objective, ("cross_entropy", "margin"))
        _ = self.pace

    @property
    def pace(self) -> Pace:
        """How to climb."""
        return Pace(steps=self.steps, step=self.step, momentum=self.momentum, half=self.half)

    def run(
        self,
        victim: Victim,
        images: Images,
        target: Int64[Tensor, " batch"],
        patch: Patch,
        aim: Int64[Tensor, " batch"] | None,
        draws: Draws,
    ) -> Found:
        """Climb at every place, from every start."""
        case = Case(target=target, aim=aim)
        size = part_size(victim, images, self.half)
        place = self._places(victim, images, patch, case, draws, size)

        def attempt(number: int) -> Callable[[Tensor], Try]:
            def make(rows: Tensor) -> Try:
                return Try(
                    places=place(number // self.restarts, rows),
                    start=start_pixels(draws[rows], images[rows], number % self.restarts, number),
                    case=case[rows],
                    objective=self._climbed,
                )

            return make

        attempts = [attempt(number) for number in range(self.locations * self.restarts)]
        return best_of(victim, images, patch, aim, self.pace, attempts, size)

    def _climbed(self, local_logits: Tensor, case: Case, rows: Tensor, step: int) -> Scores:
        if self.objective == "margin":
            return margin(sum_scores(None, local_logits.float()), case)
        return cross_entropy(local_logits, case)

    def _places(
        self, victim: Victim, images: Images, patch: Patch, case: Case, draws: Draws, size: int
    ) -> Callable[[int, Tensor], Places]:
        """Return the place of location `number` for some images."""
        height, width = images.shape[-2:]
        if self.search == "random":
            return lambda number, rows: placement.random_places(draws[rows], patch, height, width, number)
        if self.search == "occlusion":
            scores = occluded_scores(victim, images, patch, case, self._climbed, self.stride, size, self.half)
            highest = placement.highest_places(scores, patch, self.locations, self.stride)
            return lambda number, rows: highest[min(number, len(highest) - 1)][rows]
        weights = gradient_weights(victim, images, case, self._climbed, size, self.half)
        ranked = placement.heaviest_places(weights, patch, self.locations, self.stride)
        if self.search == "certificate":
            guide = find_guide(victim, images, patch, case.target, size=size, half=self.half)
            if guide is not None and guide.boxes is not None:
                first = placement.window_places(guide.boxes, guide.windows, guide.field, patch, lambda: weights)
                ranked = [first, *ranked]
        return lambda number, rows: ranked[min(number, len(ranked) - 1)][rows]
