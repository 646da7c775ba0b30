"""ResNet-18 and ResNet-50: the undefended reference, and the backbone of the ablation models.

After K. He et al., "Deep residual learning for image recognition", CVPR 2016. The parameters of `ResNet` have
torchvision's names, so that its checkpoints load strictly: `model.backbone.load_state_dict(state)`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, final

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from patchguard.errors import InputError
from patchguard.models.base import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    LocalModel,
    apply_linear_at_cells,
    initialize,
    scale_channels,
)

StrideOn = Literal["3x3", "1x1"]


@final
class BasicBlock(nn.Module):
    """Computes relu(x' + f(x)) with two 3x3 convolutions in f; x' is x, projected where the shape changes."""

    expansion: ClassVar[int] = 1

    def __init__(self, inputs: int, channels: int, *, stride: int = 1, stride_on: StrideOn = "3x3") -> None:
        super().__init__()
        if stride_on != "3x3":
            raise InputError(f"`stride_on` must be '3x3' for blocks without a 1x1 convolution; got {stride_on!r}.")
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = build_projection(inputs, channels, stride)

    def forward(
        self, inputs: Float[Tensor, "batch inputs height width"]
    ) -> Float[Tensor, "batch outputs rows columns"]:
        """Return the features after this block."""
        features = F.relu(self.bn1(self.conv1(inputs)), inplace=True)
        features = self.bn2(self.conv2(features))
        features += inputs if self.downsample is None else self.downsample(inputs)
        return F.relu(features, inplace=True)


@final
class Bottleneck(nn.Module):
    """Computes relu(x' + f(x)): f is 1x1, 3x3, 1x1 convolutions; x' is x, projected where the shape changes.

    `stride_on` says which of the first two carries the stride: the 3x3 (torchvision) or the 1x1 (the original
    publication, Keras).
    """

    expansion: ClassVar[int] = 4

    def __init__(self, inputs: int, channels: int, *, stride: int = 1, stride_on: StrideOn = "3x3") -> None:
        super().__init__()
        if stride_on not in ("3x3", "1x1"):
            raise InputError(f"`stride_on` must be '3x3' or '1x1'; got {stride_on!r}.")
        narrow, middle = (stride, 1) if stride_on == "1x1" else (1, stride)
        outputs = self.expansion * channels
        self.conv1 = nn.Conv2d(inputs, channels, 1, stride=narrow, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=middle, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = build_projection(inputs, outputs, stride)

    def forward(
        self, inputs: Float[Tensor, "batch inputs height width"]
    ) -> Float[Tensor, "batch outputs rows columns"]:
        """Return the features after this block."""
        features = F.relu(self.bn1(self.conv1(inputs)), inplace=True)
        features = F.relu(self.bn2(self.conv2(features)), inplace=True)
        features = self.bn3(self.conv3(features))
        features += inputs if self.downsample is None else self.downsample(inputs)
        return F.relu(features, inplace=True)


def build_projection(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """Return the 1x1 convolution that brings a residual to its new shape, or None where the shape stays."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))


@final
class ResNet(nn.Module):
    """The plain classifier: normalized images, of `in_channels` channels, to one vector of logits per image.

    `small_images` replaces the stem (7x7 convolution of stride 2, pooling of stride 2) by one 3x3
    convolution, as is usual for 32 x 32 pixels. `width` multiplies the channels.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        layers: Sequence[int],
        *,
        classes: int = 1000,
        in_channels: int = 3,
        small_images: bool = False,
        width: float = 1.0,
        stride_on: StrideOn = "3x3",
    ) -> None:
        super().__init__()
        self.classes = classes
        self.in_channels = in_channels
        inputs = scale_channels(64, width)
        if small_images:
            self.conv1 = nn.Conv2d(in_channels, inputs, 3, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(in_channels, inputs, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(inputs)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        stages = []
        for stage, blocks in enumerate(layers):
            channels = scale_channels(64 * 2**stage, width)
            stride = 1 if stage == 0 else 2
            modules = [block(inputs, channels, stride=stride, stride_on=stride_on)]
            inputs = block.expansion * channels
            modules += [block(inputs, channels, stride_on=stride_on) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(*modules))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(inputs, classes)
        initialize(self)

    def features(
        self, inputs: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch features rows columns"]:
        """Return the features of the last stage, before pooling."""
        features = self.maxpool(F.relu(self.bn1(self.conv1(inputs)), inplace=True))
        features = self.layer3(self.layer2(self.layer1(features)))
        last: Tensor = self.layer4(features)
        return last

    def logits(self, inputs: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Return one vector of class scores per image: features, averaged over positions, through `fc`."""
        return F.linear(self.features(inputs).mean((2, 3)), self.fc.weight, self.fc.bias)

    def forward(self, inputs: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Return `logits`."""
        return self.logits(inputs)


def build_resnet(
    depth: int,
    *,
    classes: int = 1000,
    in_channels: int = 3,
    small_images: bool = False,
    width: float = 1.0,
    stride_on: StrideOn = "3x3",
) -> ResNet:
    """Return the plain ResNet of depth 18 or 50."""
    if depth not in (18, 50):
        raise InputError(f"`depth` must be 18 or 50; got {depth}.")
    block, layers = (BasicBlock, (2, 2, 2, 2)) if depth == 18 else (Bottleneck, (3, 4, 6, 3))
    return ResNet(
        block,
        layers,
        classes=classes,
        in_channels=in_channels,
        small_images=small_images,
        width=width,
        stride_on=stride_on,
    )


@final
class LocalResNet(LocalModel):
    """A ResNet whose last layer is applied at each position instead of after pooling.

    The mean of the local logits over all positions equals the logits of the backbone, as the last layer is
    affine. The field of a cell spans most or all of a usual image: this is the reference without a defense.
    """

    def __init__(
        self,
        *,
        depth: int = 18,
        classes: int = 1000,
        small_images: bool = False,
        width: float = 1.0,
        stride_on: StrideOn = "3x3",
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        super().__init__(classes=classes, mean=mean, std=std)
        self.name = f"resnet{depth}"
        self.architecture: dict[str, Any] = {"small_images": small_images, "width": width}
        if depth == 50:
            self.architecture["stride_on"] = stride_on
        self.backbone = build_resnet(
            depth, classes=classes, small_images=small_images, width=width, stride_on=stride_on
        )

    def local_logits(
        self, normalized: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch classes rows columns"]:
        """Return the class scores of every position of the last stage."""
        return apply_linear_at_cells(self.backbone.fc, self.backbone.features(normalized))

    def smallest_input(self) -> tuple[int, int]:
        """One stride of the whole network; the field is wider and reaches into the zero padding."""
        stride = 8 if self.architecture["small_images"] else 32
        return stride, stride

    def config(self) -> dict[str, Any]:
        """Return the settings of `resnet18` or `resnet50`, whichever is `name`."""
        return {**super().config(), **self.architecture}


def resnet18(
    *,
    classes: int = 1000,
    small_images: bool = False,
    width: float = 1.0,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> LocalResNet:
    """Return the ResNet of 18 layers."""
    return LocalResNet(depth=18, classes=classes, small_images=small_images, width=width, mean=mean, std=std)


def resnet50(
    *,
    classes: int = 1000,
    small_images: bool = False,
    width: float = 1.0,
    stride_on: StrideOn = "3x3",
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> LocalResNet:
    """Return the ResNet of 50 layers."""
    return LocalResNet(
        depth=50,
        classes=classes,
        small_images=small_images,
        width=width,
        stride_on=stride_on,
        mean=mean,
        std=std,
    )
