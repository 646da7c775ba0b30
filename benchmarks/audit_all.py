"""Audit every network of the registry at the size it is made for, on this device, in float32 without TF32.

Each network gets random weights and statistics from noise. Patches of two sizes are changed at every residue of the
stride and at the borders. A cell that moves outside its field is a leak; kernels that mix neighbours and cancel them
again leave changes at the level of rounding instead, reported as drift beside the largest logit.

    python benchmarks/audit_all.py --out results/audit.json
    python benchmarks/audit_all.py --device cpu --only srf ds_resnet18 --out audit.json
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from patchguard import runtime
from patchguard.geometry.audit import audit
from patchguard.models import REGISTRY
from patchguard.storage import zoo

# Changed images per forward pass; a band network runs its backbone once per band and image.
BATCH = {"ds_resnet50": 4}
ROUNDING = 1e-4  # relative to the largest logit: far above float32 rounding, far below what a leak moves


def settled(name: str, device: torch.device, side: int) -> zoo.Guard[Any]:
    """Return the bare network with statistics from noise, which keep activations in range."""
    torch.manual_seed(0)
    guard = zoo.build(name)
    model = guard.model.to(device)
    images = torch.rand(2, 3, side, side, device=device)
    with torch.no_grad():
        if hasattr(model, "random_region"):  # a band network learns its statistics from single bands
            for _ in range(20):
                model.backbone.train()(model.random_region(images))
        else:
            for _ in range(5):
                model.train()(images)
    model.eval()
    return guard


def audited(name: str, device: torch.device) -> dict[str, Any]:
    """Return what the audit of one network saw."""
    side = zoo.SIZES[name]
    begin = time.perf_counter()
    guard = settled(name, device, side)
    field = guard.field(side, side)
    traced = time.perf_counter()
    image = torch.rand(3, side, side, generator=runtime.make_generator(0)).to(device)
    largest = float(guard.local_logits(image[None]).abs().max())
    result = audit(guard.local_logits, field, image=image, tolerance=ROUNDING * largest, batch=BATCH.get(name, 16))
    if device.type == "cuda":
        torch.cuda.synchronize()
    done = time.perf_counter()
    verdict = "leaks" if not result.passed else "exact" if result.drift == 0 else "exact up to rounding"
    print(
        f"{name:>15} at {side}: {field.grid[0]} x {field.grid[1]} cells, field {field.size[0]} x {field.size[1]}, "
        f"{result.trials} patches, drift {result.drift:.2e} of {largest:.3g}: {verdict} ({done - begin:.1f} s)",
        flush=True,
    )
    return {
        "size": [side, side],
        "grid": list(field.grid),
        "field": list(field.size),
        "stride": list(field.stride),
        "trials": result.trials,
        "moved": result.moved,
        "drift": result.drift,
        "largest_logit": largest,
        "tolerance": result.tolerance,
        "passed": result.passed,
        "verdict": verdict,
        "seconds": {"build_and_trace": traced - begin, "audit": done - traced},
    }


def main() -> None:
    """Audit, print, write; exit status 1 if some network leaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--only", nargs="+", choices=list(REGISTRY), default=list(REGISTRY), metavar="NAME")
    settings = parser.parse_args()

    device = runtime.resolve_device(settings.device)
    with runtime.full_precision(device):
        results = {name: audited(name, device) for name in settings.only}
    report = {"environment": runtime.describe_environment(), "device": device.type, "networks": results}
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps(report, indent=2) + "\n")
    if not all(result["passed"] for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
