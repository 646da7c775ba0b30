"""One training run from the data to the summary: train, choose weights, save the guard, measure the file.

    run.train(run.Options(recipe=recipes.get_recipe("tiny"), root=Path("data"), out=Path("runs/tiny")))

The folder `out` gets checkpoints, log.jsonl (one line per epoch), curve.png, NAME.safetensors and summary.json. The
same options again resume where the last call stopped. On the command line this is `patchguard train`, also for
torchrun:

    torchrun --nproc-per-node 2 -m patchguard train --recipe tiny --root data --out runs/tiny
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from patchguard import runtime
from patchguard.data.dataset import Dataset, hold_out, hold_out_indices
from patchguard.data.loading import load_images, load_splits
from patchguard.data.source import Source, open_splits
from patchguard.errors import InputError
from patchguard.guard import Guard
from patchguard.patch import Patch
from patchguard.storage import zoo
from patchguard.storage.atomic import write_json
from patchguard.training import checkpoint, loop
from patchguard.training.evaluate import Accuracy, evaluate
from patchguard.training.loaders import fits_in_memory
from patchguard.training.recipe import Recipe
from patchguard.training.trainer import OnStep, Trainer

logger = logging.getLogger("patchguard.training")

MODES = ("default", "max-autotune-no-cudagraphs", "off")


@final
@dataclass(frozen=True, kw_only=True)
class Options:
    """What one call does with a recipe. The recipe's dataset lies at or below `root`.

    `epochs` of None takes the recipe's, "auto" as many as fit `plan_minutes`, the time of the whole run over several
    calls, or else `minutes`, after which this call stops with a checkpoint. `started` is when its clock began. `test`
    measures the test set as well: once per published model. `compile_mode` of None compiles on GPUs only. `limit` is
    the number of images to learn from. `deterministic` allows only kernels that give the same bits every time.
    """

    recipe: Recipe
    root: Path
    out: Path
    epochs: int | str | None = None
    minutes: float | None = None
    plan_minutes: float | None = None
    test: bool = False
    device: str = "auto"
    compile_mode: str | None = None
    limit: int | None = None
    deterministic: bool = False
    checkpoint_seconds: float = 60.0
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.compile_mode not in (None, *MODES):
            raise InputError(f"`compile` must be one of {', '.join(MODES)}; got {self.compile_mode!r}.")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"`limit` must be a whole number of at least 1; got {self.limit}.")
        self.read_epochs()
        self.recipe.override({})  # settings given in Python are validated here

    def read_epochs(self) -> int | None:
        """Return the number of epochs, or None where it is chosen to fit the time."""
        if self.epochs == "auto":
            return None
        if self.epochs is None:
            return self.recipe.schedule.epochs
        if not str(self.epochs).isdigit() or int(self.epochs) < 1:
            raise InputError(f"`epochs` must be a whole number of at least 1, or auto; got {self.epochs!r}.")
        return int(self.epochs)

    def budget(self, certified: int) -> loop.Budget:
        """Return the time limits, with this many images to certify after the last epoch."""
        stop = math.inf if self.minutes is None else 60 * self.minutes
        plan = stop if self.plan_minutes is None else 60 * self.plan_minutes
        return loop.Budget(
            started=self.started,
            stop=stop,
            plan=plan,
            certified=certified,
            checkpoint_every=self.checkpoint_seconds,
        )


def train(
    options: Options,
    *,
    on_epoch: loop.OnEpoch = lambda record: None,
    on_step: OnStep = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Train, evaluate and save; return the summary, or None where the run stopped before its last epoch.

    Of several processes, only the first one returns a summary.
    """
    if options.deterministic:
        runtime.use_deterministic_kernels()
    with runtime.process_group(runtime.resolve_device(options.device)) as device:
        return _train(options, device, on_epoch=on_epoch, on_step=on_step, should_stop=should_stop)


def _train(options: Options, device: torch.device, **callbacks: Any) -> dict[str, Any] | None:
    recipe = options.recipe
    if device.type == "cuda" and not options.deterministic:
        torch.backends.cudnn.benchmark = True
    train_set, held_out, test = load_data(options, device)
    mode = options.compile_mode or ("default" if device.type == "cuda" else "off")
    trainer = Trainer(recipe, train_set, device=device, compile_mode=None if mode == "off" else mode)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    logger.info("%s: %s parameters, %d steps per epoch, %s", recipe.name, f"{parameters:,}", trainer.steps, device)
    patches = 1 + len(recipe.evaluation.other_patches)
    certified = (2 + patches) * len(held_out) + (0 if test is None else patches * len(test))
    begun = time.monotonic()
    finished = loop.run(
        trainer,
        options.out,
        epochs=options.read_epochs(),
        budget=options.budget(certified),
        held_out=held_out if len(held_out) else None,
        **callbacks,
    )
    if not finished or runtime.rank() > 0:
        return None
    # The file and the summary state the number of epochs that were run, which may have been chosen to fit the time.
    recipe = trainer.recipe = recipe.override({"schedule.epochs": checkpoint.read_log(options.out)[-1]["epochs"]})
    summary = {
        "recipe": recipe.to_json(),
        "environment": runtime.describe_environment(),
        "device": str(device),
        "processes": runtime.world_size(),
        "parameters": parameters,
        "train_images": len(train_set),
        "training_seconds": time.monotonic() - begun,
    }
    save_and_measure(trainer, options.out, held_out, test, summary)
    return summary


