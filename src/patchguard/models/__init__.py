"""Local models by name: `build("bagnet17", classes=10)`. One file per family; all are `LocalModel`s."""

import inspect
from collections.abc import Callable
from typing import Any

from patchguard.errors import InputError, nearest
from patchguard.models.ablation import block_resnet18, ds_resnet18, ds_resnet50
from patchguard.models.bagnet import bagnet9, bagnet17, bagnet33
from patchguard.models.base import LocalModel
from patchguard.models.interval_cnn import interval_cnn
from patchguard.models.resnet import resnet18, resnet50
from patchguard.models.srf import srf, srf_wide
from patchguard.models.wrapper import wrap

__all__ = ["REGISTRY", "LocalModel", "build", "wrap"]

# A new model needs one line here. Its settings are the function's keyword arguments, all of them JSON values.
REGISTRY: dict[str, Callable[..., LocalModel]] = {
    "bagnet9": bagnet9,
    "bagnet17": bagnet17,
    "bagnet33": bagnet33,
    "srf": srf,
    "srf_wide": srf_wide,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "ds_resnet18": ds_resnet18,
    "ds_resnet50": ds_resnet50,
    "block_resnet18": block_resnet18,
    "interval_cnn": interval_cnn,
}


def build(name: str, **settings: Any) -> LocalModel:
    """Return a freshly initialized model of the registry, with `settings` in place of its defaults."""
    if name not in REGISTRY:
        raise InputError(f"`model` must be a known name; got {name!r}. {nearest(name, list(REGISTRY))}")
    known = list(inspect.signature(REGISTRY[name]).parameters)
    for setting in settings:
        if setting not in known:
            raise InputError(f"{name!r} has no setting {setting!r}. {nearest(setting, known)}")
    model = REGISTRY[name](**settings)
    model.name = model.name or name
    return model
