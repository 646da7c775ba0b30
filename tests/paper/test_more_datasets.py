"""Flowers, cats-vs-dogs and ImageNet as small folders of painted files: trained and tabulated end to end."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.reproduction import save_model
from helpers.small_guards import ANY_MASKS, randomize_weights
from PIL import Image

from patchguard.data.catalog import CATS_VS_DOGS_CLASSES, FLOWERS_CLASSES, IMAGENETTE_BY_WORDNET, IMAGENETTE_CLASSES
from patchguard.defenses import RobustMasking, Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.paper import EXPERIMENTS, local_attack, masking_tables, occlusion
from patchguard.paper.context import Context
from patchguard.paper.experiment import Missing, Result, to_percent, to_png
from patchguard.patch import Patch
from patchguard.storage import zoo
from patchguard.training import recipes

SIDE = 16  # of the small sets
FAST = {"batch_size": 8, "max_lr": 0.05}


def paint(folder: Path, classes: Sequence[str], each: int, side: int = SIDE, suffix: str = "jpg") -> None:
    """Write files whose color says the class, with noise."""
    generator = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        color = np.array([number & 1, (number >> 1) & 1, (number >> 2) & 1]) * 150 + 50
        for copy in range(each):
            noise = generator.integers(-40, 40, (side, side + copy % 3, 3))
            pixels = np.clip(color + noise, 0, 255).astype(np.uint8)
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
    return {row.label: [to_percent(value) for value in row.ours] for table in result.tables for row in table.rows}


@pytest.mark.slow
def test_flowers_are_trained_and_tabulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paint(tmp_path / "flower_photos", FLOWERS_CLASSES, each=20, side=SIDE)
    shrink(monkeypatch, "flowers")
    context = Context(root=tmp_path, cache=tmp_path / "cache", train=True)
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
    # Colors are easy: a network that learned nothing is right about a fifth.
    assert max(clean for clean, _ in found.values() if clean is not None) > 50
    assert {path.name for path in (tmp_path / "cache" / "models").iterdir()} == {
        f"paper_flowers_{kind}" for kind in ("bn17", "bn17_provable", "ds", "resnet50")
    }
    logits = context.logits("paper_flowers_bn17_provable", "flowers")
    assert len(logits) == 20  # a fifth
    assert masking_tables.patch_of_area(logits) == Patch(3)  # 5.12 of 256 pixels


def test_a_set_without_its_models_is_not_run_and_says_what_would(tmp_path: Path) -> None:
    paint(tmp_path / "PetImages", CATS_VS_DOGS_CLASSES, each=5, side=8)
    result = EXPERIMENTS["more_sets"].run(Context(root=tmp_path, cache=tmp_path / "cache"), "cats_vs_dogs")
    (table,) = result.tables
    assert [row.measured for row in table.rows] == [False] * 3
    assert table.rows[1].published == (97.5, 91.4)
    assert "patchguard train --recipe paper_cats_vs_dogs_bn17_provable" in table.rows[1].note
    with pytest.raises(Missing, match="flowers is not in"):
        EXPERIMENTS["more_sets"].run(Context(root=tmp_path, cache=tmp_path / "cache"), "flowers")


# -- ImageNet ----------------------------------------------------------------------------------------------------------

CLASSES = tuple(f"n{number:08d}" for number in range(1000))


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thousand classes, one tiny training image each, and a validation image in some."""
    root = tmp_path_factory.mktemp("imagenet")
    paint(root / "train", CLASSES, each=1, side=2, suffix="png")
    paint(root / "val", CLASSES, each=1, side=40, suffix="png")
    return root


