"""The engine of `certify`, `predict` and `attack`: from image files to records.

    decode (threads)  ->  batches of one size  ->  what the run does with a batch (worker threads)  ->  records

A run is stopped at any moment and resumed by the same command. Under torchrun every process takes each `world_size`-th
block of images and writes a shard of its own; the first one sums up. A block is always computed whole, so that the
numbers do not depend on where a run was stopped.
"""

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Generic, Protocol, TypeAlias, TypeVar, final, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from patchguard import runtime
from patchguard.data.decode import Unreadable
from patchguard.data.loading import iterate_images
from patchguard.data.source import Source
from patchguard.errors import InputError
from patchguard.guard import Examination, Plan
from patchguard.runs.job import Job
from patchguard.runs.records import Appender, Folder, Record, lock_folder
from patchguard.runs.summary import Run, Schema, Seconds
from patchguard.storage.certificate_file import image_digest

BATCH_SIZE = {"cpu": 16, "cuda": 512}
PLANS = 256  # sizes of images whose plans are kept
PREFETCH = 3  # batches that are decoded before they are needed


# -- the run as a whole ------------------------------------------------------------------------------------------------


@runtime_checkable
class Counts(Protocol):
    """What grows with every record and tells how far a run is."""

    images: int
    errors: int

    def add(self, record: Record) -> None:
        """Count one record."""


Counted = TypeVar("Counted", bound=Counts)


@final
@dataclass(frozen=True)
class Outcome(Generic[Schema]):
    """A complete run: its summary, and whether it was already complete when it was started."""

    summary: Schema
    already_complete: bool


@contextmanager
def open_run(
    folder: Folder,
    run: Run,
    check: Callable[[], None],
    *,
    others: Sequence["os.PathLike[str]"] = (),
    mix_versions: bool = False,
    extend: bool = False,
    force: bool = False,
) -> Iterator[Callable[[], None]]:
    """Hold the folder of a run, together with the other processes of torchrun; yield a barrier for them.

    The first process writes run.json, or checks that the run which is there is this one, before the others come in.
    `check` looks at what is in the folder; the folders `others` are held with it. `force` removes a run that is there.
    """
    rank = runtime.rank()
    with runtime.barrier_group() as barrier, ExitStack() as stack:
        if rank > 0:
            barrier()  # until the first process has made the folder and holds it
        stack.enter_context(folder.lock(rank))
        for other in others:
            stack.enter_context(lock_folder(other, rank))
        if rank == 0:
            if force:
                folder.clear()
            folder.begin(run, check, mix_versions=mix_versions, extend=extend)
            barrier()
        yield barrier


def resolve_device(job: Job, device: str, batch_size: int | None) -> tuple[torch.device, int]:
    """Move the guard to the device, and return it with the number of images at once."""
    chosen = runtime.resolve_device(device)
    if chosen.type == "cuda" and chosen.index is None and runtime.world_size() > 1:
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    size = BATCH_SIZE.get(chosen.type, BATCH_SIZE["cuda"]) if batch_size is None else batch_size
    if size < 1:
        raise InputError(f"`--batch-size` must be a whole number, 1 or more; got {batch_size}.")
    job.guard.to(chosen)
    return chosen, size


def check_complete(counts: Counts, job: Job, folder: Folder, verb: str) -> None:
    """Raise unless the records are those of all images, each once, and at least one could be certified or attacked."""
    recorded = folder.mark_recorded(len(job.source))
    if not all(recorded):
        raise InputError(
            f"{folder.path} holds {sum(recorded)} records for {len(job.source)} images. "
            "Start the run again with --force."
        )
    if counts.errors == counts.images:
        record = next(record for record in folder.records() if "error" in record)
        raise InputError(
            f"none of the {counts.images} images can be {verb}: {record['name']} {record['error']}. "
            "Check the images and the patch."
        )


def check_images(folder: Folder, source: Source) -> None:
    """Raise unless every record is about the pixels that its image has now.

    Size and time of a file do not tell: each recorded image is decoded and its digest compared. That takes a small
    part of the network's time, and it notices a decoder that gives other pixels as well.
    """
    folder.mark_recorded(len(source))
    known = set(source.names)
    recorded_names = {record["index"]: record["name"] for record in folder.all_records()}
    gone = sorted(name for name in recorded_names.values() if name not in known) or sorted(
        name for index, name in recorded_names.items() if source.names[index] != name
    )
    if gone:
        others = f" and {len(gone) - 1:,} others" if len(gone) > 1 else ""
        raise InputError(
            f"{gone[0]}{others} of {folder.path} must be among the images; more may be added, but none removed. "
            "Give another --out, or --force to start over in that folder."
        )
    recorded = list(folder.image_digests())
    changed: list[str] = []
    images = iterate_images(source.subset([index for index, _ in recorded]))
    for (index, digest), image in zip(recorded, images, strict=True):
        if digest != (None if isinstance(image, Unreadable) else image_digest(image)):
            changed.append(source.names[index])
    if changed:
        others = f" and {len(changed) - 1:,} others have" if len(changed) > 1 else " has"
        raise InputError(
            f"{changed[0]}{others} changed since {folder.path} recorded other pixels. "
            "Give another --out, restore the old images, or give --force to start over in that folder."
        )


