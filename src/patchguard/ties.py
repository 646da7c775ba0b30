"""The one tie-break: among equals the smallest index wins, on every device."""

import torch
from jaxtyping import Int64
from torch import Tensor


def argmax(values: Tensor, dim: int) -> Int64[Tensor, "..."]:
    """Return the smallest index of the largest value (`torch.argmax` may return any of them)."""
    return _first(values == values.amax(dim, keepdim=True), dim)


def argmin(values: Tensor, dim: int) -> Int64[Tensor, "..."]:
    """Return the smallest index of the smallest value."""
    return _first(values == values.amin(dim, keepdim=True), dim)


def _first(marked: Tensor, dim: int) -> Tensor:
    size = marked.shape[dim]
    shape = [1] * marked.dim()
    shape[dim] = size
    index = torch.arange(size, device=marked.device).view(shape)
    return torch.where(marked, index, size).amin(dim)
