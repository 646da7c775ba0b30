"""`Guard`: a classifier that proves its answers. Read this file first.

    guard = LocalGuard(preprocess, model, evidence, defense)
    guard.predict(images).label                    # the defended label
    guard.certify(images, Patch(5)).certified      # True: no 5 x 5 patch, anywhere, changes that label

    images  --preprocess-->  pixels  --model-->  local logits  --evidence-->  whole numbers, per class and cell
                                                                                    |
    patch  --field of preprocess and model-->  windows of cells  --------------->  defense

Each word of this picture is one file: patch, field, windows, evidence, certificate, and the folders models, defenses
and data. A LocalGuard only puts them together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Generic, final, overload

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchguard.data.images import check_images
from patchguard.defenses.base import Defense, Proof
from patchguard.defenses.evidence import Evidence, EvidenceMap
from patchguard.errors import InputError, NoFieldError
from patchguard.geometry.field import Field, compose
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.windows import Windows
from patchguard.guard import Answer, Certificate, Prediction, concatenate
from patchguard.models.base import LocalModel
from patchguard.patch import Patch
from patchguard.runtime import LARGEST_BATCH, device_and_dtype, eval_mode, frozen_parameters, full_precision

Images = Float[Tensor, "batch 3 height width"]

# Network pixels that pass through the model at once. A CPU is fastest while activations fit its cache (8 images of
# 32 x 32, or 1 of 224 x 224); a GPU wants many, within its memory (83 images of 224 x 224).
PIXELS_AT_ONCE = {"cpu": 2**13, "cuda": 2**22}


@final
@dataclass(frozen=True, eq=False)
class LocalGuard(Generic[Proof]):
    r"""A local model, how its images are prepared, and a defense that aggregates what its cells say.

    Theorem.  Let `certify(images, patch)` give image x the label y and say `certified`. Then `predict` answers y for
              every image with pixels in [0, 1] that equals x outside `patch.count` rectangles of `patch.height` x
              `patch.width` source pixels, wherever in the image they lie and whatever they show.
    Proof.    `predict` runs the exported graph of the network (`program.py`), not the module. A cell reads only the
              source pixels of its field, which is derived from that graph and the matrices of the resizing. So such
              an image changes only cells that the patch touches, and these lie in one region of `windows(patch)`.
              That no contents of such a region change the label is the theorem of the defense, computed in whole
              numbers.

    (With `top_k`: y stays among the k best. A defense that detects proves less: the answer is y or an alert.)

    Two things the theorem does not say:

    * Arithmetic.  Outside the patch, the two runs of the network may differ by rounding (another device, batch size or
      kernel). A certificate tolerates a change of `evidence.drift` in every such cell, and no more: with drift 0 both
      runs must give equal numbers there.
    * Clean images.  A certificate is about the image it was computed on. An image met in the wild may already carry a
      patch; it can then be certified for the attacker's label.

    The masks of a defense are part of its rule: `certify` keeps them and refuses a patch that they do not cover;
    `for_patch` returns another guard, with other masks, whose labels may differ. Masks lie on the cells, so they also
    fix the grid: images of a size that gives other cells are refused.

    Everything is computed on the model's device, in its precision, without autocast and TF32 and with the model in
    evaluation mode; answers come back on the device of `images`.
    """

    preprocess: Preprocess
    model: LocalModel
    evidence: Evidence
    defense: Defense[Proof]
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.model, LocalModel):
            raise InputError(
                f"`model` must be a LocalModel; got {type(self.model).__name__}. Wrap your own network: "
                "patchguard.models.wrap(network, classes=...)."
            )
        if self.class_names and len(self.class_names) != self.model.classes:
            raise InputError(
                f"`class_names` must name the model's {self.model.classes} classes; got {len(self.class_names)} names."
            )

    # -- the two verbs -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, images: Images) -> Prediction:
        """Return the defended label of each image."""
        answers = [self.defense.predict(self._evidence(part, images)) for part in self._local_logits(images)]
        return _moved(concatenate(answers), images.device)

    @overload
    def certify(
        self, images: Images, patch: Patch, label: Int64[Tensor, " batch"] | int | None = None, top_k: int = 1
    ) -> Proof: ...
    @overload
    def certify(
        self, images: Images, patch: Sequence[Patch], label: Int64[Tensor, " batch"] | int | None = None, top_k: int = 1
    ) -> tuple[Proof, ...]: ...
    @torch.no_grad()
    def certify(
        self,
        images: Images,
        patch: Patch | Sequence[Patch],
        label: Int64[Tensor, " batch"] | int | None = None,
        top_k: int = 1,
    ) -> Proof | tuple[Proof, ...]:
        """Prove, per image, that no such patch changes the answer; several patches share one pass of the network.

        `label=None` certifies the defended prediction, otherwise the given class: a positive margin then implies that
        it is the defended prediction. With `top_k > 1` the statement is that the label stays among the k best.
        """
        patches = _listed(patch)
        if isinstance(label, Tensor) and tuple(label.shape) != (len(images),):
            raise InputError(
                f"`label` must be one class number per image; got shape {tuple(label.shape)} for {len(images)} images."
            )
        windows: list[Windows] = []
        proofs: list[list[Proof]] = []
        first = 0
        for local_logits in self._local_logits(images, proving=True):
            # Looked up only now: a GPU is at work on the logits meanwhile.
            windows = windows or [self.windows(each, *images.shape[-2:]) for each in patches]
            evidence = self._evidence(local_logits, images)
            chosen = label[first : first + len(evidence)] if isinstance(label, Tensor) else label
            if chosen is None and len(windows) > 1:
                chosen = self.defense.predict(evidence).label
            proofs.append([self.defense.certify(evidence, each, chosen, top_k) for each in windows])
            first += len(evidence)
        joined = tuple(_moved(concatenate(list(parts)), images.device) for parts in zip(*proofs, strict=True))
        return joined[0] if isinstance(patch, Patch) else joined

    # -- masks and patches ---------------------------------------------------------------------------------------------

    def for_patch(self, patch: Patch, height: int, width: int) -> "LocalGuard[Proof]":
        """Return the guard whose masks are exactly the windows that `patch` can reach in `height` x `width` images.

        Defenses that set aside a number of cells get as many as the largest of these windows has; others stay as they
        are. This changes the rule: the new LocalGuard may label an image differently.
        """
        return replace(self, defense=_fitted(self.defense, self.windows(patch, height, width)))

    @torch.no_grad()
    def largest_certified_patch(self, images: Images) -> Int64[Tensor, " batch"]:
        """Return the side of the largest square patch that each image is certified against, 0 if there is none.

        The masks stay as they are, and sizes that they do not cover are not tried. Found by bisection on one pass of
        the network: each side returned was itself certified, and larger ones are not, since a larger patch can do all
        that a smaller one can. (Only the bounds of robust masking with a threshold above 0 might certify one size and
        not a smaller one; the side is then still certified, perhaps not the largest.)
        """
        sides = [
            self._largest_sides(self._evidence(part, images), images)
            for part in self._local_logits(images, proving=True)
        ]
        return torch.cat(sides).to(images.device)

    def _largest_sides(self, evidence: EvidenceMap, images: Images) -> Int64[Tensor, " some"]:
        height, width = images.shape[-2:]
        self.defense.check(evidence, self.windows(Patch(1), height, width))
        largest, too_large = 1, min(height, width) + 1
        while too_large - largest > 1:
            middle = (largest + too_large) // 2
            accepted = self.defense.accepts(evidence, self.windows(Patch(middle), height, width))
            largest, too_large = (middle, too_large) if accepted else (largest, middle)
        label = self.defense.predict(evidence).label

        def proves(rows: Tensor, side: int) -> Tensor:
            windows = self.windows(Patch(side), height, width)
            proof: object = self.defense.certify(evidence[rows], windows, label[rows])
            if not isinstance(proof, Certificate):
                raise InputError("`largest_certified_patch` needs a defense that certifies labels; this one detects.")
            return proof.certified

        return settled_sides(label, largest, proves)

    # -- what lies between images and answers --------------------------------------------------------------------------

    def field(self, height: int, width: int) -> Field:
        """Return which pixels of a `height` x `width` source image each cell reads, through the whole chain."""
        return _composed(self._cells(height, width), self.preprocess, height, width)

    def windows(self, patch: Patch, height: int, width: int) -> Windows:
        """Return the boxes of cells that the patch can reach in source images of `height` x `width` pixels."""
        return _reached(patch, self._cells(height, width), self.preprocess, height, width)

    @torch.no_grad()
    def local_logits(self, images: Images) -> Float[Tensor, "batch classes rows columns"]:
        """Return the class scores of every cell, before evidence is made of them."""
        return torch.cat([part.to(images.device) for part in self._local_logits(images)])

    def differentiable_logits(self, images: Images) -> Float[Tensor, "batch classes rows columns"]:
        """Return `local_logits` with their graph: gradients flow to `images`, none to the parameters.

        For attacks and saliency, in one piece: the caller chooses how many images fit the memory. Autocast of the
        caller holds for the network, so that gradients may be computed in bfloat16; answers come from `predict`.
        """
        device, dtype = device_and_dtype(self.model)
        with eval_mode(self.model), frozen_parameters(self.model):
            with torch.autocast(device.type, enabled=False):
                pixels = self.preprocess(images.to(device)).to(dtype)
            if device.type == "cpu" or torch.is_autocast_enabled(device.type):
                pixels = pixels.contiguous(memory_format=torch.channels_last)
            local_logits: Tensor = self.model(pixels)
        return local_logits.to(images.device)

    @torch.no_grad()
    def evidence_of(self, images: Images) -> EvidenceMap:
        """Return the evidence that the defense decides on."""
        return self.evidence(self.local_logits(images))

    def without_preprocess(self) -> "LocalGuard[Proof]":
        """Return the LocalGuard for images that are already preprocessed: patches then live in network pixels."""
        return replace(self, preprocess=Preprocess())

    def _local_logits(
        self, images: Images, *, proving: bool = False
    ) -> Iterator[Float[Tensor, "some classes rows columns"]]:
        """Check the images, and run them through the network in parts that fit the memory.

        A network without a field may answer; for `proving`, it is refused before it runs.
        """
        check_images(images)
        device, dtype = device_and_dtype(self.model)
        height, width = self.preprocess.output_size(*images.shape[-2:])
        self.model.check_size(height, width)
        at_once = PIXELS_AT_ONCE.get(device.type, PIXELS_AT_ONCE["cuda"]) // (height * width)
        run = self.model.program(height, width) if proving else self._network(height, width)
        for part in torch.split(images, min(max(1, at_once), LARGEST_BATCH)):
            with eval_mode(self.model), full_precision(device):
                local_logits = run(self.preprocess(part.to(device)).to(dtype))
            yield local_logits

    def _network(self, height: int, width: int) -> Callable[[Tensor], Tensor]:
        """Return the program of the network; or the network itself if it has no field, and so no certificate either."""
        try:
            return self.model.program(height, width)
        except NoFieldError:
            return self.model

    def _cells(self, height: int, width: int) -> Field:
        """Return the field of the network alone, which keeps it as long as its layers stay the same."""
        return self.model.field(*self.preprocess.output_size(height, width))

    def _evidence(self, local_logits: Float[Tensor, "some classes rows columns"], images: Images) -> EvidenceMap:
        """Return the evidence of a part of `images`; refuse cells that the masks are not made for."""
        masks = getattr(self.defense, "masks", None)
        grid = tuple(local_logits.shape[2:])
        if isinstance(masks, Windows) and masks.grid != grid:
            height, width = images.shape[-2:]
            raise InputError(
                f"`images` of {height} x {width} pixels give {grid[0]} x {grid[1]} cells, but this guard's masks are "
                f"made for {masks.grid[0]} x {masks.grid[1]}. Resize the images, or refit the masks: "
                f"guard.for_patch(patch, {height}, {width})."
            )
        return self.evidence(local_logits)


def settled_sides(
    label: Int64[Tensor, " batch"],
    limit: int,
    proves: Callable[[Int64[Tensor, " _some"], int], Bool[Tensor, " _some"]],
    known: Sequence[int] = (),
) -> Int64[Tensor, " batch"]:
    """Return, per image, the largest side up to `limit` for which `proves(images, side)` holds, 0 if for none.

    Found by bisection: a larger patch can do all that a smaller one can. Sides in `known` cost nothing and come first.
    """
    sides = torch.zeros_like(label)

    def search(rows: Tensor, proved: int, limit: int) -> None:
        """Settle images that are certified for side `proved` and for none above `limit`."""
        if proved == limit or len(rows) == 0:
            sides[rows] = proved
            return
        free = [side for side in known if proved < side <= limit]
        side = max(free) if free else (proved + limit + 1) // 2
        certified = proves(rows, side)
        search(rows[certified], side, limit)
        search(rows[~certified], proved, side - 1)

    search(torch.arange(len(label), device=label.device), 0, limit)
    return sides


@lru_cache(maxsize=256)
def _composed(cells: Field, preprocess: Preprocess, height: int, width: int) -> Field:
    return compose(cells, preprocess.support(height, width))


@lru_cache(maxsize=1024)
def _reached(patch: Patch, cells: Field, preprocess: Preprocess, height: int, width: int) -> Windows:
    return Windows.reached_by(patch, _composed(cells, preprocess, height, width))


def _fitted(defense: Defense[Proof], windows: Windows) -> Defense[Proof]:
    """Return the defense with those settings replaced that say how much it masks or sets aside."""
    sizes: dict[str, Any] = {"masks": windows, "cells": windows.largest_area, "trim": windows.largest_area}
    settings: Any = defense
    known = {setting.name for setting in fields(settings)}
    fitted: Defense[Proof] = replace(settings, **{name: size for name, size in sizes.items() if name in known})
    return fitted


def _listed(patch: Patch | Sequence[Patch]) -> list[Patch]:
    patches = [patch] if isinstance(patch, Patch) else list(patch) if isinstance(patch, Sequence) else []
    if not patches or not all(isinstance(each, Patch) for each in patches):
        raise InputError(f"`patch` must be a Patch or a sequence of at least one; got {patch!r}. Write Patch(5).")
    return patches


def _moved(answer: Answer, device: torch.device) -> Answer:
    moved = {name: value.to(device) for name, value in vars(answer).items() if isinstance(value, Tensor)}
    return replace(answer, **moved)
