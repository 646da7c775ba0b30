"""Download one file: resumed where a connection broke, limited in size, checked, and complete under its final name.

Also says where downloads are kept. Imports no torch.
"""

import hashlib
import http.client
import logging
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patchguard import __version__
from patchguard.errors import InputError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int | None], None]

CACHE = "PATCHGUARD_CACHE"  # the environment variable that names the folder of downloads
CHUNK = 1 << 20
TIMEOUT = 60  # seconds without a byte
CONNECTIONS = 5  # that are tried, as long as each brings something
PAUSE = 1.0  # seconds between two connections


def cache_folder() -> Path:
    """Return the folder of downloads: $PATCHGUARD_CACHE, else `patchguard` in the user's cache folder."""
    chosen = os.environ.get(CACHE)
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "patchguard"


def download(
    url: str, path: Path, *, limit: int, digest: str = "", progress: Progress | None = None, advice: str = ""
) -> None:
    """Write what `url` holds to `path`, all or nothing.

    What a broken connection leaves is kept beside it, in `path` + `.part`, and the next connection or the next call
    goes on from there. `limit` is the largest size in bytes. `digest` is checked at the end: `sha256:...` or
    `md5:...`. `progress` is told how many bytes have come, of how many if that is known. `advice` ends the message of
    a failed connection.
    """
    part = path.with_name(f"{path.name}.part")
    resumed = _length(part) > 0
    try:
        _receive_all(url, part, limit, progress)
        if resumed and not _has_digest(part, digest):
            part.unlink()  # it began with something else
            _receive_all(url, part, limit, progress)
    except (OSError, http.client.HTTPException) as error:
        raise InputError(f"{url} cannot be downloaded: {_reason(error)}. {advice}".rstrip()) from None
    if not _has_digest(part, digest):
        algorithm, _, expected = digest.partition(":")
        found = file_digest(part, algorithm)
        part.unlink()
        raise InputError(f"{url} came with {algorithm} {found} and must have {expected}. Nothing was kept; try again.")
    os.replace(part, path)


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """Return the digest of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def check_size(size: int, limit: int, subject: str) -> None:
    """Raise where something, such as `subject` = "the server sent", is larger than its limit."""
    if size > limit:
        raise InputError(f"{subject} {size:,} bytes, more than the limit of {limit:,}. Nothing was kept.")


def _has_digest(path: Path, digest: str) -> bool:
    algorithm, _, expected = digest.partition(":")
    return not digest or file_digest(path, algorithm) == expected


def _receive_all(url: str, part: Path, limit: int, progress: Progress | None) -> None:
    """Connect until all is there, or a connection brings nothing new."""
    for connections_left in reversed(range(CONNECTIONS)):
        before = _length(part)
        try:
            _receive(url, part, limit, progress)
            break
        except InputError:
            part.unlink(missing_ok=True)
            raise
        except (OSError, http.client.HTTPException) as error:
            if connections_left == 0 or _length(part) <= before:
                raise
            logger.info("%s: %s; resuming after %s bytes", url, _reason(error), f"{_length(part):,}")
            time.sleep(PAUSE)


def _receive(url: str, part: Path, limit: int, progress: Progress | None) -> None:
    """Append what one connection brings; raise if that is not all."""
    answer = _connect(url, part)
    length = _length(part)
    with answer, part.open("ab") as file:
        announced = str(answer.headers.get("Content-Range", ""))
        if length and announced == f"bytes */{length}":
            return  # all of it came before
        if not announced.startswith(f"bytes {length}-"):
            file.truncate(0)  # a server that cannot resume sends everything
            length = 0
        remaining = str(answer.headers.get("Content-Length", ""))
        total = length + int(remaining) if remaining.isdigit() else None
        check_size(total or 0, limit, f"{url} offers")
        while chunk := answer.read(CHUNK):
            length += len(chunk)
            check_size(length, limit, f"{url} sent")
            file.write(chunk)
            if progress is not None:
                progress(length, total)
    if total is not None and length != total:
        raise ConnectionError(f"it ended after {length:,} of {total:,} bytes")


def _connect(url: str, part: Path) -> Any:
    """Ask for what is missing; for everything where the server knows no such part."""
    length = _length(part)
    headers = {"User-Agent": f"patchguard/{__version__}", **({"Range": f"bytes={length}-"} if length else {})}
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not length:
            error.close()
            raise
        if error.headers.get("Content-Range") == f"bytes */{length}":
            return error
        error.close()
        part.unlink()
        return _connect(url, part)


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    return str(getattr(error, "reason", None) or error) or type(error).__name__
