"""How long the paper's tables take from cached logits, as a fraction of the target.

    python benchmarks/tables.py --root DIR [--data imagenette] [--limit 500] [--cache DIR] [--out FILE.json]

Logits that are not in `--cache` are computed first, which is not timed. Then every experiment that needs only logits
runs, one after the other, as in `patchguard reproduce all`: what an earlier table counted is not counted again. The
target is 120 seconds for all tables of one dataset with all its test images (10,000 of CIFAR-10) on two CPU cores.
"""

import argparse
import json
import time
from pathlib import Path

from patchguard import runtime
from patchguard.paper import EXPERIMENTS
from patchguard.paper.context import Context
from patchguard.storage import zoo

TARGET = 120.0
FROM_LOGITS = (
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
    parser.add_argument("--root", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--cache", type=Path, default=Path("runs/reproduce-cache"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    names = [path.stem for path in zoo.checkpoints() if path.stem.split("_")[0] == options.data]
    before = Context(root=options.root, cache=options.cache, limit=options.limit)
    for name in names:
        before.logits(name, options.data)
    context = Context(root=options.root, cache=options.cache, limit=options.limit)
    seconds = {}
    for name in FROM_LOGITS:
        started = time.perf_counter()
        EXPERIMENTS[name].run(context, options.data)
        seconds[name] = round(time.perf_counter() - started, 2)
        print(f"{name:16} {seconds[name]:8.2f} s", flush=True)
    total = sum(seconds.values())
    result = {
        "data": options.data,
        "images": len(context.images(options.data)),
        "models": names,
        "seconds": seconds,
        "total_seconds": round(total, 1),
        "fraction_of_target": round(total / TARGET, 3),
        "environment": runtime.describe_environment(),
    }
    print(f"{'all':16} {total:8.2f} s, {total / TARGET:.2f} of the target")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
