"""`certify`: prove the labels of all images of a job, and record them; `predict`: the same without a folder."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import final

from patchguard import __version__, runtime
from patchguard.data.decode import Unreadable
from patchguard.guard import AnyCertificate, Examination, Plan, Task
from patchguard.runs import gallery
from patchguard.runs.certificate_folder import CertificateFolder, name_certificate
from patchguard.runs.engine import (
    PLANS,
    Batch,
    Engine,
    Outcome,
    check_complete,
    check_images,
    open_run,
    resolve_device,
    split_into_blocks,
    worker_pool,
)
from patchguard.runs.job import Job, WrittenPatch
from patchguard.runs.metrics import CertifyTally
from patchguard.runs.records import Folder, Record
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
    force: bool = False,
    command: tuple[str, ...] = (),
) -> Outcome[CertifySummary] | None:
    """Certify every image of the job that has no record in the folder, and sum up.

    A run that is there is extended: recorded images keep their numbers and proofs, and what is new is computed. `force`
    removes it and starts over. `mix_versions` resumes a run that other versions of patchguard or torch began. `command`
    is what a user types to repeat the run, without its patches. Returns None in every process of a torchrun but the
    first.
    """
    folder, first = Folder(path), runtime.rank() == 0
    job = job if force else extend_run(job, folder)
    engine = Engine(job, CertifyTally(job.settings()), *resolve_device(job, device, batch_size))
    files = None if job.certificates is None else CertificateFolder(job.certificates)

    def check() -> None:
        check_images(folder, job.source)
        if files is not None:
            files.check(folder, job)

    others = [] if files is None else [files.path]
    stamp, how = _stamp(job, command), {"mix_versions": mix_versions, "force": force}
    with open_run(folder, stamp, check, others=others, extend=True, **how) as barrier:
        complete = folder.summary(CertifySummary)
        if complete is not None:
            return Outcome(complete, already_complete=True) if first else None
        older = {record["index"]: record for record in folder.outgrown_records()}
        engine.resume(folder, _Certifier(engine, files, older).answer, progress)
        barrier()
        return Outcome(_finish(engine, folder), already_complete=False) if first else None


def predict(job: Job, *, proofs: bool = True, device: str = "auto", batch_size: int | None = None) -> Iterator[Record]:
    """Yield name and label of every image as they are done, and its `proofs`; nothing is written."""
    engine = Engine(job, CertifyTally(job.settings()), *resolve_device(job, device, batch_size), "labeled")
    for work in engine.plan_batches(split_into_blocks(len(job.source), engine.batch_size)):
        if isinstance(work, list):
            yield from (engine.describe(failure) for failure in work)
            continue
        batch, plan = work
        plan = plan if proofs else replace(plan, tasks=())
        examination = engine.examine(batch, plan)
        yield from engine.describe_failures(batch, examination)
        labels = [] if examination.prediction is None else examination.prediction.label.tolist()
        patches = describe_patches(job.patches, plan, examination)
        for row, label, entries in zip(examination.rows, labels, patches, strict=True):
            yield {**engine.identify(batch.indices[row]), "size": list(batch.size), "label": label, "patches": entries}


def extend_run(job: Job, folder: Folder) -> Job:
    """Return the job with the images and patches of the run that is in the folder first, in its order.

    What it recorded then keeps its number, and only what is new is left to do. Whether the run may be extended by this
    job at all is for `Folder.begin` to say.
    """
    run = folder.run()
    if run is None or run.kind != "certify":
        return job
    settings = convert(run.settings, CertifySettings, folder.path / "run.json")
    patches = {patch.key: patch for patch in (*map(WrittenPatch.read, settings.patches), *job.patches)}
    places = {name: place for place, name in enumerate(job.source.names)}
    order: dict[int, int] = {}  # from the number of a record to the place of its image
    for record in folder.all_records():
        order[record["index"]] = places.get(record["name"], -1)
    source, free = job.source, sorted(set(places.values()) - set(order.values()), reverse=True)
    if -1 not in order.values() and all(index < len(places) for index in order) and len(places) == len(source):
        source = source.subset(order[index] if index in order else free.pop() for index in range(len(source)))
    return replace(job, source=source, patches=tuple(patches.values()), curve=settings.curve)


def _stamp(job: Job, command: tuple[str, ...]) -> Run:
    patches = {
        patch.key: {"text": patch.text, "percent": None if patch.fraction is None else float(patch.fraction * 100)}
        for patch in job.patches
    }
    return Run(
        kind="certify",
        model_file=job.model_file,
        settings=to_plain(job.settings()),
        patches=patches,
        command=(*command, *(word for patch in job.patches for word in ("--patch", patch.key))) if command else (),
        environment=runtime.describe_environment(),
        version=__version__,
    )


def _finish(engine: Engine[CertifyTally], folder: Folder) -> CertifySummary:
    """Sum up the records of all shards. The summary comes last: where it is, everything else is."""
    run = read_run(folder.path)
    settings = convert(run.settings, CertifySettings, folder.path / "run.json")
    tally = CertifyTally(settings)
    for record in folder.records():
        tally.add(record)
    check_complete(tally, engine.job, folder, "certified")
    folder.drop_outgrown()
    chosen = gallery.choose(folder.records(), settings)
    plans = [engine.plan((record["size"][0], record["size"][1])) for _, record in chosen]
    with worker_pool(engine.workers) as pool:
        gallery.save(folder, pool.map(partial(_show, engine), chosen, plans))
    summary = tally.summarize(seconds=engine.seconds(tally.images), environment=run.environment)
    folder.write("summary.json", summary)
    return summary


def _show(engine: Engine[CertifyTally], chosen: tuple[str, Record], plan: Plan | str) -> gallery.Shown | None:
    """Return what the gallery shows of a recorded image; None if its file has changed or gone since."""
    group, record = chosen
    try:
        image = engine.job.source.read(record["index"])
    except Unreadable:
        return None
    if isinstance(plan, str) or image_digest(image) != record["image"]:
        return None
    short = replace(plan, tasks=plan.tasks[:1], curve=(), largest=0)
    examination = engine.examine(Batch((record["index"],), image[None]), short)
    return gallery.show_certified(group, record, image, engine.job.guard, examination, short.tasks[0])


# -- what records say --------------------------------------------------------------------------------------------------


@final
@dataclass(eq=False)
class _Certifier:
    """Turns batches into records, and writes their certificate files; called by several threads at once."""

    engine: Engine[CertifyTally]
    files: CertificateFolder | None
    older: Mapping[int, Record]  # records that lack a patch, by the number of their image
    packers: OrderedDict[tuple[tuple[int, int], str], Packer] = field(default_factory=OrderedDict)

    def answer(self, batch: Batch, plan: Plan) -> list[Record]:
        """Return the records of a batch; its certificate files are written before."""
        engine = self.engine
        examination = engine.examine(batch, plan)
        answers = describe_examination(engine.job.patches, plan, examination)
        for row, fresh in zip(examination.rows, answers, strict=True):
            self._keep_older(fresh, batch.indices[row])
        if self.files is not None:
            self._write_certificates(self.files, batch, plan, examination, answers)
        return engine.describe_failures(batch, examination) + [
            {
                **engine.identify(batch.indices[row]),
                "size": list(batch.size),
                "image": image_digest(batch.images[row]),
                **answer,
            }
            for row, answer in zip(examination.rows, answers, strict=True)
        ]

    def _keep_older(self, answer: Record, index: int) -> None:
        """Leave in an answer what was recorded before about the same image: only patches are added."""
        if index in self.older:
            before = self.older[index]
            patches = {**answer["patches"], **before["patches"]}
            answer |= {name: before[name] for name in answer if name in before} | {"patches": patches}

    def _write_certificates(
        self, files: CertificateFolder, batch: Batch, plan: Plan, examination: Examination, answers: list[Record]
    ) -> None:
        """Write the files before the records: a record says that its files are there, and their digests."""
        for number, (patch, task) in enumerate(zip(self.engine.job.patches, plan.tasks, strict=True)):
            packer = self._packer(plan.size, patch.key, task)
            for position, row in enumerate(examination.rows):
                index = batch.indices[row]
                if self.engine.recorded[index] or patch.key in self.older.get(index, {}).get("patches", {}):
                    continue  # its file is there, and checked
                content = packer.pack(examination, number, position, image_digest(batch.images[row]))
                name = name_certificate(index, self.engine.job.source.names[index], patch.key)
                digest = files.write(name, content)
                answers[position]["patches"][patch.key] |= {"certificate": digest, "file": name}

    def _packer(self, size: tuple[int, int], key: str, task: Task) -> Packer:
        with self.engine.lock:
            if (size, key) not in self.packers:
                self.packers[size, key] = Packer(task, *size)
                if len(self.packers) > PLANS:
                    self.packers.popitem(last=False)
            return self.packers[size, key]


def describe_examination(patches: tuple[WrittenPatch, ...], plan: Plan, examination: Examination) -> list[Record]:
    """Return what records say about each image that has an answer."""
    if examination.prediction is None:
        return []
    label = examination.prediction.label.tolist()
    nothing = [None] * len(label)
    undefended = nothing if examination.undefended is None else examination.undefended.tolist()
    largest = [0] * len(label) if examination.largest is None else examination.largest.tolist()
    refitted: list[Record] = [{} for _ in label]
    for (side, _), certificate in zip(plan.curve, examination.curve, strict=True):
        pairs = zip(certificate.label.tolist(), (certificate.margin > 0).tolist(), strict=True)
        for answer, (again, certified) in zip(refitted, pairs, strict=True):
            answer[str(side)] = {"label": again, "certified": certified}
    entries = describe_patches(patches, plan, examination)
    names = ("undefended", "label", "patches", "largest", "refitted")
    rows = zip(undefended, label, entries, largest, refitted, strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def describe_patches(patches: tuple[WrittenPatch, ...], plan: Plan, examination: Examination) -> list[Record]:
    """Return, for each image that has an answer, what is proved against each patch of the plan."""
    entries: list[Record] = [{} for _ in examination.rows]
    for patch, task, certificate in zip(patches, plan.tasks, examination.certificates, strict=False):
        for entry, proof in zip(entries, describe_certificate(task, certificate, plan.size), strict=True):
            entry[patch.key] = proof
            if patch.fraction is not None:
                proof |= {"height": task.patch.height, "width": task.patch.width}
    return entries


def describe_certificate(task: Task, certificate: AnyCertificate, size: tuple[int, int]) -> Iterator[Record]:
    """Yield what records say about one patch, image by image."""
    weakest = [None] * len(certificate.label) if certificate.weakest is None else certificate.weakest.tolist()
    finite = certificate.margin.isfinite().tolist()  # an undefended sum has no margin at all
    for row, (label, margin, rival) in enumerate(
        zip(certificate.label.tolist(), certificate.margin.tolist(), certificate.rival.tolist(), strict=True)
    ):
        place = weakest[row]
        box, window = (None, None) if place is None else task.guard.locate(task.patch, *size, place)
        yield {
            "label": label,
            "margin": margin if finite[row] else None,
            "certified": margin > 0,
            "rival": rival,
            "weakest": place,
            "window": None if window is None else list(window),
            "box": None if box is None else list(box),
            "masks": task.masks,
        }
