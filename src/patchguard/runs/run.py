"""`certify`: all images of a job, recorded as they are done; stopped and started again, it goes on where it was.

How images become batches, and batches records, is `Loop`. Here is what certifying does with a batch.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from patchguard import __version__, runtime
from patchguard.data.decode import Unreadable
from patchguard.errors import InputError
from patchguard.guard import Examination
from patchguard.guard import Task as AnyTask
from patchguard.runs import gallery
from patchguard.runs.batches import Batch, Failure, ahead, blocks_of, grouped
from patchguard.runs.certificate_folder import CertificateFolder, certificate_name
from patchguard.runs.job import Job
from patchguard.runs.loop import AHEAD, Loop, Outcome, check_complete, entered, failures_of, kept, placed, pool
from patchguard.runs.metrics import CertifyTally
from patchguard.runs.plan import Plan, Proofs, answers, entries_of
from patchguard.runs.records import Folder, Record
from patchguard.runs.resume import check_images
from patchguard.runs.summary import CertifySettings, CertifySummary, Run, convert, read_run, to_plain
from patchguard.storage.certificate_file import Packer, image_digest

Progress = Callable[[CertifyTally], None]


def certify(
    job: Job,
    path: Path,
    *,
    device: str = "auto",
    batch_size: int | None = None,
    progress: Progress | None = None,
    mix_versions: bool = False,
) -> Outcome[CertifySummary] | None:
    """Certify every image of the job that the folder has no record of, and sum up.

    `mix_versions` goes on with a run that other versions of patchguard or torch began. Returns None in every process
    of a torchrun but the first.
    """
    place, at_once = placed(job, device, batch_size)
    folder, first = Folder(path), runtime.rank() == 0
    settings = job.settings()
    files = None if job.certificates is None else CertificateFolder(job.certificates)

    def check() -> None:
        check_images(folder, job.source)
        if files is not None:
            files.check(folder, job)

    others = [] if files is None else [files]
    with entered(folder, _stamp(job, settings), check, others=others, mix_versions=mix_versions) as barrier:
        finished = folder.summary(CertifySummary)
        if finished is not None:
            return Outcome(finished, before=True) if first else None
        work = _Work(job, Loop(job, CertifyTally(settings), place, at_once))
        work.loop.go_on(folder, work.answered, progress)
        barrier()
        return Outcome(_finish(job, folder, work), before=False) if first else None


def predict(job: Job, *, device: str = "auto", batch_size: int | None = None) -> Iterator[Record]:
    """Yield name, label and proofs of every image as they are done; nothing is written."""
    loop = Loop(job, CertifyTally(job.settings()), *placed(job, device, batch_size))
    work = _Work(job, loop)
    for batch in ahead(grouped(job.source, blocks_of(len(job.source), loop.batch_size)), AHEAD):
        if isinstance(batch, Failure):
            yield loop.failure(batch)
            continue
        reason = loop.refusal(batch.size)
        if reason is not None:
            yield from (loop.failure(each) for each in failures_of(batch, reason, range(len(batch.places))))
            continue
        yield from work.labelled(batch, loop.forward(batch))


def _stamp(job: Job, settings: CertifySettings) -> Run:
    patches = {
        written.key: {"text": written.text, "percent": None if written.share is None else float(written.share * 100)}
        for written in job.patches
    }
    return Run(
        kind="certify",
        model_file=job.model_file,
        settings=to_plain(settings),
        patches=patches,
        environment=runtime.describe_environment(),
        version=__version__,
    )


def _finish(job: Job, folder: Folder, work: "_Work") -> CertifySummary:
    """Sum up the records of all shards. The summary comes last: where it is, everything else is."""
    run = read_run(folder.path)
    settings = convert(run.settings, CertifySettings, folder.path / "run.json")
    tally = CertifyTally(settings)
    for record in folder.records():
        tally.add(record)
    check_complete(tally, job, folder, "certified")
    chosen = gallery.choose(folder.records(), settings)
    for _, record in chosen:
        work.loop.refusal((record["size"][0], record["size"][1]))  # traces the network where that is still to be done
    with pool(work.loop.workers) as workers:
        gallery.save(folder, chosen, list(workers.map(work.view, [record for _, record in chosen])))
    summary = tally.summarize(seconds=work.loop.seconds(tally.images), environment=run.environment)
    folder.write("summary.json", summary)
    return summary


@final
@dataclass(eq=False)
class _Work:
    """What certifying does with a batch; called by several threads at once."""

    job: Job
    loop: Loop[CertifyTally]
    packers: OrderedDict[tuple[tuple[int, int], str], Packer] = field(default_factory=OrderedDict)

    @torch.no_grad()
    def answered(self, batch: Batch) -> list[Record]:
        """Return the records of a batch; its certificate files are written before."""
        local_logits = self.loop.forward(batch)
        try:
            plan = self.loop.plan(batch.size)
        except InputError as error:
            return self.loop.failures(batch, error)
        evidence = self.job.guard.evidence(local_logits)
        made, rows = self.loop.sorted_out(batch, evidence)
        if rows:
            if made:
                chosen = torch.tensor(rows, device=local_logits.device)
                evidence, local_logits = evidence[chosen], local_logits[chosen]
            found, proofs = answers(plan, local_logits, evidence)
            if self.job.certificates is not None:
                self._certificates(plan, proofs, batch, rows, found)
            for row, answer in zip(rows, found, strict=True):
                digest = image_digest(batch.images[row])
                named = self.loop.named(batch.places[row])
                made.append({**named, "size": list(batch.size), "image": digest, **answer})
        return made

    @torch.no_grad()
    def labelled(self, batch: Batch, local_logits: Tensor) -> list[Record]:
        """Return the defended labels and the proofs that the job asks for, and nothing else."""
        try:
            plan = self.loop.plan(batch.size)
            proofs = Proofs(plan, self.job.guard.evidence(local_logits))
            entries = {task.written.key: entries_of(plan, task, proofs) for task in plan.tasks}
        except InputError as error:
            return self.loop.failures(batch, error)
        made = []
        for row, label in enumerate(proofs.label(plan.rule).tolist()):
            patches = {key: entry[row] for key, entry in entries.items()}
            named = self.loop.named(batch.places[row])
            made.append({**named, "size": list(batch.size), "label": label, "patches": patches})
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
        evidence = self.job.guard.evidence(self.loop.forward(batch))
        return gallery.view(image, record, evidence, self.loop.plan(batch.size))

    def _certificates(self, plan: Plan, proofs: Proofs, batch: Batch, rows: list[int], answers: list[Record]) -> None:
        """Write the files before the records: a record says that its files are there, and their digests."""
        target = CertificateFolder(self.job.certificates or Path())
        for task in plan.tasks:
            make = partial(Packer, AnyTask(task.patch, task.guard, "own"), *plan.size)
            with self.loop.making:
                packer = kept(self.packers, (plan.size, task.written.key), make)
            proof = proofs.certificate(task.guard.defense, task.windows)
            for number, row in enumerate(rows):
                if self.loop.done[batch.places[row]]:
                    continue  # its files are there, and checked
                found = Examination(rows=tuple(rows), certificates=(proof,), details=proofs.evidence)
                data = packer.pack(found, 0, number, image_digest(batch.images[row]))
                digest = target.write(certificate_name(batch.places[row], task.written.key), data)
                answers[number]["patches"][task.written.key]["certificate"] = digest
