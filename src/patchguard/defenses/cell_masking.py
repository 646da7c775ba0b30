"""Cell masking: hide, class by class, the strongest cells, wherever they lie."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

from jaxtyping import Int64
from torch import Tensor

from patchguard.defenses.base import Defense
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.defenses.order_statistics import cells_of, certify_ranks, check_ranks, predict_ranks
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate, Prediction


@final
@dataclass(frozen=True, kw_only=True)
class CellMasking(Defense[Certificate]):
    r"""Mask the `cells` strongest cells of each class: any number of patches, anywhere.

    Rule.     s_k = sum of the N - cells smallest u_k(i),     label = argmax_k s_k   (ties: smallest k)
    Theorem.  With o_k the cells outside w in ascending order and N0 = N - cells, an attack on w keeps
                  s_y >= sum of o_y(r) for r = 1 .. N0 - |w|   (plus low |w|),
                  s_k <= sum of o_k(r) for r = 1 .. N0         if |w| <= cells,
                         sum of o_k + high (|w| - cells)       otherwise,
              both attained at once: exact. `spatial=False` replaces o by all cells and shifts the ranks by
              n = max |w|: sound for any n cells anywhere, O(K N log N).
    """

    cells: int
    spatial: bool = True
    default_evidence: ClassVar[Evidence] = Evidence(kind="logits", low=0.0)

    def __post_init__(self) -> None:
        if isinstance(self.cells, bool) or not isinstance(self.cells, int) or self.cells < 0:
            raise InputError(f"`cells` must be a whole number of at least 0; got {self.cells!r}.")

    @classmethod
    def fitted(cls, windows: Windows) -> "CellMasking":
        """Mask as many cells as the largest window has."""
        return cls(cells=windows.largest_area)

    def fit_to(self, windows: Windows) -> "CellMasking":
        """Mask as many cells as the largest window has."""
        return replace(self, cells=windows.largest_area)

    def ranks(self, cells: int) -> tuple[int, int]:
        """First and last rank that count, from 1."""
        return 1, cells - self.cells

    def exact(self, evidence: EvidenceMap, windows: Windows) -> bool:
        """The spatial certificate is exact."""
        return self.spatial

    def validate_windows(self, evidence: EvidenceMap, windows: Windows) -> None:
        """Raise where an attack owns more cells than are masked and the evidence is unbounded."""
        check_ranks(evidence, windows, self.ranks(cells_of(evidence)))

    def validate_evidence(self, evidence: EvidenceMap) -> None:
        """Raise where no cell would be left."""
        if self.cells >= cells_of(evidence):
            raise InputError(f"`cells` must leave some of the {cells_of(evidence)} cells; got {self.cells}. Lower it.")

    def _predict(self, evidence: EvidenceMap) -> Prediction:
        return predict_ranks(evidence, self.ranks(cells_of(evidence)))

    def _certify(
        self, evidence: EvidenceMap, windows: Windows, label: Int64[Tensor, " batch"], top_k: int
    ) -> Certificate:
        return certify_ranks(evidence, windows, label, top_k, self.ranks(cells_of(evidence)), spatial=self.spatial)
