"""Logits of a ResNet for all bands of an image, computing only the columns that a band can change.

Let e be the activations of a layer for the empty image (all six channels 0) and x those for one band. The
layers compute with the difference d = x - e, which is zero outside the columns near the band, so that a
convolution needs only those columns and the usual zero padding:

    convolution W (batch normalization folded in):   W x + b = (W e + b) + W d
    ReLU, with a = W e + b and c = W d:               relu(a + c) - relu(a) = max(c, -a) + min(a, 0)

Both hold exactly in real numbers; the results differ from those of full images by rounding only. The
activations of the empty image are the same for all bands and images and are computed once per call.

No band reads a pixel of another, but bands lie side by side in one tensor. A convolution algorithm that
computes several neighboring positions by transforms (Winograd, Fourier) can therefore carry rounding errors
from one band to the next; direct and matrix-product algorithms carry nothing. An audit on the device in use
tells.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from patchguard.models.band_plan import Architecture, Block, BlockPlan, Indices, Layer, Plan, plan_bands
from patchguard.models.resnet import BasicBlock, Bottleneck, ResNet

Columns = Float[Tensor, "_batch _channels _columns _rows"]
Normalized = tuple[nn.Conv2d, nn.BatchNorm2d]
POOL = Layer(kernel=3, stride=2, padding=1)


@final
class Convolution(NamedTuple):
    """A convolution with the batch normalization behind it folded into its weights."""

    weight: Float[Tensor, "outputs inputs kernel kernel"]
    bias: Float[Tensor, "outputs"]
    layer: Layer

    def difference(self, inputs: Columns, *, padded: bool = True) -> Columns:
        """Return the convolution of a difference, without bias. Rows are always padded, columns only if `padded`."""
        padding = (self.layer.padding if padded else 0, self.layer.padding)
        return F.conv2d(inputs, self.weight, stride=self.layer.stride, padding=padding)

    def full(self, inputs: Columns) -> Columns:
        """Return the convolution of full images."""
        return F.conv2d(inputs, self.weight, self.bias, stride=self.layer.stride, padding=self.layer.padding)


@final
class Residual(NamedTuple):
    """The convolutions of a residual block."""

    main: tuple[Convolution, ...]
    shortcut: Convolution | None

    def full(self, inputs: Columns) -> Columns:
        """Return the block's result for full images."""
        features = inputs
        for convolution in self.main[:-1]:
            features = F.relu(convolution.full(features), inplace=True)
        features = self.main[-1].full(features)
        features += inputs if self.shortcut is None else self.shortcut.full(inputs)
        return F.relu(features, inplace=True)

    def relu_inputs(self, inputs: Columns) -> list[Columns]:
        """Return the input of each ReLU in the block, for full images."""
        entering: list[Tensor] = []
        features = inputs
        for convolution in self.main:
            entering.append(convolution.full(features))
            features = F.relu(entering[-1])
        entering[-1] = entering[-1] + (inputs if self.shortcut is None else self.shortcut.full(inputs))
        return entering


@final
class ReluDifference(NamedTuple):
    """The tables -a and min(a, 0), where a is the input of a ReLU for the empty image."""

    floor: Columns
    shift: Columns

    @classmethod
    def at(cls, entering: Columns) -> "ReluDifference":
        """Return the tables of a ReLU whose input is `entering` for the empty image."""
        return cls(-entering, entering.clamp(max=0))

    def difference(self, change: Columns, index: Int64[Tensor, "_columns"]) -> Columns:
        """Return relu(a + change) - relu(a), where position i of `change` is column index[i] of the layer."""
        return torch.maximum(change, _take(self.floor, index)).add_(_take(self.shift, index))


@final
class Network(NamedTuple):
    """A ResNet in evaluation mode, as convolutions; images come as (batch, channels, columns, rows)."""

    stem: Convolution
    pooled: bool
    blocks: tuple[Residual, ...]
    head: nn.Linear


@final
class EmptyImage(NamedTuple):
    """The empty image: the stem's input to its ReLU, the ReLUs of the blocks, and the result of each."""

    stem: Columns
    relus: list[list[ReluDifference]]
    results: list[Columns]


@final
class Cost(NamedTuple):
    """Multiply-adds for all bands of one image.

    `plain` is on full images, `fast` as evaluated here, `least` the floor: exactly the columns that a band
    changes.
    """

    plain: int
    fast: int
    least: int


