"""`refute`: attack every image of a job, and try to break what is certified; stopped, it is resumed.

A certificate says that no patch changes the label. Here an attack tries. Whatever it finds is judged anew, from 8-bit
pixels, by the guard itself. If it ever changes a certified label, one of the two is wrong, and everything that is
needed to see it is kept in the folder `refuted`: both images, the evidence before and after, the seed, and the command.
"""

import hashlib
import io
import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from patchguard import __version__, runtime
from patchguard.attacks import Attack
from patchguard.attacks.base import is_broken
from patchguard.data.decode import Unreadable, decode
from patchguard.errors import InputError
from patchguard.guard import Examination, Plan, Prediction
from patchguard.runs import gallery
from patchguard.runs.engine import (
    Batch,
    Engine,
    Outcome,
    check_complete,
    check_images,
    open_run,
    plan_picture,
    resolve_device,
    worker_pool,
)
from patchguard.runs.gallery import Draw
from patchguard.runs.job import Job
from patchguard.runs.metrics import ATTACK_GROUPS, AttackTally, attack_group
from patchguard.runs.records import Folder, Record
from patchguard.runs.summary import FORMAT, AttackSettings, AttackSummary, Run, convert, read_run, to_plain
from patchguard.storage import atomic
from patchguard.storage.certificate_file import image_digest

EACH = 8  # pictures per group in the report

Progress = Callable[["Hunt"], None]


@final
@dataclass(frozen=True, kw_only=True)
class Trial:
    """An attack on the images of a job.

    `numbers` are the numbers from which the randomness of each image is derived, by default its place. `command` is
    what a user types to repeat the run, and `model` the word for the model in it.
    """

    job: Job
    attack: Attack
    name: str
    aim: int | None = None
    seed: int = 0
    numbers: tuple[int, ...] | None = None
    command: tuple[str, ...] = ()
    model: str = ""

    def settings(self) -> AttackSettings:
        """Return every setting, for run.json."""
        return AttackSettings(
            **self.job.shared_settings(),
            attack=self.name,
            budget=describe_budget(self.attack),
            aim=self.aim,
            seed=self.seed,
            numbers=self.numbers,
        )

    def number(self, index: int) -> int:
        """Return the number that the randomness of an image is derived from."""
        return index if self.numbers is None else self.numbers[index]

    def repeat_command(self, index: int) -> str:
        """Return the command that attacks one image again."""
        return shlex.join([*self.command, "--only", str(self.number(index))])

    def predict_command(self, file: str) -> str | None:
        """Return the command that shows the label of a saved image; None where `predict` would do otherwise."""
        if {"--defense", "--evidence", "--threshold", "--tau", "--patch-space"} & set(self.command):
            return None
        trust = ["--trust-code"] if "--trust-code" in self.command else []
        return shlex.join(["patchguard", "predict", file, "--model", self.model, *trust])


def describe_budget(attack: Attack) -> dict[str, Any]:
    """Return the settings of an attack as JSON values; a file is told by its name and what is in it."""
    budget: dict[str, Any] = {}
    for each in fields(attack):  # type: ignore[arg-type]
        value = getattr(attack, each.name)
        if each.name == "path":
            budget |= {"path": Path(value).name, "path_digest": hashlib.sha256(Path(value).read_bytes()).hexdigest()}
        elif isinstance(value, (bool, int, float, str, type(None))):
            budget[each.name] = value
        else:
            budget[each.name] = getattr(value, "__qualname__", type(value).__name__)
    return budget


@final
class Hunt:
    """The counts of an attack, and the images of which pictures are kept."""

    def __init__(self, settings: AttackSettings) -> None:
        self.tally = AttackTally(settings)
        self.draw = Draw(EACH)
        self.images = self.errors = 0

    def add(self, record: Record) -> None:
        """Count one record."""
        self.tally.add(record)
        self.images, self.errors = self.tally.images, self.tally.errors
        if "error" not in record and record["places"] is not None:
            self.draw.offer(attack_group(record), record)


def refute(
    trial: Trial,
    path: Path,
    *,
    device: str = "auto",
    batch_size: int | None = None,
    progress: Progress | None = None,
    mix_versions: bool = False,
    force: bool = False,
) -> Outcome[AttackSummary] | None:
    """Attack every image that has no record in the folder, and sum up; `summary.refuted` must be empty.

    `mix_versions` resumes a run that other versions of patchguard or torch began, `force` removes it and starts over.
    Returns None in every process of a torchrun but the first.
    """
    job, settings = trial.job, trial.settings()
    engine = Engine(job, Hunt(settings), *resolve_device(job, device, batch_size), "attacked")
    folder, first = Folder(path), runtime.rank() == 0
    check = partial(check_images, folder, job.source)
    with open_run(folder, _stamp(trial, settings), check, mix_versions=mix_versions, force=force) as barrier:
        complete = folder.summary(AttackSummary)
        if complete is not None:
            return Outcome(complete, already_complete=True) if first else None
        _make_folder(path / "attacked")
        engine.resume(folder, _Refuter(trial, engine, path).answer, progress)
        barrier()
        return Outcome(_finish(engine, folder), already_complete=False) if first else None


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"`--out` must be a folder to write in; got {path}: {error.strerror}.") from None


