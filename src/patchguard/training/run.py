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
from patchguard.training.curriculum import stage_fractions
from patchguard.training.evaluate import Accuracy, evaluate
from patchguard.training.features import FeatureSet, OnFeatures, compute_features, features_of, remove_features
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
    `estimate` measures, before a new run, how long it will take here, and logs it.
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
    estimate: bool = False
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
    on_features: OnFeatures = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Train, evaluate and save; return the summary, or None where the run stopped before its last epoch.

    Of several processes, only the first one returns a summary.
    """
    if options.deterministic:
        runtime.use_deterministic_kernels()
    with runtime.process_group(runtime.resolve_device(options.device)) as device:
        return _train(
            options, device, on_epoch=on_epoch, on_step=on_step, on_features=on_features, should_stop=should_stop
        )


def _train(options: Options, device: torch.device, **callbacks: Any) -> dict[str, Any] | None:
    recipe = options.recipe
    if device.type == "cuda" and not options.deterministic:
        torch.backends.cudnn.benchmark = True
    train_set, held_out, test = load_data(options, device)
    if recipe.model.freeze and not isinstance(train_set, Dataset):
        raise InputError(
            f"`model.freeze` needs the {len(train_set):,} images in memory. Read them smaller: --set image_size=64"
        )
    mode = options.compile_mode or ("default" if device.type == "cuda" else "off")
    trainer = Trainer(recipe, train_set, device=device, compile_mode=None if mode == "off" else mode)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    logger.info("%s: %s parameters, %d steps per epoch, %s", recipe.name, f"{parameters:,}", trainer.steps, device)
    patches = 1 + len(recipe.evaluation.other_patches)
    certified = (2 + patches) * len(held_out) + (0 if test is None else patches * len(test))
    begun = time.monotonic()
    budget, on_features = options.budget(certified), callbacks.pop("on_features")
    chosen_by: Dataset | FeatureSet = held_out
    epochs = options.read_epochs()
    if options.estimate and epochs is not None and not any(options.out.glob("*")):
        estimate(trainer, train_set, epochs, certified)
    if recipe.model.freeze and isinstance(train_set, Dataset):
        settings = recipe.to_json()
        sets = compute_features(
            trainer.guard.model,
            recipe.preprocess,
            (train_set, held_out),
            options.out,
            key={name: settings[name] for name in ("data", "model", "guard")} | {"learned": len(train_set)},
            on_features=on_features,
            should_stop=lambda: (
                callbacks["should_stop"]() or time.monotonic() + loop.SAVING > budget.started + budget.stop
            ),
        )
        if sets is None:
            return None
        learned, chosen_by = sets
        trainer.learn_from(learned)
    finished = loop.run(
        trainer,
        options.out,
        epochs=epochs,
        budget=budget,
        held_out=chosen_by if len(held_out) else None,
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
    save_and_measure(trainer, options.out, held_out, test, summary, chosen_by)
    remove_features(options.out)
    return summary


def estimate(trainer: Trainer, train_set: Dataset | Source, epochs: int, certified: int) -> None:
    """Measure a few steps and certificates on this machine, and log how long the run will take."""
    loader, features = trainer.loader, 0.0
    sample = Dataset(*loader.first(trainer.batch_size), trainer.guard.class_names)
    if trainer.recipe.model.freeze:
        begun = time.monotonic()
        computed = features_of(trainer.guard.model, trainer.recipe.preprocess, sample)
        features = (time.monotonic() - begun) / len(sample) * len(train_set)
        trainer.learn_from(FeatureSet(computed, sample.targets, sample.class_names, trainer.size))
    step = sum(part * trainer.time_step(stage, 2) for stage, part in stage_fractions(trainer.recipe))
    trainer.loader = loader
    learning = epochs * trainer.steps * step
    measuring = certified * loop.time_certificate(trainer, sample)
    logger.info(
        "training will take about %.1f min on this machine: features %.1f, %d epochs %.1f, measuring %.1f",
        (features + learning + measuring) / 60,
        features / 60,
        epochs,
        learning / 60,
        measuring / 60,
    )


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
    trainer: Trainer,
    out: Path,
    held_out: Dataset,
    test: Dataset | None,
    summary: dict[str, Any],
    chosen_by: Dataset | FeatureSet | None = None,
) -> None:
    """Save the guard, and add the accuracy of the saved file, rounded to float16, to the summary line by line."""
    recipe, path = trainer.recipe, out / f"{trainer.recipe.name}.safetensors"
    zoo.save(trainer.guard, path, recipe=recipe.to_json(), half=True)  # before anything else can go wrong
    summary |= {"file": path.name, "weights": "averaged"}
    held_out = loop.move_to_device(held_out, trainer)
    chosen_by = chosen_by if isinstance(chosen_by, FeatureSet) else held_out
    if len(held_out):
        best = checkpoint.Best(out)
        summary |= choose_weights(trainer, chosen_by, best.tensors()) | {"best": best.state()}
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


def choose_weights(trainer: Trainer, held_out: Dataset | FeatureSet, best: dict[str, Tensor] | None) -> dict[str, Any]:
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
