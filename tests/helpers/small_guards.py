"""Small guards for tests: random weights, made so that some images are certified and some are not."""

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from patchguard.defenses import DoubleMasking, RobustMasking
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.preprocess import Preprocess, Resize
from patchguard.geometry.windows import Windows
from patchguard.guards.local import LocalGuard
from patchguard.models import LocalModel, build
from patchguard.patch import Patch

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")
ANY_MASKS = Windows.sliding(grid=(1, 1), size=(1, 1))


def build_once(function: Callable[Inputs, Result]) -> Callable[Inputs, Result]:
    """Cache what a function builds: the same whoever asks first, and without moving that test's own draws."""

    @cache
    @wraps(function)
    def build_with_own_draws(*args: Inputs.args, **settings: Inputs.kwargs) -> Result:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return function(*args, **settings)

    return build_with_own_draws


def randomize_weights(model: LocalModel) -> LocalModel:
    """The same random weights every time, with random batch norm statistics."""
    generator = torch.Generator().manual_seed(3)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.copy_(0.1 * torch.randn(layer.num_features, generator=generator))
            layer.running_var.copy_(0.5 + torch.rand(layer.num_features, generator=generator))
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            fan = layer.weight[0].numel()
            layer.weight.data.copy_(torch.randn(layer.weight.shape, generator=generator) * (2 / fan) ** 0.5)
        if isinstance(layer, nn.Linear):
            layer.bias.data.zero_()
    return model.eval()


@build_once
def build_thin_model(name: str) -> LocalModel:
    """One thin network for all tests that only look at its field: deriving one takes seconds."""
    return build(name, classes=10, **({"widths": [8, 8, 8]} if name == "srf" else {"width": 0.02}))


@build_once
def srf_guard(side: int = 16, patch: int = 2) -> LocalGuard:
    """Double masking of a thin network with a field of 5 pixels."""
    model = randomize_weights(build("srf", classes=3, field=5, widths=[8, 12]))
    guard = LocalGuard(Preprocess(), model, Evidence(low=None, drift=1e-4), DoubleMasking(masks=ANY_MASKS))
    return guard.for_patch(Patch(patch), side, side)


@build_once
def bagnet_guard(side: int = 12, patch: int = 2) -> LocalGuard:
    """Robust masking of a thin BagNet-9 behind a resize to 56 x 56 pixels."""
    model = randomize_weights(build("bagnet9", classes=3, width=0.05))
    preprocess = Preprocess((Resize(height=56, width=56, mode="bilinear"),))
    guard = LocalGuard(preprocess, model, Evidence(low=0.0, drift=1e-2), RobustMasking(masks=ANY_MASKS))
    return guard.for_patch(Patch(patch), side, side)


def random_images(count: int, height: int, width: int | None = None, seed: int = 0) -> torch.Tensor:
    """Smooth random images with much contrast between them."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    size = (height, width or height)
    smooth = nn.functional.interpolate(coarse, size, mode="bilinear", align_corners=False)
    return (smooth + 0.2 * torch.rand(count, 3, *size, generator=generator)).clamp(0, 1)
