"""Reductions, normalization and matrix products: over channels they keep the boxes, over anything else they fall."""

from collections.abc import Callable

import pytest
import torch
from helpers.field_rules import Layer, check_batch_rows, check_field, refusal_reason
from torch import Tensor, nn
from torch.nn import functional

from patchguard.geometry.rules.layout import (
    Call,
    Constant,
    Layout,
    RuleError,
)
from patchguard.geometry.rules.pointwise import batch_norm

SIZE = (5, 6)
MEAN, VARIANCE = torch.linspace(-1, 1, 4, dtype=torch.float64), torch.linspace(0.5, 2, 4, dtype=torch.float64)
WEIGHT = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).cos()


def per_position(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Apply a function of (batch, rows, columns, channels) that keeps the first three."""
    return lambda x: function(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def of_tokens(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Apply a function of (batch rows columns, 2, 2) that keeps the positions."""

    def apply(x: Tensor) -> Tensor:
        tokens = function(x.permute(0, 2, 3, 1).reshape(-1, 2, 2))
        return tokens.reshape(x.shape[0], *SIZE, -1).permute(0, 3, 1, 2)

    return apply


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(1, keepdim=True),
    "sum without the dimension": lambda x: x.sum(-3).unsqueeze(1),
    "sum over two dimensions of channels": lambda x: x.unflatten(1, (2, 2)).sum((1, 2)).unsqueeze(1),
    "mean and variance": lambda x: torch.stack(torch.var_mean(x, 1), 1),
    "standard deviation": lambda x: x.std(1, keepdim=True),
    "greatest and where": lambda x: x.max(1, keepdim=True)[0] + x.max(1, keepdim=True)[1],
    "greatest of two": lambda x: torch.max(x, x.flip(1)),
    "where the least lies": lambda x: x.argmin(1).unsqueeze(1).double(),
    "product": lambda x: x.prod(1, keepdim=True),
    "length": lambda x: x.norm(dim=1, keepdim=True) + torch.linalg.vector_norm(x, dim=1, keepdim=True),
    "logarithm of sums": lambda x: x.logsumexp(1, keepdim=True),
    "any above": lambda x: (x > 0).any(1, keepdim=True) * x.amax(1, keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "running sum": lambda x: x.cumsum(-3),
    "layer norm": per_position(lambda x: functional.layer_norm(x, (4,))),
    "layer norm over two dimensions": of_tokens(lambda x: functional.layer_norm(x, (2, 2))),
    "layer norm with its statistics": per_position(lambda x: sum(torch.native_layer_norm(x, (4,), None, None, 1e-5))),  # type: ignore[arg-type]
    "root mean square": per_position(lambda x: functional.rms_norm(x, (4,))),
    "batch norm": lambda x: functional.batch_norm(x, MEAN, VARIANCE),
    "linear": per_position(lambda x: functional.linear(x, WEIGHT)),
    "product from the right": per_position(lambda x: x @ WEIGHT.T),
    "product from the left": lambda x: (WEIGHT @ x.flatten(2)).unflatten(2, SIZE),
    "product of flat positions": per_position(lambda x: torch.mm(x.reshape(-1, 4), WEIGHT.T).view(-1, *SIZE, 3)),
    "product and sum": per_position(lambda x: torch.addmm(MEAN[:3], x.reshape(-1, 4), WEIGHT.T).view(-1, *SIZE, 3)),
    "product inside a position": of_tokens(lambda x: torch.bmm(x, x.transpose(1, 2))),
    "product and sum inside a position": of_tokens(lambda x: torch.baddbmm(x, x, x)),
    "product with a wider sum": of_tokens(lambda x: torch.baddbmm(x[:, :1], x, x)),
}


@pytest.mark.parametrize("name", KEPT)
def test_mixing_channels_keeps_the_box_and_the_image(name: str) -> None:
    torch.manual_seed(0)
    network = Layer(lambda x, f: KEPT[name](f(x)), nn.Conv2d(3, 4, 3, padding=1))
    check_field(network, SIZE)
    check_batch_rows(network, SIZE)


def test_a_sum_reads_what_its_summands_and_factors_read() -> None:
    torch.manual_seed(0)

    def product(x: Tensor, *parts: nn.Module) -> Tensor:
        tokens = [f(x).permute(0, 2, 3, 1).reshape(-1, 2, 2) for f in parts]
        return torch.baddbmm(*tokens).reshape(-1, *SIZE, 4).permute(0, 3, 1, 2)

    narrow, wide = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1)
    for parts in ((wide, narrow, narrow), (narrow, wide, narrow), (narrow, narrow, wide)):
        check_field(Layer(product, *parts), SIZE, exact=True)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a sum over everything": (lambda x: x - x.sum(), "computes over all images of the batch"),
    "a maximum over everything": (lambda x: x - x.amax(()), "computes over all images of the batch"),
    "a place among everything": (lambda x: x - x.argmax(), "computes over all images of the batch"),
    "a mean of images": (lambda x: x - x.mean(0, keepdim=True), "computes over all images of the batch"),
    "a mean of rows": (lambda x: x - x.mean((1, 2), keepdim=True), "computes over all rows"),
    "a mean of a single row": (lambda x: x[:, :, :1].mean(2), "computes over all rows"),
    "a running sum of images": (lambda x: x.cumsum(0), "computes over all images of the batch"),
    "softmax of columns": (lambda x: x.softmax(-1), "computes over all columns"),
    "layer norm of a row": (lambda x: functional.layer_norm(x, (6,)), "computes over all columns"),
    "linear of a row": (lambda x: functional.linear(x, torch.ones(2, 6, dtype=x.dtype)), "computes over all columns"),
    "statistics of the batch": (
        lambda x: functional.batch_norm(x, None, None, training=True),
        "statistics of the batch",
    ),
    "a product of vectors": (lambda x: x.permute(0, 2, 3, 1) @ torch.ones(3, dtype=x.dtype), "multiplies vectors"),
    "a product over columns": (lambda x: x @ torch.ones(6, 2, dtype=x.dtype), "computes over all columns"),
    "a product over rows": (lambda x: torch.ones(2, 5, dtype=x.dtype) @ x, "computes over all rows"),
    "pairs of positions": (
        lambda x: x.flatten(2).transpose(1, 2) @ x.flatten(2),
        "pairs every position with every other",
    ),
    "pairs of images": (
        lambda x: x.permute(2, 3, 0, 1) @ x.permute(2, 3, 1, 0),
        "pairs every position with every other",
    ),
    "weights from the image": (lambda x: functional.linear(x.flatten(1).t(), x.flatten(1).t()), "depend on the image"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mixing_images_or_positions_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    assert message in refusal_reason(Layer(function), SIZE)


@pytest.mark.parametrize("missing", ["running_mean", "running_var", "stored"])
def test_batch_norm_needs_both_stored_statistics_and_rest(missing: str) -> None:
    image = Layout.of_images(7, 3, 4, 5)
    arguments = {"input": image, "running_mean": Constant((3,)), "running_var": Constant((3,)), "training": False}
    assert batch_norm(Call("batch_norm", arguments, (image.shape,))) is image
    arguments |= {"training": True} if missing == "stored" else {missing: None}
    with pytest.raises(RuleError, match="statistics of the batch"):
        batch_norm(Call("batch_norm", arguments, (image.shape,)))
