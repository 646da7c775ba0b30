"""Labels given to a Guard for a batch that its network sees in parts."""

import torch
from helpers.color_network import SIDE, color_guard, tinted_images

from patchguard.guards import local as guard_file
from patchguard.patch import Patch


def test_labels_of_a_batch_that_is_split_belong_to_their_images(monkeypatch) -> None:
    victim, (images, _) = color_guard("robust"), tinted_images(5)
    label = torch.tensor([0, 1, 2, 1, 0])
    patches = [Patch(1), Patch(2)]
    alone = [victim.certify(images[i : i + 1], patches, label=int(label[i])) for i in range(5)]
    every = torch.stack([victim.certify(images, Patch(1), label=k).margin for k in range(3)])
    assert (every - every.roll(1, 0)).abs().min() > 0.1  # another image's label would have another margin
    two = 2 * SIDE * SIDE
    monkeypatch.setattr(guard_file, "PIXELS_AT_ONCE", {"cpu": two, "cuda": two})
    for number, split in enumerate(victim.certify(images, patches, label=label)):
        assert torch.equal(split.label, label)
        torch.testing.assert_close(
            split.margin, torch.cat([proof[number].margin for proof in alone]), rtol=0, atol=1e-2
        )
