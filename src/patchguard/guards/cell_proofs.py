"""Predictions and certificates of one batch from its evidence, each computed once however often it is asked for."""

from typing import TYPE_CHECKING, Any, final

from jaxtyping import Int64
from torch import Tensor

from patchguard.defenses.base import Defense
from patchguard.defenses.evidence import EvidenceMap
from patchguard.geometry.windows import Windows
from patchguard.guard import AnyCertificate, Prediction, bisect_sides, require_label
from patchguard.patch import Patch

if TYPE_CHECKING:
    from patchguard.guards.local import LocalGuard


@final
class CellProofs:
    """What guards that share the evidence of a batch say about it, for source images of one size."""

    def __init__(self, evidence: EvidenceMap, size: tuple[int, int], top_k: int = 1) -> None:
        self.evidence, self.size, self.top_k = evidence, size, top_k
        self._predictions: dict[Defense[Any], Prediction] = {}
        self._certificates: dict[tuple[Defense[Any], Windows], AnyCertificate] = {}

    def prediction(self, guard: "LocalGuard[Any]") -> Prediction:
        """Return the defended labels."""
        if guard.defense not in self._predictions:
            self._predictions[guard.defense] = guard.defense.predict(self.evidence)
        return self._predictions[guard.defense]

    def certificate(self, guard: "LocalGuard[Any]", patch: Patch) -> AnyCertificate:
        """Return the certificates of the defended labels."""
        key = (guard.defense, guard.windows(patch, *self.size))
        if key not in self._certificates:
            label = self.prediction(guard).label
            self._certificates[key] = guard.defense.certify(self.evidence, key[1], label, self.top_k)
        return self._certificates[key]

    def largest(self, guard: "LocalGuard[Any]", limit: int, known: tuple[int, ...] = ()) -> Int64[Tensor, " batch"]:
        """Return the largest side up to `limit` that each image is certified against; `known` sides are computed."""
        label = self.prediction(guard).label

        def proves(rows: Tensor, side: int) -> Tensor:
            windows = guard.windows(Patch(side), *self.size)
            if (guard.defense, windows) in self._certificates:
                return require_label(self._certificates[guard.defense, windows]).certified[rows]
            certificate = guard.defense.certify(self.evidence[rows], windows, label[rows], self.top_k)
            return require_label(certificate).certified

        return bisect_sides(label, limit, proves, known)
