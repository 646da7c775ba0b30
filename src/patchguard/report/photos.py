"""Every image of a run: photos.csv beside the report, and the rows of the table inside it.

Both come from one list of columns. The file holds all of them for all images; the page holds those that have a title,
for as many images as fit into `PAGE_BYTES`.
"""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, final

from markupsafe import Markup

from patchguard.report.files import FinishedRun
from patchguard.report.numbers import replace_unprintable, size
from patchguard.runs.metrics import attack_group, certify_group
from patchguard.runs.records import Folder, Record
from patchguard.runs.summary import AttackSummary, CertifySummary, Settings

NAME = "photos.csv"
PAGE_BYTES = 2_300_000  # of rows in the page; with the pictures, it stays below 5 MB
FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # what makes a spreadsheet compute a cell
NO_ANSWER = "no answer"

Kind = Literal["number", "text", "word", "verdict"]
Value = str | int | float | bool | None

# The verdicts in the words of the page, best first, each with its color.
CERTIFIED = {
    "certified": ("correct and certified", "is-certified"),
    "not certified": ("correct, not certified", "is-open"),
    "wrong": ("wrong", "is-wrong"),
    "proved": ("certified", "is-certified"),
    "not proved": ("not certified", "is-open"),
    NO_ANSWER: (NO_ANSWER, "is-plain"),
}
ATTACKED = {
    "refuted": ("certified, but broken", "is-wrong"),
    "withstood": ("certified, and held", "is-certified"),
    "open": ("neither certified nor broken", "is-open"),
    "broken": ("broken by the attack", "is-wrong"),
    "wrong": ("wrong without an attack", "is-plain"),
    "not attacked": ("not attacked", "is-plain"),
    NO_ANSWER: (NO_ANSWER, "is-plain"),
}


@final
@dataclass(frozen=True)
class Column:
    """A column: its name in the file, what it reads from a record, and its title in the page if it is there, too."""

    name: str
    read: Callable[[Record], Value]
    title: str = ""
    kind: Kind = "text"
    verdicts: tuple[tuple[str, str], ...] = ()  # words and colors


@final
@dataclass(frozen=True)
class Photos:
    """photos.csv, and the table in the page: its columns, its data in JSON, and how many of all images it lists."""

    csv: bytes
    columns: list[Column]
    data: Markup
    listed: int
    total: int

    @property
    def verdicts(self) -> list[tuple[int, Column]]:
        """The columns that images can be chosen by, with their places."""
        return [(place, column) for place, column in enumerate(self.columns) if column.kind == "verdict"]


def read_certified_photos(run: FinishedRun[CertifySummary], pictures: list[int]) -> Photos | None:
    """Return the images of a `certify` run, of which some have pictures in the page."""
    return _read_photos(run, list(_describe_certified(run.summary)), pictures)


def read_attacked_photos(run: FinishedRun[AttackSummary], pictures: list[int]) -> Photos | None:
    """Return the images of an `attack` run, of which some have pictures in the page."""
    return _read_photos(run, list(_describe_attacked(run.summary)), pictures)


# -- columns -----------------------------------------------------------------------------------------------------------


def _describe_image(settings: Settings, *, labeled: bool) -> Iterator[Column]:
    yield Column("number", lambda record: record["index"], "Number", "number")
    yield Column("image", lambda record: str(record["name"]), "Image")
    yield Column("height", lambda record: record["size"][0] if "size" in record else None)
    yield Column("width", lambda record: record["size"][1] if "size" in record else None)
    title = "True class" if labeled else ""
    yield Column("true class", lambda record: _name_class(settings, record.get("target")), title, "word")


def _describe_certified(summary: CertifySummary) -> Iterator[Column]:
    settings, labeled = summary.settings, summary.labeled
    yield from _describe_image(settings, labeled=labeled)
    yield Column("undefended label", lambda record: _name_class(settings, record.get("undefended")))
    refitted = [patch for patch in settings.patches if summary.patches[patch].masks not in ("own", None)]
    groups = ("certified", "not certified", "wrong") if labeled else ("proved", "not proved")
    for patch in settings.patches:
        yield from _describe_patch(
            patch,
            settings,
            groups=(*groups, *([NO_ANSWER] if summary.errors else [])),
            labeled=labeled,
            suffix=f" {size(patch)}" if len(settings.patches) > 1 else "",
            label=f"Label {size(patch)}" if patch in refitted else "Label" if patch == settings.patches[0] else "",
        )
    yield Column("largest certified side", lambda record: record.get("largest"))
    yield Column("reason", lambda record: record.get("error"))


