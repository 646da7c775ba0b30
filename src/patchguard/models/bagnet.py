"""BagNets: the ResNet-50 layout with unpadded convolutions, most of them 1x1, so that each cell sees little.

After W. Brendel and M. Bethge, "Approximating CNNs with bag-of-local-features models works surprisingly well
on ImageNet", ICLR 2019. Parameters have the names and shapes of the public PyTorch checkpoints, which load
strictly.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
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

EXPANSION = 4
BLOCKS = (3, 4, 6, 3)
STRIDES = (2, 2, 2, 1)
CHANNELS = (64, 128, 256, 512)
# The 3x3 convolutions are the stem's and that of the first block in so many stages. With s_j = 1, 1, 2, 4, 8
# the stride before the j-th of them, the field is 1 + 2 sum_j s_j.
STAGES_WITH_3X3 = {9: 2, 17: 3, 33: 4}


@final
class BagNet(LocalModel):
    """Cell (u, v) reads the pixels [8u, 8u + field) x [8v, 8v + field), which all lie inside the image.

    An axis of n pixels has floor((n - field) / 8) + 1 cells. `width` multiplies the channels; 1.0 is the
    published network.
    """

    def __init__(
        self,
        *,
        field: int = 17,
        classes: int = 1000,
        width: float = 1.0,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        super().__init__(classes=classes, mean=mean, std=std)
        if field not in STAGES_WITH_3X3:
            raise InputError(f"`field` of a BagNet must be 9, 17 or 33 pixels; got {field}.")
        self.name = f"bagnet{field}"
        self.field_size = field
        self.width = width
        stem = scale_channels(64, width)
        self.conv1 = nn.Conv2d(3, stem, 1, bias=False)
        self.conv2 = nn.Conv2d(stem, stem, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        inputs, stages = stem, []
        for stage, (blocks, stride, channels) in enumerate(zip(BLOCKS, STRIDES, CHANNELS, strict=True)):
            kernel = 3 if stage < STAGES_WITH_3X3[field] else 1
            middle = scale_channels(channels, width)
            first = Bottleneck(inputs, middle, kernel=kernel, stride=stride)
            inputs = EXPANSION * middle
            stages.append(nn.Sequential(first, *(Bottleneck(inputs, middle) for _ in range(blocks - 1))))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(inputs, classes)
        initialize(self)

    def local_logits(
        self, normalized: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch classes rows columns"]:
        """Return the class scores of every cell: the last layer is applied before, not after, pooling."""
        return apply_linear_at_cells(self.fc, self.features(normalized))

    def features(
        self, normalized: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch channels rows columns"]:
        """Return what the last layer reads at every cell."""
        features: Tensor = F.relu(self.bn1(self.conv2(self.conv1(normalized))), inplace=True)
        deep: Tensor = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        return deep

    def smallest_input(self) -> tuple[int, int]:
        """One field: a smaller image has no cell."""
        return self.field_size, self.field_size

    def config(self) -> dict[str, Any]:
        """Return the settings of `bagnet9`, `bagnet17` or `bagnet33`, whichever is `name`."""
        return {**super().config(), "width": self.width}


@final
class Bottleneck(nn.Module):
    """Computes relu(x' + f(x)): f narrows (1x1), looks around (`kernel`, unpadded), widens (1x1).

    x' is x, projected where the shape changes and cropped at the far border to the positions that f still
    has. So position i adds x at stride * i to what f reads from stride * i on: the residual never widens the
    field.
    """

    def __init__(self, inputs: int, middle: int, *, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        outputs = EXPANSION * middle
        self.conv1 = nn.Conv2d(inputs, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, kernel, stride=stride, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(
        self, inputs: Float[Tensor, "batch inputs height width"]
    ) -> Float[Tensor, "batch outputs rows columns"]:
        """Return the features after this block."""
        features = F.relu(self.bn1(self.conv1(inputs)), inplace=True)
        features = F.relu(self.bn2(self.conv2(features)), inplace=True)
        features = self.bn3(self.conv3(features))
        residual = inputs if self.downsample is None else self.downsample(inputs)
        features += residual[..., : features.shape[-2], : features.shape[-1]]
        return F.relu(features, inplace=True)


def convert_resnet50_state(state: Mapping[str, Tensor], *, field: int = 17) -> dict[str, Tensor]:
    """Return the tensors of a plain ResNet-50 (torchvision's names) as those of the BagNet of this field.

    Rule.     A 3x3 kernel becomes, where BagNet's is 1x1, the sum of its nine entries. The 7x7 kernel of the stem is
              summed into 3x3; the 1x1 kernel before it repeats the three colors. All else is taken as it is.
    Theorem.  On an image of one color, every cell has the logits that ResNet-50 has far from the border.
    Proof.    There, all positions of a layer agree. A kernel then acts by its sum alone, and strides and pooling do
              nothing; only near the border does ResNet-50 read zeros beside the image.
    """
    if state["conv1.weight"].shape[2:] != (7, 7) or "layer4.2.conv3.weight" not in state:
        raise InputError("`state` must be that of a ResNet-50 for photos, whose first kernel is 7 x 7.")
    converted = {name: tensor.clone() for name, tensor in state.items()}
    for stage, blocks in enumerate(BLOCKS, 1):
        for block in range(blocks):
            if block > 0 or stage > STAGES_WITH_3X3[field]:
                name = f"layer{stage}.{block}.conv2.weight"
                converted[name] = state[name].sum((2, 3), keepdim=True)
    converted["conv1.weight"], converted["conv2.weight"] = _stem(state["conv1.weight"])
    return converted


def _stem(kernel: Float[Tensor, "stem 3 7 7"]) -> tuple[Float[Tensor, "stem 3 1 1"], Float[Tensor, "stem stem 3 3"]]:
    """Return a 1x1 and a 3x3 kernel, one after the other, for one of 7x7, summed over 2, 3, 2 rows and columns."""
    rows = torch.stack([part.sum(2) for part in torch.split(kernel, [2, 3, 2], 2)], 2)
    small = torch.stack([part.sum(3) for part in torch.split(rows, [2, 3, 2], 3)], 3)
    color = torch.arange(len(kernel)) % 3  # every channel carries one color, so that none stays without a gradient
    copies = F.one_hot(color, 3).to(kernel)
    return copies[:, :, None, None], small[:, color] / copies.sum(0)[color].view(1, -1, 1, 1)


def bagnet9(
    *,
    classes: int = 1000,
    width: float = 1.0,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> BagNet:
    """Return the BagNet whose cells read 9 x 9 pixels."""
    return BagNet(field=9, classes=classes, width=width, mean=mean, std=std)


def bagnet17(
    *,
    classes: int = 1000,
    width: float = 1.0,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> BagNet:
    """Return the BagNet whose cells read 17 x 17 pixels; an image of 224 x 224 has 26 x 26 cells."""
    return BagNet(field=17, classes=classes, width=width, mean=mean, std=std)


def bagnet33(
    *,
    classes: int = 1000,
    width: float = 1.0,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> BagNet:
    """Return the BagNet whose cells read 33 x 33 pixels."""
    return BagNet(field=33, classes=classes, width=width, mean=mean, std=std)
