"""Rows of tables that need nothing but maps: settings in, numbers beside the paper's out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

from patchguard.geometry.windows import Windows
from patchguard.paper.context import Context
from patchguard.paper.experiment import Missing, Row, Value
from patchguard.paper.maps import Maps
from patchguard.paper.models import Network, trained
from patchguard.paper.tally import Counts, Question, count, rounding, told
from patchguard.patch import Patch

Kind = Literal["clean", "robust"]
Cell: TypeAlias = tuple[Question, Kind] | None
WindowsOf: TypeAlias = Callable[[Patch], Windows]
Build: TypeAlias = Callable[[Maps, WindowsOf], Mapping[str, Sequence[Cell]]]

TRUE_WINDOWS = " (true windows)"


@final
@dataclass
class Found:
    """Rows and notes as they come together; `models` are those that were used."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)

    def add(self, other: "Found") -> None:
        """Take over the rows and notes of another; a note is said once."""
        self.rows += other.rows
        self.notes += [note for note in other.notes if note not in self.notes]
        self.models += [model for model in other.models if model not in self.models]


def measure(
    context: Context,
    dataset: str,
    network: Network,
    published: Mapping[str, Sequence[float | None]],
    columns: int,
    build: Build,
    *,
    prefix: bool = False,
    spaced: bool = True,
) -> Found:
    """Return a row for each label that `build` makes cells for, with the paper's numbers of that label beside it.

    Without the model there are the paper's rows, not run, with the command that would. Where a network sees an enlarged
    image, the paper's patch is placed on the enlarged one; further rows then have the windows that a patch in the image
    itself reaches through the resizing (not where `spaced` says that there are no windows). `prefix` puts the network's
    name before each label.
    """

    def named(label: str) -> str:
        return f"{network.label}: {label}" if prefix else label

    try:
        maps = context.maps(network.names, dataset)
    except Missing as missing:
        nothing = (None,) * columns
        rows = [
            Row(label=named(label), ours=nothing, published=tuple(theirs), note=str(missing))
            for label, theirs in published.items()
        ]
        return Found(rows=rows)
    found = Found(models=[maps.model])
    first: Question | None = None
    for suffix, windows_of in spaces(maps).items() if spaced else [("", maps.windows)]:
        cells = build(maps, windows_of)
        questions = {cell[0] for row in cells.values() for cell in row if cell is not None}
        counts = count(maps, {question: question for question in questions}, context.device)
        for label, row in cells.items():
            theirs = () if suffix else tuple(published.get(label, ()))
            ours = tuple(_value(counts, cell) for cell in row)
            note = described(maps, suffix, spaced=spaced)
            reason = differs(maps.model, network)
            found.rows.append(Row(label=named(label) + suffix, ours=ours, published=theirs, note=note, reason=reason))
        first = first or next((cell[0] for row in cells.values() for cell in row if cell is not None), None)
    if first is not None:
        found.notes.append(told(rounding(maps, first, context.device), maps.model))
    return found


def _value(counts: Mapping[Question, Counts], cell: Cell) -> Value:
    if cell is None:
        return None
    asked = counts[cell[0]]
    return asked.clean if cell[1] == "clean" else asked.robust


def both(question: Question) -> tuple[Cell, Cell]:
    """Return the two columns of one question: clean and robust."""
    return (question, "clean"), (question, "robust")


def enlargement(maps: Maps) -> int:
    """Return by how much the network's input is larger than the image, for images that are enlarged as a whole."""
    height, width = maps.input_size
    return height // maps.size[0] if (height, width) != maps.size else 1


def spaces(maps: Maps) -> dict[str, WindowsOf]:
    """Return how a patch becomes windows: as in the paper, and where that misses the resizing, as it truly does."""
    factor = enlargement(maps)
    if factor == 1:
        return {"": maps.windows}

    def enlarged(patch: Patch) -> Windows:
        return maps.windows(Patch(factor * patch.height, factor * patch.width), "input")

    return {"": enlarged, TRUE_WINDOWS: maps.windows}


def differs(model: str, network: Network) -> str:
    """Return how a model differs from the paper's."""
    return "; ".join(part for part in (network.remark, trained(model)) if part)


def described(maps: Maps, suffix: str = "", *, spaced: bool = False) -> str:
    """Return which model made a row, and where its patch lies."""
    words = [f"{maps.model}, {len(maps):,} images"]
    if spaced and enlargement(maps) > 1:
        words.append("patch in the image itself" if suffix else "patch placed after enlarging, as in the paper")
    return "; ".join(words)
