"""`Experiment`: a table or figure of the paper that can be run again, and the shape of what it finds. No torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

from patchguard.errors import InputError
from patchguard.runs.metrics import Share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from patchguard.paper.context import Context

Value: TypeAlias = Share | float | int | str | None  # a whole number is a count
Drawing: TypeAlias = "bytes | Callable[[], Figure]"

TITLES = {
    "imagenette": "ImageNette",
    "cifar10": "CIFAR-10",
    "imagenet": "ImageNet",
    "flowers": "Flowers",
    "cats_vs_dogs": "Cats-vs-dogs",
    "": "",
}


class Missing(InputError):
    """A model or a data set is not here. The message says which, and the command that brings it."""


@final
@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table: ours beside the paper's, column by column; None where there is nothing to say.

    A `Share` is a count of images with its interval; a number is in the unit of its column. `note` names the model, or
    says why the row was not run and the command that would. `reason` says why ours may differ from the paper's.
    """

    label: str
    ours: tuple[Value, ...]
    published: tuple[float | int | None, ...] = ()
    note: str = ""
    reason: str = ""

    @property
    def measured(self) -> bool:
        """Whether any of our numbers is there."""
        return any(value is not None for value in self.ours)

    @property
    def said(self) -> str:
        """Note and reason in one line."""
        return "; ".join(part for part in (self.note, self.reason) if part)


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns; `where` is the label of the table in the paper, empty for one that stands beside it.

    In a table of percentages, a large gap to the paper asks for a reason; in one of milliseconds or cells it does not.
    """

    title: str
    where: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    unit: Literal["%", "other"] = "%"

    def __post_init__(self) -> None:
        for row in self.rows:
            for name, values in (("ours", row.ours), ("published", row.published)):
                if len(values) not in ({len(self.columns)} if name == "ours" else {0, len(self.columns)}):
                    raise ValueError(
                        f"row {row.label!r} of {self.title!r} has {len(values)} numbers {name} for "
                        f"{len(self.columns)} columns"
                    )


@final
@dataclass(frozen=True, kw_only=True)
class Result:
    """What one experiment found on one data set. A figure is PNG bytes, or a function that draws it."""

    tables: tuple[Table, ...]
    figures: Mapping[str, Drawing] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the figures as JSON values."""
        return {
            "tables": [asdict(table) for table in self.tables],
            "figures": sorted(self.figures),
            "notes": list(self.notes),
            "settings": dict(self.settings),
        }


@final
@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment: `run(context, dataset)` for each set of `sets`, or `run(context, "")` where it needs none."""

    name: str
    title: str
    where: tuple[str, ...]
    sets: tuple[str, ...]
    run: "Callable[[Context, str], Result]"


def late(module: str, function: str = "run") -> "Callable[[Context, str], Result]":
    """Return a function of a module of this package that is imported when it is called: modules need torch."""

    def call(context: "Context", dataset: str) -> Result:
        found: Result = getattr(import_module(f"patchguard.paper.{module}"), function)(context, dataset)
        return found

    return call


def percent(value: Value) -> float | None:
    """Return a value as a number in the table: shares in percent, words and nothing as None."""
    if isinstance(value, dict):
        share = value["share"]
        return None if share is None else 100 * float(share)
    return float(value) if isinstance(value, int | float) else None


def written(value: Value) -> str:
    """Return a value as it stands in a printed table.

    >>> written(None), written(12.345), written({"right": 1, "of": 2, "share": 0.5, "low": 0.1, "high": 0.9})
    ('-', '12.3', '50.0')
    >>> written(1024)
    '1,024'
    """
    if isinstance(value, int):
        return f"{value:,}"
    number = percent(value)
    if number is None:
        return value if isinstance(value, str) else "-"
    if number != 0 and abs(number) < 0.95:
        return f"{number:.{max(1, 1 - math.floor(math.log10(abs(number))))}f}"
    return f"{number:.1f}"
