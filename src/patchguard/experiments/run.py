"""`certify`: all images of a job, recorded as they are done; stopped and started again, it goes on where it was.

    decode (threads)  -->  batches of one size  -->  network, proofs, records (workers: one batch each at a time)

Under torchrun every process takes each `world_size`-th block of images and writes a shard of its own; the first one
sums up. A block is always computed whole, so that the numbers do not depend on where a run was stopped.
"""

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from patchguard import __version__, runtime
from patchguard.certificate_file import Packer, image_digest
from patchguard.data.decode import Unreadable
from patchguard.errors import InputError
from patchguard.experiments import gallery
from patchguard.experiments.batches import Batch, Failure, ahead, blocks_of, grouped
from patchguard.experiments.job import Job, as_floats
from patchguard.experiments.metrics import Tally, summarise
from patchguard.experiments.plan import Plan, Proofs, answers, entries_of
from patchguard.experiments.records import FORMAT, Appender, Folder, Record

BATCH_SIZE = {"cpu": 16, "cuda": 512}
PLANS = 256  # sizes of images whose plans are kept
AHEAD = 3  # batches that are decoded before they are needed

Progress = Callable[[Tally], None]


@final
@dataclass(frozen=True)
class Outcome:
    """A finished run: its summary, and whether it had been finished before."""

    summary: dict[str, Any]
    before: bool


def certify(
    job: Job, path: Path, *, device: str = "auto", batch_size: int | None = None, progress: Progress | None = None
) -> Outcome | None:
    """Certify every image of the job that the folder has no record of, and sum up.

    Returns None in every process of a torchrun but the first.
    """
    place, at_once = _placed(job, device, batch_size)
    folder, first = Folder(path), runtime.rank() == 0
    settings = job.settings()
    with runtime.barrier_group() as barrier:
        if not first:
            barrier()  # until the first process has made the folder and holds it
        with folder.locked(first=first) as lock:
            if first:
                folder.begin(_stamp(job, settings))
                lock.share()
                barrier()
            finished = folder.summary()
            if finished is not None:
                _check_written(job, folder)
                return Outcome(finished, before=True) if first else None
            work = _Work(job, Tally(settings), place, at_once)
            work.go_on(folder, progress)
            barrier()
            return Outcome(_finish(job, folder, settings, work), before=False) if first else None


def _check_written(job: Job, folder: Folder) -> None:
    """Raise where certificate files are asked for that a finished run has put elsewhere, or that are gone."""
    if job.certificates is None:
        return
    keys = [written.key for written in job.patches]
    for record in folder.records():
        for name in [] if "error" in record else [certificate_name(record["index"], key) for key in keys]:
            if not (job.certificates / name).exists():
                raise InputError(
                    f"{folder.path} is finished, but {job.certificates} lacks {name}. "
                    "Give the folder that its certificates are in, or another --out to certify anew."
                )


def predict(job: Job, *, device: str = "auto", batch_size: int | None = None) -> Iterator[Record]:
    """Yield name, label and proofs of every image as they are done; nothing is written."""
    work = _Work(job, Tally(job.settings()), *_placed(job, device, batch_size))
    for batch in ahead(grouped(job.source, blocks_of(len(job.source), work.batch_size)), AHEAD):
        if isinstance(batch, Failure):
            yield work.failure(batch)
            continue
        reason = work.refusal(batch.size)
        if reason is not None:
            yield from (work.failure(Failure(place, reason)) for place in batch.places)
            continue
        yield from work.labelled(batch, work.forward(batch))


def _placed(job: Job, device: str, batch_size: int | None) -> tuple[torch.device, int]:
    """Move the model to the device, and return it with the number of images at once."""
    place = _device(device)
    at_once = BATCH_SIZE.get(place.type, BATCH_SIZE["cuda"]) if batch_size is None else batch_size
    if at_once < 1:
        raise InputError(f"`--batch-size` must be a whole number, 1 or more; got {batch_size}.")
    job.guard.model.to(place)
    return place, at_once


def _device(name: str) -> torch.device:
    device = runtime.choose_device(name)
    if device.type == "cuda" and device.index is None and runtime.world_size() > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return device


