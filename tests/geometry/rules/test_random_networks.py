"""Random networks of every kind of operation: no cell moves with a pixel or an image that the rules leave out."""

import random
from collections.abc import Callable

import torch
from helpers.field_rules import Layer, allowed_pixels, check_batch_rows, observed_pixels
from torch import Tensor, nn
from torch.nn import functional

from patchguard.geometry.rules.layout import RuleError

SIZE = (9, 8)
Step = Callable[[Tensor], Tensor]


def convolve(chance: random.Random, width: int) -> nn.Module:
    kernel, dilation = ((chance.randint(1, 3), chance.randint(1, 2)) for _ in range(2))
    return nn.Conv2d(width, chance.choice([2, 4]), kernel, chance.randint(1, 2), chance.randint(0, 2), dilation)


def pool(chance: random.Random, width: int) -> Step:
    kernel, stride, ceil = chance.randint(1, 3), chance.randint(1, 2), chance.random() < 0.5
    size = (chance.randint(2, 9), chance.randint(2, 9))
    return chance.choice(
        [
            lambda x: functional.max_pool2d(x, kernel, stride, kernel // 2, 2, ceil),
            lambda x: functional.avg_pool2d(x, kernel, stride, kernel // 2, ceil),
            lambda x: functional.adaptive_avg_pool2d(x, size),
            lambda x: functional.adaptive_max_pool2d(x, size),
        ]
    )


def enlarge(chance: random.Random, width: int) -> Step:
    mode = chance.choice(["nearest", "nearest-exact", "bilinear", "bicubic"])
    corners = chance.choice([True, False]) if mode.startswith("bi") else None
    by = (chance.choice([1.04, 1.5, 2.04]), chance.choice([0.7, 1.0, 2.0]))
    return lambda x: functional.interpolate(x, scale_factor=by, mode=mode, align_corners=corners)


def border(chance: random.Random, width: int) -> Step:
    amounts, mode = [chance.randint(0, 2) for _ in range(4)], chance.choice(["constant", "reflect", "replicate"])
    return lambda x: functional.pad(x, amounts, mode=mode)


def crop(chance: random.Random, width: int) -> Step:
    first, step, axis = chance.randint(0, 2), chance.randint(1, 2), chance.choice([2, 3])
    return chance.choice(
        [
            lambda x: x[:, :, first::step, : -1 - first],
            lambda x: x.flip(2).narrow(3, first, x.shape[3] - first),
            lambda x: x.chunk(2, axis)[0],
        ]
    )


def combine(chance: random.Random, width: int) -> nn.Module:
    inner = nn.Conv2d(width, width, chance.choice([1, 3, 5]), padding="same")
    function = chance.choice(
        [
            lambda x, f: x + f(x),
            lambda x, f: torch.where(f(x) > 0, x, f(x)),
            lambda x, f: torch.cat([f(x), x, torch.ones_like(x)], 1)[:, 1 : 1 + width],
            lambda x, f: torch.cat([f(x), x[:, :, :2]], 2),
            lambda x, f: torch.stack([x, f(x)], -1).amax(-1),
            lambda x, f: f(x) * x.mean(1, keepdim=True).expand(x.shape),
            lambda x, f: torch.matmul(torch.eye(width, dtype=x.dtype), f(x).flatten(2)).view(x.shape) - x.cumsum(1),
        ]
    )
    return Layer(function, inner)


def shuffle(chance: random.Random, width: int) -> Step:
    return chance.choice(
        [
            lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2),
            lambda x: x.permute(3, 0, 1, 2).flatten(1, 2).unflatten(1, (-1, width)).permute(1, 2, 3, 0),
            lambda x: functional.layer_norm(x.permute(0, 2, 3, 1), (width,)).permute(0, 3, 1, 2),
            lambda x: x[:, :1].squeeze(1).unsqueeze(1).expand(-1, width, -1, -1),
            lambda x: x.softmax(1) + x.std(1, keepdim=True),
            lambda x: x.sum(2, keepdim=True) + x,  # refused
            lambda x: x + x.mean(0),  # refused
            lambda x: x.transpose(2, 3).tanh().transpose(-1, -2),
        ]
    )


def random_network(seed: int) -> nn.Module:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 1)]
    probe = torch.zeros(2, 3, *SIZE)
    while len(layers) < 5:
        width = nn.Sequential(*layers)(probe).shape[1]
        part = chance.choice([convolve, pool, enlarge, border, crop, combine, shuffle])(chance, width)
        layer = part if isinstance(part, nn.Module) else Layer(part)
        try:
            result = nn.Sequential(*layers, layer)(probe)
        except (RuntimeError, IndexError):  # the kernel or border is larger than what is left of the image
            continue
        if min(result.shape[1:]) > 1:
            layers.append(layer)
    return nn.Sequential(*layers)


def test_no_cell_of_a_random_network_moves_with_what_the_rules_leave_out() -> None:
    outcomes = []
    for seed in range(24):
        with torch.no_grad():
            network = random_network(seed)
        try:
            may = allowed_pixels(network, SIZE)
        except RuleError:
            outcomes.append("refused")
            continue
        for layout in (torch.contiguous_format, torch.channels_last):
            for allowed, moved in zip(may, observed_pixels(network, SIZE, layout), strict=True):
                assert not (moved & ~allowed).any(), seed
        check_batch_rows(network, SIZE)
        outcomes.append("whole" if all(allowed.all() for allowed in may) else "local")
    assert outcomes.count("local") > 10
    assert outcomes.count("refused") > 1
