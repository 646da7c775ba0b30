"""Numbers of the paper, in percent, under the names that its tables have there. Imports no torch.

Xiang, Bhagoji, Sehwag, Mittal, "PatchGuard: a provably robust defense against adversarial patches via small receptive
fields and masking", USENIX Security 2021.
"""

from typing import Final, TypeAlias

Rows: TypeAlias = dict[str, tuple[float | None, ...]]  # by label; one number per column of the table

# Percentage of incorrect predictions of ResNet-50, 3 % pixels; the attack has 5 random places and 500 steps of 0.05.
LOCAL_ATTACK_ROWS: Final = (
    "Incorrect local pred. (attacked)",
    "Incorrect local pred. (original)",
    "Incorrect local pred. (difference)",
    "Incorrect global predictions",
)
LOCAL_ATTACK: Final = {
    "imagenet": dict(zip(LOCAL_ATTACK_ROWS, (84.4, 59.9, 24.5, 99.9), strict=True)),
    "imagenette": dict(zip(LOCAL_ATTACK_ROWS, (56.4, 15.3, 41.1, 99.1), strict=True)),
    "cifar10": dict(zip(LOCAL_ATTACK_ROWS, (67.0, 27.0, 40.0, 95.5), strict=True)),
}
LARGE: Final = 20.0  # fig-hist-net: "only positive values larger than 20 are shown"; -nette and -cifar do not say

# Columns: clean, robust for each patch: 1, 2, 3 % of photos; 0.4, 2.4 % (and 6.2 % where given) of CIFAR-10.
NONE6: Final = (None,) * 6
MAIN: Final[dict[str, Rows]] = {
    "imagenette": {
        "Mask-BN": (95.2, 89.0, 95.0, 86.7, 94.8, 83.0),
        "Mask-DS": (92.3, 83.1, 92.1, 79.9, 92.1, 76.8),
        "IBP": NONE6,
        "CBN": (94.9, 74.6, 94.9, 60.9, 94.9, 45.9),
        "DS": (92.1, 82.3, 92.1, 79.1, 92.1, 75.7),
    },
    "imagenet": {
        "Mask-BN": (55.1, 32.3, 54.6, 26.0, 54.1, 19.7),
        "Mask-DS": (44.1, 19.7, 43.6, 15.7, 43.0, 12.5),
        "IBP": NONE6,
        "CBN": (49.5, 13.4, 49.5, 7.1, 49.5, 3.1),
        "DS": (44.4, 17.7, 44.4, 14.0, 44.4, 11.2),
    },
    "cifar10": {
        "Mask-BN": (84.5, 63.8, 83.9, 47.3),
        "Mask-DS": (84.7, 69.2, 84.6, 57.7),
        "IBP": (65.8, 51.9, 47.8, 30.8),
        "CBN": (84.2, 44.2, 84.2, 9.3),
        "DS": (83.9, 68.9, 83.9, 56.2),
    },
}

# Clean accuracy of undefended networks.
VANILLA: Final[dict[str, Rows]] = {
    "imagenette": {"ResNet": (99.6,), "BagNet": (95.9,)},
    "imagenet": {"ResNet": (76.1,), "BagNet": (56.5,)},
    "cifar10": {"ResNet": (97.0,), "BagNet": (85.4,)},
}

# Columns: windows of 0, 2, 4, 6, 8 cells a side.
FEATURE_MASK: Final[dict[str, Rows]] = {
    "imagenette": {
        "Masked accuracy": (95.9, 95.9, 95.9, 95.8, 95.7),
        "% images": (4.1, 5.1, 6.1, 7.3, 8.5),
        "% windows per image": (0.0, 0.05, 0.2, 0.4, 0.7),
    },
    "cifar10": {
        "Masked accuracy": (85.4, 85.3, 85.1, 84.7, 83.8),
        "% images": (14.6, 18.8, 22.6, 27.0, 29.0),
        "% windows per image": (0.0, 0.4, 1.1, 2.1, 3.7),
    },
}

