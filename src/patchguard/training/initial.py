"""Trained models that a run begins with: one to start from, one to learn from."""

from typing import Any

import torch
from torch import Tensor

from patchguard.errors import InputError
from patchguard.guards.interval import IntervalGuard
from patchguard.guards.local import LocalGuard
from patchguard.models.bagnet import BagNet, convert_resnet50_state
from patchguard.models.resnet import LocalResNet
from patchguard.storage import zoo


def start_from(guard: LocalGuard[Any] | IntervalGuard, name: str) -> None:
    """Give the network of `guard` the weights of a trained model of the same shape.

    A BagNet also starts from a ResNet-50, by sums of its kernels. Where the number of classes differs, the last
    layer keeps its fresh weights.
    """
    before = zoo.load(name).model
    found: dict[str, Tensor] = dict(before.state_dict())
    if isinstance(guard.model, BagNet) and isinstance(before, LocalResNet) and before.name == "resnet50":
        found = convert_resnet50_state(before.backbone.state_dict(), field=guard.model.field_size)
    wanted = guard.model.state_dict()
    if before.classes != guard.model.classes:
        last = {key for key in wanted if key in ("fc.weight", "fc.bias", "backbone.fc.weight", "backbone.fc.bias")}
        found = {**found, **{key: wanted[key] for key in last}}
    differing = [key for key in wanted.keys() | found.keys() if key not in wanted or key not in found]
    differing += [key for key in wanted.keys() & found.keys() if wanted[key].shape != found[key].shape]
    if differing:
        raise InputError(
            f"`initial` must name a model of the same shape; {name!r} differs in {', '.join(sorted(differing)[:3])}."
        )
    guard.model.load_state_dict(found)


def teacher_of(name: str, guard: LocalGuard[Any] | IntervalGuard, device: torch.device) -> LocalGuard[Any]:
    """Return the trained model of this name, ready to answer on `device`."""
    teacher = zoo.load_guard(name)
    if teacher.model.classes != guard.model.classes:
        raise InputError(
            f"`teacher` must know the {guard.model.classes} classes to learn; {name!r} has {teacher.model.classes}."
        )
    teacher.model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    teacher.model.eval().requires_grad_(False)
    return teacher
