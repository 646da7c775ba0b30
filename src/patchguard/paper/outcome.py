"""Running experiments one after the other: what each found goes to its folder, what is missing is said."""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from patchguard.errors import InputError, nearest
from patchguard.paper import EXPERIMENTS
from patchguard.paper.experiment import Drawing, Experiment, Missing, Result
from patchguard.runs.records import FORMAT, Folder

if TYPE_CHECKING:
    from patchguard.paper.context import Context


@final
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One experiment on one data set: a result with its folder, or the reason why there is none."""

    experiment: Experiment
    dataset: str
    result: Result | None = None
    folder: Path | None = None
    seconds: float = 0.0
    skipped: str = ""
    failed: bool = False  # skipped not for want of data or models, but since something is wrong with them

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.experiment.name}-{self.dataset}" if self.dataset else self.experiment.name


def chosen(name: str, datasets: Sequence[str] = ()) -> list[tuple[Experiment, str]]:
    """Return the experiments that a name stands for, each with each of its data sets that is asked for."""
    if name != "all" and name not in EXPERIMENTS:
        raise InputError(
            f"`name` must be an experiment or all; got {name!r}. {nearest(name, [*EXPERIMENTS, 'all'])} "
            "`patchguard reproduce --list` shows them."
        )
    experiments = list(EXPERIMENTS.values()) if name == "all" else [EXPERIMENTS[name]]
    known = sorted({each for experiment in experiments for each in experiment.sets})
    for dataset in datasets:
        if dataset not in known:
            usable = f"Known: {', '.join(known)}." if known else "It needs none."
            raise InputError(f"`--data` must be a set that {name} can use; got {dataset!r}. {usable}")
    return [
        (experiment, dataset)
        for experiment in experiments
        for dataset in experiment.sets or ("",)
        if not datasets or dataset in datasets
    ]


def run_all(
    context: "Context",
    work: Sequence[tuple[Experiment, str]],
    out: Path,
    *,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run experiments and write each result; what lacks its data or meets a broken file is skipped with the reason."""
    found = []
    for outcome in _run(context, work, out):
        report(outcome)
        found.append(outcome)
    return found


def _run(context: "Context", work: Sequence[tuple[Experiment, str]], out: Path) -> Iterator[Outcome]:
    for experiment, dataset in work:
        begun = time.monotonic()
        try:
            result = experiment.run(context, dataset)
        except InputError as error:
            failed = not isinstance(error, Missing)
            yield Outcome(experiment=experiment, dataset=dataset, skipped=str(error), failed=failed)
            continue
        outcome = Outcome(experiment=experiment, dataset=dataset, result=result, seconds=time.monotonic() - begun)
        folder = out / outcome.name
        write(folder, outcome, context)
        yield Outcome(**{**vars(outcome), "folder": folder})


def to_json(outcome: Outcome, context: "Context | None" = None) -> dict[str, Any]:
    """Return result.json: what was found, with what and where."""
    about: dict[str, Any] = {
        "format": FORMAT,
        "experiment": outcome.experiment.name,
        "title": outcome.experiment.title,
        "where": list(outcome.experiment.where),
        "dataset": outcome.dataset,
    }
    if outcome.result is None:
        return {**about, "skipped": outcome.skipped}
    if context is not None:
        from patchguard import runtime

        about |= {
            "device": str(context.device),
            "limit": context.limit,
            "seed": context.seed,
            "environment": runtime.describe_environment(),
        }
    return {**about, "seconds": round(outcome.seconds, 2), **outcome.result.to_json()}


def write(folder: Path, outcome: Outcome, context: "Context") -> None:
    """Write result.json and the figures, each all or nothing; the JSON last, so that it names what is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"`--out` must be a folder that can be made; got {folder}: {error.strerror}.") from None
    assert outcome.result is not None
    files = Folder(folder)
    for name, drawing in outcome.result.figures.items():
        files.write_bytes(f"{name}.png", png(drawing))
    files.write("result.json", to_json(outcome, context))


def png(drawing: Drawing) -> bytes:
    """Return a figure as the bytes of a PNG."""
    if isinstance(drawing, bytes):
        return drawing
    made = io.BytesIO()
    drawing().savefig(made, format="png", dpi=120)
    return made.getvalue()
