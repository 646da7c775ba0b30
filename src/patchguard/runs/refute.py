"""`refute`: attack every image of a job, and try to break what is certified; goes on where it was after a stop.

A certificate says that no patch changes the label. Here an attack tries. Whatever it finds is judged anew, from 8-bit
pixels, by the guard's own rule. If it ever changes a certified label, one of the two is wrong, and everything that is
needed to see it is kept in the folder `refuted`: both images, the evidence before and after, the seed, and the command.
"""

import hashlib
import io
import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
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
from patchguard.defenses.evidence import EvidenceMap
from patchguard.errors import InputError
from patchguard.guard import Prediction
from patchguard.runs import attack_gallery
from patchguard.runs.batches import Batch
from patchguard.runs.gallery import Draw
from patchguard.runs.gap import GROUPS, Gap, group, measure
from patchguard.runs.job import Job, as_floats
from patchguard.runs.loop import Loop, Outcome, check_complete, entered, placed, pool
from patchguard.runs.plan import Task
from patchguard.runs.records import FORMAT, Folder, Record
from patchguard.runs.resume import check_images
from patchguard.storage.certificate_file import image_digest

EACH = 8  # pictures per group in the report
ELSEWHERE = ("top_k", "curve", "certificates")  # settings of certify that an attack has not

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

    def settings(self) -> dict[str, Any]:
        """Return every setting as JSON values, for run.json."""
        known = {name: value for name, value in self.job.settings().items() if name not in ELSEWHERE}
        return {
            **known,
            "attack": self.name,
            "budget": budget_of(self.attack),
            "aim": self.aim,
            "seed": self.seed,
            "numbers": None if self.numbers is None else list(self.numbers),
        }

    def number(self, place: int) -> int:
        """Return the number that the randomness of an image is derived from."""
        return place if self.numbers is None else self.numbers[place]

    def repeating(self, place: int) -> str:
        """Return the command that attacks one image again."""
        return shlex.join([*self.command, "--only", str(self.number(place))])

    def seeing(self, file: str) -> str | None:
        """Return the command that shows the label of a saved image; None where `predict` would do otherwise."""
        if {"--defense", "--evidence", "--threshold", "--tau", "--patch-space"} & set(self.command):
            return None
        return shlex.join(["patchguard", "predict", file, "--model", self.model])


def budget_of(attack: Attack) -> dict[str, Any]:
    """Return the settings of an attack as JSON values; a file is told by its name and what is in it."""
    found: dict[str, Any] = {}
    for each in fields(attack):  # type: ignore[arg-type]
        value = getattr(attack, each.name)
        if each.name == "path":
            found |= {"path": Path(value).name, "path_digest": hashlib.sha256(Path(value).read_bytes()).hexdigest()}
        elif isinstance(value, (bool, int, float, str, type(None))):
            found[each.name] = value
        else:
            found[each.name] = getattr(value, "__qualname__", type(value).__name__)
    return found


