import torch

from patchguard.training.augment import BatchRandom, augment, color_jitter, crop_quarter, mixup, random_resized_crop

IMAGES = torch.randint(0, 256, (40, 3, 8, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def random(seed: int = 1, batch: int = len(IMAGES), part: slice = slice(None)) -> BatchRandom:
    return BatchRandom(torch.Generator().manual_seed(seed), batch, part)


def test_without_settings_only_the_scale_changes() -> None:
    assert torch.equal(augment(IMAGES, random()), IMAGES.float() / 255)


def test_each_result_is_a_crop_of_the_reflected_image_or_of_its_mirror() -> None:
    pixels = IMAGES.float() / 255
    padded = torch.nn.functional.pad(pixels, (2, 2, 2, 2), mode="reflect")
    shifts: set[tuple[int, int, bool]] = set()
    for number, result in enumerate(augment(IMAGES, random(), padding=2, flip=True)):
        matches = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if torch.equal(
                result if not mirrored else result.flip(2), padded[number, :, top : top + 8, left : left + 9]
            )
        ]
        assert len(matches) == 1
        shifts.update(matches)
    assert len(shifts) > 15


def test_cutout_is_gray_and_at_most_as_large_as_asked() -> None:
    pixels = IMAGES.float() / 255
    result = augment(IMAGES, random(), cutout=3)
    changed = (result != pixels).any(1)
    assert (result == 0.5).all(1)[changed].all()
    assert changed.any(2).sum(1).max() == 3
    assert changed.any(1).sum(1).max() == 3
    assert changed.flatten(1).any(1).all()


def test_the_same_seed_draws_the_same() -> None:
    one, two, other = (augment(IMAGES, random(seed), padding=2, flip=True, cutout=3) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_a_crop_of_the_whole_area_is_the_image_and_a_smaller_one_is_a_part_of_it() -> None:
    ramp = torch.arange(64, dtype=torch.uint8).view(1, 1, 1, 64).expand(5, 3, 64, 64)
    whole = random_resized_crop(ramp, random(1, len(ramp)), scale=(1.0, 1.0), ratio=1.0)
    torch.testing.assert_close(whole, ramp / 255, atol=1e-5, rtol=0)
    part = 255 * random_resized_crop(ramp, random(1, len(ramp)), scale=(0.25, 0.25), ratio=1.0)
    widths = part[:, 0, 0, 63] - part[:, 0, 0, 0]
    torch.testing.assert_close(widths, torch.full((5,), 31.5), atol=0.6, rtol=0)  # half of the side
    assert len({round(float(start)) for start in part[:, 0, 0, 0]}) > 1


def test_a_quarter_is_a_part_of_all_images_at_one_place_of_many() -> None:
    pixels = torch.arange(2 * 3 * 8 * 9).view(2, 3, 8, 9).float()
    places = set()
    for seed in range(60):
        part = crop_quarter(pixels, seed)
        top, left = divmod(int(part[0, 0, 0, 0]), 9)
        assert torch.equal(part, pixels[..., top : top + 4, left : left + 4])
        assert torch.equal(part, crop_quarter(pixels, seed))
        places.add((top, left))
    assert {top for top, _ in places} == set(range(5))
    assert {left for _, left in places} == set(range(6))


def test_flipped_crops_are_about_half() -> None:
    ramp = torch.arange(64, dtype=torch.uint8).view(1, 1, 1, 64).expand(200, 3, 64, 64)
    crops = random_resized_crop(ramp, random(2, len(ramp)), scale=(0.3, 1.0), flip=True)
    mirrored = (crops[:, 0, 0, 0] > crops[:, 0, 0, 63]).sum()
    assert 70 < mirrored < 130


def test_colors_move_within_their_limits_and_differ_between_images() -> None:
    pixels = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(3)).expand(50, 3, 8, 8)
    moved = color_jitter(pixels, random(4, len(pixels)), 0.4)
    assert 0 <= moved.min() <= moved.max() <= 1
    shift = (moved.mean((1, 2, 3)) - pixels.mean((1, 2, 3))).abs()
    assert 0.05 < shift.max() <= 0.2 + 1e-3
    assert shift.unique().numel() > 40
    torch.testing.assert_close(color_jitter(pixels, random(4, len(pixels)), 0.0), pixels)


def test_parts_of_a_batch_get_what_the_whole_batch_gets() -> None:
    parts = (slice(0, 20), slice(20, 40))
    settings = {"padding": 2, "flip": True, "cutout": 3}
    whole = augment(IMAGES, random(), **settings)
    assert torch.equal(torch.cat([augment(IMAGES[part], random(part=part), **settings) for part in parts]), whole)
    crops = random_resized_crop(IMAGES, random(), scale=(0.3, 1.0), flip=True)
    result = [random_resized_crop(IMAGES[part], random(part=part), scale=(0.3, 1.0), flip=True) for part in parts]
    torch.testing.assert_close(torch.cat(result), crops)
    result = [color_jitter(crops[part], random(part=part), 0.4) for part in parts]
    torch.testing.assert_close(torch.cat(result), color_jitter(crops, random(), 0.4))


def test_mixup_blends_pixels_and_labels_alike() -> None:
    pixels, target = IMAGES.float() / 255, torch.arange(len(IMAGES)) % 7
    result, labels = mixup(pixels, target, random(), classes=7, strength=0.4)
    other = torch.nn.functional.one_hot(target.flip(0), 7).float()
    own = torch.nn.functional.one_hot(target, 7).float()
    apart = target != target.flip(0)
    blended = labels.gather(1, target.flip(0).unsqueeze(1)).squeeze(1)[apart]
    assert blended.min() >= 0
    assert 0.3 < blended.max() <= 0.4
    weight = blended.view(-1, 1)
    torch.testing.assert_close(labels[apart], (1 - weight) * own[apart] + weight * other[apart])
    weight = blended.view(-1, 1, 1, 1)
    torch.testing.assert_close(result[apart], (1 - weight) * pixels[apart] + weight * pixels.flip(0)[apart])
    torch.testing.assert_close(labels.sum(1), torch.ones(len(labels)))
