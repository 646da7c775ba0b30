"""A few images of a run with the evidence behind their labels, chosen by a seeded draw, for pictures in a report."""

import hashlib
import heapq
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from jaxtyping import Float32, UInt8
from torch import Tensor

from patchguard.data.loading import resize_image
from patchguard.guard import Examination, Guard, Task
from patchguard.runs.records import Folder, Record
from patchguard.runs.summary import CertifySettings

EACH = {True: 8, False: 12}  # images per group, with and without classes
LONGEST = 320  # pixels of the longer side of a stored picture
ORDER = ("certified", "not certified", "wrong", "proved", "not proved")


def choose(records: Iterable[Record], settings: CertifySettings) -> list[tuple[str, Record]]:
    """Return up to 24 records with their groups, for the first patch."""
    key = settings.patches[0]
    draw = Draw(EACH[settings.labeled])
    for record in records:
        if "error" not in record:
            draw.offer(_group(record, key, settings.labeled), record)
    return draw.taken(ORDER)


@final
class Draw:
    """Up to `each` records of every group, drawn as they come.

    Every record has a rank that depends on its index alone; those of lowest rank are taken. So the draw does not
    depend on the order of the records, and few of them are in memory.
    """

    def __init__(self, each: int) -> None:
        self.each = each
        self.groups: dict[str, list[tuple[int, int, Record]]] = {}

    def wants(self, group: str, index: int) -> bool:
        """Whether a record would be taken, were it offered now."""
        heap = self.groups.get(group, [])
        return len(heap) < self.each or (-_rank(index), index) > heap[0][:2]

    def offer(self, group: str, record: Record) -> None:
        """Take a record if its rank is low enough, and let go of the highest."""
        heap = self.groups.setdefault(group, [])
        ranked = (-_rank(record["index"]), record["index"], record)
        if len(heap) < self.each:
            heapq.heappush(heap, ranked)
        else:
            heapq.heappushpop(heap, ranked)

    def taken(self, order: Sequence[str]) -> list[tuple[str, Record]]:
        """Return the records with their groups, in this order of groups."""
        return [
            (group, record)
            for group in order
            for record in sorted((entry[2] for entry in self.groups.get(group, ())), key=lambda each: each["index"])
        ]


def _group(record: Record, key: str, labeled: bool) -> str:
    entry = record["patches"][key]
    if not labeled:
        return "proved" if entry["certified"] else "not proved"
    if entry["label"] != record["target"]:
        return "wrong"
    return "certified" if entry["certified"] else "not certified"


def _rank(index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"gallery {index}".encode()).digest()[:8], "big")


def save(folder: Folder, chosen: list[tuple[str, Record]], views: list["View | None"]) -> None:
    """Write gallery.npz and gallery.json: the chosen records, each with what `view` found, if anything."""
    arrays: dict[str, np.ndarray] = {}
    entries: list[dict[str, Any]] = []
    for (group, record), seen in zip(chosen, views, strict=True):
        if seen is None:
            continue
        number = len(entries)
        arrays[f"image_{number}"] = seen.picture
        if seen.label is not None and seen.rival is not None:
            arrays |= {f"evidence_{number}": seen.label, f"rival_{number}": seen.rival}
        entry = next(iter(record["patches"].values()))
        entries.append(
            {
                "index": record["index"],
                "name": record["name"],
                "group": group,
                "target": record["target"],
                **{name: entry[name] for name in ("label", "margin", "rival", "window", "box")},
                "mask": seen.mask,
                "size": record["size"],
                "grid": None if seen.label is None else list(seen.label.shape),
            }
        )
    stored = io.BytesIO()
    np.savez_compressed(stored, allow_pickle=False, **arrays)
    folder.write_bytes("gallery.npz", stored.getvalue())
    folder.write("gallery.json", entries)


@final
@dataclass(frozen=True, eq=False)
class View:
    """A picture, the evidence of its label and of the rival, and the cells that are masked, if any."""

    picture: UInt8[np.ndarray, "height width 3"]
    label: Float32[np.ndarray, "rows columns"] | None
    rival: Float32[np.ndarray, "rows columns"] | None
    mask: list[int] | None


def view(image: UInt8[Tensor, "3 _ _"], record: Record, guard: Guard, examination: Examination, task: Task) -> View:
    """Return what the report shows of one image, which was examined alone."""
    entry = next(iter(record["patches"].values()))
    drawn = guard.picture(examination, 0, task, (entry["label"], entry["rival"]))
    if drawn is None:
        return View(picture(image), None, None, None)
    label, rival = (np.asarray(each.numpy()) for each in drawn.maps)
    return View(picture(image), label, rival, None if drawn.mask is None else list(drawn.mask))


def picture(image: UInt8[Tensor, "3 _ _"]) -> UInt8[np.ndarray, "height width 3"]:
    """Return pixels for a page, no larger than it shows them."""
    height, width = image.shape[1:]
    longer = max(height, width)
    if longer > LONGEST:
        image = resize_image(image, (max(1, height * LONGEST // longer), max(1, width * LONGEST // longer)))
    return np.asarray(image.permute(1, 2, 0).contiguous().numpy())
