"""The case study of section 3.1: what a patch does to the local predictions and logits of an undefended ResNet.

    python -m patchguard.paper.case_study --model cifar10_resnet18 --data cifar10 --root DIR --out DIR

An image is attacked, the cells of the last feature map are asked one by one what they see, and what they say is
compared with the clean image: the paper's tab-local-attack, its histograms, and its remark that a ceiling c_h at the
largest clean logit improves empirical robustness. docs/case_study.md says what each number is.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from patchguard import runtime
from patchguard.attacks.base import Attack, Images
from patchguard.attacks.gradient_ascent import StepSchedule
from patchguard.attacks.patch_pgd import PatchPGD
from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.guards.local import LocalGuard
from patchguard.paper import case_figures, study_command
from patchguard.paper.local_maps import Stages, clipping_table, histogram, joined, local_attack_table, observe
from patchguard.paper.study_images import StudyImages
from patchguard.paper.victims import Through, Tick, Watched, press
from patchguard.patch import Patch
from patchguard.runs import metrics

AREA = 0.03  # of the image: the paper's patch
PAPER_ATTACK = PatchPGD(steps=500, step=0.05, locations=5)
Bounds = tuple[float | None, float | None]
CLIPS: tuple[Bounds, ...] = ((None, None), (0.0, None), (0.0, 50.0), (0.0, 15.0), (0.0, 5.0))  # of tab-clipping

KINDS = ("clean", "transferred", "adaptive")

Progress = Callable[[str, int], None]


# -- one batch ---------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class CaseStudy:
    """What cells say before and after an attack, and the images after it has gone on to its end."""

    stages: Stages
    pressed: Images

    @classmethod
    def of(
        cls,
        guard: LocalGuard[Any],
        images: Images,
        target: Int64[Tensor, " batch"],
        attack: Attack,
        patch: Patch,
        *,
        schedule: StepSchedule | None = None,
        seed: int = 0,
        numbers: Sequence[int] | None = None,
        tick: Tick = lambda count: None,
    ) -> "CaseStudy":
        """Attack images and look at their cells; `schedule` is how the attack goes on after its success (None: not)."""
        watched = Watched(guard, tick)
        made = attack(watched, images, target, patch, seed=seed, numbers=numbers)
        pressed = made.images
        if schedule is not None:
            pressed = press(watched, images, target, patch, made, schedule, seed=seed, numbers=numbers)
        stages = Stages(
            original=observe(guard, images, target),
            broken=observe(guard, made.images, target),
            attacked=observe(guard, pressed, target),
        )
        return cls(stages=stages, pressed=pressed)


def clipped(guard: LocalGuard[Any], low: float | None, high: float | None) -> LocalGuard[Any]:
    """Return the guard that adds up its local logits clipped to [low, high]."""
    return replace(guard, evidence=Evidence(kind="logits", low=low, high=high), defense=Undefended())


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Clipping:
    """Which images of a batch stay right under one clipping of the local logits.

    `transferred`: after an attack on the unclipped network; `adaptive`: after one that knows the clipping, and after
    the former, too, since an attacker may take the better of the two.
    """

    clean: Bool[Tensor, " batch"]
    transferred: Bool[Tensor, " batch"]
    adaptive: Bool[Tensor, " batch"]

    @classmethod
    def of(
        cls,
        guard: LocalGuard[Any],
        images: Images,
        target: Int64[Tensor, " batch"],
        attack: Attack,
        patch: Patch,
        transferred: Sequence[Images],
        *,
        seed: int = 0,
        numbers: Sequence[int] | None = None,
        tick: Tick = lambda count: None,
    ) -> "Clipping":
        """Attack a clipped guard; `transferred` are the same images after attacks on another one."""
        made = attack(Watched(Through(guard), tick), images, target, patch, seed=seed, numbers=numbers)
        stays = torch.ones_like(target, dtype=torch.bool)
        for others in transferred:
            stays &= guard.predict(others).label == target
        return cls(
            clean=(guard.predict(images).label == target).cpu(),
            transferred=stays.cpu(),
            adaptive=(stays & ~made.broken).cpu(),
        )

    @classmethod
    def unclipped(cls, stages: Stages) -> "Clipping":
        """Return what the study itself found: an attack on the unclipped network knows all there is to know."""
        stays = ~stages.attacked.wrong
        return cls(clean=~stages.original.wrong, transferred=stays, adaptive=stays & ~stages.broken.wrong)


# -- many batches ------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class Options:
    """How a study is made. `press`: go on for as many steps as the attack has; `ceiling`: measure the remark on c_h."""

    attack: PatchPGD = PAPER_ATTACK
    area: float = AREA
    press: bool = True
    ceiling: bool = True
    seed: int = 0
    batch_pixels: int | None = None


def run(
    guard: LocalGuard[Any],
    images: StudyImages,
    *,
    dataset: str = "",
    options: Options | None = None,
    progress: Progress = lambda stage, count: None,
) -> dict[str, Any]:
    """Return the whole study of an undefended guard as JSON: tables with the paper's numbers beside ours, histograms.

    `dataset` names the column of the paper's tables; without one the published numbers are left out. `progress` is told
    the stage and how many images, or image steps, it has done.
    """
    options = options or Options()
    if not isinstance(guard.defense, Undefended):
        raise InputError(f"`guard` must be undefended; got {type(guard.defense).__name__}. Give a plain ResNet.")
    device = runtime.device_and_dtype(guard.model)[0]
    patch = Patch.of_area(options.area, height=images.size[0], width=images.size[1])
    right = dict.fromkeys(CLIPS, 0)
    largest = -torch.inf
    for _, pixels, target in images.batches(device, options.batch_pixels):
        local_logits = guard.local_logits(pixels)
        largest = max(largest, float(local_logits.max()))
        for clip in CLIPS:
            right[clip] += int((_label(clipped(guard, *clip), local_logits) == target).sum())
        progress("clean", len(target))
    parts: list[Stages] = []
    arms: list[dict[str, Clipping]] = []
    for numbers, pixels, target in images.batches(device, options.batch_pixels):
        shared: dict[str, Any] = {"seed": options.seed, "numbers": numbers}
        schedule = options.attack.schedule if options.press else None
        tick = partial(progress, "attack")
        found = CaseStudy.of(guard, pixels, target, options.attack, patch, schedule=schedule, tick=tick, **shared)
        parts.append(found.stages)
        if not (options.ceiling and largest > 0):
            continue
        # Without a clipping, the attack of the study is the one that knows everything.
        stages = found.stages
        arm = {"(-inf, inf)": Clipping.unclipped(stages)}
        for name, high in {"(0, inf)": None, "(0, c_h)": largest}.items():
            tick = partial(progress, f"clip to {name}")
            victim = clipped(guard, 0.0, high)
            arm[name] = Clipping.of(victim, pixels, target, options.attack, patch, [found.pressed], tick=tick, **shared)
        arms.append(arm)
    study = Stages(
        original=joined([part.original for part in parts]),
        broken=joined([part.broken for part in parts]),
        attacked=joined([part.attacked for part in parts]),
    )
    return {
        "dataset": dataset,
        "images": len(images),
        "settings": {
            "attack": {"name": "patch_pgd", **asdict(options.attack)},
            "patch": [patch.height, patch.width],
            "image_size": list(images.size),
            "goes_on_after_success": options.press,
            "seed": options.seed,
        },
        "tab-local-attack": local_attack_table(study, dataset),
        "histogram": histogram(study),
        "clipping": clipping_table(right, len(images), dataset),
        "ceiling": {"c_h": largest, "clips": _arms(arms)} if arms else None,
        "environment": runtime.describe_environment(),
    }


@torch.no_grad()
def _label(guard: LocalGuard[Any], local_logits: Tensor) -> Tensor:
    return guard.defense.predict(guard.evidence(local_logits)).label


def _arms(batches: Sequence[dict[str, Clipping]]) -> dict[str, Any]:
    """Return the shares that stay right, clipping by clipping."""
    found: dict[str, Any] = {}
    for name in batches[0]:
        found[name] = {}
        for kind in KINDS:
            stays = torch.cat([getattr(batch[name], kind) for batch in batches])
            found[name][kind] = metrics.share(int(stays.sum()), len(stays))
    return found


# -- the command -------------------------------------------------------------------------------------------------------


def shown(summary: dict[str, Any]) -> str:
    """Return the tables of a summary as text."""
    local = [["incorrect predictions, %", "here", "paper"]]
    for name, values in summary["tab-local-attack"]["rows"].items():
        paper = values["published"]
        local.append([name, f"{values['ours']:.1f}", "-" if paper is None else f"{paper:.1f}"])
    text = study_command.table(local)
    if summary["ceiling"]:
        rows = [["accuracy under a clipping, %", "clean", "attack on no clipping", "adaptive"]]
        for clip, shares in summary["ceiling"]["clips"].items():
            rows.append([clip, *(study_command.percent(shares[kind]) for kind in KINDS)])
        text += f"\nc_h = {summary['ceiling']['c_h']:.3f}\n" + study_command.table(rows)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study on a set of images and write summary.json and figures."""
    parser = study_command.parser("case_study", "Local predictions and logits of an undefended network under attack.")
    parser.add_argument("--no-press", action="store_true", help="leave an image as it was when it first broke")
    parser.add_argument("--no-ceiling", action="store_true", help="leave out the attacks on clipped logits")
    chosen = parser.parse_args(arguments)
    try:
        guard, images = study_command.opened(chosen)
        options = Options(
            attack=study_command.attack_of(chosen),
            area=chosen.area,
            press=not chosen.no_press,
            ceiling=not chosen.no_ceiling,
            seed=chosen.seed,
        )
        dataset = study_command.dataset_of(chosen.data)
        begun = time.monotonic()
        summary = run(guard, images, dataset=dataset, options=options, progress=study_command.Line())
        summary |= {"model": Path(chosen.model).stem, "seconds": time.monotonic() - begun}
        study_command.write(chosen.out, summary, case_figures.figures(summary))
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(shown(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
