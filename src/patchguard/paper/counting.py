"""Rows of tables from cached logits: which labels are correct and which are certified, for many settings at once."""

import os
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar, final

import torch
from torch import Tensor

from patchguard.defenses.evidence import Evidence
from patchguard.geometry.windows import Windows
from patchguard.paper.cached_logits import CachedLogits
from patchguard.paper.context import Context
from patchguard.paper.experiment import Drawing, Missing, Result, Row, Table, Value
from patchguard.paper.networks import Network, patches
from patchguard.paper.query import Batch, Query
from patchguard.patch import Patch
from patchguard.runs.metrics import proportion
from patchguard.runs.summary import Proportion

Key = TypeVar("Key", bound=Hashable)


# -- counting ----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Counts:
    """How many of `total` images are labeled correctly, and how many of these labels are certified."""

    total: int
    correct: int
    certified: int

    @property
    def clean(self) -> Proportion:
        """Clean accuracy: the true class is the label (among the k best)."""
        return proportion(self.correct, self.total)

    @property
    def robust(self) -> Proportion:
        """Provable accuracy: and no attack on any window changes that."""
        return proportion(self.certified, self.total)


def _judge(local_logits: Tensor, targets: Tensor, queries: Iterable[Query]) -> Iterable[tuple[Query, Tensor, Tensor]]:
    """Yield, for each query, which labels of a batch are correct and which of these are certified."""
    batches: dict[Evidence, Batch] = {}
    for query in queries:
        if query.evidence not in batches:
            batches[query.evidence] = Batch(query.evidence(local_logits), targets)
        batch = batches[query.evidence]
        yield query, batch.correct(query), batch.certified(query)


def sum_over_batches(
    logits: CachedLogits, device: torch.device, work: Callable[[Tensor, Tensor], Counter[Hashable]]
) -> Counter[Hashable]:
    """Return the sum of what `work` counts in each batch of logits and targets.

    On a CPU, one thread per processor takes batches and computes alone: the tensors are too small to be divided.
    """
    total: Counter[Hashable] = Counter()
    if device.type != "cpu":
        for batch in logits.batches(device):
            total.update(work(*batch))
        return total
    threads = torch.get_num_threads()
    workers = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        with ThreadPoolExecutor(workers, "counting", partial(torch.set_num_threads, 1)) as pool:
            waiting: deque[Future[Counter[Hashable]]] = deque()
            for batch in logits.batches(device):
                waiting.append(pool.submit(work, *batch))
                if len(waiting) > workers:
                    total.update(waiting.popleft().result())
            for future in waiting:
                total.update(future.result())
    finally:
        torch.set_num_threads(threads)
    return total


def count(logits: CachedLogits, queries: Mapping[Key, Query], device: torch.device) -> dict[Key, Counts]:
    """Answer queries about all images in one pass; what an earlier table asked is not counted again."""
    new = [query for query in dict.fromkeys(queries.values()) if query not in logits.counts]

    def work(local_logits: Tensor, targets: Tensor) -> Counter[Hashable]:
        counter: Counter[Hashable] = Counter()
        for query, correct, certified in _judge(local_logits, targets, new):
            counter[query, "correct"] += int(correct.sum())
            counter[query, "certified"] += int(certified.sum())
        return counter

    if new:
        total = sum_over_batches(logits, device, work)
        for query in new:
            logits.counts[query] = Counts(len(logits), total[query, "correct"], total[query, "certified"])
    return {key: logits.counts[query] for key, query in queries.items()}


def count_rounding(logits: CachedLogits, query: Query, device: torch.device) -> dict[str, int]:
    """Return in how many images of the sample the rounding to float16 changes what is correct and certified."""
    key = "rounding", query
    if key not in logits.counts:
        targets = logits.targets[list(logits.sample_indices)].to(device)
        (_, *exact), (_, *rounded) = (
            next(iter(_judge(local_logits, targets, [query]))) for local_logits in logits.sample(device)
        )
        clean, robust = (int((each != other).sum()) for each, other in zip(exact, rounded, strict=True))
        logits.counts[key] = {"images": len(targets), "clean": clean, "robust": robust}
    known: dict[str, int] = logits.counts[key]
    return known


def describe_rounding(logits: CachedLogits, query: Query, device: torch.device) -> str:
    """Return the counts of `count_rounding` as a sentence."""
    rounding = count_rounding(logits, query, device)
    return (
        f"{logits.model}: certificates are about logits in float16; on {rounding['images']} images they differ from "
        f"those about the network's float32 in {rounding['clean']} correct labels and {rounding['robust']} proofs."
    )


# -- rows --------------------------------------------------------------------------------------------------------------

Cell: TypeAlias = tuple[Query, Literal["clean", "robust"]] | None
Rule: TypeAlias = Callable[[Windows], Query]
WindowsOf: TypeAlias = Callable[[Patch], Windows]
Cells: TypeAlias = Mapping[str, Sequence[Cell]]
MakeCells: TypeAlias = Callable[[CachedLogits, WindowsOf], Cells]

