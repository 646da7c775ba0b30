"""The stable name of `patchguard.geometry.windows`."""

from patchguard.geometry.windows import Windows as Windows
