"""Flowers, cats-vs-dogs and ImageNet as small folders of painted files: trained, mapped and tabulated end to end."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny import ANY_MASKS, lively
from PIL import Image

from patchguard.data.classes import CATS_VS_DOGS, FLOWERS
from patchguard.defenses import RobustMasking, Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.paper import EXPERIMENTS, local_attack, more_sets, occlusion
from patchguard.paper.context import Context
from patchguard.paper.experiment import Missing, Result, percent
from patchguard.paper.outcome import png
from patchguard.patch import Patch
from patchguard.storage import zoo
from patchguard.training import recipes

SIDE = 16  # of the small sets
FAST = {"batch_size": 8, "max_lr": 0.05}


def paint(folder: Path, classes: Sequence[str], each: int, side: int = SIDE, suffix: str = "jpg") -> None:
    """Write files whose colour says the class, with noise."""
    generator = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        colour = np.array([number & 1, (number >> 1) & 1, (number >> 2) & 1]) * 150 + 50
        for copy in range(each):
            noise = generator.integers(-40, 40, (side, side + copy % 3, 3))
            pixels = np.clip(colour + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{copy:03d}.{suffix}")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> object:
    """No models but those of the test, and one thread."""
    monkeypatch.setattr(zoo, "checkpoints", list)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shrink(monkeypatch: pytest.MonkeyPatch, dataset: str) -> None:
    """The paper's recipes for a set with small networks and images, and a rate for random weights.

    Channels come by eights: with fewer, the backward pass of a thin BagNet (CPU, channels last, torch 2.13) corrupts
    memory.
    """
    small = {
        "bn17": {"epochs": 3, "model.name": "srf", "model.settings": {"field": 5, "widths": [8, 16]}},
        "ds": {"epochs": 1, "model.name": "ds_resnet18", "model.settings": {"width": 0.125}},
        "resnet50": {"epochs": 1, "model.name": "resnet18", "model.settings": {"width": 0.125, "small_images": True}},
    }
    small["bn17_provable"] = {**small["bn17"], "mask_cells": 4}
    for kind, network in small.items():
        name = f"paper_{dataset}_{kind}"
        changes = {**network, "image_size": SIDE, "patch": 3, "other_patches": [], **FAST}
        entry = recipes.RECIPES[name]
        changed = entry.build().override(changes)
        monkeypatch.setitem(recipes.RECIPES, name, entry._replace(build=lambda changed=changed: changed))


def values(result: Result) -> dict[str, list[float | None]]:
    return {row.label: [percent(value) for value in row.ours] for table in result.tables for row in table.rows}


def test_flowers_are_trained_and_tabulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paint(tmp_path / "flower_photos", FLOWERS, each=20, side=SIDE)
    shrink(monkeypatch, "flowers")
    context = Context(data_root=tmp_path, cache=tmp_path / "cache", train=True)
    result = EXPERIMENTS["more_sets"].run(context, "flowers")
    table = result.tables[0]
    assert table.where == "tab-more-ds"
    assert {row.label: row.published for row in table.rows} == {
        "ResNet-50": (94.5, None),
        "Mask-BN": (91.4, 83.5),
        "Mask-DS": (90.5, 75.6),
    }
    found = values(result)
    assert found["ResNet-50"][1] is None
    for name in ("Mask-BN", "Mask-DS"):
        clean, robust = found[name]
        assert clean is not None
        assert robust is not None
        assert clean >= robust
    # Colours are easy: a network that learned nothing is right about a fifth.
    assert max(clean for clean, _ in found.values() if clean is not None) > 50
    assert {path.name for path in (tmp_path / "cache" / "models").iterdir()} == {
        f"paper_flowers_{kind}" for kind in ("bn17", "bn17_provable", "ds", "resnet50")
    }
    maps = context.maps("paper_flowers_bn17_provable", "flowers")
    assert len(maps) == 20  # a fifth
    assert more_sets.patch_of(maps) == Patch(3)  # 5.12 of 256 pixels


def test_a_set_without_its_models_is_not_run_and_says_what_would(tmp_path: Path) -> None:
    paint(tmp_path / "PetImages", CATS_VS_DOGS, each=5, side=8)
    result = more_sets.run(Context(data_root=tmp_path, cache=tmp_path / "cache"), "cats_vs_dogs")
    (table,) = result.tables
    assert [row.measured for row in table.rows] == [False] * 3
    assert table.rows[1].published == (97.5, 91.4)
    assert "patchguard train --recipe paper_cats_vs_dogs_bn17_provable" in table.rows[1].note
    with pytest.raises(Missing, match="flowers is not in"):
        more_sets.run(Context(data_root=tmp_path, cache=tmp_path / "cache"), "flowers")


# -- ImageNet ----------------------------------------------------------------------------------------------------------

CLASSES = tuple(f"n{number:08d}" for number in range(1000))


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thousand classes, one tiny training image each, and a validation image in some."""
    root = tmp_path_factory.mktemp("imagenet")
    paint(root / "train", CLASSES, each=1, side=2, suffix="png")
    paint(root / "val", CLASSES, each=1, side=40, suffix="png")
    return root


