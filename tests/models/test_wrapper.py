import pytest
import torch
from helpers.pixel_influence import build_random, changed_cells, expected_cells, random_image
from torch import nn

from patchguard.errors import InputError
from patchguard.models.wrapper import wrap


class TwoOutputs(nn.Module):
    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images, images


def features() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3))


def local() -> nn.Sequential:
    return nn.Sequential(*features(), nn.Conv2d(6, 4, 1))


def heads() -> dict[str, nn.Module]:
    return {
        "linear": nn.Linear(6, 4),
        "without bias": nn.Linear(6, 4, bias=False),
        "two layers": nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)),
    }


def test_a_module_with_local_logits_is_taken_as_it_is():
    module, images = build_random(local), random_image(17, 20)
    model = wrap(module, 4, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)).double()
    with torch.inference_mode():
        assert torch.equal(model(images), module(images))


@pytest.mark.parametrize("kind", list(heads()))
def test_a_head_is_applied_at_each_position(kind):
    trunk, head, images = build_random(features), build_random(lambda: heads()[kind]), random_image(17, 20, batch=2)
    model = wrap((trunk, head), 4).double()
    with torch.inference_mode():
        local_logits, maps = model(images), trunk(model.normalize(images))
        assert local_logits.shape == (2, 4, 5, 6)
        torch.testing.assert_close(local_logits[1, :, 3, 2], head(maps[1, :, 3, 2]))


def test_images_are_normalized_with_the_given_statistics():
    model = wrap(nn.Identity(), 3, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 2.0))
    expected = torch.tensor([1.0, 3.0, 0.5])
    torch.testing.assert_close(model(torch.ones(1, 3, 1, 1)).flatten(), expected)


def test_a_pixel_moves_exactly_the_cells_whose_field_holds_it():
    model = wrap(build_random(local), 4).double()
    for pixel in [(0, 0), (8, 9), (9, 8), (16, 17)]:
        seen = changed_cells(model, 19, 21, pixel)
        assert (seen == expected_cells(seen.shape, pixel, size=9, stride=2, first=0)).all(), pixel


@pytest.mark.parametrize("kind", list(heads()))
def test_the_field_is_traced_through_the_head(kind):
    field = wrap((features(), heads()[kind]), 4).field(19, 21)
    assert (field.grid, field.size, field.stride) == ((6, 7), (9, 9), (2, 2))


def test_a_head_that_mixes_positions_has_no_field():
    class Centred(nn.Module):
        def forward(self, maps: torch.Tensor) -> torch.Tensor:
            return maps - maps.mean((1, 2), keepdim=True)

    with pytest.raises(InputError, match="cannot be bounded"):
        wrap((features(), Centred()), 6).field(19, 21)


def test_the_statistics_are_no_part_of_the_state_dict():
    assert list(wrap(nn.Conv2d(3, 2, 1), 2).state_dict()) == ["features.weight", "features.bias"]


def test_a_global_classifier_is_refused():
    module = nn.Sequential(*local(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(InputError, match=r"`module` must return a tensor .* got shape \(1, 4\)"):
        wrap(module, 4)(torch.rand(1, 3, 16, 16))


def test_several_outputs_are_refused():
    with pytest.raises(InputError, match=r"`features` must return a tensor .* got tuple"):
        wrap((TwoOutputs(), nn.Linear(3, 4)), 4)(torch.rand(1, 3, 16, 16))


def test_a_wrong_number_of_classes_is_refused():
    with pytest.raises(InputError, match="got 5, and the module returns 4"):
        wrap(local(), 5)(torch.rand(1, 3, 16, 16))


def test_an_image_below_the_stated_size_is_refused():
    with pytest.raises(InputError, match="at least 9 x 9 pixels here; got 8 x 16"):
        wrap(local(), 4, smallest_input=(9, 9))(torch.rand(1, 3, 8, 16))


def test_the_settings_of_a_foreign_network_are_not_invented():
    with pytest.raises(InputError, match="cannot be rebuilt from settings"):
        wrap(local(), 4).config()


@pytest.mark.parametrize(
    ("mean", "std"),
    [((0.5,), (0.5, 0.5, 0.5)), ((0.0, 0.0, 0.0), (1.0, 0.0, 1.0)), ((0.0, 0.0, 0.0), (1.0, 1.0))],
)
def test_statistics_that_cannot_normalize_are_refused(mean, std):
    with pytest.raises(InputError, match="`mean` and `std` must be three numbers each, `std` above 0"):
        wrap(local(), 4, mean=mean, std=std)
