"""What a run begins with: weights of a trained model of the same shape, and a teacher of the same classes."""

from pathlib import Path

import pytest
import torch
from helpers.small_guards import random_images, randomize_weights

from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.models.bagnet import convert_resnet50_state
from patchguard.storage import zoo
from patchguard.training.initial import start_from, teacher_of

CPU = torch.device("cpu")
LAST = {"fc.weight", "fc.bias"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHGUARD_ZOO", str(tmp_path))
    return tmp_path


def undefended(model: str, **settings: object) -> LocalGuard:
    return LocalGuard(Preprocess(), build(model, **settings), Evidence(low=None), Undefended())


def fresh(classes: int = 3, field: int = 5, widths: tuple[int, ...] = (8, 8)) -> LocalGuard:
    return undefended("srf", classes=classes, field=field, widths=list(widths))


def save(folder: Path, guard: LocalGuard, name: str = "trained") -> LocalGuard:
    randomize_weights(guard.model)
    zoo.save(guard, folder / f"{name}.safetensors")
    return guard


def weights(guard: LocalGuard) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in guard.model.state_dict().items()}


def test_all_weights_are_those_of_the_trained_model(folder: Path) -> None:
    trained, guard = weights(save(folder, fresh())), fresh()
    assert any(not torch.equal(trained[name], tensor) for name, tensor in weights(guard).items())
    start_from(guard, "trained")
    assert all(torch.equal(trained[name], tensor) for name, tensor in weights(guard).items())


def test_with_other_classes_the_last_layer_alone_stays_fresh(folder: Path) -> None:
    trained, guard = weights(save(folder, fresh(classes=3))), fresh(classes=5)
    before = weights(guard)
    start_from(guard, "trained")
    for name, tensor in weights(guard).items():
        assert torch.equal(tensor, before[name] if name in LAST else trained[name]), name
    assert before.keys() >= LAST


@pytest.mark.parametrize(
    "changes", [{"widths": (16, 16)}, {"field": 7, "widths": (8, 8, 8)}], ids=["other widths", "more layers"]
)
def test_a_model_of_another_shape_is_refused_and_leaves_the_weights_alone(
    folder: Path, changes: dict[str, object]
) -> None:
    save(folder, fresh(**changes))
    guard = fresh()
    before = weights(guard)
    with pytest.raises(InputError, match=r"of the same shape; 'trained' differs in \S+, \S+, \S+\."):
        start_from(guard, "trained")
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(guard).items())


@pytest.mark.parametrize("classes", [4, 3])
def test_a_bagnet_takes_the_summed_kernels_of_a_resnet50(folder: Path, classes: int) -> None:
    residual = save(folder, undefended("resnet50", classes=4, width=0.02), "residual")
    bagnet = undefended("bagnet9", classes=classes, width=0.02)
    bagnet.model.fc.weight.data.fill_(7.0)
    start_from(bagnet, "residual")
    expected = convert_resnet50_state(residual.model.backbone.state_dict(), field=9)
    for name, tensor in weights(bagnet).items():
        if name not in LAST or classes == 4:
            assert torch.equal(tensor, expected[name]), name
    assert bool((bagnet.model.fc.weight == 7.0).all()) == (classes == 3)


def test_no_other_resnet_stands_for_a_resnet50(folder: Path) -> None:
    save(folder, undefended("resnet18", classes=4, width=0.05), "residual")
    with pytest.raises(InputError, match="same shape"):
        start_from(undefended("bagnet9", classes=4, width=0.02), "residual")


def test_a_teacher_answers_as_it_was_saved_and_learns_nothing(folder: Path) -> None:
    trained = save(folder, fresh())
    trained.model.eval()
    teacher = teacher_of("trained", fresh(), CPU)
    assert not teacher.model.training
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    images = random_images(3, 16)
    assert torch.equal(teacher.predict(images).label, trained.predict(images).label)
    torch.testing.assert_close(teacher.local_logits(images), trained.local_logits(images))


def test_a_teacher_of_other_classes_is_refused(folder: Path) -> None:
    save(folder, fresh(classes=5))
    with pytest.raises(InputError, match="`teacher` must know the 3 classes to learn; 'trained' has 5"):
        teacher_of("trained", fresh(classes=3), CPU)