def _stamp(job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    patches = {
        written.key: {"text": written.text, "percent": None if written.share is None else float(written.share * 100)}
        for written in job.patches
    }
    return {
        "kind": "certify",
        "settings": {**settings, "shards": runtime.world_size()},
        "patches": patches,
        "environment": runtime.environment(),
        "version": __version__,
    }


def _finish(job: Job, folder: Folder, settings: dict[str, Any], work: "_Work") -> dict[str, Any]:
    """Sum up the records of all shards. The summary comes last: where it is, everything else is."""
    found = summarise(folder.records(), settings)
    if found["images"] != len(job.source):
        raise InputError(
            f"{folder.path} holds {found['images']} records for {len(job.source)} images. "
            "Remove the folder and start the run anew."
        )
    if found["errors"] == found["images"]:
        reason = next(record for record in folder.records() if "error" in record)
        raise InputError(
            f"none of the {found['images']} images can be certified: {reason['name']} {reason['error']}. "
            "Check the images and the patch."
        )
    chosen = gallery.choose(folder.records(), settings)
    for _, record in chosen:
        work.refusal((record["size"][0], record["size"][1]))  # traces the network where that is still to be done
    with _pool(work.workers) as pool:
        gallery.save(folder, chosen, list(pool.map(work.view, [record for _, record in chosen])))
    stamp = folder.run() or {}
    masks = {key: entry["masks"] for key, entry in found["patches"].items()}
    summary = {
        "format": FORMAT,
        **found,
        "seconds": work.seconds(found["images"]),
        "settings": {**stamp["settings"], "masks": masks},
        "environment": stamp["environment"],
    }
    folder.write("summary.json", summary)
    return summary


@final
@dataclass(eq=False)
class _Work:
    """The share of one process in a run."""

    job: Job
    tally: Tally
    device: torch.device
    batch_size: int
    plans: OrderedDict[tuple[int, int], Plan] = field(default_factory=OrderedDict)
    packers: OrderedDict[tuple[tuple[int, int], str], Packer] = field(default_factory=OrderedDict)
    done: bytearray = field(default_factory=bytearray)  # per image, whether it was recorded before
    began: float = field(default_factory=time.perf_counter)
    before: int = 0
    network: float = 0.0  # seconds, of all workers together
    traced: set[tuple[int, int]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)  # of records and counts
    making: threading.Lock = field(default_factory=threading.Lock)  # of plans and packers

    @property
    def workers(self) -> int:
        """Batches that are worked on at once: on a CPU as many as threads are allowed, on a GPU two."""
        return torch.get_num_threads() if self.device.type == "cpu" else 2

    def seconds(self, images: int) -> dict[str, float | None]:
        """Return how long this start of the run took, how much of it the network, and the rate of all processes.

        The time of the network is the mean over the workers.
        """
        total = time.perf_counter() - self.began
        new = images - self.before
        rate = new / total if new else None
        return {"total": round(total, 3), "network": round(self.network / self.workers, 3), "images_per_second": rate}

    def go_on(self, folder: Folder, progress: Progress | None) -> None:
        """Certify what is not recorded yet."""
        blocks = self._left(folder)
        if progress is not None:
            progress(self.tally)
        waiting: deque[Future[None]] = deque()
        with folder.appending(runtime.rank()) as records, _pool(self.workers) as pool:
            for batch in ahead(grouped(self.job.source, blocks), AHEAD):
                if isinstance(batch, Batch) and self._new(batch.size):
                    _settle(waiting, 0)  # a network must not be traced while it is at work
                failures = [batch] if isinstance(batch, Failure) else self._refused(batch)
                if failures:
                    failed = [self.failure(each) for each in failures]
                    waiting.append(pool.submit(self._append, failed, records, progress))
                elif isinstance(batch, Batch):
                    waiting.append(pool.submit(self._record, batch, records, progress))
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
        self.done = done = bytearray(len(self.job.source))
        for record in folder.records():
            if record["index"] >= len(done) or done[record["index"]]:
                raise InputError(
                    f"image {record['index']} should not be in {folder.path}, or is there twice. "
                    "Remove the folder and start the run anew."
                )
            done[record["index"]] = 1
            self.before += 1
            self.tally.add(record)
        blocks = blocks_of(len(done), self.batch_size)[runtime.rank() :: runtime.world_size()]
        return [block for block in blocks if not all(done[block.start : block.stop])]

    def _refused(self, batch: Batch) -> list[Failure]:
        reason = self.refusal(batch.size)
        return [] if reason is None else [Failure(place, reason) for place in batch.places]

    def refusal(self, size: tuple[int, int]) -> str | None:
        """Return why images of this size cannot be certified, if so, before the network sees them."""
        try:
            for written in self.job.patches:
                written.at(*size)
            self.job.guard.field(*size)
        except InputError as error:
            return _because(error)
        return None

    def forward(self, batch: Batch) -> Float[Tensor, "batch classes rows columns"]:
        """Run the network."""
        began = time.perf_counter()
        images = batch.images.to(self.device, non_blocking=True)
        local_logits = self.job.guard.local_logits(as_floats(images))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with self.lock:
            self.network += time.perf_counter() - began
        return local_logits

    # -- in the workers ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _record(self, batch: Batch, records: Appender, progress: Progress | None) -> None:
        local_logits = self.forward(batch)
        try:
            plan = self.plan(batch.size)
        except InputError as error:
            self._append([self.failure(Failure(place, _because(error))) for place in batch.places], records, progress)
            return
        evidence = self.job.guard.evidence(local_logits)
        finite = evidence.finite.tolist()
        made = [
            self.failure(Failure(place, "makes the network give NaN or infinity"))
            for place, good in zip(batch.places, finite, strict=True)
            if not good
        ]
        rows = [row for row, good in enumerate(finite) if good]
        if rows:
            kept = torch.tensor(rows, device=local_logits.device)
            if len(rows) < len(finite):
                evidence, local_logits = evidence[kept], local_logits[kept]
            found, proofs = answers(plan, local_logits, evidence)
            if self.job.certificates is not None:
                self._certificates(plan, proofs, batch, rows)
            for row, answer in zip(rows, found, strict=True):
                digest = image_digest(batch.images[row])
                made.append({**self._named(batch.places[row]), "size": list(batch.size), "image": digest, **answer})
        self._append(made, records, progress)

    @torch.no_grad()
    def labelled(self, batch: Batch, local_logits: Tensor) -> list[Record]:
        """Return the defended labels and the proofs that the job asks for, and nothing else."""
        try:
            plan = self.plan(batch.size)
            proofs = Proofs(plan, self.job.guard.evidence(local_logits))
            entries = {task.written.key: entries_of(plan, task, proofs) for task in plan.tasks}
        except InputError as error:
            return [self.failure(Failure(place, _because(error))) for place in batch.places]
        made = []
        for row, label in enumerate(proofs.label(plan.rule).tolist()):
            patches = {key: entry[row] for key, entry in entries.items()}
            made.append(
                {**self._named(batch.places[row]), "size": list(batch.size), "label": label, "patches": patches}
            )
        return made

    @torch.no_grad()
    def view(self, record: Record) -> gallery.View | None:
        """Return what the gallery shows of a recorded image; None if its file has changed or gone since."""
        try:
            image = self.job.source.read(record["index"])
        except Unreadable:
            return None
        if image_digest(image) != record["image"]:
            return None
        batch = Batch((record["index"],), image[None])
        return gallery.view(image, record, self.job.guard.evidence(self.forward(batch)), self.plan(batch.size))

    def _append(self, computed: list[Record], records: Appender, progress: Progress | None) -> None:
        made = [record for record in computed if not self.done[record["index"]]]
        with self.lock:
            records.append(made)
            for record in made:
                self.tally.add(record)
            if progress is not None:
                progress(self.tally)

    def plan(self, size: tuple[int, int]) -> Plan:
        """Return what is computed for images of this size."""
        with self.making:
            plan: Plan = _kept(self.plans, size, partial(self.job.plan, size))
        return plan

    def _certificates(self, plan: Plan, proofs: Proofs, batch: Batch, rows: list[int]) -> None:
        """Write the files before the records: a record says that its files are there."""
        target = Folder(self.job.certificates or Path())
        for task in plan.tasks:
            make = partial(Packer, task.guard, task.patch, *plan.size)
            with self.making:
                packer = _kept(self.packers, (plan.size, task.written.key), make)
            proof = proofs.certificate(task.guard.defense, task.windows)
            for number, row in enumerate(rows):
                data = packer.pack(proofs.evidence, proof, number, image_digest(batch.images[row]))
                target.write_bytes(certificate_name(batch.places[row], task.written.key), data, durable=False)

    def _named(self, place: int) -> Record:
        source = self.job.source
        target = None if source.targets is None else source.targets[place]
        return {"index": place, "name": source.names[place], "target": target}

    def failure(self, failure: Failure) -> Record:
        """Return the record of an image that cannot be certified."""
        return {**self._named(failure.place), "error": failure.reason}


@contextmanager
def _pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Yield worker threads that do not divide their work further.

    A thread per batch beats threads that share one: they never wait for each other. And a sum that is never divided
    does not depend on the number of processors.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, "worker", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)  # what threads begin with that are started later


def _settle(waiting: deque[Future[None]], most: int) -> None:
    """Wait until no more than so many batches are at work; raise what went wrong in one that is done."""
    while len(waiting) > most:
        waiting.popleft().result()


def _because(error: InputError) -> str:
    return f"cannot be certified: {error}".rstrip(".")


def certificate_name(index: int, key: str) -> str:
    """Return the name of the certificate file of one image and patch."""
    return f"{index:06d}-{key.replace('%', 'percent')}.pgc"


def _kept(store: OrderedDict[Any, Any], key: object, make: Callable[[], Any]) -> Any:
    """Return what is stored under a key, made where it is missing; the oldest entries are forgotten."""
    if key not in store:
        store[key] = make()
        if len(store) > PLANS:
            store.popitem(last=False)
    return store[key]
