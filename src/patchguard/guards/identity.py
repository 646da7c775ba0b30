"""What makes a guard: its settings as JSON values and its tensors, and the one digest over both."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from patchguard.errors import InputError
from patchguard.models.base import LocalModel

FORMAT = 1  # of model files; part of the digest


@final
@dataclass(frozen=True)
class Origin:
    """The function that made a network, and the SHA-256 of the file that defines it."""

    call: str
    sha256: str


def remember_origin(network: nn.Module, origin: Origin) -> None:
    """Keep where a network comes from, so that it can be saved and told from others."""
    network.code_origin = origin  # type: ignore[assignment]


def find_origin(network: nn.Module) -> Origin | None:
    """Return where a network comes from; None for those of the registry, and for those made by hand."""
    origin = getattr(network, "code_origin", None)
    return origin if isinstance(origin, Origin) else None


def compute_digest(model: nn.Module, settings: Mapping[str, Any]) -> str:
    """Return the SHA-256 of tensors and settings; neither a recipe nor the release of this package is part of it."""
    written = canonical({"format": FORMAT, **settings, "recipe": None, "half": False})
    return digest_tensors(collect_tensors(model), written)


def describe_model(model: nn.Module, class_names: tuple[str, ...]) -> dict[str, Any]:
    """Return what a network is made by, the registry or code of the user's, and the names of its classes."""
    origin = find_origin(model)
    if origin is not None:
        cells = model.classes if isinstance(model, LocalModel) else None  # classes per cell of a network with cells
        return {
            "model": {"name": origin.call, "settings": {"sha256": origin.sha256, "cells": cells}},
            "class_names": list(class_names),
        }
    if not isinstance(model, LocalModel) or not model.name:
        raise InputError(
            f"`guard.model` must be a network of the registry, or made by a function in a file of yours, to be saved; "
            f"this {type(model).__name__} is neither. Write the function and load it: "
            "patchguard.load('my_net.py:make_model', trust_code=True, ...)."
        )
    return {"model": {"name": model.name, "settings": model.config()}, "class_names": list(class_names)}


def canonical(settings: Mapping[str, Any]) -> str:
    """Return settings as the one JSON text that digests are made of."""
    try:
        return json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"`recipe` must hold JSON values only: {error}.") from None


def collect_tensors(model: nn.Module, *, half: bool = False) -> dict[str, Tensor]:
    """Return the tensors as they go into a file: on the CPU, contiguous, finite, float32 or float16."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        plain = tensor.detach().cpu().contiguous()
        if plain.is_floating_point():
            if plain.dtype != torch.float32:
                raise InputError(f"`guard.model` must be float32 to be saved; {name} is {plain.dtype}. Call .float().")
            plain = plain.half() if half else plain
            if not bool(plain.isfinite().all()):
                raise InputError(f"the tensor {name} must be finite{' in float16' if half else ''} to be saved.")
        tensors[name] = plain
    return tensors


def digest_tensors(tensors: Mapping[str, Tensor], written: str) -> str:
    """Return the SHA-256 over tensors by name and the text of the settings."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    total.update(written.encode())
    return total.hexdigest()
