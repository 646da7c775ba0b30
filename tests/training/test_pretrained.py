"""Weights that a run starts from: of trained models by name, and of ResNet-50, on fabricated thin networks."""

import copy
from pathlib import Path

import pytest
import torch
from helpers.small_guards import random_images, randomize_weights
from safetensors.torch import save_file

from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.models.bagnet import convert_resnet50_state
from patchguard.models.resnet import LocalResNet
from patchguard.storage import zoo
from patchguard.training.pretrained import (
    ROWS,
    imagenet_resnet50,
    imagenette_resnet50,
    init_from,
    load_teacher,
    main,
)
from patchguard.training.recipes import get_recipe

CPU = torch.device("cpu")
LAST = {"fc.weight", "fc.bias"}
WIDTH = 0.125


# -- trained models ----------------------------------------------------------------------------------------------------


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
    init_from(guard.model, "trained")
    assert all(torch.equal(trained[name], tensor) for name, tensor in weights(guard).items())


def test_with_other_classes_the_last_layer_alone_stays_fresh(folder: Path) -> None:
    trained, guard = weights(save(folder, fresh(classes=3))), fresh(classes=5)
    before = weights(guard)
    init_from(guard.model, "trained")
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
        init_from(guard.model, "trained")
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(guard).items())


@pytest.mark.parametrize("classes", [4, 3])
def test_a_bagnet_takes_the_summed_kernels_of_a_resnet50(folder: Path, classes: int) -> None:
    residual = save(folder, undefended("resnet50", classes=4, width=0.02), "residual")
    bagnet = undefended("bagnet9", classes=classes, width=0.02)
    bagnet.model.fc.weight.data.fill_(7.0)
    init_from(bagnet.model, "residual")
    expected = convert_resnet50_state(residual.model.backbone.state_dict(), field=9)
    for name, tensor in weights(bagnet).items():
        if name not in LAST or classes == 4:
            assert torch.equal(tensor, expected[name]), name
    assert bool((bagnet.model.fc.weight == 7.0).all()) == (classes == 3)


def test_no_other_resnet_stands_for_a_resnet50(folder: Path) -> None:
    save(folder, undefended("resnet18", classes=4, width=0.05), "residual")
    with pytest.raises(InputError, match="same shape"):
        init_from(undefended("bagnet9", classes=4, width=0.02).model, "residual")


def test_a_teacher_answers_as_it_was_saved_and_learns_nothing(folder: Path) -> None:
    trained = save(folder, fresh())
    trained.model.eval()
    teacher = load_teacher("trained", 3, CPU)
    assert not teacher.model.training
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    images = random_images(3, 16)
    assert torch.equal(teacher.predict(images).label, trained.predict(images).label)
    torch.testing.assert_close(teacher.local_logits(images), trained.local_logits(images))


def test_a_teacher_of_other_classes_is_refused(folder: Path) -> None:
    save(folder, fresh(classes=5))
    with pytest.raises(InputError, match=r"`loss.teacher` must know the 3 classes to learn; 'trained' has 5"):
        load_teacher("trained", 3, CPU)


