"""`Loop`: all images of a job in batches through worker threads, recorded as they are done; it goes on after a stop.

    decode (threads)  -->  batches of one size  -->  what the run does with a batch (workers: one batch each at a time)

Under torchrun every process takes each `world_size`-th block of images and writes a shard of its own; the first one
sums up. A block is always computed whole, so that the numbers do not depend on where a run was stopped.
"""

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from patchguard import runtime
from patchguard.defenses.evidence import EvidenceMap
from patchguard.errors import InputError
from patchguard.runs.batches import Batch, Failure, ahead, blocks_of, grouped
from patchguard.runs.certificate_folder import CertificateFolder
from patchguard.runs.job import Job, as_floats
from patchguard.runs.plan import Plan
from patchguard.runs.records import Folder, Record
from patchguard.runs.resume import mark_recorded
from patchguard.runs.summary import Run, Schema, Seconds
from patchguard.storage.certificate_file import image_digest

BATCH_SIZE = {"cpu": 16, "cuda": 512}
PLANS = 256  # sizes of images whose plans are kept
AHEAD = 3  # batches that are decoded before they are needed
NOT_FINITE = "makes the network give NaN or infinity"


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
    """A finished run: its summary, and whether it had been finished before."""

    summary: Schema
    before: bool


@contextmanager
def entered(
    folder: Folder,
    run: Run,
    check: Callable[[], None],
    *,
    others: Sequence[CertificateFolder] = (),
    mix_versions: bool = False,
) -> Iterator[Callable[[], None]]:
    """Hold the folder of a run, together with the other processes of torchrun; yield a barrier for them.

    The first process writes run.json, or checks that the run which is there is this one, before the others come in.
    `check` looks at what is in the folder, and `others` are held with it.
    """
    first = runtime.rank() == 0
    with runtime.barrier_group() as barrier, ExitStack() as stack:
        if not first:
            barrier()  # until the first process has made the folder and holds it
        locks = [stack.enter_context(folder.locked(first=first))]
        locks += [stack.enter_context(each.locked(first=first)) for each in others]
        if first:
            folder.begin(run, check, mix_versions=mix_versions)
            for lock in locks:
                lock.share()
            barrier()
        yield barrier


def placed(job: Job, device: str, batch_size: int | None) -> tuple[torch.device, int]:
    """Move the model to the device, and return it with the number of images at once."""
    place = _device(device)
    at_once = BATCH_SIZE.get(place.type, BATCH_SIZE["cuda"]) if batch_size is None else batch_size
    if at_once < 1:
        raise InputError(f"`--batch-size` must be a whole number, 1 or more; got {batch_size}.")
    job.guard.model.to(place)
    return place, at_once


def _device(name: str) -> torch.device:
    device = runtime.resolve_device(name)
    if device.type == "cuda" and device.index is None and runtime.world_size() > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return device


def check_complete(tally: Counts, job: Job, folder: Folder, done: str) -> None:
    """Raise unless the summed records are those of all images, each once, and at least one could be `done`."""
    recorded = mark_recorded(folder, len(job.source))
    if not all(recorded):
        raise InputError(
            f"{folder.path} holds {sum(recorded)} records for {len(job.source)} images. "
            "Remove the folder and start the run anew."
        )
    if tally.errors == tally.images:
        reason = next(record for record in folder.records() if "error" in record)
        raise InputError(
            f"none of the {tally.images} images can be {done}: {reason['name']} {reason['error']}. "
            "Check the images and the patch."
        )


