"""Pictures that a thin network learns in seconds, in memory and as a folder, and the recipe for it."""

import copy
import json
from functools import cache
from pathlib import Path

import torch
from PIL import Image

from patchguard.data.dataset import Dataset
from patchguard.training.recipe import Recipe
from patchguard.training.recipes import tiny
from patchguard.training.trainer import Trainer

SETTINGS = {
    "patch": 2,
    "model.settings": {"field": 5, "widths": [8, 8]},
    "optimizer.batch_size": 32,
    "augmentation.crop_padding": 1,
    "evaluation.held_out": 60,
}


def stripes(count: int, seed: int = 0) -> Dataset:
    """Class 0 has horizontal stripes, class 1 vertical ones, class 2 neither; much noise."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(3, (count,), generator=generator)
    rows = (torch.arange(16) % 2).float().view(1, 16, 1)
    patterns = torch.stack([rows.expand(3, 16, 16), rows.mT.expand(3, 16, 16), torch.full((3, 16, 16), 0.5)])
    noise = torch.rand(count, 3, 16, 16, generator=generator)
    images = (255 * (0.3 * patterns[targets] + 0.7 * noise)).to(torch.uint8)
    return Dataset(images, targets, ("lying", "standing", "none"))


def striped_recipe(**changes: object) -> Recipe:
    """Return the small recipe with other settings."""
    return tiny().override(SETTINGS).override(changes)


def write_stripes(root: Path, train: int = 220, test: int = 40) -> Path:
    """Write the pictures below `root` as train/<class>/ and val/<class>/."""
    for part, count, seed in (("train", train, 0), ("val", test, 9)):
        data = stripes(count, seed)
        for number, (image, target) in enumerate(zip(data.images, data.targets, strict=True)):
            path = root / part / data.class_names[target] / f"{number:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return root


def folder_options(data: Path, out: Path, recipe: str = "tiny", **changes: object) -> list[str]:
    """Return the options of `patchguard train` for the pictures in a folder."""
    options = ["--recipe", recipe, "--data", str(data), "--out", str(out), "--device", "cpu"]
    for key, value in {**SETTINGS, "data.image_size": 16, **changes}.items():
        options += ["--set", f"{key}={json.dumps(value)}"]
    return options


@cache
def _build_trainer(count: int, settings: str) -> Trainer:
    return Trainer(striped_recipe(**json.loads(settings)), stripes(count), device=torch.device("cpu"))


def striped_trainer(count: int = 64, **settings: object) -> Trainer:
    """Return a trainer that has learned nothing yet; a copy, since tracing a network takes most of the time."""
    return copy.deepcopy(_build_trainer(count, json.dumps(settings)))


def states_equal(one: Trainer, two: Trainer) -> bool:
    """Whether two trainers would take the same next step."""
    mine, theirs = one.state(), two.state()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
