"""How long one answer takes (tab-time): ResNet-50, BagNet-17, DS-25-ResNet-50, and both under robust masking.

The paper claims (sec-eval-detail-efficiency; one P100 GPU and one CPU core): robust masking adds little, 16.6 ms beside
12.1 ms for BagNet-17 alone and 404.4 ms beside 387.9 ms for DS; networks with small kernels are far cheaper than
ensembles over bands.

Ours: the same five, image by image and in batches, as medians of rounds in which all take turns, so that all see the
same clocks. Weights are random, since speed does not depend on them. Bands are evaluated as `models.bands` does it,
which computes only what a band can change: less work than 299 runs of the backbone. Beside the paper: double masking,
and certificates.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from patchguard import runtime
from patchguard.defenses import DoubleMasking, MajorityVote, RobustMasking
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.windows import Windows
from patchguard.guards.local import LocalGuard
from patchguard.models import LocalModel, build
from patchguard.paper import published
from patchguard.paper.context import Context
from patchguard.paper.experiment import Result, Row, Table
from patchguard.paper.query import CONFIDENCE, LOGITS, SIGNED, VOTE
from patchguard.patch import Patch

ANY_MASKS = Windows.sliding(grid=(1, 1), size=(1, 1))
BASE = {
    "ResNet-50": "ResNet-50",
    "BagNet-17": "BagNet-17",
    "DS-25-ResNet": "DS-25-ResNet",
    "Mask-BN": "BagNet-17",
    "Mask-DS": "DS-25-ResNet",
    "Double masking of BagNet-17": "BagNet-17",
    "Certificate of Mask-BN": "BagNet-17",
    "Certificate of double masking": "BagNet-17",
}


@final
@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured: sides of images and patches, channels, classes, images per batch, rounds."""

    side: int = 224
    patch: int = 32
    band_side: int = 299
    band_patch: int = 42
    width: float = 1.0
    classes: int = 10
    batch: int = 64
    band_batch: int = 4
    rounds: int = 20


# On a CPU an image of 299 bands takes many seconds.
ON_CPU = Sizes(batch=4, band_batch=1, rounds=3)


def run(context: Context, dataset: str) -> Result:
    """Measure on the context's device."""
    return make_tables(context.device, Sizes() if context.device.type == "cuda" else ON_CPU)


def make_tables(device: torch.device, sizes: Sizes) -> Result:
    """Measure and tabulate."""
    times = measure_times(device, sizes)
    theirs = {name: (time, time / published.TIME[BASE[name]], None) for name, time in published.TIME.items()}
    rows: list[Row] = []
    beside: list[Row] = []
    for name in BASE:
        single, batched = (statistics.median(each) for each in times[name])
        ours = (single, single / statistics.median(times[BASE[name]][0]), batched)
        note = f"{min(times[name][0]):.3g} to {max(times[name][0]):.3g} ms over {sizes.rounds} rounds"
        row = Row(label=name, ours=ours, published=theirs.get(name, ()), note=note)
        (rows if name in theirs else beside).append(row)
    columns = ("one image, ms", "times its network", "per image in a batch, ms")
    slower = statistics.median(times["Mask-DS"][0]) / statistics.median(times["Mask-BN"][0])
    return Result(
        tables=(
            Table(title="Time per image", where="tab-time", columns=columns, rows=tuple(rows), unit="other"),
            Table(title="Beside the paper", where="", columns=columns, rows=tuple(beside), unit="other"),
        ),
        notes=(
            f"Mask-DS takes {slower:.1f} times as long as Mask-BN; in the paper "
            f"{published.TIME['Mask-DS'] / published.TIME['Mask-BN']:.1f} times.",
            f"Batches of {sizes.batch} images, {sizes.band_batch} for bands; float32 without TF32; random weights.",
            "Milliseconds of another machine than the paper's: compare the ratios.",
        ),
        settings={**vars(sizes), "device": _describe_device(device)},
    )


def _describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


# -- clocks ------------------------------------------------------------------------------------------------------------


def time_in_turn(tasks: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each task in each round, all tasks in turn; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(rounds + 1):
        for name, task in tasks.items():
            _synchronize(device)
            started = time.perf_counter()
            task()
            _synchronize(device)
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_times(device: torch.device, sizes: Sizes) -> dict[str, tuple[list[float], list[float]]]:
    """Return the milliseconds per image of every round: for one image at a time, and for batches."""
    answers = _make_answers(device, sizes)
    generator = torch.Generator().manual_seed(0)
    times: list[dict[str, list[float]]] = []
    for single in (True, False):
        tasks: dict[str, Callable[[], Any]] = {}
        counts: dict[str, int] = {}
        for name, (answer, side) in answers.items():
            counts[name] = 1 if single else sizes.batch if side == sizes.side else sizes.band_batch
            images = torch.rand(counts[name], 3, side, side, generator=generator).to(device)
            tasks[name] = partial(answer, images)
        seconds = time_in_turn(tasks, sizes.rounds, device)
        times.append({name: [1e3 * each / counts[name] for each in seconds[name]] for name in tasks})
    return {name: (times[0][name], times[1][name]) for name in answers}


def _make_answers(device: torch.device, sizes: Sizes) -> dict[str, tuple[Callable[[Tensor], Any], int]]:
    """Return, by row, the function from images to an answer, and the side of its images."""
    side, patch = sizes.side, Patch(sizes.patch)
    settings = {"classes": sizes.classes, "width": sizes.width}
    resnet, bagnet, bands = (
        build(name, **settings).to(device=device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
        for name in ("resnet50", "bagnet17", "ds_resnet50")
    )
    shrink_logits(bagnet)
    mask_bn = LocalGuard(Preprocess(), bagnet, LOGITS, RobustMasking(masks=ANY_MASKS)).for_patch(patch, side, side)
    double = LocalGuard(Preprocess(), bagnet, SIGNED, DoubleMasking(masks=ANY_MASKS)).for_patch(patch, side, side)
    wide, large = sizes.band_side, Patch(sizes.band_patch)
    mask_ds = LocalGuard(Preprocess(), bands, CONFIDENCE, RobustMasking(masks=ANY_MASKS)).for_patch(large, wide, wide)
    smoothing = LocalGuard(Preprocess(), bands, VOTE, MajorityVote())
    return {
        "ResNet-50": (_predict_undefended(resnet, device), side),
        "BagNet-17": (_predict_undefended(bagnet, device), side),
        "DS-25-ResNet": (smoothing.predict, wide),
        "Mask-BN": (mask_bn.predict, side),
        "Mask-DS": (mask_ds.predict, wide),
        "Double masking of BagNet-17": (double.predict, side),
        "Certificate of Mask-BN": (lambda images: mask_bn.certify(images, patch), side),
        "Certificate of double masking": (lambda images: double.certify(images, patch), side),
    }


def shrink_logits(model: LocalModel) -> None:
    """Scale the last layer of random weights until logits are as small as those of trained networks."""
    device, _ = runtime.device_and_dtype(model)
    with torch.no_grad():
        largest = float(model(torch.rand(1, 3, 64, 64, device=device)).abs().max())
        for parameter in list(model.parameters())[-2:]:  # weight and bias of the classifier
            parameter.mul_(10.0 / max(largest, 1e-6))


def _predict_undefended(model: LocalModel, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the undefended answer: the class with the largest mean of local logits."""

    @torch.no_grad()
    def answer(images: Tensor) -> Tensor:
        with runtime.full_precision(device):
            local_logits: Tensor = model(images.contiguous(memory_format=torch.channels_last))
            return local_logits.mean((2, 3)).argmax(1)

    return answer
