"""A few images of an attack, before and after, with the evidence behind their labels, for pictures in a report."""

import io
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float32, Float64, UInt8
from torch import Tensor

from patchguard.guard import Examination, Guard, Task
from patchguard.runs.gallery import picture
from patchguard.runs.records import Folder, Record

SHOWN = ("index", "name", "target", "label", "attacked", "margin", "rival", "places", "patch", "size")
ORDER = ("original", "attacked", "before", "after", "other_before", "other_after")


@final
@dataclass(frozen=True, eq=False)
class View:
    """An image before and after, and the class that gained most.

    `maps` hold the evidence of the label before and after, and of the other class, where the guard has such.
    """

    original: UInt8[np.ndarray, "height width 3"]
    attacked: UInt8[np.ndarray, "height width 3"]
    other: int
    maps: dict[str, Float32[np.ndarray, "rows columns"]]


def view(
    original: UInt8[Tensor, "3 _ _"],
    attacked: UInt8[Tensor, "3 _ _"],
    record: Record,
    guard: Guard,
    examination: Examination,
    task: Task,
) -> View:
    """Return what the report shows; `examination` is that of the original and of the attacked image."""
    assert examination.prediction is not None
    label, other = record["label"], find_other_class(record, examination.prediction.scores[1])
    maps: dict[str, Float32[np.ndarray, "rows columns"]] = {}
    for row, when in enumerate(("before", "after")):
        drawn = guard.picture(examination, row, task, (label, other))
        if drawn is not None:
            maps[when], maps[f"other_{when}"] = (np.asarray(each.numpy()) for each in drawn.maps)
    return View(picture(original), picture(attacked), other, maps)


def find_other_class(record: Record, scores: Float64[Tensor, " classes"]) -> int:
    """Return the class that won; else the rival of the proof; without a proof, the one whose score is next."""
    other: int = record["attacked"]
    if other == record["label"]:
        others = scores.clone()
        others[record["label"]] = -torch.inf
        other = int(others.argmax()) if record["margin"] is None else record["rival"]
    return other


def save(folder: Folder, chosen: list[tuple[str, Record]], views: list[View | None]) -> None:
    """Write gallery.npz and gallery.json: the chosen records, each with what `view` found, if anything."""
    arrays: dict[str, np.ndarray] = {}
    entries: list[dict[str, Any]] = []
    for (group, record), seen in zip(chosen, views, strict=True):
        if seen is None:
            continue
        number = len(entries)
        drawn = {"original": seen.original, "attacked": seen.attacked, **seen.maps}
        arrays |= {f"{name}_{number}": drawn[name] for name in ORDER if name in drawn}
        entry = {name: record[name] for name in SHOWN}
        entries.append({**entry, "group": group, "other": seen.other, "alert": record.get("alert")})
    stored = io.BytesIO()
    np.savez_compressed(stored, allow_pickle=False, **arrays)
    folder.write_bytes("gallery.npz", stored.getvalue())
    folder.write("gallery.json", entries)
