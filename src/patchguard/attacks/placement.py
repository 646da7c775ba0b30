"""Where patches go: at random, on a stride, where the gradient is large, or at the window a certificate fears most."""

import torch

from patchguard.attacks.base import Draws, Places
from patchguard.patch import Patch

PLACES = 0  # the purpose of these draws


def random_places(draws: Draws, patch: Patch, height: int, width: int, number: int = 0) -> Places:
    """Return one uniformly drawn place for every rectangle of every image; `number` tells several tries apart."""
    share = draws.uniform((PLACES, number), patch.count, 2).double()
    room = torch.tensor([height - patch.height + 1, width - patch.width + 1], device=draws.device)
    return torch.minimum((share * room).long(), room - 1)
