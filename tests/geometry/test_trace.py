"""The traced field against brute force: change a row or a column of the image and see which cells move."""

import random
from collections.abc import Callable, Collection, Iterable

import numpy as np
import pytest
import torch
from helpers.field_rules import check_field
from torch import Tensor, nn
from torch.nn import functional

from patchguard.errors import InputError
from patchguard.geometry.field import Axis
from patchguard.geometry.program import trace_field


class Lambda(nn.Module):
    """A function as a layer, with parts of its own if it needs any."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = list(parts)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *(getattr(self, name) for name in self.parts))


def moves(module: nn.Module, size: tuple[int, int], axis: int) -> np.ndarray:
    """Return which cells along `axis` (0: rows, 1: columns) move when one row or column of pixels changes."""
    generator = torch.Generator().manual_seed(0)
    moved = np.zeros((1, 1), dtype=bool)
    module = module.double().eval()
    with torch.no_grad():
        for _ in range(3):
            base = torch.randn(1, 3, *size, generator=generator, dtype=torch.float64)
            other = torch.randn(1, 3, *size, generator=generator, dtype=torch.float64) * 3
            images = base.repeat(size[axis], 1, 1, 1)
            for index in range(size[axis]):
                images[index].select(axis + 1, index).copy_(other[0].select(axis + 1, index))
            change = (module(images) - module(base)).abs().amax(dim=(1, 3 - axis))  # pixels, cells
            moved = moved | (change > 1e-12).numpy().T
    return moved


def reads(axis: Axis) -> np.ndarray:
    return np.stack([axis.touched_cells(pixel, 1) for pixel in range(axis.size)], axis=1)


def hull(moved: np.ndarray) -> np.ndarray:
    forward = np.maximum.accumulate(moved, axis=1)
    backward = np.maximum.accumulate(moved[:, ::-1], axis=1)[:, ::-1]
    return forward & backward


def check(module: nn.Module, size: tuple[int, int], *, exact: bool = False) -> None:
    module = module.double().eval()
    field = trace_field(module, size)
    for axis, intervals in enumerate((field.rows, field.columns)):
        true = moves(module, size, axis)
        assert true.any()
        assert not (true & ~reads(intervals)).any()
        if exact:
            assert (hull(true) == reads(intervals)).all()


def residual(x: Tensor, body: nn.Module) -> Tensor:
    return body(x) + x


def per_position(x: Tensor, linear: nn.Module) -> Tensor:
    return linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def flat_product(x: Tensor, linear: nn.Linear) -> Tensor:
    batch, channels, rows, columns = x.shape
    flat = x.permute(0, 2, 3, 1).reshape(-1, channels)
    return (flat @ linear.weight.T).view(batch, rows, columns, -1).permute(0, 3, 1, 2)


def left_product(x: Tensor, linear: nn.Linear) -> Tensor:
    batch, _, rows, columns = x.shape
    return torch.matmul(linear.weight, x.flatten(2)).view(batch, -1, rows, columns)


def shuffled(x: Tensor) -> Tensor:
    batch, channels, rows, columns = x.shape
    return x.view(batch, 2, channels // 2, rows, columns).transpose(1, 2).reshape(batch, channels, rows, columns)


def local_attention(x: Tensor) -> Tensor:
    """Attention between the channels of one position."""
    batch, channels, rows, columns = x.shape
    tokens = x.permute(0, 2, 3, 1).reshape(batch * rows * columns, 2, channels // 2)
    mixed = torch.bmm(torch.bmm(tokens, tokens.transpose(1, 2)).softmax(-1), tokens)
    return mixed.reshape(batch, rows, columns, channels).permute(0, 3, 1, 2)


def conv(kernel: int | tuple[int, int] = 3, inside: int = 4, **settings: object) -> nn.Conv2d:
    return nn.Conv2d(inside, 4, kernel, **settings)  # type: ignore[arg-type]


LINEAR: dict[str, nn.Module] = {
    "valid convolution": conv(),
    "strided convolution": conv(stride=2),
    "padded convolution": conv(padding=1),
    "same convolution": conv(4, padding="same", dilation=3),
    "dilated convolution": conv(dilation=2, padding=(1, 2)),
    "grouped oblong convolution": nn.Conv2d(4, 4, (1, 3), groups=2, stride=(1, 2)),
    "reflecting convolution": conv(padding=2, padding_mode="reflect"),
    "repeating convolution": conv(padding=2, padding_mode="replicate"),
    "mean pooling": nn.AvgPool2d(3, 2, padding=1),
    "mean pooling over the border": nn.AvgPool2d(3, 2, ceil_mode=True),
    "adaptive pooling": nn.AdaptiveAvgPool2d((4, 5)),
    "batch norm": nn.BatchNorm2d(4),
    "padding": nn.ZeroPad2d((1, 0, 2, 1)),
    "cropping": Lambda(lambda x: x[:, :, 1:-2, 2:]),
    "subsampling": Lambda(lambda x: x[:, :, ::2, 1::3]),
    "narrowing": Lambda(lambda x: x.narrow(2, 2, 4)),
    "flipping": Lambda(lambda x: x.flip(3)),
    "negative padding": Lambda(lambda x: functional.pad(x, (-1, 2))),
    "nearest upsampling": nn.Upsample(scale_factor=2),
    "bilinear upsampling": Lambda(
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
    ),
    "residual addition": Lambda(residual, body=conv(padding=1)),
    "per-position linear": Lambda(per_position, linear=nn.Linear(4, 4)),
    "matrix product of flat positions": Lambda(flat_product, linear=nn.Linear(4, 4)),
    "matrix product from the left": Lambda(left_product, linear=nn.Linear(4, 4)),
    "concatenated channels": Lambda(lambda x, a: torch.cat([a(x)[:, :2], x[:, 2:, 1:-1, 1:-1]], 1), a=conv()),
    "concatenated rows": Lambda(lambda x: torch.cat([torch.ones_like(x[:, :, :2]), x, x[:, :, :1]], 2)),
    "channel shuffle": Lambda(shuffled),
    "channel mean": Lambda(lambda x: x - x.mean(1, keepdim=True)),
    "split channels": Lambda(lambda x: torch.stack([p[:, 0] for p in x.chunk(2, 1)], 1)),
}

CURVED: dict[str, nn.Module] = {
    "maximum pooling": nn.MaxPool2d(3, 2, padding=1),
    "nearest upsampling to a size": Lambda(lambda x: functional.interpolate(x, (13, 9), mode="nearest-exact")),
    "bicubic upsampling": Lambda(lambda x: functional.interpolate(x, (17, 11), mode="bicubic", align_corners=False)),
    "upsampling with aligned corners": Lambda(
        lambda x: functional.interpolate(x, (19, 23), mode="bilinear", align_corners=True)
    ),
    "upsampling by an odd factor": Lambda(
        lambda x: functional.interpolate(x, scale_factor=(3.0, 1.7), mode="bilinear", align_corners=False)
    ),
    "activations": nn.Sequential(nn.ReLU(inplace=True), nn.GELU(), nn.PReLU(4), nn.Dropout(), nn.Hardswish()),
    "layer norm of channels": Lambda(per_position, norm=nn.LayerNorm(4)),
    "softmax of channels": nn.Softmax(dim=1),
    "normalized channels": Lambda(lambda x: functional.normalize(x, dim=1)),
    "attention inside a position": Lambda(local_attention),
    "write in place": Lambda(lambda x: x.clone().mul_(2).add_(x.abs().amax(1, keepdim=True))),
    "cast": Lambda(lambda x: x.float().double().clamp(-1, 1)),
}


# Layers whose operations only an export names as the rules do, and one of the others: an export takes a while.
EXPORTED = ("activations", "normalized channels", "write in place", "strided convolution")


def quick_first(names: Iterable[str], quick: Collection[str]) -> list[object]:
    """Mark all but the quick ones as slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def surround(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "split channels":
        return nn.Sequential(nn.Conv2d(3, 4, 1), LINEAR[name])
    if name in LINEAR:
        return nn.Sequential(nn.Conv2d(3, 4, 1), LINEAR[name], nn.Conv2d(4, 2, 1))
    return nn.Sequential(nn.Conv2d(3, 4, 2), CURVED[name], nn.Conv2d(4, 2, 1))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", LINEAR)
def test_the_rule_of_a_linear_layer_gives_exactly_the_pixels_that_move_it(name: str) -> None:
    check_field(surround(name), (10, 12), exact=True)


@pytest.mark.parametrize("name", [name for name in CURVED if name not in EXPORTED])
def test_the_rule_of_any_other_layer_holds_all_pixels_that_move_it(name: str) -> None:
    check_field(surround(name), (10, 12))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", quick_first([*LINEAR, *CURVED], EXPORTED))
def test_the_exported_graph_of_any_layer_gives_the_same(name: str) -> None:
    check(surround(name), (10, 12), exact=name in LINEAR)


def random_layer(chance: random.Random) -> nn.Module:
    kernel, stride, padding = chance.randint(1, 4), chance.randint(1, 2), chance.randint(0, 2)
    return chance.choice(
        [
            conv(kernel, stride=stride, padding=padding),
            conv((kernel, chance.randint(1, 3)), dilation=stride),
            nn.AvgPool2d(kernel, stride, padding=kernel // 2, ceil_mode=chance.random() < 0.5),
            nn.ReflectionPad2d((1, 0, 2, 1)),
            nn.Upsample(scale_factor=2),
            Lambda(residual, body=conv(3, padding=1)),
            Lambda(per_position, linear=nn.Linear(4, 4)),
            Lambda(lambda x: x[:, :, 1:, :-1].transpose(2, 3)),
        ]
    )


def random_network(seed: int) -> nn.Module:
    chance = random.Random(seed)
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 1)]
    probe = torch.zeros(1, 3, 15, 18)
    for _ in range(chance.randint(2, 5)):
        layer = random_layer(chance)
        try:
            result = nn.Sequential(*layers, layer)(probe)
        except RuntimeError:  # the kernel is larger than what is left of the image
            continue
        if min(result.shape[2:]) > 1:
            layers.append(layer)
    transposed = sum(isinstance(layer, Lambda) and not layer.parts for layer in layers) % 2
    return nn.Sequential(*layers, *([Lambda(lambda x: x.transpose(2, 3))] if transposed else []))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_the_field_of_a_random_linear_network_is_exactly_what_moves_its_cells(seed: int) -> None:
    torch.manual_seed(seed)
    check(random_network(seed), (15, 18), exact=True)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.gate = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.pool(x)).sigmoid()


