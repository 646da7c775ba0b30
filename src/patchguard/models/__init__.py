"""Local models by name: `build("bagnet17", classes=10)`. One file per family; all are `LocalModel`s."""

import inspect
from collections.abc import Callable
from typing import Any

from patchguard.errors import InputError, nearest
from patchguard.models.base import LocalModel
from patchguard.models.wrapper import wrap
from patchguard.registry import Registry

__all__ = ["REGISTRY", "LocalModel", "build", "wrap"]

# A new model needs one line here, or an entry point of its own package. Its settings are the function's keyword
# arguments, all of them JSON values.
REGISTRY: Registry[Callable[..., LocalModel]] = Registry(
    "models",
    {
        "bagnet9": "patchguard.models.bagnet:bagnet9",
        "bagnet17": "patchguard.models.bagnet:bagnet17",
        "bagnet33": "patchguard.models.bagnet:bagnet33",
        "srf": "patchguard.models.srf:srf",
        "srf_wide": "patchguard.models.srf:srf_wide",
        "resnet18": "patchguard.models.resnet:resnet18",
        "resnet50": "patchguard.models.resnet:resnet50",
        "ds_resnet18": "patchguard.models.ablation:ds_resnet18",
        "ds_resnet50": "patchguard.models.ablation:ds_resnet50",
        "block_resnet18": "patchguard.models.ablation:block_resnet18",
        "interval_cnn": "patchguard.models.interval_cnn:interval_cnn",
    },
    demand="a function that takes keyword arguments and returns a LocalModel",
    accept=lambda name, value: callable(value),
)


def build(name: str, **settings: Any) -> LocalModel:
    """Return a freshly initialized model of the registry, with `settings` in place of its defaults."""
    if name not in REGISTRY:
        raise InputError(f"`model` must be a known name; got {name!r}. {nearest(name, list(REGISTRY))}")
    factory = REGISTRY[name]
    known = list(inspect.signature(factory).parameters)
    for setting in settings:
        if setting not in known:
            raise InputError(f"{name!r} has no setting {setting!r}. {nearest(setting, known)}")
    model = factory(**settings)
    if not isinstance(model, LocalModel):
        raise InputError(f"the model {name!r} must be a LocalModel; its function returned {type(model).__name__}.")
    model.name = model.name or name
    return model
