"""Empirical defenses beside a certified one: what each keeps under attacks that do and do not know it.

Local gradient smoothing and digital watermarking repair what an attack on the bare network did; an attack through the
cleaning finds what they leave. A certified accuracy is below every attacked one, whatever the attack. The paper has no
such table; `docs/case_study.md` explains this one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from patchguard import runtime
from patchguard.attacks.adaptive import Adaptive
from patchguard.attacks.base import Attack, Images, Victim
from patchguard.attacks.baselines import Colors, Copy
from patchguard.attacks.patch_pgd import PatchPGD
from patchguard.errors import InputError
from patchguard.guards.local import LocalGuard
from patchguard.paper import networks
from patchguard.paper.context import Context, StudyImages
from patchguard.paper.experiment import TITLES, Result, Row, Table, Value, to_percent
from patchguard.paper.figures import BLUE, GRAY, GREEN, ORANGE, draw_bars, new_figure
from patchguard.paper.image_cleaning import SURROGATES, Cleaned, Cleaning, DigitalWatermarking, LocalGradientSmoothing
from patchguard.paper.study_attacks import extend_attack, with_progress
from patchguard.patch import Patch
from patchguard.runs.metrics import proportion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CPU_IMAGES = 120  # evenly spaced, where no limit is given: about half an hour
COLUMNS = {
    "clean": "clean",
    "plain": "attack on the bare network",
    "adaptive": "adaptive attack",
    "certified": "certified",
}

ATTACK = PatchPGD(steps=60, step=0.05, locations=2)
ADAPTIVE = Adaptive(steps=60, locations=2)

Progress = Callable[[str, int], None]


@final
@dataclass(frozen=True, kw_only=True)
class Options:
    """How the comparison is made: `attack` on the bare and the cleaned network, `adaptive` on the certified guard.

    A cleaned network is also attacked at its most sensitive positions and, as its gradient may hide what pixels do, by
    `tries` single colors and as many pieces of other images.
    """

    attack: PatchPGD = ATTACK
    adaptive: Adaptive = ADAPTIVE
    tries: int = 50
    area: float = 0.03
    seed: int = 0
    batch_pixels: int | None = None


def run(context: Context, dataset: str) -> Result:
    """Compare the undefended network, its two cleanings and the certified model of the dataset."""
    network, certified_network = networks.resnets(dataset)[-1], networks.double_masking_network(dataset)
    assert certified_network is not None
    name, certified_name = context.choose(network.names), context.choose(certified_network.names)
    limit = context.limit or (CPU_IMAGES if context.device.type == "cpu" else None)
    guard, images = context.load_images(name, dataset, limit)
    certified = context.guard(certified_name)
    certified = certified if dataset == "cifar10" else certified.without_preprocess()
    certified.windows(Patch(1), *images.size)  # traced while it lies on the CPU
    certified.model.to(device=context.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    options = Options(seed=context.seed)
    kept = compare(guard, images, options, certified=certified, progress=context.count_steps(name))
    notes = {"certified": certified_name}
    rows = [
        Row(
            label=defense.replace("_", " "),
            ours=tuple(accuracies(each).values()),
            note=f"{notes.get(defense, name)}, {len(images):,} images",
        )
        for defense, each in kept.items()
    ]
    height, width = images.size
    patch = Patch.of_area(options.area, height=height, width=width)
    title = f"Empirical and certified defenses on {TITLES[dataset]}, a patch of {patch.height} x {patch.width} px"
    refuted = sum(int(each.refuted.sum()) for each in kept.values())
    return Result(
        tables=(Table(title=title, where="", columns=tuple(COLUMNS.values()), rows=tuple(rows)),),
        figures={"empirical_defenses": partial(draw, kept, f"{len(images):,} images, {title.split(', a ')[1]}")},
        notes=(f"Certified images that an attack broke: {refuted}.",),
        settings={
            "attack": {"name": "patch_pgd", **asdict(options.attack)},
            "adaptive": {"name": "adaptive", **asdict(options.adaptive)},
            "tries": options.tries,
            "patch": [patch.height, patch.width],
            "image_size": [height, width],
            "cleanings": {
                each: [asdict(cleaning) for cleaning in same]  # type: ignore[call-overload]
                for each, same in make_cleanings(height, width).items()
            },
        },
        refuted=refuted,
    )


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class StillCorrect:
    """Which images a victim labels correctly: as they are, after the plain attack, and after one made for it.

    The plain attack is made on the bare network and knows no defense. `adaptive` counts what withstands both.
    `certified`: correct, and proved to stay so; None where nothing can be proved.
    """

    clean: Bool[Tensor, " images"]
    plain: Bool[Tensor, " images"]
    adaptive: Bool[Tensor, " images"]
    certified: Bool[Tensor, " images"] | None = None

    @property
    def refuted(self) -> Bool[Tensor, " images"]:
        """Certified images that an attack broke all the same: there must be none."""
        return torch.zeros_like(self.clean) if self.certified is None else self.certified & ~self.adaptive


def attack_victim(
    victims: Sequence[Victim],
    images: Images,
    target: Int64[Tensor, " batch"],
    plain: Images,
    attacks: Sequence[Attack],
    patch: Patch,
    *,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
) -> StillCorrect:
    """Return what a victim labels correctly: images, the same after an attack on another (`plain`), after its own.

    `victims` are one and the same, with different gradients; each meets every attack, with the images that those before
    have left.
    """
    victim = victims[0]
    withstands = victim.predict(plain).label == target
    left = withstands.clone()
    known = range(len(images)) if numbers is None else numbers
    for each, attack in product(victims, attacks):
        rows = left.nonzero().squeeze(1)
        if len(rows):
            some = [known[row] for row in rows.tolist()]
            left[rows] = ~attack(each, images[rows], target[rows], patch, seed=seed, numbers=some).broken
    clean = victim.predict(images).label == target
    return StillCorrect(clean=clean.cpu(), plain=withstands.cpu(), adaptive=left.cpu())


def make_cleanings(height: int, width: int) -> dict[str, list[Cleaning]]:
    """Return the empirical defenses for images of this size, each with all gradients that an attack tries."""
    smoothing = LocalGradientSmoothing.fitted(height, width)
    return {
        "local_gradient_smoothing": [replace(smoothing, surrogate=each) for each in SURROGATES],
        "digital_watermarking": [DigitalWatermarking.fitted(height, width)],
    }


def compare(
    guard: LocalGuard[Any],
    images: StudyImages,
    options: Options,
    *,
    certified: LocalGuard[Any] | None = None,
    progress: Progress = lambda stage, count: None,
) -> dict[str, StillCorrect]:
    """Return, per defense, which images stay correct: clean, plainly attacked, adaptively attacked, certified.

    `guard` is the undefended network, bare and behind each cleaning; `certified` another one, whose masks are refitted
    to the patch.
    """
    if guard.defense.defends:
        raise InputError(f"`guard` must be undefended; got {type(guard.defense).__name__}. Give a plain ResNet.")
    device = runtime.device_and_dtype(guard.model)[0]
    height, width = images.size
    patch = Patch.of_area(options.area, height=height, width=width)
    fitted = None if certified is None else certified.for_patch(patch, height, width)
    sensitive = replace(options.attack, search="occlusion")
    attacks = [options.attack, sensitive, Colors(tries=options.tries), Copy(tries=options.tries)]
    batches: dict[str, list[StillCorrect]] = {}
    for indices, pixels, target in images.batches(device, options.batch_pixels):
        draws: dict[str, Any] = {"seed": options.seed, "numbers": indices}
        # To its end, not to its first success: what just crosses the border of a class is undone by any cleaning.
        bare = with_progress(guard, partial(progress, "none"))
        broken = options.attack(bare, pixels, target, patch, **draws)
        plain = extend_attack(bare, pixels, target, patch, broken, options.attack.schedule, **draws)
        none = attack_victim([guard], pixels, target, plain, [], patch)
        batches.setdefault("none", []).append(replace(none, adaptive=none.adaptive & ~broken.broken.cpu()))
        for name, same in make_cleanings(height, width).items():
            victims = [with_progress(Cleaned(guard, cleaning), partial(progress, name)) for cleaning in same]
            kept = attack_victim(victims, pixels, target, plain, attacks, patch, **draws)
            batches.setdefault(name, []).append(kept)
        if fitted is not None:
            kept = attack_victim([fitted], pixels, target, plain, [options.adaptive], patch, **draws)
            certificate = fitted.certify(pixels, patch)
            proved = (certificate.certified & (certificate.label == target)).cpu()
            batches.setdefault("certified", []).append(replace(kept, certified=proved))
            progress("certified", len(target))
    return {name: _concatenate(parts) for name, parts in batches.items()}


def _concatenate(parts: Sequence[StillCorrect]) -> StillCorrect:
    columns: dict[str, Any] = {column: [getattr(part, column) for part in parts] for column in COLUMNS}
    joined: dict[str, Any] = {key: None if each[0] is None else torch.cat(each) for key, each in columns.items()}
    return StillCorrect(**joined)


def accuracies(kept: StillCorrect) -> dict[str, Value]:
    """Return the columns of a row."""
    marks = {column: getattr(kept, column) for column in COLUMNS}
    return {column: None if each is None else proportion(int(each.sum()), len(each)) for column, each in marks.items()}


def draw(kept: Mapping[str, StillCorrect], title: str) -> "Figure":
    """Draw the comparison as bars."""
    figure, axes = new_figure()
    rows = [accuracies(each) for each in kept.values()]
    series = [
        (label, color, [to_percent(row[column]) or 0.0 for row in rows])
        for (column, label), color in zip(COLUMNS.items(), (GRAY, BLUE, ORANGE, GREEN), strict=True)
    ]
    names = {"local_gradient_smoothing": "LGS", "digital_watermarking": "DW"}
    draw_bars(axes, [names.get(name, name) for name in kept], series)
    axes.set_ylabel("accuracy, %")
    axes.set_title(title, loc="left")
    return figure
