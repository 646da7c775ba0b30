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
from patchguard.defenses.evidence import EvidenceMap
from patchguard.defenses.window_products import nothing
from patchguard.defenses.window_sums import heaviest, sums
from patchguard.geometry.windows import Windows
from patchguard.paper import models, published
from patchguard.paper.context import Context
from patchguard.paper.experiment import TITLES, Missing, Result, Row, Table
from patchguard.paper.maps import Maps
from patchguard.paper.rows import described, differs, spaces
from patchguard.paper.settled import Sheet, shared, short
from patchguard.paper.tally import LOGITS, masking, over_batches, rounding, told
from patchguard.runs import metrics

PAIRS = 256  # of images and windows that are searched together
CHARGED = "T > 0 is charged for what an attack can add below the threshold, which the paper's bound leaves out"
THRESHOLDS = tuple(Fraction(step, 5) for step in range(6))
COLUMNS = ("clean", "provable", "detection FP", "detection FP, any class", "provable by the published bound (unsound)")
COUNTED = (
    "Detection FP: clean images in which the window of the predicted class is detected; of any class, that of some "
    "class. The paper does not say which it counts."
)


def run(context: Context, dataset: str) -> Result:
    """Measure all thresholds for the 2 % (2.4 %) patch."""
    context.images(dataset)
    theirs = {label: (*numbers, None, None) for label, numbers in published.THRESHOLDS[dataset].items()}
    where = "tab-masking-thres-cifar" if dataset == "cifar10" else "tab-masking-thres"
    name = models.usual_patch(dataset)
    tables, notes = [], []
    for network in models.maskers(dataset):
        rows: list[Row] = []
        try:
            maps = context.maps(network.names, dataset)
        except Missing as missing:
            blank = (None,) * len(COLUMNS)
            rows = [Row(label=label, ours=blank, published=theirs[label], note=str(missing)) for label in theirs]
        else:
            patch = models.patches(dataset, maps.size[0])[name]
            for suffix, windows_of in spaces(maps).items():
                windows = windows_of(patch)
                note, reason = described(maps, suffix, spaced=True), differs(maps.model, network)
                found = tallies(maps, windows, context.device)
                for threshold, label, tally in zip(THRESHOLDS, theirs, found, strict=True):
                    ours = tuple(metrics.share(number, len(maps)) for number in tally)
                    known = () if suffix else theirs[label]
                    charged = f"; {CHARGED}" if threshold else ""
                    rows.append(
                        Row(label=label + suffix, ours=ours, published=known, note=note, reason=reason + charged)
                    )
            question = masking(maps.windows(patch))
            notes.append(told(rounding(maps, question, context.device), maps.model))
        title = f"Detection thresholds of {network.label} on {TITLES[dataset]}, {name} patch"
        tables.append(Table(title=title, where=where, columns=COLUMNS, rows=tuple(rows)))
    return Result(
        tables=tuple(tables), notes=(*notes, COUNTED), settings={"thresholds": [str(each) for each in THRESHOLDS]}
    )


NUMBERS = ("right", "proved", "detected", "detected any", "published")  # in the order of the columns


def tallies(maps: Maps, windows: Windows, device: torch.device) -> list[tuple[int, ...]]:
    """Count, for each threshold, over all maps; what thresholds share is computed once."""

    def work(local_logits: Tensor, targets: Tensor) -> Counter[Hashable]:
        found: Counter[Hashable] = Counter()
        evidence = LOGITS(local_logits)
        bounds = Bounds.of(evidence, windows, targets)
        for threshold in THRESHOLDS:
            over = threshold.denominator * bounds.hidden > threshold.numerator * bounds.total
            label = ties.argmax(torch.where(over, bounds.total - bounds.hidden, bounds.total), dim=1)
            right = label == targets
            marks = (
                right,
                bounds.proved(threshold, right),
                select(over.long(), label),
                over.any(1),
                bounds.published(threshold) & right,
            )
            found.update({(threshold, name): int(mark.sum()) for name, mark in zip(NUMBERS, marks, strict=True)})
        return found

    counted = over_batches(maps, device, work)
    return [tuple(counted[threshold, name] for name in NUMBERS) for threshold in THRESHOLDS]


