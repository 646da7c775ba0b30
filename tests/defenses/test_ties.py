import pytest
import torch

from patchguard.defenses import ties


@pytest.mark.parametrize("shape", [(7,), (3, 50), (64, 441), (5, 10, 441), (2, 1000, 33), (1, 100_000)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_the_smallest_index_wins_along_every_axis(shape, dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    for spread in (1, 2, 4):
        values = torch.randint(-spread, spread, shape, generator=generator).to(dtype)
        for dim in range(len(shape)):
            # numpy documents the first occurrence
            assert (ties.argmax(values, dim).numpy() == values.numpy().argmax(dim)).all()
            assert (ties.argmin(values, dim).numpy() == values.numpy().argmin(dim)).all()