def load_data(options: Options, device: torch.device) -> tuple[Dataset | Source, Dataset, Dataset | None]:
    """Return the training images, those held out of them, and, with `options.test`, the test images.

    Training photos that do not fit into half of the memory are decoded anew in every epoch.
    """
    recipe, size = options.recipe, options.recipe.source_size
    if recipe.data.dataset == "cifar10":
        splits = load_splits(recipe.data.dataset, options.root)
        images = splits.train if options.limit is None else splits.train.subset(slice(0, options.limit))
        train_set, held_out = hold_out(images, recipe.count_held_out(len(images)))
        return train_set, held_out, splits.test if options.test else None
    source, test_source = open_splits(recipe.data.dataset, options.root)
    # Files are sorted by class: evenly spaced images are of all classes.
    source = source if options.limit is None else source.limit(options.limit)
    test = load_images(test_source, size=size)[0] if options.test else None
    if fits_in_memory(len(source), size, device):
        whole = load_images(source, size=size)[0]
        return *hold_out(whole, recipe.count_held_out(len(whole))), test
    logger.info("%s images do not fit into memory and are decoded anew in every epoch", f"{len(source):,}")
    remaining, apart = hold_out_indices(len(source), recipe.count_held_out(len(source)))
    held_out = load_images(source.subset(apart.tolist()), size=size)[0]
    return source.subset(remaining.tolist()), held_out, test


def save_and_measure(
    trainer: Trainer, out: Path, held_out: Dataset, test: Dataset | None, summary: dict[str, Any]
) -> None:
    """Save the guard, and add the accuracy of the saved file, rounded to float16, to the summary line by line."""
    recipe, path = trainer.recipe, out / f"{trainer.recipe.name}.safetensors"
    zoo.save(trainer.guard, path, recipe=recipe.to_json(), half=True)  # before anything else can go wrong
    summary |= {"file": path.name, "weights": "averaged"}
    held_out = loop.move_to_device(held_out, trainer)
    if len(held_out):
        best = checkpoint.Best(out)
        summary |= choose_weights(trainer, held_out, best.tensors()) | {"best": best.state()}
        zoo.save(trainer.guard, path, recipe=recipe.to_json(), half=True)
    guard = zoo.load(path)
    summary["digest"] = guard.digest
    guard.prepare(*trainer.size)  # traces the network while it is on the CPU
    guard.model.to(device=trainer.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    write_json(out / "summary.json", summary)
    for name, data in (("held_out", held_out), ("test", None if test is None else loop.move_to_device(test, trainer))):
        if data is None or len(data) == 0:
            continue
        summary[name] = []
        for accuracy in measure(guard, recipe, data):
            logger.info("%s: %s", name, accuracy)
            summary[name].append(accuracy.to_json())
            write_json(out / "summary.json", summary)


def choose_weights(trainer: Trainer, held_out: Dataset, best: dict[str, Tensor] | None) -> dict[str, Any]:
    """Give the trainer's guard the weights (averaged, last, or best so far) with the best held-out score.

    The held-out accuracy of the chosen ones is then slightly optimistic; that of the test set is not.
    """
    model = trainer.guard.model
    averaged = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    candidates = {"averaged": averaged, "last": trainer.model.state_dict()}
    if best is not None:
        candidates["best"] = best
    measured: dict[str, Accuracy] = {}
    for name, tensors in candidates.items():
        model.load_state_dict(tensors)
        measured[name] = evaluate(trainer.guard, held_out, trainer.recipe.patch)
    chosen = max(measured, key=lambda name: measured[name].score)
    model.load_state_dict(candidates[chosen])
    return {"weights": chosen, "before_rounding": {name: each.to_json() for name, each in measured.items()}}


def measure(guard: Guard, recipe: Recipe, data: Dataset) -> Iterator[Accuracy]:
    """Measure the recipe's patch with the guard's masks, then other patches with masks refitted to each."""
    yield evaluate(guard, data, recipe.patch)
    for side in recipe.evaluation.other_patches:
        yield evaluate(guard.for_patch(Patch(side), *data.size), data, Patch(side))


if __name__ == "__main__":
    raise SystemExit("Start it by `python -m patchguard train`, which takes the same options.")