def describe_architecture(backbone: ResNet) -> Architecture:
    """Return the geometry of `backbone`."""
    blocks = tuple(
        Block(
            main=tuple(_layer(convolution) for convolution, _ in main),
            shortcut=None if shortcut is None else _layer(shortcut[0]),
        )
        for main, shortcut in _blocks(backbone)
    )
    head = backbone.fc.in_features * backbone.fc.out_features
    return Architecture(_layer(backbone.conv1), POOL if _pools(backbone) else None, blocks, head)


def compute_band_cost(architecture: Architecture, size: int, across: int, starts: tuple[int, ...], band: int) -> Cost:
    """Return the multiply-adds for bands at `starts` in images of `size` columns by `across` rows."""
    plan = plan_bands(architecture, size, across, starts, band)
    return Cost(plan.plain, plan.fast, plan.least)


def fold_batch_norm(backbone: ResNet, *, transposed: bool) -> Network:
    """Return the convolutions of `backbone`; `transposed` swaps the two axes of their kernels."""

    def fold(convolution: nn.Conv2d, normalization: nn.BatchNorm2d) -> Convolution:
        weight = convolution.weight.transpose(2, 3) if transposed else convolution.weight
        assert normalization.running_mean is not None
        assert normalization.running_var is not None
        wide = torch.promote_types(weight.dtype, torch.float32)
        scale = normalization.weight.to(wide) / (normalization.running_var.to(wide) + normalization.eps).sqrt()
        bias = normalization.bias.to(wide) - normalization.running_mean.to(wide) * scale
        scaled = (weight.to(wide) * scale[:, None, None, None]).to(weight.dtype)
        return Convolution(scaled.contiguous(memory_format=layout), bias.to(weight.dtype), _layer(convolution))

    layout = find_memory_format(backbone)
    blocks = tuple(
        Residual(main=tuple(fold(*pair) for pair in main), shortcut=None if shortcut is None else fold(*shortcut))
        for main, shortcut in _blocks(backbone)
    )
    return Network(fold(backbone.conv1, backbone.bn1), _pools(backbone), blocks, backbone.fc)


def _blocks(backbone: ResNet) -> list[tuple[list[Normalized], Normalized | None]]:
    """Return every block's convolutions with their normalizations: main branch, and projection if any."""
    blocks: list[tuple[list[Normalized], Normalized | None]] = []
    for stage in (backbone.layer1, backbone.layer2, backbone.layer3, backbone.layer4):
        for block in stage:
            assert isinstance(block, BasicBlock | Bottleneck)
            main = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
            if isinstance(block, Bottleneck):
                main.append((block.conv3, block.bn3))
            shortcut = None
            if block.downsample is not None:
                convolution, normalization = block.downsample
                assert isinstance(convolution, nn.Conv2d)
                assert isinstance(normalization, nn.BatchNorm2d)
                shortcut = (convolution, normalization)
            blocks.append((main, shortcut))
    return blocks


def _layer(convolution: nn.Conv2d) -> Layer:
    padding = convolution.padding[0]
    assert isinstance(padding, int)
    return Layer(convolution.kernel_size[0], convolution.stride[0], padding, convolution.weight.numel())


def _pools(backbone: ResNet) -> bool:
    return isinstance(backbone.maxpool, nn.MaxPool2d)


def find_memory_format(backbone: nn.Module) -> torch.memory_format:
    """Return the memory format of the convolutions' weights, in which the whole evaluation then runs."""
    for weight in backbone.parameters():
        if weight.ndim == 4 and not weight.is_contiguous():
            return torch.channels_last
    return torch.contiguous_format


