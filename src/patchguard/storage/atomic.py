"""Files that are written whole or not at all, on any system.

with replace_file(path) as draft:      # for libraries that write to a path of their own
    save_file(tensors, draft)
write_bytes(path, content)
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from patchguard.errors import InputError

ATTEMPTS = 20  # Windows refuses to replace a file while another program reads it
PAUSE = 0.05  # seconds between them


@contextmanager
def replace_file(path: str | Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield the path of a draft that takes the place of `path` when the block ends, and is removed if the block fails.

    Under its final name a file is always complete, whenever the process is killed. `durable` also waits until the file
    would survive a power failure.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with explain_failure(path):
            yield draft
            if durable:
                _flush(draft, os.O_RDWR)
            _replace(draft, path)
            if durable and hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
                _flush(path.parent, os.O_DIRECTORY)
    finally:
        with suppress(OSError):
            draft.unlink()


def write_bytes(path: str | Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file, all or nothing."""
    with replace_file(path, durable=durable) as draft:
        draft.write_bytes(content)


def write_json(path: str | Path, value: Mapping[str, Any] | list[Any], *, durable: bool = True) -> None:
    """Write JSON values, all or nothing; NaN and infinity are refused."""
    write_bytes(path, json.dumps(value, indent=1, allow_nan=False).encode() + b"\n", durable=durable)


@contextmanager
def explain_failure(path: Path) -> Iterator[None]:
    """Turn what the system says about a file that cannot be written into one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{path} cannot be written: {reason}. Free some space, or choose another folder.") from None


def _replace(draft: Path, path: Path) -> None:
    for attempt in range(ATTEMPTS):
        try:
            os.replace(draft, path)
            return
        except PermissionError:
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(PAUSE)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
