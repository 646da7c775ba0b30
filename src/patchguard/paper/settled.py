"""`Sheet`: which images a rule gets right and proves, without margins: tables need only signs, found much faster.

Sums over windows are computed once for all questions about a batch, and pairs of windows are searched only in images
that quick bounds leave open. Every answer is the defense's own; the tests compare them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from patchguard.defenses import (
    CellMasking,
    ClippedSum,
    DoubleMasking,
    MajorityVote,
    Median,
    RobustMasking,
    TrimmedMean,
    ties,
)
from patchguard.defenses.base import Defense, select, tau_units
from patchguard.defenses.clipped_sum import enumerable
from patchguard.defenses.evidence import EvidenceMap
from patchguard.defenses.order_statistics import ascending, cells_of
from patchguard.defenses.window_products import integral_image, nothing
from patchguard.defenses.window_sums import best_cover, heaviest, heaviest_union, sums
from patchguard.geometry.windows import Windows

SHORT = 2**27  # of a gap's absolute values: nine times it, and `nothing` with three times it, still fit 32 bits
MAPS = {"cpu": 256, "cuda": 4096}  # maps whose pairs or unions of windows are searched together


@final
@dataclass(frozen=True, eq=False)
class Sheet:
    """The evidence of one batch, its true classes, and what several questions about them share."""

    evidence: EvidenceMap
    targets: Int64[Tensor, " batch"]
    _tables: dict[tuple[bool, bool], Tensor] = field(default_factory=dict, repr=False)
    _lead_tables: dict[tuple[bool, bool], Tensor] = field(default_factory=dict, repr=False)
    _sums: dict[Windows, Tensor] = field(default_factory=dict, repr=False)
    _right: dict[tuple[Defense[Any], int], Tensor] = field(default_factory=dict, repr=False)
    _ranked: dict[tuple[Windows, Windows], Tensor] = field(default_factory=dict, repr=False)

    def right(self, defense: Defense[Any], top_k: int = 1) -> Bool[Tensor, " batch"]:
        """Whether the true class is the label, or among the k best."""
        if (defense, top_k) not in self._right:
            self._right[defense, top_k] = self._is_right(defense, top_k)
        return self._right[defense, top_k]

    def proved(self, defense: Defense[Any], windows: Windows, top_k: int = 1) -> Bool[Tensor, " batch"]:
        """Whether that is so and no contents of any window change it; nothing is computed for wrong labels."""
        defense.validate(self.evidence, windows, top_k)
        right = self.right(defense, top_k)
        still = self.evidence.lower is self.evidence.values is self.evidence.upper  # no drift
        if still and bool(self.evidence.finite.all()):
            quick = None
            if isinstance(defense, DoubleMasking) and top_k == 1:
                quick = self._doubly_masked(defense, windows, right)
            elif isinstance(defense, RobustMasking) and defense.threshold == 0:
                quick = self._masked(defense.masks, windows, top_k, right)
            elif isinstance(defense, ClippedSum | MajorityVote) and defense.spatial and top_k == 1:
                quick = self._summed(windows, right) if windows.count > 1 else None
            elif isinstance(defense, CellMasking | Median | TrimmedMean) and not defense.spatial and top_k == 1:
                quick = self._rank_proved(defense, windows.largest_area)
            if quick is not None:
                return right & quick
        found = torch.zeros_like(right)
        places = right.nonzero().squeeze(1)
        if len(places):
            proof = defense.certify(self.evidence[places], windows, self.targets[places], top_k)
            found[places] = proof.certified
        return found

    # -- labels --------------------------------------------------------------------------------------------------------

    def _is_right(self, defense: Defense[Any], top_k: int) -> Bool[Tensor, " batch"]:
        if isinstance(defense, DoubleMasking) and top_k == 1:
            return self._double_right(defense)
        if isinstance(defense, RobustMasking) and defense.threshold == 0:
            scores = self._total - self._over(defense.masks).amax(2)
            return among_best(scores, self.targets, top_k)
        if isinstance(defense, CellMasking | Median | TrimmedMean):
            defense.validate_evidence(self.evidence)
            return among_best(self._rank_sums(*defense.ranks(cells_of(self.evidence))), self.targets, top_k)
        answer = defense.predict(self.evidence)
        return answer.label == self.targets if top_k == 1 else among_best(answer.scores, self.targets, top_k)

    def _double_right(self, defense: DoubleMasking) -> Bool[Tensor, " batch"]:
        """Whether double masking gives the true class.

        Masks of the first round mostly agree. Where they do not, the label of most of them stands unless a mask for
        another one is never contradicted in the second round; nearly all are, by the mask that hurts them most.
        """
        masks = defense.masks
        first_round = ties.argmax(self._total.unsqueeze(2) - self._over(masks), dim=1)
        votes = self._total.new_zeros(self._total.shape, dtype=torch.int64)
        votes.scatter_add_(1, first_round, torch.ones_like(first_round))
        majority = ties.argmax(votes, dim=1)
        right = majority == self.targets
        others = torch.arange(votes.shape[1], device=votes.device) != majority.unsqueeze(1)
        true = torch.nn.functional.one_hot(self.targets, votes.shape[1]).bool()
        # A wrong majority is put right only by the true class, a right one is overruled by any other.
        images, claims = ((votes > 0) & others & (right.unsqueeze(1) | true)).nonzero().unbind(1)
        if masks.count == 1 and not any(masks.wrap):
            chosen = [
                self._withstands(defense, first_round, each, claim, majority[each])
                for each, claim in zip(*(torch.split(these, self._at_once) for these in (images, claims)), strict=True)
            ]
            images = images[torch.cat(chosen)]
        images = torch.unique(images)
        if len(images):
            right[images] = defense.predict(self.evidence[images]).label == self.targets[images]
        return right

    def _withstands(
        self, defense: DoubleMasking, first_round: Tensor, images: Tensor, claims: Tensor, majority: Tensor
    ) -> Bool[Tensor, " some"]:
        """Whether some mask for `claims` keeps it ahead of the majority's label: by T, and with one bad second mask."""
        masks, lead = defense.masks, self._lead_of(defense)
        gap = self._values[images, claims] - self._values[images, majority]
        inside = self._over(masks)[images, claims] - self._over(masks)[images, majority]
        whole, needed = gap.sum((1, 2), dtype=gap.dtype).unsqueeze(1), (majority < claims).long().unsqueeze(1)
        ahead = (whole - inside - lead >= needed) & (whole - hidden(gap, inside, masks) >= needed)
        return (ahead & (first_round[images] == claims.unsqueeze(1))).any(1)

    # -- proofs --------------------------------------------------------------------------------------------------------

    def _masked(
        self, masks: Windows, windows: Windows, top_k: int, right: Bool[Tensor, " batch"]
    ) -> Bool[Tensor, " batch"] | None:
        """`RobustMasking(masks).certify(evidence, windows, targets, top_k).certified` of right labels, without drift.

        In the symbols of the theorem, certified means: in every window, t_y - D_k > max_v a_y(v) for all but k - 1
        rivals. That maximum is at most the heaviest mask H, and at least H less what y has in the window. D_k is t_k
        for masks that are the windows, all of one size: no mask outweighs a window that is filled up. Of unions, which
        are smaller where boxes overlap, the largest decide: who owns one of them owns those inside it. For larger masks
        D_k is what the heaviest covering mask leaves of the whole, where a row or a column of the window, filled up to
        the ceiling, outweighs any mask: a mask that does not cover the window misses one. None where no case holds.
        """
        inside, over, total = self._over(windows), self._over(masks), self._total.unsqueeze(2)
        deciding: slice | Tensor = slice(None)
        narrowest = min(stop - start for start, stop in (*windows.rows, *windows.columns))
        if masks == windows and windows.equal_boxes:
            highest = total - inside
        elif masks == windows and windows.count > 1 and (largest := largest_unions(windows)) is not None:
            deciding = largest.to(inside.device)
            inside = inside[:, :, deciding]
            highest = total - inside
        elif (
            not self.evidence.bounded
            and masks.count == windows.count == 1
            and masks.cover(windows)
            and int(over.max()) < self.evidence.high * narrowest
        ):
            highest = total - best_cover(over.flatten(0, 1), masks, windows).view(*over.shape[:2], -1)
        else:
            return None
        rival = self._rivals(masks, windows, highest, top_k)
        mine = select(inside, self.targets)
        room = select(self._total, self.targets).unsqueeze(1) - mine - rival
        heavy = select(over, self.targets).amax(1)
        proved = room.amin(1) > heavy
        failed = (room <= (heavy.unsqueeze(1) - mine).clamp(min=0)).any(1)
        for places in self._in_parts(right & ~proved & ~failed):
            least = self._values[places, self.targets[places]]
            proved[places] = (room[places] > heaviest(least, masks, windows)[:, deciding]).all(1)
        return proved

    def _rivals(
        self, masks: Windows, windows: Windows, highest: Int[Tensor, "batch classes regions"], top_k: int
    ) -> Int[Tensor, "batch regions"]:
        """The k-th largest of the rivals' bounds in every window; sorted once for all k above 1."""
        key = masks, windows
        if key not in self._ranked:
            own = self.targets.view(-1, 1, 1).expand(-1, 1, highest.shape[2])
            others = highest.scatter(1, own, nothing(highest.dtype))
            if top_k == 1:
                return others.amax(1)
            self._ranked[key] = others.sort(dim=1, descending=True).values
        return self._ranked[key][:, top_k - 1]

    def _doubly_masked(
        self, defense: DoubleMasking, windows: Windows, right: Bool[Tensor, " batch"]
    ) -> Bool[Tensor, " batch"] | None:
        """`defense.certify(evidence, windows, targets).certified` of right labels, without drift.

        With g_k = u_y - u_k, equal boxes cover only themselves, so certified means: for all rivals k, g_k exceeds T
        outside every mask and 0 outside every pair. Surely so where what one mask leaves exceeds T and all that a
        second one could hide. Only what lies between is searched: first the closest rival, which settles most images
        that are not certified, then the others. None for other masks.
        """
        masks = defense.masks
        if not (masks == windows and windows.equal_boxes):
            return None
        seen = self._total.unsqueeze(2) - self._over(masks)
        outside = select(seen, self.targets).unsqueeze(1) - seen  # batch, classes, masks
        least = outside.amin(2)
        rival = ~torch.nn.functional.one_hot(self.targets, least.shape[1]).bool()
        proved = right & ~((least <= self._lead_of(defense)) & rival).any(1)
        between = (least <= self._most(masks)) & rival & proved.unsqueeze(1)
        for some in closest_first(between, least):
            self._refute(some, outside, masks, proved)
        return proved

    def _refute(
        self,
        some: Bool[Tensor, "batch classes"],
        outside: Int[Tensor, "batch classes masks"],
        masks: Windows,
        proved: Bool[Tensor, " batch"],
    ) -> None:
        """Take back `proved` of images that lose to one of `some` rivals outside two masks."""
        if masks.count == 1 and not any(masks.wrap):  # the mask that hides most, with any other, is quickly looked at
            for image, against in self._pairs(some & proved.unsqueeze(1)):
                gap, left = self._gap[image, against], outside[image, against]
                whole = gap.sum((1, 2), dtype=gap.dtype).unsqueeze(1)
                proved[image[(whole - hidden(gap, whole - left, masks)).amin(1) <= 0]] = False
        for image, against in self._pairs(some & proved.unsqueeze(1)):
            worst = (outside[image, against] - heaviest(self._gap[image, against], masks, masks)).amin(1)
            proved[image[worst <= 0]] = False

    def _summed(self, windows: Windows, right: Bool[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """`ClippedSum().certify(evidence, windows, targets).certified` of right labels, for unions of windows.

        Certified means: S_y - S_k exceeds what any union can take of it. No union takes more than its heaviest boxes
        together, which is all that counts where unions are too many, and some union takes as much as the heaviest box
        alone. Only what lies between is searched, the closest rival first.
        """
        boxes = replace(windows, count=1)
        inside, span = self._over(boxes), self.evidence.high - self.evidence.low
        areas = torch.from_numpy(boxes.areas).to(inside.device)
        loss = select(inside, self.targets).unsqueeze(1) - inside + span * areas  # never negative
        gap = select(self._total, self.targets).unsqueeze(1) - self._total
        rival = ~torch.nn.functional.one_hot(self.targets, gap.shape[1]).bool()
        safe = (gap > loss.topk(min(windows.count, loss.shape[2]), dim=2).values.sum(2)) | ~rival
        if not enumerable(windows):
            return safe.all(1)
        proved = right & ~((gap <= loss.amax(2)) & rival).any(1)
        for some in closest_first(~safe, gap):
            for image, against in self._pairs(some & proved.unsqueeze(1)):
                taken = self.evidence.values[image, self.targets[image]] - self.evidence.values[image, against] + span
                proved[image[gap[image, against] <= heaviest_union(taken, windows)]] = False
        return proved

    def _rank_proved(self, defense: CellMasking | Median | TrimmedMean, shift: int) -> Bool[Tensor, " batch"]:
        """The position-free `certify(evidence, windows, targets).certified`: ranks shifted by the cells of a window."""
        first, last = defense.ranks(cells_of(self.evidence))
        upper = self._rank_sums(first + shift, last + shift)
        lower = select(self._rank_sums(first - shift, last - shift), self.targets).unsqueeze(1)
        own = torch.nn.functional.one_hot(self.targets, upper.shape[1]).bool()
        return ((lower > upper) | own).all(1)

    def _rank_sums(self, first: int, last: int) -> Int64[Tensor, "batch classes"]:
        """The sum of the cells of ranks first to last; below the smallest cell lies `low`, above the largest `high`."""
        count, table = cells_of(self.evidence), self._ascending_sums
        below, above = max(0, min(last, 0) - first + 1), max(0, last - max(first - 1, count))
        inside = table[..., min(max(last, 0), count)] - table[..., min(max(first - 1, 0), count)]
        return inside + below * self.evidence.low + above * self.evidence.high

    # -- parts ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _values(self) -> Int[Tensor, "batch classes rows columns"]:
        return short(self.evidence.values)

    @cached_property
    def _total(self) -> Int[Tensor, "batch classes"]:
        return self._values.sum((2, 3), dtype=self._values.dtype)

    def _lead_of(self, defense: DoubleMasking) -> int:
        """T, or what no sum reaches, if that is less."""
        return min(tau_units(defense.tau, self.evidence), -nothing(self._values.dtype))

    @cached_property
    def _ascending_sums(self) -> Int64[Tensor, "batch classes ranks"]:
        """The sum of the smallest cells of a class, for every number of them."""
        cells = self._values.flatten(2)
        return torch.nn.functional.pad(ascending(cells).cumsum(2, dtype=torch.int64), (1, 0))

    @cached_property
    def _gap(self) -> Int[Tensor, "batch classes rows columns"]:
        """g_k = u_y - u_k."""
        return select(self._values, self.targets).unsqueeze(1) - self._values

    @cached_property
    def _lead(self) -> Int[Tensor, "batch classes rows columns"]:
        return self._gap.clamp(min=0)

    def _most(self, masks: Windows) -> Int[Tensor, "batch classes"]:
        """The most that a mask can hide of what is positive in g_k."""
        if masks.wrap not in self._lead_tables:
            self._lead_tables[masks.wrap] = integral_image(self._lead.flatten(0, 1), masks.wrap)
        return sums(self._lead, masks, self._lead_tables[masks.wrap]).amax(2)

    def _over(self, windows: Windows) -> Int[Tensor, "batch classes regions"]:
        if windows not in self._sums:
            if windows.wrap not in self._tables:
                self._tables[windows.wrap] = integral_image(self._values.flatten(0, 1), windows.wrap)
            self._sums[windows] = sums(self._values, windows, self._tables[windows.wrap])
        return self._sums[windows]

    def _in_parts(self, chosen: Bool[Tensor, " batch"]) -> tuple[Int64[Tensor, " some"], ...]:
        places = chosen.nonzero().squeeze(1)
        return torch.split(places, self._at_once) if len(places) else ()

    def _pairs(self, chosen: Bool[Tensor, "batch classes"]) -> Iterator[tuple[Tensor, Tensor]]:
        """Image and class of what is chosen, some at a time."""
        images, classes = chosen.nonzero().unbind(1)
        for first in range(0, len(images), self._at_once):
            yield images[first : first + self._at_once], classes[first : first + self._at_once]

    @property
    def _at_once(self) -> int:
        return MAPS.get(self.targets.device.type, MAPS["cuda"])


def short(values: Int64[Tensor, "batch classes rows columns"]) -> Int[Tensor, "batch classes rows columns"]:
    """Return evidence in 32 bits where no sum of differences of two classes comes near their end: twice as fast."""
    return values.int() if 2 * int(values.abs().sum((2, 3)).max()) < SHORT else values


def closest_first(
    rivals: Bool[Tensor, "batch classes"], lead: Int[Tensor, "batch classes"]
) -> tuple[Bool[Tensor, "batch classes"], Bool[Tensor, "batch classes"]]:
    """Return, of each image's rivals, the one with the smallest lead before it, and the others."""
    closest = ties.argmin(lead.masked_fill(~rivals, torch.iinfo(lead.dtype).max), dim=1).unsqueeze(1)
    first = torch.zeros_like(rivals).scatter_(1, closest, True)
    return rivals & first, rivals & ~first


def hidden(
    maps: Int[Tensor, "some rows columns"], inside: Int[Tensor, "some regions"], windows: Windows
) -> Int[Tensor, "some regions"]:
    """Return the sum over each window together with the one that holds most; `inside` are the sums over single ones.

    For single boxes on axes that do not wrap.
    """
    most = ties.argmax(inside, dim=1)
    return inside + inside.gather(1, most.unsqueeze(1)) - shared(maps, windows, most)[0]


def shared(
    maps: Int[Tensor, "some rows columns"], windows: Windows, region: Int64[Tensor, " some"]
) -> tuple[Int[Tensor, "some regions"], Int[Tensor, "some regions"]]:
    """Return, for one window per map, its sum over what every window shares with it, and how many cells that are.

    For single boxes on axes that do not wrap.
    """
    boxes = torch.from_numpy(windows.boxes).to(maps.device)
    mine, table = boxes[region].unsqueeze(1), integral_image(maps, (False, False))
    top, left = (torch.maximum(boxes[:, side], mine[..., side]) for side in (0, 2))
    bottom, right = (torch.minimum(boxes[:, side], mine[..., side]) for side in (1, 3))
    bottom, right = torch.maximum(top, bottom), torch.maximum(left, right)

    def at(row: Tensor, column: Tensor) -> Tensor:
        return table.flatten(1).gather(1, row * table.shape[2] + column)

    return at(bottom, right) - at(top, right) - at(bottom, left) + at(top, left), (bottom - top) * (right - left)


@lru_cache(maxsize=64)
def largest_unions(windows: Windows) -> Int64[Tensor, " some"] | None:
    """Return which unions have the most cells; None where some other one lies in none of these."""
    areas, cells = windows.areas, windows.cells.astype(np.float64)
    largest = areas == areas.max()
    held = (cells @ cells[largest].T == areas[:, None]).any(1)
    return torch.from_numpy(np.flatnonzero(largest)) if bool(held.all()) else None


def among_best(scores: Tensor, targets: Int64[Tensor, " batch"], top_k: int) -> Bool[Tensor, " batch"]:
    """Whether fewer than k classes come before the true one (ties: smallest class first)."""
    mine = scores.gather(1, targets.unsqueeze(1))
    classes = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > mine) | ((scores == mine) & (classes < targets.unsqueeze(1)))
    return before.sum(1) < top_k
