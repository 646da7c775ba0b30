"""How fast evidence maps are certified, as ratios to a literal transcription of the paper's algorithms in one run.

    python benchmarks/certify_speed.py [--device cuda] [--out results/FILE.json]

Both sides run on one thread (the accelerator on its own stream), on the same maps, one after the other. Times include
clipping and rounding the local logits. The literal loop is timed on a few images, ours on the whole batch.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from patchguard.defenses import DoubleMasking, RobustMasking
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.windows import Windows

BATCH = 64
MIXED = tuple((start, start + (6 if start % 3 else 5)) for start in range(20))


def settings() -> list[tuple[str, int, Windows]]:
    """Name, classes, windows."""
    sliding = Windows.sliding
    mixed = Windows(grid=(26, 26), rows=MIXED, columns=MIXED).maximal()
    return [
        ("26x26x10, window 6", 10, sliding(grid=(26, 26), size=(6, 6))),
        ("26x26x1000, window 6", 1000, sliding(grid=(26, 26), size=(6, 6))),
        ("22x22x10, window 8", 10, sliding(grid=(22, 22), size=(8, 8))),
        ("circle 299x10, window 66", 10, sliding(grid=(1, 299), size=(1, 66), wrap=(False, True))),
        ("circle 32x10, window 8", 10, sliding(grid=(1, 32), size=(1, 8), wrap=(False, True))),
        (f"26x26x10, {len(mixed)} windows of 5 and 6", 10, mixed),
    ]


def certified_maps(classes: int, grid: tuple[int, int]) -> torch.Tensor:
    """Local logits of which every map is certified, so that no loop can stop early."""
    generator = torch.Generator().manual_seed(classes + grid[1])
    maps = torch.randn(BATCH, classes, *grid, generator=generator)
    label = torch.randint(0, classes, (BATCH,), generator=generator)
    maps[torch.arange(BATCH), label] += 8
    return maps


# -- the algorithms as the paper prints them ---------------------------------------------------------------------------


def cells_of(windows: Windows) -> list[tuple[np.ndarray, np.ndarray]]:
    """Index arrays of every window; on a circle they wrap around."""
    height, width = windows.grid
    return [np.ix_(np.arange(a, b) % height, np.arange(c, d) % width) for a, b, c, d in windows.boxes.tolist()]


def detect(evidence: np.ndarray, windows: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray] | None:
    """Procedure Detect at T = 0: the window with the most evidence."""
    best, found = 0.0, None
    for window in windows:
        total = evidence[window].sum()
        if total > best:
            best, found = total, window
    return found


def literal_predict(logits: np.ndarray, windows: list[tuple[np.ndarray, np.ndarray]]) -> int:
    """Algorithm 1."""
    scores = []
    for evidence in logits:
        clipped = np.clip(evidence, 0, None)
        found = detect(clipped, windows)
        scores.append(clipped.sum() - (0 if found is None else clipped[found].sum()))
    return int(np.argmax(scores))


def literal_certify(logits: np.ndarray, label: int, windows: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Algorithm 2 at T = 0."""
    clipped = np.clip(logits, 0, None)
    for window in windows:
        upper = -np.inf
        for rival in range(len(clipped)):
            if rival != label:
                upper = max(upper, clipped[rival].sum() - clipped[rival][window].sum())
        erased = clipped[label].copy()
        erased[window] = 0
        found = detect(erased, windows)
        lower = erased.sum() - (0 if found is None else erased[found].sum())
        if upper > lower:
            return False
    return True


