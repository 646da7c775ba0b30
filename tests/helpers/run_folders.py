"""Finished run folders for tests of the report, made up from seeded numbers and pictures of the embedded sample."""

from pathlib import Path
from typing import Any

import numpy as np

from patchguard.runs.metrics import make_summary, summarise
from patchguard.runs.records import Folder

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
SECONDS = {"total": 41.7, "network": 37.9, "images_per_second": 12.0}
EVIDENCE = {"kind": "logits", "low": None, "high": None, "drift": 0.001, "threshold": 0.2, "bits": 20}
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def fabricate(
    folder: Path,
    *,
    images: int = 60,
    patches: tuple[str, ...] = ("5x5",),
    class_names: list[str] = CIFAR10,
    labeled: bool = True,
    certified: float = 0.6,
    errors: int = 0,
    curve: tuple[int, ...] = (1, 2, 3, 5, 8),
    unmeasured: tuple[int, ...] = (),
    pictures: int = 24,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Write a run folder: `certified` is about the share of images whose label is proved for the first patch.

    `unmeasured` sides are so large that masks for them hide every cell; no record has them.
    """
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
                "masks": "own" if place == 0 else "refitted",
            }
        records.append(
            {
                "index": index,
                "name": f"test/{index:05d}",
                "size": [32, 32],
                "target": target if labeled else None,
                "undefended": target if draw.random() < 0.9 else other,
                "label": label,
                "patches": entries,
                "largest": max([side for side in curve if strength + 5 * (5 - side) > 0], default=0),
                "refitted": {
                    str(side): {"label": label, "certified": strength + 6 * (5 - side) > 0}
                    for side in curve
                    if side not in unmeasured
                },
            }
        )
    records += [
        {"index": images + k, "name": f"broken-{k}.jpg", "target": None, "error": "is truncated"} for k in range(errors)
    ]
    return save(
        folder,
        records,
        made_settings(images + errors, patches, class_names, labeled, curve) | settings,
        made_pictures(records, patches[0], pictures, draw),
    )


def made_settings(
    images: int, patches: tuple[str, ...], class_names: list[str], labeled: bool, curve: tuple[int, ...]
) -> dict[str, Any]:
    """Return settings as `patchguard certify` writes them."""
    return {
        "model": "cifar10",
        "model_digest": "3f1c" * 16,
        "data": "sample",
        "images": images,
        "patches": list(patches),
        "defense": "DoubleMasking",
        "evidence": EVIDENCE,
        "threshold": None,
        "top_k": 1,
        "curve": list(curve),
        "class_names": class_names,
        "labeled": labeled,
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
    """Write all files of a finished run, with the package's own records and summary."""
    written = {patch: {"text": patch, "percent": None} for patch in settings["patches"]}
    run = {"kind": "certify", "settings": settings, "patches": written}
    place = Folder(folder)
    with place.locked(first=True):
        place.begin(run | {"environment": ENVIRONMENT, "version": "0.1.0"})
        with place.appending(0) as appender:
            appender.append(records)
        place.write("summary.json", make_summary(summarise(place.records(), settings), place.run() or {}, SECONDS))
        place.write("gallery.json", [entry for entry, _ in pictures])
    arrays = {f"{name}_{place}": value for place, (_, each) in enumerate(pictures) for name, value in each.items()}
    np.savez(folder / "gallery.npz", **arrays)
    return folder
