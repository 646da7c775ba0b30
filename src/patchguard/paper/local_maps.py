"""What the cells of a network say of images, and the tables and histograms that are made of it. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchguard.attacks.base import Images
from patchguard.guards.local import LocalGuard
from patchguard.paper import published
from patchguard.runs import metrics

FEWEST = 0.001  # of the logits must be large; where fewer are, large is what a tenth of them exceeds
BINS = 40


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Observed:
    """What the cells of a batch say, on the CPU.

    A local prediction is the class of the largest logit in a cell; the global one is the guard's. The malicious class
    is the strongest but the true one in the mean of the local logits: the answer, where an attack succeeded.
    """

    wrong_cells: Int64[Tensor, " batch"]
    wrong: Bool[Tensor, " batch"]
    true: Float[Tensor, "batch cells"]
    malicious: Float[Tensor, "batch cells"]
    largest: Float[Tensor, " batch"]

    @property
    def wrong_cell_share(self) -> float:
        """The share of all cells that predict another class than the true one."""
        return int(self.wrong_cells.sum()) / self.true.numel()


def observed(local_logits: Float[Tensor, "batch classes rows columns"], label: Tensor, target: Tensor) -> Observed:
    """Return what local logits say, where the global answer is `label` and the truth `target`."""
    cells = local_logits.flatten(2)
    rows = torch.arange(len(cells), device=cells.device)
    malicious = cells.mean(2).scatter(1, target.unsqueeze(1), -torch.inf).argmax(1)
    return Observed(
        wrong_cells=(cells.argmax(1) != target.unsqueeze(1)).sum(1).cpu(),
        wrong=(label != target).cpu(),
        true=cells[rows, target].cpu(),
        malicious=cells[rows, malicious].cpu(),
        largest=cells.flatten(1).amax(1).cpu(),
    )


@torch.no_grad()
def observe(guard: LocalGuard[Any], images: Images, target: Int64[Tensor, " batch"]) -> Observed:
    """Return what the cells of a guard say of images."""
    local_logits = guard.local_logits(images)
    return observed(local_logits, guard.defense.predict(guard.evidence(local_logits)).label, target)


def joined(parts: Sequence[Observed]) -> Observed:
    """Return consecutive batches as one."""
    return Observed(**{each.name: torch.cat([getattr(part, each.name) for part in parts]) for each in fields(Observed)})


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Stages:
    """The same images before an attack, when it first succeeded, and when it had gone on to the end."""

    original: Observed
    broken: Observed
    attacked: Observed


# -- tables ------------------------------------------------------------------------------------------------------------


def local_attack_table(study: Stages, dataset: str = "") -> dict[str, Any]:
    """Return the paper's table in percent: incorrect local predictions, attacked, original, difference; and global.

    Local predictions are those after the attack has gone on to its end, as the paper's does; those at its first success
    are given beside.
    """
    before, after = 100 * study.original.wrong_cell_share, 100 * study.attacked.wrong_cell_share
    ours = {
        "incorrect_local_attacked": after,
        "incorrect_local_original": before,
        "incorrect_local_difference": after - before,
        "incorrect_global": 100 * float((study.broken.wrong | study.attacked.wrong).double().mean()),
    }
    theirs = published.row("tab-local-attack", dataset)
    either = int((study.broken.wrong | study.attacked.wrong).sum())
    return {
        "rows": {name: {"ours": value, "published": theirs.get(name)} for name, value in ours.items()},
        "incorrect_local_at_first_success": 100 * study.broken.wrong_cell_share,
        "incorrect_global_original": metrics.share(int(study.original.wrong.sum()), len(study.original.wrong)),
        "incorrect_global": metrics.share(either, len(study.broken.wrong)),
        "cells_per_image": study.original.true.shape[1],
    }


def histogram(study: Stages, large: float | None = None, bins: int = BINS) -> dict[str, Any]:
    """Return how many local logits of attacked images are large, by value, of the true and of the malicious class.

    `large` is by default 20, which the paper says for ImageNet; a network whose logits are smaller, so that hardly any
    cell has one above 20, gets what a tenth of all these logits exceeds. `clean_true` are those of the true class in
    the clean images, for comparison.
    """
    values = {
        "true": study.attacked.true.flatten(),
        "malicious": study.attacked.malicious.flatten(),
        "clean_true": study.original.true.flatten(),
    }
    if large is None:
        attacked = torch.cat([values["true"], values["malicious"]])
        few = float((attacked > published.LARGE).double().mean()) < FEWEST
        large = max(0.0, _quantile(attacked, 0.9)) if few else published.LARGE
    high = max(large + 1e-3, *(float(each.max()) for each in values.values()))
    edges = torch.linspace(large, high, bins + 1, dtype=torch.float64)
    largest = float(study.original.largest.max())
    return {
        "large": large,
        "edges": edges.tolist(),
        **{name: _counted(each, edges) for name, each in values.items()},
        "share_large": {name: float((each > large).double().mean()) for name, each in values.items()},
        "quantiles": {
            name: {str(share): _quantile(each, share) for share in (0.5, 0.9, 0.99, 1.0)}
            for name, each in values.items()
        },
        "largest_clean_logit": largest,
        "share_above_largest_clean": {name: float((each > largest).double().mean()) for name, each in values.items()},
        "of_each": values["true"].numel(),
    }


def _counted(values: Tensor, edges: Tensor) -> list[int]:
    """Count the values above the first edge in bins (low, high]."""
    large = values.double()[values > edges[0]]
    places = torch.bucketize(large, edges).clamp(1, len(edges) - 1) - 1
    counts: list[int] = torch.bincount(places, minlength=len(edges) - 1).tolist()
    return counts


def _quantile(values: Tensor, share: float) -> float:
    """The smallest value that so large a share of all lies at or below; torch's own takes only few values."""
    ordered = values.sort().values
    return float(ordered[min(len(ordered), max(1, -int(-share * len(ordered) // 1))) - 1])


def clipping_table(
    right: Mapping[tuple[float | None, float | None], int], images: int, dataset: str = ""
) -> dict[str, Any]:
    """Return the clean accuracy, in percent, under each clipping of the paper's tab-clipping (CIFAR-10: -cifar)."""
    table = "tab-clipping-cifar" if dataset == "cifar10" else "tab-clipping"
    theirs = published.row(table, dataset)
    rows = {}
    for (low, high), count in right.items():
        name = f"({'-inf' if low is None else f'{low:g}'}, {'inf' if high is None else f'{high:g}'})"
        rows[name] = {"ours": 100 * count / images, "published": theirs.get(name)}
    return {"table": table, "rows": rows}
