"""`patchguard train --data photos --out DIR` with no other flag: from class folders to a certified report."""

import json
from pathlib import Path

import pytest
import torch
from helpers.stripe_dataset import write_stripes
from typer.testing import CliRunner

from patchguard.cli import app
from patchguard.storage import zoo
from patchguard.training.own_photos import choose_recipe


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_folder_of_photos_becomes_a_model_a_card_and_a_certified_report(tmp_path: Path) -> None:
    photos, out = write_stripes(tmp_path / "photos", train=48, test=10), tmp_path / "mine"
    command = ["train", "--data", str(photos), "--out", str(out), "--device", "cpu", "--set", "epochs=4"]
    stopped = CliRunner().invoke(app, [*command, "--minutes", "0"])
    assert stopped.exit_code == 0, stopped.output
    assert "48 photos of 3 classes" in stopped.stderr
    assert "min on this machine" in stopped.stderr
    assert "the same command resumes" in stopped.stderr
    assert not (out / "summary.json").exists()
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    epochs = [json.loads(line)["epoch"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert epochs == [1, 2, 3, 4]
    assert zoo.load(out / "own_photos.safetensors").class_names == ("lying", "none", "standing")
    assert json.loads((out / "certified" / "summary.json").read_text())["images"] == 10
    assert (out / "certified" / "report.html").exists()
    next_command = f"patchguard certify --model {out / 'own_photos.safetensors'} --data NEW_PHOTOS --patch 2%"
    assert f"next: {next_command}" in result.stdout
    assert next_command in (out / "card.md").read_text()


@pytest.mark.parametrize(
    ("photos", "side", "here", "network", "size"),
    [
        (100, 400, True, "bagnet17", 96),
        (100_000, 400, True, "bagnet17", 64),
        (100, 400, False, "srf", 64),
        (5000, 32, True, "srf", 32),
    ],
)
def test_the_recipe_fits_the_number_and_the_size_of_the_photos(
    photos: int, side: int, here: bool, network: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "named_file", lambda name: Path("there") if here else None)
    recipe = choose_recipe(photos, side)
    assert (recipe.model.name, recipe.data.image_size) == (network, size)
    assert recipe.optimizer.batch_size <= photos * 0.8
    assert recipe.model.freeze == (network == "bagnet17")


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "`--out` must be given"), (["--data", "cifar10", "--out", "x"], "`--recipe` must be given for cifar10")],
)
def test_what_is_missing_is_named(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["train", *options])
    assert result.exit_code == 1
    assert message in result.stderr
