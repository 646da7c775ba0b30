"""Clipped sum (Clipped BagNet): add up evidence that no cell can push far."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

from jaxtyping import Int64
from torch import Tensor

from patchguard.defenses import ties
from patchguard.defenses.base import Defense, gather, prediction, select, strongest, worst_case
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.defenses.window_sums import sums
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate, Prediction

MOST_REGIONS = 20_000  # unions of several windows that are still enumerated


@final
@dataclass(frozen=True, kw_only=True)
class ClippedSum(Defense[Certificate]):
    r"""Add up clipped evidence.

    Rule.     S_k = sum_i u_k(i),  low <= u <= high,     label = argmax_k S_k   (ties: smallest k)
    Theorem.  Rewriting the cells of w leaves the label y if, for every k != y,
                  S_y(outside w) - S_k(outside w)  >  |w| (high - low).                             exact
    Published rule (`spatial=False`), with n = max |w|:   S_y - S_k  >  2 n (high - low).           sound
    """

    spatial: bool = True
    default_evidence: ClassVar[Evidence] = Evidence(kind="tanh")
    checkable: ClassVar[bool] = True

    def exact(self, evidence: EvidenceMap, windows: Windows) -> bool:
        """The spatial rule is exact, unless unions of windows are too many and their sum is bounded instead."""
        return self.spatial and enumerable(windows)

    def validate_windows(self, evidence: EvidenceMap, windows: Windows) -> None:
        """Raise for unbounded evidence: one cell could outweigh all others."""
        check_bounded(evidence)

    def _predict(self, evidence: EvidenceMap) -> Prediction:
        return prediction(evidence.values.sum((2, 3)), evidence.scale)

    def _certify(
        self, evidence: EvidenceMap, windows: Windows, label: Int64[Tensor, " batch"], top_k: int
    ) -> Certificate:
        return certify_sum(evidence, windows, label, top_k, spatial=self.spatial)


def check_bounded(evidence: EvidenceMap) -> None:
    """Raise for unbounded evidence: one cell could outweigh all others."""
    if not evidence.bounded:
        raise InputError(
            "a sum of unbounded evidence cannot be certified. Use kind='tanh', 'confidence' or 'vote', "
            "or give `low` and `high`."
        )


def enumerable(windows: Windows) -> bool:
    """Whether all unions of windows are enumerated; otherwise the k heaviest windows bound the heaviest union."""
    return windows.count == 1 or windows.regions <= MOST_REGIONS


def certify_sum(
    evidence: EvidenceMap, windows: Windows, label: Int64[Tensor, " batch"], top_k: int, *, spatial: bool
) -> Certificate:
    r"""Certify the plain sum. With g_k = (high - low) + (u_y - u_k) >= 0 the gap S_y - S_k loses at most g_k(w) in w.

    margin = min_k [ sum_i (u_y - u_k)(i) - max_w g_k(w) ],     spatial=False:  min_k [ ... - 2 n (high - low) ]
    """
    span = evidence.high - evidence.low
    rivals = strongest(evidence.upper.sum((2, 3)), label, evidence.classes - 1)
    gap = select(evidence.lower, label).unsqueeze(1) - gather(evidence.upper, rivals)
    total = gap.sum((2, 3)).unsqueeze(2)
    if not spatial:
        return worst_case(total - 2 * windows.largest_area * span, rivals, label, None, evidence.scale, top_k)
    loss = gap + span  # g
    if enumerable(windows):
        return worst_case(total - sums(loss, windows), rivals, label, windows, evidence.scale, top_k)
    # Too many unions: no union weighs more than the `count` heaviest windows together.
    heaviest = sums(loss, replace(windows, count=1)).topk(windows.count, dim=2)
    certificate = worst_case(total - heaviest.values.sum(2, keepdim=True), rivals, label, None, evidence.scale, top_k)
    at = ties.argmax((rivals == certificate.rival.unsqueeze(1)).long(), dim=1)
    return replace(certificate, weakest=select(heaviest.indices, at))