def _stamp(trial: Trial, settings: AttackSettings) -> Run:
    return Run(
        kind="attack",
        model_file=trial.job.model_file,
        settings=to_plain(settings),
        command=trial.command,
        environment=runtime.describe_environment(),
        version=__version__,
    )


def _finish(engine: Engine[Hunt], folder: Folder) -> AttackSummary:
    """Sum up the records of all shards. The summary comes last: where it is, everything else is."""
    run = read_run(folder.path)
    hunt = Hunt(convert(run.settings, AttackSettings, folder.path / "run.json"))
    for record in folder.records():
        hunt.add(record)
    check_complete(hunt, engine.job, folder, "attacked")
    chosen = hunt.draw.list_taken(ATTACK_GROUPS)
    plans = [engine.plan((record["size"][0], record["size"][1])) for _, record in chosen]
    with worker_pool(engine.workers) as pool:
        gallery.save(folder, pool.map(partial(_show, engine, folder.path), chosen, plans))
    summary = hunt.tally.summarize(seconds=engine.seconds(hunt.images), environment=run.environment)
    folder.write("summary.json", summary)
    return summary


def _show(engine: Engine[Hunt], path: Path, chosen: tuple[str, Record], plan: Plan | str) -> gallery.Shown | None:
    """Return what the gallery shows of a recorded image; None if one of its files has changed or gone since."""
    group, record = chosen
    try:
        original = engine.job.source.read(record["index"])
        attacked = decode(path / "attacked" / f"{record['index']:06d}.png")
    except Unreadable:
        return None
    if isinstance(plan, str) or image_digest(original) != record["image"] or attacked.shape != original.shape:
        return None
    both = Batch((record["index"],) * 2, torch.stack([original, attacked]))
    plan = _keep_first_task(plan)
    examination = engine.examine(both, plan_picture(plan))
    return gallery.show_attacked(group, record, original, attacked, engine.job.guard, examination, plan.tasks[0])


def _keep_first_task(plan: Plan) -> Plan:
    """Return the plan of the one proof that is attacked, whose labels are those of its own guard."""
    return replace(plan, guard=plan.tasks[0].guard, tasks=plan.tasks[:1])


