"""Train `imagenette_masked_resnet50`: a ResNet-50 whose answer survives any two masks of a covering set.

    python train.py --data DIR --initial imagenette_resnet50.safetensors --out OUT --seconds 1000

`DIR/train/<class>/*.JPEG` holds 224 x 224 photos; validation images are never read. Every learning rate of `--pilots`
is tried for a short while from the initial weights; the one with more held-out images on which all pairs of masks agree
goes on. Rates fall with the time used, so the run ends when its seconds are over, on any GPU. Then the average weights,
rounded to float16, are measured on the held-out images.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from patchguard import runtime
from patchguard.data.dataset import hold_out_indices
from patchguard.storage import zoo

SIDE = 224
HELD_OUT = 500
MASKS = 6  # per axis
PATCH = 32
BATCH = 256
MASKED = 192  # images of a batch that carry two masks; the others carry none
AT_ONCE = 4  # masks that are compared in one pass of the network
SEARCH = ((0.0, 8), (0.3, 12), (0.6, 16), (0.85, 20))  # from this part of the time on, so many masks are compared
PILOT_SEARCH = ((0.0, 4),)
SMOOTHING = 0.05
DECAY = 5e-4
AVERAGE = 0.998
PILOT_AVERAGE = 0.99
WARM_UP = 0.05
NEAR = 1.0  # logits: pairs with a smaller lead in bfloat16 are asked again in float32

Network = Callable[[Tensor], Tensor]


# -- masks -------------------------------------------------------------------------------------------------------------


def covering_starts(side: int, patch: int, count: int) -> tuple[list[int], int]:
    """Return where masks begin along an axis, and how long they are: each place of the patch lies inside one."""
    stride = -(-(side - patch + 1) // count)
    length = min(patch + stride - 1, side)
    starts = sorted({*range(0, side - length + 1, stride), side - length})
    assert all(any(m <= place and place + patch <= m + length for m in starts) for place in range(side - patch + 1))
    return starts, length


def covering_set(side: int, patch: int, count: int, device: torch.device) -> Tensor:
    """Return, per mask, 0 inside and 1 outside: (masks, side, side)."""
    starts, length = covering_starts(side, patch, count)
    kept = torch.ones(len(starts) ** 2, side, side, device=device)
    for number, (top, left) in enumerate((top, left) for top in starts for left in starts):
        kept[number, top : top + length, left : left + length] = 0
    return kept


# -- images ------------------------------------------------------------------------------------------------------------


def decode(path: Path) -> np.ndarray:
    """Return the pixels of a photo, channels first."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1).copy()


def load_photos(folder: Path) -> tuple[Tensor, Tensor]:
    """Return all training photos and their classes, by class and file name."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files = [(path, label) for label, each in enumerate(classes) for path in sorted(each.iterdir())]
    with ProcessPoolExecutor(8) as pool:
        pixels = list(pool.map(decode, [path for path, _ in files], chunksize=64))
    return torch.from_numpy(np.stack(pixels)), torch.tensor([label for _, label in files])


def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Return 8-bit photos as [0, 1], flipped, with other colors, and half of them as a part that fills the image."""
    count = len(pixels)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, device=pixels.device, generator=generator)

    area, ratio = draw(0.35, 1.0), (draw(-1, 1) * math.log(4 / 3)).exp()
    whole = draw(0, 1) < 0.5
    width = torch.where(whole, 1.0, (area * ratio).sqrt().clamp(max=1))
    height = torch.where(whole, 1.0, (area / ratio).sqrt().clamp(max=1))
    flip = torch.where(draw(0, 1) < 0.5, -1.0, 1.0)
    zero = torch.zeros_like(width)
    right, down = draw(-1, 1) * (1 - width), draw(-1, 1) * (1 - height)
    matrix = torch.stack([torch.stack([width * flip, zero, right], 1), torch.stack([zero, height, down], 1)], 1)
    grid = F.affine_grid(matrix, [count, 3, SIDE, SIDE], align_corners=False)
    images = F.grid_sample(pixels.float() / 255, grid, padding_mode="reflection", align_corners=False)
    gray = images.mean(1, keepdim=True)
    images = gray + (images - gray) * draw(0.7, 1.3)[:, None, None, None]
    mean = images.mean((1, 2, 3), keepdim=True)
    images = mean + (images - mean) * draw(0.7, 1.3)[:, None, None, None]
    return (images * draw(0.7, 1.3)[:, None, None, None]).clamp(0, 1)


