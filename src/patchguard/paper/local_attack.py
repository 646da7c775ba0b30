"""Section 3.1: what a patch does to the local predictions and logits of an undefended ResNet.

The paper claims (tab-local-attack, fig-hist-net, -nette, -cifar): a patch of 3 % of the pixels makes 24.5 % (ImageNet),
41.1 % (ImageNette) and 40.0 % (CIFAR-10) more of the local predictions of ResNet-50 wrong, since it lies in the large
field of most of them; and malicious logits are extremely large, which a mean cannot withstand. A ceiling c_h at the
largest clean logit is said to improve empirical robustness.

Ours: the attack with the paper's settings on a GPU (500 steps of 0.05 at 5 places; a CPU runs a short one and says
so), with the histogram of large logits and the accuracy under ceilings. `docs/case_study.md` explains each number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchguard import runtime
from patchguard.attacks.base import Images
from patchguard.attacks.patch_pgd import PatchPGD
from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.guards.local import LocalGuard
from patchguard.paper import networks, published
from patchguard.paper.context import Context, StudyImages
from patchguard.paper.counting import missing_rows
from patchguard.paper.experiment import TITLES, Drawing, Missing, Result, Row, Table, Value
from patchguard.paper.figures import BLUE, GRAY, ORANGE, draw_bars, new_figure
from patchguard.paper.study_attacks import extend_attack, through_evidence, with_progress
from patchguard.patch import Patch
from patchguard.runs.metrics import proportion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AREA = 0.03  # of the image: the paper's patch
PAPER_ATTACK = PatchPGD(steps=500, step=0.05, locations=5)
SHORT_ATTACK = PatchPGD(steps=20, step=0.1, locations=1)
MOST_IMAGES = {"imagenet": 5000}  # "We take 5000 random ImageNet validation images"
WHERE = "tab-local-attack"
HISTOGRAMS = {"imagenet": "fig-hist-net", "imagenette": "fig-hist-nette", "cifar10": "fig-hist-cifar"}
SHORT_LABELS = ("local, attacked", "local, original", "local, difference", "global, attacked")
CLIP_ATTACKS = {"clean": "clean", "transferred": "attack on no clipping", "adaptive": "adaptive attack"}

Progress: TypeAlias = Callable[[str, int], None]  # the stage, and how many images or image steps it did
Marks: TypeAlias = Bool[Tensor, " images"]


def run(context: Context, dataset: str) -> Result:
    """Attack every image of the dataset and look at the cells."""
    known = networks.resnets(dataset)  # the paper's own first
    network = next((each for each in known if context.find(each.names) is not None), known[0])
    theirs = {label: (number,) for label, number in published.LOCAL_ATTACK[dataset].items()}
    title = f"Incorrect predictions of {network.label} on {TITLES[dataset]}"
    try:
        name = context.choose(network.names)
    except Missing as missing:
        rows = tuple(missing_rows(missing, theirs, 1))
        return Result(tables=(Table(title=title, where=WHERE, columns=("%",), rows=rows),))
    attack = PAPER_ATTACK if context.device.type == "cuda" else SHORT_ATTACK
    guard, images = context.load_images(name, dataset, context.limit or MOST_IMAGES.get(dataset))
    patch = Patch.of_area(AREA, height=images.size[0], width=images.size[1])
    study = attack_and_observe(guard, images, attack, patch, seed=context.seed, progress=context.count_steps(name))
    note = f"{name}, {len(images):,} images, a patch of {patch.height}x{patch.width} px"
    reason = network.describe_differences(name)
    ours = incorrect_predictions(study)
    rows = tuple(
        Row(label=label, ours=(ours[label],), published=theirs[label], note=note, reason=reason) for label in theirs
    )
    tables = [
        Table(title=title, where=WHERE, columns=("%",), rows=rows),
        logits_table(study, HISTOGRAMS.get(dataset, "")),
    ]
    heading = f"{name} on {len(images):,} images"
    figures: dict[str, Drawing] = {
        "local_predictions": partial(draw_predictions, study, published.LOCAL_ATTACK[dataset], patch, heading),
        "histogram": partial(draw_histogram, study, heading),
    }
    if study.clips:
        tables.append(ceiling_table(study))
        figures["ceiling"] = partial(draw_ceiling, study, heading)
    short = () if attack == PAPER_ATTACK else (f"A short attack, for a CPU: {attack}. The paper's: {PAPER_ATTACK}.",)
    return Result(
        tables=tuple(tables),
        figures=figures,
        notes=(
            *short,
            "Broken images are attacked further: the histogram shows the end of the attack, not its success.",
        ),
        settings={
            "attack": {"name": "patch_pgd", **asdict(attack)},
            "patch": [patch.height, patch.width],
            "image_size": list(images.size),
            "continues_after_success": True,
            "seed": context.seed,
            "model": name,
        },
    )


# -- what cells say ----------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Observed:
    """What the cells of some images say, on the CPU.

    A local prediction is the class of the largest logit in a cell; the global one is the guard's. The malicious class
    is the strongest but the true one in the mean of the local logits: the answer, where an attack succeeded.
    """

    wrong_cells: Int64[Tensor, " images"]
    wrong: Marks
    true: Float[Tensor, "images cells"]
    malicious: Float[Tensor, "images cells"]
    largest: Float[Tensor, " images"]

    @property
    def wrong_cell_fraction(self) -> float:
        """The fraction of all cells that predict another class than the true one."""
        return int(self.wrong_cells.sum()) / self.true.numel()

    @classmethod
    def of(
        cls, local_logits: Float[Tensor, "images classes rows columns"], label: Tensor, target: Tensor
    ) -> "Observed":
        """Return what local logits say, where the global answer is `label` and the truth `target`."""
        cells = local_logits.flatten(2)
        images = torch.arange(len(cells), device=cells.device)
        malicious = cells.mean(2).scatter(1, target.unsqueeze(1), -torch.inf).argmax(1)
        return cls(
            wrong_cells=(cells.argmax(1) != target.unsqueeze(1)).sum(1).cpu(),
            wrong=(label != target).cpu(),
            true=cells[images, target].cpu(),
            malicious=cells[images, malicious].cpu(),
            largest=cells.flatten(1).amax(1).cpu(),
        )


@torch.no_grad()
def observe(guard: LocalGuard[Any], images: Images, target: Int64[Tensor, " batch"]) -> Observed:
    """Return what the cells of a guard say of images."""
    local_logits = guard.local_logits(images)
    return Observed.of(local_logits, guard.defense.predict(guard.evidence(local_logits)).label, target)


def concatenate(parts: Sequence[Observed]) -> Observed:
    """Return consecutive batches as one."""
    return Observed(**{each.name: torch.cat([getattr(part, each.name) for part in parts]) for each in fields(Observed)})


# -- the study ---------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Study:
    """The same images before an attack, when it first succeeded, and when it had continued to its end.

    `clips`: which images stay correct under each clipping of the local logits: clean, after the attack on the unclipped
    network (transferred), and after one that knows the clipping or the former (adaptive): an attacker may take the
    better of the two. `ceiling` is c_h, the largest clean logit; without a positive one there are no clips.
    """

    original: Observed
    broken: Observed
    attacked: Observed
    ceiling: float
    clips: Mapping[str, Mapping[str, Marks]]


def attack_and_observe(
    guard: LocalGuard[Any],
    images: StudyImages,
    attack: PatchPGD,
    patch: Patch,
    *,
    seed: int = 0,
    batch_pixels: int | None = None,
    progress: Progress = lambda stage, count: None,
) -> Study:
    """Attack an undefended guard, and the same guard with clipped logits, and look at its cells."""
    if guard.defense.defends:
        raise InputError(f"`guard` must be undefended; got {type(guard.defense).__name__}. Give a plain ResNet.")
    device = runtime.device_and_dtype(guard.model)[0]
    ceiling = -torch.inf
    for _, pixels, target in images.batches(device, batch_pixels):
        ceiling = max(ceiling, float(guard.local_logits(pixels).max()))
        progress("clean", len(target))
    stages: dict[str, list[Observed]] = {"original": [], "broken": [], "attacked": []}
    clips: dict[str, dict[str, list[Tensor]]] = {}
    for indices, pixels, target in images.batches(device, batch_pixels):
        draws: dict[str, Any] = {"seed": seed, "numbers": indices}
        victim = with_progress(guard, partial(progress, "attack"))
        broken = attack(victim, pixels, target, patch, **draws)
        extended = extend_attack(victim, pixels, target, patch, broken, attack.schedule, **draws)
        batch = {
            "original": observe(guard, pixels, target),
            "broken": observe(guard, broken.images, target),
            "attacked": observe(guard, extended, target),
        }
        for stage, observed in batch.items():
            stages[stage].append(observed)
        if ceiling <= 0:
            continue
        # Without a clipping, the attack of the study is the one that knows everything.
        stays = ~batch["attacked"].wrong
        marks = {"clean": ~batch["original"].wrong, "transferred": stays, "adaptive": stays & ~batch["broken"].wrong}
        _append(clips, "(-inf, inf)", marks)
        for name, high in {"(0, inf)": None, "(0, c_h)": ceiling}.items():
            clipped = clip_logits(guard, 0.0, high)
            victim = with_progress(through_evidence(clipped), partial(progress, f"clip to {name}"))
            adaptive = attack(victim, pixels, target, patch, **draws)
            stays = clipped.predict(extended).label == target
            marks = {
                "clean": (clipped.predict(pixels).label == target).cpu(),
                "transferred": stays.cpu(),
                "adaptive": (stays & ~adaptive.broken).cpu(),
            }
            _append(clips, name, marks)
    return Study(
        **{stage: concatenate(parts) for stage, parts in stages.items()},
        ceiling=ceiling,
        clips={name: {kind: torch.cat(parts) for kind, parts in each.items()} for name, each in clips.items()},
    )


def clip_logits(guard: LocalGuard[Any], low: float | None, high: float | None) -> LocalGuard[Any]:
    """Return the guard that adds up its local logits clipped to [low, high]."""
    return replace(guard, evidence=Evidence(kind="logits", low=low, high=high), defense=Undefended())


def _append(clips: dict[str, dict[str, list[Tensor]]], name: str, marks: Mapping[str, Tensor]) -> None:
    for kind, each in marks.items():
        clips.setdefault(name, {}).setdefault(kind, []).append(each)


# -- tables ------------------------------------------------------------------------------------------------------------


def incorrect_predictions(study: Study) -> dict[str, float]:
    """Return the paper's rows in percent: incorrect local predictions, attacked, original, difference; and global.

    Local predictions are those at the end of the attack, as the paper's are.
    """
    before, after = 100 * study.original.wrong_cell_fraction, 100 * study.attacked.wrong_cell_fraction
    wrong = (study.broken.wrong | study.attacked.wrong).double().mean()
    return dict(zip(published.LOCAL_ATTACK_ROWS, (after, before, after - before, 100 * float(wrong)), strict=True))


FEWEST_LARGE = 0.001  # of the logits must be large; where fewer are, large is what a tenth of them exceeds
BINS = 40


def histogram(study: Study, bins: int = BINS) -> dict[str, Any]:
    """Return how many local logits of attacked images are large, by value, of the true and of the malicious class.

    Large is above 20, which the paper says for ImageNet; a network whose logits are smaller, so that hardly any cell
    has one above 20, gets what a tenth of all these logits exceeds. `clean_true` are those of the true class in the
    clean images, for comparison.
    """
    values = logit_values(study)
    attacked = torch.cat([values["true"], values["malicious"]])
    few = float((attacked > published.LARGE).double().mean()) < FEWEST_LARGE
    large = max(0.0, _quantile(attacked, 0.9)) if few else published.LARGE
    high = max(large + 1e-3, *(float(each.max()) for each in values.values()))
    edges = torch.linspace(large, high, bins + 1, dtype=torch.float64)
    return {"edges": edges.tolist(), **{name: _count_bins(each, edges) for name, each in values.items()}}


def logit_values(study: Study) -> dict[str, Float[Tensor, " cells"]]:
    """Return the logits of all cells: of the true and the malicious class attacked, and of the true one clean."""
    return {
        "true": study.attacked.true.flatten(),
        "malicious": study.attacked.malicious.flatten(),
        "clean_true": study.original.true.flatten(),
    }


def _count_bins(values: Tensor, edges: Tensor) -> list[int]:
    """Count the values above the first edge in bins (low, high]."""
    large = values.double()[values > edges[0]]
    bins = torch.bucketize(large, edges).clamp(1, len(edges) - 1) - 1
    counts: list[int] = torch.bincount(bins, minlength=len(edges) - 1).tolist()
    return counts


def _quantile(values: Tensor, fraction: float) -> float:
    """The smallest value that this fraction of all lies at or below; torch's own takes only few values."""
    ordered = values.sort().values
    return float(ordered[min(len(ordered), max(1, -int(-fraction * len(ordered) // 1))) - 1])


def logits_table(study: Study, where: str) -> Table:
    """Return how large the logits of attacked images are."""
    labels = ("true class, attacked", "malicious class, attacked", "true class, clean")
    largest, levels = float(study.original.largest.max()), (0.5, 0.9, 0.99, 1.0)
    rows = []
    for label, values in zip(labels, logit_values(study).values(), strict=True):
        above = 100 * float((values > largest).double().mean())
        rows.append(Row(label=label, ours=(above, *(_quantile(values, level) for level in levels))))
    columns = ("above the largest clean logit, %", *(f"quantile {level:g}" for level in levels))
    return Table(title="Local logits", where=where, columns=columns, rows=tuple(rows))


def ceiling_table(study: Study) -> Table:
    """Return the accuracy under each clipping of the logits."""
    rows = []
    for clip, marks in study.clips.items():
        ours: list[Value] = [proportion(int(marks[kind].sum()), len(marks[kind])) for kind in CLIP_ATTACKS]
        rows.append(Row(label=clip, ours=tuple(ours)))
    title = f"Accuracy under a clipping, %; c_h = {study.ceiling:.3g}"
    return Table(title=title, where="", columns=tuple(CLIP_ATTACKS.values()), rows=tuple(rows))


# -- figures -----------------------------------------------------------------------------------------------------------


def draw_predictions(study: Study, theirs: Mapping[str, float], patch: Patch, heading: str) -> "Figure":
    """Draw the paper's table of incorrect predictions as bars, ours beside the published ones."""
    figure, axes = new_figure()
    series = [
        ("measured here", BLUE, list(incorrect_predictions(study).values())),
        ("ResNet-50, published", GRAY, list(theirs.values())),
    ]
    draw_bars(axes, SHORT_LABELS, series)
    axes.set_ylabel("incorrect predictions, %")
    axes.set_title(f"{heading}: what a patch of {patch.height} x {patch.width} pixels does", loc="left")
    return figure


def draw_histogram(study: Study, heading: str) -> "Figure":
    """Draw the histogram of large local logits of attacked images: true class and malicious class."""
    counts = histogram(study)
    figure, axes = new_figure()
    edges = counts["edges"]
    for name, color, label in (("true", BLUE, "true class"), ("malicious", ORANGE, "malicious class")):
        axes.stairs(counts[name], edges, fill=True, alpha=0.55, color=color, label=f"{label}, attacked images")
    axes.stairs(counts["clean_true"], edges, color="black", linewidth=0.9, label="true class, clean images")
    largest = float(study.original.largest.max())
    axes.axvline(largest, color=GRAY, linestyle="--", label="largest clean logit of any class")
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"local logits above {edges[0]:.3g}")
    axes.set_ylabel("cells")
    axes.set_title(f"{heading}: large local logits", loc="left")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_ceiling(study: Study, heading: str) -> "Figure":
    """Draw the accuracy under each clipping of the local logits: clean, and under the two attacks."""
    figure, axes = new_figure()
    series = [
        (CLIP_ATTACKS[kind], color, [100 * float(marks[kind].double().mean()) for marks in study.clips.values()])
        for kind, color in (("clean", GRAY), ("transferred", BLUE), ("adaptive", ORANGE))
    ]
    draw_bars(axes, ["not clipped", *(f"clipped to {clip}" for clip in list(study.clips)[1:])], series)
    axes.set_ylabel("accuracy, %")
    axes.set_title(f"{heading}: a ceiling c_h = {study.ceiling:.3g} on local logits", loc="left")
    return figure