@final
@dataclass(frozen=True, eq=False)
class Bounds:
    """What the bounds of all thresholds are made of, for masks that are the windows; y is the true class.

    total: S_k; inside: what class k has in window w, the last axis; hidden: H_k; heavy: max over v of a_y(v).
    """

    evidence: EvidenceMap
    windows: Windows
    targets: Int64[Tensor, " some"]
    total: Int[Tensor, "some classes"]
    inside: Int[Tensor, "some classes regions"]
    heavy: Int[Tensor, "some regions"]

    @classmethod
    def of(cls, evidence: EvidenceMap, windows: Windows, targets: Tensor) -> "Bounds":
        """Compute them for a batch."""
        values = short(evidence.values)
        heavy = heaviest(select(values, targets), windows, windows)
        total = values.sum((2, 3), dtype=values.dtype)
        return cls(evidence, windows, targets, total, sums(values, windows), heavy)

    @cached_property
    def hidden(self) -> Int[Tensor, "some classes"]:
        """H_k."""
        return self.inside.amax(2)

    @cached_property
    def rest(self) -> Int[Tensor, "some classes regions"]:
        """t_k."""
        return self.total.unsqueeze(2) - self.inside

    @cached_property
    def mine(self) -> Int[Tensor, "some regions"]:
        """t_y."""
        return select(self.rest, self.targets)

    def published(self, threshold: Fraction) -> Bool[Tensor, " some"]:
        """Algorithm 2 as it is printed: no rival's t_k / (1 - T) exceeds the score of y once its evidence is erased.

        T = 1 divides by zero: nothing.
        """
        p, q = threshold.numerator, threshold.denominator
        if p == q:
            return torch.zeros_like(self.targets, dtype=torch.bool)
        lower = self.mine - torch.where(q * self.heavy > p * self.mine, self.heavy, 0)
        return ~(q * self._strongest(self.rest) > (q - p) * lower).any(1)

    def proved(self, threshold: Fraction, right: Bool[Tensor, " some"]) -> Bool[Tensor, " some"]:
        """Return which right labels `RobustMasking` certifies."""
        p, q = threshold.numerator, threshold.denominator
        if p == q:  # an attack that fills a window with unbounded evidence of a rival is never masked
            return torch.zeros_like(right)
        # The short forms below are for boxes that cover only themselves, which an attack can fill past any threshold.
        room = self.evidence.high * self.windows.largest_area
        alone = self.windows.equal_boxes and not any(self.windows.wrap)
        if not alone or p * int(self.total.max()) > (q - p) * room:
            return Sheet(self.evidence, self.targets).proved(
                RobustMasking(masks=self.windows, threshold=threshold), self.windows
            )
        return right & self._proved(p, q, right)

    def _proved(self, p: int, q: int, right: Bool[Tensor, " some"]) -> Bool[Tensor, " some"]:
        """LB > UB_k in every window, in multiples of 1 / (q - p).

        LB is t_y - heavy where heavy > T t_y, since that mask passes T whatever the attack; elsewhere it lies between
        t_y - heavy and t_y. UB_k is t_k where detection is certain, max_v a_k(v) > T t_k / (1 - T), else t_k / (1 - T);
        that maximum lies between H_k less what k has in the window, and H_k. Masks are tried out only in windows that
        this leaves open.
        """
        passes = q * self.heavy > p * self.mine
        most = (q - p) * (self.mine - torch.where(passes, self.heavy, 0))
        least = (q - p) * (self.mine - self.heavy)
        surely = (q - p) * (self.hidden.unsqueeze(2) - self.inside) > p * self.rest
        maybe = (q - p) * self.hidden.unsqueeze(2) > p * self.rest
        detected, missed = (q - p) * self.rest, q * self.rest
        smallest = self._strongest(torch.where(maybe, detected, missed))
        largest = self._strongest(torch.where(surely, detected, missed))
        proved = right & (least > largest).all(1)
        failed = (most <= smallest).any(1)
        open_windows = (least <= largest) & (most > smallest) & (right & ~proved & ~failed).unsqueeze(1)
        fails = torch.zeros_like(failed)
        images, regions = open_windows.nonzero().unbind(1)
        for here in range(0, len(images), PAIRS):
            image, region = images[here : here + PAIRS], regions[here : here + PAIRS]
            label, rest = self.targets[image].unsqueeze(1), self.total[image] - self.inside[image, :, region]
            hidden = torch.where(passes[image, region], self.heavy[image, region], self._masked(image, region, p, q))
            lower = (q - p) * (rest.gather(1, label) - hidden.unsqueeze(1))
            ahead = lower > q * rest  # of class k, detected or not
            only_if = ~ahead & (lower > (q - p) * rest) & maybe[image, :, region]  # only if it is detected for certain
            pair, rival = only_if.scatter(1, label, False).nonzero().unbind(1)
            heavy = self._outside(image[pair], rival, region[pair])
            ahead[pair, rival] = (q - p) * heavy > p * rest[pair, rival]
            fails[image[~ahead.scatter(1, label, True).all(1)]] = True
        return (right & ~failed & ~fails) | proved

    def _strongest(self, values: Int[Tensor, "some classes regions"]) -> Int[Tensor, "some regions"]:
        """The largest among the rivals of the true class."""
        own = self.targets.view(-1, 1, 1).expand(-1, 1, values.shape[2])
        return values.scatter(1, own, nothing(values.dtype)).amax(1)

    def _masked(
        self, image: Int64[Tensor, " pairs"], region: Int64[Tensor, " pairs"], p: int, q: int
    ) -> Int[Tensor, " pairs"]:
        """The heaviest a_y(v) of the masks that an attack on the window can make pass T."""
        label = self.targets[image]
        common, cells = shared(self.evidence.values[image, label], self.windows, region)
        outside = self.inside[image, label] - common
        rest = self.mine[image, region].unsqueeze(1)
        passes = (q - p) * (outside + self.evidence.high * cells) > p * (rest - outside)
        return torch.where(passes, outside, 0).amax(1)

    def _outside(self, image: Tensor, rival: Tensor, region: Tensor) -> Int[Tensor, " some"]:
        """The heaviest a_k(v) of all masks."""
        common, _ = shared(self.evidence.values[image, rival], self.windows, region)
        return (self.inside[image, rival] - common).amax(1)
