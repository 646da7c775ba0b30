"""A block of 96 x 96 pixels over the image (fig-large-patch-visu), and what networks still see.

The paper claims (apx-large-patch): a block of 96 x 96 in 224 x 224 pixels can cover the entire salient object and make
classification almost impossible; Mask-BN-17 still has 91.1 % clean and 50.7 % provable accuracy against such patches.

Ours: a gray block covers the window with the most evidence for the true class, image by image, and networks are asked
again. The picture shows five images; the table says how often Mask-BN, the plain sum of its logits and an undefended
ResNet-50 are correct with and without the block. A gray block is no attack: accuracy under it lies above what is
certified.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from patchguard.defenses import RobustMasking, Undefended, ties
from patchguard.defenses.base import select
from patchguard.defenses.window_sums import sums
from patchguard.geometry.field import Axis
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.windows import Windows
from patchguard.guards.local import LocalGuard
from patchguard.paper import networks, published
from patchguard.paper.cached_logits import CachedLogits, prepared_batches
from patchguard.paper.context import Context
from patchguard.paper.experiment import TITLES, Missing, Result, Row, Table
from patchguard.paper.figures import RED
from patchguard.paper.query import LOGITS, SIGNED
from patchguard.patch import Patch
from patchguard.runs.metrics import proportion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 96
SHOWN = 5
GRAY_LEVEL = 0.5
BATCH = {"cpu": 8, "cuda": 256}
COLUMNS = ("clean", "with the block", "provable")

Images = Float[Tensor, "some 3 height width"]
Guards = Mapping[str, LocalGuard[Any]]


def run(context: Context, dataset: str) -> Result:
    """Cover every image where it says most about its class, and show some of them."""
    network, resnet = networks.bagnet(dataset), networks.resnet50(dataset)
    title = f"A block of {SIDE} x {SIDE} pixels on {TITLES[dataset]}"
    clean, provable = published.LARGE_PATCH.get(dataset, {}).get(f"{SIDE}x{SIDE}", (None, None))
    theirs, blank = (clean, None, provable), (None, None, None)
    try:
        logits = context.logits(network.names, dataset)
    except Missing as missing:
        row = Row(label=network.label, ours=blank, published=theirs, note=str(missing))
        return Result(tables=(Table(title=title, where="fig-large-patch-visu", columns=COLUMNS, rows=(row,)),))
    patch = Patch(min(SIDE, *(size - 1 for size in logits.size)))
    guard = replace(logits.guard, evidence=LOGITS, defense=RobustMasking(masks=logits.windows(patch)))
    plain = replace(guard, evidence=SIGNED, defense=Undefended())
    guards = {"Mask-BN": guard, "the same network, logits added up": plain}
    name = context.find(resnet.names)
    others = {} if name is None else {"ResNet-50": context.guard(name).without_preprocess()}
    counts = count_correct(context, logits, patch, guards, others)
    total, rows = len(logits), []
    for label in (*guards, *others):
        model = logits.model if label in guards else name or ""
        row = Row(
            label=label,
            ours=(
                *(proportion(counts.correct[label, block], total) for block in (False, True)),
                proportion(counts.certified, total) if label == "Mask-BN" else None,
            ),
            published=theirs if label == "Mask-BN" else blank,
            note=model,
            reason=networks.describe_training(model),
        )
        rows.append(row)
    if name is None:
        note = f"not run: no ResNet-50 here. {context.command(resnet.names[0])}"
        rows.append(Row(label="ResNet-50", ours=blank, note=note))
    best = next(iter(others or guards))
    return Result(
        tables=(Table(title=title, where="fig-large-patch-visu", columns=COLUMNS, rows=tuple(rows)),),
        figures={"occlusion": lambda: draw(counts.pictures, logits.guard.class_names, patch)},
        notes=(
            f"The gray block of {patch.height} x {patch.width} px covers the window with the most evidence for the "
            "true class. Certified images stay correct under it, and many others do, too: gray is no attack.",
            f"The paper calls classification under such a block almost impossible. Under it {best} is still correct "
            f"on {100 * counts.correct[best, True] / total:.1f} %.",
        ),
        settings={"block": [patch.height, patch.width], "gray": GRAY_LEVEL},
    )


# -- where the block lies ----------------------------------------------------------------------------------------------


def block_positions(
    logits: CachedLogits, patch: Patch, windows: Windows, device: torch.device
) -> Int64[np.ndarray, "images 2"]:
    """Return, per image, the corner of the block over the window with the most evidence for the true class."""
    field = logits.guard.field(*logits.size)
    corners = np.array(
        [
            (_middle_position(field.rows, patch.height, a, b), _middle_position(field.columns, patch.width, c, d))
            for a, b, c, d in windows.boxes.tolist()
        ]
    )
    heaviest = []
    for local_logits, targets in logits.batches(device):
        evidence = select(LOGITS(local_logits).values, targets).unsqueeze(1)
        heaviest.append(ties.argmax(sums(evidence, windows).squeeze(1), dim=1).cpu())
    positions: np.ndarray = corners[torch.cat(heaviest).numpy()]
    return positions


def _middle_position(axis: Axis, length: int, start: int, stop: int) -> int:
    """Return the middle one of the positions from which `length` pixels reach just the cells start .. stop - 1."""
    wanted = np.zeros(axis.cells, dtype=bool)
    wanted[start:stop] = True
    positions = range(axis.size - length + 1)
    exact = [position for position in positions if bool((axis.touched_cells(position, length) == wanted).all())]
    return exact[len(exact) // 2]


def cover(images: Images, corners: Int64[np.ndarray, "some 2"], patch: Patch) -> Images:
    """Return the images with a gray block at each corner."""
    covered = images.clone()
    for image, (top, left) in zip(covered, corners.tolist(), strict=True):
        image[:, top : top + patch.height, left : left + patch.width] = GRAY_LEVEL
    return covered


# -- what networks say -------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Picture:
    """One image without and with the block, its true class, Mask-BN's label under the block, and if that is proved."""

    image: Float[Tensor, "3 height width"]
    covered: Float[Tensor, "3 height width"]
    target: int
    label: int
    certified: bool


