"""Train a recipe from the command line, evaluate it, and save the Guard.

    python -m patchguard.training.run --recipe cifar10 --data DATA --out runs/cifar10 --epochs auto --minutes 9
    python -m patchguard.training.run --recipe tiny --data DATA --out runs/tiny --set epochs=2 --set weights.plain=0.4

The folder `--out` gets checkpoints, log.jsonl (one line per epoch), NAME.safetensors and summary.json. The same command
again goes on where the last one stopped.
"""

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STARTED = time.monotonic()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from patchguard import zoo  # noqa: E402
from patchguard.data import datasets  # noqa: E402
from patchguard.data.datasets import Dataset  # noqa: E402
from patchguard.errors import InputError  # noqa: E402
from patchguard.guard import Guard  # noqa: E402
from patchguard.patch import Patch  # noqa: E402
from patchguard.runtime import choose_device, environment  # noqa: E402
from patchguard.training import loop  # noqa: E402
from patchguard.training.evaluate import Accuracy, evaluate  # noqa: E402
from patchguard.training.recipe import RECIPES, Recipe, named  # noqa: E402
from patchguard.training.trainer import Trainer  # noqa: E402

logger = logging.getLogger("patchguard.training")

MODES = ("default", "max-autotune-no-cudagraphs", "off")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    description, _, examples = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(
        prog="python -m patchguard.training.run",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--recipe", required=True, help=f"one of {', '.join(RECIPES)}")
    made.add_argument("--data", type=Path, required=True, help="folder that holds the dataset's files")
    made.add_argument("--out", type=Path, required=True, help="folder of this run")
    made.add_argument("--epochs", help="a number, or auto: as many as fit the minutes")
    made.add_argument("--minutes", type=float, help="stop in time, counted from the start of this call")
    made.add_argument(
        "--plan-minutes", type=float, help="with --epochs auto: time of the whole run, over several calls"
    )
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting; VALUE is JSON")
    made.add_argument("--test", action="store_true", help="measure the test set, too: once per published model")
    made.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    made.add_argument("--compile", default=None, choices=MODES, help="torch.compile; on GPUs it is the default")
    made.add_argument("--limit", type=int, help="learn from the first images only: for a quick try")
    return made


def assignments(texts: list[str]) -> dict[str, Any]:
    """Read KEY=VALUE; a value that is not JSON is text.

    >>> assignments(["epochs=3", "optimizer=adamw"])
    {'epochs': 3, 'optimizer': 'adamw'}
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"`--set` must be KEY=VALUE; got {text!r}.")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def show(record: dict[str, Any]) -> None:
    """Write one line about an epoch."""
    line = (
        f"epoch {record['epoch']:3d}/{record['epochs']}  loss {record['loss']:.4f}  "
        f"train {record['train_accuracy']:.2%}  masks {record['mask_step'] or 'none'}  "
        f"{record['images_per_second']:,.0f} images/s  left {record['left']:.0f} s"
    )
    if "held_out" in record:
        held_out = record["held_out"]
        line += f"  held out: clean {held_out['clean']:.2%} certified {held_out['certified']:.2%}"
    logger.info(line)


def train(options: argparse.Namespace) -> dict[str, Any] | None:
    """Train, evaluate and save; return the summary, or None where time ran out before the last epoch."""
    recipe = named(options.recipe).changed(assignments(options.set))
    epochs = epochs_of(options, recipe)
    device = choose_device(options.device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    splits = datasets.load(recipe.dataset, options.data)
    train_set = splits.train
    if options.limit is not None:
        train_set = train_set.subset(slice(0, options.limit))
    learned, held_out = datasets.hold_out(train_set, recipe.held_out)
    mode = options.compile or ("default" if device.type == "cuda" else "off")
    trainer = Trainer(recipe, learned, device=device, compile_mode=None if mode == "off" else mode)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    logger.info("%s: %s parameters, %d steps per epoch, %s", recipe.name, f"{parameters:,}", trainer.steps, device)
    patches = 1 + len(recipe.other_patches)
    certified = (2 + patches) * len(held_out) + (patches * len(splits.test) if options.test else 0)
    stop = math.inf if options.minutes is None else 60 * options.minutes
    plan = stop if options.plan_minutes is None else 60 * options.plan_minutes
    budget = loop.Budget(started=STARTED, stop=stop, plan=plan, certified=certified)
    begun = time.monotonic()
    finished = loop.run(
        trainer, options.out, epochs=epochs, budget=budget, held_out=held_out if len(held_out) else None, report=show
    )
    if not finished:
        logger.info("time is up before the last epoch: run the same command again to go on")
        return None
    summary = {
        "recipe": recipe.to_json(),
        "environment": environment(),
        "device": str(device),
        "parameters": parameters,
        "learned_from": len(learned),
        "training_seconds_of_this_call": time.monotonic() - begun,
    }
    conclude(trainer, options.out, held_out, splits.test if options.test else None, summary)
    return summary


def epochs_of(options: argparse.Namespace, recipe: Recipe) -> int | None:
    """Return the number of epochs, or None where it is to fit the time."""
    if options.epochs == "auto":
        return None
    if options.epochs is None:
        return recipe.epochs
    if not options.epochs.isdigit() or int(options.epochs) < 1:
        raise InputError(f"`--epochs` must be a whole number of at least 1, or auto; got {options.epochs!r}.")
    return int(options.epochs)


def conclude(trainer: Trainer, out: Path, held_out: Dataset, test: Dataset | None, summary: dict[str, Any]) -> None:
    """Save the Guard, measure what the file, rounded to float16, gives, and add it to the summary line by line."""
    recipe, path = trainer.recipe, out / f"{trainer.recipe.name}.safetensors"
    zoo.save(trainer.guard, path, recipe=recipe.to_json(), half=True)  # before anything else can go wrong
    summary |= {"file": path.name, "weights": "averaged"}
    held_out = loop.on_device(held_out, trainer)
    if len(held_out):
        best = loop.Best(out)
        summary |= choose_weights(trainer, held_out, best.tensors()) | {"best": best.state()}
        zoo.save(trainer.guard, path, recipe=recipe.to_json(), half=True)
    guard = zoo.load(path)
    guard.windows(recipe.patch, *trainer.images.shape[2:])  # traced while it lies on the CPU
    guard.model.to(device=trainer.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    summary["digest"] = zoo.inspect(path)["digest"]
    for name, data in (("held_out", held_out), ("test", None if test is None else loop.on_device(test, trainer))):
        if data is None or len(data) == 0:
            continue
        summary[name] = []
        for accuracy in accuracies(guard, recipe, data):
            logger.info("%s: %s", name, accuracy)
            summary[name].append(accuracy.to_json())
            (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def choose_weights(trainer: Trainer, held_out: Dataset, best: dict[str, Tensor] | None) -> dict[str, Any]:
    """Leave in the trainer's Guard those weights, averaged, last or best on the way, that certify most held-out images.

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
    chosen = max(measured, key=lambda name: (measured[name].proved, measured[name].right))
    model.load_state_dict(found[chosen])
    return {"weights": chosen, "before_rounding": {name: each.to_json() for name, each in measured.items()}}


def accuracies(guard: Guard[Any], recipe: Recipe, data: Dataset) -> Iterator[Accuracy]:
    """Measure the recipe's patch with the Guard's masks, then other patches with masks refitted to each."""
    yield evaluate(guard, data, recipe.patch)
    for side in recipe.other_patches:
        yield evaluate(guard.for_patch(Patch(side), *data.size), data, Patch(side))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; input that a user can mend ends in one line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    options = parser().parse_args(arguments)
    try:
        summary = train(options)
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if summary is not None:
        sys.stdout.write(json.dumps(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
