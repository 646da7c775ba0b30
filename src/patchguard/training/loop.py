"""The training loop: epochs, checkpoints, evaluation on the way, and a stop in time."""

import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from patchguard import runtime
from patchguard.data.datasets import Dataset
from patchguard.errors import InputError
from patchguard.training import checkpoint, curve
from patchguard.training.curriculum import rate, shares, stage_at
from patchguard.training.evaluate import Accuracy, evaluate
from patchguard.training.recipe import Recipe
from patchguard.training.trainer import TIMED_STEPS, Tick, Trainer

logger = logging.getLogger(__name__)

EVALUATIONS = 12  # on the way, in the whole run
EVALUATED = 2500  # images of each
Report = Callable[[dict[str, Any]], None]


@final
@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long a run may take, in seconds of the monotonic clock.

    `started` is when the clock began. `stop` is when this call must end: training then stops after an epoch, with a
    checkpoint. `plan` is the time that the whole schedule should fill, over one or several calls. `certified` is the
    number of images to be certified after the last epoch, which `plan` and `stop` leave time for.
    """

    started: float
    stop: float = math.inf
    plan: float = math.inf
    certified: int = 0
    checkpoint_every: float = 60.0


def planned_epochs(trainer: Trainer, held_out: Dataset | None, budget: Budget) -> int:
    """Return how many epochs fit `budget.plan`, by timing some steps of every stage and one evaluation."""
    if not math.isfinite(budget.plan):
        raise InputError("`epochs` can only be chosen for a given time. Give `minutes`, or a number of epochs.")
    per_epoch = trainer.steps * sum(
        share * trainer.trial(stage, TIMED_STEPS) for stage, share in shares(trainer.recipe)
    )
    per_image = certifying_seconds(trainer, held_out)
    on_the_way = EVALUATIONS * EVALUATED * per_image if held_out is not None else 0.0
    elapsed = time.monotonic() - budget.started
    left = budget.plan - elapsed - on_the_way - reserve(per_image, budget)
    # Writing checkpoints and reading metrics costs a little besides the steps.
    epochs = max(1, math.floor(left / (1.02 * per_epoch)))
    logger.info(
        "planned %d epochs: %.2f s each, %.1f s until now, %.1f ms per certified image",
        epochs,
        per_epoch,
        elapsed,
        1000 * per_image,
    )
    return epochs


def certifying_seconds(trainer: Trainer, held_out: Dataset | None) -> float:
    """Return the time to certify one image; a first pass traces the network and lets cuDNN choose its kernels."""
    sample = (held_out or Dataset(*trainer.feed.first(500), trainer.guard.class_names)).subset(slice(0, 500))
    evaluate(trainer.guard, sample, trainer.recipe.patch)
    start = time.monotonic()
    evaluate(trainer.guard, sample, trainer.recipe.patch)
    return (time.monotonic() - start) / len(sample)


def reserve(per_image: float, budget: Budget) -> float:
    """Return the seconds to leave for what comes after training.

    Fresh weights, on which `per_image` was measured, leave a certificate fewer rivals to compare than trained ones.
    """
    return 8.0 + 3 * per_image * budget.certified


def run(
    trainer: Trainer,
    out: Path,
    *,
    epochs: int | None,
    budget: Budget,
    held_out: Dataset | None = None,
    report: Report = lambda record: None,
    tick: Tick = lambda progress: None,
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Train, from the latest checkpoint in `out` if there is one; return whether the last epoch was reached.

    `epochs=None` chooses their number once, by `planned_epochs`; a continued run keeps it. `report` gets the record of
    each epoch, `tick` the share of training done after each step. Once `stopped()`, the epoch is finished and saved.

    Among several processes, the first one alone measures, reports and writes; all read `out`, which they must share.
    """
    out.mkdir(parents=True, exist_ok=True)
    held_out = None if held_out is None else on_device(held_out, trainer)
    start, planned = resume(trainer, out)
    if planned is None:
        planned = planned_epochs(trainer, held_out, budget) if epochs is None else epochs
        planned = int(runtime.broadcast_from_first(planned, trainer.device))
    first = runtime.rank() == 0
    every = max(1, planned // EVALUATIONS)
    saved = time.monotonic()
    best = Best(out)
    if first:
        keep_log(out, start)
        best.forget_after(start)
    slowest = 0.0
    for number in range(start, planned):
        begun = time.monotonic()
        record: dict[str, Any] = {
            "epoch": number + 1,
            "epochs": planned,
            "mask_step": stage_at(trainer.recipe, number / planned).mask_step,
            "rate": rate(trainer.recipe, number / planned),
            **trainer.epoch(number, planned, tick),
        }
        seconds = time.monotonic() - begun
        record["images_per_second"] = trainer.steps * trainer.recipe.batch_size / seconds
        if first and held_out is not None and (number + 1) % every == 0 and number + 1 < planned:
            some = evaluate(trainer.guard, held_out.subset(slice(0, EVALUATED)), trainer.recipe.patch)
            record["held_out"] = some.to_json()
            best.offer(trainer.guard.model, number + 1, some)
        now = time.monotonic()
        record |= {"seconds": now - begun, "elapsed": now - budget.started, "left": (planned - number - 1) * seconds}
        slowest = max(slowest, now - begun)
        late = stopped() or now + slowest > budget.started + budget.stop
        if first:
            with (out / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
            report(record)
            if number + 1 == planned or late or now - saved >= budget.checkpoint_every:
                save(trainer, out, number + 1, planned)
                curve.write(out, trainer.recipe.name)
                saved = time.monotonic()
        # Clocks differ: all processes stop when the first one does.
        if runtime.broadcast_from_first(late, trainer.device) and number + 1 < planned:
            return False
    return True


@final
@dataclass(frozen=True)
class Best:
    """The averaged weights with the best score on held-out images on the way, in a file of their own."""

    folder: Path

    @property
    def path(self) -> Path:
        """Return where the weights lie."""
        return self.folder / "best.safetensors"

    def offer(self, model: nn.Module, epoch: int, accuracy: Accuracy) -> None:
        """Keep the weights of `epoch` if they are better than those kept."""
        score = list(accuracy.score)
        kept = self.state()
        if kept is None or score > kept["score"]:
            metadata = {"state": json.dumps({"epoch": epoch, "score": score})}
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
            draft = self.path.with_suffix(".draft")
            save_file(tensors, draft, metadata=metadata)
            os.replace(draft, self.path)

    def state(self) -> dict[str, Any] | None:
        """Return the epoch and the score of what is kept, or None."""
        if not self.path.exists():
            return None
        with safe_open(self.path, "pt") as archive:
            state: dict[str, Any] = json.loads(archive.metadata()["state"])
            return state

    def tensors(self) -> dict[str, Tensor] | None:
        """Return the weights that are kept, or None."""
        return load_file(self.path) if self.path.exists() else None

    def forget_after(self, epoch: int) -> None:
        """Drop what a stopped run kept after its last checkpoint."""
        kept = self.state()
        if kept is not None and kept["epoch"] > epoch:
            self.path.unlink()


def on_device(data: Dataset, trainer: Trainer) -> Dataset:
    """Return the images on the trainer's device, as bytes."""
    return replace(data, images=data.images.to(trainer.device), targets=data.targets.to(trainer.device))


def save(trainer: Trainer, out: Path, epoch: int, epochs: int) -> None:
    """Write a checkpoint after `epoch` of `epochs` epochs."""
    tensors = trainer.state()
    state = {
        "epoch": epoch,
        "epochs": epochs,
        "steps_done": trainer.steps_done,
        "recipe": trainer.recipe.to_json(),
        "tensors": sorted(tensors),
    }
    checkpoint.save(out, epoch, tensors, state)


def resume(trainer: Trainer, out: Path) -> tuple[int, int | None]:
    """Restore the latest checkpoint in `out`; return the epochs that are done and planned, (0, None) without one."""
    found = checkpoint.load(out)
    if found is None:
        return 0, None
    tensors, state = found
    # A setting that is younger than the checkpoint had its default then.
    before = {**Recipe(name="").to_json(), **state["recipe"]}
    if before != trainer.recipe.to_json():
        changed = [key for key, value in trainer.recipe.to_json().items() if before.get(key) != value]
        raise InputError(
            f"{out} holds a run with other settings ({', '.join(changed)}). Use another folder, or the same settings."
        )
    trainer.restore(tensors, state["steps_done"])
    logger.info("going on after epoch %d of %d", state["epoch"], state["epochs"])
    return state["epoch"], state["epochs"]


def keep_log(out: Path, epochs: int) -> None:
    """Drop what a stopped run logged after its last checkpoint, and a line that it did not finish."""
    path = out / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            break
        if line.endswith("\n") and record["epoch"] <= epochs:
            kept.append(line)
    if kept != lines:
        draft = out / ".log.draft"
        draft.write_text("".join(kept))
        os.replace(draft, path)