CLEAN_ROBUST = ("clean", "robust")
TRUE_WINDOWS = " (true windows)"


@final
@dataclass
class Measured:
    """Rows with their notes; `models` are those that were used."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)

    def add(self, other: "Measured") -> None:
        """Append the rows, notes and models of another."""
        self.rows += other.rows
        self.notes += other.notes
        self.models += other.models

    def table(self, title: str, where: str, columns: Sequence[str]) -> Table:
        """Return the rows as a table."""
        return Table(title=title, where=where, columns=tuple(columns), rows=tuple(self.rows))


def clean_and_robust(query: Query) -> tuple[Cell, Cell]:
    """Return the two columns of one query: clean and robust."""
    return (query, "clean"), (query, "robust")


def clean_robust_columns(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of two columns, clean and robust, for each name."""
    return tuple(f"{name} {kind}" for name in names for kind in CLEAN_ROBUST)


def cells_per_patch(dataset: str, rules: Mapping[str, Rule], count: int | None = None) -> MakeCells:
    """Return a row per rule, with clean and robust accuracy for each of the paper's (first `count`) patches."""

    def make_cells(logits: CachedLogits, windows_of: WindowsOf) -> Cells:
        windows = [windows_of(patch) for patch in patches(dataset, logits.size[0]).values()][:count]
        return {
            label: [cell for each in windows for cell in clean_and_robust(rule(each))] for label, rule in rules.items()
        }

    return make_cells


def measure(
    context: Context,
    dataset: str,
    network: Network,
    published: Mapping[str, Sequence[float | None]],
    columns: int,
    make_cells: MakeCells,
    *,
    prefix: bool = False,
    patched: bool = True,
) -> Measured:
    """Return a row for each label that `make_cells` gives, with the paper's numbers of that label beside it.

    Without the model there are only the paper's rows, with the command that would run them. Where a network sees an
    enlarged image, the paper's patch is placed on the enlarged one; further rows then have the windows that a patch in
    the image itself reaches through the resizing (not with `patched=False`: no windows). `prefix` puts the network's
    name before each label.
    """
    before = f"{network.label}: " if prefix else ""
    try:
        logits = context.logits(network.names, dataset)
    except Missing as missing:
        return Measured(rows=missing_rows(missing, published, columns, before))
    measured = Measured(models=[logits.model])
    first: Query | None = None
    for suffix, windows_of in window_spaces(logits).items() if patched else [("", logits.windows)]:
        rows = make_cells(logits, windows_of)
        queries = [cell[0] for cells in rows.values() for cell in cells if cell is not None]
        counts = count(logits, {query: query for query in queries}, context.device)
        first = first or next(iter(queries), None)
        for label, cells in rows.items():
            row = Row(
                label=before + label + suffix,
                ours=tuple(None if cell is None else _value(counts[cell[0]], cell[1]) for cell in cells),
                published=() if suffix else tuple(published.get(label, ())),
                note=describe_model(logits, suffix, patched=patched),
                reason=network.describe_differences(logits.model),
            )
            measured.rows.append(row)
    if first is not None:
        measured.notes.append(describe_rounding(logits, first, context.device))
    return measured


def _value(counts: Counts, kind: str) -> Value:
    return counts.clean if kind == "clean" else counts.robust


def missing_rows(
    missing: Missing, published: Mapping[str, Sequence[float | None]], columns: int, prefix: str = ""
) -> list[Row]:
    """Return the paper's rows without ours, with the command that would run them."""
    return [
        Row(label=prefix + label, ours=(None,) * columns, published=tuple(theirs), note=str(missing))
        for label, theirs in published.items()
    ]


def window_spaces(logits: CachedLogits) -> dict[str, WindowsOf]:
    """Return how a patch becomes windows: as in the paper and, where that ignores the resizing, as it truly does."""
    factor = logits.enlargement
    if factor == 1:
        return {"": logits.windows}

    def enlarged(patch: Patch) -> Windows:
        return logits.windows(Patch(factor * patch.height, factor * patch.width), "input")

    return {"": enlarged, TRUE_WINDOWS: logits.windows}


def describe_model(logits: CachedLogits, suffix: str = "", *, patched: bool = False) -> str:
    """Return which model a row is from, and where its patch lies."""
    text = f"{logits.model}, {len(logits):,} images"
    if patched and logits.enlargement > 1:
        text += "; patch in the image itself" if suffix else "; patch placed after enlarging, as in the paper"
    return text


def appendix_label(label: str, dataset: str) -> str:
    """Return the label of a table that the paper has in its appendix for CIFAR-10, where it ends in -cifar."""
    return f"{label}-cifar" if dataset == "cifar10" else label


def make_result(
    tables: Iterable[Table],
    notes: Iterable[str],
    figures: Mapping[str, Drawing] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Result:
    """Return a result that says each note once."""
    return Result(
        tables=tuple(tables), notes=tuple(dict.fromkeys(notes)), figures=figures or {}, settings=settings or {}
    )
