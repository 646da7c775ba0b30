"""How much faster DS-ResNet-50 gets by computing only the columns that a band can change.

Measures both ways on the same images, with the same number of regions at once, per precision and memory
format: the straightforward one (a full-size forward pass per band) and the fast one. Prints the factors
beside the factor in multiply-adds and its ceiling, and writes them as JSON.

    python benchmarks/bands.py --out results/bands.json
    python benchmarks/bands.py --size 97 --band 9 --width 0.25 --batch 1 --out bands.json   # small, on a CPU
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchguard.models.ablation import Ablation, ds_resnet50

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def seconds(evaluate: Callable[[], Tensor], repeats: int, device: torch.device) -> float:
    """Return the median wall-clock time of one evaluation, after one that is not counted."""
    times = []
    for repeat in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        evaluate()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(model: Ablation, images: Tensor, repeats: int) -> dict[str, float]:
    """Return the times of both ways, and how far their logits differ relative to the largest logit."""
    normalized = model.normalize(images)
    plain, fast = model.plain_logits(normalized), model.local_logits(normalized)
    difference = (plain - fast).abs().max() / plain.abs().max()
    results = {
        "plain_seconds": seconds(lambda: model.plain_logits(normalized), repeats, images.device),
        "fast_seconds": seconds(lambda: model.local_logits(normalized), repeats, images.device),
        "relative_difference": float(difference),
    }
    results["factor"] = results["plain_seconds"] / results["fast_seconds"]
    return results


def with_statistics(model: Ablation, images: Tensor) -> Ablation:
    """Return the model in evaluation mode with statistics from `images`, which keep activations in range."""
    generator = torch.Generator().manual_seed(1)
    model.train()
    for _ in range(20):
        model.backbone(model.random_region(images, generator))
    return model.eval()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--size", type=int, default=299, help="side of the images in pixels")
    parser.add_argument("--band", type=int, default=25, help="columns per band")
    parser.add_argument("--stride", type=int, default=1, help="pixels from one band to the next")
    parser.add_argument("--width", type=float, default=1.0, help="multiplier of the channels")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=4, help="images")
    parser.add_argument("--chunk", type=int, default=600, help="regions, of all images, evaluated at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--autotune", action="store_true", help="let cuDNN try its algorithms")
    settings = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = settings.autotune
    torch.manual_seed(0)
    model = ds_resnet50(classes=settings.classes, band=settings.band, stride=settings.stride, width=settings.width).to(
        device
    )
    model.chunk = settings.chunk
    images = torch.rand(settings.batch, 3, settings.size, settings.size, device=device)
    cost = model.cost(settings.size, settings.size)
    assert cost is not None
    with torch.inference_mode():
        with_statistics(model, images)
        assert model.runs_fast(settings.size, settings.size), "nothing to compare: the bands leave little empty"
        runs: dict[str, Any] = {}
        for precision, dtype in PRECISIONS.items():
            for layout, memory_format in FORMATS.items():
                model = model.to(dtype=dtype, memory_format=memory_format)
                result = measure(model, images.to(dtype), settings.repeats)
                runs[f"{precision} {layout}"] = result
                print(
                    f"{precision:>8} {layout:<13} plain {result['plain_seconds']:.3f} s, "
                    f"fast {result['fast_seconds']:.3f} s: {result['factor']:.2f}x, "
                    f"logits differ by {result['relative_difference']:.1e}"
                )

    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "settings": {key: value for key, value in vars(settings).items() if key != "out"},
        "multiply_adds": {
            "plain_per_image": cost.plain,
            "fast_per_image": cost.fast,
            "factor": cost.plain / cost.fast,
            "ceiling": cost.plain / cost.least,
        },
        "runs": runs,
    }
    # The memory format is a free choice of either way, so each is also compared at its best.
    for precision in PRECISIONS:
        both = [runs[f"{precision} {layout}"] for layout in FORMATS]
        best = min(run["plain_seconds"] for run in both) / min(run["fast_seconds"] for run in both)
        report[f"factor_{precision}"] = best
        print(f"{precision:>8} best against best: {best:.2f}x")
    print(
        f"multiply-adds: {cost.plain / cost.fast:.2f}x fewer; "
        f"{cost.plain / cost.least:.2f}x if no layer computed a column too many"
    )
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
