"""Small grids of the oracle as tensors and windows of the package, and the package held against the oracle."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from helpers import oracle
from helpers.oracle import Geometry
from patchguard.defenses import Defense
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.windows import Windows


def as_windows(geometry: Geometry, size: tuple[int, int], count: int = 1) -> Windows:
    return geometry.windows(size, count)


def as_tensor(maps: list[np.ndarray], geometry: Geometry) -> torch.Tensor:
    return torch.from_numpy(np.stack(maps)).double().view(len(maps), -1, *geometry.grid)


def assert_right(
    defense: Defense,
    evidence: Evidence,
    u: np.ndarray,
    geometry: Geometry,
    windows: Windows,
    rule: oracle.Rule,
    margin: Fraction,
    broken: bool,
) -> None:
    """The package where a mutant of its theory goes wrong: the label of the rule, the true margin, no false proof."""
    found = defense.certify(evidence(as_tensor([u], geometry)), windows)
    answer = int(rule(u[None])[0])
    assert int(found.label) == answer or answer == -1  # an alert comes with a label of its own
    assert float(found.margin) == pytest.approx(float(margin), abs=1e-12)
    assert not (broken and bool(found.margin > 0))
