"""Attacked images per second: 20-step attacks on the default model, on copies of the embedded sample.

python benchmarks/attack_speed.py [images] [device]
"""

import sys
import time

import torch

import patchguard as pg
from patchguard.attacks import Adaptive, PatchPGD
from patchguard.data import sample
from patchguard.runtime import resolve_device

count = int(sys.argv[1]) if len(sys.argv) > 1 else (10_000 if torch.cuda.is_available() else 10)
device = resolve_device(sys.argv[2] if len(sys.argv) > 2 else "auto")
guard, data, patch = pg.load("cifar10"), sample.load(), pg.Patch(5)
guard.model.to(device)
rows = torch.arange(count) % len(data.images)
noise = torch.randint(-3, 4, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0))
images = ((data.images[rows] + noise).clamp(0, 255).float() / 255).to(device)
target = data.targets[rows].to(device)
clean = guard.predict(images).label == target
certified = guard.certify(images, patch, target).certified
print(f"{count} images on {device}: clean {clean.float().mean():.4f}, certified {certified.float().mean():.4f}")
for attack in (PatchPGD(steps=20, locations=1), Adaptive(steps=20, locations=1)):
    for name in ("first", "again"):
        start = time.perf_counter()
        attacked = attack(guard, images, target, patch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        left, flipped = 1 - attacked.broken.float().mean(), int((attacked.broken & certified).sum())
        print(f"{attack}, {name}: {count / seconds:.0f} images/s in {seconds:.1f} s")
        print(f"    accuracy left {left:.4f}, certified and flipped {flipped}")
