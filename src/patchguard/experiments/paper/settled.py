"""Whether double masking certifies, without its margin: a table needs only the sign, which is found faster."""

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from patchguard.defenses.base import select
from patchguard.evidence import EvidenceMap
from patchguard.overlap import heaviest, sums
from patchguard.windows import Windows

MAPS = {"cpu": 64, "cuda": 4096}  # gaps whose worst pair is searched together


def doubly_masked(evidence: EvidenceMap, masks: Windows, label: Int64[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
    """Return `DoubleMasking(masks).certify(evidence, masks, label).certified` for equal boxes.

    With g_k = u_y - u_k, equal boxes cover only themselves, so certified means: g_k outside m and m' is positive for
    all rivals k and all pairs. Not so where it is not positive outside one mask alone. Surely so where what one mask
    leaves exceeds all that a second one could hide. Only what lies between is searched, gap by gap.
    """
    gap = select(evidence.lower, label).unsqueeze(1) - evidence.upper
    outside = gap.sum((2, 3)).unsqueeze(2) - sums(gap, masks)  # batch, classes, masks
    own = torch.nn.functional.one_hot(label, gap.shape[1]).bool()
    failed = ((outside <= 0).any(2) & ~own).any(1)
    most = sums(gap.clamp(min=0), masks).amax(2)
    doubtful = (outside.amin(2) <= most) & ~own & ~failed.unsqueeze(1)
    images, rivals = doubtful.nonzero().unbind(1)
    certified = ~failed
    some = MAPS.get(gap.device.type, MAPS["cuda"])
    for first in range(0, len(images), some):
        here = slice(first, first + some)
        chosen = gap[images[here], rivals[here]]
        worst = (outside[images[here], rivals[here]] - heaviest(chosen, masks, masks)).amin(1)
        certified[images[here][worst <= 0]] = False
    return certified
