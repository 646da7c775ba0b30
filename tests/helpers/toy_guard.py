"""A guard of a fourth kind in twenty lines: bright or dark, by the mean of all pixels."""

import hashlib

import torch
from torch import Tensor

from patchguard.guard import Certificate, Guard, Prediction
from patchguard.patch import Patch


class Brightness(Guard):
    """Label 1 if the mean pixel exceeds 1/2; a patch of `area` pixels moves the mean by at most area / pixels."""

    classes = 2
    class_names = ("dark", "bright")
    digest = hashlib.sha256(b"brightness").hexdigest()

    def predict(self, images: Tensor) -> Prediction:
        mean = images.double().mean((1, 2, 3))
        return Prediction(label=(mean > 0.5).long(), scores=torch.stack([1 - mean, mean], 1))

    def certify(self, images: Tensor, patch: Patch, label=None, top_k: int = 1) -> Certificate:
        chosen = self.predict(images).label if label is None else torch.as_tensor(label).expand(len(images))
        lead = (2 * chosen - 1) * (images.double().mean((1, 2, 3)) - 0.5)
        reach = patch.count * patch.area / images[0, 0].numel()
        return Certificate(label=chosen, margin=lead - reach - 1e-6, weakest=None, rival=1 - chosen)
