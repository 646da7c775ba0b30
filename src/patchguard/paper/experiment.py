"""An experiment of the paper: its tables and figures, how it runs, and the folder its result goes to. No torch."""

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import msgspec

from patchguard.errors import InputError
from patchguard.runs.summary import Proportion
from patchguard.storage.atomic import write_bytes, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from patchguard.paper.context import Context

Value: TypeAlias = Proportion | float | int | str | None  # an int is a count
Drawing: TypeAlias = "bytes | Callable[[], Figure]"

FORMAT = 1  # of result.json
TITLES = {
    "imagenette": "ImageNette",
    "cifar10": "CIFAR-10",
    "imagenet": "ImageNet",
    "flowers": "Flowers",
    "cats_vs_dogs": "Cats-vs-dogs",
    "": "",
}


class Missing(InputError):
    """A model or a dataset is not here. The message says which one, and the command that brings it."""


@final
@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table: our values beside the published ones, column by column; None where there is none.

    A `Proportion` is a count of images with its interval; a number is in the unit of its column. `note` names the
    model, or says why the row was not run and the command that would run it. `reason` says why ours may differ from the
    paper's.
    """

    label: str
    ours: tuple[Value, ...]
    published: tuple[float | int | None, ...] = ()
    note: str = ""
    reason: str = ""

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "Row":
        """Read a row of result.json."""
        ours = tuple(Proportion(**value) if isinstance(value, dict) else value for value in entry["ours"])
        return cls(**{**entry, "ours": ours, "published": tuple(entry["published"])})

    @property
    def measured(self) -> bool:
        """Whether any of our values is there."""
        return any(value is not None for value in self.ours)

    @property
    def remark(self) -> str:
        """Note and reason in one line."""
        return "; ".join(part for part in (self.note, self.reason) if part)

    def texts(self) -> list[str]:
        """Return each column as text: ours, and the published value in brackets."""
        published = self.published or (None,) * len(self.ours)
        return [
            format_value(ours) + ("" if theirs is None else f" ({format_value(theirs)})")
            for ours, theirs in zip(self.ours, published, strict=True)
        ]


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns; `where` is the label of the table in the paper, empty for a table of ours.

    In a table of percentages, a large gap to the paper asks for a reason; in one of milliseconds or cells it does not.
    """

    title: str
    where: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    unit: Literal["%", "other"] = "%"

    def __post_init__(self) -> None:
        width = len(self.columns)
        for row in self.rows:
            if len(row.ours) != width or len(row.published) not in (0, width):
                raise ValueError(
                    f"row {row.label!r} of {self.title!r} has {len(row.ours)} values of ours and "
                    f"{len(row.published)} published ones for {width} columns"
                )


@final
@dataclass(frozen=True, kw_only=True)
class Result:
    """What one experiment measured on one dataset. A figure is PNG bytes, or a function that draws it.

    `refuted` counts certified images that an attack broke all the same: anything above 0 is a bug.
    """

    tables: tuple[Table, ...]
    figures: Mapping[str, Drawing] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    refuted: int = 0


@final
@dataclass(frozen=True)
class Experiment:
    """One experiment: `run(context, dataset)` for each of `datasets`, or `run(context, "")` where it needs none."""

    name: str
    title: str
    where: tuple[str, ...]
    datasets: tuple[str, ...]
    run: "Callable[[Context, str], Result]"

    def result_name(self, dataset: str) -> str:
        """Return the name of the folder, and of the published file, of the result on one dataset."""
        return f"{self.name}-{dataset}" if dataset else self.name


def import_later(name: str) -> "Callable[[Context, str], Result]":
    """Return the function `module:function`, or `run` of a module, imported when it is called: the modules need torch.

    A dataset that is not here raises `Missing` before anything is computed.
    """

    def run(context: "Context", dataset: str) -> Result:
        if dataset:
            context.images(dataset)
        module, _, function = name.partition(":")
        result: Result = getattr(import_module(f"patchguard.paper.{module}"), function or "run")(context, dataset)
        return result

    return run


def to_percent(value: Value) -> float | None:
    """Return a value as a number: a proportion in percent; None for text and for nothing."""
    if isinstance(value, Proportion):
        return None if value.fraction is None else 100 * value.fraction
    return float(value) if isinstance(value, int | float) else None


def format_value(value: Value) -> str:
    """Return a value as a table prints it.

    >>> format_value(None), format_value(12.345), format_value(1024)
    ('-', '12.3', '1,024')
    """
    if isinstance(value, int):
        return f"{value:,}"
    number = to_percent(value)
    if number is None:
        return value if isinstance(value, str) else "-"
    if number != 0 and abs(number) < 0.95:
        return f"{number:.{max(1, 1 - math.floor(math.log10(abs(number))))}f}"
    return f"{number:.1f}"


# -- running -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One experiment on one dataset: a result with its folder, or the reason why there is none."""

    experiment: Experiment
    dataset: str
    result: Result | None = None
    folder: Path | None = None
    seconds: float = 0.0
    skipped: str = ""
    failed: bool = False  # skipped because data or a model is broken, not because it is missing

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.experiment.result_name(self.dataset)

    def to_json(self, context: "Context | None" = None) -> dict[str, Any]:
        """Return result.json: the result without its figures, the settings of the context and the versions."""
        about: dict[str, Any] = {
            "format": FORMAT,
            "experiment": self.experiment.name,
            "title": self.experiment.title,
            "where": list(self.experiment.where),
            "dataset": self.dataset,
        }
        if self.result is None:
            return {**about, "skipped": self.skipped}
        if context is not None:
            about |= context.to_json()
        return {
            **about,
            "seconds": round(self.seconds, 2),
            "tables": msgspec.to_builtins(self.result.tables),
            "figures": sorted(self.result.figures),
            "notes": list(self.result.notes),
            "settings": dict(self.result.settings),
        }


def run_experiments(context: "Context", work: Sequence[tuple[Experiment, str]], out: Path) -> Iterator[Outcome]:
    """Run experiments and write each result; one whose data is missing or broken is skipped with the reason."""
    for experiment, dataset in work:
        started = time.monotonic()
        outcome = Outcome(experiment=experiment, dataset=dataset)
        try:
            result = experiment.run(context, dataset)
        except InputError as error:
            yield replace(outcome, skipped=str(error), failed=not isinstance(error, Missing))
            continue
        outcome = replace(outcome, result=result, seconds=time.monotonic() - started, folder=out / outcome.name)
        write_result(outcome, context)
        yield outcome


def write_result(outcome: Outcome, context: "Context") -> None:
    """Write the figures and result.json, each all or nothing; the JSON last, so that it names files that exist."""
    assert outcome.result is not None
    assert outcome.folder is not None
    try:
        outcome.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"`--out` must be a folder that can be created; got {outcome.folder}: {error.strerror}."
        ) from None
    for name, drawing in outcome.result.figures.items():
        write_bytes(outcome.folder / f"{name}.png", to_png(drawing))
    write_json(outcome.folder / "result.json", outcome.to_json(context))


def to_png(drawing: Drawing) -> bytes:
    """Return a figure as the bytes of a PNG."""
    if isinstance(drawing, bytes):
        return drawing
    buffer = io.BytesIO()
    drawing().savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
