"""Finished run folders for tests of the report, made up from seeded numbers and pictures of the embedded sample."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

ENVIRONMENT = {
    "patchguard": "0.1.0",
    "python": "3.11.7",
    "torch": "2.13.0",
    "numpy": "2.4.0",
    "system": "Linux x86_64",
    "cpu_count": 2,
    "threads": 2,
    "gpu": None,
    "cuda": None,
    "cudnn": None,
}
EVIDENCE = {"kind": "logits", "low": None, "high": None, "drift": 0.001, "threshold": 0.2, "bits": 20}
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def fabricate(
    folder: Path,
    *,
    images: int = 60,
    patches: tuple[str, ...] = ("5x5",),
    class_names: list[str] = CIFAR10,
    labelled: bool = True,
    certified: float = 0.6,
    errors: int = 0,
    curve: tuple[int, ...] = (1, 2, 3, 5, 8),
    pictures: int = 24,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Write a run folder: `certified` is about the share of images whose label is proved for the first patch."""
    draw = np.random.default_rng(seed)
    records: list[dict[str, Any]] = []
    for index in range(images):
        target, other = (int(each) for each in draw.integers(len(class_names), size=2))
        label = target if draw.random() < 0.85 else other
        strength = float(draw.normal(60 * (certified - 0.5), 25)) if 0 < certified < 1 else 30 * (2 * certified - 1)
        entries = {}
        for place, patch in enumerate(patches):
            margin = strength - 9 * place
            entries[patch] = {
                "label": label,
                "margin": margin,
                "certified": margin > 0,
                "rival": (label + 1) % len(class_names),
                "weakest": 17,
                "window": [4, 15, 6, 17],
                "box": [7, 9, 5, 5],
            }
        records.append(
            {
                "index": index,
                "name": f"test/{index:05d}",
                "size": [32, 32],
                "target": target if labelled else None,
                "undefended": target if draw.random() < 0.9 else other,
                "label": label,
                "patches": entries,
                "largest": max([side for side in curve if strength + 5 * (5 - side) > 0], default=0),
                "refitted": {str(side): {"label": label, "certified": strength + 6 * (5 - side) > 0} for side in curve},
            }
        )
    records += [{"index": images + k, "name": f"broken-{k}.jpg", "error": "is truncated"} for k in range(errors)]
    return save(
        folder,
        records,
        made_settings(images + errors, patches, class_names, labelled, curve) | settings,
        made_pictures(records, patches[0], pictures, draw),
    )


def made_settings(
    images: int, patches: tuple[str, ...], class_names: list[str], labelled: bool, curve: tuple[int, ...]
) -> dict[str, Any]:
    """Return settings as `patchguard certify` writes them."""
    return {
        "model": "cifar10",
        "model_digest": "3f1c" * 16,
        "data": "sample",
        "images": images,
        "patches": list(patches),
        "masks": {patch: "own" if place == 0 else "refitted" for place, patch in enumerate(patches)},
        "defense": "DoubleMasking",
        "evidence": EVIDENCE,
        "threshold": None,
        "top_k": 1,
        "curve": list(curve),
        "class_names": class_names,
        "labelled": labelled,
        "shards": 1,
        "certificates": False,
    }


