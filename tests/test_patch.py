from fractions import Fraction

import pytest

from patchguard.errors import InputError
from patchguard.patch import Patch


def test_a_patch_is_square_unless_a_width_is_given() -> None:
    assert Patch(5) == Patch(5, 5)
    assert (Patch(24, 88).height, Patch(24, 88).width, Patch(24, 88).area) == (24, 88, 2112)
    assert Patch(5, count=2).count == 2


@pytest.mark.parametrize(
    ("area", "size", "expected"),
    [
        (0.01, 224, 23),
        (0.02, 224, 32),
        (0.03, 224, 39),
        (0.024, 32, 5),
        (0.004, 32, 3),
        (1.0, 7, 7),
        (0.04, 100, 20),
    ],
)
def test_of_area_gives_the_smallest_square_with_at_least_that_area(area, size, expected) -> None:
    patch = Patch.of_area(area, height=size, width=size)
    assert patch == Patch(expected)
    share = Fraction(str(area)) * size * size
    assert expected**2 >= share > (expected - 1) ** 2


def test_of_area_refuses_a_square_that_does_not_fit() -> None:
    with pytest.raises(InputError, match="must fit the image"):
        Patch.of_area(0.5, height=4, width=100)


@pytest.mark.parametrize("area", [0.0, -0.1, 1.5, 2.0])
def test_of_area_refuses_what_is_no_share(area) -> None:
    with pytest.raises(InputError, match=r"Write 2 % as 0\.02"):
        Patch.of_area(area, height=10, width=10)


@pytest.mark.parametrize("bad", [0, -3, True])
def test_sizes_below_one_are_refused(bad) -> None:
    with pytest.raises(InputError, match="whole number of at least 1"):
        Patch(bad)
    with pytest.raises(InputError, match="whole number of at least 1"):
        Patch(5, count=bad)


def test_several_patches_merge_into_the_box_that_contains_them() -> None:
    assert Patch(5, count=3).merged(height=20, width=12) == Patch(20, 12)
    with pytest.raises(InputError, match="cannot contain"):
        Patch(5, count=3).merged(height=20, width=4)
