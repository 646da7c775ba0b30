"""Masked agreement: keep the plain label, and raise an alert when hiding one window gives another one."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

from jaxtyping import Int64
from torch import Tensor

from patchguard.defenses import ties
from patchguard.defenses.base import (
    MaskedDefense,
    boxes_of,
    gather,
    prediction,
    require_cover,
    select,
    strongest,
    tau_units,
    validate_masks,
    validate_tau,
)
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.defenses.window_sums import best_cover, sums
from patchguard.geometry.windows import Windows
from patchguard.guard import DetectionCertificate, Prediction


@final
@dataclass(frozen=True, kw_only=True)
class MaskedAgreement(MaskedDefense[DetectionCertificate]):
    r"""Detect, do not repair.

    Rule.     label = argmax_k S_k;  alert iff for some mask v the label outside v differs from it, with
              (first - second score outside v) > tau.
    Theorem.  If for every w some mask v that covers w has  S_y(outside v) - S_k(outside v) > tau  for all k != y,
              then after any attack on any w the answer is y or an alert is raised.

    The statement is weaker than the other defenses': see `DetectionCertificate`.
    """

    masks: Windows
    tau: float = 0.0
    default_evidence: ClassVar[Evidence] = Evidence(kind="logits", low=None)
    largest_top_k: ClassVar[int | None] = 1
    detects: ClassVar[bool] = True
    checkable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        validate_tau(self.tau)

    def with_tau(self, tau: float | None, *, new_units: bool) -> "MaskedAgreement":
        """Return the rule with another `tau`; other evidence counts in other units, so that it starts from 0 there."""
        return replace(self, tau=tau or 0.0) if tau is not None or new_units else self

    def exact(self, evidence: EvidenceMap, windows: Windows) -> bool:
        """Sound: another mask may raise the alert."""
        return False

    def validate_windows(self, evidence: EvidenceMap, windows: Windows) -> None:
        """Raise where a window lies in no mask: the theorem needs one, bounded evidence or not."""
        require_cover(self.masks, windows)

    def validate_evidence(self, evidence: EvidenceMap) -> None:
        """Raise unless the masks lie on the grid."""
        validate_masks(self.masks, evidence)

    def _predict(self, evidence: EvidenceMap) -> Prediction:
        total = evidence.values.sum((2, 3))
        seen = total.unsqueeze(2) - sums(evidence.values, self.masks)  # batch, classes, masks
        first, second = seen.topk(2, dim=1).values.unbind(1)
        other = ties.argmax(seen, dim=1) != ties.argmax(total, dim=1).unsqueeze(1)
        alert = (other & (first - second > tau_units(self.tau, evidence))).any(1)
        return prediction(total, evidence.scale, alert=alert)

    def _certify(
        self, evidence: EvidenceMap, windows: Windows, label: Int64[Tensor, " batch"], top_k: int
    ) -> DetectionCertificate:
        rivals = strongest(evidence.upper.sum((2, 3)), label, evidence.classes - 1)
        gap = select(evidence.lower, label).unsqueeze(1) - gather(evidence.upper, rivals)
        seen = gap.sum((2, 3)).unsqueeze(2) - sums(gap, self.masks)  # batch, rivals, masks
        worst = seen.amin(1)
        covered = best_cover(worst, self.masks, windows)
        region = ties.argmin(covered, dim=1)
        margin = covered.gather(1, region.unsqueeze(1)).squeeze(1)
        # The rival is taken at a mask that attains the margin; it covers the weakest region.
        mask = ties.argmax((worst == margin.unsqueeze(1)).long(), dim=1)
        rival = rivals.gather(1, ties.argmin(select(seen.mT, mask), dim=1).unsqueeze(1)).squeeze(1)
        return DetectionCertificate(
            label=label,
            margin=(margin - tau_units(self.tau, evidence)).double() / evidence.scale,
            weakest=boxes_of(region, windows),
            rival=rival,
            alert=self._predict(evidence).alert.bool(),  # type: ignore[union-attr]
        )