# Receptive fields of 33, 17 and 9 pixels; columns as in MAIN.
FIELDS: Final[dict[str, Rows]] = {
    "imagenette": {
        "Mask-BN-33": (96.5, 88.9, 96.3, 86.0, 96.3, 82.1),
        "Mask-BN-17": (95.2, 89.0, 95.0, 86.7, 94.8, 83.0),
        "Mask-BN-9": (92.1, 85.5, 91.8, 82.8, 91.5, 79.8),
    },
    "cifar10": {
        "Mask-BN-33": (89.8, 61.0, 89.0, 42.7, 87.9, 20.6),
        "Mask-BN-17": (84.5, 63.8, 83.9, 47.3, 83.3, 26.8),
        "Mask-BN-9": (75.7, 62.4, 75.6, 51.7, 75.0, 37.5),
    },
}

# Columns: clean, provable, false positives of the detection; the 2 % (2.4 %) patch. tab-masking-thres-cifar prints a
# clean accuracy of 84.5 at T = 0, where the other tables have 83.9 for that patch.
THRESHOLDS: Final[dict[str, Rows]] = {
    "imagenette": {
        "T-0.0": (95.0, 86.7, 100.0),
        "T-0.2": (94.2, 79.9, 22.9),
        "T-0.4": (95.3, 68.0, 0.7),
        "T-0.6": (95.5, 38.7, 0.05),
        "T-0.8": (95.5, 6.2, 0.0),
        "T-1.0": (95.5, 0.0, 0.0),
    },
    "cifar10": {
        "T-0.0": (84.5, 47.3, 100.0),
        "T-0.2": (80.5, 14.8, 31.2),
        "T-0.4": (85.1, 14.3, 0.08),
        "T-0.6": (85.2, 0.7, 0.02),
        "T-0.8": (85.2, 0.0, 0.0),
        "T-1.0": (85.2, 0.0, 0.0),
    },
}

# Kinds of evidence; columns as in MAIN.
FEATURES_BN: Final[dict[str, Rows]] = {
    "imagenette": {
        "Logits": (95.2, 89.0, 95.0, 86.7, 94.8, 83.0),
        "Confidence": (87.9, 80.5, 87.9, 77.9, 88.0, 74.4),
        "Prediction": (85.7, 77.3, 85.8, 74.1, 85.9, 70.3),
    },
    "cifar10": {
        "Logits": (84.5, 63.8, 83.9, 47.3, 83.3, 26.8),
        "Confidence": (69.6, 50.4, 69.6, 38.0, 69.1, 24.5),
        "Prediction": (65.9, 49.6, 66.5, 34.6, 66.4, 21.0),
    },
}
FEATURES_DS: Final[dict[str, Rows]] = {
    "imagenette": {
        "Logits": (92.4, 76.9, 92.1, 68.9, 91.9, 61.6),
        "Confidence": (92.3, 83.1, 92.1, 79.9, 92.1, 76.8),
        "Prediction": (91.9, 82.5, 91.8, 79.4, 91.7, 76.4),
    },
    "cifar10": {
        "Logits": (85.0, 60.6, 84.3, 39.0, 83.4, 13.8),
        "Confidence": (84.7, 69.1, 84.6, 57.7, 84.5, 41.8),
        "Prediction": (83.9, 69.2, 83.8, 56.8, 84.0, 41.7),
    },
}

# Masks made for one patch against others. Columns: clean, provable for 1, 2, 3 % (0.4, 2.4, 6.2 %).
MISMATCH: Final[dict[str, Rows]] = {
    "imagenette": {
        "1 %": (95.2, 89.0, None, None),
        "2 %": (95.0, 88.2, 86.7, None),
        "3 %": (94.8, 87.1, 85.3, 83.0),
        "4.5 %": (94.6, 86.0, 84.1, 81.8),
    },
    "cifar10": {
        "0.4 %": (84.5, 63.8, None, None),
        "2.4 %": (83.9, 58.9, 47.3, None),
        "4.4 %": (83.5, 56.2, 44.7, None),
        "6.2 %": (83.3, 52.8, 41.7, 26.8),
    },
}

