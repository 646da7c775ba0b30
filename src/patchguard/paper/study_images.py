"""Images for the studies of the paper: labelled, of one size, with the patch where the paper puts it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from patchguard.data.decode import Unreadable
from patchguard.data.draw import spread
from patchguard.data.loading import decoded
from patchguard.data.source import open_source
from patchguard.errors import InputError
from patchguard.geometry.preprocess import CenterCrop, Preprocess, Resize
from patchguard.guards.local import LocalGuard
from patchguard.runs.images import align_classes
from patchguard.storage import zoo
from patchguard.training import pretrained

SMALL = ("cifar10", "sample")  # as they are; photos are resized and cropped, and the patch lies on the result
# A photo of 224 x 224 pixels, as ImageNette's often are, stays as it is.
PHOTO = Preprocess((Resize(shorter=224), CenterCrop(height=224, width=224)))
PIXEL_BYTES = 12 * 3 * 4  # of a dozen float images: what is shown, its gradient, its velocity, the best so far, ...
FROM_WEIGHTS = ("imagenette_resnet50", "imagenet_resnet50")


@final
@dataclass(frozen=True, eq=False)
class StudyImages:
    """Images of one size with their true classes and their places in the data set."""

    images: UInt8[Tensor, "count 3 height width"]
    targets: Int64[Tensor, " count"]
    numbers: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of every image."""
        return self.images.shape[2], self.images.shape[3]

    def batches(
        self, device: torch.device, pixels: int | None = None
    ) -> Iterator[tuple[tuple[int, ...], Float[Tensor, "some 3 height width"], Int64[Tensor, " some"]]]:
        """Yield numbers, images with pixels in [0, 1] and classes, of about `pixels` in all at a time.

        By default batches are large: in an attack, one image that never breaks keeps its whole batch waiting.
        """
        size = max(1, (pixels or _at_once(device)) // (self.size[0] * self.size[1]))
        for first in range(0, len(self), size):
            some = slice(first, first + size)
            yield self.numbers[some], self.images[some].to(device).float() / 255, self.targets[some].to(device)


def _at_once(device: torch.device) -> int:
    """Return how many pixels an attack holds at once: on a GPU, in a quarter of the memory that is free."""
    if device.type != "cuda":
        return 2**17
    free, _ = torch.cuda.mem_get_info(device)
    return max(2**22, free // 4 // PIXEL_BYTES)


def open_model(name: str, weights: str | Path | None) -> LocalGuard[Any]:
    """Return the LocalGuard of a name or path, or the named ResNet-50 made of the tensors in `weights`."""
    if weights is None:
        return zoo.load_guard(name)
    if name not in FROM_WEIGHTS:
        raise InputError(f"`weights` are for {' and '.join(FROM_WEIGHTS)}; {name!r} has its own. Leave it out.")
    return getattr(pretrained, name)(weights)  # type: ignore[no-any-return]


def open_images(
    guard: LocalGuard[Any],
    data: str,
    root: str | Path | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
    photo: Preprocess = PHOTO,
) -> tuple[LocalGuard[Any], StudyImages]:
    """Return the test images of a set and the guard that takes them as they come: photos at the network's own size.

    `limit` takes so many, evenly spread and drawn with `seed`. Images that cannot be read are left out. `photo` is how
    photos are prepared for a network that has no way of its own.
    """
    if limit is not None and limit < 1:
        raise InputError(f"`limit` must be a whole number, 1 or more; got {limit}.")
    source = open_source(data, root)
    if source.targets is None:
        raise InputError(f"`data` must have classes to be right or wrong about; {data} has none.")
    source = align_classes(source, guard)
    numbers = list(range(len(source))) if limit is None else spread(min(limit, len(source)), len(source), seed)
    prepare = None if data in SMALL else guard.preprocess if guard.preprocess.steps else photo
    images, kept = [], []
    chosen = source.subset(numbers) if prepare is None else source.subset(numbers).prepared(prepare)
    for number, image in zip(numbers, decoded(chosen), strict=True):
        if isinstance(image, Unreadable):
            continue
        kept.append(number)
        images.append(image)
    if not kept:
        raise InputError(f"none of the {len(numbers)} images of `data` can be read. Check the files.")
    assert source.targets is not None
    targets = torch.tensor([source.targets[number] for number in kept])
    taken = guard if prepare is None else replace(guard, preprocess=Preprocess())
    return taken, StudyImages(torch.stack(images), targets, tuple(kept))
