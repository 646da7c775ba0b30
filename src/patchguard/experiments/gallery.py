"""A few images of a run with the evidence behind their labels, chosen by a seeded draw, for pictures in a report."""

import hashlib
import heapq
import io
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from patchguard.data.decode import Unreadable
from patchguard.data.loading import resized
from patchguard.defenses import RobustMasking
from patchguard.errors import InputError
from patchguard.evidence import EvidenceMap
from patchguard.experiments.job import Job, as_floats
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


def save(
    folder: Folder, chosen: list[tuple[str, Record]], job: Job, plan_of: Callable[[tuple[int, int]], Plan]
) -> None:
    """Compute the evidence of the chosen images anew, and write gallery.npz and gallery.json."""
    arrays: dict[str, np.ndarray] = {}
    entries: list[dict[str, Any]] = []
    for group, record in chosen:
        try:
            image = job.source.read(record["index"])
            size = (image.shape[1], image.shape[2])
            plan = plan_of(size)
        except (Unreadable, InputError):  # the file was changed or removed since it was recorded
            continue
        task = plan.tasks[0]
        entry = record["patches"][task.written.key]
        device = next(job.guard.model.parameters()).device
        evidence = job.guard.evidence(job.guard.local_logits(as_floats(image[None].to(device))))
        number = len(entries)
        arrays[f"image_{number}"] = _picture(image)
        arrays[f"evidence_{number}"] = _map(evidence, entry["label"])
        arrays[f"rival_{number}"] = _map(evidence, entry["rival"])
        kept = {name: entry[name] for name in ("label", "margin", "rival", "window", "box")}
        entries.append(
            {
                "index": record["index"],
                "name": record["name"],
                "group": group,
                "target": record["target"],
                **kept,
                "mask": _mask(plan, evidence, entry["label"]),
                "size": list(size),
                "grid": list(evidence.grid),
            }
        )
    stored = io.BytesIO()
    np.savez_compressed(stored, allow_pickle=False, **arrays)
    folder.write_bytes("gallery.npz", stored.getvalue())
    folder.write("gallery.json", entries)


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