def compute_band_logits(
    backbone: ResNet,
    inputs: Float[Tensor, "batch channels height width"],
    starts: Sequence[int],
    band: int,
    *,
    columns: bool,
    chunk: int,
) -> Float[Tensor, "batch classes bands"]:
    """Return the logits of `backbone` for every band: `inputs` inside it, zeros outside.

    Band i shows the columns (rows if not `columns`) starts[i], ..., starts[i] + band - 1, modulo the size. At
    most about `chunk` pairs of image and band are evaluated at once. Batch normalization uses its running
    statistics.
    """
    network, geometry = fold_batch_norm(backbone, transposed=columns), describe_architecture(backbone)
    layout = find_memory_format(backbone)
    images = inputs.transpose(2, 3) if columns else inputs
    size, across = images.shape[2:]
    # One column of zeros behind the last: what a window shows outside its band.
    images = F.pad(images, (0, 0, 0, 1)).contiguous(memory_format=layout)
    empty = _empty(network, images)
    results: list[Tensor] = []
    for part in torch.split(images, chunk):
        bands = max(1, chunk // len(part))
        logits: list[Tensor] = []
        for first in range(0, len(starts), bands):
            part_starts = tuple(starts[first : first + bands])
            plan = plan_bands(geometry, size, across, part_starts, band)
            logits.append(_evaluate(network, plan, empty, part))
        results.append(torch.cat(logits, dim=2))
    return torch.cat(results)


def _empty(network: Network, images: Columns) -> EmptyImage:
    """Return the activations of the empty image of the size of `images` without their additional column."""
    stem = network.stem.full(torch.zeros_like(images[:1, :, :-1]))
    result = F.relu(stem)
    if network.pooled:
        result = F.max_pool2d(result, POOL.kernel, POOL.stride, POOL.padding)
    relus, results = [], [result]
    for block in network.blocks:
        entering = block.relu_inputs(results[-1])
        relus.append([ReluDifference.at(each) for each in entering])
        results.append(F.relu(entering[-1]))
    return EmptyImage(stem, relus, results)


def _evaluate(network: Network, plan: Plan, empty: EmptyImage, images: Columns) -> Float[Tensor, "batch classes bands"]:
    """Return the logits of all bands of one plan."""
    difference = _stem(network, plan, empty, images)
    done = len(plan.blocks)
    for block, planned, relus in zip(network.blocks, plan.blocks, empty.relus, strict=False):
        difference = _block(block, planned, relus, difference)
    result = empty.results[done]
    bands = len(plan.full) // result.shape[2]
    features = _split_columns(_take(difference, _to_tensor(plan.full, images)), bands) + result
    for block in network.blocks[done:]:
        features = block.full(features)
    logits = F.linear(features.mean((2, 3)), network.head.weight, network.head.bias)
    return torch.unflatten(logits, 0, (len(images), bands)).transpose(1, 2)


def _stem(network: Network, plan: Plan, empty: EmptyImage, images: Columns) -> Columns:
    """Return the difference that the stem makes of each window of pixels, window after window."""
    pixels = _split_columns(_take(images, _to_tensor(plan.pixels, images)), plan.windows)
    change = _join_columns(network.stem.difference(pixels, padded=False), len(images))
    columns = _to_tensor(plan.pooled, images)
    if not network.pooled:
        return ReluDifference.at(empty.stem).difference(change, columns)
    # A maximum is not additive: pool the activations themselves. Beyond the border the lowest number there is
    # makes them 0, which is as good as leaving them out, since next to them lie rectified values.
    entering = F.pad(empty.stem, (0, 0, 0, 1), value=torch.finfo(empty.stem.dtype).min)
    features = F.relu(change + _take(entering, _to_tensor(plan.stem, images)))
    features = F.max_pool2d(_split_columns(features, plan.windows), POOL.kernel, POOL.stride, (0, POOL.padding))
    return _join_columns(features, len(images)) - _take(empty.results[0], columns)


def _block(block: Residual, plan: BlockPlan, relus: list[ReluDifference], difference: Columns) -> Columns:
    """Return the difference on the strip that leaves the block, from that on the strip before it."""
    inputs = _take(difference, _to_tensor(plan.source, difference))
    before, after, gaps = (_to_tensor(index, difference) for index in (plan.before, plan.after, plan.gaps))
    features = inputs
    for convolution, relu in zip(block.main, relus, strict=True):
        features = convolution.difference(features)
        if convolution is block.main[-1]:
            features += inputs if block.shortcut is None else block.shortcut.difference(inputs)
        if features.shape[2] == len(after):
            features = relu.difference(features, after).index_fill_(2, gaps, 0.0)
        else:  # Before the stride come 1x1 convolutions only: they leave gaps empty.
            features = relu.difference(features, before)
    return features


def _take(features: Columns, index: Int64[Tensor, "_columns"]) -> Columns:
    """Return the columns `index`, in the memory format of `features`."""
    if features.is_contiguous():
        return features.index_select(2, index)
    # With channels last, a column is one contiguous piece of memory, if only index_select is shown that.
    return features.permute(0, 2, 3, 1).index_select(1, index).permute(0, 3, 1, 2)


def _split_columns(features: Columns, pieces: int) -> Columns:
    """Cut the columns into pieces and move these to the batch; a view with channels last."""
    return torch.unflatten(features, 2, (pieces, -1)).transpose(1, 2).flatten(0, 1)


def _join_columns(features: Columns, batch: int) -> Columns:
    """Undo `_split_columns`: all pieces of an image side by side, as columns."""
    return torch.unflatten(features, 0, (batch, -1)).transpose(1, 2).flatten(2, 3)


def _to_tensor(index: Indices, like: Tensor) -> Int64[Tensor, "_columns"]:
    # Not waiting for the copy is safe, since a plan never changes.
    return torch.from_numpy(index).to(like.device, non_blocking=True)
