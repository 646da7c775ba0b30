"""Fast paths: the signs of certificates, which tables need, without their margins.

Window sums are computed once for all queries about a batch, and pairs of windows are searched only in images that quick
bounds leave open. Every answer is the defense's own; tests compare them. Without fast paths all tables of CIFAR-10 take
about six times as long (`benchmarks/tables.py`).
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor
from torch.nn.functional import one_hot

from patchguard.defenses import DoubleMasking, Median, RobustMasking, ties
from patchguard.defenses.base import Defense, MaskedDefense, select, tau_units
from patchguard.defenses.evidence import Evidence
from patchguard.defenses.order_statistics import cells_of
from patchguard.defenses.window_products import integral_image, nothing
from patchguard.defenses.window_sums import best_cover, heaviest
from patchguard.geometry.windows import Windows
from patchguard.paper.query import LOGITS, SIGNED, Batch, FastPath, Marks, Query, among_best


def masking_query(
    windows: Windows, evidence: Evidence = LOGITS, *, masks: Windows | None = None, top_k: int = 1
) -> Query:
    """Return robust masking; by default its masks are the windows."""
    defense = RobustMasking(masks=masks or windows)
    return Query(evidence=evidence, defense=defense, windows=windows, top_k=top_k, fast=ROBUST_MASKING)


def double_masking_query(windows: Windows, evidence: Evidence = SIGNED) -> Query:
    """Return double masking whose masks are the windows."""
    return Query(evidence=evidence, defense=DoubleMasking(masks=windows), windows=windows, fast=DOUBLE_MASKING)


def sum_query(defense: Defense[Any], windows: Windows, evidence: Evidence) -> Query:
    """Return a defense that adds up bounded evidence and is certified window by window."""
    return Query(evidence=evidence, defense=defense, windows=windows, fast=SUMS)


def rank_query(defense: Defense[Any], windows: Windows, evidence: Evidence) -> Query:
    """Return a defense that adds up cells of some ranks and is certified without positions."""
    return Query(evidence=evidence, defense=defense, windows=windows, fast=RANKS)


# -- robust masking ----------------------------------------------------------------------------------------------------


def _masks(query: Query) -> Windows:
    return cast(MaskedDefense[Any], query.defense).masks


def _robust_correct(batch: Batch, query: Query) -> Marks:
    masks = _masks(query)
    return among_best(batch.total - batch.inside(masks).amax(2), batch.targets, query.top_k)


def _robust_certified(batch: Batch, query: Query, correct: Marks) -> Marks | None:
    """`RobustMasking(masks).certify(...).certified` of correct labels, at T = 0.

    In the symbols of the theorem, certified means: in every window, t_y - D_k > max_v a_y(v) for all but k - 1 rivals.
    That maximum is at most the heaviest mask H, and at least H less what y has in the window. D_k is t_k for masks that
    are the windows, all of one size: no mask outweighs a window that is filled up. Of unions, which are smaller where
    boxes overlap, the largest decide: who owns one of them owns those inside it. For larger masks D_k is what the
    heaviest covering mask leaves of the whole, where a row or a column of the window, filled up to the ceiling,
    outweighs any mask: a mask that does not cover the window misses one. None where no case holds.
    """
    masks, windows = _masks(query), query.windows
    assert windows is not None
    inside, over, total = batch.inside(windows), batch.inside(masks), batch.total.unsqueeze(2)
    deciding: slice | Tensor = slice(None)
    narrowest = min(stop - start for start, stop in (*windows.rows, *windows.columns))
    if masks == windows and windows.equal_boxes:
        highest = total - inside
    elif masks == windows and windows.count > 1 and (largest := largest_unions(windows)) is not None:
        deciding = largest.to(inside.device)
        inside = inside[:, :, deciding]
        highest = total - inside
    elif (
        not batch.evidence.bounded
        and masks.count == windows.count == 1
        and masks.cover(windows)
        and int(over.max()) < batch.evidence.high * narrowest
    ):
        highest = total - best_cover(over.flatten(0, 1), masks, windows).view(*over.shape[:2], -1)
    else:
        return None
    own = select(inside, batch.targets)
    room = select(batch.total, batch.targets).unsqueeze(1) - own - _kth_rival(batch, query, highest)
    heavy = select(over, batch.targets).amax(1)
    certified = room.amin(1) > heavy
    failed = (room <= (heavy.unsqueeze(1) - own).clamp(min=0)).any(1)
    for (images,) in batch.chunks(correct & ~certified & ~failed):
        least = batch.values[images, batch.targets[images]]
        certified[images] = (room[images] > heaviest(least, masks, windows)[:, deciding]).all(1)
    return certified


def _kth_rival(
    batch: Batch, query: Query, highest: Int[Tensor, "batch classes regions"]
) -> Int[Tensor, "batch regions"]:
    """Return the k-th largest of the rivals' bounds in every window; sorted once for all k above 1."""

    def of_rivals() -> Tensor:
        return highest.masked_fill(~batch.rivals.unsqueeze(2), nothing(highest.dtype))

    if query.top_k == 1:
        return of_rivals().amax(1)
    key = "sorted", query.defense, query.windows
    return batch.once(key, lambda: of_rivals().sort(dim=1, descending=True).values)[:, query.top_k - 1]


