"""`wrap`: make a `LocalModel` of one's own network, whatever library it comes from.

    network = torchvision.models.resnet18(weights="DEFAULT").eval()
    model = wrap((nn.Sequential(*list(network.children())[:-2]), network.fc), classes=1000)

    network = timm.create_model("resnet18", pretrained=True)
    head = network.get_classifier()
    network.reset_classifier(0, "")
    model = wrap((network.eval(), head), classes=1000)

Neither library is needed or imported here. Whether such a network is local is for `patchguard.geometry.program` to
say; it refuses one that mixes positions (attention over the image, squeeze-and-excite, global pooling).
"""

from collections.abc import Sequence
from typing import Any, final

from jaxtyping import Float
from torch import Tensor, nn

from patchguard.errors import InputError
from patchguard.models.base import IMAGENET_MEAN, IMAGENET_STD, LocalModel, apply_linear_at_cells


def wrap(
    module: nn.Module | tuple[nn.Module, nn.Module],
    classes: int,
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    smallest_input: tuple[int, int] = (1, 1),
) -> "Wrapped":
    """Return `module` as a `LocalModel`; it gets images normalized with `mean` and `std`.

    `module` returns local logits (batch, classes, rows, columns). Or it is a pair (features, head): features
    returns (batch, channels, rows, columns), and head, applied at each position, turns a vector of channels
    (the last axis of its input) into one of classes.
    """
    features, head = module if isinstance(module, tuple) else (module, None)
    for part in (features, head):
        if part is not None and not isinstance(part, nn.Module):
            raise InputError(f"`module` must be a torch module or a pair of them; got {type(part).__name__}.")
    return Wrapped(features, head, classes=classes, mean=mean, std=std, smallest_input=smallest_input)


@final
class Wrapped(LocalModel):
    """A network from elsewhere; see `wrap`. It has no registry name; code that makes it can be saved by name."""

    def __init__(
        self,
        features: nn.Module,
        head: nn.Module | None,
        *,
        classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        smallest_input: tuple[int, int],
    ) -> None:
        super().__init__(classes=classes, mean=mean, std=std)
        self.features = features
        self.head = head
        self.smallest = smallest_input

    def local_logits(
        self, normalized: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch classes rows columns"]:
        """Return what the network returns, with its head applied at each position if it came separately."""
        local_logits = check_feature_maps(self.features(normalized), "module" if self.head is None else "features")
        if isinstance(self.head, nn.Linear):
            local_logits = apply_linear_at_cells(self.head, local_logits)
        elif self.head is not None:
            local_logits = self.head(local_logits.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if local_logits.shape[1] != self.classes:
            raise InputError(
                f"`classes` must be the number of scores that the module returns; got {self.classes}, "
                f"and the module returns {local_logits.shape[1]}."
            )
        return local_logits

    def smallest_input(self) -> tuple[int, int]:
        """Return the size given to `wrap`; the network itself may refuse more."""
        return self.smallest

    def config(self) -> dict[str, Any]:
        """Refuse: only a registered architecture can be rebuilt from settings."""
        raise InputError(
            "a wrapped module cannot be rebuilt from settings. Make it in a function, and load that: "
            "patchguard.load('my_net.py:make_model', trust_code=True, ...)."
        )


def check_feature_maps(output: object, part: str) -> Tensor:
    """Return the `output` of the user's network if it is a tensor with rows and columns, or raise."""
    if not isinstance(output, Tensor) or output.dim() != 4:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise InputError(
            f"`{part}` must return a tensor (batch, channels, rows, columns); got {got}. Leave out pooling."
        )
    return output
