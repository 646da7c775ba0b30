"""Ablation: any classifier made local by showing it one region of the image at a time.

After A. Levine and S. Feizi, "(De)randomized smoothing for certifiable defense against patch attacks",
NeurIPS 2020. The backbone gets six channels: x and 1 - x inside the region, zeros outside, so that black and
absent pixels differ. Here x is the normalized image: the public ImageNet networks were trained so, those for
CIFAR-10 on plain pixels.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from patchguard.errors import InputError
from patchguard.geometry.field import Axis, Field
from patchguard.models.band_logits import (
    Cost,
    compute_band_cost,
    compute_band_logits,
    describe_architecture,
    find_memory_format,
)
from patchguard.models.band_plan import COPYING
from patchguard.models.base import IMAGENET_MEAN, IMAGENET_STD, LocalModel
from patchguard.models.resnet import ResNet, build_resnet

if TYPE_CHECKING:
    from patchguard.geometry.program import Program

NOT_NORMALIZED: tuple[Sequence[float], Sequence[float]] = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@final
class Ablation(LocalModel):
    """Cell (u, v) holds the logits of `backbone` for the image of which only region (u, v) is shown.

    Regions are bands of `band` columns over the full height ("column", cells 1 x V), bands of `band` rows
    ("row", cells U x 1), or squares of `band` x `band` pixels ("block", cells U x V). They begin at every
    `stride`-th pixel and, with `wrap`, go on at the opposite border: then an axis of n pixels has ceil(n /
    stride) cells on a circle, otherwise floor((n - band) / stride) + 1 in a row.

    `backbone` maps images of six channels to one vector of logits each. Two settings change speed and memory
    only: `chunk` is how many regions, of all images together, are evaluated at once; `fast` computes for
    bands over a `ResNet` in evaluation mode only those columns of each layer that a band can change.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        classes: int,
        region: str = "column",
        band: int,
        stride: int = 1,
        wrap: bool = True,
        mean: Sequence[float] = NOT_NORMALIZED[0],
        std: Sequence[float] = NOT_NORMALIZED[1],
        fast: bool = True,
        chunk: int = 256,
    ) -> None:
        super().__init__(classes=classes, mean=mean, std=std)
        if region not in ("column", "row", "block"):
            raise InputError(f"`region` must be 'column', 'row' or 'block'; got {region!r}.")
        for name, value in (("band", band), ("stride", stride), ("chunk", chunk)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"`{name}` must be a whole number of at least 1; got {value!r}.")
        if isinstance(backbone, ResNet) and backbone.in_channels != 6:
            raise InputError(
                f"`backbone` must take six channels, x and 1 - x; this one takes {backbone.in_channels}. "
                "Build it with in_channels=6."
            )
        if isinstance(backbone, ResNet) and backbone.classes != classes:
            raise InputError(f"`classes` must be those of `backbone`, {backbone.classes}; got {classes}.")
        self.backbone = backbone
        self.region = region
        self.band = band
        self.stride = stride
        self.wrap = wrap
        self.fast = fast
        self.chunk = chunk
        self.architecture: dict[str, Any] = {}

    def local_logits(
        self, normalized: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch classes rows columns"]:
        """Return the logits of the backbone for every region."""
        height, width = normalized.shape[2:]
        if not self.runs_fast(height, width):
            return self.plain_logits(normalized)
        assert isinstance(self.backbone, ResNet)
        columns = self.region == "column"
        starts = (self.field(height, width).columns if columns else self.field(height, width).rows).starts
        logits = compute_band_logits(
            self.backbone, _append_complement(normalized), starts, self.band, columns=columns, chunk=self.chunk
        )
        return logits[:, :, None] if columns else logits[..., None]

    def plain_logits(
        self, normalized: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch classes rows columns"]:
        """Return the same with one full-size forward pass of the backbone for every region."""
        height, width = normalized.shape[2:]
        starts = self._starts(height, width).to(normalized.device)
        layout = find_memory_format(self.backbone)
        results: list[Tensor] = []
        for part in torch.split(_append_complement(normalized), self.chunk):
            logits: list[Tensor] = []
            for some in torch.split(starts, max(1, self.chunk // len(part))):
                masks = self._region_masks(some, height, width)
                # (batch, 1, 6, H, W) and (regions, 1, H, W): not a product, which would let NaN pass.
                inputs = torch.where(masks, part[:, None], 0.0).flatten(0, 1).contiguous(memory_format=layout)
                logits.append(torch.unflatten(self.backbone(inputs), 0, (len(part), len(some))))
            results.append(torch.cat(logits, dim=1))
        grid = self.field(height, width).grid
        return torch.unflatten(torch.cat(results).transpose(1, 2), 2, grid)

    def runs_fast(self, height: int, width: int) -> bool:
        """Return whether images of this size are evaluated by columns that change rather than in full."""
        if not self.fast or self.region == "block" or not isinstance(self.backbone, ResNet):
            return False
        # With batch statistics, the empty image would not be the same for all bands.
        if any(module.training for module in self.backbone.modules()):
            return False
        cost = self.cost(height, width)
        return cost is not None and COPYING * cost.fast < cost.plain

    def cost(self, height: int, width: int) -> Cost | None:
        """Return the multiply-adds for all regions of one image; None where there is only the plain way."""
        if self.region == "block" or not isinstance(self.backbone, ResNet):
            return None
        field = self.field(height, width)
        along, across = (field.columns, height) if self.region == "column" else (field.rows, width)
        return compute_band_cost(describe_architecture(self.backbone), along.size, across, along.starts, self.band)

    def ablate(
        self, images: Float[Tensor, "batch 3 height width"], starts: Int64[Tensor, "batch 2"]
    ) -> Float[Tensor, "batch 6 height width"]:
        """Return the backbone's input that shows, of image i, the region from (row, column) starts[i] on."""
        height, width = images.shape[2:]
        self.check_size(height, width)
        masks = self._region_masks(starts.to(images.device), height, width)
        return torch.where(masks, _append_complement(self.normalize(images)), 0.0)

    def random_region(
        self, images: Float[Tensor, "batch 3 height width"], generator: torch.Generator | None = None
    ) -> Float[Tensor, "batch 6 height width"]:
        """Return the backbone's input that shows one region of each image, drawn evenly from all cells.

        Train with it: `loss(model.backbone(model.random_region(images, generator)), target)`.
        """
        starts = self._starts(*images.shape[2:])
        device = torch.device("cpu") if generator is None else generator.device
        drawn = torch.randint(len(starts), (len(images),), generator=generator, device=device)
        return self.ablate(images, starts.to(device)[drawn])

    def smallest_input(self) -> tuple[int, int]:
        """One pixel more than a region along the axes that it bounds: who sees everything is not local."""
        return 1 if self.region == "column" else self.band + 1, 1 if self.region == "row" else self.band + 1

    def field(self, height: int, width: int) -> Field:
        """Return the field by construction: a cell reads its region."""
        self.check_size(height, width)
        return Field(
            rows=self._axis(height, bounded=self.region != "column"),
            columns=self._axis(width, bounded=self.region != "row"),
        )

    def program(self, height: int, width: int) -> "Program":
        """Return the model itself. Its field needs a backbone that is a function of each image: others are tested."""
        from patchguard.geometry.program import (
            check_per_image_function,  # here, because torch.export is slow to import
        )

        if not isinstance(self.backbone, ResNet):
            check_per_image_function(self.backbone, (6, height, width))
        return super().program(height, width)

    def config(self) -> dict[str, Any]:
        """Return the settings of the preset `name`."""
        regions = {"band": self.band, "stride": self.stride, "wrap": self.wrap}
        return {**super().config(), **regions, **self.architecture}

    def _axis(self, size: int, *, bounded: bool) -> Axis:
        if not bounded:
            return Axis((0,), (size,), size)
        starts = tuple(range(0, size if self.wrap else size - self.band + 1, self.stride))
        return Axis(starts, (self.band,) * len(starts), size, wrap=self.wrap)

    def _starts(self, height: int, width: int) -> Int64[Tensor, "regions 2"]:
        """Return the first (row, column) of every region, row by row of the grid."""
        field = self.field(height, width)
        return torch.cartesian_prod(torch.tensor(field.rows.starts), torch.tensor(field.columns.starts))

    def _region_masks(
        self, starts: Int64[Tensor, "regions 2"], height: int, width: int
    ) -> Bool[Tensor, "regions 1 height width"]:
        """Return which pixels belong to each region."""
        rows = (torch.arange(height, device=starts.device) - starts[:, :1]) % height
        columns = (torch.arange(width, device=starts.device) - starts[:, 1:]) % width
        in_rows = rows < (height if self.region == "column" else self.band)
        in_columns = columns < (width if self.region == "row" else self.band)
        return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


def _append_complement(normalized: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch 6 height width"]:
    return torch.cat([normalized, 1 - normalized], dim=1)


def rename_smoothing_checkpoint(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a public smoothing checkpoint with the names of `Ablation`, for a strict `load_state_dict`.

    `state` is what those files hold, {"net": tensors, ...}, or the tensors alone. Names may begin with
    "module." (saved from several devices); the CIFAR-10 networks say "shortcut" for `downsample` and "linear"
    for `fc`.
    """
    tensors = state.get("net", state)
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise InputError("`state` must be a mapping from names to tensors, or hold one as 'net'. Load the file first.")
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        words = name.removeprefix("module.").split(".")
        words = [{"shortcut": "downsample", "linear": "fc"}.get(word, word) for word in words]
        renamed[".".join(["backbone", *words])] = tensor
    return renamed


def ds_resnet18(
    *,
    classes: int = 10,
    band: int = 4,
    stride: int = 1,
    wrap: bool = True,
    region: str = "column",
    small_images: bool = True,
    width: float = 1.0,
    mean: Sequence[float] = NOT_NORMALIZED[0],
    std: Sequence[float] = NOT_NORMALIZED[1],
) -> Ablation:
    """Return DS-ResNet-18: bands over a ResNet-18, by default 4 columns of images of 32 x 32 pixels."""
    network = build_resnet(18, classes=classes, in_channels=6, small_images=small_images, width=width)
    model = Ablation(network, classes=classes, region=region, band=band, stride=stride, wrap=wrap, mean=mean, std=std)
    model.name = "ds_resnet18"
    model.architecture = {"region": region, "small_images": small_images, "width": width}
    return model


def ds_resnet50(
    *,
    classes: int = 1000,
    band: int = 25,
    stride: int = 1,
    wrap: bool = True,
    region: str = "column",
    width: float = 1.0,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Ablation:
    """Return DS-ResNet-50: bands over a ResNet-50, by default 25 columns; published for 299 x 299 pixels."""
    network = build_resnet(50, classes=classes, in_channels=6, width=width)
    model = Ablation(network, classes=classes, region=region, band=band, stride=stride, wrap=wrap, mean=mean, std=std)
    model.name = "ds_resnet50"
    model.architecture = {"region": region, "width": width}
    return model


def block_resnet18(
    *,
    classes: int = 10,
    band: int = 12,
    stride: int = 4,
    wrap: bool = True,
    small_images: bool = True,
    width: float = 1.0,
    mean: Sequence[float] = NOT_NORMALIZED[0],
    std: Sequence[float] = NOT_NORMALIZED[1],
) -> Ablation:
    """Return an ensemble of blocks over a ResNet-18: by default 8 x 8 blocks of 12 x 12 of 32 x 32 pixels."""
    network = build_resnet(18, classes=classes, in_channels=6, small_images=small_images, width=width)
    model = Ablation(network, classes=classes, region="block", band=band, stride=stride, wrap=wrap, mean=mean, std=std)
    model.name = "block_resnet18"
    model.architecture = {"small_images": small_images, "width": width}
    return model
