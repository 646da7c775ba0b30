"""Double masking in feature space: hide one window, then a second one, and see who disagrees."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from patchguard.defenses import ties
from patchguard.defenses.base import (
    MaskedDefense,
    boxes_of,
    gather,
    require_cover,
    select,
    strongest,
    tau_units,
    validate_masks,
    validate_tau,
    without,
)
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.defenses.window_sums import best_cover, heaviest, sums
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate, Prediction

PAIRS = {"cpu": 2**22, "cuda": 2**27}  # entries, cells or masks, that the second round looks at together


@final
@dataclass(frozen=True, kw_only=True)
class DoubleMasking(MaskedDefense[Certificate]):
    r"""Two rounds of masking; evidence may be signed.

    Rule.     l(m, m') = argmax_k S_k(outside m and m'), l(m) = l(m, m)   (ties: smallest k).
              If all l(m) agree: that label. Else let z be the label of most masks (ties: smallest). A mask m with
              l(m) = c != z is believed if l(m, m') = c for every m', and c is still the argmax outside m alone when T
              is taken off S_c. If some mask is believed: its label. Else z. T is tau in units, rounded down.
    Theorem.  If for every w some mask m that covers w has, for every k != y, (S_y - S_k)(outside m) > T and
              (S_y - S_k)(outside m and m') > 0 for every mask m', then after any attack on any w the label is y. With
              g_k = u_y - u_k the margin is
                  min over w, max over m covering w, min over k != y of
                      g_k(outside m) - max( T, max over m' of g_k(m' outside m) ):
              a second mask counts as if it took T or more away.

    `tau`, in units of evidence, is the lead behind one mask with which it may overrule the majority. On clean images a
    mask may hide the object, and what is left speaks, weakly, for another class. A larger `tau` overrules less, and
    proves less.

    The `scores` of a prediction are the plain sums S_k; the label need not be their argmax. Sound, not exact.
    `masks.count > 1` uses unions of that many boxes: several patches, at the cost of their number squared. Cost:
    certify O(M w K') for M masks of side w against the K' rivals that matter.
    """

    masks: Windows
    tau: float = 0.0
    default_evidence: ClassVar[Evidence] = Evidence(kind="logits", low=None)
    largest_top_k: ClassVar[int | None] = 1

    def __post_init__(self) -> None:
        validate_tau(self.tau)

    def with_tau(self, tau: float | None, *, new_units: bool) -> "DoubleMasking":
        """Return the rule with another `tau`; other evidence counts in other units, so that it starts from 0 there."""
        return replace(self, tau=tau or 0.0) if tau is not None or new_units else self

    def exact(self, evidence: EvidenceMap, windows: Windows) -> bool:
        """Sound only: the label may hold though no single mask proves it."""
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
        first_round = ties.argmax(seen, dim=1)  # l(m)
        votes = torch.zeros_like(total).scatter_add_(1, first_round, torch.ones_like(first_round))
        majority = ties.argmax(votes, dim=1)  # z
        lead = tau_units(self.tau, evidence)  # T
        label = majority.clone()
        images, claims = (without(majority, votes) > 0).nonzero().unbind(1)
        some = self._at_once(evidence.values, evidence.classes)
        for first in range(0, len(images), some):
            image, claim = images[first : first + some], claims[first : first + some]
            own = first_round[image] == claim.unsqueeze(1)
            believed = self._is_believed(evidence.values[image], claim, own, lead)
            # Two masks cannot both be believed for different labels: their common pair has only one.
            label[image[believed]] = claim[believed]
        return Prediction(label=label, scores=total.double() / evidence.scale)

    def _is_believed(
        self,
        values: Int64[Tensor, "some classes rows columns"],
        claim: Int64[Tensor, " some"],
        own: Bool[Tensor, "some masks"],
        lead: int,
    ) -> Bool[Tensor, " some"]:
        """Whether a mask m of its `own` has the claim for l(m, m') with every m', and for l(m) less `lead`."""
        gap = select(values, claim).unsqueeze(1) - values
        doubtful = ((self._floor(gap, lead) <= 0) & own.unsqueeze(1)).any(2)
        refuted = torch.zeros_like(own)
        images, rivals = doubtful.scatter(1, claim.unsqueeze(1), False).nonzero().unbind(1)
        some = self._at_once(gap)
        for first in range(0, len(images), some):
            image, rival = images[first : first + some], rivals[first : first + some]
            needed = (rival < claim[image]).long().unsqueeze(1)  # a tie goes to the smaller index
            place, mask = (self._worst_pair(gap[image, rival], lead) < needed).nonzero().unbind(1)
            refuted[image[place], mask] = True
        return (own & ~refuted).any(1)

    def _worst_pair(self, gap: Int64[Tensor, "*maps rows columns"], lead: int) -> Int64[Tensor, "*maps masks"]:
        """min over m' of the gap outside m and m', for every m, or what `lead` leaves outside m if that is less."""
        outside = gap.sum((-2, -1)).unsqueeze(-1) - sums(gap, self.masks)
        return outside - heaviest(gap, self.masks, self.masks).clamp(min=lead)

    def _certify(
        self, evidence: EvidenceMap, windows: Windows, label: Int64[Tensor, " batch"], top_k: int
    ) -> Certificate:
        gap = select(evidence.lower, label).unsqueeze(1) - evidence.upper
        lead = tau_units(self.tau, evidence)  # T
        rivals = self._contenders(gap, label, lead)
        pairs = self._worst_pair(gather(gap, rivals), lead)  # batch, rivals, masks
        worst = pairs.amin(1)
        covered = best_cover(worst, self.masks, windows)
        region = ties.argmin(covered, dim=1)
        margin = covered.gather(1, region.unsqueeze(1))
        # The rival is taken at a mask that attains the margin.
        mask = ties.argmax((worst == margin).long(), dim=1)
        there = pairs.gather(2, mask.view(-1, 1, 1).expand(-1, pairs.shape[1], 1)).squeeze(2)
        return Certificate(
            label=label,
            margin=margin.squeeze(1).double() / evidence.scale,
            weakest=boxes_of(region, windows),
            rival=rivals.gather(1, ties.argmin(there, dim=1).unsqueeze(1)).squeeze(1),
        )

    def _contenders(self, gap: Tensor, label: Tensor, lead: int) -> Int64[Tensor, "batch some"]:
        """The rivals that can come closest: at their conceivable worst no better than the runner-up at its actual."""
        runner_up = strongest(-gap.sum((2, 3)), label, 1)
        reference = self._worst_pair(gather(gap, runner_up), lead)
        return self._select_rivals((self._floor(gap, lead) <= reference).any(2).long(), label)

    def _floor(self, gap: Tensor, lead: int) -> Int64[Tensor, "batch classes masks"]:
        """A quick lower bound of `_worst_pair`: a second mask removes at most the heaviest sum of positive gaps."""
        outside = gap.sum((2, 3)).unsqueeze(2) - sums(gap, self.masks)
        return outside - sums(gap.clamp(min=0), self.masks).amax(2, keepdim=True).clamp(min=lead)

    def _select_rivals(self, matters: Int64[Tensor, "batch classes"], label: Tensor) -> Int64[Tensor, "batch some"]:
        return strongest(matters, label, int(without(label, matters).clamp(min=0).sum(1).max()))

    def _at_once(self, values: Tensor, classes: int = 1) -> int:
        """How many maps, or images of several classes, the second round looks at together: bounds the memory."""
        most = PAIRS.get(values.device.type, PAIRS["cuda"])
        return max(1, most // (classes * max(values.shape[2] * values.shape[3], self.masks.regions)))
