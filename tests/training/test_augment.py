import torch

from patchguard.training.augment import augmented

IMAGES = torch.randint(0, 256, (40, 3, 8, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_without_settings_only_the_scale_changes() -> None:
    assert torch.equal(augmented(IMAGES, generator()), IMAGES.float() / 255)


def test_each_result_is_a_crop_of_the_reflected_image_or_of_its_mirror() -> None:
    pixels = IMAGES.float() / 255
    padded = torch.nn.functional.pad(pixels, (2, 2, 2, 2), mode="reflect")
    shifts: set[tuple[int, int, bool]] = set()
    for number, found in enumerate(augmented(IMAGES, generator(), pad=2, flip=True)):
        matches = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if torch.equal(found if not mirrored else found.flip(2), padded[number, :, top : top + 8, left : left + 9])
        ]
        assert len(matches) == 1
        shifts.update(matches)
    assert len(shifts) > 15


def test_a_hole_is_grey_and_at_most_as_large_as_asked() -> None:
    pixels = IMAGES.float() / 255
    found = augmented(IMAGES, generator(), cutout=3)
    changed = (found != pixels).any(1)
    assert (found == 0.5).all(1)[changed].all()
    assert changed.any(2).sum(1).max() == 3
    assert changed.any(1).sum(1).max() == 3
    assert changed.flatten(1).any(1).all()


def test_the_same_seed_draws_the_same() -> None:
    one, two, other = (augmented(IMAGES, generator(seed), pad=2, flip=True, cutout=3) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
