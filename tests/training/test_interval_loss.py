"""Training on interval bounds: the loss is the bound, the radius grows, and `patchguard train` ends in a file."""

import json
from pathlib import Path

import pytest
import torch
from helpers.stripe_dataset import folder_options, write_stripes
from typer.testing import CliRunner

import patchguard as pg
from patchguard import models
from patchguard.cli import app
from patchguard.guards.interval import IntervalGuard, covered_pixels, positions
from patchguard.patch import Patch
from patchguard.training.augment import BatchRandom
from patchguard.training.interval_loss import BoundedNetwork, sample_patches, worst_scores

SMALL = {"side": 8, "widths": [4, 6], "kernels": [3, 4], "strides": [1, 2]}


def small() -> models.LocalModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return models.build("interval_cnn", classes=3, **SMALL)


def test_what_training_minimizes_is_the_margin_that_is_certified() -> None:
    model, images = small(), torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    places = positions(Patch(3), 8, 8)
    inside = covered_pixels(places, Patch(3), 8, 8).expand(4, *[-1] * 4)
    with torch.no_grad():
        logits, lead = BoundedNetwork(model)(images, inside, torch.tensor(1.0))
    proof = IntervalGuard(model).certify(images, Patch(3))
    assert torch.equal(logits.argmax(1), proof.label)
    scores = worst_scores(lead, proof.label).scatter(1, proof.label.unsqueeze(1), -torch.inf)
    assert torch.allclose(-scores.amax(1).double(), proof.margin, rtol=1e-4)


def test_without_a_radius_the_bounds_are_the_logits_and_they_widen_with_it() -> None:
    model, images = small(), torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    inside = covered_pixels(positions(Patch(2), 8, 8)[:5], Patch(2), 8, 8).expand(4, *[-1] * 4)
    with torch.no_grad():
        results = [BoundedNetwork(model)(images, inside, torch.tensor(fraction)) for fraction in (0.0, 0.5, 1.0)]
    logits, lead = results[0]
    assert torch.allclose(lead, (logits.unsqueeze(2) - logits.unsqueeze(1)).unsqueeze(1), atol=1e-4)
    assert results[1][1].mean() < lead.mean()
    assert results[2][1].mean() < results[1][1].mean()


def test_positions_are_sampled_uniformly_and_each_patch_is_whole() -> None:
    random = BatchRandom(torch.Generator().manual_seed(0), 400, slice(0, 400))
    inside = sample_patches(Patch(2, 3), (4, 5), random, 2)
    assert inside.shape == (400, 2, 1, 4, 5)
    assert (inside.sum((2, 3, 4)) == 6).all()
    assert len(inside.flatten(0, 1).unique(dim=0)) == 9


@pytest.mark.slow
def test_the_command_trains_and_the_file_certifies(tmp_path: Path) -> None:
    data = write_stripes(tmp_path / "pictures")
    changes = {
        "model.settings": {**SMALL, "side": 16, "widths": [8, 8]},
        "patch": 1,
        "max_lr": 0.005,
        "held_out": 8,
        "warmup_fraction": 0.2,
        "ramp": 0.4,
        "ema_decay": 0.8,
    }
    options = folder_options(data, tmp_path / "out", recipe="cifar10_ibp_2", **changes)
    result = CliRunner().invoke(app, ["train", *options, "--epochs", "12"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    (accuracy,) = summary["held_out"]
    assert accuracy["clean"] > 0.6
    assert accuracy["certified"] > 0.2
    guard = pg.load(tmp_path / "out" / "cifar10_ibp_2.safetensors")
    assert isinstance(guard, IntervalGuard)
    assert guard.class_names == ("lying", "none", "standing")
