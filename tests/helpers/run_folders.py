"""Finished run folders for tests of the report: drawn records, and everything else by the code of a real run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from patchguard.guard import Examination, Guard, Picture, Prediction, Task
from patchguard.patch import Patch
from patchguard.runs import gallery
from patchguard.runs.metrics import CertifyTally
from patchguard.runs.records import Folder
from patchguard.runs.summary import CertifySettings, Run, Seconds, to_plain

ENVIRONMENT = {"patchguard": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "cpu_count": 2, "gpu": None}
SECONDS = Seconds(total=41.7, network=37.9, images_per_second=12.0)
EVIDENCE = {"kind": "logits", "low": None, "high": None, "drift": 0.001, "threshold": 0.2, "bits": 20}
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def fabricate(
    folder: Path,
    *,
    images: int = 60,
    patches: tuple[str, ...] = ("5x5",),
    class_names: tuple[str, ...] = CIFAR10,
    labeled: bool = True,
    certified: float = 0.6,
    errors: int = 0,
    curve: tuple[int, ...] = (1, 2, 3, 5, 8),
    unmeasured: tuple[int, ...] = (),
    pictures: int = 24,
    seed: int = 0,
    name: str = "test/{:05d}",
    **settings: Any,
) -> Path:
    """Write a run folder: about the fraction `certified` of all labels is proved for the first patch.

    `unmeasured` sides are so large that masks for them hide every cell; no record has them.
    """
    known = CertifySettings(
        **{
            "model": "cifar10",
            "model_digest": "3f1c" * 16,
            "data": "sample",
            "images": images + errors,
            "patches": patches,
            "defense": "DoubleMasking",
            "rule": {"evidence": EVIDENCE, "threshold": None},
            "curve": curve,
            "class_names": class_names,
            "labeled": labeled,
            **settings,
        }
    )
    draw = np.random.default_rng(seed)
    records = [
        {"index": index, "name": name.format(index), **_draw_record(known, certified, unmeasured, draw)}
        for index in range(images)
    ]
    for number in range(errors):
        broken = {"index": images + number, "name": f"broken-{number}.jpg", "target": None, "error": "is truncated"}
        records.append(broken)
    run = Folder(folder)
    with run.lock():
        run.begin(Run(settings=to_plain(known), environment=ENVIRONMENT, version="0.1.0"))
        with run.open_shard(0) as appender:
            appender.append(records)
        chosen = gallery.choose(run.records(), known)[:pictures]
        gallery.save(run, [_draw_picture(group, record, draw) for group, record in chosen])
        tally = CertifyTally(known)
        for record in run.records():
            tally.add(record)
        run.write("summary.json", tally.summarize(seconds=SECONDS, environment=ENVIRONMENT))
    return folder


def _draw_record(
    settings: CertifySettings, certified: float, unmeasured: tuple[int, ...], draw: np.random.Generator
) -> dict[str, Any]:
    classes = len(settings.class_names)
    target, other = (int(number) for number in draw.integers(classes, size=2))
    label = target if draw.random() < 0.85 else other
    strength = float(draw.normal(60 * (certified - 0.5), 25)) if 0 < certified < 1 else 30 * (2 * certified - 1)
    entries = {
        patch: {
            "label": label,
            "margin": strength - 9 * place,
            "certified": strength > 9 * place,
            "rival": (label + 1) % classes,
            "window": [4, 15, 6, 17],
            "box": [7, 9, 5, 5],
            "masks": "own" if place == 0 else "refitted",
        }
        for place, patch in enumerate(settings.patches)
    }
    refitted = {
        str(side): {"label": label, "certified": strength + 6 * (5 - side) > 0}
        for side in settings.curve
        if side not in unmeasured
    }
    return {
        "size": [32, 32],
        "target": target if settings.labeled else None,
        "undefended": target if draw.random() < 0.9 else other,
        "label": label,
        "patches": entries,
        "largest": max([side for side in settings.curve if strength + 5 * (5 - side) > 0], default=0),
        "refitted": refitted,
    }


@final
@dataclass(frozen=True)
class _DrawingGuard(Guard):
    """A guard that only draws: a blob of evidence in the middle, weaker for the rival."""

    blob: Tensor
    classes = 10
    digest = ""

    def predict(self, images: Tensor) -> Prediction:
        raise NotImplementedError

    def certify(self, images: Tensor, patch: Patch, label: Any = None, top_k: int = 1) -> Any:
        raise NotImplementedError

    def picture(self, examination: Examination, row: int, task: Task, classes: Sequence[int]) -> Picture:
        return Picture((self.blob, 0.5 * self.blob.flip(0)), (9, 20, 8, 19))


def _draw_picture(group: str, record: dict[str, Any], draw: np.random.Generator) -> gallery.Shown:
    rows, columns = np.mgrid[0:32, 0:32]
    top, left = draw.integers(8, 24, size=2)
    blob = np.exp(-((rows - top) ** 2 + (columns - left) ** 2) / 60) - 0.15 * draw.random((32, 32))
    guard = _DrawingGuard(torch.tensor(blob, dtype=torch.float32))
    image = torch.tensor(draw.integers(0, 256, (3, 32, 32)), dtype=torch.uint8)
    task = Task(Patch(5), guard, "own")
    return gallery.show_certified(group, record, image, guard, Examination(rows=(0,)), task)
