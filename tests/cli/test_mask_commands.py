"""`--defense PixelMasks` of certify, predict and attack, and model files with masks on pixels."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.command_line import lines
from helpers.small_guards import random_images, srf_guard
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import patchguard as pg
from patchguard.attacks.base import offers_gradients
from patchguard.cli import app
from patchguard.errors import InputError
from patchguard.geometry.mask_sets import MaskSet
from patchguard.guards.identity import canonical, digest_tensors
from patchguard.guards.pixel_masks import PixelMaskGuard
from patchguard.patch import Patch
from patchguard.runs import engine
from patchguard.runs.images import open_sources
from patchguard.runs.job import prepare
from patchguard.storage import zoo

PATCH = Patch(2)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    zoo.save(srf_guard(), path)
    return str(path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number, image in enumerate(random_images(6, 16)):
        pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        Image.fromarray(np.ascontiguousarray(pixels)).save(folder / f"{number}.png")
    return folder


def run(*words: object, status: int = 0):
    outcome = CliRunner().invoke(app, [str(word) for word in words])
    assert outcome.exit_code == status, outcome.output
    return outcome


def read_images(folder: Path) -> torch.Tensor:
    arrays = [np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255


MASKED = ("--defense", "PixelMasks", "--masks", 2, "--patch", 2)


def test_a_run_says_what_it_costs_and_records_what_the_guard_answers(model, photos, tmp_path) -> None:
    out = tmp_path / "run"
    told = run("certify", "--model", model, "--data", photos, *MASKED, "--out", out)
    assert "up to 11 passes of the network per image" in told.stderr
    assert "for 6" in told.stderr
    guard = pg.defend(srf_guard(), PATCH, size=(16, 16), masks=2)
    images = read_images(photos)
    certificate = guard.certify(images, PATCH)
    records = [json.loads(line) for line in lines(out)]
    assert [record["label"] for record in records] == guard.predict(images).label.tolist()
    assert [record["patches"]["2x2"]["certified"] for record in records] == certificate.certified.tolist()
    assert [record["largest"] for record in records] == guard.largest_certified_patch(images).tolist()
    assert any(record["patches"]["2x2"]["certified"] for record in records)
    assert "PixelMasks" in (out / "report.html").read_text()
    settings = json.loads((out / "run.json").read_text())["settings"]
    assert (settings["defense"], settings["rule"]["masks"]) == ("PixelMasks", 4)
    again = run("certify", "--model", model, "--data", photos, *MASKED, "--out", out)
    assert "already complete" in again.stdout
    other = ("--defense", "PixelMasks", "--masks", 3, "--patch", 2)
    refused = run("certify", "--model", model, "--data", photos, *other, "--out", out, status=1)
    assert "already complete" not in refused.stdout  # other masks are another rule, and another run


def test_a_stopped_run_goes_on_without_asking_again(model, photos, tmp_path, monkeypatch) -> None:
    out, asked = tmp_path / "run", []
    words = ("certify", "--model", model, "--data", photos, *MASKED, "--out", out)
    run(*words)
    whole = lines(out)
    (out / "summary.json").unlink()
    shard = next(out.glob("records-*.jsonl"))
    shard.write_text("".join(line + "\n" for line in shard.read_text().splitlines()[:4]))
    examine = PixelMaskGuard.examine

    def count(guard, images, plan):
        if plan.tasks:  # pictures need no proof
            asked.append(len(images))
        return examine(guard, images, plan)

    monkeypatch.setattr(PixelMaskGuard, "examine", count)
    run(*words)
    assert lines(out) == whole
    assert asked == [1, 1]  # image by image: two had no record


def test_predict_labels_behind_masks_and_proves_if_asked(model, photos) -> None:
    image = sorted(photos.glob("*.png"))[0]
    plain = run("predict", image, "--model", model, "--defense", "PixelMasks", "--masks", 2, "--json")
    assert "passes" not in plain.stderr
    proved = run("predict", image, "--model", model, *MASKED, "--json")
    assert "up to 11 passes" in proved.stderr
    guard = pg.defend(srf_guard(), PATCH, size=(16, 16), masks=2)
    images = read_images(photos)[:1]
    answer = json.loads(proved.stdout)
    assert answer["label"] == int(guard.predict(images).label)
    assert answer["patches"]["2x2"]["certified"] is bool(guard.certify(images, PATCH).certified)


def test_attacks_go_through_the_masks_and_refute_no_certificate(model, photos, tmp_path) -> None:
    out = tmp_path / "attack"
    words = ("attack", "--model", model, "--data", photos, *MASKED, "--steps", 3, "--locations", 1, "--out", out)
    told = run(*words)
    assert "the attack comes on top" in told.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["refuted"] == []
    assert summary["proved"]["correct"] > 0
    assert summary["attempted"]["correct"] == 6
    assert (out / "report.html").exists()


def test_gradients_through_the_masks_are_those_of_the_masked_images() -> None:
    guard = pg.defend(srf_guard(), PATCH, size=(16, 16), masks=2)
    images = random_images(2, 16).requires_grad_(True)
    logits = guard.differentiable_logits(images)
    assert logits.shape == (2, 3, 4, 1)
    (gradient,) = torch.autograd.grad(logits[0, 0, 1, 0], images)
    top, left, rows, columns = guard.masks.boxes[1]
    hidden = torch.zeros(16, 16, dtype=torch.bool)
    hidden[top : top + rows, left : left + columns] = True
    assert bool((gradient[0][:, hidden] == 0).all())
    assert bool((gradient[0][:, ~hidden] != 0).any())
    assert bool((gradient[1] == 0).all())
    assert offers_gradients(guard)
    function = pg.defend(lambda images: images.mean((2, 3)), PATCH, size=(16, 16), masks=2, name="colors")
    assert not offers_gradients(function)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--masks", 3), "`--masks` is for --defense PixelMasks"),
        (("--defense", "PixelMasks", "--masks", 0), "`masks` must be a whole number from 1 to 32"),
        (("--defense", "PixelMasks", "--tau", 1), "are for guards with cells"),
        (("--defense", "PixelMasks", "--top-k", 2), "`top_k` must be 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(words, message, model, photos, tmp_path) -> None:
    told = run("certify", "--model", model, "--data", photos, "--out", tmp_path / "run", *words, status=1)
    assert message in told.stderr
    assert not (tmp_path / "run").exists()


# -- model files -------------------------------------------------------------------------------------------------------


def test_a_saved_guard_answers_the_same_and_keeps_its_masks(photos, tmp_path) -> None:
    masks = MaskSet((16, 16), ((0, 0, 10, 16), (6, 0, 10, 16)), 2)
    guard = pg.defend(srf_guard(), Patch(4, 16), size=(16, 16), masks=masks, fill=(0.1, 0.2, 0.3), drift=0.01)
    path = tmp_path / "guarded.safetensors"
    zoo.save(guard, path)
    loaded = zoo.load(path)
    assert isinstance(loaded, PixelMaskGuard)
    assert (loaded.masks, loaded.fill, loaded.drift) == (masks, (0.1, 0.2, 0.3), 0.01)
    assert loaded.digest == guard.digest
    images = read_images(photos)
    assert torch.equal(loaded.certify(images, Patch(4, 16)).margin, guard.certify(images, Patch(4, 16)).margin)
    told = run("certify", "--model", path, "--data", photos, "--patch", "4x16", "--out", tmp_path / "run")
    assert "up to 4 passes" in told.stderr
    assert json.loads(lines(tmp_path / "run")[0])["patches"]["4x16"]["masks"] == "own"
    run("certify", "--model", path, "--data", photos, *MASKED, "--out", tmp_path / "refitted")
    assert json.loads(lines(tmp_path / "refitted")[0])["patches"]["2x2"]["masks"] == "refitted"


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("boxes", [[0, 0, 10]], "4 whole numbers"),
        ("boxes", [[0, 0, 10, 17]], "must lie inside images"),
        ("boxes", [], "from 1 to 1024 masks"),
        ("size", [16, 16, 16], "2 whole numbers"),
        ("fill", [0.5, 0.5], "`defense.fill` must be"),
        ("fill", [0.5, 0.5, "red"], "number"),
        ("drift", -1.0, "`drift` must be"),
        ("per_axis", 0, "`masks` must be"),
    ],
)
def test_a_file_with_other_settings_is_refused(entry, value, message, tmp_path) -> None:
    path = tmp_path / "guarded.safetensors"
    zoo.save(pg.defend(srf_guard(), PATCH, size=(16, 16), masks=2), path)
    with safe_open(path, framework="pt") as archive:
        settings = json.loads(archive.metadata()["patchguard"])
    settings["defense"][entry] = value
    tensors, written = load_file(path), canonical(settings)
    save_file(tensors, path, metadata={"patchguard": written, "digest": digest_tensors(tensors, written)})
    with pytest.raises(InputError, match=message):
        zoo.load(path)


def test_a_guard_around_any_other_classifier_is_not_saved(tmp_path) -> None:
    guard = pg.defend(lambda images: images.mean((2, 3)), PATCH, size=(16, 16), masks=2, name="colors")
    with pytest.raises(InputError, match="must be a torch module to be saved"):
        zoo.save(guard, tmp_path / "guarded.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_batches_are_small_where_an_image_takes_many_passes(photos) -> None:
    source = open_sources([str(photos)], None)
    job = prepare(source=source, model=srf_guard(), patches=["2"], defense="PixelMasks")
    masks = len(MaskSet.covering((16, 16), PATCH, 6).boxes)
    assert job.guard.most_passes == 1 + masks * (masks + 1) // 2 > 300
    assert engine.resolve_device(job, "cpu", None)[1] == 1
    assert engine.resolve_device(job, "cpu", 4)[1] == 4
    plain = prepare(source=source, model=srf_guard(), patches=["2"])
    assert engine.resolve_device(plain, "cpu", None)[1] == 16
    assert engine.describe_cost(plain, "cpu") == ""
