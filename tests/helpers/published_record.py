"""What tests/golden/ recorded of the published models, and the models held against it."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import patchguard as pg
from patchguard.data import sample
from patchguard.data.loading import resize_image

GOLDEN = Path(__file__).parents[1] / "golden"
RECORD = json.loads((GOLDEN / "record.json").read_text())
VALUES = dict(np.load(GOLDEN / "values.npz"))
SAME_MACHINE = (RECORD["torch"], RECORD["cpu_capability"]) == (
    torch.__version__,
    torch.backends.cpu.get_cpu_capability(),
)
PHOTOS = "imagenette_bn17"  # the model of large photos


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As it was recorded: several threads split sums otherwise, and round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def load(name: str) -> pg.LocalGuard:
    return pg.load(name)


def images_for(name: str, count: int) -> torch.Tensor:
    """8-bit source images: those of the sample, enlarged for the model of large photos."""
    images = sample.load().images[:count]
    return torch.stack([resize_image(image, (224, 224)) for image in images]) if name == PHOTOS else images


def patch_for(name: str) -> pg.Patch:
    return pg.Patch.of_area(0.02, height=224, width=224) if name == PHOTOS else pg.Patch(5)


def check_values(name: str, count: int) -> None:
    """The first answers are those of the record; all of them, if there are 500."""
    assert len(VALUES[f"{name}/label"]) == 500
    guard = load(name)
    certificate = guard.certify(images_for(name, count).float() / 255, patch_for(name))
    margin, expected = certificate.margin.numpy(), VALUES[f"{name}/margin"][:count]
    assert certificate.label.tolist() == VALUES[f"{name}/label"][:count].tolist()
    if SAME_MACHINE:
        assert margin.tolist() == expected.tolist()
        assert certificate.certified.tolist() == (expected > 0).tolist()
        assert certificate.weakest.flatten().tolist() == VALUES[f"{name}/weakest"][:count].tolist()
        assert certificate.rival.tolist() == VALUES[f"{name}/rival"][:count].tolist()
    else:
        rows, columns = guard.defense.masks.grid
        assert np.abs(margin - expected).max() <= 2 * guard.evidence.drift * rows * columns
