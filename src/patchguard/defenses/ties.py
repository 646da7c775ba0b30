"""The one tie-break: among equals the smallest index wins, on every device.

PyTorch documents this for `argmax` and `argmin` (though not for `max` and `topk`); the tests hold it to its word.
"""

from jaxtyping import Int64
from torch import Tensor

FEW = 64  # entries that a CPU compares sooner once they lie side by side


def argmax(values: Tensor, dim: int) -> Int64[Tensor, "..."]:
    """Return the smallest index of the largest value."""
    values, dim = _side_by_side(values, dim)
    return values.argmax(dim)


def argmin(values: Tensor, dim: int) -> Int64[Tensor, "..."]:
    """Return the smallest index of the smallest value."""
    values, dim = _side_by_side(values, dim)
    return values.argmin(dim)


def _side_by_side(values: Tensor, dim: int) -> tuple[Tensor, int]:
    """The same with the axis last, where that is faster: on CPUs, torch walks other axes entry by entry."""
    if values.device.type != "cpu" or values.shape[dim] > FEW or dim in (-1, values.dim() - 1):
        return values, dim
    return values.movedim(dim, -1).contiguous(), -1
