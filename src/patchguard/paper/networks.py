"""Which trained models stand for the networks of the paper, in order of preference, and its patches. No torch."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final

from patchguard.patch import Patch


@final
@dataclass(frozen=True, kw_only=True)
class Network:
    """A network of the paper on one dataset.

    `names` are zoo names; where none is there, the first one is trained. `remark` says how the network itself differs
    from the paper's, and `TRAINING` how its training does. `stand_in`: another network than the paper's, measured
    beside it.
    """

    label: str
    names: tuple[str, ...]
    remark: str = ""
    stand_in: bool = False

    def describe_differences(self, model: str) -> str:
        """Return how a model that stands for this network differs from the paper's."""
        return "; ".join(part for part in (self.remark, describe_training(model)) if part)


# How a model was trained, where that differs from the paper. The first pattern that matches counts.
_NO_BAGNET = "no BagNet pretrained on ImageNet is available"
_SEEN = "an ImageNet ResNet-50, which has seen the test images"
_RESIZED = "photos are resized to a square, where the paper crops"
TRAINING = {
    "cifar10": "trained for double masking; these tables use tau 0, not the model's own",
    "cifar10_mask_ds": "trained from random weights in two stages, the second for Mask-DS; distilled from a ResNet-18",
    "cifar10_mask_bn17*": f"{_NO_BAGNET}: trained from random weights in two stages, distilled from a ResNet-18",
    "cifar10_mask_bn*": f"{_NO_BAGNET}: trained from random weights in one stage, distilled from a ResNet-18",
    "cifar10_plain_bn*": f"{_NO_BAGNET}: trained from random weights, distilled from a ResNet-18",
    "cifar10_ibp_*": "a small network trained here",
    "imagenette_bn17": f"{_NO_BAGNET}: trained for double masking, initialized and distilled from {_SEEN}; {_RESIZED}",
    "imagenette_mask_bn17": f"{_NO_BAGNET}: initialized from a network for double masking, distilled from {_SEEN}; "
    + _RESIZED,
    "imagenette_*_bn*": f"{_NO_BAGNET}: initialized and distilled from {_SEEN}; {_RESIZED}",
    "imagenette_resnet50": f"{_SEEN}; its ten class rows are used as they are, not trained further",
    "paper_*": "random initial weights, where the paper's were pretrained on ImageNet",
}


def describe_training(name: str) -> str:
    """Return how the training of a model differs from the paper's, as far as it is known."""
    return next((text for pattern, text in TRAINING.items() if fnmatchcase(name, pattern)), "")


# Squares of 1, 2 and 3 % of 224 x 224 and of 299 x 299, and the paper's pixels in 32 x 32.
SIDES_224 = {"1 %": 23, "2 %": 32, "3 %": 39}
SIDES_299 = {"1 %": 30, "2 %": 42, "3 %": 52}
SIDES_32 = {"0.4 %": 2, "2.4 %": 5, "6.2 %": 8}


def patches(dataset: str, side: int = 224) -> dict[str, Patch]:
    """Return the paper's patches by name: in pixels of the network's input for photos, of the image for CIFAR-10."""
    sides = SIDES_32 if dataset == "cifar10" else SIDES_299 if side == 299 else SIDES_224
    return {name: Patch(pixels) for name, pixels in sides.items()}


def default_patch(dataset: str) -> str:
    """Return the name of the patch of tables that have only one."""
    return "2.4 %" if dataset == "cifar10" else "2 %"


def bagnet(dataset: str, field: int = 17, *, only: bool = False) -> Network:
    """Return the BagNet of Mask-BN, trained for robust masking; else, unless `only` that, for double masking."""
    paper = f"paper_{dataset}_bn17_provable"
    if dataset == "imagenette" and field == 17:
        names: tuple[str, ...] = ("imagenette_mask_bn17", paper, *(() if only else ("imagenette_bn17",)))
    elif dataset in ("imagenette", "cifar10"):
        names = (f"{dataset}_mask_bn{field}", *((paper,) if field == 17 else ()))
    else:
        names = (paper,)
    return Network(label=f"Mask-BN-{field}", names=names)


def plain_bagnet(dataset: str, field: int = 17, *, only: bool = False) -> Network:
    """Return a BagNet without provable adversarial training; else, unless `only` that will do, one with it."""
    ours = (f"{dataset}_plain_bn{field}",) if dataset in ("imagenette", "cifar10") else ()
    paper = (f"paper_{dataset}_bn17",) if field == 17 else ()
    names = (*ours, *paper, *(() if only else bagnet(dataset, field).names))
    return Network(label=f"BagNet-{field}", names=names)


def small_networks(dataset: str) -> tuple[Network, ...]:
    """Return our own small network for robust masking, where the zoo has one."""
    if dataset != "cifar10":
        return ()
    network = Network(
        label="Mask-Srf-7",
        names=("cifar10_mask_srf",),
        remark="our small network at 32 px (field 7 px, stride 1) in place of BagNet-17 at 192 px",
        stand_in=True,
    )
    return (network,)


def masking_networks(dataset: str) -> tuple[Network, ...]:
    """Return the networks whose logits are masked: the paper's BagNet-17, and ours where there is one."""
    return (bagnet(dataset), *small_networks(dataset))


def band_network(dataset: str) -> Network:
    """Return the network of Mask-DS and DS."""
    if dataset == "cifar10":
        return Network(label="DS-4-ResNet-18", names=("cifar10_mask_ds", "paper_cifar10_ds"))
    return Network(label="DS-25-ResNet-50", names=(f"paper_{dataset}_ds",))


def double_masking_network(dataset: str) -> Network | None:
    """Return the network that was trained for double masking."""
    if dataset == "cifar10":
        return Network(label="Srf-7 trained for double masking", names=("cifar10",), stand_in=True)
    if dataset == "imagenette":
        return Network(label="BagNet-17", names=("imagenette_bn17",), stand_in=True)
    return None


def resnet50(dataset: str) -> Network:
    """Return the undefended ResNet-50."""
    names = {
        "imagenette": ("imagenette_resnet50", "paper_imagenette_resnet50"),
        "cifar10": ("paper_cifar10_resnet50_192",),
    }
    return Network(label="ResNet-50", names=names.get(dataset, (f"paper_{dataset}_resnet50",)))


def resnets(dataset: str) -> tuple[Network, ...]:
    """Return the undefended ResNets: the paper's, and ours where it is another one."""
    ours = Network(
        label="ResNet-18",
        names=("cifar10_resnet18",),
        remark="three quarters of the width, at 32 px, in place of ResNet-50 at 192 px",
        stand_in=True,
    )
    return (resnet50(dataset), *((ours,) if dataset == "cifar10" else ()))
