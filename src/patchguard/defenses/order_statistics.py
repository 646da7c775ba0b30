"""Order statistics: score a class by cells of middling evidence, whose ranks an attack can only shift."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from patchguard.defenses.base import Defense, contenders, gather, prediction, select, strongest, worst_case
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.errors import InputError
from patchguard.geometry.windows import Windows
from patchguard.guard import Certificate, Prediction

ELEMENTS = 2**22  # entries sorted at once


@final
@dataclass(frozen=True, kw_only=True)
class Median(Defense[Certificate]):
    r"""Score a class by the r-th smallest of its N cells, r = ceil(N / 2); no averaging.

    Rule.     s_k = u_k(r),     label = argmax_k s_k   (ties: smallest k)
    Theorem.  With o_k the cells outside w in ascending order, an attack on w keeps
                  s_y >= o_y(r - |w|)  (low if r <= |w|),      s_k <= o_k(r)  (high if r > N - |w|),
              both attained at once: exact. `spatial=False` replaces o by all cells and shifts the ranks by
              n = max |w|: sound for any n cells anywhere, O(K N log N).

    Cost of the spatial certificate: one sort of N cells per region and rival that matters; unions of several windows
    are enumerated.
    """

    spatial: bool = True
    default_evidence: ClassVar[Evidence] = Evidence(kind="logits", low=None)

    def ranks(self, cells: int) -> tuple[int, int]:
        """First and last rank that count, from 1."""
        middle = (cells + 1) // 2
        return middle, middle

    def exact(self, evidence: EvidenceMap, windows: Windows) -> bool:
        """The spatial certificate is exact."""
        return self.spatial

    def validate_windows(self, evidence: EvidenceMap, windows: Windows) -> None:
        """Raise where an attack reaches the counted ranks and the evidence is unbounded."""
        check_ranks(evidence, windows, self.ranks(cells_of(evidence)))

    def _predict(self, evidence: EvidenceMap) -> Prediction:
        return predict_ranks(evidence, self.ranks(cells_of(evidence)))

    def _certify(
        self, evidence: EvidenceMap, windows: Windows, label: Int64[Tensor, " batch"], top_k: int
    ) -> Certificate:
        return certify_ranks(evidence, windows, label, top_k, self.ranks(cells_of(evidence)), spatial=self.spatial)


@final
@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Defense[Certificate]):
    r"""Drop the `trim` smallest and the `trim` largest cells of each class and add up the rest.

    Rule.     s_k = sum of u_k(r) for r = trim + 1 .. N - trim,     label = argmax_k s_k   (ties: smallest k)
    Theorem.  With o_k the cells outside w in ascending order and |w| <= trim, an attack on w keeps
                  s_y >= sum of o_y(r) for r = trim - |w| + 1 .. N - |w| - trim,
                  s_k <= sum of o_k(r) for r = trim + 1 .. N - trim,
              both attained at once: exact. (For |w| > trim, cells of w count as low and high.)
              `spatial=False` replaces o by all cells and shifts the ranks by n = max |w|: sound, O(K N log N).
    """

    trim: int
    spatial: bool = True
    default_evidence: ClassVar[Evidence] = Evidence(kind="logits", low=None)

    def __post_init__(self) -> None:
        if isinstance(self.trim, bool) or not isinstance(self.trim, int) or self.trim < 0:
            raise InputError(f"`trim` must be a whole number of at least 0; got {self.trim!r}.")

    @classmethod
    def fitted(cls, windows: Windows) -> "TrimmedMean":
        """Drop as many cells on each side as the largest window has."""
        return cls(trim=windows.largest_area)

    def fit_to(self, windows: Windows) -> "TrimmedMean":
        """Drop as many cells on each side as the largest window has."""
        return replace(self, trim=windows.largest_area)

    def ranks(self, cells: int) -> tuple[int, int]:
        """First and last rank that count, from 1."""
        return self.trim + 1, cells - self.trim

    def exact(self, evidence: EvidenceMap, windows: Windows) -> bool:
        """The spatial certificate is exact."""
        return self.spatial

    def validate_windows(self, evidence: EvidenceMap, windows: Windows) -> None:
        """Raise where an attack reaches the counted ranks and the evidence is unbounded."""
        check_ranks(evidence, windows, self.ranks(cells_of(evidence)))

    def validate_evidence(self, evidence: EvidenceMap) -> None:
        """Raise where no cell would be left."""
        if 2 * self.trim >= cells_of(evidence):
            raise InputError(
                f"`trim` must leave some of the {cells_of(evidence)} cells; got {self.trim} on each side. Lower it."
            )

    def _predict(self, evidence: EvidenceMap) -> Prediction:
        return predict_ranks(evidence, self.ranks(cells_of(evidence)))

    def _certify(
        self, evidence: EvidenceMap, windows: Windows, label: Int64[Tensor, " batch"], top_k: int
    ) -> Certificate:
        return certify_ranks(evidence, windows, label, top_k, self.ranks(cells_of(evidence)), spatial=self.spatial)


def cells_of(evidence: EvidenceMap) -> int:
    """Number of cells N."""
    return evidence.grid[0] * evidence.grid[1]


def check_ranks(evidence: EvidenceMap, windows: Windows, ranks: tuple[int, int]) -> None:
    """Raise where an attack can reach a counted rank from above and the evidence is unbounded."""
    spared = cells_of(evidence) - ranks[1]
    if windows.largest_area > spared and not evidence.bounded:
        raise InputError(
            f"an attack on {windows.largest_area} cells reaches scores that set aside only the {spared} highest cells, "
            "so nothing can be certified. Set more cells aside, or bound the evidence (`high`)."
        )


def predict_ranks(evidence: EvidenceMap, ranks: tuple[int, int]) -> Prediction:
    """Score each class by the sum of the cells of ranks first .. last."""
    return prediction(_rank_sum(evidence.values.flatten(2), ranks), evidence.scale)


def certify_ranks(
    evidence: EvidenceMap,
    windows: Windows,
    label: Int64[Tensor, " batch"],
    top_k: int,
    ranks: tuple[int, int],
    *,
    spatial: bool,
) -> Certificate:
    """Certify a sum over ranks. It grows with every cell, so the worst contents of w are all low (y), all high (k)."""
    least = select(evidence.lower, label).flatten(1)
    ceiling = _shifted_sum(evidence.upper.flatten(2), ranks, windows.largest_area, evidence.high)
    if not spatial:
        lower = -_shifted_sum(-least, _mirror_ranks(ranks, cells_of(evidence)), windows.largest_area, -evidence.low)
        rivals = strongest(ceiling, label, evidence.classes - 1)
        margins = (lower.unsqueeze(1) - ceiling.gather(1, rivals)).unsqueeze(2)
        return worst_case(margins, rivals, label, None, evidence.scale, top_k)
    owned = torch.from_numpy(windows.cells).to(label.device)
    lower = _filled_sum(least, owned, evidence.low, ranks)
    top = gather(evidence.upper, strongest(ceiling, label, top_k)).flatten(2)
    reached = _filled_sum(top, owned, evidence.high, ranks).amin((1, 2))
    rivals = contenders(ceiling, reached, label, top_k)
    upper = _filled_sum(gather(evidence.upper, rivals).flatten(2), owned, evidence.high, ranks)
    return worst_case(lower.unsqueeze(1) - upper, rivals, label, windows, evidence.scale, top_k)


def _rank_sum(cells: Int64[Tensor, "*maps cells"], ranks: tuple[int, int]) -> Int64[Tensor, "*maps"]:
    return ascending(cells)[..., ranks[0] - 1 : ranks[1]].sum(-1)


def ascending(cells: Int[Tensor, "*maps cells"]) -> Int[Tensor, "*maps cells"]:
    """Sort the cells; on a CPU by NumPy, which is several times faster."""
    return torch.from_numpy(np.sort(cells.numpy())) if cells.device.type == "cpu" else cells.sort(dim=-1).values


def _filled_sum(
    maps: Int64[Tensor, "*maps cells"], owned: Tensor, fill: int, ranks: tuple[int, int]
) -> Int64[Tensor, "*maps regions"]:
    """The rank sum once every cell of a region holds `fill`, for each region."""
    some = max(1, ELEMENTS // maps.numel())
    parts = [
        _rank_sum(torch.where(owned[first : first + some], fill, maps.unsqueeze(-2)), ranks)
        for first in range(0, len(owned), some)
    ]
    return torch.cat(parts, dim=-1)


def _shifted_sum(cells: Tensor, ranks: tuple[int, int], shift: int, fill: int) -> Tensor:
    """The rank sum after the `shift` smallest cells became `fill`, the largest value: no attack can do better."""
    count = cells.shape[-1]
    first, last = ranks[0] + shift, ranks[1] + shift
    counted = ascending(cells)[..., first - 1 : last].sum(-1)
    return counted + fill * (last - max(count, first - 1) if last > count else 0)


def _mirror_ranks(ranks: tuple[int, int], cells: int) -> tuple[int, int]:
    """The same ranks, counted from the other end."""
    return cells + 1 - ranks[1], cells + 1 - ranks[0]
