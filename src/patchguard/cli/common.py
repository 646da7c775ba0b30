"""What commands share: the screen, and how sizes are written."""

import re
import sys
from typing import TYPE_CHECKING

from patchguard.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from patchguard.patch import Patch


def screen() -> "Console":
    """Return stdout; into a pipe or file, rows are not folded to the width of a terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=160)


def sides(size: str) -> tuple[int, int]:
    """Read 224 as (224, 224) and 224x300 as (224, 300)."""
    found = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", size)
    if found is None:
        raise InputError(f"`--size` must be a side such as 224, or height x width such as 224x300; got {size!r}.")
    return int(found[1]), int(found[2] or found[1])


def common_patches(height: int, width: int) -> list["Patch"]:
    """Return 1, 2 and 3 % of a large image, or squares of 2, 5 and 8 pixels in a small one."""
    from patchguard.patch import Patch

    if min(height, width) >= 100:
        return [Patch.of_area(share, height=height, width=width) for share in (0.01, 0.02, 0.03)]
    return [Patch(side) for side in (2, 5, 8) if side <= min(height, width)]


def shown(text: str) -> str:
    """Return text that a terminal can show as it is: names of files may hold anything."""
    from rich.markup import escape

    return escape("".join(letter if letter.isprintable() else "?" for letter in text))
