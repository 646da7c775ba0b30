"""The settings that the papers publish numbers for, as Guards with fresh weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

from patchguard.data.catalog import CIFAR10_CLASSES, IMAGENETTE_CLASSES
from patchguard.defenses import DoubleMasking, RobustMasking
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.preprocess import CenterCrop, Preprocess, Resize
from patchguard.geometry.windows import Windows
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.models.base import CIFAR10_MEAN, CIFAR10_STD
from patchguard.patch import Patch, Space

LOGITS = Evidence(kind="logits", low=0.0)
SIGNED = Evidence(kind="logits", low=None)
CONFIDENCE = Evidence(kind="confidence")
AS_IT_IS = Preprocess()


@final
@dataclass(frozen=True, kw_only=True)
class Preset:
    """A LocalGuard in words: network, preprocessing, evidence, and masks for `patch` in images of `size`.

    `patch_space` says where that patch lies: in the "source" image, or, as in the paper's tables for large photos, in
    the network's "input" after resizing and cropping (`Guard.without_preprocess` certifies such patches).
    """

    description: str
    model: str
    patch: Patch
    size: tuple[int, int]
    patch_space: Space = "source"
    settings: Mapping[str, Any] = field(default_factory=dict)
    preprocess: Preprocess = AS_IT_IS
    evidence: Evidence = LOGITS
    defense: type[RobustMasking] | type[DoubleMasking] = RobustMasking
    class_names: tuple[str, ...] = ()

    @property
    def source_size(self) -> tuple[int, int]:
        """A usual size of source images; photos come in many, and a square one is as large as it is resized to."""
        first = self.preprocess.steps[0] if self.preprocess.steps else None
        if self.patch_space == "input" and isinstance(first, Resize) and first.shorter is not None:
            return first.shorter, first.shorter
        return self.size

    def build(self, *, patch: Patch | None = None, **settings: Any) -> LocalGuard[Any]:
        """Return the LocalGuard with fresh weights and masks for `patch`, by default the preset's own."""
        model = build(self.model, **{**self.settings, **settings}).eval()
        names = self.class_names if len(self.class_names) == model.classes else ()
        anything = Windows.sliding(grid=(1, 1), size=(1, 1))
        guard = LocalGuard(self.preprocess, model, self.evidence, self.defense(masks=anything), names)
        placed = guard if self.patch_space == "source" else guard.without_preprocess()
        return replace(guard, defense=placed.for_patch(patch or self.patch, *self.size).defense)


_TO_224 = Preprocess((Resize(shorter=256), CenterCrop(height=224, width=224)))
_TO_299 = Preprocess((Resize(shorter=299), CenterCrop(height=299, width=299)))
_CIFAR10_COLOURS = {"classes": 10, "mean": CIFAR10_MEAN, "std": CIFAR10_STD}


def _mask_bn_photos(dataset: str, classes: int, names: tuple[str, ...]) -> Preset:
    return Preset(
        description=f"Mask-BN on {dataset}: BagNet-17 at 224 px, robust masking of logits, 2 % (32 px) patch",
        model="bagnet17",
        settings={"classes": classes},
        preprocess=_TO_224,
        patch=Patch(32),
        size=(224, 224),
        patch_space="input",
        class_names=names,
    )


def _mask_bn_cifar10(mode: Literal["bicubic", "nearest"]) -> Preset:
    return Preset(
        description=f"Mask-BN on CIFAR-10: BagNet-17 at 192 px ({mode}), robust masking of logits, 5 px patch",
        model="bagnet17",
        settings=_CIFAR10_COLOURS,
        preprocess=Preprocess((Resize(height=192, width=192, mode=mode),)),
        patch=Patch(5),
        size=(32, 32),
        class_names=CIFAR10_CLASSES,
    )


def _mask_ds_photos(dataset: str, classes: int, names: tuple[str, ...]) -> Preset:
    return Preset(
        description=f"Mask-DS on {dataset}: DS-25-ResNet-50 at 299 px, robust masking of confidence, 2 % (42 px) patch",
        model="ds_resnet50",
        settings={"classes": classes},
        preprocess=_TO_299,
        evidence=CONFIDENCE,
        patch=Patch(42),
        size=(299, 299),
        patch_space="input",
        class_names=names,
    )


PRESETS: dict[str, Preset] = {
    "mask_bn_imagenet": _mask_bn_photos("ImageNet", 1000, ()),
    "mask_bn_imagenette": _mask_bn_photos("ImageNette", 10, IMAGENETTE_CLASSES),
    "mask_bn_cifar10": _mask_bn_cifar10("bicubic"),
    "mask_bn_cifar10_nearest": _mask_bn_cifar10("nearest"),
    "mask_ds_imagenet": _mask_ds_photos("ImageNet", 1000, ()),
    "mask_ds_imagenette": _mask_ds_photos("ImageNette", 10, IMAGENETTE_CLASSES),
    "mask_ds_cifar10": Preset(
        description="Mask-DS on CIFAR-10: DS-4-ResNet-18 at 32 px, robust masking of confidence, 5 px patch",
        model="ds_resnet18",
        evidence=CONFIDENCE,
        patch=Patch(5),
        size=(32, 32),
        class_names=CIFAR10_CLASSES,
    ),
    "double_srf_cifar10": Preset(
        description="Double masking on CIFAR-10: Srf at 32 px, signed logits, 5 px patch",
        model="srf",
        evidence=SIGNED,
        defense=DoubleMasking,
        patch=Patch(5),
        size=(32, 32),
        class_names=CIFAR10_CLASSES,
    ),
}
