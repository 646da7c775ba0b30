"""The recipe that `patchguard train --data photos --out DIR` takes, by the number of photos and their size."""

from typing import Any

from patchguard.patch import Patch
from patchguard.storage import zoo
from patchguard.training.recipe import Recipe, make_recipe

NAME = "own_photos"
FEATURES = "imagenette_bn17"  # whose features are taken where its file is on this machine
SMALL = 48  # pixels: smaller images get a network of their own
AREA = 0.02  # of the image that the patch covers
MANY = 10_000  # photos, from which the network sees them smaller


def choose_recipe(photos: int, side: int) -> Recipe:
    """Return the recipe for so many training photos, of which `side` is the usual shorter side.

    Photos get the last layer of a BagNet-17 whose other layers come trained, which takes minutes on a CPU. Without its
    file, and for small images, a thin network learns from nothing: less accurate, and only with many images of use.
    """
    pretrained = side >= SMALL and zoo.named_file(FEATURES) is not None
    size = (96 if photos < MANY else 64) if pretrained else 32 if side < 64 else 64
    passes = max(10 if pretrained else 5, min(60, 60_000 // max(1, photos)))
    common: dict[str, Any] = {
        "patch": Patch.of_area(AREA, height=size, width=size).height,
        "data": {"dataset": "folder", "image_size": size},
        "evaluation": {"held_out": 0.2 if photos < 1000 else 0.1, "other_patches": []},
    }
    batch = max(1, min(64, photos // 8))
    guard = {"drift": 1e-3, "input_size": size, "resize": "bilinear"}
    loss = {"weights": {"double_masking": 0.5, "plain": 0.5}, "mask_steps": [[0.0, 4], [0.8, 2]]}
    if pretrained:
        return make_recipe(
            NAME,
            **common,
            model={"name": "bagnet17", "init_from": FEATURES, "freeze": True},
            guard=guard,
            loss={**loss, "warmup_fraction": 0.2, "mask_steps": [[0.0, 1]]},
            optimizer={"name": "adamw", "batch_size": batch, "weight_decay": 0.05, "ema_decay": 0.99},
            schedule={"epochs": passes, "max_lr": 2e-3},
        )
    return make_recipe(
        NAME,
        **common,
        model={"settings": {"field": 9, "stride": 2, "widths": [32, 64, 64, 128]}},
        guard=guard,
        loss=loss,
        optimizer={"batch_size": batch, "ema_decay": 0.99},
        augmentation={"crop_scale": [0.4, 1.0], "color_jitter": 0.3},
        schedule={"epochs": passes, "max_lr": 0.1},
    )


def describe(recipe: Recipe, photos: int, classes: int) -> str:
    """Return in one sentence what will be trained."""
    network = f"the last layer of a BagNet-17 on features of {FEATURES}" if recipe.model.freeze else "a thin network"
    size = recipe.data.image_size
    return (
        f"{photos:,} photos of {classes} classes: training {network}, at {size}x{size} pixels, "
        f"{recipe.schedule.epochs} epochs, against patches of {AREA:.0%} of the image"
    )