@pytest.mark.slow
def test_imagenet_experiments_run_on_a_folder_of_a_thousand_classes(
    imagenet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context(root=imagenet, cache=tmp_path, limit=6)
    bagnet = randomize_weights(build("bagnet17", classes=1000, width=0.02))
    masks = RobustMasking(masks=ANY_MASKS)
    side = 120  # 13 x 13 cells
    save_model(
        context, "paper_imagenet_bn17_provable", LocalGuard(Preprocess(), bagnet, Evidence(low=0.0), masks), side
    )
    residual = randomize_weights(build("resnet50", classes=1000, width=0.02))
    plain = LocalGuard(Preprocess(), residual, Evidence(low=None), Undefended())
    save_model(context, "paper_imagenet_resnet50", plain, side)
    monkeypatch.setattr(occlusion, "SIDE", 64)
    for name in ("several_patches", "occlusion"):
        result = EXPERIMENTS[name].run(context, "imagenet")
        ran = [row for table in result.tables for row in table.rows if row.measured]
        assert ran, name
        assert all(to_png(drawing).startswith(b"\x89PNG") for drawing in result.figures.values())
    monkeypatch.setattr(local_attack, "SHORT_ATTACK", local_attack.PatchPGD(steps=1, step=0.1, locations=1))
    told: list[tuple[str, int, int]] = []
    few = Context(root=imagenet, cache=tmp_path, limit=2, progress=lambda *words: told.append(words))
    result = EXPERIMENTS["local_attack"].run(few, "imagenet")
    assert [row.published for row in result.tables[0].rows] == [(84.4,), (59.9,), (24.5,), (99.9,)]
    assert all(row.measured for row in result.tables[0].rows)
    assert {table.where for table in result.tables if table.where} == {"tab-local-attack", "fig-hist-net"}
    assert {what for what, _, _ in told} >= {
        f"paper_imagenet_resnet50, {stage}: images times steps" for stage in ("clean", "attack")
    }
    assert [(done, of) for what, done, of in told if ", clean" in what][-1] == (2, 0)
    assert any("short attack" in note for note in result.notes)


@pytest.mark.slow
def test_photo_experiments_run_on_a_folder_of_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "val"):
        paint(tmp_path / part, tuple(IMAGENETTE_BY_WORDNET), each=2, side=24)
    context = Context(root=tmp_path, cache=tmp_path / "cache", limit=4)
    masks = RobustMasking(masks=ANY_MASKS)
    srf, resnet = (
        randomize_weights(build("srf", classes=10, field=5, widths=[8, 8])),
        randomize_weights(build("resnet18", classes=10, width=0.1, small_images=True)),
    )
    save_model(
        context, "imagenette_mask_bn17", LocalGuard(Preprocess(), srf, Evidence(low=0.0), masks, IMAGENETTE_CLASSES), 24
    )
    plain = LocalGuard(Preprocess(), resnet, Evidence(low=None), Undefended(), IMAGENETTE_CLASSES)
    save_model(context, "imagenette_resnet50", plain, 24)
    monkeypatch.setattr(occlusion, "SIDE", 8)
    blocks = EXPERIMENTS["occlusion"].run(context, "imagenette")
    (table,) = blocks.tables
    assert all(row.measured for row in table.rows)
    assert [row.note for row in table.rows] == ["imagenette_mask_bn17"] * 2 + ["imagenette_resnet50"]
    _, covered, certified = (to_percent(value) for value in table.rows[0].ours)
    assert covered >= certified  # a certified image stays correct under any block of that size
    monkeypatch.setattr(local_attack, "SHORT_ATTACK", local_attack.PatchPGD(steps=1, step=0.1, locations=1))
    attacked = EXPERIMENTS["local_attack"].run(context, "imagenette")
    assert [row.published for row in attacked.tables[0].rows] == [(56.4,), (15.3,), (41.1,), (99.1,)]
    assert {table.where for table in attacked.tables if table.where} == {"tab-local-attack", "fig-hist-nette"}
    assert set(attacked.figures) == {"local_predictions", "histogram", "ceiling"}
    for result in (blocks, attacked):
        assert all(to_png(drawing).startswith(b"\x89PNG") for drawing in result.figures.values())


def test_a_block_lies_where_the_evidence_is(tmp_path: Path) -> None:
    paint(tmp_path / "flower_photos", FLOWERS_CLASSES, each=5, side=24)
    context = Context(root=tmp_path, cache=tmp_path / "cache")
    model = randomize_weights(build("srf", classes=5, field=5, widths=[8, 8]))
    guard = LocalGuard(Preprocess(), model, Evidence(low=0.0), RobustMasking(masks=ANY_MASKS), FLOWERS_CLASSES)
    save_model(context, "mine", guard, 24)
    logits = context.logits("mine", "flowers")
    patch = Patch(6)
    windows = logits.windows(patch)
    corners = occlusion.block_positions(logits, patch, windows, torch.device("cpu"))
    field = logits.guard.field(*logits.size)
    values = torch.from_numpy(np.array(logits.local_logits)).float().clamp(min=0)
    for image, (top, left) in enumerate(corners.tolist()):
        evidence = values[image, int(logits.targets[image])]
        under = float(evidence[torch.from_numpy(field.touched_cells((top, left, 6, 6)))].sum())
        heaviest = max(float(evidence[a:b, c:d].sum()) for a, b, c, d in windows.boxes.tolist())
        assert under == pytest.approx(heaviest, rel=1e-3)
    images = torch.zeros(1, 3, 24, 24)
    painted = occlusion.cover(images, corners[:1], patch)
    assert int((painted != images).any(1).sum()) == 6 * 6
    assert not bool(images.any())
