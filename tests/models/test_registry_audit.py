"""Every network of the registry reads only its field; networks that mix positions are refused, or caught."""

import pytest
import torch
from helpers.small_guards import randomize_weights
from torch import Tensor, nn

from patchguard.errors import InputError
from patchguard.geometry.audit import audit
from patchguard.models import REGISTRY, build, wrap

# A new network is audited unasked: at its defaults, or thin if it says how here.
THIN = {
    "srf": {"widths": [8, 12]},
    "srf_wide": {},
    "ds_resnet18": {"width": 0.1},
    "block_resnet18": {"width": 0.1},
    "ds_resnet50": {"width": 0.05},
    "interval_cnn": {"widths": [4, 4, 4, 4]},
}

# Deep networks whose layers a quicker one of their family has as well: exporting them takes seconds.
DEEP = ("bagnet9", "bagnet17", "bagnet33", "resnet50", "srf_wide", "ds_resnet50")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build_thin_model(name: str):
    settings = THIN.get(name, {"width": 0.05})
    return randomize_weights(build(name, classes=2, **settings))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in DEEP else name for name in REGISTRY]
)
def test_every_network_of_the_registry_passes_at_its_smallest_input(name):
    model = build_thin_model(name)
    height, width = model.smallest_input()
    # One more cell along the columns, where one cell would see everything and nothing could lie outside.
    grown = max(width, 8) if name.startswith("ds_") else width
    result = audit(model, model.field(max(height, 8), grown), batch=8)
    assert result.passed, result.leaks
    assert result.drift == 0.0


@pytest.mark.parametrize("name", ["srf", "ds_resnet18", "block_resnet18"])
def test_local_networks_pass_on_larger_images_that_are_not_square(name):
    model = build_thin_model(name)
    height, width = model.smallest_input()
    field = model.field(height + 9, width + 14)
    assert min(field.size[0] / field.source[0], field.size[1] / field.source[1]) < 1
    assert audit(model, field, batch=8).passed


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Conv2d(channels, channels, 1)

    def forward(self, features: Tensor) -> Tensor:
        return features * self.gate(features.mean((2, 3), keepdim=True)).sigmoid()


@pytest.mark.parametrize("leak", [SqueezeExcite(8), nn.InstanceNorm2d(8)], ids=lambda layer: type(layer).__name__)
def test_a_leaky_network_is_refused_and_with_a_forged_field_caught(leak):
    torch.manual_seed(0)
    honest = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
    forged = wrap(honest, classes=2).field(16, 16)
    leaky = wrap(nn.Sequential(honest[0], leak, honest[1], honest[2]), classes=2)
    with pytest.raises(InputError, match=r"cannot be bounded"):
        leaky.field(16, 16)
    result = audit(leaky, forged)
    assert not result.passed
    assert result.leaks
    assert audit(wrap(honest, classes=2), forged).passed
