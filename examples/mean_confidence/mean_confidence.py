"""A defense in one file: the class with the highest sum of confidences, and a proof about it."""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Int64
from torch import Tensor

from patchguard import Certificate, Evidence, EvidenceMap, Prediction, Windows
from patchguard.defenses import Defense
from patchguard.defenses.base import gather, prediction, select, strongest, worst_case
from patchguard.defenses.clipped_sum import check_bounded
from patchguard.defenses.window_sums import sums


@final
@dataclass(frozen=True, kw_only=True)
class MeanConfidence(Defense[Certificate]):
    r"""Add up confidences.

    Rule.     S_k = sum_i u_k(i),  low <= u <= high,   label = argmax_k S_k   (ties: smallest k)
    Theorem.  Rewriting the cells of a window w leaves the label y if, for every k != y,
                  S_y(outside w) - S_k(outside w)  >  |w| (high - low).
    """

    default_evidence: ClassVar[Evidence] = Evidence(kind="confidence")

    def validate_windows(self, evidence: EvidenceMap, windows: Windows) -> None:
        """Refuse evidence without bounds: a single cell could then outweigh all others."""
        check_bounded(evidence)

    def _predict(self, evidence: EvidenceMap) -> Prediction:
        return prediction(evidence.values.sum((2, 3)), evidence.scale)

    def _certify(
        self, evidence: EvidenceMap, windows: Windows, label: Int64[Tensor, " batch"], top_k: int
    ) -> Certificate:
        rivals = strongest(evidence.upper.sum((2, 3)), label, evidence.classes - 1)  # all other classes
        gap = select(evidence.lower, label).unsqueeze(1) - gather(evidence.upper, rivals)  # drift is charged here
        lost = sums(gap + evidence.high - evidence.low, windows)  # the most each rival can gain in each window
        return worst_case(gap.sum((2, 3)).unsqueeze(2) - lost, rivals, label, windows, evidence.scale, top_k)
