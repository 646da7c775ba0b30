"""`WeakSpot`: what a certificate tells an attacker: the weakest window, the rival, and the evidence to write there."""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from patchguard.attacks.base import Images, Victim, gradient_precision
from patchguard.attacks.feature_attack import attack_region, union_cells
from patchguard.attacks.objectives import find_surrogate
from patchguard.defenses.base import select
from patchguard.errors import InputError
from patchguard.geometry.field import Field
from patchguard.geometry.windows import Windows
from patchguard.guards.local import LocalGuard
from patchguard.patch import Patch


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class WeakSpot:
    """Where to attack (`boxes` of `windows`, None: anywhere), which class to raise, and the witness.

    The witness holds, for the target and the rival, the evidence that an attacker of the cells themselves would write
    into the weakest window.
    """

    field: Field
    windows: Windows
    boxes: Int64[Tensor, "batch *count"] | None
    rival: Int64[Tensor, " batch"]
    witness: Float[Tensor, "batch 2 rows columns"] | None


@torch.no_grad()
def find_weak_spot(
    victim: Victim, images: Images, patch: Patch, target: Int64[Tensor, " batch"], *, size: int, half: bool
) -> WeakSpot | None:
    """Certify `target` on a quick pass of the network; None for a guard without cells, or without a certificate.

    The certificate is a hint here, so less precision and no drift do not matter. It says nothing where the patch
    reaches every cell: all rivals are then equally strong.
    """
    if not isinstance(victim, LocalGuard):
        return None
    guard: LocalGuard[Any] = victim
    height, width = images.shape[-2:]
    try:
        windows = guard.windows(patch, height, width)
    except InputError:  # a network that mixes positions
        return None
    whole = windows.boxes[:, 1::2] - windows.boxes[:, 0::2] >= windows.grid
    if whole.all(1).any():
        return None
    # Bait matters only where masks have a threshold; elsewhere the plain worst contents are the witness.
    search = find_surrogate(guard.defense).needs_bait(guard.defense)
    boxes, rivals, witnesses = [], [], []
    for part, label in zip(torch.split(images, size), torch.split(target, size), strict=True):
        with gradient_precision(images.device, half):
            local_logits = guard.differentiable_logits(part)
        evidence = guard.evidence(local_logits.float().nan_to_num())  # one bad image must not cost the others' hints
        try:
            certificate = guard.defense.certify(evidence, windows, label)
        except InputError:  # the masks do not fit the patch, or the evidence has no bound
            return None
        boxes.append(certificate.weakest)
        rivals.append(certificate.rival)
        if certificate.weakest is not None:
            owned = union_cells(certificate.weakest, windows)
            attacked = attack_region(guard.defense, evidence, owned, label, certificate.rival, search=search)
            values = attacked.evidence.values
            witness = torch.stack([select(values, label), select(values, certificate.rival)], 1)
            witnesses.append(witness.float() / evidence.scale)
    located = len(witnesses) == len(boxes)
    return WeakSpot(
        field=guard.field(height, width),
        windows=windows,
        boxes=torch.cat(boxes) if located else None,
        rival=torch.cat(rivals),
        witness=torch.cat(witnesses) if located else None,
    )
