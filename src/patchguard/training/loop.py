"""The training loop: epochs, checkpoints, evaluation in between, and a stop in time."""

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from patchguard import runtime
from patchguard.data.dataset import Dataset
from patchguard.errors import InputError
from patchguard.training import checkpoint, curve
from patchguard.training.curriculum import learning_rate, stage_at, stage_fractions
from patchguard.training.evaluate import evaluate
from patchguard.training.features import FeatureSet
from patchguard.training.loaders import FeatureLoader
from patchguard.training.recipe import read_recipe
from patchguard.training.trainer import TIMED_STEPS, OnStep, Trainer

logger = logging.getLogger(__name__)

EVALUATIONS = 12  # before the last epoch
EVALUATED = 2500  # images of each
SAVING = 1.0  # seconds to leave for writing a checkpoint
OnEpoch = Callable[[dict[str, Any]], None]


@final
@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long a run may take, in seconds of the monotonic clock.

    `started` is when the clock began. `stop` is when this call must end: training then stops after a step, with a
    checkpoint (of several processes: after an epoch). `plan` is the time that the whole schedule should fill, over one
    or several calls. `certified` is the number of images to be certified after the last epoch; `plan` leaves time for
    them.
    """

    started: float
    stop: float = math.inf
    plan: float = math.inf
    certified: int = 0
    checkpoint_every: float = 60.0


def plan_epochs(trainer: Trainer, held_out: Dataset | FeatureSet | None, budget: Budget) -> int:
    """Return how many epochs fit `budget.plan`, by timing some steps of every stage and one evaluation."""
    if not math.isfinite(budget.plan):
        raise InputError("`epochs` can only be chosen for a given time. Give `minutes`, or a number of epochs.")
    per_epoch = trainer.steps * sum(
        fraction * trainer.time_step(stage, TIMED_STEPS) for stage, fraction in stage_fractions(trainer.recipe)
    )
    per_image = time_certificate(trainer, held_out)
    evaluations = EVALUATIONS * EVALUATED * per_image if held_out is not None else 0.0
    elapsed = time.monotonic() - budget.started
    left = budget.plan - elapsed - evaluations - reserve_seconds(per_image, budget)
    # Writing checkpoints and reading metrics costs a little besides the steps.
    epochs = max(1, math.floor(left / (1.02 * per_epoch)))
    logger.info(
        "planned %d epochs: %.2f s each, %.1f s so far, %.1f ms per certified image",
        epochs,
        per_epoch,
        elapsed,
        1000 * per_image,
    )
    return epochs


def time_certificate(trainer: Trainer, held_out: Dataset | FeatureSet | None) -> float:
    """Return the time to certify one image; a first pass traces the network and lets cuDNN choose its kernels."""
    count = 500 if trainer.device.type == "cuda" else 32
    if held_out is None:
        loader = trainer.loader
        held_out = (
            loader.data
            if isinstance(loader, FeatureLoader)
            else Dataset(*loader.first(count), trainer.guard.class_names)
        )
    sample = held_out.subset(slice(0, count))
    evaluate(trainer.guard, sample, trainer.recipe.patch)
    start = time.monotonic()
    evaluate(trainer.guard, sample, trainer.recipe.patch)
    return (time.monotonic() - start) / len(sample)


def reserve_seconds(per_image: float, budget: Budget) -> float:
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
    held_out: Dataset | FeatureSet | None = None,
    on_epoch: OnEpoch = lambda record: None,
    on_step: OnStep = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Train, from the latest checkpoint in `out` if there is one; return whether the last epoch was reached.

    `epochs=None` chooses their number once, by `plan_epochs`; a resumed run keeps it. `on_epoch` gets the record of
    each epoch, `on_step` the fraction of training done after each step. Once `should_stop()`, the state after the step
    is saved, and the next call continues with the next step.

    Among several processes, only the first one measures, reports and writes; all read `out`, which they must share.
    """
    out.mkdir(parents=True, exist_ok=True)
    held_out = move_to_device(held_out, trainer) if isinstance(held_out, Dataset) else held_out
    start, planned = resume(trainer, out)
    if planned is None:
        planned = plan_epochs(trainer, held_out, budget) if epochs is None else epochs
        planned = int(runtime.broadcast_from_first(planned, trainer.device))
    first, alone = runtime.rank() == 0, runtime.world_size() == 1
    every = max(1, planned // EVALUATIONS)
    saved = time.monotonic()
    best = checkpoint.Best(out)
    if first:
        checkpoint.remove_drafts(out)
        checkpoint.trim_log(out, start)
        best.drop_after(start)
    began_step, per_evaluated, longest = time.monotonic(), 0.0, 0.0

    def late() -> bool:
        nonlocal began_step, longest
        now = time.monotonic()
        longest, began_step = max(longest, now - began_step), now
        return should_stop() or now + longest + SAVING > budget.started + budget.stop

    for number in range(start, planned):
        begun = began_step = time.monotonic()
        learned = trainer.run_epoch(number, planned, on_step, late if alone else lambda: False)
        if learned is None:
            save(trainer, out, number, planned)
            return False
        record: dict[str, Any] = {
            "epoch": number + 1,
            "epochs": planned,
            "mask_step": stage_at(trainer.recipe, number / planned).mask_step,
            "lr": learning_rate(trainer.recipe.schedule, number / planned),
            **learned,
        }
        seconds = time.monotonic() - begun
        record["images_per_second"] = trainer.steps * trainer.batch_size / seconds
        if first and held_out is not None and (number + 1) % every == 0 and number + 1 < planned:
            evaluated = time.monotonic()
            accuracy = evaluate(trainer.guard, held_out.subset(slice(0, EVALUATED)), trainer.recipe.patch)
            per_evaluated = (time.monotonic() - evaluated) / accuracy.total
            record["held_out"] = accuracy.to_json()
            best.offer(trainer.guard.model, number + 1, accuracy)
        now = time.monotonic()
        record |= {"seconds": now - begun, "elapsed": now - budget.started}
        left = planned - number - 1
        evaluations = 0 if held_out is None else left // every * min(EVALUATED, len(held_out))
        record["seconds_left"] = left * seconds + (evaluations + budget.certified) * per_evaluated
        if first:
            with (out / checkpoint.LOG).open("a") as log:
                log.write(json.dumps(record) + "\n")
            on_epoch(record)
        stop = late()
        if first and (number + 1 == planned or stop or now - saved >= budget.checkpoint_every):
            save(trainer, out, number + 1, planned)
            curve.write(out, trainer.recipe.name)
            saved = time.monotonic()
        # Clocks differ: all processes stop when the first one does.
        if runtime.broadcast_from_first(stop, trainer.device) and number + 1 < planned:
            return False
    return True


def move_to_device(data: Dataset, trainer: Trainer) -> Dataset:
    """Return the images on the trainer's device, as bytes."""
    return replace(data, images=data.images.to(trainer.device), targets=data.targets.to(trainer.device))


def save(trainer: Trainer, out: Path, epoch: int, epochs: int) -> None:
    """Write a checkpoint after `epoch` of `epochs` epochs, and the steps of the next one that are done."""
    tensors = trainer.state()
    state = {
        "epoch": epoch,
        "epochs": epochs,
        "steps_done": trainer.steps_done,
        "step": 0 if trainer.position is None else trainer.position.step,
        "recipe": trainer.recipe.to_json(),
        "tensors": sorted(tensors),
    }
    checkpoint.save(out, epoch, tensors, state)


def resume(trainer: Trainer, out: Path) -> tuple[int, int | None]:
    """Restore the latest checkpoint in `out`; return the epochs that are done and planned, (0, None) without one."""
    loaded = checkpoint.load(out)
    if loaded is None:
        return 0, None
    tensors, state = loaded
    changed = trainer.recipe.differences(read_recipe(state["recipe"]))
    if changed:
        raise InputError(
            f"{out} holds a run with other settings ({', '.join(changed)}). Use another folder, or the same settings."
        )
    trainer.restore(tensors, state["steps_done"], state.get("step", 0))
    logger.info("resuming after epoch %d of %d", state["epoch"], state["epochs"])
    return state["epoch"], state["epochs"]
