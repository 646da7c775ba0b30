"""tab-masking-thres: detection thresholds T from 0 to 1, with the corrected bound and with the published one.

The published bound (Algorithm 2 with T > 0) lets an attack only erase evidence of the true class. It can also add some,
so that a window full of honest evidence passes T and is masked: docs/theory.md has the bound that holds.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import final

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from patchguard.defenses import RobustMasking, ties
from patchguard.defenses.base import select
from patchguard.defenses.window_products import nothing
from patchguard.defenses.window_sums import heaviest
from patchguard.geometry.windows import Windows
from patchguard.paper import networks, published
from patchguard.paper.cached_logits import CachedLogits
from patchguard.paper.context import Context
from patchguard.paper.counting import (
    Measured,
    appendix_label,
    describe_model,
    describe_rounding,
    make_result,
    missing_rows,
    sum_over_batches,
    window_spaces,
)
from patchguard.paper.experiment import TITLES, Missing, Result, Row
from patchguard.paper.fast_certificates import intersect, masking_query
from patchguard.paper.query import LOGITS, Batch, Query
from patchguard.runs.metrics import proportion

PAIRS = 256  # of images and windows that are searched together
THRESHOLDS = tuple(Fraction(step, 5) for step in range(6))
COLUMNS = ("clean", "provable", "detection FP", "detection FP, any class", "provable by the published bound (unsound)")
CHARGED = "T > 0 is charged for what an attack can add below the threshold, which the paper's bound leaves out"
FALSE_POSITIVES = (
    "Detection FP: clean images in which the window of the predicted class is detected; of any class, that of some "
    "class. The paper does not say which it counts."
)


def run(context: Context, dataset: str) -> Result:
    """Measure all thresholds for the 2 % (2.4 %) patch."""
    theirs = {label: (*numbers, None, None) for label, numbers in published.THRESHOLDS[dataset].items()}
    name = networks.default_patch(dataset)
    tables, notes = [], []
    for network in networks.masking_networks(dataset):
        measured = Measured()
        try:
            logits = context.logits(network.names, dataset)
        except Missing as missing:
            measured.rows = missing_rows(missing, theirs, len(COLUMNS))
        else:
            patch = networks.patches(dataset, logits.size[0])[name]
            differences = network.describe_differences(logits.model)
            for suffix, windows_of in window_spaces(logits).items():
                counts = count_thresholds(logits, windows_of(patch), context.device)
                for threshold, label in zip(THRESHOLDS, theirs, strict=True):
                    row = Row(
                        label=label + suffix,
                        ours=tuple(proportion(number, len(logits)) for number in counts[threshold]),
                        published=() if suffix else theirs[label],
                        note=describe_model(logits, suffix, patched=True),
                        reason=f"{differences}; {CHARGED}" if threshold else differences,
                    )
                    measured.rows.append(row)
            notes.append(describe_rounding(logits, masking_query(logits.windows(patch)), context.device))
        title = f"Detection thresholds of {network.label} on {TITLES[dataset]}, {name} patch"
        tables.append(measured.table(title, appendix_label("tab-masking-thres", dataset), COLUMNS))
    settings = {"thresholds": [str(threshold) for threshold in THRESHOLDS]}
    return make_result(tables, (*notes, FALSE_POSITIVES), settings=settings)


def count_thresholds(
    logits: CachedLogits, windows: Windows, device: torch.device
) -> dict[Fraction, tuple[int, int, int, int, int]]:
    """Count, for each threshold and column, over all images; what thresholds share is computed once."""

    def work(local_logits: Tensor, targets: Tensor) -> Counter[Hashable]:
        counter: Counter[Hashable] = Counter()
        bounds = Bounds(Batch(LOGITS(local_logits), targets), windows)
        total, hidden = bounds.batch.total, bounds.hidden
        for threshold in THRESHOLDS:
            detected = threshold.denominator * hidden > threshold.numerator * total
            label = ties.argmax(torch.where(detected, total - hidden, total), dim=1)
            correct = label == targets
            marks = (
                correct,
                bounds.certified(threshold, correct),
                select(detected.long(), label),
                detected.any(1),
                bounds.published(threshold) & correct,
            )
            counter.update({(threshold, column): int(mark.sum()) for column, mark in enumerate(marks)})
        return counter

    counts = sum_over_batches(logits, device, work)
    return {
        threshold: tuple(counts[threshold, column] for column in range(len(COLUMNS)))  # type: ignore[misc]
        for threshold in THRESHOLDS
    }


@final
@dataclass(frozen=True, eq=False)
class Bounds:
    """What the bounds of all thresholds are made of, for masks that are the windows; y is the true class."""

    batch: Batch
    windows: Windows

    @cached_property
    def inside(self) -> Int[Tensor, "some classes regions"]:
        """What class k has in window w, the last axis."""
        return self.batch.inside(self.windows)

    @cached_property
    def heavy(self) -> Int[Tensor, "some regions"]:
        """max over v of a_y(v)."""
        return heaviest(select(self.batch.values, self.batch.targets), self.windows, self.windows)

    @cached_property
    def hidden(self) -> Int[Tensor, "some classes"]:
        """H_k."""
        return self.inside.amax(2)

    @cached_property
    def rest(self) -> Int[Tensor, "some classes regions"]:
        """t_k."""
        return self.batch.total.unsqueeze(2) - self.inside

    @cached_property
    def own(self) -> Int[Tensor, "some regions"]:
        """t_y."""
        return select(self.rest, self.batch.targets)

    def published(self, threshold: Fraction) -> Bool[Tensor, " some"]:
        """Algorithm 2 as it is printed: no rival's t_k / (1 - T) exceeds the score of y once its evidence is erased.

        T = 1 divides by zero: nothing.
        """
        p, q = threshold.numerator, threshold.denominator
        if p == q:
            return torch.zeros_like(self.batch.targets, dtype=torch.bool)
        lower = self.own - torch.where(q * self.heavy > p * self.own, self.heavy, 0)
        return ~(q * self._strongest(self.rest) > (q - p) * lower).any(1)

    def certified(self, threshold: Fraction, correct: Bool[Tensor, " some"]) -> Bool[Tensor, " some"]:
        """Return which correct labels `RobustMasking` certifies."""
        p, q = threshold.numerator, threshold.denominator
        if p == q:  # an attack that fills a window with unbounded evidence of a rival is never masked
            return torch.zeros_like(correct)
        # The short forms below are for boxes that cover only themselves, which an attack can fill past any threshold.
        room = self.batch.evidence.high * self.windows.largest_area
        alone = self.windows.equal_boxes and not any(self.windows.wrap)
        if not alone or p * int(self.batch.total.max()) > (q - p) * room:
            defense = RobustMasking(masks=self.windows, threshold=threshold)
            return self.batch.certified(Query(evidence=LOGITS, defense=defense, windows=self.windows))
        return correct & self._certified(p, q, correct)

    def _certified(self, p: int, q: int, correct: Bool[Tensor, " some"]) -> Bool[Tensor, " some"]:
        """LB > UB_k in every window, in multiples of 1 / (q - p).

        LB is t_y - heavy where heavy > T t_y, since that mask passes T whatever the attack; elsewhere it lies between
        t_y - heavy and t_y. UB_k is t_k where detection is certain, max_v a_k(v) > T t_k / (1 - T), else t_k / (1 - T);
        that maximum lies between H_k less what k has in the window, and H_k. Masks are tried out only in windows that
        this leaves open.
        """
        passes = q * self.heavy > p * self.own
        most = (q - p) * (self.own - torch.where(passes, self.heavy, 0))
        least = (q - p) * (self.own - self.heavy)
        surely = (q - p) * (self.hidden.unsqueeze(2) - self.inside) > p * self.rest
        maybe = (q - p) * self.hidden.unsqueeze(2) > p * self.rest
        detected, missed = (q - p) * self.rest, q * self.rest
        smallest = self._strongest(torch.where(maybe, detected, missed))
        largest = self._strongest(torch.where(surely, detected, missed))
        certified = correct & (least > largest).all(1)
        failed = (most <= smallest).any(1)
        open_windows = (least <= largest) & (most > smallest) & (correct & ~certified & ~failed).unsqueeze(1)
        images, regions = open_windows.nonzero().unbind(1)
        for first in range(0, len(images), PAIRS):
            image, region = images[first : first + PAIRS], regions[first : first + PAIRS]
            label, rest = self.batch.targets[image].unsqueeze(1), self.rest[image, :, region]
            hidden = torch.where(passes[image, region], self.heavy[image, region], self._masked(image, region, p, q))
            lower = (q - p) * (rest.gather(1, label) - hidden.unsqueeze(1))
            ahead = lower > q * rest  # of class k, detected or not
            only_if = ~ahead & (lower > (q - p) * rest) & maybe[image, :, region]  # only if it is detected for certain
            pair, rival = only_if.scatter(1, label, False).nonzero().unbind(1)
            heavy = self._outside(image[pair], rival, region[pair])
            ahead[pair, rival] = (q - p) * heavy > p * rest[pair, rival]
            failed[image[~ahead.scatter(1, label, True).all(1)]] = True
        return (correct & ~failed) | certified

    def _strongest(self, values: Int[Tensor, "some classes regions"]) -> Int[Tensor, "some regions"]:
        """The largest among the rivals of the true class."""
        return values.masked_fill(~self.batch.rivals.unsqueeze(2), nothing(values.dtype)).amax(1)

    def _masked(
        self, image: Int64[Tensor, " pairs"], region: Int64[Tensor, " pairs"], p: int, q: int
    ) -> Int[Tensor, " pairs"]:
        """The heaviest a_y(v) of the masks that an attack on the window can make pass T."""
        label = self.batch.targets[image]
        common, cells = intersect(self.batch.evidence.values[image, label], self.windows, region)
        outside = self.inside[image, label] - common
        rest = self.own[image, region].unsqueeze(1)
        passes = (q - p) * (outside + self.batch.evidence.high * cells) > p * (rest - outside)
        return torch.where(passes, outside, 0).amax(1)

    def _outside(self, image: Tensor, rival: Tensor, region: Tensor) -> Int[Tensor, " some"]:
        """The heaviest a_k(v) of all masks."""
        common, _ = intersect(self.batch.evidence.values[image, rival], self.windows, region)
        return (self.inside[image, rival] - common).amax(1)
