"""Majority vote (de-randomized smoothing): every cell votes, the class with most votes wins."""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Int64
from torch import Tensor

from patchguard.defenses.base import Defense, prediction
from patchguard.defenses.clipped_sum import certify_sum, enumerable
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate, Prediction


@final
@dataclass(frozen=True, kw_only=True)
class MajorityVote(Defense[Certificate]):
    r"""Count votes; a cell may vote for several classes.

    Rule.     n_k = number of cells that vote for k,     label = argmax_k n_k   (ties: smallest k)
    Theorem.  Rewriting the cells of w leaves the label y if, for every k != y,
                  n_y(outside w) - n_k(outside w)  >  |w|.                                          exact
    Published rule (`spatial=False`), with n = max |w|:   n_y - n_k  >  2 n.                        sound
    """

    spatial: bool = True
    default_evidence: ClassVar[Evidence] = Evidence(kind="vote")
    checkable: ClassVar[bool] = True

    def exact(self, evidence: EvidenceMap, windows: Windows) -> bool:
        """The spatial rule is exact, unless unions of windows are too many and their sum is bounded instead."""
        return self.spatial and enumerable(windows)

    def validate_evidence(self, evidence: EvidenceMap) -> None:
        """Raise unless cells vote."""
        if not evidence.binary:
            raise InputError("a majority vote needs votes; use Evidence(kind='vote') or Evidence(kind='prediction').")

    def _predict(self, evidence: EvidenceMap) -> Prediction:
        return prediction(evidence.values.sum((2, 3)), evidence.scale)

    def _certify(
        self, evidence: EvidenceMap, windows: Windows, label: Int64[Tensor, " batch"], top_k: int
    ) -> Certificate:
        return certify_sum(evidence, windows, label, top_k, spatial=self.spatial)
