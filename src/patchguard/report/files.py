"""What the report reads from a run folder, checked entry by entry; neither torch, model nor data are needed."""

import json
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import msgspec
import numpy as np
import numpy.typing as npt

from patchguard.errors import InputError
from patchguard.runs import summary as summary_files
from patchguard.runs.summary import (
    CertifySummary,
    ClassSummary,
    Histogram,
    PatchSummary,
    Proportion,
    flatten,
    read_summary,
)

FAILURES_SHOWN = 10


@final
@dataclass(frozen=True)
class Entry:
    """A value of a JSON file that knows its place, so that a wrong one can be named."""

    value: Any
    place: str
    writer: str = "certify"  # the command that writes such files

    def at(self, key: str) -> "Entry":
        """Return the value under a key that must be there."""
        if key not in self.entries():
            raise self.wrong(f"an object with the entry {key!r}")
        place = f"{self.place}: {key}" if self.place.endswith(".json") else f"{self.place}.{key}"
        return Entry(self.value[key], place, self.writer)

    def get(self, key: str) -> "Entry | None":
        """Return the value under a key, or None where it is missing or null."""
        return self.at(key) if self.entries().get(key) is not None else None

    def entries(self) -> dict[str, Any]:
        """Return an object's entries."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return self.value

    def items(self) -> Iterator[tuple[str, "Entry"]]:
        """Return the entries of an object in their order."""
        return ((key, self.at(key)) for key in self.entries())

    def members(self) -> list["Entry"]:
        """Return the members of a list."""
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return [Entry(value, f"{self.place}[{place}]", self.writer) for place, value in enumerate(self.value)]

    def text(self) -> str:
        """Return text."""
        if not isinstance(self.value, str):
            raise self.wrong("text")
        return self.value

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def whole(self) -> int:
        """Return a whole number of at least 0."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < 0:
            raise self.wrong("a whole number of at least 0")
        return self.value

    def number(self) -> float:
        """Return a number; infinite ones are margins of rules that prove nothing."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)) or math.isnan(self.value):
            raise self.wrong("a number")
        return float(self.value)

    def wholes(self, length: int) -> tuple[int, ...]:
        """Return a list of so many whole numbers."""
        found = tuple(member.whole() for member in self.members())
        if len(found) != length:
            raise self.wrong(f"{length} whole numbers")
        return found

    def wrong(self, wanted: str) -> InputError:
        """Return the error that says what this value must be."""
        got = repr(self.value)
        return InputError(
            f"`{self.place}` must be {wanted}; got {got if len(got) < 60 else got[:57] + '...'}. "
            f"Let `patchguard {self.writer}` write the folder again."
        )


@final
@dataclass(frozen=True)
class Run:
    """A finished run, as its folder tells it."""

    folder: Path
    settings: dict[str, Any]
    environment: dict[str, Any]
    images: int
    errors: int
    labeled: bool
    undefended: Proportion | None
    patches: dict[str, PatchSummary]
    kept: dict[int, Proportion]
    refitted: dict[int, Proportion]
    refitted_clean: dict[int, Proportion]
    classes: list[ClassSummary]
    margins: dict[str, Histogram]
    seconds: dict[str, float]
    failures: list[tuple[str, str]]

    @property
    def patch(self) -> str:
        """The patch that the page is mainly about: the first."""
        return next(iter(self.patches))

    @property
    def main(self) -> Proportion:
        """The number that the headline tells."""
        return self.patches[self.patch].main

    @property
    def pixels(self) -> str:
        """What patches are measured in."""
        return "network pixels" if self.settings.get("patch_space") == "input" else "source pixels"

    @property
    def measure(self) -> str:
        """What the main number is called."""
        return "certified accuracy" if self.labeled else "labels proved"

    def class_name(self, number: int) -> str:
        """Return the name of a class, or its number where it has none."""
        names = self.settings.get("class_names") or []
        return str(names[number]) if number < len(names) else f"class {number}"


def read_run(folder: Path) -> Run:
    """Return the finished run in a folder; refuse an unfinished or damaged one."""
    summary = read_summary(folder, CertifySummary)
    refitted = summary.curve.refitted
    curves: list[dict[int, Proportion | None]] = [
        dict(summary.curve.kept),
        {side: entry.main for side, entry in refitted.items()},
        {side: entry.clean for side, entry in refitted.items()},
    ]
    kept, again, clean = (
        {side: point for side, point in sorted(curve.items()) if point is not None and point.total} for curve in curves
    )
    return Run(
        folder=folder,
        settings=dict(flatten(msgspec.to_builtins(summary.settings))),
        environment=summary.environment,
        images=summary.images,
        errors=summary.errors,
        labeled=summary.labeled,
        undefended=summary.undefended,
        patches={name: summary.patches[name] for name in summary.settings.patches},
        kept=kept,
        refitted=again,
        refitted_clean=clean,
        classes=summary.classes,
        margins=summary.margins,
        seconds={name: value for name, value in msgspec.to_builtins(summary.seconds).items() if value is not None},
        failures=read_failures(folder, summary.errors),
    )


def read_kind(folder: Path) -> str:
    """Return what kind of run a folder holds: certify or attack."""
    return summary_files.read_run(folder).kind


def read_json(folder: Path, name: str, otherwise: str, writer: str = "certify") -> Entry:
    """Return the contents of a JSON file."""
    path = folder / name
    try:
        return Entry(json.loads(path.read_bytes()), str(path), writer)
    except FileNotFoundError:
        raise InputError(f"{otherwise}; {name} is missing.") from None
    except OSError as error:
        raise InputError(f"`{path}` cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise InputError(f"`{path}` is damaged: it is not JSON. Let `patchguard {writer}` write it again.") from None


def read_failures(folder: Path, errors: int) -> list[tuple[str, str]]:
    """Return name and reason of the first images that could not be read; the summary only counts them."""
    found: list[tuple[str, str]] = []
    for path in sorted(folder.glob("records-*.jsonl")) if errors else []:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if '"error"' not in line:
                    continue
                try:
                    record = json.loads(line)
                except ValueError:
                    continue  # the torn last line of a run that was stopped
                if isinstance(record, dict) and "error" in record:
                    found.append((str(record.get("name")), str(record["error"])))
                if len(found) == min(errors, FAILURES_SHOWN):
                    return found
    return found


# -- gallery -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Picture:
    """One image of the gallery: pixels (height, width, 3), evidence of label and rival (rows, columns), and places."""

    index: int
    name: str
    group: str
    label: int
    target: int | None
    margin: float
    rival: int
    size: tuple[int, ...]
    grid: tuple[int, ...]
    window: tuple[int, ...] | None
    box: tuple[int, ...] | None
    mask: tuple[int, ...] | None
    pixels: npt.NDArray[np.uint8]
    evidence: npt.NDArray[np.float32]
    rival_evidence: npt.NDArray[np.float32]


def read_gallery(folder: Path) -> list[Picture]:
    """Return the pictures of a run folder."""
    wanted = f"`{folder}` must hold the pictures of its run; let `patchguard certify` write them again"
    entries = read_json(folder, "gallery.json", wanted).members()
    path = folder / "gallery.npz"
    with read_arrays(path, wanted, "Let `patchguard certify` write it again.") as archive:
        return [_picture(entry, place, archive, path) for place, entry in enumerate(entries)]


@contextmanager
def read_arrays(path: Path, wanted: str, again: str) -> Iterator[Any]:
    """Yield an archive of arrays; one that is missing or damaged, even where it is used, is an error of its user."""
    try:
        # Opened here, since numpy leaves a damaged archive open.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it is not an archive of arrays")
            yield archive
    except FileNotFoundError:
        raise InputError(f"{wanted}; {path.name} is missing.") from None
    except InputError:
        raise
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"`{path}` is damaged: {error}. {again}") from None


def _picture(entry: Entry, place: int, archive: Any, path: Path) -> Picture:
    pixels, evidence, rival = (np.asarray(archive[f"{name}_{place}"]) for name in ("image", "evidence", "rival"))
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise InputError(f"`{path}`: image_{place} must be 8-bit pixels (height, width, 3); got {pixels.shape}.")
    if evidence.ndim != 2 or evidence.shape != rival.shape or 0 in evidence.shape:
        raise InputError(f"`{path}`: evidence_{place} and rival_{place} must be maps of one shape (rows, columns).")
    boxes = {name: found.wholes(4) if (found := entry.get(name)) else None for name in ("window", "box", "mask")}
    target, size, grid = entry.get("target"), entry.at("size").wholes(2), entry.at("grid").wholes(2)
    if 0 in (*size, *grid):
        raise entry.wrong("an image of at least one pixel and one cell")
    return Picture(
        index=entry.at("index").whole(),
        name=entry.at("name").text(),
        group=entry.at("group").text(),
        label=entry.at("label").whole(),
        target=target.whole() if target else None,
        margin=found.number() if (found := entry.get("margin")) else -math.inf,  # of a rule that proves nothing
        rival=entry.at("rival").whole(),
        size=size,
        grid=grid,
        pixels=pixels,
        evidence=evidence.astype(np.float32),
        rival_evidence=rival.astype(np.float32),
        **boxes,
    )
