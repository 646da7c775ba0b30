"""What the studies share on the command line: options, a line of progress on stderr, and the folder they write."""

import argparse
import io
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from patchguard import runtime
from patchguard.attacks.patch_pgd import PatchPGD
from patchguard.errors import InputError
from patchguard.guards.local import LocalGuard
from patchguard.paper.study_images import FROM_WEIGHTS, StudyImages, open_images, open_model
from patchguard.runs.records import Folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVERY = 5.0  # seconds between lines of progress


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return the options that every study has."""
    made = argparse.ArgumentParser(prog=f"python -m patchguard.experiments.{name}", description=description)
    made.add_argument(
        "--model", default="cifar10_resnet18", help="a name or a file, or with --weights: " + FROM_WEIGHTS[0]
    )
    made.add_argument("--weights", help="an ImageNet ResNet-50 as safetensors, for " + " and ".join(FROM_WEIGHTS))
    made.add_argument("--data", default="sample", help="sample, cifar10, imagenette, imagenet or a folder")
    made.add_argument("--root", help="where known sets lie (default: $PATCHGUARD_DATA)")
    made.add_argument("--out", required=True, type=Path, help="folder for summary.json and figures")
    made.add_argument("--limit", type=int, help="so many images, evenly spread (default: all)")
    made.add_argument("--steps", type=int, default=500, help="gradient steps per place (default: the paper's 500)")
    made.add_argument("--locations", type=int, default=5, help="random places per image (default: the paper's 5)")
    made.add_argument("--step", type=float, default=0.05, help="size of a step (default: the paper's 0.05)")
    made.add_argument(
        "--area", type=float, default=0.03, help="of the image, for the patch (default: the paper's 0.03)"
    )
    made.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    made.add_argument("--seed", type=int, default=0)
    return made


def attack_of(options: argparse.Namespace) -> PatchPGD:
    """Return the attack that the options ask for."""
    return PatchPGD(steps=options.steps, step=options.step, locations=options.locations)


def opened(options: argparse.Namespace) -> tuple[LocalGuard[Any], StudyImages]:
    """Return the model, on its device, and the images."""
    guard, images = open_images(
        open_model(options.model, options.weights), options.data, options.root, limit=options.limit, seed=options.seed
    )
    place(guard, runtime.resolve_device(options.device))
    return guard, images


def place(guard: LocalGuard[Any], device: torch.device) -> None:
    """Bring the network to a device, laid out as its convolutions like it.

    Kernels are not tried out (cudnn.benchmark): batches shrink as images break, and every size would be tried anew.
    """
    guard.model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def dataset_of(data: str) -> str:
    """Return the paper's name of a set; the embedded sample is a part of CIFAR-10."""
    return {"sample": "cifar10"}.get(data, data)


@final
class Line:
    """Progress on stderr: a line per stage and every few seconds, with the count so far and the speed."""

    def __init__(self) -> None:
        self.stage, self.count = "", 0
        self.begun = self.written = time.monotonic()

    def __call__(self, stage: str, count: int) -> None:
        """Note that a stage has done `count` more."""
        now = time.monotonic()
        if stage != self.stage:
            self.stage, self.count, self.begun, self.written = stage, 0, now, now - EVERY
        self.count += count
        if now - self.written >= EVERY:
            self.written = now
            speed = self.count / max(now - self.begun, 1e-3)
            sys.stderr.write(f"{stage}: {self.count:,} images or image steps ({speed:,.0f}/s)\n")
            sys.stderr.flush()


def write(out: Path, summary: Mapping[str, Any], figures: Mapping[str, "Figure"]) -> None:
    """Write summary.json and the figures as PNG, each all or nothing."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"`out` must be a folder; {out} cannot be made: {error.strerror}.") from None
    folder = Folder(out)
    folder.write("summary.json", dict(summary))
    for name, figure in figures.items():
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=120)
        folder.write_bytes(f"{name}.png", drawn.getvalue())


def table(rows: list[list[str]]) -> str:
    """Return rows as aligned columns: the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines) + "\n"


def percent(share: Mapping[str, Any]) -> str:
    """Return a share of `metrics.share` in percent, with its interval."""
    if share["share"] is None:
        return "-"
    return f"{100 * share['share']:.1f} ({100 * share['low']:.1f} to {100 * share['high']:.1f})"
