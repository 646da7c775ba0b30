"""Resizing along one axis as a matrix, and so as a linear map whose support can be read off.

Output i lies at the place (i + 1/2) n/m of the n input pixels; input pixel x, whose center is x + 1/2, gets
the weight kernel(t) with t = (x + 1/2 - (i + 1/2) n/m) / max(1, n/m) when antialiased and without the
division otherwise. In integers t = ((2x + 1) m - (2i + 1) n) / d, with d = 2 max(n, m) or d = 2m, so whether
a weight vanishes is decided exactly: the bilinear kernel 1 - |t| at |t| >= 1, the bicubic one at |t| = 1 and
|t| >= 2.
"""

from functools import lru_cache
from typing import Literal

import numpy as np
from jaxtyping import Float64, Int64

from patchguard.geometry.field import Axis

Mode = Literal["nearest", "bilinear", "bicubic"]


@lru_cache(maxsize=64)
def resize_matrix(before: int, after: int, mode: Mode, antialias: bool) -> Float64[np.ndarray, "after before"]:
    """Return the matrix that turns `before` pixels into `after`; its rows sum to 1.

    With `antialias`, weights and borders are those of Pillow: bicubic with a = -1/2, kernels widened when
    shrinking, taps beyond the border dropped and the rest scaled to sum 1, nearest at the pixel center.
    Without, those of torch's `interpolate` with align_corners=False: bicubic with a = -3/4, taps beyond the
    border moved onto the border pixel, nearest at floor(i n/m).
    """
    matrix = np.zeros((after, before))
    output = np.arange(after, dtype=np.int64)
    if mode == "nearest":
        source = ((2 * output + 1) * before) // (2 * after) if antialias else (output * before) // after
        matrix[output, source] = 1.0
    else:
        unit = 2 * max(before, after) if antialias else 2 * after
        radius = (1 if mode == "bilinear" else 2) * unit
        # (2x + 1) after - (2i + 1) before > -radius, solved for x; one tap more than fits in between.
        center = (2 * output + 1) * before
        first = (center - radius - after) // (2 * after)
        taps = first[:, None] + np.arange(radius // after + 3)[None, :]
        offsets = (2 * taps + 1) * after - center[:, None]
        weights = (
            _bilinear(offsets, unit) if mode == "bilinear" else _bicubic(offsets, unit, -0.5 if antialias else -0.75)
        )
        if antialias:
            weights = np.where((taps >= 0) & (taps < before), weights, 0.0)
        np.add.at(matrix, (output[:, None], np.clip(taps, 0, before - 1)), weights)
        matrix /= matrix.sum(axis=1, keepdims=True)
    matrix.flags.writeable = False
    return matrix


def support(matrix: Float64[np.ndarray, "after before"]) -> Axis:
    """Return, per output, the interval from its first to its last input of weight other than 0."""
    read = matrix != 0
    low = np.argmax(read, axis=1)
    high = matrix.shape[1] - 1 - np.argmax(read[:, ::-1], axis=1)
    return Axis.from_bounds(low.astype(np.int64), high.astype(np.int64), matrix.shape[1])


def _bilinear(offsets: Int64[np.ndarray, "after taps"], unit: int) -> Float64[np.ndarray, "after taps"]:
    """Return 1 - |t| at t = offsets / unit, and exactly 0 where that is not positive."""
    distance = np.abs(offsets)
    return np.where(distance < unit, (unit - distance) / unit, 0.0)


def _bicubic(offsets: Int64[np.ndarray, "after taps"], unit: int, a: float) -> Float64[np.ndarray, "after taps"]:
    """Return the cubic kernel at t = offsets / unit, in factors that are exactly 0 where |t| = 1 or 2."""
    distance = np.abs(offsets)
    t = distance / unit
    to_one = (distance - unit) / unit
    to_two = (distance - 2 * unit) / unit
    near = to_one * ((a + 2) * t * t - t - 1)
    far = a * to_one * to_two * to_two
    return np.where(distance < unit, near, np.where(distance < 2 * unit, far, 0.0))
