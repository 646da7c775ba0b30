"""Fast sums against sums written out cell by cell."""

import numpy as np
import pytest
import torch
from helpers.random_windows import some_windows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchguard.defenses import window_products
from patchguard.defenses import window_sums as overlap
from patchguard.geometry.windows import Windows


@st.composite
def pairs(draw):
    one = draw(some_windows())
    other = draw(some_windows(grid=one.grid))
    size = tuple(draw(st.integers(1, g)) for g in one.grid)
    sliding = Windows.sliding(grid=one.grid, size=size, wrap=one.wrap)
    choice = st.sampled_from([one, one.maximal(), other, other.maximal(), sliding])
    return draw(choice), draw(choice)


@pytest.fixture(params=["small", "large", "accelerated"], autouse=True)
def _paths(request, monkeypatch) -> None:
    """Small grids are written out cell by cell; the paths for large ones and for accelerators must give the same."""
    if request.param != "small":
        monkeypatch.setattr(overlap, "SMALL", 0)
        monkeypatch.setattr(window_products, "SMALL", 0)
    if request.param == "accelerated":
        monkeypatch.setattr(overlap, "_is_accelerator", lambda device: True)


def written_out(values: torch.Tensor, windows: Windows) -> torch.Tensor:
    return values.flatten(1) @ torch.from_numpy(windows.cells).long().T


@given(pairs(), st.sampled_from([0, 5, -3]), st.integers(0, 10**6))
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_heaviest_is_the_largest_mask_sum_after_the_window_is_filled(pair, fill, seed) -> None:
    masks, windows = pair
    values = torch.randint(-9, 10, (2, *masks.grid), generator=torch.Generator().manual_seed(seed))
    expected = torch.stack(
        [
            written_out(torch.where(torch.from_numpy(w).view(masks.grid), fill, values), masks).amax(1)
            for w in windows.cells
        ],
        1,
    )
    assert torch.equal(overlap.heaviest(values, masks, windows, fill), expected)


@given(pairs(), st.integers(0, 10**6))
@settings(
    max_examples=70, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_sums_and_overlaps_and_covers_match_their_definitions(pair, seed) -> None:
    masks, windows = pair
    values = torch.randint(-9, 10, (2, *masks.grid), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(overlap.sums(values, windows), written_out(values, windows))
    mine, theirs = torch.from_numpy(masks.cells), torch.from_numpy(windows.cells)
    both, left = mine & theirs.unsqueeze(1), mine & ~theirs.unsqueeze(1)
    parts = list(overlap.overlaps(values, masks, windows))
    assert torch.equal(torch.cat([p[2] for p in parts]), both.sum(-1))
    outside = torch.einsum("bc,wvc->bwv", values.flatten(1), left.long())
    assert torch.equal(torch.cat([p[1] for p in parts], 1), outside)
    per_mask = torch.randint(-9, 10, (2, len(masks)))
    held = (mine | ~theirs.unsqueeze(1)).all(-1)
    best = torch.where(held, per_mask.unsqueeze(1), overlap.nothing(torch.int64)).amax(-1)
    assert torch.equal(overlap.best_cover(per_mask, masks, windows), best)


@pytest.mark.parametrize("count", [2, 3])
def test_unions_are_summed_cell_by_cell(count) -> None:
    windows = Windows.sliding(grid=(1, 6), size=(1, 2), wrap=(False, True), count=count)
    masks = Windows.sliding(grid=(1, 6), size=(1, 3), wrap=(False, True), count=2)
    values = torch.randint(-9, 10, (4, 1, 6))
    assert torch.equal(overlap.sums(values, windows), written_out(values, windows))
    expected = torch.stack(
        [written_out(torch.where(torch.from_numpy(w).view(1, 6), 7, values), masks).amax(1) for w in windows.cells],
        1,
    )
    assert torch.equal(overlap.heaviest(values, masks, windows, 7), expected)


def test_large_values_do_not_cancel() -> None:
    """A margin of 1002 next to values of 1e9 survives, as it would not in float32."""
    values = torch.full((1, 4, 4), 2**40)
    values[0, 3, 3] += 1002
    windows = Windows.sliding(grid=(4, 4), size=(2, 2))
    assert int(overlap.sums(values, windows)[0, -1] - overlap.sums(values, windows)[0, 0]) == 1002


@pytest.mark.parametrize("wrap", [(False, False), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("sizes", [((2, 3), (2, 3)), ((5, 6), (2, 3)), ((6, 6), (5, 6))], ids=str)
@pytest.mark.parametrize("sign", ["positive", "negative", "both"])
def test_sums_of_32_bits_are_those_of_64_up_to_the_limit(wrap, sizes, sign) -> None:
    """Maps whose absolute values add up to just below 2^27, also in a single cell."""
    grid, limit = (6, 7), 2**27 - 1
    masks, windows = (Windows.sliding(grid=grid, size=size, wrap=wrap) for size in sizes)
    generator = torch.Generator().manual_seed(len(sign))
    shares = torch.rand(12, *grid, generator=generator, dtype=torch.float64) ** 4
    shares[::3] = 0
    shares[::3, 0, 0] = 1
    maps = (shares / shares.sum((1, 2), keepdim=True) * limit).long()
    assert int(maps.sum((1, 2)).max()) > limit - 64
    if sign != "positive":
        maps = -maps if sign == "negative" else maps * (2 * torch.randint(0, 2, maps.shape, generator=generator) - 1)
    assert torch.equal(overlap.sums(maps, masks), overlap.sums(maps.int(), masks).long())
    assert torch.equal(overlap.heaviest(maps, masks, windows), overlap.heaviest(maps.int(), masks, windows).long())
    inside = overlap.sums(maps, masks)
    assert torch.equal(
        overlap.best_cover(inside, masks, windows), overlap.best_cover(inside.int(), masks, windows).long()
    )


@pytest.mark.parametrize("size", [1, 2**24 + 1, 2**40])
def test_the_heaviest_union_is_the_largest_of_all_sums(size) -> None:
    windows = Windows(grid=(1, 9), rows=((0, 1),), columns=tuple((i, i + 2) for i in range(8)), count=3)
    maps = size * torch.randint(-3, 9, (40, 1, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(overlap.heaviest_union(maps, windows), overlap.sums(maps, windows).amax(1))


@pytest.mark.parametrize("wrap", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_an_integral_image_holds_the_sum_above_and_left_of_every_corner(wrap, monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: self.new_full(shape, 7))  # never zero by chance
    maps = torch.randint(-9, 10, (3, 4, 5), generator=torch.Generator().manual_seed(0))
    tiled = np.tile(maps.numpy(), (1, *(3 if around else 1 for around in wrap)))
    expected = np.pad(tiled.cumsum(1).cumsum(2), ((0, 0), (1, 0), (1, 0)))
    assert (window_products.integral_image(maps, wrap, copies=3).numpy() == expected).all()
