"""`Folder`: a run on disk. Settings once, one line per image, appended; readable after a kill at any moment.

    run.json                 every setting; written first; a later start with more images, patches or versions adds them
    records-<shard>.jsonl    one line per image, in any order; a shard is what one process wrote
    summary.json             written last: where it exists, the run is complete

A line counts once it ends. What a killed process left of its last line is dropped before anything is appended, so no
image is lost and none is there twice. One run at a time may write: locks that end with their processes see to it.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import msgspec
from filelock import FileLock, Timeout

from patchguard.errors import InputError
from patchguard.runs.summary import START_AGAIN, Run, Schema, flatten, read_run, read_summary, to_json
from patchguard.storage import atomic

LOCK = ".lock"

# How a run was divided among processes does not change what it records.
FREE = ("shards",)

# What may grow: recorded images keep their numbers and their patches, and what is new is added.
GROWING = {"images", "data_digest", "patches"}

# What --force removes: nothing that another program may have put there.
FILES = ("summary.json", "gallery.json", "gallery.npz", "report.html", "photos.csv", "state.json", "run.json")
FOLDERS = ("attacked", "refuted")

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
    def complete(self) -> bool:
        """Whether every image is recorded and summed up."""
        return (self.path / "summary.json").exists()

    def summary(self, schema: type[Schema]) -> Schema | None:
        """Return summary.json, or None where the run is not complete."""
        return read_summary(self.path, schema) if self.complete else None

    def records(self) -> Iterator[Record]:
        """Yield the records, one at a time; those that lack a patch of the run are passed over."""
        for record, outgrown in self._lines():
            if not outgrown:
                yield record

    def all_records(self) -> Iterator[Record]:
        """Yield every record; an image whose record lacks a patch may be there twice."""
        return (record for record, _ in self._lines())

    def outgrown_records(self) -> Iterator[Record]:
        """Yield the records that lack a patch, since the run was extended by it: others will take their place."""
        for record, outgrown in self._lines():
            if outgrown:
                yield record

    def _lines(self) -> Iterator[tuple[Record, bool]]:
        """Yield each record and whether it lacks a patch of the run; a torn last line is passed over."""
        run = self.run()
        wanted = set(run.settings.get("patches", ())) if run is not None and run.kind == "certify" else set()
        for shard in self.shards():
            with open(shard, "rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        break
                    record = _parse(line, f"line {number} of {shard}")
                    yield record, "patches" in record and not wanted <= record["patches"].keys()

    def shards(self) -> list[Path]:
        """Return the files of records."""
        return sorted(self.path.glob("records-*.jsonl"))

    def mark_recorded(self, count: int) -> bytearray:
        """Return, for each of `count` images, whether it is recorded; refuse one that is there twice or not ours."""
        recorded = bytearray(count)
        for record in self.records():
            index = record["index"]
            if not 0 <= index < count or recorded[index]:
                raise InputError(f"image {index} should not be in {self.path}, or is there twice. {START_AGAIN}")
            recorded[index] = 1
        return recorded

    def image_digests(self) -> Iterator[tuple[int, Any]]:
        """Yield the numbers of recorded images with the digests of their pixels, None for those that were not readable.

        Records of older releases that say `error` have no digest; they claim nothing.
        """
        for record in self.all_records():
            if "image" in record:
                yield record["index"], record["image"]
            elif "error" not in record:
                raise InputError(
                    f"{self.path} is of an older release and does not say which pixels it is about. "
                    "Give another --out to start again."
                )

    # -- writing -------------------------------------------------------------------------------------------------------

    @contextmanager
    def lock(self, rank: int = 0) -> Iterator[None]:
        """Make the folder, and hold it until the block ends or the process dies; refuse where another run holds it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"`--out` must be a folder that can be made; got {self.path}: {error.strerror}.") from None
        if self.complete and not can_write(self.path):
            yield  # nothing is left to write: it is only shown
            return
        with lock_folder(self.path, rank):
            yield

    def clear(self) -> None:
        """Remove the run that is here; run.json goes last, so that a kill leaves what can be cleared again."""
        if not (self.path / "run.json").exists():
            return
        with atomic.explain_failure(self.path):
            for name in FOLDERS:
                shutil.rmtree(self.path / name, ignore_errors=True)
            for path in (*self.shards(), *(self.path / name for name in FILES)):
                path.unlink(missing_ok=True)

    def drop_outgrown(self) -> None:
        """Remove the records that lack a patch, once others have taken their place; one file then holds them all."""
        if not any(True for _ in self.outgrown_records()):
            return
        records = list(self.records())
        first, *others = self.shards()
        atomic.write_bytes(first, b"".join(map(_write_line, records)))
        for shard in others:
            shard.unlink()

    def begin(
        self,
        run: Run,
        check: Callable[[], None] = lambda: None,
        *,
        mix_versions: bool = False,
        extend: bool = False,
    ) -> None:
        """Write run.json, or check that the run that is already here has the same settings and versions.

        `check` is called before anything is written, once the settings are known to be the same. `mix_versions` lets
        other versions resume the run, and adds them to run.json. A complete run may have any. `extend` admits more
        images and more patches than the run had: it is then no longer complete.
        """
        there = self.run()
        if there is None:
            if self.shards() or self.complete:
                raise InputError(f"{self.path} holds records without run.json. {START_AGAIN}")
            check()
            self.write("run.json", run)
            return
        if there.kind != run.kind:
            raise InputError(
                f"{self.path} holds a run of another kind: {there.kind}, not {run.kind}. "
                "Give another --out, or --force to start over in that folder."
            )
        before, now = dict(flatten(there.settings)), dict(flatten(run.settings))
        names = [name for name in {**before, **now} if name not in FREE and before.get(name) != now.get(name)]
        growing = extend and bool(names) and _is_larger(before, now, names)
        if names and not growing:
            told = "; ".join(
                f"{name} {_shorten(before.get(name))}, not {_shorten(now.get(name))}" for name in names[:3]
            )
            raise InputError(
                f"{self.path} holds a run with other settings: {told}. "
                "Give another --out, or --force to start over in that folder."
            )
        mixed = None if self.complete and not growing else self._mix_versions(there, run, allowed=mix_versions)
        check()
        if growing:
            with atomic.explain_failure(self.path):
                (self.path / "summary.json").unlink(missing_ok=True)
            environment = (mixed or there).environment
            self.write("run.json", msgspec.structs.replace(run, environment=environment, version=there.version))
        elif mixed is not None:
            self.write("run.json", mixed)

    def _mix_versions(self, there: Run, run: Run, *, allowed: bool) -> Run | None:
        """Return run.json with the versions of this start, too; None where they are known already."""
        before, now = there.environment, run.environment
        new = {
            name: (str(before[name]), str(now[name]))
            for name in VERSIONS
            if name in before and name in now and str(now[name]) not in str(before[name]).split(AND)
        }
        if not new:
            return None
        if not allowed:
            told = "; ".join(f"{name} {old}, not {other}" for name, (old, other) in new.items())
            raise InputError(
                f"{self.path} was begun with other versions, which may round differently: {told}. "
                "Give --mix-versions to resume it anyway, or another --out to start again."
            )
        both = {name: f"{old}{AND}{other}" for name, (old, other) in new.items()}
        return msgspec.structs.replace(there, environment={**before, **both})

    @contextmanager
    def open_shard(self, number: int) -> Iterator["Appender"]:
        """Open the records of one shard for appending, without what is left of a torn line."""
        path = self.path / f"records-{number:05d}.jsonl"
        with atomic.explain_failure(path):
            file = open(path, "ab+", buffering=0)  # noqa: SIM115
        with file:
            with atomic.explain_failure(path):
                os.ftruncate(file.fileno(), _find_last_line_end(file.fileno()))
            yield Appender(file.fileno(), path)
            with atomic.explain_failure(path):
                os.fsync(file.fileno())

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file, all or nothing."""
        self.write_bytes(name, to_json(value).encode())

    def write_bytes(self, name: str, content: bytes, *, durable: bool = True) -> None:
        """Write a file, all or nothing; `durable` waits until it would survive a power failure, too."""
        atomic.write_bytes(self.path / name, content, durable=durable)


@final
@dataclass(frozen=True)
class Appender:
    """Appends records to one file."""

    descriptor: int
    path: Path

    def append(self, records: list[Record]) -> None:
        """Append records, all or none; once this returns, a kill of the process cannot lose them."""
        left = memoryview(b"".join(map(_write_line, records)))
        end = os.fstat(self.descriptor).st_size
        with atomic.explain_failure(self.path):
            try:
                while left:
                    left = left[os.write(self.descriptor, left) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self.descriptor, end)  # what comes later must not continue half a line
                raise


def can_write(folder: Path) -> bool:
    """Return whether files can be made in a folder; a disk may be mounted to be read alone."""
    return os.access(folder, os.W_OK)


def _is_larger(before: Record, now: Record, names: list[str]) -> bool:
    """Return whether settings differ only by more images and more patches; that the old ones stay is checked later."""
    first = now["patches"][: len(before["patches"])]
    return set(names) <= GROWING and now["images"] >= before["images"] and first == before["patches"]


@contextmanager
def lock_folder(path: str | os.PathLike[str], rank: int = 0) -> Iterator[None]:
    """Hold a folder until the block ends or the process dies; refuse where another run holds it.

    Every process of a run holds a file of its own. The first enters only where no process of another run is left.
    """
    folder = Path(path)
    own = folder / (LOCK if rank == 0 else f"{LOCK}-{rank:05d}")
    with _hold(own):
        for other in folder.glob(f"{LOCK}-*") if rank == 0 else ():
            with _hold(other):
                pass
        yield


@contextmanager
def _hold(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"another process is working in {path.parent}. Wait until it ends, or give another folder."
        ) from None
    except OSError as error:
        raise InputError(f"{path.parent} must be a folder to write in: {error.strerror}.") from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows refuses, and removes the file when it is released
            path.unlink()
        lock.release()


def _find_last_line_end(descriptor: int, block: int = 1 << 16) -> int:
    """Return where the last whole line of a file ends."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - block)
        os.lseek(descriptor, start, os.SEEK_SET)
        newline = os.read(descriptor, end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _write_line(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _parse(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("index"), int):
        raise InputError(f"{where} is damaged. {START_AGAIN}")
    return record


def _shorten(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
