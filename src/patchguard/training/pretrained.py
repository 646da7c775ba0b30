"""Weights that a run starts from: those of trained models by name, and ResNet-50 files from elsewhere.

`imagenette_resnet50` is an ImageNet ResNet-50 that answers with the ten classes of ImageNette alone: the undefended row
beside our models of ImageNette, their teacher, and what BagNet-17 starts from:

    python -m patchguard.training.pretrained resnet50.safetensors zoo/imagenette_resnet50.safetensors

Its accuracy is too good to be compared: the test images of ImageNette are training images of ImageNet.
`imagenet_resnet50` is the same network with all of its thousand classes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from patchguard import models
from patchguard.data.catalog import IMAGENETTE_CLASSES
from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models.bagnet import BagNet, convert_resnet50_state
from patchguard.models.base import LocalModel
from patchguard.models.resnet import LocalResNet, StrideOn
from patchguard.storage import zoo

LAST_LAYER = ("fc.weight", "fc.bias", "backbone.fc.weight", "backbone.fc.bias")
# The numbers, among the thousand classes of ImageNet, of tench, English springer, ..., parachute.
ROWS = (0, 217, 482, 491, 497, 566, 569, 571, 574, 701)
CLASSES = 1000  # of ImageNet
EPSILON = 1e-5  # that torch's batch normalization adds to a variance


# -- trained models ----------------------------------------------------------------------------------------------------


def init_from(model: LocalModel, name: str) -> None:
    """Give a network the weights of a trained model of the same shape.

    A BagNet also starts from a ResNet-50, by sums of its kernels. Where the number of classes differs, the last layer
    keeps its fresh weights.
    """
    trained = zoo.load(name).model
    tensors: dict[str, Tensor] = dict(trained.state_dict())
    if isinstance(model, BagNet) and isinstance(trained, LocalResNet) and trained.name == "resnet50":
        tensors = convert_resnet50_state(trained.backbone.state_dict(), field=model.field_size)
    expected = model.state_dict()
    if trained.classes != model.classes:
        tensors |= {key: expected[key] for key in LAST_LAYER if key in expected}
    differing = expected.keys() ^ tensors.keys()
    differing |= {key for key in expected.keys() & tensors.keys() if expected[key].shape != tensors[key].shape}
    if differing:
        raise InputError(
            f"`model.init_from` must name a model of the same shape; {name!r} differs in "
            f"{', '.join(sorted(differing)[:3])}."
        )
    model.load_state_dict(tensors)


def load_teacher(name: str, classes: int, device: torch.device) -> LocalGuard[Any]:
    """Return the trained model of this name, ready to answer on `device`."""
    teacher = zoo.load_guard(name)
    if teacher.model.classes != classes:
        raise InputError(
            f"`loss.teacher` must know the {classes} classes to learn; {name!r} has {teacher.model.classes}."
        )
    teacher.model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    teacher.model.eval().requires_grad_(False)
    return teacher


# -- ResNet-50 ---------------------------------------------------------------------------------------------------------


def imagenette_resnet50(path: str | Path, *, stride_on: StrideOn = "1x1", width: float = 1.0) -> LocalGuard[Any]:
    """Return the LocalGuard, without a defense, of the ResNet-50 whose tensors are in a safetensors file; ten classes.

    Tensors have the usual names (conv1.weight, layer1.0.conv1.weight, ..., fc.bias). `stride_on` says which convolution
    of a block has the stride: the 1x1 in Keras's weights, the 3x3 in torchvision's. `width` is that of the network.
    """
    return _resnet50(path, ROWS, IMAGENETTE_CLASSES, stride_on, width)


def imagenet_resnet50(path: str | Path, *, stride_on: StrideOn = "1x1", width: float = 1.0) -> LocalGuard[Any]:
    """Return the same with all classes of ImageNet, in the order of their folders' names; they have no names here."""
    return _resnet50(path, range(CLASSES), (), stride_on, width)


def _resnet50(
    path: str | Path, rows: Sequence[int], names: tuple[str, ...], stride_on: StrideOn, width: float
) -> LocalGuard[Any]:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"`path` must be a safetensors file of a ResNet-50; {path} cannot be read: {error}.") from None
    for name in ("fc.weight", "fc.bias"):
        if name not in tensors or len(tensors[name]) != CLASSES:
            raise InputError(
                f"`path` must hold a ResNet-50 with the 1000 classes of ImageNet; {path} has no such {name}."
            )
        tensors[name] = tensors[name][list(rows)]
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    _rescale_stem(tensors)
    model = models.build("resnet50", classes=len(rows), stride_on=stride_on, width=width)
    assert isinstance(model, LocalResNet)
    try:
        model.backbone.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"`path` must hold the tensors of a ResNet-50: {reason}.") from None
    return LocalGuard(Preprocess(), model.eval(), Evidence(low=None), Undefended(), names)


def _rescale_stem(tensors: dict[str, Tensor]) -> None:
    """Scale the output of the first convolution to variance 1; batch normalization undoes it.

    A network made for pixels from 0 to 255 has variances there that float16 cannot hold.
    """
    if not {"conv1.weight", "bn1.running_mean", "bn1.running_var"} <= tensors.keys():
        return
    scale = (tensors["bn1.running_var"] + EPSILON).sqrt()
    tensors["conv1.weight"] = tensors["conv1.weight"] / scale.view(-1, 1, 1, 1)
    tensors["bn1.running_mean"] = tensors["bn1.running_mean"] / scale
    tensors["bn1.running_var"] = tensors["bn1.running_var"].new_full(scale.shape, 1 - EPSILON)


def main(arguments: list[str] | None = None) -> None:
    """Make imagenette_resnet50 from a file of ResNet-50."""
    parser = argparse.ArgumentParser(prog="python -m patchguard.training.pretrained", description=main.__doc__)
    parser.add_argument("resnet50", type=Path, help="safetensors with the usual tensor names")
    parser.add_argument("out", type=Path, help="such as zoo/imagenette_resnet50.safetensors")
    parser.add_argument("--stride-on", choices=("1x1", "3x3"), default="1x1", help="Keras: 1x1; torchvision: 3x3")
    options = parser.parse_args(arguments)
    try:
        guard = imagenette_resnet50(options.resnet50, stride_on=options.stride_on)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        zoo.save(guard, options.out, half=True)
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
