"""Which trained models can stand for the networks of the paper, in the order of preference. Imports no torch."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final

from patchguard.patch import Patch


@final
@dataclass(frozen=True, kw_only=True)
class Network:
    """A network of the paper on one data set.

    `names` are zoo names, the one that is trained first where none is there; `remark` says how the network itself
    differs from the paper's, and `TRAINED` how its training does. `stand_in` says that the network is another one than
    the paper's, measured beside it.
    """

    label: str
    names: tuple[str, ...]
    remark: str = ""
    stand_in: bool = False


PHOTOS = ("imagenette", "imagenet", "flowers", "cats_vs_dogs")

# How a model was trained, where that differs from the paper. The first pattern that matches counts.
_NO_BAGNET = "no BagNet pretrained on ImageNet is at hand"
_SEEN = "an ImageNet ResNet-50, which has seen the test images"
_RESIZED = "photos squeezed to a square, where the paper crops"
TRAINED = {
    "cifar10": "trained for double masking, which has tau 0 in these tables, not the model's own",
    "cifar10_mask_ds": "trained from random weights, in two stages, the second for Mask-DS; taught by a ResNet-18",
    "cifar10_mask_bn17*": f"{_NO_BAGNET}: trained from random weights, in two stages, taught by a ResNet-18",
    "cifar10_mask_bn*": f"{_NO_BAGNET}: trained from random weights, in one stage, taught by a ResNet-18",
    "cifar10_plain_bn*": f"{_NO_BAGNET}: trained from random weights, taught by a ResNet-18",
    "cifar10_ibp_*": "a small network trained here",
    "imagenette_bn17": f"{_NO_BAGNET}: trained for double masking, begun with and taught by {_SEEN}; {_RESIZED}",
    "imagenette_mask_bn17": f"{_NO_BAGNET}: begun with a network for double masking, taught by {_SEEN}; {_RESIZED}",
    "imagenette_*_bn*": f"{_NO_BAGNET}: begun with and taught by {_SEEN}; {_RESIZED}",
    "imagenette_resnet50": f"{_SEEN}; its ten class rows are taken as they are, not trained further",
    "paper_*": "random first weights, where the paper's were pretrained on ImageNet",
}


def trained(name: str) -> str:
    """Return how the training of a model differs from the paper's, as far as it is known."""
    return next((words for pattern, words in TRAINED.items() if fnmatchcase(name, pattern)), "")


# Squares of 1, 2 and 3 % of 224 x 224 and of 299 x 299, and the paper's pixels in 32 x 32.
SIDES_224 = {"1 %": 23, "2 %": 32, "3 %": 39}
SIDES_299 = {"1 %": 30, "2 %": 42, "3 %": 52}
SIDES_32 = {"0.4 %": 2, "2.4 %": 5, "6.2 %": 8}


def patches(dataset: str, side: int = 224) -> dict[str, Patch]:
    """Return the paper's patches by their names: in pixels of the network's input for photos, of CIFAR-10 itself."""
    if dataset == "cifar10":
        return {name: Patch(pixels) for name, pixels in SIDES_32.items()}
    return {name: Patch(pixels) for name, pixels in (SIDES_299 if side == 299 else SIDES_224).items()}


def usual_patch(dataset: str) -> str:
    """Return the name of the patch of tables that have only one."""
    return "2.4 %" if dataset == "cifar10" else "2 %"


def bagnet(dataset: str, field: int = 17, *, only: bool = False) -> Network:
    """Return the BagNet of Mask-BN, trained for robust masking; else, unless `only` that, for double masking."""
    label, paper = f"Mask-BN-{field}", f"paper_{dataset}_bn17_provable"
    if dataset == "imagenette" and field == 17:
        names: tuple[str, ...] = ("imagenette_mask_bn17", paper, *(() if only else ("imagenette_bn17",)))
    elif dataset in ("imagenette", "cifar10"):
        names = (f"{dataset}_mask_bn{field}", *((paper,) if field == 17 else ()))
    else:
        names = (paper,)
    return Network(label=label, names=names)


def plain_bagnet(dataset: str, field: int = 17, *, only: bool = False) -> Network:
    """Return a BagNet without provable adversarial training; else, unless `only` that will do, one with it."""
    ours = (f"{dataset}_plain_bn{field}",) if dataset in ("imagenette", "cifar10") else ()
    paper = (f"paper_{dataset}_bn17",) if field == 17 else ()
    names = (*ours, *paper, *(() if only else bagnet(dataset, field).names))
    return Network(label=f"BagNet-{field}", names=names)


def small_field(dataset: str) -> Network | None:
    """Return our own small network for robust masking, where the zoo has one."""
    if dataset != "cifar10":
        return None
    return Network(
        label="Mask-Srf-7",
        names=("cifar10_mask_srf",),
        remark="our small network at 32 px (field 7 px, stride 1) in place of BagNet-17 at 192 px",
        stand_in=True,
    )


def maskers(dataset: str) -> tuple[Network, ...]:
    """Return the networks whose logits are masked: the paper's BagNet-17, and ours where there is one."""
    ours = small_field(dataset)
    return (bagnet(dataset), *(() if ours is None else (ours,)))


def bands(dataset: str) -> Network:
    """Return the network of Mask-DS and DS."""
    ours = {"cifar10": ("cifar10_mask_ds",)}
    label = "DS-4-ResNet-18" if dataset == "cifar10" else "DS-25-ResNet-50"
    return Network(label=label, names=(*ours.get(dataset, ()), f"paper_{dataset}_ds"))


def double_masker(dataset: str) -> Network | None:
    """Return the network that was trained for double masking."""
    ours = {"cifar10": ("cifar10", "Srf-7 trained for double masking"), "imagenette": ("imagenette_bn17", "BagNet-17")}
    if dataset not in ours:
        return None
    name, label = ours[dataset]
    return Network(label=label, names=(name,), stand_in=True)


def residual(dataset: str) -> Network:
    """Return the undefended ResNet-50."""
    names = {
        "imagenette": ("imagenette_resnet50", "paper_imagenette_resnet50"),
        "cifar10": ("paper_cifar10_resnet50_192",),
    }
    return Network(label="ResNet-50", names=names.get(dataset, (f"paper_{dataset}_resnet50",)))


def residuals(dataset: str) -> tuple[Network, ...]:
    """Return the undefended ResNets: the paper's, and ours where it is another one."""
    ours = Network(
        label="ResNet-18",
        names=("cifar10_resnet18",),
        remark="three quarters of the width, at 32 px, in place of ResNet-50 at 192 px",
        stand_in=True,
    )
    return (residual(dataset), *((ours,) if dataset == "cifar10" else ()))
