"""One training run from the data to the summary: train, choose weights, save the LocalGuard, measure the file.

    run.train(run.Options(recipe=recipes.named("tiny"), data=Path("data"), out=Path("runs/tiny")))

The folder `out` gets checkpoints, log.jsonl (one line per epoch), curve.png, NAME.safetensors and summary.json. The
same options again go on where the last call stopped. On the command line this is `patchguard train`; for torchrun,

    torchrun --nproc-per-node 2 -m patchguard.training.run --recipe tiny --data data --out runs/tiny

takes the same options.
"""

import importlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from patchguard import runtime
from patchguard.data import datasets
from patchguard.data.dataset import held_out_places
from patchguard.data.datasets import Dataset
from patchguard.data.loading import loaded
from patchguard.data.source import Source
from patchguard.errors import InputError
from patchguard.guard import Guard
from patchguard.guards.local import LocalGuard
from patchguard.patch import Patch
from patchguard.storage import zoo
from patchguard.training import curve, feed, loop
from patchguard.training.evaluate import Accuracy, evaluate
from patchguard.training.recipe import Recipe
from patchguard.training.trainer import Tick, Trainer

logger = logging.getLogger("patchguard.training")

MODES = ("default", "max-autotune-no-cudagraphs", "off")


@final
@dataclass(frozen=True, kw_only=True)
class Options:
    """What one call does with a recipe.

    `epochs` of None takes the recipe's, "auto" as many as fit `plan_minutes`, the time of the whole run over several
    calls, or else `minutes`, after which this call stops with a checkpoint. `started` is when its clock began. `test`
    measures the test set, too: once per published model. `compile_mode` of None compiles on GPUs alone. `limit` learns
    from the first images only. `deterministic` allows only kernels that give the same bits every time.
    """

    recipe: Recipe
    data: Path
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
        self.planned_epochs()

    def planned_epochs(self) -> int | None:
        """Return the number of epochs, or None where it is to fit the time."""
        if self.epochs == "auto":
            return None
        if self.epochs is None:
            return self.recipe.epochs
        if not str(self.epochs).isdigit() or int(self.epochs) < 1:
            raise InputError(f"`epochs` must be a whole number of at least 1, or auto; got {self.epochs!r}.")
        return int(self.epochs)

    def budget(self, certified: int) -> loop.Budget:
        """Return the limits of time, where so many images are certified after the last epoch."""
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
    report: loop.Report = lambda record: None,
    tick: Tick = lambda progress: None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Train, evaluate and save; return the summary, or None where the run stopped before its last epoch.

    Of several processes, only the first one returns a summary.
    """
    if options.deterministic:
        runtime.use_deterministic_kernels()
    with runtime.process_group(runtime.resolve_device(options.device)) as device:
        return _train(options, device, report, tick, stopped)


def _train(
    options: Options, device: torch.device, report: loop.Report, tick: Tick, stopped: Callable[[], bool]
) -> dict[str, Any] | None:
    recipe = options.recipe
    if device.type == "cuda" and not options.deterministic:
        torch.backends.cudnn.benchmark = True
    learned, held_out, test = data_of(options, device)
    mode = options.compile_mode or ("default" if device.type == "cuda" else "off")
    trainer = Trainer(recipe, learned, device=device, compile_mode=None if mode == "off" else mode)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    logger.info("%s: %s parameters, %d steps per epoch, %s", recipe.name, f"{parameters:,}", trainer.steps, device)
    patches = 1 + len(recipe.other_patches)
    certified = (2 + patches) * len(held_out) + (0 if test is None else patches * len(test))
    begun = time.monotonic()
    finished = loop.run(
        trainer,
        options.out,
        epochs=options.planned_epochs(),
        budget=options.budget(certified),
        held_out=held_out if len(held_out) else None,
        report=report,
        tick=tick,
        stopped=stopped,
    )
    if not finished or runtime.rank() > 0:
        return None
    # What the file and the summary say is what was done: the number of epochs may have been chosen for this run.
    recipe = trainer.recipe = replace(recipe, epochs=curve.logged(options.out)[-1]["epochs"])
    summary = {
        "recipe": recipe.to_json(),
        "environment": runtime.describe_environment(),
        "device": str(device),
        "processes": runtime.world_size(),
        "parameters": parameters,
        "learned_from": len(learned),
        "training_seconds_of_this_call": time.monotonic() - begun,
    }
    conclude(trainer, options.out, held_out, test, summary)
    return summary


def data_of(options: Options, device: torch.device) -> tuple[Dataset | Source, Dataset, Dataset | None]:
    """Return what to learn from, what is held out, and, where it is wanted, what to test on.

    Training photos that do not fit into half of the memory are decoded anew in every epoch.
    """
    recipe, size = options.recipe, options.recipe.source_size
    if recipe.dataset == "cifar10":
        splits = datasets.load(recipe.dataset, options.data)
        train_set = splits.train if options.limit is None else splits.train.subset(slice(0, options.limit))
        learned, held_out = datasets.hold_out(train_set, recipe.held_out_of(len(train_set)))
        return learned, held_out, splits.test if options.test else None
    source, tested = datasets.sources(recipe.dataset, options.data)
    # Files are sorted by class, so that the first ones would be of one class: a choice spread over all of them.
    source = source if options.limit is None else source.limited(options.limit)
    test = loaded(tested, size=size)[0] if options.test else None
    if feed.fits(len(source), size, device):
        whole = loaded(source, size=size)[0]
        return *datasets.hold_out(whole, recipe.held_out_of(len(whole))), test
    logger.info("%s images do not fit into memory and are decoded anew in every epoch", f"{len(source):,}")
    kept, apart = held_out_places(len(source), recipe.held_out_of(len(source)))
    held_out = loaded(source.subset(apart.tolist()), size=size)[0]
    return source.subset(kept.tolist()), held_out, test


def conclude(trainer: Trainer, out: Path, held_out: Dataset, test: Dataset | None, summary: dict[str, Any]) -> None:
    """Save the LocalGuard, measure what the file, rounded to float16, gives, and add it to the summary line by line."""
    recipe, path = trainer.recipe, out / f"{trainer.recipe.name}.safetensors"
    zoo.save(trainer.guard, path, recipe=recipe.to_json(), half=True)  # before anything else can go wrong
    summary |= {"file": path.name, "weights": "averaged"}
    held_out = loop.on_device(held_out, trainer)
    if len(held_out):
        best = loop.Best(out)
        summary |= choose_weights(trainer, held_out, best.tensors()) | {"best": best.state()}
        zoo.save(trainer.guard, path, recipe=recipe.to_json(), half=True)
    guard = zoo.load(path)
    if isinstance(guard, LocalGuard):
        guard.windows(recipe.patch, *trainer.size)  # traced while it lies on the CPU
    guard.model.to(device=trainer.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    summary["digest"] = zoo.inspect(path)["digest"]
    write_summary(out, summary)
    for name, data in (("held_out", held_out), ("test", None if test is None else loop.on_device(test, trainer))):
        if data is None or len(data) == 0:
            continue
        summary[name] = []
        for accuracy in accuracies(guard, recipe, data):
            logger.info("%s: %s", name, accuracy)
            summary[name].append(accuracy.to_json())
            write_summary(out, summary)


def choose_weights(trainer: Trainer, held_out: Dataset, best: dict[str, Tensor] | None) -> dict[str, Any]:
    """Leave in the trainer's LocalGuard those weights, averaged, last or best on the way, with the best held-out score.

    The held-out accuracy of the chosen ones is then a little too good; that of the test set is not.
    """
    model = trainer.guard.model
    averaged = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = {"averaged": averaged, "last": trainer.model.state_dict()}
    if best is not None:
        found["best"] = best
    measured: dict[str, Accuracy] = {}
    for name, tensors in found.items():
        model.load_state_dict(tensors)
        measured[name] = evaluate(trainer.guard, held_out, trainer.recipe.patch)
    chosen = max(measured, key=lambda name: measured[name].score)
    model.load_state_dict(found[chosen])
    return {"weights": chosen, "before_rounding": {name: each.to_json() for name, each in measured.items()}}


def accuracies(guard: Guard, recipe: Recipe, data: Dataset) -> Iterator[Accuracy]:
    """Measure the recipe's patch with the LocalGuard's masks, then other patches with masks refitted to each."""
    yield evaluate(guard, data, recipe.patch)
    for side in recipe.other_patches:
        yield evaluate(guard.for_patch(Patch(side), *data.size), data, Patch(side))


def write_summary(out: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json`, all or nothing."""
    draft = out / ".summary.draft"
    draft.write_text(json.dumps(summary, indent=1) + "\n")
    os.replace(draft, out / "summary.json")


def main(arguments: list[str] | None = None) -> None:
    """Run `patchguard train`, whose options are defined once, in its command."""
    # By name: as a module to be run this is the command line, which otherwise lies above it.
    command_line = importlib.import_module("patchguard.cli")
    command_line.app(["train", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    main()
