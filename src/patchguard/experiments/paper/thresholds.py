"""tab-masking-thres: detection thresholds T from 0 to 1, with the corrected bound and with the published one.

The published bound (Algorithm 2 with T > 0) lets an attack only erase evidence of the true class. It can also add some,
so that a window full of honest evidence passes T and is masked: docs/theory.md has the bound that holds.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from fractions import Fraction
from typing import final

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from patchguard import ties
from patchguard.defenses import RobustMasking
from patchguard.defenses.base import select
from patchguard.evidence import EvidenceMap
from patchguard.experiments import metrics, published
from patchguard.experiments.paper import models
from patchguard.experiments.paper.context import Context
from patchguard.experiments.paper.experiment import TITLES, Missing, Result, Row, Table
from patchguard.experiments.paper.maps import Maps
from patchguard.experiments.paper.rows import described, spaces
from patchguard.experiments.paper.tally import LOGITS, masking, over_batches, rounding, told
from patchguard.overlap import heaviest, sums
from patchguard.windows import Windows

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
            nothing = (None,) * len(COLUMNS)
            rows = [Row(label=label, ours=nothing, published=theirs[label], note=str(missing)) for label in theirs]
        else:
            patch = models.patches(dataset, maps.size[0])[name]
            for suffix, windows_of in spaces(maps).items():
                windows = windows_of(patch)
                note = described(maps, network, suffix, spaced=True)
                for label, tally in zip(theirs, tallies(maps, windows, context.device), strict=True):
                    ours = tuple(metrics.share(number, len(maps)) for number in tally)
                    rows.append(
                        Row(label=label + suffix, ours=ours, published=() if suffix else theirs[label], note=note)
                    )
            windows = maps.windows(patch)
            question = masking(windows, threshold=THRESHOLDS[1])
            notes.append(f"T = 0.2, {told(rounding(maps, question, context.device), maps.model)}")
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
        total = evidence.values.sum((2, 3))
        hidden = sums(evidence.values, windows).amax(-1)
        bounds = Bounds.of(evidence, windows, targets)
        for threshold in THRESHOLDS:
            p, q = threshold.numerator, threshold.denominator
            over = q * hidden > p * total
            label = ties.argmax(torch.where(over, total - hidden, total), dim=1)
            right = label == targets
            marks = (
                right,
                proved(evidence, windows, targets, threshold, bounds, right),
                select(over.long(), label),
                over.any(1),
                bounds.published(threshold) & right,
            )
            found.update({(threshold, name): int(mark.sum()) for name, mark in zip(NUMBERS, marks, strict=True)})
        return found

    counted = over_batches(maps, device, work)
    return [tuple(counted[threshold, name] for name in NUMBERS) for threshold in THRESHOLDS]


@final
@dataclass(frozen=True)
class Bounds:
    """What the bounds of all thresholds are made of, for masks that are the windows, class y = the true one.

    rest: t_k of every class; heavy: max over v of a_y(v); room: h |w|. A window w is the last axis.
    """

    rest: Int64[Tensor, "some classes regions"]
    heavy: Int64[Tensor, "some regions"]
    heavy_all: Int64[Tensor, "some classes regions"]
    targets: Int64[Tensor, " some"]
    room: int

    @classmethod
    def of(cls, evidence: EvidenceMap, windows: Windows, targets: Tensor) -> "Bounds":
        """Compute them for a batch."""
        rest = evidence.values.sum((2, 3)).unsqueeze(2) - sums(evidence.values, windows)
        heavy_all = heaviest(evidence.values, windows, windows)
        return cls(rest, select(heavy_all, targets), heavy_all, targets, evidence.high * int(windows.areas.min()))

    @property
    def mine(self) -> Int64[Tensor, "some regions"]:
        """t_y."""
        return select(self.rest, self.targets)

    def _lower(self, threshold: Fraction) -> Int64[Tensor, "some regions"]:
        """The score of y when its evidence in w is erased and nothing else happens: LB is at most this."""
        over = threshold.denominator * self.heavy > threshold.numerator * self.mine
        return self.mine - torch.where(over, self.heavy, 0)

    def published(self, threshold: Fraction) -> Bool[Tensor, " some"]:
        """Algorithm 2 as it is printed: no rival's t_k / (1 - T) exceeds that score. T = 1 divides by zero: nothing."""
        p, q = threshold.numerator, threshold.denominator
        if p == q:
            return torch.zeros_like(self.targets, dtype=torch.bool)
        exceeds = q * self.rest > (q - p) * self._lower(threshold).unsqueeze(1)
        return ~_others(exceeds, self.targets).flatten(1).any(1)

    def settled(self, threshold: Fraction) -> tuple[Bool[Tensor, " some"], Bool[Tensor, " some"]]:
        """Return which images are surely certified and which surely not, for 0 < T < 1 and unbounded evidence.

        LB lies between t_y - heavy and `_lower`; UB_k is t_k where detection is certain, else t_k / (1 - T), which is
        less than a whole window of the numerical ceiling would give.
        """
        p, q = threshold.numerator, threshold.denominator
        if bool((p * self.rest > (q - p) * self.room).any()):
            nothing = torch.zeros_like(self.targets, dtype=torch.bool)
            return nothing, nothing
        certain = (q - p) * self.heavy_all > p * self.rest  # heavy > T t_k / (1 - T)
        upper = torch.where(certain, (q - p) * self.rest, q * self.rest)  # (q - p) UB_k
        least = (q - p) * (self.mine - self.heavy).unsqueeze(1)
        most = (q - p) * self._lower(threshold).unsqueeze(1)
        yes = ~_others(upper >= least, self.targets).flatten(1).any(1)
        no = _others(upper >= most, self.targets).flatten(1).any(1)
        return yes, no


def _others(marked: Bool[Tensor, "some classes regions"], targets: Tensor) -> Bool[Tensor, "some classes regions"]:
    """Unmark the true class itself."""
    return marked.scatter(1, targets.view(-1, 1, 1).expand(-1, 1, marked.shape[2]), False)


def proved(
    evidence: EvidenceMap, windows: Windows, targets: Tensor, threshold: Fraction, bounds: Bounds, right: Tensor
) -> Bool[Tensor, " some"]:
    """Return which images the defense certifies; it is asked only about those that quick bounds leave open."""
    if threshold == 1:  # an attack that fills a window with unbounded evidence of a rival is never masked
        return torch.zeros_like(right)
    yes, no = bounds.settled(threshold) if threshold > 0 else (torch.zeros_like(right), ~right)
    found = yes & right
    if not windows.equal_boxes:  # the quick bounds are for masks that cover only themselves
        found, no = torch.zeros_like(right), ~right
    places = (right & ~found & ~no).nonzero().squeeze(1)
    if len(places):
        defense = RobustMasking(masks=windows, threshold=threshold)
        found[places] = defense.certify(evidence[places], windows, targets[places]).certified
    return found
