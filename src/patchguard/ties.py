"""The one tie-break: among equals the smallest index wins, on every device.

PyTorch documents this for `argmax` and `argmin` (though not for `max` and `topk`); the tests hold it to its word.
"""

from jaxtyping import Int64
from torch import Tensor


def argmax(values: Tensor, dim: int) -> Int64[Tensor, "..."]:
    """Return the smallest index of the largest value."""
    return values.argmax(dim)


def argmin(values: Tensor, dim: int) -> Int64[Tensor, "..."]:
    """Return the smallest index of the smallest value."""
    return values.argmin(dim)
