"""Certify your own network: wrap it, let its field be derived, choose a defense, ask.

    python examples/certify_your_own_cnn.py

The weights here are random, so few images will be certified; with yours, load them into `network` first.
"""

import torch
from torch import nn

from patchguard import Evidence, LocalGuard, Patch, Windows
from patchguard.defenses import DoubleMasking
from patchguard.geometry.audit import audit
from patchguard.geometry.preprocess import Preprocess
from patchguard.models import wrap

torch.manual_seed(0)
network = nn.Sequential(  # any layers that look at a neighborhood; no global pooling, no attention
    nn.Conv2d(3, 32, 3),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2),
    nn.ReLU(),
    nn.Conv2d(64, 10, 1),  # class scores at every position: leave out the pooling that follows
)
model = wrap(network, classes=10, smallest_input=(5, 5))
field = model.field(32, 32)  # refused, with the layer's name, if some layer mixes positions
print(f"cells {field.grid}, each reads {field.size} pixels; audit passed: {audit(model, field).passed}")

patch = Patch(5)
masks = Windows.reached_by(patch, field)
guard = LocalGuard(Preprocess(), model, Evidence(low=None), DoubleMasking(masks=masks))
images = torch.rand(16, 3, 32, 32)
certificate = guard.certify(images, patch)
print(f"labels {certificate.label.tolist()}")
print(f"no 5 x 5 patch changes {int(certificate.certified.sum())} of {len(images)} labels")
print(f"largest certified patch, per image: {guard.largest_certified_patch(images).tolist()}")
