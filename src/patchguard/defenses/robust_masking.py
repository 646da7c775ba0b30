"""Robust masking: hide, class by class, the window with the most evidence (Algorithms 1 and 2 of the paper)."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, final

import torch
from jaxtyping import Int64
from torch import Tensor

from patchguard.defenses import ties
from patchguard.defenses.base import (
    MaskedDefense,
    contenders,
    gather,
    prediction,
    require_cover,
    select,
    strongest,
    validate_masks,
    worst_case,
)
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.defenses.window_sums import heaviest, overlaps, sums
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate, Prediction

LARGEST_DENOMINATOR = 1000
FEW = 16  # classes that are all compared without sorting out those that cannot matter


@final
@dataclass(frozen=True, kw_only=True)
class RobustMasking(MaskedDefense[Certificate]):
    r"""Mask the heaviest window of each class, if it holds more than the share T of that class's evidence.

    Rule.     S_k = sum_i u_k(i),  H_k = max_v sum_{i in v} u_k(i)  over the masks v,
              s_k = S_k - H_k  if  H_k > T S_k  else  S_k,      label = argmax_k s_k   (ties: smallest k)

    Theorem.  Let u >= 0, at most h per cell, and let an attack rewrite the cells of w. With t_k the evidence outside w,
              a_k(v) the evidence in v outside w, and n(v) the cells that v and w share,

                  LB  = t_y - max{ 0, a_y(v) : (1 - T)(a_y(v) + h n(v)) > T (t_y - a_y(v)) }
                  D_k = t_k + h |w| - max_v ( a_k(v) + h n(v) )
                  UB_k = D_k                                     if T = 0, or if max_v a_k(v) > T min(...) below
                         min( t_k + h |w|, D_k / (1 - T) )       otherwise  (T = 1: t_k + h |w|)

              bound the scores of y from below and of k from above, and the label stays y if LB > UB_k for all k != y,
              for every w. At T = 0 this is exact.

    Masks may be larger than the windows, or smaller if the evidence is bounded. `masks.count > 1` masks the heaviest
    union of that many boxes. Cost: certify O(P w K') for P windows of side w against the K' rivals that matter, at
    T = 0; at T > 0 plus O(P M) for M masks; with unions P and M grow to their powers.
    """

    masks: Windows
    threshold: Fraction | float = Fraction(0)
    default_evidence: ClassVar[Evidence] = Evidence(kind="logits", low=0.0)

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not 0 <= self.threshold <= 1:
            raise InputError(f"`threshold` must lie in [0, 1]; got {self.threshold}.")
        exact = Fraction(self.threshold).limit_denominator(LARGEST_DENOMINATOR)
        if abs(exact - Fraction(self.threshold)) > Fraction(1, 10**12):
            raise InputError(
                f"`threshold` must be a fraction with a denominator of at most {LARGEST_DENOMINATOR}; got "
                f"{self.threshold}. Round it to three decimals."
            )
        object.__setattr__(self, "threshold", exact)

    @property
    def _ratio(self) -> tuple[int, int]:
        """T = p / q."""
        exact = Fraction(self.threshold)
        return exact.numerator, exact.denominator

    def with_threshold(self, threshold: Fraction) -> "RobustMasking":
        """Return the rule with another T."""
        return replace(self, threshold=threshold)

    def margin_unit(self, scale: int) -> int:
        """With T = p / q > 0 margins are multiples of 1 / (scale (q - p))."""
        p, q = self._ratio
        return scale * max(1, q - p)

    def hidden_window(self, evidence: EvidenceMap, label: int) -> tuple[int, int, int, int] | None:
        """The heaviest window of the class, where it is masked."""
        p, q = self._ratio
        maps = evidence.values[0, label]
        hidden = sums(maps[None], self.masks)[0]
        heaviest_one = int(torch.argmax(hidden))
        if q * int(hidden[heaviest_one]) <= p * int(maps.sum()):
            return None
        top, bottom, left, right = self.masks.boxes[heaviest_one].tolist()
        return top, bottom, left, right

    def exact(self, evidence: EvidenceMap, windows: Windows) -> bool:
        """T = 0: both bounds are attained together. T > 0: each is sound, the pair may not be attained."""
        return self.threshold == 0

    def validate_windows(self, evidence: EvidenceMap, windows: Windows) -> None:
        """Raise where a window is not covered and the evidence is unbounded."""
        if not evidence.bounded:
            require_cover(self.masks, windows, otherwise=", or bound the evidence (`high`)")

    def validate_evidence(self, evidence: EvidenceMap) -> None:
        """Raise unless the masks lie on the grid and evidence is clipped at 0."""
        validate_masks(self.masks, evidence)
        if evidence.low != 0:
            raise InputError(
                f"robust masking needs evidence clipped at 0; got a floor of {evidence.low / evidence.scale:.6g}. "
                "Use Evidence(low=0.0), or DoubleMasking for signed evidence."
            )
        _, q = self._ratio
        cells = evidence.grid[0] * evidence.grid[1]
        if 2 * q * q * cells * evidence.high >= 2**63:
            raise InputError("`threshold` has too large a denominator for this grid and ceiling; round it.")

    def _predict(self, evidence: EvidenceMap) -> Prediction:
        return prediction(self._scores(evidence.values), evidence.scale)

    def _scores(self, maps: Int64[Tensor, "batch some rows columns"]) -> Int64[Tensor, "batch some"]:
        p, q = self._ratio
        total = maps.sum((2, 3))
        hidden = sums(maps, self.masks).amax(-1)
        return torch.where(q * hidden > p * total, total - hidden, total)

    def _label(self, evidence: EvidenceMap) -> Int64[Tensor, " batch"]:
        """The label of `_predict`, scoring only classes whose total reaches the score of the largest total."""
        if evidence.classes <= FEW:
            return ties.argmax(self._scores(evidence.values), dim=1)
        total = evidence.values.sum((2, 3))
        largest = ties.argmax(total, dim=1).unsqueeze(1)
        reached = self._scores(gather(evidence.values, largest))
        count = int((total >= reached).sum(1).max())
        classes = total.topk(count, dim=1).indices.sort(dim=1).values
        best = ties.argmax(self._scores(gather(evidence.values, classes)), dim=1)
        return select(classes, best)

    def _certify(
        self, evidence: EvidenceMap, windows: Windows, label: Int64[Tensor, " batch"], top_k: int
    ) -> Certificate:
        p, _ = self._ratio
        lower = self._lower(evidence, windows, label)
        rivals = self._rivals(evidence, windows, label, top_k)
        maps = gather(evidence.upper, rivals)
        defended = self._bound_masked(maps, evidence, windows)
        if p == 0:
            margins = lower.unsqueeze(1) - defended
        else:
            margins = self._margins(lower, defended, maps, gather(evidence.lower, rivals), evidence, windows)
        return worst_case(margins, rivals, label, windows, self.margin_unit(evidence.scale), top_k)

    def _rivals(
        self, evidence: EvidenceMap, windows: Windows, label: Tensor, top_k: int
    ) -> Int64[Tensor, "batch some"]:
        """The classes whose bound can decide the margin; all of them where sorting them out costs more."""
        totals = evidence.upper.sum((2, 3))
        if evidence.classes <= FEW and self._own_masks(windows):
            return strongest(totals, label, evidence.classes - 1)
        p, q = self._ratio
        # No score exceeds the total plus what fills a region; with every region in a mask, D_k <= t_k <= S_k.
        ceiling = totals + evidence.high * windows.largest_area
        if self.masks.cover(windows) and p < q:
            ceiling = torch.minimum(ceiling, totals * q // (q - p) + (p > 0))
        top = strongest(totals, label, top_k)
        reached = self._bound_masked(gather(evidence.upper, top), evidence, windows).amin((1, 2))
        return contenders(ceiling, reached, label, top_k)

    def _own_masks(self, windows: Windows) -> bool:
        """Whether Lemma 1 holds: the windows are the masks, all of one size."""
        return windows.equal_boxes and windows == self.masks

    def _lower(self, evidence: EvidenceMap, windows: Windows, label: Tensor) -> Int64[Tensor, "batch regions"]:
        """LB: the least score of the label."""
        p, q = self._ratio
        least = select(evidence.lower, label)
        rest = least.sum((1, 2)).unsqueeze(1) - sums(least, windows)  # t_y
        if p == 0:
            return rest - heaviest(least, self.masks, windows)
        if p == q:
            return rest
        # a_y(v), as small and as large as drift allows
        smallest = overlaps(least, self.masks, windows)
        largest = overlaps(select(evidence.upper, label), self.masks, windows)
        lower = torch.empty_like(rest)
        for (here, least_in, shared), (_, most_in, _) in zip(smallest, largest, strict=True):
            left = rest[:, here].unsqueeze(2)
            masked = (q - p) * (most_in + evidence.high * shared) > p * (left - least_in)
            lower[:, here] = rest[:, here] - torch.where(masked, least_in, 0).amax(2)
        return lower

    def _bound_masked(
        self, maps: Tensor, evidence: EvidenceMap, windows: Windows
    ) -> Int64[Tensor, "batch some regions"]:
        """D: the highest masked score of each class."""
        rest = maps.sum((2, 3)).unsqueeze(2) - sums(maps, windows)  # t_k
        if self._own_masks(windows):
            return rest  # the best mask is the window itself
        areas = torch.from_numpy(windows.areas).to(maps.device)
        return rest + evidence.high * areas - heaviest(maps, self.masks, windows, fill=evidence.high)

    def _margins(
        self,
        lower: Tensor,
        defended: Tensor,
        maps: Tensor,
        least: Tensor,
        evidence: EvidenceMap,
        windows: Windows,
    ) -> Int64[Tensor, "batch some regions"]:
        """(q - p)(LB - UB), in integers: UB_k = min(t_k + h |w|, q D_k / (q - p)), or D_k if detection is certain."""
        p, q = self._ratio
        areas = torch.from_numpy(windows.areas).to(maps.device)
        filled = maps.sum((2, 3)).unsqueeze(2) - sums(maps, windows) + evidence.high * areas  # t_k + h |w|
        if p == q:
            return lower.unsqueeze(1) - filled
        unmasked = torch.minimum((q - p) * filled, q * defended)  # (q - p) UB_k
        certain = q * (q - p) * heaviest(least, self.masks, windows) > p * unmasked
        return (q - p) * lower.unsqueeze(1) - torch.where(certain, (q - p) * defended, unmasked)