ROBUST_MASKING = FastPath(_robust_certified, _robust_correct)


@lru_cache(maxsize=64)
def largest_unions(windows: Windows) -> Int64[Tensor, " some"] | None:
    """Return which unions have the most cells; None where some other one lies in none of these."""
    areas, cells = windows.areas, windows.cells.astype(np.float64)
    largest = areas == areas.max()
    covered = (cells @ cells[largest].T == areas[:, None]).any(1)
    return torch.from_numpy(np.flatnonzero(largest)) if bool(covered.all()) else None


# -- double masking ----------------------------------------------------------------------------------------------------


def _double_correct(batch: Batch, query: Query) -> Marks:
    """Whether double masking gives the true class.

    Masks of the first round mostly agree. Where they do not, the label of most of them stands unless a mask for another
    one is never contradicted in the second round; nearly all are, by the mask that hurts them most.
    """
    masks = _masks(query)
    first_round = ties.argmax(batch.total.unsqueeze(2) - batch.inside(masks), dim=1)
    votes = batch.total.new_zeros(batch.total.shape, dtype=torch.int64)
    votes.scatter_add_(1, first_round, torch.ones_like(first_round))
    majority = ties.argmax(votes, dim=1)
    correct = majority == batch.targets
    others = torch.arange(votes.shape[1], device=votes.device) != majority.unsqueeze(1)
    # A wrong majority is corrected only by the true class, a correct one is overruled by any other.
    claimed = (votes > 0) & others & (correct.unsqueeze(1) | ~batch.rivals)
    if _simple(masks):
        doubtful = torch.zeros_like(correct)
        for images, claims in batch.chunks(claimed):
            doubtful[images[_withstands(batch, query, first_round, images, claims, majority[images])]] = True
    else:
        doubtful = claimed.any(1)
    (images,) = doubtful.nonzero().unbind(1)
    if len(images):
        correct[images] = query.defense.predict(batch.evidence[images]).label == batch.targets[images]
    return correct


def _simple(masks: Windows) -> bool:
    """Whether masks are single boxes on axes that do not wrap."""
    return masks.count == 1 and not any(masks.wrap)


def _withstands(
    batch: Batch, query: Query, first_round: Tensor, images: Tensor, claims: Tensor, majority: Tensor
) -> Bool[Tensor, " some"]:
    """Whether some mask for `claims` keeps it ahead of the majority's label: by T, and with one bad second mask."""
    masks = _masks(query)
    gap = batch.values[images, claims] - batch.values[images, majority]
    inside = batch.inside(masks)[images, claims] - batch.inside(masks)[images, majority]
    whole, needed = gap.sum((1, 2), dtype=gap.dtype).unsqueeze(1), (majority < claims).long().unsqueeze(1)
    ahead = (whole - inside - _lead(batch, query) >= needed) & (
        whole - hide_with_heaviest(gap, inside, masks) >= needed
    )
    return (ahead & (first_round[images] == claims.unsqueeze(1))).any(1)


def _lead(batch: Batch, query: Query) -> int:
    """T, or what no sum reaches, if that is less."""
    return min(tau_units(cast(DoubleMasking, query.defense).tau, batch.evidence), -nothing(batch.values.dtype))


def _double_certified(batch: Batch, query: Query, correct: Marks) -> Marks | None:
    """`DoubleMasking(masks).certify(...).certified` of correct labels.

    With g_k = u_y - u_k, equal boxes cover only themselves, so certified means: for all rivals k, g_k exceeds T outside
    every mask and 0 outside every pair. Surely so where what one mask leaves exceeds T and all that a second one could
    hide. Only what lies between is searched: first the closest rival, which settles most images that are not certified,
    then the others. None for other masks.
    """
    masks = _masks(query)
    if not (masks == query.windows and masks.equal_boxes):
        return None
    seen = batch.total.unsqueeze(2) - batch.inside(masks)
    outside = select(seen, batch.targets).unsqueeze(1) - seen  # batch, classes, masks
    least = outside.amin(2)
    certified = correct & ~((least <= _lead(batch, query)) & batch.rivals).any(1)
    between = (least <= batch.most_hidden(masks)) & batch.rivals & certified.unsqueeze(1)
    closest = ties.argmin(least.masked_fill(~between, torch.iinfo(least.dtype).max), dim=1)
    first = one_hot(closest, least.shape[1]).bool()
    for rivals in (between & first, between & ~first):
        if _simple(masks):  # the mask that hides most, with any other, is quickly looked at
            for images, rival in batch.chunks(rivals & certified.unsqueeze(1)):
                gap, left = batch.gap[images, rival], outside[images, rival]
                whole = gap.sum((1, 2), dtype=gap.dtype).unsqueeze(1)
                worst = whole - hide_with_heaviest(gap, whole - left, masks)
                certified[images[worst.amin(1) <= 0]] = False
        for images, rival in batch.chunks(rivals & certified.unsqueeze(1)):
            worst = outside[images, rival] - heaviest(batch.gap[images, rival], masks, masks)
            certified[images[worst.amin(1) <= 0]] = False
    return certified


