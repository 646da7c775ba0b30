"""Does a cell outside the reach of a patch move when only the patch changes? Per model, device and kernels.

A direct convolution computes each cell from what it reads alone; one by Winograd tiles or Fourier transforms mixes
neighbors and cancels them again up to rounding. Patches are black and white at random, or grown: gradient steps make
the activations of every layer as large as they get.

    python benchmarks/kernels.py --out kernels.json --patches patches.npz                        on a GPU
    python benchmarks/kernels.py --instruction-sets --patches patches.npz --out sets.json        on a CPU

The second command runs the same patches once per instruction set, each in a process of its own, and lists the kernels
that oneDNN took. Without a file of patches, they are made on the device in use, and written there.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from patchguard import runtime
from patchguard.data import sample
from patchguard.geometry.field import Field
from patchguard.guards.local import LocalGuard
from patchguard.storage import zoo

PATCHES = {"cifar10": 5, "cifar10_mask_srf": 5, "cifar10_mask_ds": 5, "cifar10_mask_bn17": 5, "imagenette_bn17": 32}
SIDES = {"imagenette_bn17": 224}  # of source images, where it is not 32
CONTENTS = ("random", "grown")
STEP = 0.1  # of a gradient step, in pixel values
CHUNK = {"cpu": 4, "cuda": 64}  # images whose patches grow together
# What oneDNN, torch and MKL may use; the first is the least that they run on.
INSTRUCTION_SETS = {
    "SSE4.1": ("SSE41", "default", "SSE4_2"),
    "AVX2": ("AVX2", "avx2", "AVX2"),
    "AVX-512": ("AVX512_CORE", "avx512", "AVX512"),
    "all": ("DEFAULT", "", ""),
}


@dataclass(frozen=True)
class Attacked:
    """Images, the box (top, left, height, width) of each one's patch, and the images with it, per content."""

    clean: Tensor
    boxes: list[tuple[int, int, int, int]]
    patched: dict[str, Tensor]

    def first(self, count: int) -> "Attacked":
        """Return the first images alone."""
        return Attacked(
            self.clean[:count], self.boxes[:count], {key: each[:count] for key, each in self.patched.items()}
        )


class Activations(TorchFunctionMode):
    """Adds up, over the convolutions that run inside, how large their results are: the mean of log |result|^2."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor | float = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.conv2d:
            self.total = self.total + result.clone().float().square().mean().log()  # what follows may write in place
        return result


def pictures(name: str, count: int) -> Tensor:
    """Return images of the embedded sample, over again beyond its end, enlarged to the size that the model is for."""
    images = sample.load().images
    images = images[torch.arange(count) % len(images)].float() / 255
    side = SIDES.get(name, 32)
    return F.interpolate(images, size=(side, side), mode="bilinear").clamp(0, 1)


def attack(guard: LocalGuard[Any], clean: Tensor, side: int, steps: int, seed: int) -> Attacked:
    """Return the images with random and with grown patches at random places."""
    generator = runtime.make_generator(seed, len(clean))
    height, width = clean.shape[2:]
    tops = torch.randint(height - side + 1, (len(clean),), generator=generator).tolist()
    lefts = torch.randint(width - side + 1, (len(clean),), generator=generator).tolist()
    inside = torch.zeros(len(clean), 1, height, width, dtype=torch.bool)
    for image, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        inside[image, :, top : top + side, left : left + side] = True
    noise = torch.randint(2, clean.shape, generator=generator).float()
    random = torch.where(inside, noise, clean)
    device = runtime.device_and_dtype(guard.model)[0]
    chunk = CHUNK[device.type]
    parts = zip(random.split(chunk), inside.split(chunk), strict=True)
    grown = torch.cat([grow(guard, part.to(device), places.to(device), steps).cpu() for part, places in parts])
    boxes = [(top, left, side, side) for top, left in zip(tops, lefts, strict=True)]
    return Attacked(clean, boxes, {"random": random, "grown": grown})


def grow(guard: LocalGuard[Any], images: Tensor, inside: Tensor, steps: int) -> Tensor:
    """Return the images with patches whose activations `steps` gradient steps made large."""
    for _ in range(steps):
        images = images.detach().requires_grad_()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda), Activations() as activations:
            guard.differentiable_logits(images)
        assert isinstance(activations.total, Tensor)
        (gradient,) = torch.autograd.grad(activations.total, images)
        images = torch.where(inside, (images + STEP * gradient.sign()).clamp(0, 1), images)
    return images.detach()


def moved(logits: Callable[[Tensor], Tensor], attacked: Attacked, field: Field) -> dict[str, dict[str, Any]]:
    """Return, per content, in how many images a cell moved that does not read the patch, and how far at most."""
    outside = ~torch.from_numpy(np.stack([field.touched_cells(box) for box in attacked.boxes]))
    expected = logits(attacked.clean).cpu().double()
    results = {}
    for content, patched in attacked.patched.items():
        changes = (logits(patched).cpu().double() - expected).abs().amax(dim=1) * outside
        largest = changes.flatten(1).amax(dim=1)
        count = int((largest > 0).sum())
        results[content] = {"attacked": len(patched), "moved_outside": count, "largest_change": float(largest.max())}
    return results


def change_with_batch_size(run: Callable[[Tensor], Tensor], pixels: Tensor) -> float:
    """Return how far logits move at most between batches of one, of three and of all images."""
    together = run(pixels)
    parts = [torch.cat([run(part) for part in pixels.split(size)]) for size in (1, 3)]
    return max(float((part - together).abs().max()) for part in parts)


def images_per_second(run: Callable[[Tensor], Tensor], inputs: Tensor, repeats: int = 3) -> float:
    """Return the speed of the quickest of some runs, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run(inputs)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return round(len(inputs) / min(times[1:]), 1)


