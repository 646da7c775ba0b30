"""What the records of a run say: shares with 95 % intervals, curves, classes, histograms. Imports no torch."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from patchguard.runs.records import FORMAT

Share = dict[str, float | int | None]

NORMAL_95 = 1.959963984540054  # 95 % of a normal distribution lie within so many deviations
BINS = 40
CUT = 0.005  # share of the margins at each end that the histogram collects in its outermost bins


def wilson(right: int, of: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share.

    >>> [round(bound, 3) for bound in wilson(8, 10)]
    [0.49, 0.943]
    """
    if of == 0:
        return 0.0, 1.0
    square = NORMAL_95**2
    centre = (right + square / 2) / (of + square)
    spread = NORMAL_95 / (of + square) * math.sqrt(right * (of - right) / of + square / 4)
    return (0.0 if right == 0 else centre - spread), (1.0 if right == of else centre + spread)


def share(right: int, of: int) -> Share:
    """Return a count as a share with its interval; the share of nothing is None."""
    low, high = wilson(right, of)
    return {"right": right, "of": of, "share": right / of if of else None, "low": low, "high": high}


def summarise(records: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that a table or report of the run shows, from one pass over its records.

    clean       the label is the true class
    certified   and no patch changes it
    proved      no patch changes the label, right or wrong
    """
    tally = Tally(settings)
    for record in records:
        tally.add(record)
    return tally.summary()


def make_summary(
    found: Mapping[str, Any], stamp: Mapping[str, Any], seconds: Mapping[str, float | None]
) -> dict[str, Any]:
    """Return summary.json: what the records say, with settings and versions out of run.json."""
    masks = {key: entry["masks"] for key, entry in found["patches"].items()}
    return {
        "format": FORMAT,
        **found,
        "seconds": dict(seconds),
        "settings": {**stamp["settings"], "masks": masks},
        "environment": stamp["environment"],
    }


@final
class Tally:
    """Counts that grow with every record. Memory: some numbers, and one margin per image and patch."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.labelled = bool(settings["labelled"])
        self.keys: list[str] = list(settings["patches"])
        self.sides: list[int] = list(settings["curve"])
        self.images = 0
        self.errors = 0
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.margins: dict[tuple[str, str], array[float]] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one record."""
        self.images += 1
        if "error" in record:
            self.errors += 1
            return
        target, counts = record["target"], self.counts
        counts["read",] += 1
        counts["undefended",] += record["undefended"] == target
        counts["clean",] += record["label"] == target
        counts["class", str(target)] += 1
        # Masks fitted to a patch are another rule: what is right and what is certified are counted of the same one.
        counts["class clean", str(target)] += record["patches"][self.keys[0]]["label"] == target
        for key, entry in record["patches"].items():
            right = entry["label"] == target
            proved = bool(entry["certified"])
            counts["of", key] += 1
            counts["clean", key] += right
            counts["proved", key] += proved
            counts["certified", key] += proved and right
            counts["class certified", key, str(target)] += proved and right
            counts["masks", key, entry["masks"]] += 1
            if entry["margin"] is not None:
                group = "wrong" if self.labelled and not right else "certified" if proved else "not_certified"
                self.margins.setdefault((key, group), array("d")).append(entry["margin"])
        for side in self.sides:
            kept = record["largest"] >= side
            counts["kept proved", str(side)] += kept
            counts["kept", str(side)] += kept and record["label"] == target
            again = record["refitted"].get(str(side))
            if again is not None:
                right = again["label"] == target
                counts["refitted of", str(side)] += 1
                counts["refitted clean", str(side)] += right
                counts["refitted proved", str(side)] += bool(again["certified"])
                counts["refitted certified", str(side)] += right and bool(again["certified"])

    @property
    def accuracy(self) -> tuple[float | None, float | None]:
        """The share that is right, or None without classes; and that is certified (proved) for the first patch."""
        read, first = self.counts["read",], self.keys[0]
        if read == 0:
            return None, None
        if not self.labelled:
            return None, self.counts["proved", first] / read
        return self.counts["clean", first] / read, self.counts["certified", first] / read

    def summary(self) -> dict[str, Any]:
        """Return summary.json, but for what does not come from records."""
        found: dict[str, Any] = {"images": self.images, "errors": self.errors, "labelled": self.labelled}
        if self.labelled:
            found["undefended"] = self._share(("undefended",), ("read",))
        found["patches"] = {key: self._patch(key) for key in self.keys}
        found["curve"] = self._curve()
        if self.labelled:
            found["classes"] = self._classes()
        found["margins"] = {key: self._histogram(key) for key in self.keys}
        return found

    def _share(self, right: tuple[str, ...], of: tuple[str, ...]) -> Share:
        return share(self.counts[right], self.counts[of])

    def _patch(self, key: str) -> dict[str, Any]:
        names = ("clean", "certified", "proved") if self.labelled else ("proved",)
        kinds = [kind for kind in ("own", "refitted") if self.counts["masks", key, kind]]
        shares: dict[str, Any] = {name: self._share((name, key), ("of", key)) for name in names}
        return {**shares, "masks": "mixed" if len(kinds) > 1 else kinds[0] if kinds else None}

    def _curve(self) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        refitted: dict[str, Any] = {}
        for side in map(str, self.sides):
            kept[side] = self._share(("kept" if self.labelled else "kept proved", side), ("read",))
            names = ("clean", "certified", "proved") if self.labelled else ("proved",)
            refitted[side] = {name: self._share((f"refitted {name}", side), ("refitted of", side)) for name in names}
        return {"kept": kept, "refitted": refitted}

    def _classes(self) -> list[dict[str, Any]]:
        rows = []
        for number, name in enumerate(self.settings["class_names"]):
            of = self.counts["class", str(number)]
            certified = {key: self.counts["class certified", key, str(number)] for key in self.keys}
            rows.append(
                {"name": name, "of": of, "clean": self.counts["class clean", str(number)], "certified": certified}
            )
        return rows

    def _histogram(self, key: str) -> dict[str, list[Any]]:
        groups = {group: self.margins.get((key, group), array("d")) for group in GROUPS}
        edges = _edges([margin for margins in groups.values() for margin in margins])
        return {"edges": edges, **{group: _binned(margins, edges) for group, margins in groups.items()}}


GROUPS = ("certified", "not_certified", "wrong")


def _edges(margins: list[float]) -> list[float]:
    """Return the edges of bins of equal width, one of them at 0: what is right of it is proved."""
    if not margins:
        return []
    margins.sort()
    cut = int(CUT * len(margins))
    low, high = min(margins[cut], 0.0), max(margins[-1 - cut], 0.0)
    width = (high - low) / BINS or 1.0
    below = max(math.ceil(-low / width), int(margins[0] <= 0))
    above = max(math.ceil(high / width), int(margins[-1] > 0))
    return [width * number for number in range(-below, above + 1)]


def _binned(margins: Sequence[float], edges: list[float]) -> list[int]:
    """Count the margins in each bin (low, high]; those beyond the ends count in the outermost bins."""
    counts = [0] * max(0, len(edges) - 1)
    for margin in margins:
        # Counted from the edge at 0, so that rounding cannot move a margin across it.
        place = edges.index(0.0) + math.ceil(margin / (edges[1] - edges[0])) - 1
        counts[min(max(place, 0), len(counts) - 1)] += 1
    return counts
