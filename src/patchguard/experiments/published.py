"""Numbers of the paper, in percent, under the names that its tables have there. Imports no torch.

Xiang, Bhagoji, Sehwag, Mittal, "PatchGuard: a provably robust defense against adversarial patches via small receptive
fields and masking", USENIX Security 2021.
"""

from typing import Final

# Percentage of incorrect predictions of ResNet-50, 3 % pixels; the attack has 5 random places and 500 steps of 0.05.
LOCAL_ATTACK: Final = {
    "imagenet": {
        "incorrect_local_attacked": 84.4,
        "incorrect_local_original": 59.9,
        "incorrect_local_difference": 24.5,
        "incorrect_global": 99.9,
    },
    "imagenette": {
        "incorrect_local_attacked": 56.4,
        "incorrect_local_original": 15.3,
        "incorrect_local_difference": 41.1,
        "incorrect_global": 99.1,
    },
    "cifar10": {
        "incorrect_local_attacked": 67.0,
        "incorrect_local_original": 27.0,
        "incorrect_local_difference": 40.0,
        "incorrect_global": 95.5,
    },
}

# Effect of logits clipping values (c_l, c_h) on vanilla models: clean accuracy of ResNet-50.
CLIPPING: Final = {
    "imagenette": {"(-inf, inf)": 99.6, "(0, inf)": 99.5, "(0, 50)": 99.5, "(0, 15)": 99.5, "(0, 5)": 99.0},
    "cifar10": {"(-inf, inf)": 97.0, "(0, inf)": 97.0, "(0, 50)": 97.0, "(0, 15)": 96.7, "(0, 5)": 93.9},
}

TABLES: Final = {
    "tab-local-attack": LOCAL_ATTACK,
    "tab-clipping": {"imagenette": CLIPPING["imagenette"]},
    "tab-clipping-cifar": {"cifar10": CLIPPING["cifar10"]},
}

LARGE: Final = 20.0  # fig-hist-net: "only positive values larger than 20 are shown"; -nette and -cifar do not say


def row(table: str, dataset: str) -> dict[str, float]:
    """Return what a table says of a dataset; nothing where it has no such entry."""
    found: dict[str, dict[str, float]] = TABLES.get(table, {})
    return dict(found.get(dataset, {}))