def made_pictures(
    records: list[dict[str, Any]], patch: str, limit: int, draw: np.random.Generator
) -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Return entries of the gallery with their arrays; evidence is a blob in the middle of the picture."""
    from patchguard.data import sample

    images = sample.load().images.numpy()
    rows, columns = np.mgrid[0:32, 0:32]
    made = []
    for record in [record for record in records if "error" not in record][:limit]:
        entry = record["patches"][patch]
        top, left = draw.integers(8, 24, size=2)
        blob = np.exp(-((rows - top) ** 2 + (columns - left) ** 2) / 60) - 0.15 * draw.random((32, 32))
        arrays = {
            "image": images[record["index"] % len(images)].transpose(1, 2, 0),
            "evidence": blob.astype(np.float32),
            "rival": (0.5 * blob[::-1]).astype(np.float32),
        }
        made.append((picture(record, entry, mask=[9, 20, 8, 19], grid=[32, 32]), arrays))
    return made


def picture(
    record: dict[str, Any], entry: dict[str, Any], *, mask: list[int] | None, grid: list[int]
) -> dict[str, Any]:
    """Return one entry of gallery.json."""
    if record["target"] is None:
        group = "proved" if entry["certified"] else "not proved"
    elif entry["label"] != record["target"]:
        group = "wrong"
    else:
        group = "certified" if entry["certified"] else "not certified"
    kept = {key: record[key] for key in ("index", "name", "target", "size")}
    kept |= {key: entry[key] for key in ("label", "margin", "rival", "window", "box")}
    return kept | {"group": group, "mask": mask, "grid": grid}


def save(
    folder: Path,
    records: list[dict[str, Any]],
    settings: dict[str, Any],
    pictures: list[tuple[dict[str, Any], dict[str, np.ndarray]]],
) -> Path:
    """Write all files of a finished run."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {patch: {"text": patch, "percent": None} for patch in settings["patches"]}
    run = {"format": 1, "kind": "certify", "settings": settings, "patches": written}
    (folder / "run.json").write_text(json.dumps(run | {"environment": ENVIRONMENT, "version": "0.1.0"}))
    (folder / "records-0.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "summary.json").write_text(json.dumps(summarise(records, settings)))
    (folder / "gallery.json").write_text(json.dumps([entry for entry, _ in pictures]))
    arrays = {f"{name}_{place}": value for place, (_, each) in enumerate(pictures) for name, value in each.items()}
    np.savez(folder / "gallery.npz", **arrays)
    return folder


def summarise(records: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of summary.json."""
    good = [record for record in records if "error" not in record]
    labelled, patches = settings["labelled"], settings["patches"]
    summary: dict[str, Any] = {
        "format": 1,
        "images": len(records),
        "errors": len(records) - len(good),
        "labelled": labelled,
        "patches": {},
        "margins": {},
        "curve": {"kept": {}, "refitted": {}},
        "seconds": {"total": 41.7, "network": 37.9, "images_per_second": 12.0},
        "settings": settings,
        "environment": ENVIRONMENT,
    }

    def right(record: dict[str, Any], label: int) -> bool:
        return not labelled or label == record["target"]

    for patch in patches:
        found = [(record, record["patches"][patch]) for record in good]
        shares = {"proved": share(entry["certified"] for _, entry in found)}
        if labelled:
            shares["clean"] = share(right(record, entry["label"]) for record, entry in found)
            shares["certified"] = share(right(r, entry["label"]) and entry["certified"] for r, entry in found)
        summary["patches"][patch] = shares | {"masks": settings["masks"][patch]}
        summary["margins"][patch] = histogram(found, labelled)
    if labelled:
        summary["undefended"] = share(record["undefended"] == record["target"] for record in good)
        summary["classes"] = [
            {
                "name": name,
                "of": len(members := [record for record in good if record["target"] == number]),
                "clean": sum(record["label"] == number for record in members),
                "certified": {
                    patch: sum(
                        record["patches"][patch]["label"] == number and record["patches"][patch]["certified"]
                        for record in members
                    )
                    for patch in patches
                },
            }
            for number, name in enumerate(settings["class_names"])
        ]
    word = "certified" if labelled else "proved"
    for side in settings["curve"]:
        kept = share(right(record, record["label"]) and record["largest"] >= side for record in good)
        entries = [(record, record["refitted"][str(side)]) for record in good]
        fitted = {word: share(right(r, entry["label"]) and entry["certified"] for r, entry in entries)}
        if labelled:
            fitted["clean"] = share(right(r, entry["label"]) for r, entry in entries)
        summary["curve"]["kept"][str(side)] = kept
        summary["curve"]["refitted"][str(side)] = fitted
    return summary


def histogram(found: list[tuple[dict[str, Any], dict[str, Any]]], labelled: bool) -> dict[str, Any]:
    """Return counts of margins; zero is an edge."""
    margins = [entry["margin"] for _, entry in found]
    if not margins:
        return {"edges": [], "certified": [], "not_certified": [], "wrong": []}
    step = max((max(margins) - min(margins)) / 18, 0.5)
    first, last = math.floor(min(margins) / step) - 1, math.ceil(max(margins) / step) + 1
    edges = [round(step * place, 6) for place in range(min(first, 0), max(last, 0) + 1)]
    groups: dict[str, list[float]] = {"certified": [], "not_certified": [], "wrong": []}
    for record, entry in found:
        wrong = labelled and entry["label"] != record["target"]
        group = "wrong" if wrong else "certified" if entry["certified"] else "not_certified"
        groups[group].append(entry["margin"])
    return {"edges": edges} | {name: np.histogram(values, edges)[0].tolist() for name, values in groups.items()}


def share(truths: Any) -> dict[str, Any]:
    """Return a count with its share and 95 % Wilson interval."""
    values = [bool(truth) for truth in truths]
    right, of = sum(values), len(values)
    if of == 0:
        return {"right": 0, "of": 0, "share": 0.0, "low": 0.0, "high": 1.0}
    z, rate = 1.959963984540054, right / of
    middle, spread = rate + z * z / (2 * of), z * math.sqrt(rate * (1 - rate) / of + z * z / (4 * of * of))
    low, high = (middle - spread) / (1 + z * z / of), (middle + spread) / (1 + z * z / of)
    return {"right": right, "of": of, "share": rate, "low": max(0.0, low), "high": min(1.0, high)}
