"""A finished run is shown again by the same command at once: neither torch nor the model is loaded.

state.json in its folder holds a digest of what the command saw: its options, the version, the model's file, and the
images' files with their sizes and times. The time of the last change is among these; programs cannot set it back. Where
anything differs, or the images are a known dataset, the command goes the long way and compares pixels.
"""

import glob
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from patchguard import __version__
from patchguard.cli.common import name_run
from patchguard.errors import InputError

if TYPE_CHECKING:
    from patchguard.runs.summary import CertifySummary

STATE = "state.json"
VARIABLES = ("PATCHGUARD_ZOO", "PATCHGUARD_CACHE", "PATCHGUARD_DATA")


@final
@dataclass(frozen=True)
class Finished:
    """The folder of a finished run, and the model's file in words."""

    folder: Path
    model: str

    def read_summary(self) -> "CertifySummary":
        """Return summary.json."""
        from patchguard.runs.summary import CertifySummary, read_summary

        return read_summary(self.folder, CertifySummary)


def find_finished(options: list[str], model: str, data: str, out: Path | None) -> Finished | None:
    """Return the run that the same command has finished before, if everything that it saw is the same now."""
    if "RANK" in os.environ:
        return None
    name = Path(data).name if Path(data).is_absolute() else data
    near = name_run(Path(model).stem, name)
    folders = [out] if out is not None else sorted(near.parent.glob(f"{glob.escape(near.name)}-*"))
    for folder in folders:
        with suppress(OSError, ValueError, KeyError, TypeError, InputError):
            state = json.loads((folder / STATE).read_bytes())
            file = None if state["file"] is None else Path(state["file"])
            if (folder / "summary.json").exists() and state["digest"] == _digest_state(options, data, file):
                return Finished(folder, state["model"])
    return None


def remember(folder: Path, options: list[str], model: str, data: str, file: Path | None, about: str) -> None:
    """Write what a finished command saw, where that can be told by files and the folder can be written."""
    from patchguard.storage.atomic import write_json

    with suppress(InputError, OSError):
        digest = _digest_state(options, data, file)
        if digest is not None:
            state = {"digest": digest, "file": None if file is None else str(file), "model": about}
            write_json(folder / STATE, state, durable=False)


def _digest_state(options: list[str], data: str, file: Path | None) -> str | None:
    """Return the digest of what a command sees, or None where files do not tell."""
    images = _list_files(data)
    if images is None:
        return None
    seen = [__version__, os.getcwd(), [os.environ.get(name) for name in VARIABLES], options]
    states = [_describe_file(path) for path in ([] if file is None else [file]) + images]
    return hashlib.sha256(json.dumps([seen, states]).encode()).hexdigest()


def _list_files(data: str) -> list[Path] | None:
    from patchguard.data import folder
    from patchguard.data.catalog import CATALOG

    path = Path(data).expanduser()
    if data == "sample":
        return []
    if data in CATALOG:
        return None
    if path.is_file():
        return [path]
    listing = folder.list_folder(path) if path.is_dir() else folder.match_pattern(str(path))
    return [listing.root / name for name in listing.names]


def _describe_file(path: Path) -> list[str | int]:
    try:
        state = path.stat()
    except OSError:
        return [str(path)]
    return [str(path), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
