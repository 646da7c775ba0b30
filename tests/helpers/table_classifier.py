"""Classifiers that are nothing but tables: any map from masked images to labels."""

from itertools import combinations_with_replacement, product

import torch
from torch import Tensor

from patchguard.geometry.mask_sets import MaskSet
from patchguard.guards.classifier import Classifier


class TableClassifier:
    """Image number t answers behind the masks (i, j) what table t says; the images themselves are noise.

    Tables hold one label per unordered pair of masks, the same mask twice included. They are all tables there are.
    """

    def __init__(self, masks: MaskSet, fill: tuple[float, float, float], classes: int) -> None:
        self.masks, self.classes = masks, classes
        self.pairs = list(combinations_with_replacement(range(len(masks.boxes)), 2))
        self.tables = list(product(range(classes), repeat=len(self.pairs)))
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(len(self.tables), 3, *masks.size, generator=generator)
        self.answers: dict[bytes, int] = {}
        for number, (one, other) in enumerate(self.pairs):
            masked = self.images.clone()
            for top, left, rows, columns in (masks.boxes[one], masks.boxes[other]):
                masked[:, :, top : top + rows, left : left + columns] = torch.tensor(fill).view(1, 3, 1, 1)
            for table, image in zip(self.tables, masked, strict=True):
                key = image.numpy().tobytes()
                assert key not in self.answers, "two masked images must differ, or tables are not free"
                self.answers[key] = table[number]

    def __call__(self, images: Tensor) -> Tensor:
        # Of an image without masks nobody asks more than its scores.
        said = [self.answers.get(image.numpy().tobytes(), 0) for image in images]
        return torch.nn.functional.one_hot(torch.tensor(said), self.classes).float()

    def wrap(self) -> Classifier:
        return Classifier(function=self, classes=self.classes, name="table", batch_size=4096)

    def agreeing(self, patch_pixels: set[tuple[int, int]]) -> list[int]:
        """Return the pairs whose masks together hide these pixels: no patch there changes what they say."""
        hidden = []
        for number, (one, other) in enumerate(self.pairs):
            both: set[tuple[int, int]] = set()
            for top, left, rows, columns in (self.masks.boxes[one], self.masks.boxes[other]):
                both |= set(product(range(top, top + rows), range(left, left + columns)))
            if patch_pixels <= both:
                hidden.append(number)
        return hidden
