"""What the records of an attack say: how much lies between what is proved and what was broken. Imports no torch."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, final

from patchguard.runs.metrics import Share, share

GROUPS = ("refuted", "broken", "open", "withstood")


def measure(records: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that a table or report of the attack shows, from one pass over its records.

    clean       the label is the true class
    attacked    and still is under this attack (or there is an alert, where the defense raises alerts)
    certified   and no patch whatever changes it
    broken      of those that are right and not certified: the attack succeeded. The rest of them is the gap: neither
                proved nor broken
    proved      no patch changes the label, right or wrong
    fallen      of those that are proved and were attacked: the label changed all the same, which must not be
    tried       was attacked at all: wrong images without a certificate, and those of the aim's class, are not
    alerts      of those attacked: an alert was raised
    aimed       of a targeted attack: the answer is the aim, of the images that are not of that class
    refuted     the images that have fallen
    """
    gap = Gap(settings)
    for record in records:
        gap.add(record)
    return gap.summary()


def group(record: Mapping[str, Any]) -> str:
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
class Gap:
    """Counts that grow with every record."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.labelled = bool(settings["labelled"])
        self.aim: int | None = settings["aim"]
        self.images = 0
        self.errors = 0
        self.counts: Counter[str] = Counter()
        self.refuted: list[int] = []

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one record."""
        self.images += 1
        if "error" in record:
            self.errors += 1
            return
        counts, proved = self.counts, bool(record["certified"])
        # Without true classes, the label of the clean image is what an attack must change.
        target = record["target"] if self.labelled else record["label"]
        right = record["label"] == target
        counts["read"] += 1
        counts["clean"] += right
        counts["attacked"] += right and (record["attacked"] == target or bool(record.get("alert")))
        counts["certified"] += right and proved
        counts["proved"] += proved
        counts["tried"] += record["places"] is not None
        counts["defied"] += proved and record["places"] is not None
        open_ = right and not proved and record["places"] is not None
        counts["open"] += open_
        counts["broken"] += open_ and bool(record["broken"])
        counts["alerts"] += record["places"] is not None and bool(record.get("alert"))
        if self.aim is not None and target != self.aim:
            counts["others"] += 1
            counts["aimed"] += bool(record["broken"])
        counts[f"masks {record['masks']}"] += 1
        if record["refuted"]:
            self.refuted.append(record["index"])
            counts["fallen"] += 1

    def summary(self) -> dict[str, Any]:
        """Return summary.json, but for what does not come from records."""
        kinds = [kind for kind in ("own", "refitted") if self.counts[f"masks {kind}"]]
        found: dict[str, Any] = {"images": self.images, "errors": self.errors, "labelled": self.labelled}
        found |= {name: self._share(name, "read") for name in ("clean", "attacked", "certified", "proved", "tried")}
        found["broken"] = self._share("broken", "open")
        found["fallen"] = self._share("fallen", "defied")
        found["alerts"] = self._share("alerts", "tried")
        found["aimed"] = None if self.aim is None else self._share("aimed", "others")
        found["masks"] = "mixed" if len(kinds) > 1 else kinds[0] if kinds else None
        found["refuted"] = sorted(self.refuted)
        return found

    def _share(self, right: str, of: str) -> Share:
        return share(self.counts[right], self.counts[of])
