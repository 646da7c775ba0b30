"""Attacks: they try to refute certificates.

Names are imported on first use, so that the command line can list `ATTACKS` without waiting for torch.
"""

from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from patchguard.registry import Registry

if TYPE_CHECKING:
    from patchguard.attacks.adapters import FunctionAttack as FunctionAttack
    from patchguard.attacks.adapters import ToolboxAttack as ToolboxAttack
    from patchguard.attacks.adapters import as_toolbox_classifier as as_toolbox_classifier
    from patchguard.attacks.adaptive import Adaptive as Adaptive
    from patchguard.attacks.base import Attack as Attack
    from patchguard.attacks.base import AttackResult as AttackResult
    from patchguard.attacks.baselines import Colors as Colors
    from patchguard.attacks.baselines import Copy as Copy
    from patchguard.attacks.baselines import Noise as Noise
    from patchguard.attacks.patch_pgd import PatchPGD as PatchPGD
    from patchguard.attacks.universal_patch import Transformations as Transformations
    from patchguard.attacks.universal_patch import UniversalPatch as UniversalPatch
    from patchguard.attacks.universal_patch import apply_patch as apply_patch
    from patchguard.attacks.universal_patch import learn_patch as learn_patch
    from patchguard.attacks.universal_patch import load_patch as load_patch
    from patchguard.attacks.universal_patch import save_patch as save_patch

# What a setting of such a type is called in a message; whole numbers are checked by the attacks themselves.
KINDS: dict[object, str] = {float: "a number", bool: "true or false", str: "a word"}

_HOME = {
    "Adaptive": "adaptive",
    "Attack": "base",
    "AttackResult": "base",
    "Colors": "baselines",
    "Copy": "baselines",
    "FunctionAttack": "adapters",
    "Noise": "baselines",
    "PatchPGD": "patch_pgd",
    "ToolboxAttack": "adapters",
    "Transformations": "universal_patch",
    "UniversalPatch": "universal_patch",
    "apply_patch": "universal_patch",
    "learn_patch": "universal_patch",
    "load_patch": "universal_patch",
    "save_patch": "universal_patch",
    "as_toolbox_classifier": "adapters",
}

__all__ = ["ATTACKS", "build", *_HOME]


def _is_attack(name: str, value: Any) -> bool:
    from patchguard.attacks.base import Attack

    return isinstance(value, type) and issubclass(value, Attack) and is_dataclass(value)


# The names of the command line.
ATTACKS: "Registry[type[Attack]]" = Registry(
    "attacks",
    {
        "patch_pgd": "patchguard.attacks:PatchPGD",
        "adaptive": "patchguard.attacks:Adaptive",
        "universal_patch": "patchguard.attacks:UniversalPatch",
        "noise": "patchguard.attacks:Noise",
        "colors": "patchguard.attacks:Colors",
        "copy": "patchguard.attacks:Copy",
    },
    demand="a subclass of Attack and a frozen dataclass",
    accept=_is_attack,
)


def build(name: str, **settings: object) -> "Attack":
    """Return the attack of this name with these settings."""
    from patchguard.errors import InputError, nearest

    if name not in ATTACKS:
        raise InputError(f"`attack` must be one of {', '.join(ATTACKS)}; got {name!r}. {nearest(name, list(ATTACKS))}")
    kind: Any = ATTACKS[name]
    known = {field.name: field for field in fields(kind)}
    lacking = [field.name for field in known.values() if field.default is MISSING and field.name not in settings]
    if lacking or not settings.keys() <= known.keys():
        raise InputError(f"the attack {name} has the settings {', '.join(known)}; got {', '.join(settings) or 'none'}.")
    for key, value in settings.items():
        wanted = known[key].type
        accepted = (float, int) if wanted is float else wanted
        if wanted in KINDS and (not isinstance(value, accepted) or (wanted is float and isinstance(value, bool))):  # type: ignore[arg-type]
            raise InputError(f"`{key}` must be {KINDS[wanted]}; got {value!r}.")
    attack: Attack = kind(**settings)
    return attack


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'patchguard.attacks' has no attribute {name!r}")
    return getattr(import_module(f"patchguard.attacks.{_HOME[name]}"), name)
