"""The undefended baseline: the plain sum or mean of local logits."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Int64
from torch import Tensor

from patchguard.defenses.base import Defense, prediction
from patchguard.defenses.clipped_sum import certify_sum
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate, Prediction


@final
@dataclass(frozen=True, kw_only=True)
class Undefended(Defense[Certificate]):
    r"""Add up, or average, the evidence, as an ordinary network does.

    Rule.     S_k = sum_i u_k(i)   (`mean=True`: divided by the number of cells),     label = argmax_k S_k
    Theorem.  None: `certify` certifies nothing. Its weakest region and rival are those of `ClippedSum`.

    The default evidence is signed and unclipped; give Evidence(low=0.0, high=...) to study clipping.
    """

    mean: bool = False
    default_evidence: ClassVar[Evidence] = Evidence(kind="logits", low=None)
    defends: ClassVar[bool] = False

    def exact(self, evidence: EvidenceMap, windows: Windows) -> bool:
        """Margins are minus infinity whether or not an attack exists."""
        return False

    def _predict(self, evidence: EvidenceMap) -> Prediction:
        cells = evidence.grid[0] * evidence.grid[1]
        return prediction(evidence.values.sum((2, 3)), evidence.scale * (cells if self.mean else 1))

    def _certify(
        self, evidence: EvidenceMap, windows: Windows, label: Int64[Tensor, " batch"], top_k: int
    ) -> Certificate:
        aimed = certify_sum(evidence, windows, label, top_k, spatial=True)
        return replace(aimed, margin=torch.full_like(aimed.margin, -torch.inf))
