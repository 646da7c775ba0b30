"""Claims of chosen size, and the largest that the checker admits: they ask how long a check takes."""

from itertools import islice
from typing import Any

import numpy as np

from helpers.claims import DIGESTS
from patchguard import verify


def boxes(grid: tuple[int, int], count: int, wrap: bool) -> list[list[int]]:
    """So many different boxes, the largest first: [0] is the whole grid."""

    def intervals(size: int) -> list[tuple[int, int]]:
        found = [(0, size)]
        for length in range(size - 1, 0, -1):
            found += [(start, start + length) for start in range(size if wrap else size - length + 1)]
        return found

    rows, columns = (intervals(size)[:count] for size in grid)
    diagonals = ([(i, s - i) for i in range(min(s + 1, len(rows)))] for s in range(len(rows) + len(columns)))
    pairs = (pair for diagonal in diagonals for pair in diagonal if pair[1] < len(columns))
    return [[*rows[i], *columns[j]] for i, j in islice(pairs, count)]


def claim(
    rule: dict[str, Any], shape: tuple[int, int, int], windows: int, masks: int = 0, wrap: bool = False
) -> tuple[dict[str, Any], np.ndarray]:
    """A claim of this size about evidence that is 0 everywhere, and wrong by its margin alone."""
    grid = shape[1:]
    evidence = {"kind": "confidence", "low": None, "high": None, "drift": 0.0, "threshold": 0.2, "bits": 0}
    stated = {
        "format": verify.FORMAT,
        "package": "",
        "class_names": [],
        "defense": rule | ({"masks": boxes(grid, masks, wrap), "wrap": [wrap, wrap]} if masks else {}),
        "evidence": evidence,
        "units": verify.units_of(evidence),
        "source": list(grid),
        "patch": {"height": 1, "width": 1, "count": 1},
        "field": {
            name: {"starts": list(range(size)), "lengths": [1] * size}
            for name, size in zip(("rows", "columns"), grid, strict=True)
        },
        "wrap": [wrap, wrap],
        "windows": boxes(grid, windows, wrap),
        "label": 0,
        "margin": {"units": 1, "denominator": 1, "value": 1.0},
        "certified": True,
        "weakest": 0,
        "rival": 1,
        "digests": dict(DIGESTS),
    }
    if rule["name"] == "RobustMasking":
        stated["margin"]["denominator"] = 1 if rule["threshold"] in "01" else 999
    return stated, np.zeros(shape, dtype=np.int64)


def worst(
    rule: dict[str, Any], shape: tuple[int, int, int], masks: int = 0, wrap: bool = False
) -> tuple[dict[str, Any], np.ndarray]:
    """The claim with the most windows that is admitted."""
    stated, layers = claim(rule, shape, verify.LARGEST_BOXES, masks, wrap)
    every, proved = [tuple(box) for box in stated["windows"]], verify._rule(stated, shape[1:])
    fewest, most = 0, len(every)
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if proved.work(shape[0], verify.Boxes(shape[1:], every[:middle])) <= verify.LARGEST_WORK:
            fewest = middle
        else:
            most = middle - 1
    stated["windows"] = [list(box) for box in every[:fewest]]
    stated["source"] = [1, 1]  # one position, from which all cells are touched
    for axis in stated["field"].values():
        axis["starts"] = [0] * len(axis["starts"])
    return stated, layers


ROBUST = {"name": "RobustMasking", "threshold": "0"}
SHARE = {"name": "RobustMasking", "threshold": "1/1000"}
DOUBLE = {"name": "DoubleMasking"}
SUM = {"name": "ClippedSum", "spatial": True}

USUAL = {
    "ImageNet, 26 x 26 cells": (ROBUST, (1000, 26, 26), 529, 441),
    "ImageNet, 26 x 26 cells, a threshold": (SHARE, (1000, 26, 26), 529, 441),
    "ImageNet, 26 x 26 cells, sums": (SUM, (1000, 26, 26), 529),
    "ImageNet, 26 x 26 cells, two masks": (DOUBLE, (1000, 26, 26), 529, 441),
    "ImageNette, 26 x 26 cells": (DOUBLE, (10, 26, 26), 529, 441),
    "ImageNet, 299 bands": (SHARE, (1000, 1, 299), 299, 299, True),
    "CIFAR-10, 32 x 32 cells": (DOUBLE, (10, 32, 32), 784, 784),
    "CIFAR-10, 32 x 32 blocks on a circle": (SHARE, (10, 32, 32), 1024, 1024, True),
    "CIFAR-100, 32 x 32 cells": (DOUBLE, (100, 32, 32), 784, 676),
}

WORST = {
    "robust masking": (SHARE, (1000, 26, 26), 441),
    "robust masking, many masks": (SHARE, (2, 1, 512), 60_000),
    "robust masking, many classes": (SHARE, (2**18, 4, 4), 16),
    "robust masking, large maps": (SHARE, (2, 256, 512), 1000),
    "robust masking on a circle": (SHARE, (100, 32, 32), 3000, True),
    "robust masking without a threshold": (ROBUST, (1000, 26, 26), 441),
    "double masking": (DOUBLE, (1000, 26, 26), 441),
    "double masking, many masks": (DOUBLE, (2, 1, 256), 12_000),
    "double masking, many classes": (DOUBLE, (2**18, 4, 4), 16),
    "sum": (SUM, (2, 256, 512)),
    "sum, many windows": (SUM, (2, 1, 512)),
}
