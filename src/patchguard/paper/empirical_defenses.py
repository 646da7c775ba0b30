"""Empirical defenses beside a certified one: what each keeps under attacks that do and do not know of it.

    python -m patchguard.paper.empirical_defenses --model cifar10_resnet18 --certified cifar10 --data cifar10 \\
        --root DIR --out DIR

Local gradient smoothing and digital watermarking repair what an attack on the bare network did; an attack through the
cleaning finds what they leave. A certified accuracy is below every attacked one, whatever the attack.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from patchguard import runtime
from patchguard.attacks.adaptive import Adaptive
from patchguard.attacks.base import Attack, Images, Victim
from patchguard.attacks.baselines import Colors, Copy
from patchguard.attacks.patch_pgd import PatchPGD
from patchguard.defenses import Undefended
from patchguard.errors import InputError
from patchguard.guards.local import LocalGuard
from patchguard.paper import case_figures, study_command
from patchguard.paper.empirical import SURROGATES, Cleaned, Cleaning, DigitalWatermarking, LocalGradientSmoothing
from patchguard.paper.study_images import SMALL, StudyImages
from patchguard.paper.victims import Watched, press
from patchguard.patch import Patch
from patchguard.runs import metrics
from patchguard.storage import zoo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {
    "none": "none",
    "local_gradient_smoothing": "LGS",
    "digital_watermarking": "DW",
    "certified": "certified",
}
COLUMNS = ("clean", "plain", "adaptive", "certified")

Progress = Callable[[str, int], None]


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Kept:
    """Which images of a batch a victim gets right: as they are, after the plain attack, and after one made for it.

    The plain attack is made on the bare network and knows no defense. `adaptive` counts what withstands both.
    `certified`: right, and proved to stay so; None where nothing can be proved.
    """

    clean: Bool[Tensor, " batch"]
    plain: Bool[Tensor, " batch"]
    adaptive: Bool[Tensor, " batch"]
    certified: Bool[Tensor, " batch"] | None = None

    @property
    def refuted(self) -> Bool[Tensor, " batch"]:
        """Certified images that an attack turned all the same: there must be none."""
        return torch.zeros_like(self.clean) if self.certified is None else self.certified & ~self.adaptive


def kept(
    victims: Sequence[Victim],
    images: Images,
    target: Int64[Tensor, " batch"],
    plain: Images,
    attacks: Sequence[Attack],
    patch: Patch,
    *,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
) -> Kept:
    """Return what a victim keeps right: images, the same after an attack on another (`plain`), and after its own.

    `victims` are one and the same, with different gradients; each meets every attack, with what those before have left.
    A LocalGuard with a defense is certified, too.
    """
    victim = victims[0]
    withstands = victim.predict(plain).label == target
    left = withstands.clone()
    named = range(len(images)) if numbers is None else numbers
    for each, attack in product(victims, attacks):
        rows = left.nonzero().squeeze(1)
        if len(rows):
            some = [named[row] for row in rows.tolist()]
            left[rows] = ~attack(each, images[rows], target[rows], patch, seed=seed, numbers=some).broken
    proved = None
    if isinstance(victim, LocalGuard) and not isinstance(victim.defense, Undefended):
        certificate = victim.certify(images, patch)
        proved = (certificate.certified & (certificate.label == target)).cpu()
    clean = victim.predict(images).label == target
    return Kept(clean=clean.cpu(), plain=withstands.cpu(), adaptive=left.cpu(), certified=proved)


def cleanings(height: int, width: int) -> dict[str, list[Cleaning]]:
    """Return the empirical defenses for images of this size, each with all gradients that an attack tries."""
    smoothing = LocalGradientSmoothing.fitted(height, width)
    return {
        "local_gradient_smoothing": [replace(smoothing, surrogate=each) for each in SURROGATES],
        "digital_watermarking": [DigitalWatermarking.fitted(height, width)],
    }


@final
@dataclass(frozen=True, kw_only=True)
class Options:
    """How the comparison is made: `attack` on the bare and the cleaned network, `adaptive` on the certified guard.

    A cleaned network is also attacked at the places that it fears most, and, as its gradient may hide what pixels do,
    by `tries` single colours and as many pieces of other images.
    """

    attack: PatchPGD
    adaptive: Adaptive
    tries: int = 50
    area: float = 0.03
    seed: int = 0
    batch_pixels: int | None = None


def run(
    guard: LocalGuard[Any],
    images: StudyImages,
    options: Options,
    *,
    certified: LocalGuard[Any] | None = None,
    progress: Progress = lambda stage, count: None,
) -> dict[str, Any]:
    """Return the comparison as JSON: clean, plainly attacked, adaptively attacked and certified accuracy per defense.

    `guard` is the undefended network, bare and behind each cleaning; `certified` another one, whose masks are refitted
    to the patch.
    """
    if not isinstance(guard.defense, Undefended):
        raise InputError(f"`guard` must be undefended; got {type(guard.defense).__name__}. Give a plain ResNet.")
    device = runtime.device_and_dtype(guard.model)[0]
    height, width = images.size
    patch = Patch.of_area(options.area, height=height, width=width)
    proven = None if certified is None else certified.for_patch(patch, height, width)
    feared = replace(options.attack, search="occlusion")
    attacks = [options.attack, feared, Colors(tries=options.tries), Copy(tries=options.tries)]
    found: dict[str, list[Kept]] = {}
    for numbers, pixels, target in images.batches(device, options.batch_pixels):
        shared: dict[str, Any] = {"seed": options.seed, "numbers": numbers}
        # To its end, not to its first success: what just crosses the border of a class is undone by any cleaning.
        watched = Watched(guard, partial(progress, "none"))
        made = options.attack(watched, pixels, target, patch, **shared)
        plain = press(watched, pixels, target, patch, made, options.attack.schedule, **shared)
        stays = guard.predict(plain).label == target
        bare = Kept(
            clean=(guard.predict(pixels).label == target).cpu(),
            plain=stays.cpu(),
            adaptive=(stays & ~made.broken).cpu(),
        )
        found.setdefault("none", []).append(bare)
        for name, same in cleanings(height, width).items():
            victims = [Watched(Cleaned(guard, cleaning), partial(progress, name)) for cleaning in same]
            found.setdefault(name, []).append(kept(victims, pixels, target, plain, attacks, patch, **shared))
        if proven is not None:
            progress("certified", 0)
            found.setdefault("certified", []).append(
                kept([proven], pixels, target, plain, [options.adaptive], patch, **shared)
            )
            progress("certified", len(target))
    return {
        "images": len(images),
        "settings": {
            "attack": {"name": "patch_pgd", **asdict(options.attack)},
            "adaptive": {"name": "adaptive", **asdict(options.adaptive)},
            "tries": options.tries,
            "patch": [patch.height, patch.width],
            "image_size": list(images.size),
            "cleanings": {name: [_settings(each) for each in same] for name, same in cleanings(height, width).items()},
            "seed": options.seed,
        },
        "defenses": {name: _row(parts) for name, parts in found.items()},
        "environment": runtime.describe_environment(),
    }


def _settings(cleaning: Any) -> dict[str, Any]:
    return asdict(cleaning)


def _row(parts: Sequence[Kept]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for column in COLUMNS:
        values = [getattr(part, column) for part in parts]
        joined = None if values[0] is None else torch.cat(values)
        row[column] = None if joined is None else metrics.share(int(joined.sum()), len(joined))
    row["certified_and_broken"] = None if row["certified"] is None else sum(int(part.refuted.sum()) for part in parts)
    return row


# -- the command -------------------------------------------------------------------------------------------------------


def figure(summary: dict[str, Any]) -> "Figure":
    """Return the comparison as bars."""
    rows = summary["defenses"]
    drawn, axes = case_figures.empty()
    colours = {"clean": "#999999", "plain": "#1f5fa8", "adaptive": "#d9731a", "certified": "#2c8a4b"}
    labels = {"plain": "attack on the bare network", "adaptive": "adaptive attack"}
    series = [
        (
            labels.get(column, column),
            colours[column],
            [100 * ((row[column] or {}).get("share") or 0.0) for row in rows.values()],
        )
        for column in COLUMNS
    ]
    case_figures.bars(axes, [NAMES[name] for name in rows], series)
    axes.set_ylabel("accuracy, %")
    side = summary["settings"]["patch"]
    axes.set_title(f"{summary['images']:,} images, patch of {side[0]} x {side[1]} pixels", loc="left")
    return drawn


def shown(summary: dict[str, Any]) -> str:
    """Return the table of a summary as text."""
    rows = [["accuracy, %", "clean", "plain attack", "adaptive attack", "certified"]]
    for name, row in summary["defenses"].items():
        rows.append(
            [NAMES[name], *("-" if row[each] is None else study_command.percent(row[each]) for each in COLUMNS)]
        )
    return study_command.table(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the defenses on a set of images and write summary.json and a figure; 3 if a certificate is refuted."""
    parser = study_command.parser("empirical_defenses", "Empirical defenses beside a certified one, under attack.")
    parser.add_argument("--certified", help="the certified guard beside them: a name or a file (default: none)")
    chosen = parser.parse_args(arguments)
    try:
        guard, images = study_command.opened(chosen)
        certified = None
        if chosen.certified:
            certified = zoo.load_guard(chosen.certified)
            certified = certified if chosen.data in SMALL else certified.without_preprocess()
            certified.windows(Patch(1), *images.size)  # traced while it lies on the CPU
            study_command.place(certified, runtime.resolve_device(chosen.device))
        options = Options(
            attack=study_command.attack_of(chosen),
            adaptive=Adaptive(steps=chosen.steps, locations=chosen.locations),
            area=chosen.area,
            seed=chosen.seed,
        )
        begun = time.monotonic()
        summary = run(guard, images, options, certified=certified, progress=study_command.Line())
        summary |= {
            "dataset": study_command.dataset_of(chosen.data),
            "model": Path(chosen.model).stem,
            "certified_model": None if certified is None else Path(chosen.certified).stem,
            "seconds": time.monotonic() - begun,
        }
        study_command.write(chosen.out, summary, {"empirical_defenses": figure(summary)})
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(shown(summary))
    refuted = (summary["defenses"].get("certified") or {}).get("certified_and_broken") or 0
    if refuted:
        sys.stderr.write(f"{refuted} certified images were broken: a certificate is wrong. Report this as a bug.\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