# -- batches -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Batch:
    """Images of one size, with their numbers in the source."""

    indices: tuple[int, ...]
    images: UInt8[Tensor, "batch 3 height width"]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of every image."""
        return self.images.shape[2], self.images.shape[3]

    def fail(self, reason: str, rows: Iterable[int] | None = None) -> list["Failure"]:
        """Return these images, by default all, as failures for one reason."""
        chosen = range(len(self.indices)) if rows is None else rows
        return [Failure(self.indices[row], reason, image_digest(self.images[row])) for row in chosen]

    def select(self, rows: Sequence[int]) -> "Batch":
        """Return some of the images."""
        return Batch(tuple(self.indices[row] for row in rows), self.images[list(rows)])


@final
@dataclass(frozen=True)
class Failure:
    """An image without an answer, why, and the digest of its pixels where it could be decoded."""

    index: int
    reason: str
    digest: str | None = None


Item = TypeVar("Item")
Work: TypeAlias = tuple[Batch, Plan] | list[Failure]


def split_into_blocks(count: int, size: int) -> list[range]:
    """Cut `count` indices into blocks of `size` neighbors; the last may be smaller."""
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def split_by_size(source: Source, blocks: Sequence[range]) -> Iterator[Batch | Failure]:
    """Yield the images of each block in batches of one size, and those that cannot be read.

    Which images share a batch depends on the source and the block alone. Networks round differently in batches of
    other sizes; so a run that is stopped, or divided among processes, still computes the same numbers.
    """
    images = iterate_images(source.subset([index for block in blocks for index in block]))
    for block in blocks:
        by_size: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for index, image in zip(block, images, strict=False):
            if isinstance(image, Unreadable):
                yield Failure(index, image.reason)
            else:
                by_size.setdefault((image.shape[1], image.shape[2]), []).append((index, image))
        for same in by_size.values():
            yield Batch(tuple(index for index, _ in same), torch.stack([image for _, image in same]))


def prefetch(items: Iterator[Item], count: int) -> Iterator[Item]:
    """Yield the same items, up to `count` of them made ahead of use by a thread of its own."""
    queue: Queue[tuple[bool, Item | BaseException | None]] = Queue(count)
    stopped = threading.Event()

    def offer(last: bool, item: Item | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                queue.put((last, item), timeout=0.1)
                return
            except Full:
                continue

    def fill() -> None:
        try:
            for item in items:
                offer(False, item)
                if stopped.is_set():
                    return
            offer(True, None)
        except BaseException as error:  # handed over, and raised where the items are used
            offer(True, error)

    thread = threading.Thread(target=fill, name="batches", daemon=True)
    thread.start()
    try:
        while True:
            try:
                last, item = queue.get(timeout=0.1)  # not for ever: an interrupt must get through
            except Empty:
                continue
            if isinstance(item, BaseException):
                raise item
            if last:
                return
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()


# -- the engine --------------------------------------------------------------------------------------------------------


@final
@dataclass(eq=False)
class Engine(Generic[Counted]):
    """One process's part of a run; `verb` says what is done with the images."""

    job: Job
    counts: Counted
    device: torch.device
    batch_size: int
    verb: str = "certified"
    recorded: bytearray = field(default_factory=bytearray)  # per image, whether it was recorded before this start
    began: float = field(default_factory=time.perf_counter)
    recorded_before: int = 0
    network_seconds: float = 0.0  # of all workers together
    lock: threading.Lock = field(default_factory=threading.Lock)  # of records and counts
    pending: deque[Future[None]] = field(default_factory=deque)
    plans: OrderedDict[tuple[int, int], Plan | str] = field(default_factory=OrderedDict)
    prepared: set[tuple[int, int]] = field(default_factory=set)

    @property
    def workers(self) -> int:
        """Batches that are worked on at once: on a CPU as many as threads are allowed, on a GPU two."""
        return torch.get_num_threads() if self.device.type == "cpu" else 2

    def seconds(self, images: int) -> Seconds:
        """Return how long this start of the run took, how much of it the network, and the rate of all processes.

        The time of the network is the mean over the workers.
        """
        total = time.perf_counter() - self.began
        new = images - self.recorded_before
        network = round(self.network_seconds / self.workers, 3)
        return Seconds(total=round(total, 3), network=network, images_per_second=new / total if new else None)

    def resume(
        self,
        folder: Folder,
        answer: Callable[[Batch, Plan], list[Record]],
        progress: Callable[[Counted], None] | None = None,
    ) -> None:
        """Record what `answer` says about every batch in which some image has no record yet.

        It is called by several threads at once.
        """
        blocks = self._find_missing_blocks(folder)
        if progress is not None:
            progress(self.counts)

        def record(work: Work, shard: Appender) -> None:
            records = [self.describe(each) for each in work] if isinstance(work, list) else answer(*work)
            new = [each for each in records if not self.recorded[each["index"]]]
            with self.lock:
                shard.append(new)
                for each in new:
                    self.counts.add(each)
                if progress is not None:
                    progress(self.counts)

        with folder.open_shard(runtime.rank()) as shard, worker_pool(self.workers) as pool:
            for work in self.plan_batches(blocks):
                self.pending.append(pool.submit(record, work, shard))
                self._wait_for_workers(self.workers + 1)
            self._wait_for_workers(0)

    def _find_missing_blocks(self, folder: Folder) -> list[range]:
        """Count the records that are there, and return the blocks of this process in which some are missing."""
        self.recorded = folder.mark_recorded(len(self.job.source))
        for record in folder.records():
            self.recorded_before += 1
            self.counts.add(record)
        blocks = split_into_blocks(len(self.recorded), self.batch_size)[runtime.rank() :: runtime.world_size()]
        return [block for block in blocks if not all(self.recorded[block.start : block.stop])]

    def plan_batches(self, blocks: Sequence[range]) -> Iterator[Work]:
        """Yield every batch with its plan, and images about which nothing can be said."""
        for batch in prefetch(split_by_size(self.job.source, blocks), PREFETCH):
            if isinstance(batch, Failure):
                yield [batch]
                continue
            plan = self.plan(batch.size)
            yield batch.fail(plan) if isinstance(plan, str) else (batch, plan)

    def plan(self, size: tuple[int, int]) -> Plan | str:
        """Return what is computed for images of this size, or why nothing is; called by one thread."""
        if size not in self.plans:
            self.plans[size] = self._plan(size)
            if len(self.plans) > PLANS:
                self.plans.popitem(last=False)
        return self.plans[size]

    def _plan(self, size: tuple[int, int]) -> Plan | str:
        guard = self.job.guard
        try:
            for patch in self.job.patches:
                patch.at(*size)
            network_size = guard.network_size(*size)
            if network_size not in self.prepared:
                self._wait_for_workers(0)  # a network must not be traced while it is at work
                self.prepared.add(network_size)
            guard.prepare(*size)
            return self.job.plan(size)
        except InputError as error:
            return f"cannot be {self.verb}: {error_text(error)}"

    def _wait_for_workers(self, most: int) -> None:
        """Wait until no more than `most` batches are at work; raise what went wrong in one that is done."""
        while len(self.pending) > most:
            self.pending.popleft().result()

    # -- for the workers -----------------------------------------------------------------------------------------------

    def load(self, images: UInt8[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch 3 height width"]:
        """Return 8-bit pixels as floats in [0, 1] on the device."""
        return images.to(self.device, non_blocking=True).float() / 255

    def examine(self, batch: Batch, plan: Plan) -> Examination:
        """Compute everything that the plan wants about a batch."""
        examination = self.job.guard.examine(self.load(batch.images), plan)
        self.add_network_seconds(examination.seconds)
        return examination

    def add_network_seconds(self, seconds: float) -> None:
        """Count time that the network took."""
        with self.lock:
            self.network_seconds += seconds

    def identify(self, index: int) -> Record:
        """Return what every record begins with."""
        source = self.job.source
        target = None if source.targets is None else source.targets[index]
        return {"index": index, "name": source.names[index], "target": target}

    def describe(self, failure: Failure) -> Record:
        """Return the record of an image about which nothing can be said."""
        return {**self.identify(failure.index), "image": failure.digest, "error": failure.reason}

    def describe_failures(self, batch: Batch, examination: Examination) -> list[Record]:
        """Return the records of the images of a batch that have no answer."""
        return [
            self.describe(failure)
            for row, reason in examination.failures.items()
            for failure in batch.fail(reason, [row])
        ]


def error_text(error: InputError) -> str:
    """Return an error as a part of a sentence."""
    return str(error).rstrip(".")


@contextmanager
def worker_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Yield worker threads that do not divide their work further.

    A thread per batch beats threads that share one: they never wait for each other. And a sum that is never divided
    does not depend on the number of processors. Whoever stops early waits for what is at work, not for what is queued.
    """
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "worker", torch.set_num_threads, (1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)  # where all went well, nothing is queued any more
        torch.set_num_threads(threads)  # what threads begin with that are started later