# -- training ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def worst_masks(network: Network, images: Tensor, targets: Tensor, kept: Tensor, count: int) -> Tensor:
    """Return, per image, the mask with the highest loss of `count` random ones."""
    drawn = torch.rand(len(images), len(kept), device=images.device).argsort(1)[:, :count]
    losses = []
    for some in drawn.split(AT_ONCE, dim=1):
        repeated = images.repeat_interleave(some.shape[1], 0)
        masked = (repeated * kept[some.flatten()][:, None]).contiguous(memory_format=torch.channels_last)
        logits = network(masked).float()
        loss = F.cross_entropy(logits, targets.repeat_interleave(some.shape[1]), reduction="none")
        losses.append(loss.view(len(images), -1))
    return drawn.gather(1, torch.cat(losses, 1).argmax(1, keepdim=True))[:, 0]


class Trainer:
    """The network, its average, and the images on the device."""

    def __init__(self, settings: argparse.Namespace, device: torch.device) -> None:
        model = zoo.load_guard(settings.initial).model
        self.mean = torch.tensor(model.config()["mean"], device=device)[:, None, None]
        self.std = torch.tensor(model.config()["std"], device=device)[:, None, None]
        self.initial = model.backbone.to(device=device, memory_format=torch.channels_last)
        self.device, self.settings = device, settings
        self.network = copy.deepcopy(self.initial)
        self.average = copy.deepcopy(self.initial)
        self.run: Network = torch.compile(self.network, dynamic=False) if settings.compile else self.network
        self.kept = covering_set(SIDE, PATCH, MASKS, device).to(torch.bfloat16)
        self.begin = time.perf_counter()

    def note(self, **row: Any) -> None:
        """Write a line of the log."""
        line = json.dumps({"seconds": round(time.perf_counter() - self.begin, 1), **row})
        print(line, flush=True)  # noqa: T201
        with (self.settings.out / "log.jsonl").open("a") as log:
            log.write(line + "\n")

    def normalize(self, images: Tensor) -> Tensor:
        """Return what the network reads: the mean color is 0."""
        return ((images - self.mean) / self.std).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)

    def answer(self, inputs: Tensor) -> Tensor:
        """Return the logits in evaluation mode and bfloat16."""
        self.network.eval()
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16):
            return self.run(inputs)

    def learn(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch, with its graph."""
        self.network.train()
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.run(inputs)
        return F.cross_entropy(logits.float(), targets, label_smoothing=SMOOTHING)

    def hide(self, images: Tensor, targets: Tensor, count: int) -> Tensor:
        """Return the images with two masks each: the worst of some, then the worst of some given the first."""
        for _ in range(2):
            chosen = worst_masks(self.answer, images, targets, self.kept, count)
            images = (images * self.kept[chosen][:, None]).contiguous(memory_format=torch.channels_last)
        return images

    def train(self, images: Tensor, targets: Tensor, *, seconds: float, rate: float, average: float, search: Any,
              title: str) -> None:  # fmt: skip
        """Train for so many seconds, from the weights at hand."""
        weights = [each for each in self.network.parameters() if each.dim() > 1]
        others = [each for each in self.network.parameters() if each.dim() <= 1]
        groups = [{"params": weights, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True)
        self.average.load_state_dict(self.network.state_dict())
        states = (self.average.state_dict(), self.network.state_dict())
        pairs = list(zip(*(state.values() for state in states), strict=True))
        floats = [(a, b) for a, b in pairs if a.is_floating_point()]
        averaged, current = [a for a, _ in floats], [b for _, b in floats]
        generator = torch.Generator(self.device).manual_seed(self.settings.seed)
        begin, epoch, step, used = time.perf_counter(), 0, 0, 0.0
        while used < 1:
            order = torch.randperm(len(images), generator=generator, device=self.device)
            losses = []
            for chosen in order.split(BATCH):
                if len(chosen) < BATCH or used >= 1:
                    break
                used = (time.perf_counter() - begin) / seconds
                factor = min(1.0, used / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(used, 1.0)))
                for group in optimizer.param_groups:
                    group["lr"] = rate * factor
                count = [count for start, count in search if used >= start][-1]
                inputs, labels = self.normalize(augment(images[chosen], generator)), targets[chosen]
                inputs[:MASKED] = self.hide(inputs[:MASKED], labels[:MASKED], count)
                loss = self.learn(inputs, labels)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(self.network.parameters(), 5.0)
                optimizer.step()
                step += 1
                torch._foreach_lerp_(averaged, current, 1 - min(average, step / (step + 10)))
                losses.append(loss.detach())
                if self.device.type == "cuda":
                    torch.cuda.synchronize()  # the time that was used is known only then
            epoch += 1
            loss = float(torch.stack(losses).mean()) if losses else None
            self.note(run=title, epoch=epoch, steps=step, used=round(used, 4), masks=count, loss=loss)
            if epoch % 10 == 0:
                save_file(rounded(self.average), self.settings.out / "partial.safetensors")


# -- held-out images ---------------------------------------------------------------------------------------------------


def rounded(network: nn.Module) -> dict[str, Tensor]:
    """Return the weights as they are kept: float16."""
    tensors = {name: each.contiguous() for name, each in network.state_dict().items()}
    return {name: each.half() if each.is_floating_point() else each for name, each in tensors.items()}


@torch.no_grad()
def pair_leads(answer: Network, image: Tensor, target: int, kept: Tensor, pairs: Tensor, size: int) -> Tensor:
    """Return, per pair of masks, by how much the logit of the target leads; a negative lead is a wrong label."""
    leads = []
    for some in pairs.split(size):
        hidden = kept[some[:, 0]] * kept[some[:, 1]]
        inputs = (image * hidden[:, None]).contiguous(memory_format=torch.channels_last)
        if len(some) < size:  # one shape for all
            inputs = torch.cat([inputs, inputs[:1].expand(size - len(some), -1, -1, -1)])
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        logits = answer(inputs)[: len(some)].float()
        others = logits.clone()
        others[:, target] = -torch.inf
        leads.append(logits[:, target] - others.amax(1))
    return torch.cat(leads)


def evaluate(trainer: Trainer, images: Tensor, targets: Tensor, *, patch: int, exact: str = "none",
             deadline: float = math.inf) -> dict[str, Any]:  # fmt: skip
    """Return how many held-out images are labeled right, plainly and under all masks and pairs of masks.

    `exact` says which pairs are asked in float32 without TF32: none, those near a tie in bfloat16, or all.
    """
    kept = covering_set(SIDE, patch, MASKS, trainer.device)
    pairs = torch.combinations(torch.arange(len(kept), device=trainer.device), with_replacement=True)
    single = pairs[:, 0] == pairs[:, 1]
    kept = torch.cat([kept, torch.ones_like(kept[:1])])  # the last hides nothing
    plainly = torch.full((1, 2), len(kept) - 1, device=trainer.device)
    near: Network = trainer.network.eval()
    totals = dict.fromkeys(("images", "plain", "single_masks", "pairs", "plain_exact", "pairs_exact", "asked_again"), 0)
    worst, difference, begin = [], 0.0, time.perf_counter()
    for pixels, target in zip(images, targets.tolist(), strict=True):
        if time.perf_counter() > deadline:
            break
        image = (pixels[None].float() / 255 - trainer.mean) / trainer.std
        asked = torch.cat([pairs, plainly])
        leads = pair_leads(trainer.answer, image.to(torch.bfloat16), target, kept.to(torch.bfloat16), asked,
                           AT_ONCE * MASKED)  # fmt: skip
        plain, leads = bool(leads[-1] > 0), leads[:-1]
        totals["images"] += 1
        totals["plain"] += plain
        totals["single_masks"] += bool((leads[single] > 0).all())
        totals["pairs"] += bool((leads > 0).all())
        worst.append(float(leads.min()))
        if exact == "none":
            continue
        asked = pairs if exact == "all" else pairs[leads.abs() < NEAR]
        totals["plain_exact"] += int(near(image)[0].argmax() == target)
        certified = exact == "all" or not bool((leads <= -NEAR).any())
        if certified and len(asked):
            again = pair_leads(near, image, target, kept, asked, 256 if exact == "all" else 64)
            same = leads if exact == "all" else leads[leads.abs() < NEAR]
            difference = max(difference, float((again - same).abs().max()))
            totals["asked_again"] += len(asked)
            certified = bool((again > 0).all())
        totals["pairs_exact"] += certified
    return {
        "patch": patch, "exact": exact, **totals, "worst_lead_mean": sum(worst) / len(worst),
        "largest_difference": difference, "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


# -- all of it ---------------------------------------------------------------------------------------------------------


def probe(trainer: Trainer) -> None:
    """Time a step of each kind on noise."""
    images = torch.randn(AT_ONCE * MASKED, 3, SIDE, SIDE, device=trainer.device, dtype=torch.bfloat16)
    images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.zeros(BATCH, dtype=torch.long, device=trainer.device)
    speed = {}
    for name, work, count in (
        ("answer", lambda: trainer.answer(images), len(images)),
        ("learn", lambda: trainer.learn(images[:BATCH], targets).backward(), BATCH),
    ):
        for _ in range(4):
            work()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            work()
        torch.cuda.synchronize()
        speed[name] = round(10 * count / (time.perf_counter() - begin), 1)
    trainer.note(probe=speed, compiled=trainer.settings.compile)
    (trainer.settings.out / f"probe-{int(trainer.settings.compile)}.json").write_text(json.dumps(speed))


def main() -> None:
    """Try the rates, train, write, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that holds train/")
    parser.add_argument("--initial", default="imagenette_resnet50", help="trained ResNet-50 of ten classes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1000, help="of the training after the pilots")
    parser.add_argument("--pilot-seconds", type=float, default=100)
    parser.add_argument("--pilots", type=float, nargs="+", default=[0.008, 0.03], help="learning rates to try")
    parser.add_argument("--pilot-images", type=int, default=250, help="held-out images that choose the rate")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds after which nothing more is measured")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--probe", action="store_true", help="only time the steps")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(settings.seed)
    trainer = Trainer(settings, torch.device(settings.device))
    if settings.probe or settings.compile:
        probe(trainer)  # what is compiled is compiled here, before the time counts
    if settings.probe:
        return
    pixels, labels = load_photos(settings.data / "train")
    learned, held = hold_out_indices(len(labels), HELD_OUT)
    images, targets = pixels[learned].to(trainer.device), labels[learned].to(trainer.device)
    shown = torch.randperm(HELD_OUT, generator=torch.Generator().manual_seed(0))  # any first part is a fair sample
    held_images, held_targets = pixels[held[shown]].to(trainer.device), labels[held[shown]].to(trainer.device)
    trainer.note(images=len(targets), held_out=len(held_targets), compiled=settings.compile)

    best: tuple[tuple[float, float], float, dict[str, Tensor]] | None = None
    for rate in settings.pilots:
        trainer.network.load_state_dict(trainer.initial.state_dict())
        trainer.train(images, targets, seconds=settings.pilot_seconds, rate=rate, average=PILOT_AVERAGE,
                      search=PILOT_SEARCH, title=f"pilot {rate}")  # fmt: skip
        trainer.network.load_state_dict(trainer.average.state_dict())
        some = slice(0, settings.pilot_images)
        figures = evaluate(trainer, held_images[some], held_targets[some], patch=PATCH)
        trainer.note(run=f"pilot {rate}", held_out=figures)
        score = (figures["pairs"], figures["worst_lead_mean"])
        if best is None or score > best[0]:
            best = score, rate, {name: each.clone() for name, each in trainer.average.state_dict().items()}
    assert best is not None
    trainer.note(chosen_rate=best[1])
    trainer.network.load_state_dict(best[2])
    trainer.train(images, targets, seconds=settings.seconds, rate=best[1], average=AVERAGE, search=SEARCH, title="main")

    kept = rounded(trainer.average)
    save_file(kept, settings.out / "weights.safetensors")
    trainer.network.load_state_dict(kept)  # measured as they are kept
    trainer.note(saved=True)
    deadline = trainer.begin + settings.until
    results = []
    for patch, exact in ((PATCH, "near"), (23, "near"), (39, "near"), (PATCH, "all")):
        results.append(evaluate(trainer, held_images, held_targets, patch=patch, exact=exact, deadline=deadline))
        trainer.note(run="final", held_out=results[-1])
    names = ("HELD_OUT", "MASKS", "PATCH", "BATCH", "MASKED", "SEARCH", "PILOT_SEARCH", "SMOOTHING", "DECAY", "AVERAGE",
             "PILOT_AVERAGE", "WARM_UP", "NEAR")  # fmt: skip
    summary = {
        "settings": {name.lower(): globals()[name] for name in names} | {
            key: value for key, value in vars(settings).items() if key not in ("data", "out", "initial", "probe")
        } | {"rate": best[1], "images": len(targets)},
        "environment": runtime.describe_environment(),
        "seconds": round(time.perf_counter() - trainer.begin, 1),
        "held_out": results,
    }  # fmt: skip
    (settings.out / "summary.json").write_text(json.dumps(summary, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
