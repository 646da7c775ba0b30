"""What the records of a run say: fractions with 95 % intervals, curves, classes, histograms. Imports no torch."""

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, final

from patchguard.runs.summary import (
    AttackSettings,
    AttackSummary,
    CertifySettings,
    CertifySummary,
    ClassSummary,
    Curve,
    Histogram,
    Masks,
    PatchSummary,
    Proportion,
)

NORMAL_95 = 1.959963984540054  # 95 % of a normal distribution lie within so many deviations
BINS = 40
CUT = 0.005  # fraction of the margins at each end that the histogram collects in its outermost bins
MARGIN_GROUPS = ("certified", "not_certified", "wrong")
ATTACK_GROUPS = ("refuted", "broken", "open", "withstood")
MASKS = ("own", "refitted")

Record = Mapping[str, Any]


def wilson(correct: int, total: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a fraction.

    >>> [round(bound, 3) for bound in wilson(8, 10)]
    [0.49, 0.943]
    """
    if total == 0:
        return 0.0, 1.0
    square = NORMAL_95**2
    center = (correct + square / 2) / (total + square)
    spread = NORMAL_95 / (total + square) * math.sqrt(correct * (total - correct) / total + square / 4)
    return (0.0 if correct == 0 else center - spread), (1.0 if correct == total else center + spread)


def proportion(correct: int, total: int) -> Proportion:
    """Return a count as a fraction with its interval; the fraction of nothing is None."""
    low, high = wilson(correct, total)
    fraction = correct / total if total else None
    return Proportion(correct=correct, total=total, fraction=fraction, low=low, high=high)


# -- certify -----------------------------------------------------------------------------------------------------------


@final
class CertifyTally:
    """Counts that grow with every record. Memory: some numbers, and one margin per image and patch."""

    def __init__(self, settings: CertifySettings) -> None:
        self.settings = settings
        self.images = 0
        self.errors = 0
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.margins: dict[tuple[str, str], array[float]] = {}

    def add(self, record: Record) -> None:
        """Count one record."""
        self.images += 1
        if "error" in record:
            self.errors += 1
            return
        target, counts = record["target"], self.counts
        if record.get("undefended") is not None:
            counts["undefended", "total"] += 1
            counts["undefended", "clean"] += record["undefended"] == target
        counts["class", str(target)] += 1
        # Masks fitted to a patch are another rule: correct and certified are counted of the same one.
        counts["class clean", str(target)] += record["patches"][self.settings.patches[0]]["label"] == target
        for key, entry in record["patches"].items():
            proved = self._count("patch", key, entry, target)
            counts["class certified", key, str(target)] += proved and entry["label"] == target
            counts["masks", key, entry["masks"]] += 1
            if entry["margin"] is not None:
                wrong = self.settings.labeled and entry["label"] != target
                group = "wrong" if wrong else "certified" if proved else "not_certified"
                self.margins.setdefault((key, group), array("d")).append(entry["margin"])
        for side in self.settings.curve:
            if record.get("largest") is not None:
                kept = {"label": record["label"], "certified": record["largest"] >= side}
                self._count("kept", str(side), kept, target)
            if str(side) in record["refitted"]:
                self._count("refitted", str(side), record["refitted"][str(side)], target)

    def _count(self, what: str, key: str, entry: Record, target: int | None) -> bool:
        correct, proved = entry["label"] == target, bool(entry["certified"])
        self.counts[what, key, "total"] += 1
        self.counts[what, key, "clean"] += correct
        self.counts[what, key, "proved"] += proved
        self.counts[what, key, "certified"] += proved and correct
        return proved

    @property
    def accuracy(self) -> tuple[float | None, float | None]:
        """The fraction that is correct, or None without classes; and that is certified, for the first patch."""
        first = self._summarize_patch("patch", self.settings.patches[0])
        return first.clean.fraction if first.clean else None, first.main.fraction

    def summarize(self, **facts: Any) -> CertifySummary:
        """Return the summary; `facts` are seconds and environment, which do not come from records."""
        settings, labeled = self.settings, self.settings.labeled
        undefended = proportion(self.counts["undefended", "clean"], self.counts["undefended", "total"])
        curve = Curve(
            kept={side: self._summarize_patch("kept", str(side)).main for side in settings.curve},
            refitted={side: self._summarize_patch("refitted", str(side)) for side in settings.curve},
        )
        return CertifySummary(
            images=self.images,
            errors=self.errors,
            labeled=labeled,
            undefended=undefended if labeled and undefended.total else None,
            patches={key: self._summarize_patch("patch", key) for key in settings.patches},
            curve=curve,
            classes=self._summarize_classes() if labeled else [],
            margins={key: self._bin_margins(key) for key in settings.patches},
            settings=settings,
            **facts,
        )

    def _summarize_patch(self, what: str, key: str) -> PatchSummary:
        total = self.counts[what, key, "total"]
        names = ("clean", "certified", "proved") if self.settings.labeled else ("proved",)
        numbers = {name: proportion(self.counts[what, key, name], total) for name in names}
        return PatchSummary(**numbers, masks=_join_masks(*(self.counts["masks", key, kind] for kind in MASKS)))

    def _summarize_classes(self) -> list[ClassSummary]:
        return [
            ClassSummary(
                name=name,
                total=self.counts["class", str(number)],
                clean=self.counts["class clean", str(number)],
                certified={key: self.counts["class certified", key, str(number)] for key in self.settings.patches},
            )
            for number, name in enumerate(self.settings.class_names)
        ]

    def _bin_margins(self, key: str) -> Histogram:
        groups = {group: self.margins.get((key, group), array("d")) for group in MARGIN_GROUPS}
        edges = _choose_edges([margin for margins in groups.values() for margin in margins])
        return Histogram(edges=edges, **{group: _count_bins(margins, edges) for group, margins in groups.items()})


def _join_masks(own: int, refitted: int) -> Masks | None:
    """Return which masks were used, from the numbers of records with either kind."""
    return ("mixed" if refitted else "own") if own else ("refitted" if refitted else None)


def _choose_edges(margins: list[float]) -> list[float]:
    """Return the edges of bins of equal width, one of them at 0: margins above it are proved."""
    if not margins:
        return []
    margins.sort()
    cut = int(CUT * len(margins))
    low, high = min(margins[cut], 0.0), max(margins[-1 - cut], 0.0)
    width = (high - low) / BINS or 1.0
    below = max(math.ceil(-low / width), int(margins[0] <= 0))
    above = max(math.ceil(high / width), int(margins[-1] > 0))
    return [width * number for number in range(-below, above + 1)]


def _count_bins(margins: Sequence[float], edges: list[float]) -> list[int]:
    """Count the margins in each bin (low, high]; those beyond the ends count in the outermost bins."""
    counts = [0] * max(0, len(edges) - 1)
    for margin in margins:
        # Counted from the edge at 0, so that rounding cannot move a margin across it.
        index = edges.index(0.0) + math.ceil(margin / (edges[1] - edges[0])) - 1
        counts[min(max(index, 0), len(counts) - 1)] += 1
    return counts


def certify_group(record: Record, key: str, labeled: bool) -> str:
    """Return how a certified image came out."""
    entry = record["patches"][key]
    if not labeled:
        return "proved" if entry["certified"] else "not proved"
    if entry["label"] != record["target"]:
        return "wrong"
    return "certified" if entry["certified"] else "not certified"


# -- attack ------------------------------------------------------------------------------------------------------------


def attack_group(record: Record) -> str:
    """Return how an attacked image came out.

    refuted     proved to keep its label, and lost it
    broken      not proved, and broken
    open        not proved, and not broken: another attack may do it
    withstood   proved, and kept its label
    """
    if record["refuted"]:
        return "refuted"
    if record["certified"]:
        return "withstood"
    return "broken" if record["broken"] else "open"


@final
class AttackTally:
    """Counts that grow with every record of an attack; `AttackSummary` says what they mean."""

    def __init__(self, settings: AttackSettings) -> None:
        self.settings = settings
        self.images = 0
        self.errors = 0
        self.counts: Counter[str] = Counter()
        self.refuted: list[int] = []

    def add(self, record: Record) -> None:
        """Count one record."""
        self.images += 1
        if "error" in record:
            self.errors += 1
            return
        counts, aim = self.counts, self.settings.aim
        proved, attempted = bool(record["certified"]), record["places"] is not None
        # Without true classes, the label of the clean image is what an attack must change.
        target = record["target"] if self.settings.labeled else record["label"]
        correct = record["label"] == target
        counts["read"] += 1
        counts["clean"] += correct
        counts["attacked"] += correct and (record["attacked"] == target or bool(record.get("alert")))
        counts["certified"] += correct and proved
        counts["proved"] += proved
        counts["attempted"] += attempted
        counts["proved and attempted"] += proved and attempted
        unproved = correct and attempted and not proved
        counts["unproved"] += unproved
        counts["broken"] += unproved and bool(record["broken"])
        counts["alerts"] += attempted and bool(record.get("alert"))
        if aim is not None and target != aim:
            counts["not of the aim"] += 1
            counts["aimed"] += bool(record["broken"])
        counts[f"masks {record['masks']}"] += 1
        if record["refuted"]:
            self.refuted.append(record["index"])

    def summarize(self, **facts: Any) -> AttackSummary:
        """Return the summary; `facts` are seconds and environment, which do not come from records."""
        counts = self.counts
        of_all: dict[str, Any] = {
            name: proportion(counts[name], counts["read"])
            for name in ("clean", "attacked", "certified", "proved", "attempted")
        }
        return AttackSummary(
            images=self.images,
            errors=self.errors,
            labeled=self.settings.labeled,
            **of_all,
            broken=proportion(counts["broken"], counts["unproved"]),
            certified_broken=proportion(len(self.refuted), counts["proved and attempted"]),
            alerts=proportion(counts["alerts"], counts["attempted"]),
            aimed=None if self.settings.aim is None else proportion(counts["aimed"], counts["not of the aim"]),
            masks=_join_masks(*(counts[f"masks {kind}"] for kind in MASKS)),
            refuted=sorted(self.refuted),
            settings=self.settings,
            **facts,
        )
