"""Integral images, and look-ups along one axis that cost nothing where they are consecutive."""

from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

SMALL = 2**14  # below this many entries the number of calls costs more than the work


def integral_image(maps: Tensor, wrap: tuple[bool, bool], copies: int = 2) -> Tensor:
    """Return prefix sums with a leading zero row and column; a wrapped axis is unrolled `copies` times."""
    tiled = maps.repeat(1, *(copies if around else 1 for around in wrap)) if any(wrap) else maps
    table = maps.new_empty(tiled.shape[0], tiled.shape[1] + 1, tiled.shape[2] + 1)
    table[:, 0] = 0
    table[:, 1:, 0] = 0
    table[:, 1:, 1:] = tiled.cumsum(2, dtype=maps.dtype)
    if tiled.numel() < SMALL:
        torch.cumsum(table, 1, dtype=maps.dtype, out=table)
    else:  # row by row beats one strided cumsum: each step adds whole rows
        for row in range(2, table.shape[1]):
            table[:, row] += table[:, row - 1]
    return table


Place: TypeAlias = slice | Tensor


def place_of(where: np.ndarray, device: torch.device) -> Place:
    """Indices along one axis; as a slice where they are consecutive, since a view costs nothing."""
    first = int(where[0])
    if np.array_equal(where, np.arange(first, first + len(where))):
        return slice(first, first + len(where))
    return torch.from_numpy(where).to(device)


def take(values: Tensor, dim: int, place: Place) -> Tensor:
    """Return the entries at `place` along one axis."""
    if isinstance(place, slice):
        return values.narrow(dim, place.start, place.stop - place.start)
    return values.index_select(dim, place)