def attention(x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    return (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "squeeze and excite": (SqueezeExcite(), r"layer `1\.pool` \(AdaptiveAvgPool2d\).*pools over all rows"),
    "squeeze by a large window": (
        Lambda(lambda x: x * functional.avg_pool2d(x, x.shape[2:]).sigmoid()),
        r"layer `1` \(Lambda\).*`mul` spreads a single position over all 8 rows",
    ),
    "instance norm": (nn.InstanceNorm2d(4), r"layer `1` \(InstanceNorm2d\).*statistics"),
    "group norm": (nn.GroupNorm(2, 4), r"layer `1` \(GroupNorm\).*statistics over all rows and columns"),
    "batch norm without stored statistics": (
        nn.BatchNorm2d(4, track_running_stats=False),
        r"layer `1` \(BatchNorm2d\).*statistics of the batch",
    ),
    "batch norm in training mode": (
        Lambda(lambda x: functional.batch_norm(x, None, None, training=True)),
        r"layer `1` \(Lambda\).*statistics of the batch",
    ),
    "layer norm over positions": (
        nn.LayerNorm([4, 8, 10]),
        r"layer `1` \(LayerNorm\).*computes over all rows",
    ),
    "global mean": (Lambda(lambda x: x.mean((2, 3), keepdim=True)), r"`mean` computes over all rows"),
    "global maximum": (Lambda(lambda x: x - x.max()), r"`max` computes over all images of the batch"),
    "softmax over columns": (nn.Softmax(dim=3), r"layer `1` \(Softmax\).*computes over all columns"),
    "flatten and linear": (
        nn.Sequential(nn.Flatten(), nn.Linear(320, 320), nn.Unflatten(1, (4, 8, 10))),
        r"layer `1\.1` \(Linear\).*computes over all channels and rows and columns",
    ),
    "linear along a row": (nn.Linear(10, 10), r"layer `1` \(Linear\).*computes over all columns"),
    "attention over positions": (
        Lambda(lambda x: attention(x).transpose(1, 2).view(x.shape)),
        "pairs every position with every other",
    ),
    "library attention": (
        Lambda(lambda x: functional.scaled_dot_product_attention(x, x, x)),
        "lets every position attend to every other",
    ),
    "mixed images": (
        Lambda(lambda x: x + x.flip(0)),
        "moves along a dimension that runs over images of the batch",
    ),
    "mean image": (Lambda(lambda x: x - x.mean(0, keepdim=True)), "computes over all images of the batch"),
    "one image for all": (Lambda(lambda x: x[:1].expand_as(x)), "runs over images of the batch"),
    "circular padding": (conv(padding=1, padding_mode="circular"), "from the opposite border"),
    "transposed convolution": (nn.ConvTranspose2d(4, 4, 2), r"layer `1` \(ConvTranspose2d\)"),
    "dropout that stays on": (Lambda(lambda x: functional.dropout(x, training=True)), r"`\w*dropout\w*`"),
    "noise": (Lambda(lambda x: x + torch.rand_like(x)), "gives another result in every call|has no rule"),
    "pixels moved into channels": (nn.PixelUnshuffle(2), "has no rule, so it may mix positions"),
    "rows cut by a view": (Lambda(lambda x: x.reshape(x.shape[0], 4, 16, 5)), "cuts its columns into pieces"),
    "one row": (Lambda(lambda x: x[:, :, 3].unsqueeze(2)), r"`select` picks one of the rows"),
    "weights from the image": (
        Lambda(lambda x: functional.conv2d(x, x[:1, :, :1, :1].expand(4, 4, 1, 1))),
        "cannot be bounded",
    ),
    "an unknown operation": (Lambda(lambda x: torch.cumsum(torch.roll(x, 1, 2), 1)), "`roll` has no rule"),
    "Fourier transform": (Lambda(lambda x: torch.fft.rfft2(x).abs()), "has no rule"),
}


# One of each reason; tests/geometry/rules asks the rules for all others without an export.
QUICK = (
    "squeeze and excite",
    "group norm",
    "batch norm without stored statistics",
    "global mean",
    "flatten and linear",
    "attention over positions",
    "mixed images",
    "noise",
    "an unknown operation",
)


@pytest.mark.parametrize("name", quick_first(REFUSED, QUICK))
def test_a_layer_that_mixes_positions_or_images_is_refused_by_name(name: str) -> None:
    layer, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        trace_field(nn.Sequential(nn.Conv2d(3, 4, 3), layer), (10, 12))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (Lambda(lambda x: (x, x)), "holds 2 values"),
        (Lambda(lambda x: x.transpose(2, 3)), r"runs over \(images of the batch, channels, columns, rows\)"),
        (Lambda(lambda x: x.flatten(2)), r"runs over \(images of the batch, channels, rows and columns\)"),
        (Lambda(lambda x: torch.zeros_like(x)), "does not depend on the image"),
        (Lambda(lambda x: x if x.sum() > 0 else -x), "torch.export can trace"),
        (nn.Conv2d(4, 4, 50), "torch.export can trace on a 10 x 12 image"),
    ],
)
def test_an_output_that_is_no_map_of_cells_is_refused(head: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message):
        trace_field(nn.Sequential(nn.Conv2d(3, 4, 3), head), (10, 12))


class Memory(nn.Module):
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x.mean())
        return x + self.last


def test_a_network_that_remembers_earlier_images_is_refused() -> None:
    with pytest.raises(InputError, match=r"must not write to its input or its buffers.*it writes to last"):
        trace_field(Memory(), (4, 4))


def test_tracing_restores_the_mode_of_every_part() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()).train()
    network[1].eval()
    trace_field(network, (10, 12))
    assert [part.training for part in network.modules()] == [True, True, False, True]


def test_a_field_is_kept_until_the_network_changes() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3))
    field = trace_field(network, (10, 12))
    assert trace_field(network, (10, 12)) is field
    assert trace_field(network, (12, 12)).grid == (10, 10)
    network[0].stride = (2, 2)
    assert trace_field(network, (10, 12)).grid == (4, 5)
    network.append(nn.MaxPool2d(2))
    assert trace_field(network, (10, 12)).size == (5, 5)


def test_the_parameters_have_no_say_in_the_field() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert trace_field(network, (6, 6)).size == (3, 3)


def test_an_image_without_pixels_is_refused() -> None:
    with pytest.raises(InputError, match="at least 1 x 1 pixel"):
        trace_field(nn.Identity(), (0, 4))
