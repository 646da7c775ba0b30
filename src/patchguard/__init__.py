"""Certified robustness of image classifiers against adversarial patches.

Public names are imported on first use, so that `patchguard --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "Certificate": "guard",
    "DetectionCertificate": "guard",
    "Evidence": "defenses.evidence",
    "EvidenceMap": "defenses.evidence",
    "Guard": "guard",
    "LocalGuard": "guards.local",
    "InputError": "errors",
    "IntervalGuard": "guards.interval",
    "MaskSet": "geometry.mask_sets",
    "Patch": "patch",
    "PixelMaskGuard": "guards.pixel_masks",
    "Prediction": "guard",
    "Windows": "geometry.windows",
    "defend": "guards.pixel_masks",
    "load": "storage.zoo",
    "save": "storage.zoo",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from patchguard.defenses.evidence import Evidence as Evidence
    from patchguard.defenses.evidence import EvidenceMap as EvidenceMap
    from patchguard.errors import InputError as InputError
    from patchguard.geometry.mask_sets import MaskSet as MaskSet
    from patchguard.geometry.windows import Windows as Windows
    from patchguard.guard import Certificate as Certificate
    from patchguard.guard import DetectionCertificate as DetectionCertificate
    from patchguard.guard import Guard as Guard
    from patchguard.guard import Prediction as Prediction
    from patchguard.guards.interval import IntervalGuard as IntervalGuard
    from patchguard.guards.local import LocalGuard as LocalGuard
    from patchguard.guards.pixel_masks import PixelMaskGuard as PixelMaskGuard
    from patchguard.guards.pixel_masks import defend as defend
    from patchguard.patch import Patch as Patch
    from patchguard.storage.zoo import load as load
    from patchguard.storage.zoo import save as save


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'patchguard' has no attribute {name!r}")
    return getattr(import_module(f"patchguard.{_HOME[name]}"), name)