@final
class Hunt:
    """The counts of an attack, and the images of which pictures are kept."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.gap = Gap(settings)
        self.draw = Draw(EACH)
        self.images = 0

    def add(self, record: Record) -> None:
        """Count one record."""
        self.gap.add(record)
        self.images = self.gap.images
        if "error" not in record and record["places"] is not None:
            self.draw.offer(group(record), record)


def refute(
    trial: Trial,
    path: Path,
    *,
    device: str = "auto",
    batch_size: int | None = None,
    progress: Progress | None = None,
    mix_versions: bool = False,
) -> Outcome | None:
    """Attack every image that the folder has no record of, and sum up; `summary["refuted"]` lists what must not be.

    `mix_versions` goes on with a run that other versions of patchguard or torch began.
    Returns None in every process of a torchrun but the first.
    """
    place, at_once = placed(trial.job, device, batch_size)
    folder, first = Folder(path), runtime.rank() == 0
    settings = trial.settings()
    check = partial(check_images, folder, trial.job.source)
    with entered(folder, _stamp(trial.job, settings), check, mix_versions=mix_versions) as barrier:
        finished = folder.summary()
        if finished is not None:
            return Outcome(finished, before=True) if first else None
        work = _Work(trial, Loop(trial.job, Hunt(settings), place, at_once, "attacked"), path)
        _make(path / "attacked")
        with runtime.frozen_parameters(trial.job.guard.model):  # once: several threads will ask for gradients to pixels
            work.loop.go_on(folder, work.answered, progress)
        barrier()
        return Outcome(_finish(folder, settings, work), before=False) if first else None


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"`--out` must be a folder to write in; got {folder}: {error.strerror}.") from None


def _stamp(job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "attack",
        "model_file": job.model_file,
        "settings": {**settings, "shards": runtime.world_size()},
        "environment": runtime.describe_environment(),
        "version": __version__,
    }


def _finish(folder: Folder, settings: dict[str, Any], work: "_Work") -> dict[str, Any]:
    """Sum up the records of all shards. The summary comes last: where it is, everything else is."""
    found = measure(folder.records(), settings)
    check_complete(found, work.trial.job, folder, "attacked")
    hunt = Hunt(settings)
    for record in folder.records():
        hunt.add(record)
    chosen = hunt.draw.taken(GROUPS)
    for _, record in chosen:
        work.loop.refusal((record["size"][0], record["size"][1]))  # traces the network where that is still to be done
    with pool(work.loop.workers) as workers:
        attack_gallery.save(folder, chosen, list(workers.map(work.view, [record for _, record in chosen])))
    stamp = folder.run() or {}
    summary = {
        "format": FORMAT,
        **found,
        "seconds": work.loop.seconds(found["images"]),
        "settings": stamp["settings"],
        "environment": stamp["environment"],
    }
    folder.write("summary.json", summary)
    return summary


@final
@dataclass(frozen=True, eq=False)
class _Work:
    """What an attack does with a batch; called by several threads at once."""

    trial: Trial
    loop: Loop[Hunt]
    path: Path

    def answered(self, batch: Batch) -> list[Record]:
        """Attack a batch and return its records; pictures and what refutes a certificate are written before."""
        try:
            task = self.loop.plan(batch.size).tasks[0]
        except InputError as error:
            return self.loop.failures(batch, error)
        evidence = self._evidence(batch)
        made, rows = self.loop.sorted_out(batch, evidence)
        if not rows:
            return made
        if made:
            evidence = evidence[torch.tensor(rows, device=evidence.values.device)]
            batch = Batch(tuple(batch.places[row] for row in rows), batch.images[rows])
        return made + self._attacked(batch, task, evidence)

    @torch.no_grad()
    def _evidence(self, batch: Batch) -> EvidenceMap:
        return self.trial.job.guard.evidence(self.loop.forward(batch))

    def _attacked(self, batch: Batch, task: Task, evidence: EvidenceMap) -> list[Record]:
        trial, defense = self.trial, task.guard.defense
        answer = defense.predict(evidence)
        proof = defense.certify(evidence, task.windows, answer.label)
        targets = trial.job.source.targets
        target = answer.label
        if targets is not None:
            target = torch.tensor([targets[place] for place in batch.places], device=answer.label.device)
        aim = None if trial.aim is None else torch.full_like(target, trial.aim)
        certified = proof.margin > 0
        # What an attack must change: the true class; but a certificate of a wrong label is to be refuted, too.
        goal = target if aim is not None else torch.where(certified, answer.label, target)
        tried = ~is_broken(answer, goal, aim)
        if aim is not None:
            tried &= target != aim
        began = time.perf_counter()
        images = as_floats(batch.images.to(self.loop.device, non_blocking=True))
        numbers = [trial.number(place) for place in batch.places]
        found = trial.attack(task.guard, images, goal, task.patch, aim=aim, seed=trial.seed, numbers=numbers)
        pixels = (found.images * 255).round().to(torch.uint8).cpu()
        self.loop.spent(began)
        # Judged by what a file can hold, not by what the attack computed with.
        after = self._evidence(Batch(batch.places, pixels))
        reply: Prediction = defense.predict(after)
        broken = is_broken(reply, target, aim)
        if aim is not None:
            broken &= target != aim  # images of the aim's class cannot be driven to it
        flipped = reply.label != answer.label
        if reply.alert is not None:
            flipped &= ~reply.alert
        # The attack asked the guard itself, in a batch of other images: a flip that it saw is one as well.
        seen = tried & certified & ~flipped & found.broken.to(target.device)
        columns = {
            "label": answer.label,
            "margin": torch.where(proof.margin.isfinite(), proof.margin, torch.nan),
            "certified": certified,
            "rival": proof.rival,
            "attacked": torch.where(seen, found.label.to(target.device), reply.label),
            "broken": broken | seen,
            "refuted": certified & (flipped | seen),
            "places": found.positions,
        }
        if reply.alert is not None:
            columns["alert"] = reply.alert
        listed = {name: column.tolist() for name, column in columns.items()}
        made = []
        for row, touched in enumerate(tried.tolist()):
            record = self._record(batch, row, task, {name: column[row] for name, column in listed.items()}, touched)
            if not self.loop.done[record["index"]]:
                self._keep(record, pixels[row])
                earlier = None if record["refuted"] else self._earlier(record["index"])
                if earlier is not None:
                    record = earlier
                elif record["refuted"]:
                    pair = (batch.images[row], pixels[row])
                    self._refuted(record, task, pair, evidence.values[row], after.values[row], evidence.scale)
            made.append(record)
        return made

    def _record(self, batch: Batch, row: int, task: Task, found: Record, touched: bool) -> Record:
        if found["margin"] != found["margin"]:  # an undefended sum has no margin at all
            found["margin"] = None
        if not touched:
            found["places"] = None
        return {
            **self.loop.named(batch.places[row]),
            "size": list(batch.size),
            "image": image_digest(batch.images[row]),
            **found,
            "patch": [task.patch.height, task.patch.width],
            "masks": task.masks,
            "seed": self.trial.seed,
        }

    def _keep(self, record: Record, pixels: UInt8[Tensor, "3 _ _"]) -> None:
        """Write the attacked image if the report may want to show it."""
        if record["places"] is None:
            return
        with self.loop.lock:
            wanted = self.loop.tally.draw.wants(group(record), record["index"])
        if wanted:
            Folder(self.path / "attacked").write_bytes(f"{record['index']:06d}.png", png(pixels), durable=False)

    def _earlier(self, index: int) -> Record | None:
        """Return the record of what refuted a certificate before a kill: it counts, found again or not."""
        try:
            found: Record = json.loads((self.path / "refuted" / f"{index:06d}.json").read_bytes())["record"]
        except (OSError, ValueError):
            return None
        return found

    def _refuted(
        self, record: Record, task: Task, images: Sequence[Tensor], before: Tensor, after: Tensor, scale: int
    ) -> None:
        """Write what anyone needs to see that a certified label was changed, or to find the attack's mistake."""
        folder, name = Folder(self.path / "refuted"), f"{record['index']:06d}"
        _make(folder.path)
        folder.write_bytes(f"{name}-original.png", png(images[0]))
        folder.write_bytes(f"{name}-attacked.png", png(images[1]))
        stored = io.BytesIO()
        arrays = {"before": before.cpu().numpy(), "after": after.cpu().numpy(), "scale": np.array(scale)}
        np.savez_compressed(stored, allow_pickle=False, **arrays)
        folder.write_bytes(f"{name}-evidence.npz", stored.getvalue())
        alone = [task.guard.predict(as_floats(image[None].to(self.loop.device))) for image in images]
        folder.write(
            f"{name}.json",
            {
                "format": FORMAT,
                "record": record,
                "labels_alone": [int(each.label) for each in alone],  # of the two files, each in a batch of its own
                "settings": self.trial.settings(),
                "environment": runtime.describe_environment(),
                "repeat": self.trial.repeating(record["index"]),
                "see": self.trial.seeing(f"{name}-attacked.png") if task.masks == "own" else None,
            },
        )

    @torch.no_grad()
    def view(self, record: Record) -> attack_gallery.View | None:
        """Return what the gallery shows of a recorded image; None if one of its files has changed or gone since."""
        try:
            original = self.trial.job.source.read(record["index"])
            attacked = decode(self.path / "attacked" / f"{record['index']:06d}.png")
        except Unreadable:
            return None
        if image_digest(original) != record["image"] or attacked.shape != original.shape:
            return None
        both = Batch((record["index"],) * 2, torch.stack([original, attacked]))
        return attack_gallery.view(original, attacked, record, self._evidence(both))


def png(pixels: UInt8[Tensor, "3 _ _"]) -> bytes:
    """Return an image as a file that holds exactly these pixels."""
    from PIL import Image

    held = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).cpu().numpy())).save(held, "PNG")
    return held.getvalue()
