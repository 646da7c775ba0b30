"""A small set of images under the name of CIFAR-10, and thin networks under the names of the zoo."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.small_guards import ANY_MASKS, build_once, randomize_weights
from patchguard.data.catalog import CIFAR10_CLASSES
from patchguard.data.source import Source, open_source
from patchguard.defenses import RobustMasking
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.paper.cached_logits import CachedLogits
from patchguard.paper.context import Context
from patchguard.patch import Patch
from patchguard.storage import zoo

IMAGES = 24


@build_once
def thin_guard(model: str = "srf", **settings) -> LocalGuard:
    """Robust masking of a thin network with ten classes."""
    settings = {"field": 5, "widths": [8, 12]} if model == "srf" else settings
    network = randomize_weights(build(model, classes=10, **settings))
    guard = LocalGuard(Preprocess(), network, Evidence(low=0.0), RobustMasking(masks=ANY_MASKS), CIFAR10_CLASSES)
    return guard.for_patch(Patch(5), 32, 32) if model == "srf" else guard


@build_once
def sample_source() -> Source:
    """Images of the sample; two of three have for true class what the thin network says, so that some are proved."""
    source = open_source("sample").limit(IMAGES)
    labels = thin_guard().predict(pixels(source)).label.tolist()
    targets = tuple(label if index % 3 else (label + 1) % 10 for index, label in enumerate(labels))
    return replace(source, targets=targets)


def pixels(source: Source) -> torch.Tensor:
    return torch.stack([source.read(index) for index in range(len(source))]).float() / 255


def save_model(context: Context, name: str, guard: LocalGuard, side: int | None = None) -> None:
    """Make a model available to a context under a name."""
    folder = context.cache / "models" / name
    folder.mkdir(parents=True)
    zoo.save(guard, folder / f"{name}.safetensors", recipe=None if side is None else {"data": {"image_size": side}})


def thin_context(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A context with one thin model, the sample under the name of CIFAR-10, and nothing else."""
    monkeypatch.setattr(zoo, "checkpoints", list)
    monkeypatch.setattr(Context, "images", lambda self, dataset: sample_source())
    # A guard that was traced before is not read from its file and traced again.
    load = zoo.load_guard
    monkeypatch.setattr(
        zoo, "load_guard", lambda path: thin_guard() if Path(path).stem == "cifar10_mask_srf" else load(path)
    )
    context = Context(cache=cache)
    if context.find("cifar10_mask_srf") is None:
        save_model(context, "cifar10_mask_srf", thin_guard())
    return context


def random_logits(
    guard: LocalGuard, logits: torch.Tensor, targets: torch.Tensor, side: int = 32, dataset: str = "cifar10"
) -> CachedLogits:
    """Cached logits without a network behind them."""
    return CachedLogits(
        model="thin",
        dataset=dataset,
        guard=guard,
        size=(side, side),
        local_logits=logits.half().numpy(),
        targets=targets,
        sample_indices=(0, 1)[: len(logits)],
        sample_logits=logits[:2].numpy(),
        about={},
    )
