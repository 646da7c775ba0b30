"""How precisely attacks compute: gradients may be rough, since labels are always asked in full precision."""

from contextlib import AbstractContextManager, nullcontext

import torch


def reduced(device: torch.device, half: bool) -> AbstractContextManager[object]:
    """Return the context of a gradient pass: bfloat16 on a GPU, if wanted."""
    return torch.autocast("cuda", torch.bfloat16) if half and device.type == "cuda" else nullcontext()