# Milliseconds per image.
TIME: Final = {"ResNet-50": 11.8, "BagNet-17": 12.1, "DS-25-ResNet": 387.9, "Mask-BN": 16.6, "Mask-DS": 404.4}

# Columns: clean, robust; the 2 % (2.4 %) patch.
ADVERSARIAL_TRAINING: Final[dict[str, Rows]] = {
    "imagenet": {"Conventional training": (54.4, 13.3), "Provable adv. training": (54.6, 26.0)},
    "imagenette": {"Conventional training": (93.9, 83.8), "Provable adv. training": (95.0, 86.7)},
    "cifar10": {"Conventional training": (82.6, 31.7), "Provable adv. training": (83.9, 47.3)},
}

# Columns as in MAIN. The table prints 32.2 for the top 1 and 1 %, tab-huge-provable 32.3.
TOP_K: Final[dict[str, Rows]] = {
    "imagenet": {
        "Top-1": (55.1, 32.2, 54.6, 26.0, 54.1, 19.7),
        "Top-2": (65.9, 48.3, 65.5, 43.8, 64.9, 38.2),
        "Top-3": (71.3, 52.2, 70.8, 48.7, 70.2, 44.1),
        "Top-4": (74.6, 53.9, 74.2, 51.3, 73.7, 47.4),
        "Top-5": (77.0, 54.8, 76.6, 52.9, 76.2, 49.6),
    },
}

# Columns: clean, robust; the 2 % patch.
MORE_SETS: Final[dict[str, Rows]] = {
    "cats_vs_dogs": {"ResNet-50": (98.4, None), "Mask-BN": (97.5, 91.4), "Mask-DS": (94.8, 80.2)},
    "flowers": {"ResNet-50": (94.5, None), "Mask-BN": (91.4, 83.5), "Mask-DS": (90.5, 75.6)},
}

# Height x width of a patch in 224 x 224; columns: clean, robust.
SHAPES: Final[dict[str, Rows]] = {
    "imagenette": {
        "16x144": (95.0, 78.0),
        "24x88": (94.8, 79.8),
        "32x72": (94.6, 78.9),
        "40x56": (94.7, 79.6),
        "48x48": (94.6, 79.4),
        "56x40": (94.6, 80.1),
        "72x32": (94.8, 79.7),
        "88x24": (94.8, 80.7),
        "144x16": (94.9, 80.4),
    },
    "imagenet": {
        "16x144": (54.1, 11.7),
        "24x88": (53.6, 14.2),
        "32x72": (53.4, 13.4),
        "40x56": (53.5, 14.4),
        "48x48": (53.5, 14.2),
        "56x40": (53.5, 14.7),
        "72x32": (53.6, 14.2),
        "88x24": (53.9, 15.3),
        "144x16": (54.2, 13.7),
    },
}

# The one point of fig-large-patch that the text gives (appendix on the limits), and where it ends: a random guess.
LARGE_PATCH: Final[dict[str, Rows]] = {"imagenette": {"96x96": (91.1, 50.7), "192x192": (10.0, None)}}

# Effect of logits clipping values (c_l, c_h) on vanilla models: clean accuracy.
CLIPS: Final = ("(-inf, inf)", "(0, inf)", "(0, 50)", "(0, 15)", "(0, 5)")
CLIPPINGS: Final[dict[str, Rows]] = {
    "imagenette": {
        "ResNet-50": (99.6, 99.5, 99.5, 99.5, 99.0),
        "BagNet-33": (97.2, 97.1, 97.0, 95.8, 94.1),
        "BagNet-17": (95.9, 95.5, 94.7, 92.3, 87.9),
        "BagNet-9": (92.5, 92.5, 91.4, 85.4, 73.8),
    },
    "cifar10": {
        "ResNet-50": (97.0, 97.0, 97.0, 96.7, 93.9),
        "BagNet-33": (91.3, 90.8, 89.3, 87.1, 84.7),
        "BagNet-17": (85.4, 85.2, 83.2, 73.3, 64.5),
        "BagNet-9": (76.4, 75.8, 75.1, 66.3, 57.1),
    },
}
