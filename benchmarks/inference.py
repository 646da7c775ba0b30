"""What a defended answer costs, beside the plain forward pass of the same network.

On a GPU: Mask-BN (BagNet-17, 1000 classes, 224 x 224 pixels, 32 x 32 patch). Times of the plain network (argmax of
the mean of local logits), `Guard.predict` and `Guard.certify`, in turn within one run, so that all three see the same
clocks; medians, and ratios to the plain network. float32 without TF32, and bfloat16.

On a CPU: `srf` and `srf_wide` at 32 x 32 pixels with double masking of a 5 x 5 patch, in certified images per second,
plain and with torch.compile.

    python benchmarks/inference.py --out results/inference.json
    python benchmarks/inference.py --device cpu --repeats 3 --out inference.json
    python benchmarks/inference.py --device cpu --part mask_bn --batch 1 --size 65 --classes 10 --out inference.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from patchguard import runtime
from patchguard.defenses import DoubleMasking, RobustMasking
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.windows import Windows
from patchguard.guards.local import LocalGuard
from patchguard.models import LocalModel, build
from patchguard.patch import Patch

ANY_MASKS = Windows.sliding(grid=(1, 1), size=(1, 1))


def interleaved(tasks: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Return the median, least and largest seconds of each task; one round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(repeats + 1):
        for name, task in tasks.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            task()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return {
        name: {"median": statistics.median(taken), "least": min(taken), "largest": max(taken)}
        for name, taken in times.items()
    }


def settled(model: LocalModel, size: int) -> LocalModel:
    """Return the model in evaluation mode, with statistics from noise, which keep activations in range."""
    place, _ = runtime.device_and_dtype(model)
    images = torch.rand(4, 3, size, size, device=place)
    model.train()
    with torch.no_grad():
        for _ in range(5):
            model(images)
    return model.eval()


def mask_bn(settings: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure Mask-BN on one device, in float32 and bfloat16."""
    torch.manual_seed(0)
    model = settled(build("bagnet17", classes=settings.classes).to(device), settings.size)
    guard = LocalGuard(Preprocess(), model, Evidence(low=0.0), RobustMasking(masks=ANY_MASKS))
    patch = Patch(settings.patch)
    guard = guard.for_patch(patch, settings.size, settings.size)
    images = torch.rand(settings.batch, 3, settings.size, settings.size, device=device)
    results: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)

        @torch.no_grad()
        def plain(dtype: torch.dtype = dtype) -> torch.Tensor:
            with runtime.full_precision(device):
                local_logits: torch.Tensor = model(images.to(dtype))
                return local_logits.mean((2, 3)).argmax(1)

        tasks: dict[str, Callable[[], Any]] = {
            "plain": plain,
            "predict": lambda: guard.predict(images),
            "certify": lambda: guard.certify(images, patch),
        }
        seconds = interleaved(tasks, settings.repeats, device)
        ratios = {name: seconds[name]["median"] / seconds["plain"]["median"] for name in ("predict", "certify")}
        results[str(dtype).removeprefix("torch.")] = {"seconds": seconds, "ratios": ratios}
        print(
            f"mask_bn {dtype}: plain {1e3 * seconds['plain']['median']:.2f} ms, "
            f"predict {ratios['predict']:.3f}x, certify {ratios['certify']:.3f}x"
        )
    return results


def srf(settings: argparse.Namespace) -> dict[str, Any]:
    """Measure certified images per second on the CPU."""
    device, results = torch.device("cpu"), {}
    for name in ("srf", "srf_wide"):
        torch.manual_seed(0)
        model = settled(build(name), 32)
        guard = LocalGuard(Preprocess(), model, Evidence(low=None), DoubleMasking(masks=ANY_MASKS))
        guard = guard.for_patch(Patch(5), 32, 32)
        images = torch.rand(settings.cpu_batch, 3, 32, 32)
        tasks: dict[str, Callable[[], Any]] = {
            "network": lambda guard=guard, images=images: guard.local_logits(images),
            "predict": lambda guard=guard, images=images: guard.predict(images),
            "certify": lambda guard=guard, images=images: guard.certify(images, Patch(5)),
        }
        if not settings.no_compile:
            fast = compiled(guard)
            tasks["certify_compiled"] = lambda fast=fast, images=images: fast.certify(images, Patch(5))
        seconds = interleaved(tasks, settings.repeats, device)
        rates = {task: settings.cpu_batch / taken["median"] for task, taken in seconds.items()}
        parameters = sum(parameter.numel() for parameter in model.parameters())
        results[name] = {"parameters": parameters, "images_per_second": rates, "seconds": seconds}
        shown = ", ".join(f"{task} {rate:.1f}" for task, rate in rates.items())
        print(f"{name} ({parameters / 1e6:.1f} M parameters), images per second: {shown}")
    return results


def compiled(guard: LocalGuard[Any]) -> LocalGuard[Any]:
    """Return a LocalGuard whose network runs through torch.compile; its field is still that of the plain graph."""
    model = build(guard.model.name, **guard.model.config()).eval()
    model.load_state_dict(guard.model.state_dict())
    model.field = guard.model.field  # type: ignore[method-assign]
    model.local_logits = torch.compile(model.local_logits)  # type: ignore[method-assign]
    return replace(guard, model=model)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--part", choices=("auto", "mask_bn", "srf", "both"), default="auto")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="images of Mask-BN")
    parser.add_argument("--size", type=int, default=224, help="side of Mask-BN's images")
    parser.add_argument("--classes", type=int, default=1000, help="classes of Mask-BN")
    parser.add_argument("--patch", type=int, default=32, help="side of Mask-BN's patch")
    parser.add_argument("--cpu-batch", type=int, default=32, help="images of the CPU measurement")
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile")
    settings = parser.parse_args()

    device = runtime.resolve_device(settings.device)
    part = settings.part if settings.part != "auto" else ("mask_bn" if device.type == "cuda" else "srf")
    report: dict[str, Any] = {
        "environment": runtime.describe_environment(),
        "device": device.type,
        "settings": {key: value for key, value in vars(settings).items() if key != "out"},
    }
    if part in ("mask_bn", "both"):
        report["mask_bn"] = mask_bn(settings, device)
    if part in ("srf", "both"):
        report["srf"] = srf(settings)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