def _describe_patch(
    patch: str, settings: Any, *, groups: tuple[str, ...], labeled: bool, suffix: str, label: str
) -> Iterator[Column]:
    """Yield the columns of one patch; masks that were refitted to it may give a label of its own."""

    def entry(record: Record) -> Record:
        found: Record = record.get("patches", {}).get(patch, {})
        return found

    def verdict(record: Record) -> str:
        return CERTIFIED[certify_group(record, patch, labeled) if entry(record) else NO_ANSWER][0]

    def pixels(record: Record) -> str | None:
        return f"{entry(record)['height']}x{entry(record)['width']}" if "height" in entry(record) else None

    if patch.endswith("%"):
        yield Column(f"patch in pixels {patch}", pixels)
    yield Column(f"label {patch}", lambda record: _name_class(settings, entry(record).get("label")), label, "word")
    words = tuple(CERTIFIED[group] for group in groups)
    yield Column(f"verdict {patch}", verdict, f"Verdict{suffix}", "verdict", words)
    yield Column(f"certified {patch}", lambda record: entry(record).get("certified"))
    title = f"Margin{suffix}" if settings.defends else ""
    yield Column(f"margin {patch}", lambda record: entry(record).get("margin"), title, "number")
    yield Column(f"rival {patch}", lambda record: _name_class(settings, entry(record).get("rival")))
    yield Column(f"masks {patch}", lambda record: entry(record).get("masks"))
    if settings.certificates:
        yield Column(f"certificate file {patch}", lambda record: entry(record).get("file"))


def _describe_attacked(summary: AttackSummary) -> Iterator[Column]:
    settings, labeled = summary.settings, summary.labeled

    def verdict(record: Record) -> str:
        if "error" in record:
            return NO_ANSWER
        group = attack_group(record)
        if group != "refuted" and labeled and record["label"] != record["target"]:
            group = "wrong"
        elif group == "open" and record["places"] is None:
            group = "not attacked"
        return ATTACKED[group][0]

    def places(record: Record) -> str | None:
        found = record.get("places")
        return "; ".join(f"row {top}, column {left}" for top, left in found) if found else None

    possible = {"wrong": labeled, "not attacked": settings.aim is not None, NO_ANSWER: summary.errors > 0}
    yield from _describe_image(settings, labeled=labeled)
    yield Column("label", lambda record: _name_class(settings, record.get("label")), "Label", "word")
    words = tuple(words for group, words in ATTACKED.items() if possible.get(group, True))
    yield Column("verdict", verdict, "Verdict", "verdict", words)
    attacked = "Label under attack"
    yield Column(attacked.lower(), lambda record: _name_class(settings, record.get("attacked")), attacked, "word")
    yield Column("certified", lambda record: record.get("certified"))
    yield Column("margin", lambda record: record.get("margin"), "Margin" if settings.defends else "", "number")
    yield Column("rival", lambda record: _name_class(settings, record.get("rival")))
    yield Column("broken", lambda record: record.get("broken"))
    yield Column("alert", lambda record: record.get("alert"))
    yield Column("patch at", places)
    yield Column("masks", lambda record: record.get("masks"))
    yield Column("reason", lambda record: record.get("error"))


def _name_class(settings: Settings, number: int | None) -> str | None:
    return None if number is None else settings.class_name(number)


# -- rows --------------------------------------------------------------------------------------------------------------


@final
class _Line:
    """A file that gives back what is written to it."""

    def write(self, text: str) -> str:
        return text


def _read_photos(
    run: FinishedRun[CertifySummary] | FinishedRun[AttackSummary], columns: list[Column], pictures: list[int]
) -> Photos | None:
    """Return the images in the order of their numbers; None where a run kept no records."""
    writer: Any = csv.writer(_Line())
    shown = [column for column in columns if column.title]
    words: dict[str, int] = {}
    lines: list[tuple[int, str, str]] = []
    for record in Folder(run.folder).records():
        line = writer.writerow([write_cell(column.read(record)) for column in columns])
        lines.append((record["index"], line, _write_row(record, shown, words)))
    if not lines:
        return None
    lines.sort()
    listed, room = 0, PAGE_BYTES
    while listed < len(lines) and (room := room - len(lines[listed][2].encode()) - 1) >= 0:
        listed += 1
    described = [{"kind": column.kind, "verdicts": column.verdicts} for column in shown]
    head = json.dumps({"columns": described, "words": list(words), "pictures": pictures}, ensure_ascii=False)
    data = f'{head[:-1]}, "rows": [\n' + ",\n".join(row for _, _, row in lines[:listed]) + "\n]}"
    for sign in "<>&":  # in JSON, they are only inside of texts
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    content = writer.writerow([column.name for column in columns]) + "".join(line for _, line, _ in lines)
    return Photos(content.encode(), shown, Markup(data), listed, len(lines))


def write_cell(value: Value) -> str:
    """Return a value as a cell of a CSV file; a text that a spreadsheet would compute is set off by an apostrophe."""
    if value is None or isinstance(value, bool):
        return "" if value is None else "yes" if value else "no"
    if not isinstance(value, str):
        return repr(value)
    text = replace_unprintable(value)
    return f"'{text}" if text.startswith(FORMULA) else text


def _write_row(record: Record, columns: list[Column], words: dict[str, int]) -> str:
    """Return the cells of a row as JSON: words and verdicts by their numbers; at the end, why there is no answer."""
    cells: list[Value] = []
    for column in columns:
        value = column.read(record)
        if isinstance(value, str):
            value = replace_unprintable(value)
            if column.kind == "word":
                value = words.setdefault(value, len(words))
            elif column.kind == "verdict":
                value = [each for each, _ in column.verdicts].index(value)
        elif isinstance(value, float):
            value = float(f"{value:.6g}")
        cells.append(value)
    if "error" in record:
        cells.append(replace_unprintable(str(record["error"])))
    return json.dumps(cells, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
