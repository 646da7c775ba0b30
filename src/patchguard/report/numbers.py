"""How numbers and patches are written on the page."""

import math
import re
from collections.abc import Mapping
from typing import Any

SPACE = "\u00a0"  # a number and its unit stay on one line


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage that says 0 or 100 only where it is exactly so.

    >>> percent(0.66666).replace(SPACE, " "), percent(1.0).replace(SPACE, " "), percent(0.9999).replace(SPACE, " ")
    ('66.7 %', '100 %', 'over 99.9 %')
    """
    step = 10.0**-digits
    hundredths = 100 * share
    if share in (0, 1):
        return f"{hundredths:.0f}{SPACE}%"
    if hundredths < step / 2:
        return f"under{SPACE}{step:.{digits}f}{SPACE}%"
    if hundredths >= 100 - step / 2:
        return f"over{SPACE}{100 - step:.{digits}f}{SPACE}%"
    return f"{hundredths:.{digits}f}{SPACE}%"


def interval(low: float, high: float) -> str:
    """Return an interval of shares as percentages."""
    return f"{100 * low:.1f} to {100 * high:.1f}{SPACE}%"


def count(value: int, singular: str, plural: str = "") -> str:
    """Return a number of things: 1 image, 1,200 images."""
    return f"{value:,}{SPACE}{singular if value == 1 else plural or singular + 's'}"


def short(value: float) -> str:
    """Return a measured value with about four digits; a value that is not zero does not become zero."""
    if not math.isfinite(value):
        return "none" if math.isnan(value) else "minus infinity" if value < 0 else "infinity"
    if value and abs(value) < 0.01:
        return f"{value:.2g}".replace("-", "\u2212")
    digits = 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    text = f"{value:,.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "\u2212")


def size(patch: str) -> str:
    """Return a patch as people write it: 5x5 as 5 × 5, 2% as 2 %."""
    found = re.fullmatch(r"(\d+)x(\d+)", patch)
    if found is not None:
        return f"{found[1]}{SPACE}\u00d7{SPACE}{found[2]}"
    return patch.replace("%", f"{SPACE}%")


def threat(patch: str) -> str:
    """Return a patch as part of a sentence: `5 × 5 patch`, or `patch of 2 % of the picture`."""
    return f"patch of {size(patch)} of the picture" if patch.endswith("%") else f"{size(patch)} patch"


def placed(settings: Mapping[str, Any]) -> str:
    """Return where a run has its patches, as part of a sentence; nothing where they lie in the image as it came."""
    return " on the resized and cropped image" if settings.get("patch_space") == "input" else ""