@final
@dataclass(eq=False)
class Loop(Generic[Counted]):
    """The share of one process in a run; `verb` says what is done with its images."""

    job: Job
    tally: Counted
    device: torch.device
    batch_size: int
    verb: str = "certified"
    plans: OrderedDict[tuple[int, int], Plan] = field(default_factory=OrderedDict)
    done: bytearray = field(default_factory=bytearray)  # per image, whether it was recorded before
    began: float = field(default_factory=time.perf_counter)
    before: int = 0
    network: float = 0.0  # seconds, of all workers together
    traced: set[tuple[int, int]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)  # of records and counts
    making: threading.Lock = field(default_factory=threading.Lock)  # of plans and what else is made once per size

    @property
    def workers(self) -> int:
        """Batches that are worked on at once: on a CPU as many as threads are allowed, on a GPU two."""
        return torch.get_num_threads() if self.device.type == "cpu" else 2

    def seconds(self, images: int) -> Seconds:
        """Return how long this start of the run took, how much of it the network, and the rate of all processes.

        The time of the network is the mean over the workers.
        """
        total = time.perf_counter() - self.began
        new = images - self.before
        rate = new / total if new else None
        network = round(self.network / self.workers, 3)
        return Seconds(total=round(total, 3), network=network, images_per_second=rate)

    def go_on(
        self, folder: Folder, answered: Callable[[Batch], list[Record]], progress: Callable[[Counted], None] | None
    ) -> None:
        """Record what `answered` says of every batch in which some image is not recorded yet.

        It is called by several threads at once.
        """
        blocks = self._left(folder)
        if progress is not None:
            progress(self.tally)
        waiting: deque[Future[None]] = deque()
        with folder.appending(runtime.rank()) as records, pool(self.workers) as workers:

            def append(computed: list[Record]) -> None:
                made = [record for record in computed if not self.done[record["index"]]]
                with self.lock:
                    records.append(made)
                    for record in made:
                        self.tally.add(record)
                    if progress is not None:
                        progress(self.tally)

            for batch in ahead(grouped(self.job.source, blocks), AHEAD):
                if isinstance(batch, Batch) and self._new(batch.size):
                    _settle(waiting, 0)  # a network must not be traced while it is at work
                failures = [batch] if isinstance(batch, Failure) else self._refused(batch)
                if failures:
                    waiting.append(workers.submit(append, [self.failure(each) for each in failures]))
                elif isinstance(batch, Batch):
                    waiting.append(workers.submit(lambda each: append(answered(each)), batch))
                _settle(waiting, self.workers + 1)
            _settle(waiting, 0)

    def _new(self, size: tuple[int, int]) -> bool:
        """Whether the network has not yet been traced for images of this size."""
        with suppress(InputError):  # which `refusal` will meet again
            seen = self.job.guard.preprocess.output_size(*size)
            if seen not in self.traced:
                self.traced.add(seen)
                return True
        return False

    def _left(self, folder: Folder) -> list[range]:
        """Count the records that are there, and return the blocks of this process in which some are missing."""
        self.done = done = mark_recorded(folder, len(self.job.source))
        for record in folder.records():
            self.before += 1
            self.tally.add(record)
        blocks = blocks_of(len(done), self.batch_size)[runtime.rank() :: runtime.world_size()]
        return [block for block in blocks if not all(done[block.start : block.stop])]

    def _refused(self, batch: Batch) -> list[Failure]:
        reason = self.refusal(batch.size)
        return [] if reason is None else failures_of(batch, reason, range(len(batch.places)))

    def refusal(self, size: tuple[int, int]) -> str | None:
        """Return why nothing can be done with images of this size, if so, before the network sees them."""
        try:
            for written in self.job.patches:
                written.at(*size)
            self.job.guard.field(*size)
        except InputError as error:
            return self.because(error)
        return None

    # -- in the workers ------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Float[Tensor, "batch classes rows columns"]:
        """Run the network."""
        began = time.perf_counter()
        images = batch.images.to(self.device, non_blocking=True)
        local_logits = self.job.guard.local_logits(as_floats(images))
        self.spent(began)
        return local_logits

    def spent(self, began: float) -> None:
        """Count the time since `began` as time of the network, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with self.lock:
            self.network += time.perf_counter() - began

    def plan(self, size: tuple[int, int]) -> Plan:
        """Return what is computed for images of this size."""
        with self.making:
            plan: Plan = kept(self.plans, size, partial(self.job.plan, size))
        return plan

    def named(self, place: int) -> Record:
        """Return what every record begins with."""
        source = self.job.source
        target = None if source.targets is None else source.targets[place]
        return {"index": place, "name": source.names[place], "target": target}

    def failure(self, failure: Failure) -> Record:
        """Return the record of an image with which nothing can be done."""
        return {**self.named(failure.place), "image": failure.digest, "error": failure.reason}

    def failures(self, batch: Batch, error: InputError) -> list[Record]:
        """Return the records of a batch with which nothing can be done."""
        return [self.failure(each) for each in failures_of(batch, self.because(error), range(len(batch.places)))]

    def sorted_out(self, batch: Batch, evidence: EvidenceMap) -> tuple[list[Record], list[int]]:
        """Return the records of images whose evidence is not finite, and the rows of the others."""
        finite = evidence.finite.tolist()
        bad = [row for row, good in enumerate(finite) if not good]
        made = [self.failure(each) for each in failures_of(batch, NOT_FINITE, bad)]
        return made, [row for row, good in enumerate(finite) if good]

    def because(self, error: InputError) -> str:
        """Return an error as the reason in a record."""
        return f"cannot be {self.verb}: {error}".rstrip(".")


def failures_of(batch: Batch, reason: str, rows: Iterable[int]) -> list[Failure]:
    """Return these images of a batch as failures for one reason."""
    return [Failure(batch.places[row], reason, image_digest(batch.images[row])) for row in rows]


@contextmanager
def pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Yield worker threads that do not divide their work further.

    A thread per batch beats threads that share one: they never wait for each other. And a sum that is never divided
    does not depend on the number of processors. Whoever stops early waits for what is at work, not for what is queued.
    """
    threads = torch.get_num_threads()
    made = ThreadPoolExecutor(workers, "worker", torch.set_num_threads, (1,))
    try:
        yield made
    finally:
        made.shutdown(cancel_futures=True)  # where all went well, nothing is queued any more
        torch.set_num_threads(threads)  # what threads begin with that are started later


def _settle(waiting: deque[Future[None]], most: int) -> None:
    """Wait until no more than so many batches are at work; raise what went wrong in one that is done."""
    while len(waiting) > most:
        waiting.popleft().result()


def kept(store: OrderedDict[Any, Any], key: object, make: Callable[[], Any]) -> Any:
    """Return what is stored under a key, made where it is missing; the oldest entries are forgotten."""
    if key not in store:
        store[key] = make()
        if len(store) > PLANS:
            store.popitem(last=False)
    return store[key]
