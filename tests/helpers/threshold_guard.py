"""A guard that tells bright from dark pictures, and pictures so near its threshold that one cell decides.

Every cell reads 3 x 3 pixels and says how far their mean lies above the threshold. Masks that hide all cells of a patch
leave the label alone. Masks one cell too small let a white or black patch through.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchguard.defenses import Defense, DoubleMasking
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.field import Axis, Field
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.windows import Windows
from patchguard.guards import local as guard_file
from patchguard.guards.local import LocalGuard
from patchguard.models import LocalModel, build
from patchguard.patch import Patch
from patchguard.storage import zoo

NAMES = ("bright", "dark", "neither")
SIDE, PATCH = 12, Patch(2)
THRESHOLD = 127.5 / 255
STRENGTH = 100.0
ANY = Windows.sliding(grid=(1, 1), size=(1, 1))
reached_by = Windows.reached_by
derive_field = LocalGuard._cells


def network() -> LocalModel:
    """One 3x3 mean, passed on to the last layer as it is."""
    model = build("srf", classes=3, field=3, widths=[2], mean=(0.5, 0.5, 0.5), std=(1.0, 1.0, 1.0))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
        model.stem.conv.weight[0] = 1 / 27
        model.stem.norm.weight.fill_((1 + model.stem.norm.eps) ** 0.5)
        model.stem.norm.bias[0] = 0.5  # so that the first channel is the brightness, never below 0
        model.fc.weight[0, 0], model.fc.weight[1, 0] = STRENGTH, -STRENGTH
        model.fc.bias[0], model.fc.bias[1], model.fc.bias[2] = -STRENGTH * THRESHOLD, STRENGTH * THRESHOLD, -50.0
    return model.eval()


def make_guard(defense: Defense | None = None) -> LocalGuard:
    """The guard with masks for a patch of 2 x 2 pixels, as wide as `Windows.reached_by` says."""
    evidence = Evidence(low=None, drift=1e-3)
    plain = LocalGuard(Preprocess(), network(), evidence, defense or DoubleMasking(masks=ANY), NAMES)
    return plain.for_patch(PATCH, SIDE, SIDE)


def save_guard(path: Path, defense: Defense | None = None) -> str:
    """Write the guard to a file."""
    zoo.save(make_guard(defense), path, recipe={"patch": {"height": 2, "width": 2, "count": 1}})
    return str(path)


def shrink_windows(patch: Patch, field: Field) -> Windows:
    """The planted mistake: windows that lack one row and one column of the cells a patch reaches."""
    true = reached_by(patch, field)
    rows, columns = (tuple((first, last - 1) for first, last in axis) for axis in (true.rows, true.columns))
    return Windows(grid=true.grid, rows=rows, columns=columns, pairs=true.pairs, wrap=true.wrap, count=true.count)


def shrink_field(guard: LocalGuard, height: int, width: int) -> Field:
    """The other planted mistake: cells that are said to read one row and one column less than they do."""
    true = derive_field(guard, height, width)
    rows, columns = (
        Axis(starts=axis.starts, lengths=tuple(length - 1 for length in axis.lengths), size=axis.size)
        for axis in (true.rows, true.columns)
    )
    return Field(rows, columns)


@contextmanager
def plant_mistake(mistake: str = "windows") -> Iterator[None]:
    """Make every certificate wrong."""
    with pytest.MonkeyPatch.context() as patched:
        guard_file._find_windows.cache_clear()
        if mistake == "windows":
            patched.setattr(Windows, "reached_by", staticmethod(shrink_windows))
        else:
            patched.setattr(LocalGuard, "_cells", shrink_field)
        yield
    guard_file._find_windows.cache_clear()


def write_images(folder: Path, count: int, seed: int = 0) -> Path:
    """Write pictures of one gray each, just above and just below the threshold, with a little noise."""
    chance = np.random.default_rng(seed)
    for name, gray in (("bright", 128), ("dark", 127)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.full((SIDE, SIDE, 3), gray, dtype=np.int64)
            # Pairs of opposite changes: the mean stays.
            places = chance.permutation(pixels.size)[:20]
            pixels.reshape(-1)[places] += np.resize([1, -1], 20)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:03d}.png")
    return folder
