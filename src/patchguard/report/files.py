"""What the report reads from run folders; neither torch, model nor data are needed."""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import numpy as np
import numpy.typing as npt

from patchguard.errors import InputError
from patchguard.runs.summary import (
    START_AGAIN,
    AttackSummary,
    CertifySummary,
    Schema,
    convert,
    read_json,
    read_run,
    read_summary,
)

FAILURES_SHOWN = 10

Summary = TypeVar("Summary", CertifySummary, AttackSummary)
Arrays = dict[str, npt.NDArray[Any]]


@final
@dataclass(frozen=True)
class FinishedRun(Generic[Summary]):
    """A finished run: its folder, its summary, name and reason of the first images without an answer, its command."""

    folder: Path
    summary: Summary
    failures: list[tuple[str, str]]
    command: tuple[str, ...] = ()

    @property
    def patch(self) -> str:
        """The patch that the page is mainly about: the first."""
        return self.summary.settings.patches[0]


def read_finished(folder: Path, schema: type[Summary]) -> FinishedRun[Summary]:
    """Return the finished run in a folder; refuse an unfinished or damaged one."""
    summary = read_summary(folder, schema)
    return FinishedRun(folder, summary, read_failures(folder, summary.errors), read_run(folder).command)


def read_failures(folder: Path, errors: int) -> list[tuple[str, str]]:
    """Return name and reason of the first images that could not be read; the summary only counts them."""
    failures: list[tuple[str, str]] = []
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
                    failures.append((str(record.get("name")), str(record["error"])))
                if len(failures) == min(errors, FAILURES_SHOWN):
                    return failures
    return failures


def read_gallery(
    folder: Path, schema: type[Schema], pictures: Sequence[str], maps: Sequence[str]
) -> list[tuple[Schema, Arrays]]:
    """Return the entries of gallery.json, each with its arrays in gallery.npz.

    `pictures` and `maps` name the arrays: pixels (height, width, 3) and evidence (rows, columns). Guards without cells
    have no maps.
    """
    missing = f"`{folder}` must hold the pictures of its run; remove it and start the run again"
    listed = convert(read_json(folder / "gallery.json", missing), list, folder / "gallery.json")
    entries = [convert(entry, schema, folder / "gallery.json") for entry in listed]
    path = folder / "gallery.npz"
    try:
        # Opened here, since numpy leaves a damaged archive open.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it is not an archive of arrays")
            return [(entry, _read_arrays(archive, number, pictures, maps)) for number, entry in enumerate(entries)]
    except FileNotFoundError:
        raise InputError(f"{missing}; {path.name} is missing.") from None
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"`{path}` is damaged: {error}. {START_AGAIN}") from None


def _read_arrays(archive: Any, number: int, pictures: Sequence[str], maps: Sequence[str]) -> Arrays:
    drawn = maps if any(f"{name}_{number}" in archive for name in maps) else ()
    arrays: Arrays = {name: np.asarray(archive[f"{name}_{number}"]) for name in (*pictures, *drawn)}
    for name in pictures:
        pixels = arrays[name]
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
            raise ValueError(f"{name}_{number} must be 8-bit pixels (height, width, 3); got {pixels.shape}")
    if any(arrays[name].ndim != 2 or arrays[name].shape != arrays[drawn[0]].shape for name in drawn):
        raise ValueError(f"the maps of image {number} must have one shape (rows, columns)")
    return arrays
