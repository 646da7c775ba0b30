"""An independent, literal implementation of every rule and bound, for tests.

Nothing here uses the defenses of the package: regions are sets of cells, sums are written out, and attacks are
enumerated by `patchguard.oracle`. Maps are numpy integer arrays (classes, cells); rules work on (contents, classes,
cells).
"""

from fractions import Fraction

import numpy as np

from patchguard.oracle import Geometry, Rule
from patchguard.oracle import attacked as attacked
from patchguard.oracle import broken as broken
from patchguard.oracle import contents as contents
from patchguard.oracle import random_maps as random_maps
from patchguard.oracle import unions as unions

LINE = Geometry("line", (1, 9))
GRID = Geometry("grid", (3, 4))
CIRCLE = Geometry("circle", (1, 9), (False, True))


# -- rules -------------------------------------------------------------------------------------------------------------


def first_max(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    return scores.argmax(axis)  # numpy documents the first occurrence


def robust_masking(masks: np.ndarray, threshold: Fraction = Fraction(0), strict: bool = True) -> Rule:
    p, q = threshold.numerator, threshold.denominator

    def rule(maps: np.ndarray) -> np.ndarray:
        total = maps.sum(-1)
        hidden = (maps @ masks.T).max(-1)
        detected = q * hidden > p * total if strict else q * hidden >= p * total
        return first_max(np.where(detected, total - hidden, total))

    return rule


def plain_sum(maps: np.ndarray) -> np.ndarray:
    return first_max(maps.sum(-1))


def rank_sum(first: int, last: int) -> Rule:
    return lambda maps: first_max(np.sort(maps, -1)[..., first - 1 : last].sum(-1))


def double_masking(masks: np.ndarray, tau: int = 0) -> Rule:
    hidden = np.array([[np.maximum(m, n) for n in masks] for m in masks])  # masks, masks, cells
    each = np.arange(len(masks))

    def rule(maps: np.ndarray) -> np.ndarray:
        scores = np.einsum("bkc,mnc->bmnk", maps, 1 - hidden)
        single = first_max(scores[:, each, each])  # contents, masks
        votes = (single[..., None] == np.arange(maps.shape[1])).sum(1)
        majority = first_max(votes)
        believed = leads(scores, single[:, :, None]).all(2) & leads(scores[:, each, each], single, tau)
        believed &= single != majority[:, None]
        heard = single[np.arange(len(maps)), first_max(believed)]  # the first mask that is believed
        return np.where(believed.any(1), heard, majority)

    def leads(sums: np.ndarray, c: np.ndarray, by: int = 0) -> np.ndarray:
        """Whether class c beats every other by more than `by`, or by just that and has the smaller number."""
        c = np.broadcast_to(c, sums.shape[:-1])[..., None]
        gap, k = np.take_along_axis(sums, c, -1) - sums, np.arange(sums.shape[-1])
        return ((gap > by) | ((gap == by) & (c < k)) | (c == k)).all(-1)

    return rule


def masked_agreement(masks: np.ndarray, tau: int) -> Rule:
    def rule(maps: np.ndarray) -> np.ndarray:
        label = first_max(maps.sum(-1))
        seen = maps @ (1 - masks).T  # contents, classes, masks
        ranked = np.sort(seen, axis=1)
        other = first_max(seen, axis=1) != label[:, None]
        alert = (other & (ranked[:, -1] - ranked[:, -2] > tau)).any(1)
        return np.where(alert, -1, label)

    return rule


# -- bounds, as stated in docs/theory.md -------------------------------------------------------------------------------


def robust_masking_margin(
    u: np.ndarray,
    y: int,
    regions: np.ndarray,
    masks: np.ndarray,
    threshold: Fraction,
    high: int,
    mutant: str = "",
) -> Fraction:
    """min over w and k of LB - UB_k, in exact fractions. `mutant` puts one known mistake in."""
    p, q = threshold.numerator, threshold.denominator
    worst: list[Fraction] = []
    for w in regions:
        rest = (u * (1 - w)).sum(1)
        inside = masks @ w  # n(v)
        a = (u * (1 - w)) @ masks.T  # classes, masks
        size = int(w.sum())
        shared = inside
        if mutant == "border":  # overlap counted as if arcs stopped at the end of the list
            shared = np.array([_clipped_overlap(v, w) for v in masks])
        if mutant == "paper":  # Theorem 1: the label's evidence in w is set to zero, nothing is added
            counts = q * a[y] > p * rest[y]
        else:
            counts = q * (a[y] + high * shared) > p * (rest[y] + high * shared)
        low = int(rest[y]) - max([0, *a[y][counts].tolist()])
        for k in range(len(u)):
            if k == y:
                continue
            d = int(rest[k]) + high * size - int((a[k] + high * inside).max())
            if mutant == "uncovered":  # Lemma 1 where no mask covers the window
                d = int(rest[k])
            if mutant == "one mask":  # the largest a_v instead of the masks an attack can be caught by
                d = int(rest[k]) - int(a[k].max())
            up = Fraction(d)
            if p > 0 and mutant != "no division":
                up = Fraction(int(rest[k]) + high * size)
                if p < q:
                    up = min(up, Fraction(d * q, q - p))
                if q * int(a[k].max()) > p * up:
                    up = Fraction(d)
            worst.append(low - up)
    return min(worst)


def _clipped_overlap(v: np.ndarray, w: np.ndarray) -> int:
    """Overlap of two arcs as if arcs that pass the end of the list stopped there."""

    def run(box: np.ndarray) -> range:
        cells = np.flatnonzero(box)
        starts = [c for c in cells if not box[c - 1]]
        start = starts[0] if starts else 0
        return range(start, min(start + len(cells), len(box)))

    return len(set(run(v)) & set(run(w)))


def clipped_sum_margin(u: np.ndarray, y: int, regions: np.ndarray, low: int, high: int, mutant: str = "") -> Fraction:
    rivals = [k for k in range(len(u)) if k != y]
    if mutant == "runner-up":
        rivals = [max(rivals, key=lambda k: u[k].sum())]
    span = (high - low) // 2 if mutant == "half" else high - low
    return min(Fraction(int(((u[y] - u[k]) * (1 - w)).sum()) - int(w.sum()) * span) for w in regions for k in rivals)


def published_sum_margin(u: np.ndarray, y: int, regions: np.ndarray, low: int, high: int, factor: int = 2) -> Fraction:
    n = int(regions.sum(1).max())
    rivals = [k for k in range(len(u)) if k != y]
    return min(Fraction(int((u[y] - u[k]).sum()) - factor * n * (high - low)) for k in rivals)


def rank_margin(
    u: np.ndarray,
    y: int,
    regions: np.ndarray,
    ranks: tuple[int, int],
    low: int,
    high: int,
    mutant: str = "",
) -> Fraction:
    """The formulas of the three rank rules, from the sorted cells outside w."""
    first, last = ranks

    def padded(k: int, w: np.ndarray, side: int) -> list[int]:
        outside = sorted(u[k][w == 0].tolist())
        fill = [low if side < 0 else high] * int(w.sum())
        if mutant == "forgets the label's loss" and side < 0:
            fill = u[k][w == 1].tolist()
        if mutant == "forgets the rival's gain" and side > 0:
            fill = u[k][w == 1].tolist()
        return sorted(outside + fill)

    return min(
        Fraction(sum(padded(y, w, -1)[first - 1 : last]) - sum(padded(k, w, 1)[first - 1 : last]))
        for w in regions
        for k in range(len(u))
        if k != y
    )


def double_masking_margin(
    u: np.ndarray, y: int, regions: np.ndarray, masks: np.ndarray, tau: int = 0, mutant: str = ""
) -> Fraction:
    def gap(hidden: np.ndarray) -> int:
        seen = (u * (1 - hidden)).sum(1)
        return min(int(seen[y] - seen[k]) for k in range(len(u)) if k != y)

    tau = 0 if mutant == "no tau" else tau
    worst = []
    for w in regions:
        rows = []
        for m in masks:
            if not (m >= w).all() and mutant != "any mask":
                continue
            partners = [m] if mutant in ("one round", "tau in place of a second round") else masks
            if mutant == "disjoint pairs":
                partners = [n for n in masks if not (m * n).any()] or [m]
            rows.append(min(gap(m) - tau, *(gap(np.maximum(m, n)) for n in partners)))
        worst.append(max(rows))
    return Fraction(min(worst))


def agreement_margin(
    u: np.ndarray, y: int, regions: np.ndarray, masks: np.ndarray, tau: int, mutant: str = ""
) -> Fraction:
    worst = []
    for w in regions:
        rows = []
        for v in masks:
            if not (v >= w).all() and mutant != "any mask":
                continue
            seen = (u * (1 - v)).sum(1)
            rows.append(min(int(seen[y] - seen[k]) for k in range(len(u)) if k != y))
        worst.append(max(rows))
    return Fraction(min(worst) - (0 if mutant == "no tau" else tau))
