"""ResNet-50 as teacher and as first weights of a BagNet, on fabricated thin networks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from patchguard.errors import InputError
from patchguard.models import build
from patchguard.models.bagnet import convert_resnet50_state
from patchguard.models.resnet import LocalResNet
from patchguard.storage import zoo
from patchguard.training.initial import start_from
from patchguard.training.pretrained import ROWS, imagenet_resnet50, imagenette_resnet50
from patchguard.training.recipes import named

WIDTH = 0.125


@pytest.fixture
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


def saved(model: LocalResNet, path: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in model.backbone.state_dict().items()}, path)
    return path


def test_the_ten_classes_answer_as_among_the_thousand_and_fit_float16(trained: LocalResNet, tmp_path: Path) -> None:
    guard = imagenette_resnet50(saved(trained, tmp_path / "weights.safetensors"), width=WIDTH)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = trained(images)[:, list(ROWS)]
    torch.testing.assert_close(guard.local_logits(images), expected, rtol=1e-3, atol=1e-3)
    zoo.save(guard, tmp_path / "imagenette_resnet50.safetensors", half=True)
    again = zoo.load(tmp_path / "imagenette_resnet50.safetensors")
    assert again.class_names[9] == "parachute"
    torch.testing.assert_close(again.local_logits(images), expected, rtol=0.05, atol=0.05)


def test_all_thousand_classes_can_be_kept(trained: LocalResNet, tmp_path: Path) -> None:
    guard = imagenet_resnet50(saved(trained, tmp_path / "weights.safetensors"), width=WIDTH)
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(guard.local_logits(images), trained(images), rtol=1e-3, atol=1e-3)


def test_other_files_are_refused(trained: LocalResNet, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no weights")
    with pytest.raises(InputError, match="cannot be read"):
        imagenette_resnet50(tmp_path / "text")
    with pytest.raises(InputError, match="tensors of a ResNet-50"):
        imagenette_resnet50(saved(trained, tmp_path / "thin.safetensors"))
    trained.backbone.fc = torch.nn.Linear(256, 10)
    with pytest.raises(InputError, match="1000 classes"):
        imagenette_resnet50(saved(trained, tmp_path / "ten.safetensors"), width=WIDTH)


@pytest.mark.parametrize("field", [9, 17, 33])
def test_on_an_image_of_one_colour_a_bagnet_says_what_resnet_says_far_from_the_border(
    trained: LocalResNet, field: int
) -> None:
    bagnet = build(f"bagnet{field}", width=WIDTH).eval()
    bagnet.load_state_dict(convert_resnet50_state(trained.backbone.state_dict(), field=field))
    colour = torch.tensor([0.2, 0.5, 0.9]).view(1, 3, 1, 1)
    with torch.no_grad():
        expected = trained(colour.expand(1, 3, 768, 768))[0, :, 12, 12]  # its field of 483 pixels lies inside
        found = bagnet(colour.expand(1, 3, 64, 64))
    assert float(expected.std()) > 0.01
    torch.testing.assert_close(found, expected.view(1, -1, 1, 1).expand_as(found), rtol=1e-3, atol=1e-3)


def test_a_resnet_for_small_images_has_no_such_stem() -> None:
    small = build("resnet50", width=WIDTH, small_images=True)
    with pytest.raises(InputError, match="7 x 7"):
        convert_resnet50_state(small.backbone.state_dict())


def test_a_bagnet_starts_from_a_resnet_and_draws_other_classes_anew(
    trained: LocalResNet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHGUARD_ZOO", str(tmp_path))
    teacher = imagenette_resnet50(saved(trained, tmp_path.with_suffix(".file")), width=WIDTH)
    zoo.save(teacher, tmp_path / "imagenette_resnet50.safetensors")
    recipe = named("imagenette_bn17").changed({"model_settings.width": WIDTH})
    for classes in (10, 5):
        guard = recipe.guard((64, 64), tuple("abcdefghij"[:classes]))
        fresh = guard.model.fc.weight.detach().clone()
        start_from(guard, recipe.initial)
        kernels = teacher.model.backbone.layer4[2].conv2.weight.sum((2, 3), keepdim=True)
        assert torch.equal(guard.model.layer4[2].conv2.weight, kernels)
        assert torch.equal(guard.model.fc.weight, teacher.model.backbone.fc.weight if classes == 10 else fresh)
