"""Section 3.1: what a patch does to the local predictions and logits of an undefended ResNet, by the case study.

The paper claims (tab-local-attack, fig-hist-net, -nette, -cifar): a patch of 3 % of the pixels makes 24.5 % (ImageNet),
41.1 % (ImageNette) and 40.0 % (CIFAR-10) more of the local predictions of ResNet-50 wrong, since it lies in the large
field of most of them; and malicious logits are extremely large, which a mean cannot withstand.

Ours: the attack with the paper's settings on a GPU (500 steps of 0.05 at 5 places; a CPU makes a short one and says
so), with the histogram of large logits and the accuracy under ceilings. `docs/case_study.md` explains each number.
"""

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from patchguard.attacks.patch_pgd import PatchPGD
from patchguard.paper import case_figures, case_study, models, published
from patchguard.paper.case_study import KINDS, PAPER_ATTACK, Options
from patchguard.paper.context import Context
from patchguard.paper.experiment import TITLES, Missing, Result, Row, Table
from patchguard.paper.models import Network
from patchguard.paper.rows import differs
from patchguard.paper.study_command import place
from patchguard.paper.study_images import open_images

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHERE = "tab-local-attack"
SHORT = PatchPGD(steps=20, step=0.1, locations=1)
MOST = {"imagenet": 5000}  # "We take 5000 random ImageNet validation images"
FIGURES = {"imagenet": "fig-hist-net", "imagenette": "fig-hist-nette", "cifar10": "fig-hist-cifar"}
LABELS = {
    "incorrect_local_attacked": "Incorrect local pred. (attacked)",
    "incorrect_local_original": "Incorrect local pred. (original)",
    "incorrect_local_difference": "Incorrect local pred. (difference)",
    "incorrect_global": "Incorrect global predictions",
}


def run(context: Context, dataset: str) -> Result:
    """Attack every image of the set and look at the cells."""
    theirs = published.row(WHERE, dataset)
    context.images(dataset)
    network = victim(context, dataset)
    title = f"Incorrect predictions of {network.label} on {TITLES.get(dataset, dataset)}"
    try:
        name = context.choose(network.names)
    except Missing as missing:
        rows = tuple(
            Row(label=label, ours=(None,), published=(theirs.get(key),), note=str(missing))
            for key, label in LABELS.items()
        )
        return Result(tables=(Table(title=title, where=WHERE, columns=("%",), rows=rows),))
    attack = attack_for(context.device)
    limit = context.limit or MOST.get(dataset)
    photo = context.prepares(name)
    loaded = context.guard(name)
    guard, images = open_images(loaded, dataset, context.data_root, limit=limit, seed=context.seed, photo=photo)
    place(guard, context.device)
    summary = case_study.run(
        guard,
        images,
        dataset=dataset,
        options=Options(attack=attack, seed=context.seed),
        progress=_told(context, name),
    )
    summary["model"] = name
    size = "x".join(str(side) for side in summary["settings"]["patch"])
    note = f"{name}, {len(images):,} images, a patch of {size} px"
    reason = differs(name, network)
    found = summary["tab-local-attack"]["rows"]
    rows = tuple(
        Row(label=label, ours=(found[key]["ours"],), published=(theirs.get(key),), note=note, reason=reason)
        for key, label in LABELS.items()
    )
    tables = [Table(title=title, where=WHERE, columns=("%",), rows=rows), logits_table(summary)]
    if summary["ceiling"]:
        tables.append(ceiling_table(summary))
    short = () if attack == PAPER_ATTACK else (f"A short attack, for a CPU: {attack}. The paper's: {PAPER_ATTACK}.",)
    return Result(
        tables=tuple(tables),
        figures={key: partial(_figure, summary, key) for key in case_figures.figures(summary)},
        notes=(*short, "Images that an attack breaks are attacked on: the histogram shows its end, not its success."),
        settings={**summary["settings"], "model": name},
    )


def victim(context: Context, dataset: str) -> Network:
    """Return the undefended ResNet that is here, the paper's own first; the paper's where none is."""
    known = models.residuals(dataset)
    return next((network for network in known if context.find(network.names) is not None), known[0])


def attack_for(device: torch.device) -> PatchPGD:
    """Return the paper's attack, or a short one where that would take days."""
    return PAPER_ATTACK if device.type == "cuda" else SHORT


def _told(context: Context, name: str) -> case_study.Progress:
    """Return what adds up the images, or the images times steps, of each stage and tells the context."""
    done: Counter[str] = Counter()

    def tell(stage: str, count: int) -> None:
        done[stage] += count
        context.progress(f"{name}, {stage}: images times steps", done[stage], 0)

    return tell


def _figure(summary: dict[str, Any], name: str) -> "Figure":
    return case_figures.figures(summary)[name]


def logits_table(summary: dict[str, Any]) -> Table:
    """Return how large the logits of attacked images are, from the histogram."""
    found = summary["histogram"]
    names = {
        "true": "true class, attacked",
        "malicious": "malicious class, attacked",
        "clean_true": "true class, clean",
    }
    levels = list(found["quantiles"]["true"])
    rows = tuple(
        Row(
            label=label,
            ours=(
                100 * found["share_above_largest_clean"][key],
                *(found["quantiles"][key][level] for level in levels),
            ),
        )
        for key, label in names.items()
    )
    columns = ("above the largest clean logit, %", *(f"quantile {float(level):g}" for level in levels))
    where = FIGURES.get(summary["dataset"], "")
    return Table(title="Local logits", where=where, columns=columns, rows=rows)


def ceiling_table(summary: dict[str, Any]) -> Table:
    """Return the accuracy under each clipping of the logits."""
    found = summary["ceiling"]
    rows = tuple(Row(label=clip, ours=tuple(shares[kind] for kind in KINDS)) for clip, shares in found["clips"].items())
    title = f"Accuracy under a clipping, %; c_h = {found['c_h']:.3g}"
    return Table(title=title, where="", columns=("clean", "attack on no clipping", "adaptive attack"), rows=rows)