def put(context: Context, name: str, guard: LocalGuard, side: int) -> None:
    folder = context.cache / "models" / name
    folder.mkdir(parents=True)
    zoo.save(guard, folder / f"{name}.safetensors", recipe={"data": {"image_size": side}})


def test_imagenet_experiments_run_on_a_folder_of_a_thousand_classes(
    imagenet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context(data_root=imagenet, cache=tmp_path, limit=6)
    bagnet = lively(build("bagnet17", classes=1000, width=0.02))
    masks = RobustMasking(masks=ANY_MASKS)
    side = 120  # 13 x 13 cells
    put(context, "paper_imagenet_bn17_provable", LocalGuard(Preprocess(), bagnet, Evidence(low=0.0), masks), side)
    residual = lively(build("resnet50", classes=1000, width=0.02))
    plain = LocalGuard(Preprocess(), residual, Evidence(low=None), Undefended())
    put(context, "paper_imagenet_resnet50", plain, side)
    monkeypatch.setattr(occlusion, "SIDE", 64)
    for name in ("several_patches", "occlusion"):
        result = EXPERIMENTS[name].run(context, "imagenet")
        ran = [row for table in result.tables for row in table.rows if row.measured]
        assert ran, name
        assert all(png(drawing).startswith(b"\x89PNG") for drawing in result.figures.values())
    monkeypatch.setattr(local_attack, "SHORT", local_attack.PatchPGD(steps=1, step=0.1, locations=1))
    monkeypatch.setattr(local_attack, "MOST", {"imagenet": 5000})
    told: list[tuple[str, int, int]] = []
    few = Context(data_root=imagenet, cache=tmp_path, limit=2, progress=lambda *words: told.append(words))
    result = EXPERIMENTS["local_attack"].run(few, "imagenet")
    assert [row.published for row in result.tables[0].rows] == [(84.4,), (59.9,), (24.5,), (99.9,)]
    assert all(row.measured for row in result.tables[0].rows)
    assert {table.where for table in result.tables if table.where} == {"tab-local-attack", "fig-hist-net"}
    assert {what for what, _, _ in told} >= {
        f"paper_imagenet_resnet50, {stage}: images times steps" for stage in ("clean", "attack")
    }
    assert [(done, of) for what, done, of in told if ", clean" in what][-1] == (2, 0)
    assert any("short attack" in note for note in result.notes)


def test_a_block_lies_where_the_evidence_is(tmp_path: Path) -> None:
    paint(tmp_path / "flower_photos", FLOWERS, each=5, side=24)
    context = Context(data_root=tmp_path, cache=tmp_path / "cache")
    model = lively(build("srf", classes=5, field=5, widths=[8, 8]))
    guard = LocalGuard(Preprocess(), model, Evidence(low=0.0), RobustMasking(masks=ANY_MASKS), FLOWERS)
    put(context, "mine", guard, 24)
    maps = context.maps("mine", "flowers")
    patch = Patch(6)
    windows = maps.windows(patch)
    corners = occlusion.places(maps, patch, windows, torch.device("cpu"))
    field = maps.guard.field(*maps.size)
    logits = torch.from_numpy(np.array(maps.local_logits)).float().clamp(min=0)
    for image, (top, left) in enumerate(corners.tolist()):
        evidence = logits[image, int(maps.targets[image])]
        under = float(evidence[torch.from_numpy(field.touched((top, left, 6, 6)))].sum())
        heaviest = max(float(evidence[a:b, c:d].sum()) for a, b, c, d in windows.boxes.tolist())
        assert under == pytest.approx(heaviest, rel=1e-3)
    images = torch.zeros(1, 3, 24, 24)
    painted = occlusion.covered(images, corners[:1], patch)
    assert int((painted != images).any(1).sum()) == 6 * 6
    assert not bool(images.any())