@final
@dataclass(frozen=True, kw_only=True)
class BlockCounts:
    """How often each network is correct, without and with the block; how many images are certified; pictures."""

    correct: dict[tuple[str, bool], int]
    certified: int
    pictures: tuple[Picture, ...]


@torch.no_grad()
def count_correct(context: Context, logits: CachedLogits, patch: Patch, guards: Guards, others: Guards) -> BlockCounts:
    """Ask the networks about every image, with and without the block.

    `guards` are rules for the network of the logits, which hold its answers to clean images; the first is certified.
    `others` are networks that must see both.
    """
    device, windows, first = context.device, logits.windows(patch), next(iter(guards))
    correct = {(name, block): 0 for name in (*guards, *others) for block in (False, True)}
    parts = []
    for local_logits, targets in logits.batches(device):
        for name, guard in guards.items():
            correct[name, False] += int((_label(guard, local_logits) == targets).sum())
        certificate = guards[first].defense.certify(guards[first].evidence(local_logits), windows)
        parts.append((certificate.certified & (certificate.label == targets)).cpu())
    certified = torch.cat(parts)
    corners = block_positions(logits, patch, windows, device)
    prepared = logits.about["prepared"]
    prepare = None if prepared is None else Preprocess.from_json(prepared)
    shown, pictures, done = _choose_shown(logits.targets.tolist()), [], 0
    with _on_device((logits.guard, *others.values()), device):
        source, size = context.images(logits.dataset), BATCH.get(device.type, BATCH["cuda"])
        for _, images in prepared_batches(source, prepare, device, size):  # those without logits are left out, too
            here = slice(done, done + len(images))
            target, covered = logits.targets[here].to(device), cover(images, corners[here], patch)
            local_logits = logits.guard.local_logits(covered)
            labels = {name: _label(guard, local_logits) for name, guard in guards.items()}
            for name, guard in others.items():
                labels[name] = guard.predict(covered).label
                correct[name, False] += int((guard.predict(images).label == target).sum())
            for name, label in labels.items():
                correct[name, True] += int((label == target).sum())
            for row in (index - done for index in shown if here.start <= index < here.stop):
                answer = int(target[row]), int(labels[first][row]), bool(certified[done + row])
                pictures.append(Picture(images[row].cpu(), covered[row].cpu(), *answer))
            done += len(images)
            context.progress("covered images", done, len(logits))
    return BlockCounts(correct=correct, certified=int(certified.sum()), pictures=tuple(pictures))


def _label(guard: LocalGuard[Any], local_logits: Tensor) -> Tensor:
    label: Tensor = guard.defense.predict(guard.evidence(local_logits)).label
    return label


@contextmanager
def _on_device(guards: Sequence[LocalGuard[Any]], device: torch.device) -> Iterator[None]:
    """Keep networks on a device inside the block."""
    try:
        for guard in guards:
            guard.model.to(device)
        yield
    finally:
        for guard in guards:
            guard.model.to("cpu")


def _choose_shown(targets: Sequence[int]) -> list[int]:
    """Return the first image of each of five classes, evenly spaced among all."""
    present = sorted(set(targets))
    chosen = [present[number * len(present) // SHOWN] for number in range(min(SHOWN, len(present)))]
    return [targets.index(target) for target in dict.fromkeys(chosen)]


# -- the figure --------------------------------------------------------------------------------------------------------


def draw(pictures: Sequence[Picture], class_names: Sequence[str], patch: Patch) -> "Figure":
    """Draw the images above, the same under the block below, with what Mask-BN says of each."""
    from matplotlib.figure import Figure

    def name_of(number: int) -> str:
        return class_names[number].replace("_", " ") if number < len(class_names) else f"class {number}"

    figure = Figure(figsize=(2.1 * len(pictures), 5), layout="constrained")
    panels = figure.subplots(2, len(pictures), squeeze=False)
    for column, picture in enumerate(pictures):
        for row, pixels in enumerate((picture.image, picture.covered)):
            panels[row, column].imshow(pixels.permute(1, 2, 0).clamp(0, 1).numpy())
            panels[row, column].axis("off")
        panels[0, column].set_title(name_of(picture.target), fontsize=10)
        correct = picture.label == picture.target
        answer = "still correct" if correct else f"now: {name_of(picture.label)}"
        more = "\nand certified" if picture.certified else "\nnot certified"
        panels[1, column].set_title(answer + more, fontsize=10, color="black" if correct else RED)
    size = f"{patch.height} x {patch.width}"
    figure.suptitle(f"A block of {size} pixels where the evidence is strongest, and what Mask-BN says", fontsize=12)
    return figure