@contextmanager
def with_cudnn() -> Any:
    """Let cuDNN choose the convolutions, in float32 without TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@torch.no_grad()
def kernels(guard: LocalGuard[Any], attacked: Attacked, field: Field, batch: int) -> dict[str, Any]:
    """Return what moves, and the speed, with cuDNN's kernels in both layouts and with torch's own."""
    size = guard.preprocess.output_size(*attacked.clean.shape[2:])
    program = guard.model.program(*size)
    layouts = {"cuDNN": torch.contiguous_format, "cuDNN, channels last": torch.channels_last}

    def cudnn(layout: torch.memory_format) -> Callable[[Tensor], Tensor]:
        def run(pixels: Tensor) -> Tensor:
            with with_cudnn():
                return program.graph(pixels.contiguous(memory_format=layout))

        return run

    ways = {name: cudnn(layout) for name, layout in layouts.items()} | {"torch's own (as certified)": program}
    results = {}
    for name, run in ways.items():

        def logits(images: Tensor, run: Callable[[Tensor], Tensor] = run) -> Tensor:
            return torch.cat([run(guard.preprocess(part.cuda())) for part in images.split(batch)])

        pixels = guard.preprocess(attacked.clean[:batch].cuda())
        speed = {str(len(pixels)): images_per_second(run, pixels)}
        results[name] = {"images_per_second": speed, **moved(logits, attacked, field)}
        results[name]["change_with_batch_size"] = change_with_batch_size(run, pixels[:32])
    return results


@torch.no_grad()
def through_guard(guard: LocalGuard[Any], attacked: Attacked, field: Field) -> dict[str, Any]:
    """Return what moves in the logits that certificates and answers are made of."""
    size = guard.preprocess.output_size(*attacked.clean.shape[2:])
    pixels = guard.preprocess(attacked.clean[:8].to(runtime.device_and_dtype(guard.model)[0]))
    return {
        **moved(guard.local_logits, attacked, field),
        "change_with_batch_size": change_with_batch_size(guard.model.program(*size), pixels),
    }


def load_patches(path: Path | None, name: str, guard: LocalGuard[Any], settings: argparse.Namespace) -> Attacked:
    """Return the attacked images in the file, or make them, and write them there."""
    file = None if path is None else path.with_name(f"{path.stem}-{name}.npz")
    if file is not None and file.exists():
        stored = np.load(file)
        patched = {content: torch.from_numpy(stored[content]) for content in CONTENTS}
        boxes = [tuple(box) for box in stored["boxes"].tolist()]
        return Attacked(torch.from_numpy(stored["clean"]), boxes, patched).first(settings.images)
    attacked = attack(guard, pictures(name, settings.images), PATCHES[name], settings.steps, settings.seed)
    if file is not None:
        few = attacked.first(settings.stored)
        arrays = {content: few.patched[content].numpy() for content in CONTENTS}
        np.savez(file, clean=few.clean.numpy(), boxes=np.array(few.boxes), **arrays)
    return attacked


def measure(name: str, settings: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any] | None, Tensor]:
    """Return the figures of one model through its guard and, on a GPU, per kernels; and its logits of the images."""
    guard, device = zoo.load_guard(name), runtime.resolve_device(settings.device)
    guard.model.to(device)
    attacked = load_patches(settings.patches, name, guard, settings)
    field = guard.field(*attacked.clean.shape[2:])
    result = through_guard(guard, attacked, field)
    few = attacked.clean[: settings.compared]
    logits = guard.local_logits(few)
    if device.type == "cpu":
        return result, None, logits
    result["difference_to_cpu"] = float((zoo.load_guard(name).local_logits(few) - logits).abs().max())
    result["images_per_second"] = images_per_second(guard.local_logits, attacked.clean.to(device))
    by_kernels = kernels(guard, attacked.first(settings.per_kernel), field, settings.batch)
    return result, by_kernels, logits


def measure_sets(settings: argparse.Namespace) -> dict[str, Any]:
    """Return the figures per model and instruction set, with the kernels that oneDNN took."""
    results: dict[str, Any] = {}
    for name in settings.only:
        results[name] = {}
        expected = None
        for title, (onednn, torch_set, mkl) in reversed(INSTRUCTION_SETS.items()):
            chosen = {"ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": torch_set, "MKL_ENABLE_INSTRUCTIONS": mkl}
            chosen = {key: value for key, value in chosen.items() if value} | {"ONEDNN_VERBOSE": "1"}
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "result.json"
                same = ["--patches", str(settings.patches)] if settings.patches else []
                counts = [f"--{key}={getattr(settings, key)}" for key in ("images", "steps", "seed", "compared")]
                command = [sys.executable, __file__, "--device", "cpu", "--only", name, "--out", str(out)]
                command += ["--logits", str(out.with_suffix(".npy")), *same, *counts]
                done = subprocess.run(command, env=os.environ | chosen, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr)
                report, logits = json.loads(out.read_text()), np.load(out.with_suffix(".npy"))
            taken = re.findall(r",exec,cpu,(?:convolution|matmul|inner_product),([^,]+),", done.stdout)
            expected = logits if expected is None else expected
            results[name][title] = {
                "torch": report["capability"],
                "onednn": sorted(set(taken)),
                **report["through_guard"][name],
                "difference_to_all": float(np.abs(logits - expected).max()),
            }
            print(name, title, json.dumps(results[name][title]), file=sys.stderr, flush=True)
    return results


def processor() -> str:
    """Return the name of the processor, where the system tells."""
    about = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", about.read_text()) if about.exists() else []
    return names[0] if names else "unknown"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", nargs="+", choices=list(PATCHES), default=list(PATCHES), metavar="NAME")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--instruction-sets", action="store_true", help="on the CPU, once per instruction set")
    parser.add_argument("--patches", type=Path, help="attacked images, one file per model: read, or made and written")
    parser.add_argument("--images", type=int, default=32, help="images to attack, once with each content")
    parser.add_argument("--per-kernel", type=int, default=32, help="images to attack for each choice of kernels")
    parser.add_argument("--stored", type=int, default=32, help="attacked images to write")
    parser.add_argument(
        "--compared", type=int, default=16, help="images to compare between devices or instruction sets"
    )
    parser.add_argument("--batch", type=int, default=64, help="images at once, for each choice of kernels")
    parser.add_argument("--steps", type=int, default=40, help="gradient steps of grown patches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logits", type=Path, help="file to write the compared logits of the last model to")
    settings = parser.parse_args()

    report: dict[str, Any] = {"environment": runtime.describe_environment(), "processor": processor()}
    if settings.instruction_sets:
        report["instruction_sets"] = measure_sets(settings)
    else:
        report |= {"capability": torch.backends.cpu.get_cpu_capability(), "through_guard": {}, "kernels": {}}
        for name in settings.only:
            result, by_kernels, logits = measure(name, settings)
            report["through_guard"][name] = result
            if by_kernels:
                report["kernels"][name] = by_kernels
            print(name, json.dumps({"through_guard": result, "kernels": by_kernels}), file=sys.stderr, flush=True)
            if settings.logits:
                np.save(settings.logits, logits.cpu().numpy())
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
