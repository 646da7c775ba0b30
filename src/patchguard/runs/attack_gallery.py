"""A few images of an attack, before and after, with the evidence behind their labels, for pictures in a report."""

import io
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from patchguard.defenses.evidence import EvidenceMap
from patchguard.runs.gallery import map_of, picture
from patchguard.runs.records import Folder, Record

SHOWN = ("index", "name", "target", "label", "attacked", "margin", "rival", "places", "patch", "size")


@final
@dataclass(frozen=True, eq=False)
class View:
    """An image before and after, the evidence of its label in both, and of the class that gained most."""

    original: UInt8[np.ndarray, "height width 3"]
    attacked: UInt8[np.ndarray, "height width 3"]
    before: Float32[np.ndarray, "rows columns"]
    after: Float32[np.ndarray, "rows columns"]
    other_before: Float32[np.ndarray, "rows columns"]
    other_after: Float32[np.ndarray, "rows columns"]
    other: int


def view(
    original: UInt8[Tensor, "3 _ _"], attacked: UInt8[Tensor, "3 _ _"], record: Record, evidence: EvidenceMap
) -> View:
    """Return what the report shows; `evidence` is that of the original and of the attacked image.

    The other class is the one that won; where none did, the rival of the proof; without a proof, the one with most
    evidence in the attacked image.
    """
    label = record["label"]
    first, second = evidence[:1], evidence[1:]
    if record["attacked"] != label:
        other = record["attacked"]
    elif record["margin"] is not None:
        other = record["rival"]
    else:
        total = second.values.sum((2, 3))[0].double()
        total[label] = -torch.inf
        other = int(total.argmax())
    return View(
        picture(original),
        picture(attacked),
        map_of(first, label),
        map_of(second, label),
        map_of(first, other),
        map_of(second, other),
        other,
    )


def save(folder: Folder, chosen: list[tuple[str, Record]], views: list[View | None]) -> None:
    """Write gallery.npz and gallery.json: the chosen records, each with what `view` found, if anything."""
    arrays: dict[str, np.ndarray] = {}
    entries: list[dict[str, Any]] = []
    for (group, record), seen in zip(chosen, views, strict=True):
        if seen is None:
            continue
        number = len(entries)
        for name in ("original", "attacked", "before", "after", "other_before", "other_after"):
            arrays[f"{name}_{number}"] = getattr(seen, name)
        entry = {name: record[name] for name in SHOWN}
        entries.append({**entry, "group": group, "other": seen.other, "alert": record.get("alert")})
    stored = io.BytesIO()
    np.savez_compressed(stored, allow_pickle=False, **arrays)
    folder.write_bytes("gallery.npz", stored.getvalue())
    folder.write("gallery.json", entries)