# -- ResNet-50 ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> LocalResNet:
    """A thin ResNet-50 with the thousand classes and statistics that it might have learned."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build("resnet50", width=WIDTH, stride_on="1x1").eval()
    for name, buffer in model.backbone.named_buffers():
        if buffer.is_floating_point():
            shift = torch.rand(buffer.shape, generator=generator)
            buffer.copy_(0.5 + shift if name.endswith("var") else 0.2 * shift)
    # Outputs of a network for pixels from 0 to 255.
    model.backbone.conv1.weight.data *= 1000
    model.backbone.bn1.running_mean *= 1000
    model.backbone.bn1.running_var *= 1e6
    return model


def write_weights(model: LocalResNet, path: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in model.backbone.state_dict().items()}, path)
    return path


def test_the_ten_classes_answer_as_among_the_thousand_and_fit_float16(trained: LocalResNet, tmp_path: Path) -> None:
    guard = imagenette_resnet50(write_weights(trained, tmp_path / "weights.safetensors"), width=WIDTH)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = trained(images)[:, list(ROWS)]
        torch.testing.assert_close(guard.model(images), expected, rtol=1e-3, atol=1e-3)
    zoo.save(guard, tmp_path / "imagenette_resnet50.safetensors", half=True)
    again = zoo.load(tmp_path / "imagenette_resnet50.safetensors")
    assert again.class_names[9] == "parachute"
    with torch.no_grad():
        torch.testing.assert_close(again.model(images), expected, rtol=0.05, atol=0.05)


def test_all_thousand_classes_can_be_kept(trained: LocalResNet, tmp_path: Path) -> None:
    guard = imagenet_resnet50(write_weights(trained, tmp_path / "weights.safetensors"), width=WIDTH)
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(guard.model(images), trained(images), rtol=1e-3, atol=1e-3)


def test_other_files_are_refused(trained: LocalResNet, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no weights")
    with pytest.raises(InputError, match="cannot be read"):
        imagenette_resnet50(tmp_path / "text")
    with pytest.raises(InputError, match="tensors of a ResNet-50"):
        imagenette_resnet50(write_weights(trained, tmp_path / "thin.safetensors"))
    ten = copy.deepcopy(trained)
    ten.backbone.fc = torch.nn.Linear(256, 10)
    with pytest.raises(InputError, match="1000 classes"):
        imagenette_resnet50(write_weights(ten, tmp_path / "ten.safetensors"), width=WIDTH)


COLOR = torch.tensor([0.2, 0.5, 0.9]).view(1, 3, 1, 1)


@pytest.fixture(scope="module")
def far_from_the_border(trained: LocalResNet) -> torch.Tensor:
    """What ResNet-50 says about an image of one color in a cell whose field of 483 pixels lies inside."""
    with torch.no_grad():
        return trained(COLOR.expand(1, 3, 544, 544))[0, :, 8, 8]


@pytest.mark.parametrize("field", [9, 17, 33])
def test_on_an_image_of_one_color_a_bagnet_says_what_resnet_says_far_from_the_border(
    trained: LocalResNet, far_from_the_border: torch.Tensor, field: int
) -> None:
    bagnet = build(f"bagnet{field}", width=WIDTH).eval()
    bagnet.load_state_dict(convert_resnet50_state(trained.backbone.state_dict(), field=field))
    with torch.no_grad():
        logits = bagnet(COLOR.expand(1, 3, 64, 64))
    assert float(far_from_the_border.std()) > 0.01
    torch.testing.assert_close(logits, far_from_the_border.view(1, -1, 1, 1).expand_as(logits), rtol=1e-3, atol=1e-3)


def test_a_resnet_for_small_images_has_no_such_stem() -> None:
    small = build("resnet50", width=WIDTH, small_images=True)
    with pytest.raises(InputError, match="7 x 7"):
        convert_resnet50_state(small.backbone.state_dict())


def test_a_bagnet_starts_from_a_resnet_and_draws_other_classes_anew(
    trained: LocalResNet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHGUARD_ZOO", str(tmp_path))
    teacher = imagenette_resnet50(write_weights(trained, tmp_path.with_suffix(".file")), width=WIDTH)
    zoo.save(teacher, tmp_path / "imagenette_resnet50.safetensors")
    recipe = get_recipe("imagenette_bn17").model
    for classes in (10, 5):
        model = build(recipe.name, classes=classes, width=WIDTH)
        fresh = model.fc.weight.detach().clone()
        init_from(model, recipe.init_from)
        kernels = teacher.model.backbone.layer4[2].conv2.weight.sum((2, 3), keepdim=True)
        assert torch.equal(model.layer4[2].conv2.weight, kernels)
        assert torch.equal(model.fc.weight, teacher.model.backbone.fc.weight if classes == 10 else fresh)


def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no weights")
    with pytest.raises(SystemExit, match="cannot be read"):
        main([str(tmp_path / "text"), str(tmp_path / "out" / "guard.safetensors")])
