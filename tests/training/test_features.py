"""Frozen features: only the last layer learns, features are computed once, and a stopped run resumes in the middle."""

from pathlib import Path

import pytest
import torch
from helpers.stripe_dataset import striped_recipe, stripes

from patchguard.data.dataset import hold_out
from patchguard.storage import zoo
from patchguard.training import loop, run
from patchguard.training.evaluate import evaluate
from patchguard.training.features import FILE, compute_features
from patchguard.training.trainer import Trainer

CPU = torch.device("cpu")


def frozen_trainer(folder: Path, data: object) -> Trainer:
    """Return a trainer of the last layer of a network that was saved before."""
    path = folder / "trained.safetensors"
    if not path.exists():
        zoo.save(Trainer(striped_recipe(seed=5), stripes(64), device=CPU).guard, path)
    recipe = striped_recipe(**{"model.init_from": str(path), "model.freeze": True, "epochs": 2, "held_out": 0})
    return Trainer(recipe, data, device=CPU)


def test_only_the_last_layer_learns_and_features_give_the_accuracy_of_images(tmp_path: Path) -> None:
    learned, held_out = hold_out(stripes(100), 20)
    trainer = frozen_trainer(tmp_path, learned)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    sets = compute_features(trainer.guard.model, trainer.recipe.preprocess, (learned, held_out), tmp_path, key={})
    trainer.learn_from(sets[0])
    assert loop.run(trainer, tmp_path, epochs=2, budget=loop.Budget(started=0.0), held_out=sets[1])
    changed = {name for name, tensor in trainer.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"fc.weight", "fc.bias"}
    patch = trainer.recipe.patch
    by_features, by_images = (evaluate(trainer.guard, data, patch) for data in (sets[1], held_out))
    assert abs(by_features.correct - by_images.correct) <= 1  # features are rounded to 16 bits
    assert abs(by_features.certified_correct - by_images.certified_correct) <= 1


def test_features_of_a_stopped_run_are_not_computed_again(tmp_path: Path) -> None:
    data = stripes(64)
    trainer = frozen_trainer(tmp_path, data)
    seen: list[int] = []

    def compute(stop_after: int, key: str = "mine") -> object:
        return compute_features(
            trainer.guard.model,
            trainer.recipe.preprocess,
            (data,),
            tmp_path,
            key={"key": key},
            on_features=lambda done, total: seen.append(done),
            should_stop=lambda: len(seen) >= stop_after,
        )

    assert compute(2) is None
    (resumed,) = compute(100)
    assert seen == [16, 32, 48, 64]
    whole = trainer.guard.model.features(trainer.guard.model.normalize(data.images.float() / 255)).half()
    torch.testing.assert_close(resumed.features, whole, rtol=1e-2, atol=1e-2)
    compute(100, key="another")  # made anew
    assert seen[4:] == [16, 32, 48, 64]


@pytest.mark.slow
def test_a_run_with_frozen_features_leaves_the_guard_and_not_the_features(tmp_path: Path, monkeypatch: object) -> None:
    trainer = frozen_trainer(tmp_path, stripes(64))
    monkeypatch.setattr(run, "load_data", lambda options, device: (*hold_out(stripes(84), 20), None))
    recipe = trainer.recipe.override({"held_out": 20, "other_patches": []})
    summary = run.train(run.Options(recipe=recipe, root=tmp_path, out=tmp_path / "run", device="cpu"))
    assert summary["held_out"][0]["total"] == 20
    assert (tmp_path / "run" / summary["file"]).exists()
    assert not (tmp_path / "run" / FILE).exists()
