"""`Folder`: a run on disk. Settings once, one line per image, appended; readable after a kill at any moment.

    run.json                 every setting; written first; a later start with other versions adds them
    records-<shard>.jsonl    one line per image, in any order; a shard is what one process wrote
    summary.json             written last: where it exists, the run is finished

A line counts once it ends. What a killed process left of its last line is dropped before anything is appended, so no
image is lost and none is there twice. One run at a time may write: a lock that ends with its process sees to it.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

import msgspec

from patchguard.errors import InputError
from patchguard.runs.summary import FORMAT as FORMAT
from patchguard.runs.summary import START_AGAIN, Run, Schema, flatten, read_run, read_summary, to_json

LOCK = ".lock"

# How a run was divided among processes does not change what it records.
FREE = ("shards",)

# What rounds numbers: another release may give other ones.
VERSIONS = ("patchguard", "torch")
AND = " and "  # between the versions that one run was made with

Record = dict[str, Any]


@final
@dataclass(frozen=True)
class Folder:
    """The folder of one run."""

    path: Path

    # -- reading -------------------------------------------------------------------------------------------------------

    def run(self) -> Run | None:
        """Return run.json, or None where no run has begun."""
        return read_run(self.path) if (self.path / "run.json").exists() else None

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return (self.path / "summary.json").exists()

    def summary(self, schema: type[Schema]) -> Schema | None:
        """Return summary.json, or None where the run is not finished."""
        return read_summary(self.path, schema) if self.finished else None

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

    def begin(self, run: Run, check: Callable[[], None] = lambda: None, *, mix_versions: bool = False) -> None:
        """Write run.json, or check that the run that is already here has the same settings and versions.

        `check` is called before anything is written, once the settings are known to be the same. `mix_versions` lets
        other versions go on with the run, and adds them to run.json. A finished run may have any.
        """
        there = self.run()
        if there is None:
            if self.shards() or self.finished:
                raise InputError(f"{self.path} holds records without run.json. {START_AGAIN}")
            check()
            self.write("run.json", run)
            return
        if there.kind != run.kind:
            raise InputError(
                f"{self.path} holds a run of another kind: {there.kind}, not {run.kind}. "
                "Give another --out, or remove that folder."
            )
        kept, wanted = dict(flatten(there.settings)), dict(flatten(run.settings))
        names = [name for name in {**kept, **wanted} if name not in FREE and kept.get(name) != wanted.get(name)]
        if names:
            told = "; ".join(f"{name} {_brief(kept.get(name))}, not {_brief(wanted.get(name))}" for name in names[:3])
            raise InputError(
                f"{self.path} holds a run with other settings: {told}. Give another --out, or remove that folder."
            )
        both = None if self.finished else self._mixed(there, run, mix_versions=mix_versions)
        check()
        if both is not None:
            self.write("run.json", both)

    def _mixed(self, there: Run, run: Run, *, mix_versions: bool) -> Run | None:
        """Return run.json with the versions of this start, too; None where they are known already."""
        began, here = there.environment, run.environment
        others = {
            name: (str(began[name]), str(here[name]))
            for name in VERSIONS
            if name in began and name in here and str(here[name]) not in str(began[name]).split(AND)
        }
        if not others:
            return None
        if not mix_versions:
            told = "; ".join(f"{name} {kept}, not {found}" for name, (kept, found) in others.items())
            raise InputError(
                f"{self.path} was begun with other versions, which may round differently: {told}. "
                "Give --mix-versions to go on all the same, or another --out to begin anew."
            )
        both = {name: f"{kept}{AND}{found}" for name, (kept, found) in others.items()}
        return msgspec.structs.replace(there, environment={**began, **both})

    @contextmanager
    def appending(self, shard: int) -> Iterator["Appender"]:
        """Open the records of one shard for appending, without what is left of a torn line."""
        path = self.path / f"records-{shard:05d}.jsonl"
        with _said_of(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            with _said_of(path):
                os.ftruncate(descriptor, _whole(descriptor))
            yield Appender(descriptor, path)
            with _said_of(path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file, all or nothing."""
        self.write_bytes(name, to_json(value).encode())

    def write_bytes(self, name: str, content: bytes, *, durable: bool = True) -> None:
        """Write a file, all or nothing; `durable` waits until it would survive a power failure, too."""
        draft = self.path / f".{name}.{os.getpid()}.draft"
        try:
            with _said_of(self.path / name):
                with open(draft, "wb") as file:
                    file.write(content)
                    if durable:
                        file.flush()
                        os.fsync(file.fileno())
                os.replace(draft, self.path / name)
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
    """The lock on a run's folder; where it is not `needed`, a file system without locks will do."""

    descriptor: int
    path: Path
    needed: bool = True

    def share(self) -> None:
        """Let the other processes of this run in; a second run stays out."""
        self.take(fcntl.LOCK_SH)

    def take(self, kind: int) -> None:
        """Take the lock, or change its kind, without waiting."""
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if not self.needed and not isinstance(error, BlockingIOError):
                return
            raise InputError(
                f"another process is working in {self.path}. Wait until it ends, or give another folder."
            ) from None


@final
@dataclass(frozen=True)
class Appender:
    """Appends records to one file."""

    descriptor: int
    path: Path

    def append(self, records: list[Record]) -> None:
        """Append records, all or none; once this returns, a kill of the process cannot lose them."""
        lines = "".join(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n" for record in records)
        left = memoryview(lines.encode())
        end = os.fstat(self.descriptor).st_size
        with _said_of(self.path):
            try:
                while left:
                    left = left[os.write(self.descriptor, left) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self.descriptor, end)  # what comes later must not continue half a line
                raise


@contextmanager
def _said_of(path: Path) -> Iterator[None]:
    """Say in one sentence which file cannot be written, and why."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}. Make room, or go elsewhere.") from None


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
        raise InputError(f"{where} is damaged. {START_AGAIN}")
    return record


def _brief(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