# -- measuring ---------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], object], device: str, repeats: int, least: float = 0.2) -> float:
    """Median time of one call, after a warm-up; short calls are repeated for at least `least` seconds."""
    work()
    times: list[float] = []
    while len(times) < repeats or (sum(times) < least and len(times) < 200):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def row(name: str, classes: int, windows: Windows, device: str) -> dict[str, object]:
    """Measure one setting."""
    maps = certified_maps(classes, windows.grid)
    here = maps.to(device)
    defense = RobustMasking(masks=windows)
    found = defense.certify(here, windows)
    assert found.certified.all(), "every map of the benchmark must be certified"
    literal = cells_of(windows)
    image, label = maps[0].numpy(), int(found.label[0])
    assert literal_certify(image, label, literal)
    assert literal_predict(image, literal) == label
    once = 1 if classes > 10 else 3
    slow_certify = seconds(lambda: literal_certify(image, label, literal), "cpu", once, least=0)
    slow_predict = seconds(lambda: literal_predict(image, literal), "cpu", once, least=0)
    batch = seconds(lambda: defense.certify(here, windows), device, 5) / BATCH
    single = seconds(lambda: defense.certify(here[:1], windows), device, 20)
    predict = seconds(lambda: defense.predict(here), device, 5) / BATCH
    double = DoubleMasking(masks=windows)
    both = seconds(lambda: double.certify(here, windows), device, 3) / BATCH
    return {
        "setting": name,
        "windows": len(windows),
        "literal certify ms": 1e3 * slow_certify,
        "literal predict ms": 1e3 * slow_predict,
        "certify ms": 1e3 * batch,
        "certify single ms": 1e3 * single,
        "predict ms": 1e3 * predict,
        "double certify ms": 1e3 * both,
        "certify ratio": slow_certify / batch,
        "single ratio": slow_certify / single,
        "predict ratio": slow_predict / predict,
    }


def peak_memory(device: str) -> float:
    """Peak memory in GB of a process that certifies a batch of 64 maps 26x26x1000, everything included."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        windows = settings()[1][2]
        RobustMasking(masks=windows).certify(certified_maps(1000, (26, 26)).cuda(), windows)
        return torch.cuda.max_memory_allocated() / 1e9
    shown = subprocess.run([sys.executable, __file__, "--memory"], check=True, capture_output=True, text=True)
    return float(shown.stdout)


def same_on_both_devices() -> bool:
    """Whether the same integers give bit-identical certificates on CPU and CUDA."""
    for _, classes, windows in settings():
        evidence = Evidence(low=0.0)(certified_maps(classes, windows.grid))
        signed = Evidence(low=None)(certified_maps(classes, windows.grid))
        for defense, map_ in (
            (RobustMasking(masks=windows), evidence),
            (RobustMasking(masks=windows, threshold=0.5), evidence[:4]),
            (DoubleMasking(masks=windows), signed),
        ):
            if classes > 10 and getattr(defense, "threshold", 0):
                continue
            there = type(map_)(**{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in vars(map_).items()})
            one, other = defense.certify(map_, windows), defense.certify(there, windows)
            if not all(
                torch.equal(getattr(one, field), getattr(other, field).cpu())
                for field in ("label", "margin", "weakest", "rival")
            ):
                return False
    return True


def main() -> None:
    """Print the table and, with --out, keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory:
        windows = settings()[1][2]
        RobustMasking(masks=windows).certify(certified_maps(1000, (26, 26)), windows)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
        return
    rows = []
    print(f"{'setting':34}{'certify ms':>11}{'single ms':>11}{'predict ms':>11}{'double ms':>11}", end="")
    print(f"{'certify x':>11}{'single x':>10}{'predict x':>11}")
    for name, classes, windows in settings():
        found = row(name, classes, windows, args.device)
        rows.append(found)
        print(f"{name:34}", end="")
        for key in ("certify ms", "certify single ms", "predict ms", "double certify ms"):
            print(f"{found[key]:11.3f}", end="")
        print(f"{found['certify ratio']:11.0f}{found['single ratio']:10.0f}{found['predict ratio']:11.0f}", flush=True)
    summary: dict[str, object] = {
        "benchmark": "certify_speed",
        "batch": BATCH,
        "rows": rows,
        "peak memory GB, 64 maps 26x26x1000": peak_memory(args.device),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU, one thread",
        },
    }
    print(f"peak memory, 64 maps 26x26x1000: {summary['peak memory GB, 64 maps 26x26x1000']:.2f} GB")
    if args.device == "cuda":
        summary["CPU and CUDA bit-identical"] = same_on_both_devices()
        print(f"CPU and CUDA bit-identical: {summary['CPU and CUDA bit-identical']}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
