"""How numbers, patches and settings are written on the page."""

import math
import re
from typing import Any

SPACE = "\u00a0"  # a number and its unit stay on one line


def replace_unprintable(value: Any) -> Any:
    """Return text whose letters can all be shown: names of files may hold anything, even halves of characters."""
    if not isinstance(value, str) or hasattr(value, "__html__"):  # markup is not touched
        return value
    return "".join(letter if letter.isprintable() or letter == SPACE else "\ufffd" for letter in value)


def percent(rate: float, digits: int = 1) -> str:
    """Return a fraction as a percentage that says 0 or 100 only where it is exactly so.

    >>> percent(0.66666).replace(SPACE, " "), percent(1.0).replace(SPACE, " "), percent(0.9999).replace(SPACE, " ")
    ('66.7 %', '100 %', 'over 99.9 %')
    """
    step = 10.0**-digits
    hundredths = 100 * rate
    if rate in (0, 1):
        return f"{hundredths:.0f}{SPACE}%"
    if hundredths < step / 2:
        return f"under{SPACE}{step:.{digits}f}{SPACE}%"
    if hundredths >= 100 - step / 2:
        return f"over{SPACE}{100 - step:.{digits}f}{SPACE}%"
    return f"{hundredths:.{digits}f}{SPACE}%"


def interval(low: float, high: float) -> str:
    """Return an interval of fractions as percentages."""
    return f"{100 * low:.1f} to {100 * high:.1f}{SPACE}%"


def count(value: int, singular: str, plural: str = "") -> str:
    """Return a number of things: 1 image, 1,200 images."""
    return f"{value:,}{SPACE}{singular if value == 1 else plural or singular + 's'}"


def short(value: float | None) -> str:
    """Return a measured value with about four digits; a value that is not zero does not become zero."""
    if value is None or not math.isfinite(value):
        return "none" if value is None or math.isnan(value) else "minus infinity" if value < 0 else "infinity"
    if value and abs(value) < 0.01:
        return f"{value:.2g}".replace("-", "\u2212")
    digits = 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    text = f"{value:,.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "\u2212")


def size(patch: str) -> str:
    """Return a patch as people write it: 5x5 as 5 × 5, 2% as 2 %."""
    pixels = re.fullmatch(r"(\d+)x(\d+)", patch)
    if pixels is not None:
        return f"{pixels[1]}{SPACE}\u00d7{SPACE}{pixels[2]}"
    return patch.replace("%", f"{SPACE}%")


def threat(patch: str) -> str:
    """Return a patch as part of a sentence: `5 × 5 patch`, or `patch of 2 % of the image`."""
    return f"patch of {size(patch)} of the image" if patch.endswith("%") else f"{size(patch)} patch"


def setting(value: object) -> str:
    """Return a JSON value as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(setting, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
