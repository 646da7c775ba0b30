"""Certified robustness of image classifiers against adversarial patches.

Public names are imported on first use, so that `patchguard --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "Certificate": "certificate",
    "DetectionCertificate": "certificate",
    "Evidence": "evidence",
    "EvidenceMap": "evidence",
    "Guard": "guard",
    "InputError": "errors",
    "IntervalGuard": "interval",
    "Patch": "patch",
    "Prediction": "certificate",
    "Windows": "windows",
    "load": "zoo",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from patchguard.certificate import Certificate as Certificate
    from patchguard.certificate import DetectionCertificate as DetectionCertificate
    from patchguard.certificate import Prediction as Prediction
    from patchguard.errors import InputError as InputError
    from patchguard.evidence import Evidence as Evidence
    from patchguard.evidence import EvidenceMap as EvidenceMap
    from patchguard.guard import Guard as Guard
    from patchguard.interval import IntervalGuard as IntervalGuard
    from patchguard.patch import Patch as Patch
    from patchguard.windows import Windows as Windows
    from patchguard.zoo import load as load


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'patchguard' has no attribute {name!r}")
    return getattr(import_module(f"patchguard.{_HOME[name]}"), name)
