"""A few images of a run with the evidence behind their labels, chosen by a seeded draw, for pictures in a report."""

import hashlib
import heapq
import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from patchguard.data.loading import resized
from patchguard.defenses import RobustMasking
from patchguard.evidence import EvidenceMap
from patchguard.experiments.plan import Plan
from patchguard.experiments.records import Folder, Record
from patchguard.overlap import sums

EACH = {True: 8, False: 12}  # images per group, with and without classes
LONGEST = 320  # pixels of the longer side of a stored picture
ORDER = ("certified", "not certified", "wrong", "proved", "not proved")


def choose(records: Iterable[Record], settings: dict[str, Any]) -> list[tuple[str, Record]]:
    """Return up to 24 records with their groups, for the first patch.

    Every record has a rank that depends on its index alone; those of lowest rank are taken. So the choice does not
    depend on the order of the records, and one pass with few records in memory makes it.
    """
    labelled, key = bool(settings["labelled"]), settings["patches"][0]
    taken: dict[str, list[tuple[int, int, Record]]] = {}
    for record in records:
        if "error" in record:
            continue
        heap = taken.setdefault(_group(record, key, labelled), [])
        ranked = (-_rank(record["index"]), record["index"], record)
        if len(heap) < EACH[labelled]:
            heapq.heappush(heap, ranked)
        else:
            heapq.heappushpop(heap, ranked)
    chosen = [(group, record) for group in ORDER for _, _, record in taken.get(group, ())]
    return sorted(chosen, key=lambda pair: (ORDER.index(pair[0]), pair[1]["index"]))


def _group(record: Record, key: str, labelled: bool) -> str:
    entry = record["patches"][key]
    if not labelled:
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
        arrays |= {f"image_{number}": seen.picture, f"evidence_{number}": seen.label, f"rival_{number}": seen.rival}
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
                "grid": list(seen.label.shape),
            }
        )
    stored = io.BytesIO()
    np.savez_compressed(stored, allow_pickle=False, **arrays)
    folder.write_bytes("gallery.npz", stored.getvalue())
    folder.write("gallery.json", entries)


@final
@dataclass(frozen=True, eq=False)
class View:
    """A picture, the evidence of its label and of the rival, and the cells that are masked."""

    picture: UInt8[np.ndarray, "height width 3"]
    label: Float32[np.ndarray, "rows columns"]
    rival: Float32[np.ndarray, "rows columns"]
    mask: list[int] | None


def view(image: UInt8[Tensor, "3 _ _"], record: Record, evidence: EvidenceMap, plan: Plan) -> View:
    """Return what the report shows of one image, with its evidence computed anew."""
    entry = next(iter(record["patches"].values()))
    label, rival = _map(evidence, entry["label"]), _map(evidence, entry["rival"])
    return View(_picture(image), label, rival, _mask(plan, evidence, entry["label"]))


def _picture(image: UInt8[Tensor, "3 _ _"]) -> UInt8[np.ndarray, "height width 3"]:
    height, width = image.shape[1:]
    longer = max(height, width)
    if longer > LONGEST:
        image = resized(image, (max(1, height * LONGEST // longer), max(1, width * LONGEST // longer)))
    return np.asarray(image.permute(1, 2, 0).contiguous().numpy())


def _map(evidence: EvidenceMap, label: int) -> Float32[np.ndarray, "rows columns"]:
    values = evidence.values[0, label].double() / evidence.scale
    return np.asarray(values.float().cpu().numpy())


def _mask(plan: Plan, evidence: EvidenceMap, label: int) -> list[int] | None:
    """Return the cells that robust masking hides of the label's evidence; other rules hide no single window."""
    defense = plan.tasks[0].guard.defense
    if not isinstance(defense, RobustMasking):
        return None
    maps = evidence.values[0, label]
    hidden = sums(maps[None], defense.masks)[0]
    heaviest = int(torch.argmax(hidden))
    if int(hidden[heaviest]) <= defense.threshold * int(maps.sum()):
        return None
    box: list[int] = defense.masks.boxes[heaviest].tolist()
    return box