@final
@dataclass(frozen=True, eq=False)
class _Refuter:
    """Attacks batches and turns them into records; called by several threads at once."""

    trial: Trial
    engine: Engine[Hunt]
    path: Path

    def answer(self, batch: Batch, plan: Plan) -> list[Record]:
        """Return the records of a batch; pictures and what refutes a certificate are written before."""
        plan = _keep_first_task(plan)
        before = self.engine.examine(batch, plan)
        failures = self.engine.describe_failures(batch, before)
        if before.prediction is None:
            return failures
        return failures + self._attack(batch.select(before.rows), plan, before, before.prediction)

    def _attack(self, batch: Batch, plan: Plan, before: Examination, answer: Prediction) -> list[Record]:
        trial, engine, task, certificate = self.trial, self.engine, plan.tasks[0], before.certificates[0]
        targets = trial.job.source.targets
        target = answer.label
        if targets is not None:
            target = torch.tensor([targets[index] for index in batch.indices], device=answer.label.device)
        aim = None if trial.aim is None else torch.full_like(target, trial.aim)
        certified = certificate.margin > 0
        # What an attack must change: the true class; but a certificate of a wrong label is to be refuted, too.
        goal = target if aim is not None else torch.where(certified, answer.label, target)
        attempted = ~is_broken(answer, goal, aim)
        if aim is not None:
            attempted &= target != aim
        began = time.perf_counter()
        images = engine.load(batch.images)
        numbers = [trial.number(index) for index in batch.indices]
        attacked = trial.attack(task.guard, images, goal, task.patch, aim=aim, seed=trial.seed, numbers=numbers)
        # Judged by what a file can hold, not by what the attack computed with.
        pixels = (attacked.images * 255).round().to(torch.uint8).cpu()
        reply = task.guard.predict(engine.load(pixels))
        broken = is_broken(reply, target, aim)
        if aim is not None:
            broken &= target != aim  # images of the aim's class cannot be driven to it
        flipped = reply.label != answer.label
        if reply.alert is not None:
            flipped &= ~reply.alert
        # The attack asked the guard itself, in a batch of other images: a flip that it saw is one as well.
        seen = attempted & certified & ~flipped & attacked.broken.to(target.device)
        columns = {
            "label": answer.label,
            "margin": certificate.margin,
            "certified": certified,
            "rival": certificate.rival,
            "attacked": torch.where(seen, attacked.label.to(target.device), reply.label),
            "broken": broken | seen,
            "refuted": certified & (flipped | seen),
            "places": attacked.positions,
        }
        if reply.alert is not None:
            columns["alert"] = reply.alert
        listed = {name: column.tolist() for name, column in columns.items()}
        engine.add_network_seconds(time.perf_counter() - began)
        finite, tried = certificate.margin.isfinite().tolist(), attempted.tolist()
        records = []
        for row, index in enumerate(batch.indices):
            outcome = {name: column[row] for name, column in listed.items()}
            if not finite[row]:  # an undefended sum has no margin at all
                outcome["margin"] = None
            if not tried[row]:
                outcome["places"] = None
            record = {
                **engine.identify(index),
                "size": list(batch.size),
                "image": image_digest(batch.images[row]),
                **outcome,
                "patch": [task.patch.height, task.patch.width],
                "masks": task.masks,
                "seed": trial.seed,
            }
            records.append(self._save_files(record, batch, row, plan, before, pixels))
        return records

    # -- files of an attack --------------------------------------------------------------------------------------------

    def _save_files(
        self, record: Record, batch: Batch, row: int, plan: Plan, before: Examination, pixels: Tensor
    ) -> Record:
        """Write what the report shows and what refutes a certificate; return the record that counts."""
        if self.engine.recorded[record["index"]]:
            return record
        self._save_picture(record, pixels[row])
        if record["refuted"]:
            self._save_refutation(record, batch, row, plan, before, pixels)
            return record
        return self._find_earlier_refutation(record["index"]) or record

    def _save_picture(self, record: Record, pixels: UInt8[Tensor, "3 _ _"]) -> None:
        """Write the attacked image if the report may want to show it."""
        if record["places"] is None:
            return
        with self.engine.lock:
            wanted = self.engine.counts.draw.wants(attack_group(record), record["index"])
        if wanted:
            atomic.write_bytes(self.path / "attacked" / f"{record['index']:06d}.png", encode_png(pixels), durable=False)

    def _find_earlier_refutation(self, index: int) -> Record | None:
        """Return the record of what refuted a certificate before a kill: it counts, found again or not."""
        try:
            record: Record = json.loads((self.path / "refuted" / f"{index:06d}.json").read_bytes())["record"]
        except (OSError, ValueError):
            return None
        return record

    def _save_refutation(
        self, record: Record, batch: Batch, row: int, plan: Plan, before: Examination, pixels: Tensor
    ) -> None:
        """Write what anyone needs to see that a certified label was changed, or to find the attack's mistake."""
        guard, task, name = self.trial.job.guard, plan.tasks[0], f"{record['index']:06d}"
        folder, images = Folder(self.path / "refuted"), (batch.images[row], pixels[row])
        _make_folder(folder.path)
        folder.write_bytes(f"{name}-original.png", encode_png(images[0]))
        folder.write_bytes(f"{name}-attacked.png", encode_png(images[1]))
        after = guard.examine(self.engine.load(pixels), plan)
        arrays = {f"before_{key}": value.numpy() for key, value in guard.evidence_arrays(before, row).items()}
        arrays |= {f"after_{key}": value.numpy() for key, value in guard.evidence_arrays(after, row).items()}
        stored = io.BytesIO()
        np.savez_compressed(stored, allow_pickle=False, **arrays)
        folder.write_bytes(f"{name}-evidence.npz", stored.getvalue())
        alone = [task.guard.predict(self.engine.load(image[None])) for image in images]
        folder.write(
            f"{name}.json",
            {
                "format": FORMAT,
                "record": record,
                "labels_alone": [int(each.label) for each in alone],  # of the two files, each in a batch of its own
                "settings": to_plain(self.trial.settings()),
                "environment": runtime.describe_environment(),
                "repeat": self.trial.repeat_command(record["index"]),
                "see": self.trial.predict_command(f"{name}-attacked.png") if task.masks == "own" else None,
            },
        )


def encode_png(pixels: UInt8[Tensor, "3 _ _"]) -> bytes:
    """Return an image as a file that holds exactly these pixels."""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).cpu().numpy())).save(content, "PNG")
    return content.getvalue()
