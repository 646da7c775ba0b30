"""How long the paper's tables take from cached evidence, beside the one forward pass that filled the cache.

    python benchmarks/tables.py --data-root DIR [--data imagenette] [--limit 500] [--cache DIR] [--out FILE.json]

Maps that are not in `--cache` are computed first, and that pass is timed; then every experiment that works from maps
runs alone, on maps that were just read. The target is 120 seconds for all tables of one set with all its test images
(10,000 of CIFAR-10) on two CPU cores; `--limit` scales it down to a try.
"""

import argparse
import json
import time
from pathlib import Path

from patchguard import runtime
from patchguard.experiments.paper import EXPERIMENTS
from patchguard.experiments.paper.context import Context

TARGET = 120.0
FROM_MAPS = (
    "main",
    "vanilla",
    "clipping",
    "feature_masking",
    "fields",
    "thresholds",
    "features",
    "mask_sizes",
    "training",
    "top_k",
    "shapes",
    "several_patches",
    "large_patches",
)


def main() -> None:
    """Run the benchmark and print, and perhaps write, its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", choices=("cifar10", "imagenette"))
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--cache", type=Path, default=Path("runs/reproduce-cache"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()

    def fresh() -> Context:
        return Context(data_root=given.data_root, cache=given.cache, limit=given.limit)

    started = time.perf_counter()
    EXPERIMENTS["main"].run(fresh(), given.data)
    first = time.perf_counter() - started
    seconds = {}
    for name in FROM_MAPS:
        started = time.perf_counter()
        EXPERIMENTS[name].run(fresh(), given.data)
        seconds[name] = round(time.perf_counter() - started, 2)
        print(f"{name:16} {seconds[name]:8.2f} s", flush=True)
    total = sum(seconds.values())
    context = fresh()
    used = sorted(path.name.rsplit("-", 1)[0] for path in (given.cache / "maps").glob(f"*-{given.data}-*"))
    found = {
        "data": given.data,
        "images": len(context.images(given.data)),
        "maps": used,
        "seconds": seconds,
        "total_seconds": round(total, 1),
        "share_of_target": round(total / TARGET, 3),
        "first_pass_seconds": round(first - seconds["main"], 1),
        "environment": runtime.environment(),
    }
    print(
        f"{'all':16} {total:8.2f} s, {total / TARGET:.2f} of the target; the maps took {first - seconds['main']:.1f} s"
    )
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
