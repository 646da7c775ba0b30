"""A block of 96 x 96 pixels over the image (fig-large-patch-visu), and what networks still see.

The paper claims (apx-large-patch): a block of 96 x 96 in 224 x 224 pixels can cover the entire salient object and make
classification almost impossible; Mask-BN-17 still has 91.1 % clean and 50.7 % provable accuracy against such patches.

Ours: the block is put over the window with the most evidence for the true class, grey, image by image, and networks are
asked again. The picture shows five images; the table says how often Mask-BN, the plain sum of its logits and an
undefended ResNet-50 are right with and without the block. A grey block is no attack: its accuracy lies above what is
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

from patchguard.data.decode import Unreadable
from patchguard.data.loading import decoded
from patchguard.defenses import RobustMasking, Undefended, ties
from patchguard.defenses.base import select
from patchguard.defenses.window_sums import sums
from patchguard.geometry.field import Axis
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.windows import Windows
from patchguard.guards.local import LocalGuard
from patchguard.paper import models, published
from patchguard.paper.context import Context
from patchguard.paper.experiment import TITLES, Missing, Result, Row, Table
from patchguard.paper.maps import Maps
from patchguard.paper.tally import LOGITS, SIGNED
from patchguard.patch import Patch
from patchguard.runs import metrics
from patchguard.runs.metrics import Share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHERE = "fig-large-patch-visu"
SIDE = 96
SHOWN = 5
GREY = 0.5
AT_ONCE = {"cpu": 8, "cuda": 256}
Guards = Mapping[str, LocalGuard[Any]]
COLUMNS = ("clean", "with the block", "provable")


def run(context: Context, dataset: str) -> Result:
    """Cover every image where it says most about its class, and show some of them."""
    network = models.bagnet(dataset)
    nothing = (None, None, None)
    clean, provable = published.LARGE_PATCH.get(dataset, {}).get(f"{SIDE}x{SIDE}", (None, None))
    theirs = (clean, None, provable)
    context.images(dataset)
    try:
        maps = context.maps(network.names, dataset)
    except Missing as missing:
        row = Row(label=network.label, ours=nothing, published=theirs, note=str(missing))
        return Result(tables=(Table(title=_title(dataset), where=WHERE, columns=COLUMNS, rows=(row,)),))
    patch = Patch(min(SIDE, *(size - 1 for size in maps.size)))
    guard = replace(maps.guard, evidence=LOGITS, defense=RobustMasking(masks=maps.windows(patch)))
    plain = replace(guard, evidence=SIGNED, defense=Undefended())
    guards = {"Mask-BN": guard, "the same network, logits added up": plain}
    residual = context.find(models.residual(dataset).names)
    other = {} if residual is None else {"ResNet-50": replace(context.guard(residual), preprocess=Preprocess())}
    found = answered(context, maps, patch, guards, other)
    rows, seeing = [], next(iter(other or guards))
    for name in (*guards, *other):
        proved: Share | None = found.share(found.proved) if name == "Mask-BN" else None
        ours = (found.share(found.right[name, False]), found.share(found.right[name, True]), proved)
        note = maps.model if name in guards else residual or ""
        known = theirs if name == "Mask-BN" else nothing
        rows.append(Row(label=name, ours=ours, published=known, note=note, reason=models.trained(note)))
    if residual is None:
        reason = f"not run: no ResNet-50 here. {context.command(models.residual(dataset).names[0])}"
        rows.append(Row(label="ResNet-50", ours=nothing, note=reason))
    return Result(
        tables=(Table(title=_title(dataset), where=WHERE, columns=COLUMNS, rows=tuple(rows)),),
        figures={"occlusion": lambda: figure(found.pictures, maps.guard.class_names, patch)},
        notes=(
            f"The grey block of {patch.height} x {patch.width} px lies over the window with the most evidence for "
            "the true class. Certified images stay right under it, and many others do, too: grey is no attack.",
            f"The paper calls classification under such a block almost impossible. Under it {seeing} is still right "
            f"about {100 * found.right[seeing, True] / found.of:.1f} %.",
        ),
        settings={"block": [patch.height, patch.width], "grey": GREY},
    )


def _title(dataset: str) -> str:
    return f"A block of {SIDE} x {SIDE} pixels on {TITLES.get(dataset, dataset)}"


# -- where the block lies ----------------------------------------------------------------------------------------------


def place_of(axis: Axis, length: int, start: int, stop: int) -> int:
    """Return the middle one of the positions from which `length` pixels reach just the cells start .. stop - 1."""
    wanted = np.zeros(axis.cells, dtype=bool)
    wanted[start:stop] = True
    exact = [
        position
        for position in range(axis.size - length + 1)
        if bool((axis.touched_cells(position, length) == wanted).all())
    ]
    return exact[len(exact) // 2]


def places(maps: Maps, patch: Patch, windows: Windows, device: torch.device) -> Int64[np.ndarray, "images 2"]:
    """Return, per image, the corner of the block over the window with the most evidence for the true class."""
    field = maps.guard.field(*maps.size)
    corners = np.array(
        [
            (place_of(field.rows, patch.height, a, b), place_of(field.columns, patch.width, c, d))
            for a, b, c, d in windows.boxes.tolist()
        ]
    )
    chosen = []
    for local_logits, targets in maps.batches(device):
        evidence = select(LOGITS(local_logits).values, targets).unsqueeze(1)
        chosen.append(ties.argmax(sums(evidence, windows).squeeze(1), dim=1).cpu())
    found: np.ndarray = corners[torch.cat(chosen).numpy()]
    return found


def covered(
    images: Float[Tensor, "some 3 height width"], corners: Int64[np.ndarray, "some 2"], patch: Patch
) -> Float[Tensor, "some 3 height width"]:
    """Return the images with a grey block at each corner."""
    painted = images.clone()
    for image, (top, left) in zip(painted, corners.tolist(), strict=True):
        image[:, top : top + patch.height, left : left + patch.width] = GREY
    return painted


# -- what networks say -------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Picture:
    """One image with and without the block, and whether Mask-BN is right about it and proves it."""

    image: Float[Tensor, "3 height width"]
    occluded: Float[Tensor, "3 height width"]
    target: int
    label: int
    proved: bool


@final
@dataclass(frozen=True, kw_only=True)
class Answers:
    """How often each network is right, without and with the block; for how many images that is proved; pictures."""

    of: int
    right: dict[tuple[str, bool], int]
    proved: int
    pictures: tuple[Picture, ...]

    def share(self, right: int) -> Share:
        """Return a count as a share of all images."""
        return metrics.share(right, self.of)


@torch.no_grad()
def answered(context: Context, maps: Maps, patch: Patch, guards: Guards, other: Guards) -> Answers:
    """Ask the networks about every image, with and without the block.

    `guards` are rules for the network of the maps, which hold its answers to clean images; the first is certified.
    `other` has networks that must look at both.
    """
    device, windows, first = context.device, maps.windows(patch), next(iter(guards))
    right = {(name, block): 0 for name in (*guards, *other) for block in (False, True)}
    sure = []
    for local_logits, targets in maps.batches(device):
        for name, guard in guards.items():
            right[name, False] += int((_label(guard, local_logits) == targets).sum())
        proof = guards[first].defense.certify(guards[first].evidence(local_logits), windows)
        sure.append((proof.certified & (proof.label == targets)).cpu())
    proved = torch.cat(sure)
    corners = places(maps, patch, windows, device)
    wanted, pictures, done = _shown(maps.targets.tolist()), [], 0
    with _placed((maps.guard, *other.values()), device):
        for images in _batches(context, maps):
            here = slice(done, done + len(images))
            pixels, target = images.to(device), maps.targets[here].to(device)
            occluded = covered(pixels, corners[here], patch)
            local_logits = maps.guard.local_logits(occluded)
            labels = {name: _label(guard, local_logits) for name, guard in guards.items()}
            for name, guard in other.items():
                labels[name] = guard.predict(occluded).label
                right[name, False] += int((guard.predict(pixels).label == target).sum())
            for name, label in labels.items():
                right[name, True] += int((label == target).sum())
            for row in (number - done for number in wanted if here.start <= number < here.stop):
                said = int(labels[first][row])
                shown = (images[row], occluded[row].cpu())
                pictures.append(Picture(*shown, target=int(target[row]), label=said, proved=bool(proved[done + row])))
            done += len(images)
            context.progress("occluded images", done, len(maps))
    return Answers(of=done, right=right, proved=int(proved.sum()), pictures=tuple(pictures))


def _label(guard: LocalGuard[Any], local_logits: Tensor) -> Tensor:
    label: Tensor = guard.defense.predict(guard.evidence(local_logits)).label
    return label


@contextmanager
def _placed(guards: Sequence[LocalGuard[Any]], device: torch.device) -> Iterator[None]:
    """Have networks on a device for a while."""
    try:
        for guard in guards:
            guard.model.to(device)
        yield
    finally:
        for guard in guards:
            guard.model.to("cpu")


def _batches(context: Context, maps: Maps) -> Iterator[Float[Tensor, "some 3 height width"]]:
    """Yield the images behind the maps as the network saw them; those that cannot be read have no map, either."""
    prepared = maps.about["prepared"]
    prepare = Preprocess() if prepared is None else Preprocess.from_json(prepared)
    at_once = AT_ONCE.get(context.device.type, AT_ONCE["cuda"])
    images: list[Tensor] = []
    for image in decoded(context.images(maps.dataset)):
        if isinstance(image, Unreadable):
            continue
        images.append(prepare(image[None].float() / 255))
        if len(images) == at_once:
            yield torch.cat(images)
            images = []
    if images:
        yield torch.cat(images)


def _shown(targets: Sequence[int]) -> list[int]:
    """Return the first image of each of five classes, evenly spread over all."""
    present = sorted(set(targets))
    chosen = [present[place * len(present) // SHOWN] for place in range(min(SHOWN, len(present)))]
    return [targets.index(target) for target in dict.fromkeys(chosen)]


# -- the figure --------------------------------------------------------------------------------------------------------


def figure(pictures: Sequence[Picture], names: Sequence[str], patch: Patch) -> "Figure":
    """Return the images above, the same under the block below, with what Mask-BN says of each."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(2.1 * len(pictures), 5), layout="constrained")
    panels = made.subplots(2, len(pictures), squeeze=False)
    for column, picture in enumerate(pictures):
        for row, pixels in enumerate((picture.image, picture.occluded)):
            panels[row, column].imshow(pixels.permute(1, 2, 0).clamp(0, 1).numpy())
            panels[row, column].axis("off")
        panels[0, column].set_title(_name(names, picture.target), fontsize=10)
        right = picture.label == picture.target
        says = "still right" if right else f"now: {_name(names, picture.label)}"
        more = "\nand certified" if picture.proved else "\nnot certified"
        panels[1, column].set_title(says + more, fontsize=10, color="black" if right else "#c22f2f")
    made.suptitle(
        f"A block of {patch.height} x {patch.width} pixels where the evidence is strongest, and what Mask-BN says",
        fontsize=12,
    )
    return made


def _name(names: Sequence[str], number: int) -> str:
    return names[number].replace("_", " ") if number < len(names) else f"class {number}"
