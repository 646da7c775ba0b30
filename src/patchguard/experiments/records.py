"""`Folder`: a run on disk. Settings once, one line per image, appended; readable after a kill at any moment.

    run.json                 every setting; written first, never changed
    records-<shard>.jsonl    one line per image, in any order; a shard is what one process wrote
    summary.json             written last: where it exists, the run is finished

A line counts once it ends. What a killed process left of its last line is dropped before anything is appended, so no
image is lost and none is there twice. One run at a time may write: a lock that ends with its process sees to it.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

from patchguard.errors import InputError

FORMAT = 1
LOCK = ".lock"

# How a run was divided among processes does not change what it records.
FREE = ("shards",)

Record = dict[str, Any]


@final
@dataclass(frozen=True)
class Folder:
    """The folder of one run."""

    path: Path

    # -- reading -------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any] | None:
        """Return run.json, or None where no run has begun."""
        return self._object("run.json")

    def summary(self) -> dict[str, Any] | None:
        """Return summary.json, or None where the run is not finished."""
        return self._object("summary.json")

    def records(self) -> Iterator[Record]:
        """Yield the records, one at a time; a torn last line is passed over."""
        for shard in self.shards():
            with open(shard, "rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        break
                    yield _parsed(line, f"line {number} of {shard}")

    def shards(self) -> list[Path]:
        """Return the files of records."""
        return sorted(self.path.glob("records-*.jsonl"))

    def _object(self, name: str) -> dict[str, Any] | None:
        try:
            content = (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"{self.path / name} cannot be read: {error.strerror}.") from None
        try:
            found = json.loads(content)
        except ValueError as error:
            raise InputError(f"{self.path / name} is damaged: {error}. {_ANEW}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise InputError(f"{self.path / name} must have format {FORMAT}; this release reads no other. {_ANEW}")
        return found

    # -- writing -------------------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self, *, first: bool) -> Iterator["Lock"]:
        """Hold the folder until the block ends or the process dies; refuse where another run holds it.

        The first process of a run holds it alone until it calls `share`; only then may the others of that run enter.
        """
        self._make()
        with self._lock_file() as file:
            lock = Lock(file.fileno(), self.path)
            lock.take(fcntl.LOCK_EX if first else fcntl.LOCK_SH)
            yield lock

    def begin(self, run: Mapping[str, Any]) -> None:
        """Write run.json, or check that the run that is already here has the same settings."""
        there = self.run()
        if there is None:
            if self.shards() or self.summary() is not None:
                raise InputError(f"{self.path} holds records without run.json. {_ANEW}")
            self.write("run.json", {"format": FORMAT, **run})
            return
        if there.get("kind") != run.get("kind"):
            raise InputError(
                f"{self.path} holds a run of another kind: {there.get('kind')}, not {run.get('kind')}. "
                "Give another --out, or remove that folder."
            )
        kept, wanted = there["settings"], run["settings"]
        names = [name for name in {**kept, **wanted} if name not in FREE and kept.get(name) != wanted.get(name)]
        if names:
            told = "; ".join(f"{name} {_brief(kept.get(name))}, not {_brief(wanted.get(name))}" for name in names[:3])
            raise InputError(
                f"{self.path} holds a run with other settings: {told}. Give another --out, or remove that folder."
            )

    @contextmanager
    def appending(self, shard: int) -> Iterator["Appender"]:
        """Open the records of one shard for appending, without what is left of a torn line."""
        descriptor = os.open(self.path / f"records-{shard:05d}.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.ftruncate(descriptor, _whole(descriptor))
            yield Appender(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write(self, name: str, value: Mapping[str, Any] | list[Any]) -> None:
        """Write a JSON file, all or nothing."""
        self.write_bytes(name, json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")

    def write_bytes(self, name: str, content: bytes, *, durable: bool = True) -> None:
        """Write a file, all or nothing; `durable` waits until it would survive a power failure, too."""
        draft = self.path / f".{name}.{os.getpid()}.draft"
        try:
            with open(draft, "wb") as file:
                file.write(content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(draft, self.path / name)
        except OSError as error:
            raise InputError(
                f"{self.path / name} cannot be written: {error.strerror}. Make room, or go elsewhere."
            ) from None
        finally:
            with suppress(OSError):
                draft.unlink()

    def _lock_file(self) -> BinaryIO:
        try:
            return open(self.path / LOCK, "ab")
        except OSError as error:
            raise InputError(f"`--out` must be a folder to write in; got {self.path}: {error.strerror}.") from None

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"`--out` must be a folder that can be made; got {self.path}: {error.strerror}.") from None


@final
@dataclass(frozen=True)
class Lock:
    """The lock on a run's folder."""

    descriptor: int
    path: Path

    def share(self) -> None:
        """Let the other processes of this run in; a second run stays out."""
        self.take(fcntl.LOCK_SH)

    def take(self, kind: int) -> None:
        """Take the lock, or change its kind, without waiting."""
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"another process is working in {self.path}. Wait until it ends, or give another --out."
            ) from None


@final
@dataclass(frozen=True)
class Appender:
    """Appends records to one file."""

    descriptor: int

    def append(self, records: list[Record]) -> None:
        """Append records; once this returns, a kill of the process cannot lose them."""
        lines = "".join(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n" for record in records)
        left = memoryview(lines.encode())
        while left:
            left = left[os.write(self.descriptor, left) :]


def _whole(descriptor: int, block: int = 1 << 16) -> int:
    """Return where the last whole line of a file ends."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - block)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _parsed(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("index"), int):
        raise InputError(f"{where} is damaged. {_ANEW}")
    return record


def _brief(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_ANEW = "Remove the folder and start the run anew."
