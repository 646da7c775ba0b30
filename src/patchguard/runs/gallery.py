"""A few images of a run with the evidence behind their labels, chosen by a seeded draw, for the report."""

import hashlib
import heapq
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

from patchguard.data.loading import resize_image
from patchguard.guard import Examination, Guard, Task
from patchguard.runs.metrics import certify_group
from patchguard.runs.records import Folder, Record
from patchguard.runs.summary import AttackPicture, CertifyPicture, CertifySettings

Pixels: TypeAlias = UInt8[Tensor, "3 _ _"]

EACH = {True: 8, False: 12}  # images per group, with and without classes
LONGEST = 320  # pixels of the longer side of a stored picture
ORDER = ("certified", "not certified", "wrong", "proved", "not proved")


def choose(records: Iterable[Record], settings: CertifySettings) -> list[tuple[str, Record]]:
    """Return up to 24 records with their groups, for the first patch."""
    key = settings.patches[0]
    draw = Draw(EACH[settings.labeled])
    for record in records:
        if "error" not in record:
            draw.offer(certify_group(record, key, settings.labeled), record)
    return draw.list_taken(ORDER)


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

    def list_taken(self, order: Sequence[str]) -> list[tuple[str, Record]]:
        """Return the records with their groups, in this order of groups."""
        return [
            (group, record)
            for group in order
            for record in sorted((entry[2] for entry in self.groups.get(group, ())), key=lambda each: each["index"])
        ]


def _rank(index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"gallery {index}".encode()).digest()[:8], "big")


# -- pictures ----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Shown:
    """What the report shows of one image: its entry in gallery.json, and arrays for gallery.npz by name."""

    entry: CertifyPicture | AttackPicture
    arrays: dict[str, np.ndarray]


def show_certified(
    group: str, record: Record, image: Pixels, guard: Guard, examination: Examination, task: Task
) -> Shown:
    """Return the image, which was examined alone, with the evidence of its label and of the rival."""
    entry = next(iter(record["patches"].values()))
    overlay = guard.picture(examination, 0, task, (entry["label"], entry["rival"]))
    arrays: dict[str, np.ndarray] = {"image": shrink(image)}
    if overlay is not None:
        arrays["evidence"], arrays["rival"] = (np.asarray(each.numpy()) for each in overlay.maps)
    shown = CertifyPicture(
        group=group,
        **{name: record[name] for name in ("index", "name", "target", "size")},
        **{name: entry[name] for name in ("label", "margin", "rival", "window", "box")},
        grid=None if overlay is None else (arrays["evidence"].shape[0], arrays["evidence"].shape[1]),
        mask=None if overlay is None else overlay.mask,
    )
    return Shown(shown, arrays)


def show_attacked(
    group: str,
    record: Record,
    original: Pixels,
    attacked: Pixels,
    guard: Guard,
    examination: Examination,
    task: Task,
) -> Shown:
    """Return the image before and after, examined together, with the evidence of its label and of the other class."""
    assert examination.prediction is not None
    other = find_other_class(record, examination.prediction.scores[1])
    arrays: dict[str, np.ndarray] = {"original": shrink(original), "attacked": shrink(attacked)}
    for row, when in enumerate(("before", "after")):
        overlay = guard.picture(examination, row, task, (record["label"], other))
        if overlay is not None:
            arrays[when], arrays[f"other_{when}"] = (np.asarray(each.numpy()) for each in overlay.maps)
    names = ("index", "name", "target", "label", "margin", "attacked", "size", "patch", "places")
    known = {name: record[name] for name in names}
    return Shown(AttackPicture(group=group, other=other, alert=record.get("alert"), **known), arrays)


def find_other_class(record: Record, scores: Float64[Tensor, " classes"]) -> int:
    """Return the class that won; else the rival of the proof; without a proof, the one whose score is next."""
    other: int = record["attacked"]
    if other == record["label"]:
        others = scores.clone()
        others[record["label"]] = -torch.inf
        other = int(others.argmax()) if record["margin"] is None else record["rival"]
    return other


def save(folder: Folder, pictures: Iterable[Shown | None]) -> None:
    """Write gallery.npz and gallery.json; images whose files have changed since are None and left out."""
    shown = [picture for picture in pictures if picture is not None]
    arrays = {f"{name}_{number}": value for number, each in enumerate(shown) for name, value in each.arrays.items()}
    stored = io.BytesIO()
    np.savez_compressed(stored, allow_pickle=False, **arrays)
    folder.write_bytes("gallery.npz", stored.getvalue())
    folder.write("gallery.json", [each.entry for each in shown])


def shrink(image: Pixels) -> UInt8[np.ndarray, "height width 3"]:
    """Return pixels for a page, no larger than it shows them."""
    height, width = image.shape[1:]
    longer = max(height, width)
    if longer > LONGEST:
        image = resize_image(image, (max(1, height * LONGEST // longer), max(1, width * LONGEST // longer)))
    return np.asarray(image.permute(1, 2, 0).contiguous().numpy())
