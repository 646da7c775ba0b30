"""The base class: the budget is exact, and randomness belongs to the image, not to its batch."""

import torch
from tiny import bagnet_guard, pictures

from patchguard.attacks import Noise
from patchguard.attacks.base import covered
from patchguard.patch import Patch


def test_noise_runs() -> None:
    guard = bagnet_guard()
    images = pictures(6, 12)
    target = guard.predict(images).label
    attacked = Noise(tries=3)(guard, images, target, Patch(2, 3, count=2))
    inside = covered(attacked.places, Patch(2, 3, count=2), 12, 12)
    assert ((attacked.images == images) | inside).all()
    assert torch.equal(attacked.label, guard.predict(attacked.images).label)
    assert torch.equal(attacked.broken, attacked.label != target)
