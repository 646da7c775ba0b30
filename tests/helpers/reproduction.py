"""A small set of images under the name of CIFAR-10, and thin networks under the names of the zoo."""

from dataclasses import replace

import torch

from helpers.small_guards import ANY_MASKS, randomize_weights
from patchguard.data.classes import CIFAR10
from patchguard.data.source import Source, open_source
from patchguard.defenses import RobustMasking
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.paper.context import Context
from patchguard.patch import Patch
from patchguard.storage import zoo

IMAGES = 24


def thin_guard(model: str = "srf", **settings) -> LocalGuard:
    """Robust masking of a thin network with ten classes."""
    settings = {"field": 5, "widths": [8, 12]} if model == "srf" else settings
    network = randomize_weights(build(model, classes=10, **settings))
    guard = LocalGuard(Preprocess(), network, Evidence(low=0.0), RobustMasking(masks=ANY_MASKS), CIFAR10)
    return guard.for_patch(Patch(5), 32, 32) if model == "srf" else guard


def sample_source(guard: LocalGuard) -> Source:
    """Images of the sample; two of three have for true class what the network says, so that some are proved."""
    source = open_source("sample").limited(IMAGES)
    said = guard.predict(pixels(source)).label.tolist()
    targets = tuple(label if place % 3 else (label + 1) % 10 for place, label in enumerate(said))
    return replace(source, targets=targets)


def pixels(source: Source) -> torch.Tensor:
    return torch.stack([source.read(place) for place in range(len(source))]).float() / 255


def put(context: Context, name: str, guard: LocalGuard) -> None:
    """Make a model available under a name."""
    folder = context.cache / "models" / name
    folder.mkdir(parents=True)
    zoo.save(guard, folder / f"{name}.safetensors")