DOUBLE_MASKING = FastPath(_double_certified, _double_correct)


def hide_with_heaviest(
    maps: Int[Tensor, "some rows columns"], inside: Int[Tensor, "some regions"], windows: Windows
) -> Int[Tensor, "some regions"]:
    """Return the sum over each window together with the heaviest one; `inside` are the sums over single ones.

    For single boxes on axes that do not wrap.
    """
    heavy = ties.argmax(inside, dim=1)
    return inside + inside.gather(1, heavy.unsqueeze(1)) - intersect(maps, windows, heavy)[0]


def intersect(
    maps: Int[Tensor, "some rows columns"], windows: Windows, region: Int64[Tensor, " some"]
) -> tuple[Int[Tensor, "some regions"], Int[Tensor, "some regions"]]:
    """Return, for one window per map, its sum over what every window shares with it, and how many cells that are.

    For single boxes on axes that do not wrap.
    """
    boxes = torch.from_numpy(windows.boxes).to(maps.device)
    own, table = boxes[region].unsqueeze(1), integral_image(maps, (False, False))
    top, left = (torch.maximum(boxes[:, side], own[..., side]) for side in (0, 2))
    bottom, right = (torch.minimum(boxes[:, side], own[..., side]) for side in (1, 3))
    bottom, right = torch.maximum(top, bottom), torch.maximum(left, right)

    def at(row: Tensor, column: Tensor) -> Tensor:
        return table.flatten(1).gather(1, row * table.shape[2] + column)

    return at(bottom, right) - at(top, right) - at(bottom, left) + at(top, left), (bottom - top) * (right - left)


# -- sums under several windows ----------------------------------------------------------------------------------------


def _sums_certified(batch: Batch, query: Query, correct: Marks) -> Marks | None:
    """`ClippedSum().certify(...).certified` of correct labels: S_y - S_k exceeds what any union can take of it.

    No union takes more than its heaviest boxes together, and some union takes as much as the heaviest box alone. The
    defense is asked about what lies between.
    """
    assert query.windows is not None
    boxes = replace(query.windows, count=1)
    inside, span = batch.inside(boxes), batch.evidence.high - batch.evidence.low
    areas = torch.from_numpy(boxes.areas).to(inside.device)
    loss = select(inside, batch.targets).unsqueeze(1) - inside + span * areas  # never negative
    gap = select(batch.total, batch.targets).unsqueeze(1) - batch.total
    heaviest_boxes = loss.topk(min(query.windows.count, loss.shape[2]), dim=2).values.sum(2)
    certified = ((gap > heaviest_boxes) | ~batch.rivals).all(1)
    failed = ((gap <= loss.amax(2)) & batch.rivals).any(1)
    return certified | batch.ask_defense(query, correct & ~certified & ~failed)


SUMS = FastPath(_sums_certified)


# -- sums over ranks ---------------------------------------------------------------------------------------------------


def _ranks(batch: Batch, query: Query) -> tuple[int, int]:
    return cast(Median, query.defense).ranks(cells_of(batch.evidence))


def _ranks_correct(batch: Batch, query: Query) -> Marks:
    query.defense.validate_evidence(batch.evidence)
    return among_best(_rank_sums(batch, *_ranks(batch, query)), batch.targets, query.top_k)


def _ranks_certified(batch: Batch, query: Query, correct: Marks) -> Marks | None:
    """The position-free `certify(...).certified`: ranks shifted by the cells of a window."""
    assert query.windows is not None
    (first, last), shift = _ranks(batch, query), query.windows.largest_area
    upper = _rank_sums(batch, first + shift, last + shift)
    lower = select(_rank_sums(batch, first - shift, last - shift), batch.targets).unsqueeze(1)
    return ((lower > upper) | ~batch.rivals).all(1)


def _rank_sums(batch: Batch, first: int, last: int) -> Int64[Tensor, "batch classes"]:
    """Return the sum of the cells of ranks first to last; below the smallest lies `low`, above the largest `high`."""
    cells, table = cells_of(batch.evidence), batch.ascending_sums()
    below, above = max(0, min(last, 0) - first + 1), max(0, last - max(first - 1, cells))
    inside = table[..., min(max(last, 0), cells)] - table[..., min(max(first - 1, 0), cells)]
    return inside + below * batch.evidence.low + above * batch.evidence.high


RANKS = FastPath(_ranks_certified, _ranks_correct)
