"""Operations that move entries, entry by entry: the boxes they keep, the images they keep apart, what is refused."""

from collections.abc import Callable

import pytest
import torch
from helpers.field_rules import IMAGES, Layer, check_batch_rows, check_field, derive_layout, refusal_reason
from torch import Tensor, nn
from torch.nn import functional

from patchguard.errors import InputError
from patchguard.geometry.rules.layout import (
    Call,
    Constant,
    Layout,
    RuleError,
)
from patchguard.geometry.rules.pointwise import dropout, first_input_elementwise, view
from patchguard.models import wrap

SIZE = (6, 7)


def five(**settings: object) -> nn.Conv2d:
    """A convolution that reads two rows and three columns to either side."""
    return nn.Conv2d(3, 3, (5, 7), padding=(2, 3), **settings)  # type: ignore[arg-type]


def to_lines(x: Tensor) -> Tensor:
    """(batch, channels, rows, columns) as (columns, channels, batch rows)."""
    return x.permute(-1, 1, 0, 2).flatten(2)


def from_lines(lines: Tensor, rows: int) -> Tensor:
    return lines.unflatten(-1, (-1, rows)).permute(2, 1, 3, 0)


KEPT: dict[str, tuple[Callable[..., Tensor], *tuple[nn.Module, ...]]] = {
    "the sum of a wide and a narrow field": (lambda x, f: f(x) + x, five()),
    "the sum of a narrow and a wide field": (lambda x, f: x + f(x), five()),
    "the sum of fields to either side": (lambda x: x[..., 2:, :-3] + x[..., :-2, 3:],),
    "the same sum in the other order": (lambda x: x[..., :-2, 3:] + x[..., 2:, :-3],),
    "a choice between two fields": (lambda x, f: torch.where(x > 0, f(x), -x), five()),
    "channels side by side": (lambda x, f: torch.cat([x, f(x)], 1), five()),
    "channels side by side, counted from the end": (lambda x, f: torch.cat([f(x), x, x], -3), five()),
    "constant channels": (lambda x: torch.cat([torch.zeros_like(x[:, :2]), x], 1),),
    "constant channels behind": (lambda x: torch.cat([x, torch.ones_like(x[:, :1])], 1),),
    "rows of two fields": (lambda x, f: torch.cat([x, f(x)[:, :, :2]], 2), five()),
    "columns of two fields": (lambda x, f: torch.cat([f(x)[..., 4:], x], -1), five()),
    "constant columns first": (lambda x: torch.cat([torch.zeros_like(x[..., :2]), x], 3),),
    "a stack in front": (lambda x, f: torch.stack([x, f(x)], 0).amax(0), five()),
    "a stack behind": (lambda x, f: torch.stack([f(x), x], -1).sum(-1), five()),
    "a stack with a constant": (lambda x: torch.stack([x, torch.ones_like(x)], 2).prod(2),),
    "positions in one dimension": (lambda x: x.flatten(2).view(x.shape[0], 3, *SIZE),),
    "all but the images in one dimension": (lambda x: x.flatten(1).unflatten(1, (3, *SIZE)),),
    "everything in one dimension": (lambda x: x.reshape(-1).view(-1, 3, *SIZE),),
    "images and channels in one dimension": (lambda x: x.reshape(-1, *SIZE).reshape(-1, 3, *SIZE),),
    "split channels": (lambda x, f: f(x).view(x.shape[0], 2, 3, *SIZE)[:, 1], nn.Conv2d(3, 6, 1)),
    "single dimensions anywhere": (lambda x: x.view(1, -1, 3, 1, SIZE[0], SIZE[1], 1).view(-1, 3, *SIZE),),
    "a matrix turned twice": (lambda x: x.flatten(1).t().t().view(-1, 3, *SIZE),),
    "lines and back": (lambda x: from_lines(to_lines(x), SIZE[0]),),
    "dimensions swapped and back": (lambda x: x.transpose(-1, 1).transpose(1, 3),),
    "a repeated channel": (lambda x: x.mean(1, keepdim=True).expand(-1, 4, -1, -1),),
    "a repeated new dimension": (lambda x: x.expand(2, *x.shape).sum(0),),
    "one channel": (lambda x: x[:, 1].unsqueeze(1),),
    "one channel, counted from the end": (lambda x: x.select(-3, -1).unsqueeze(-3),),
    "a dropped channel": (lambda x: x.sum(1, keepdim=True).squeeze(1).unsqueeze(1),),
    "dropped channels by a list": (lambda x: x[:, :1, None].squeeze((1, -3)).unsqueeze(1),),
    "nothing to drop": (lambda x: x.squeeze(2),),
    "one slope": (lambda x, f: f(x), nn.PReLU()),
    "a slope per channel": (lambda x, f: f(x), nn.PReLU(3)),
    "dropout at rest": (lambda x, f: f(x), nn.Dropout()),
}


@pytest.mark.parametrize("name", KEPT)
def test_moved_entries_keep_their_box_and_their_image(name: str) -> None:
    torch.manual_seed(0)
    function, *parts = KEPT[name]
    network = Layer(function, *parts)
    check_field(network, SIZE, exact=name not in ("rows of two fields", "columns of two fields"))
    check_batch_rows(network, SIZE)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a squeeze of everything": (lambda x: x.sum(1, keepdim=True).squeeze(), "drops the images of a batch of one"),
    "a squeeze of the images": (lambda x: x.squeeze(0), "drops the images of a batch of one"),
    "a squeeze of the images, from the end": (lambda x: x.squeeze(-4), "drops the images of a batch of one"),
    "a squeeze of several": (lambda x: x[:, :1].squeeze((1, 0)), "drops the images of a batch of one"),
    "a squeeze of images and a row": (
        lambda x: x[:, :, :1].transpose(1, 2).flatten(0, 1).squeeze(0),
        "drops the images",
    ),
    "a squeeze of a single row": (lambda x: x[:, :, :1].squeeze(2), "computes over all rows"),
    "one image": (lambda x: x[0], "picks one of the images of the batch"),
    "one column": (lambda x: x[..., 2], "picks one of the columns"),
    "images behind each other": (lambda x: torch.cat([x, x], 0), "images of the batch"),
    "constant images": (lambda x: torch.cat([torch.zeros_like(x), x], 0), "images of the batch"),
    "rows behind columns": (
        lambda x: torch.cat([x[..., :6], x[..., :6].transpose(2, 3)], 2),
        "puts rows behind columns",
    ),
    "channels behind rows": (lambda x: torch.cat([x[..., :3, :], x.transpose(1, 2)[:, :3]], 2), "runs over channels"),
    "images among channels": (lambda x: x.reshape(3, -1, *SIZE), "cuts its images of the batch into pieces"),
    "channels among images": (lambda x: x.transpose(0, 1).reshape(-1, 3, *SIZE), "cuts its"),
    "positions among channels": (lambda x: x.reshape(-1, SIZE[0], 3, SIZE[1]), "cuts its"),
    "half of the columns": (lambda x: x.flatten(2)[..., :-2].reshape(-1, 3, 5, 8), "not over rows or columns alone"),
    "a single row for all": (lambda x: x[:, :, :1].expand(-1, -1, 4, -1), "spreads a single position over all 4 rows"),
    "a single row added to all": (lambda x: x + x[:, :, :1], "spreads a single position"),
    "rows with columns": (lambda x: x[..., :6] + x[..., :6].transpose(2, 3), "combines rows with columns"),
    "images with channels": (
        lambda x: x[:, :1] + x[:, :1].transpose(0, 1),
        "combines images of the batch with channels",
    ),
    "every image with every other": (lambda x: x.unsqueeze(0) - x.unsqueeze(1), "combines channels with images"),
    "bits of another type": (lambda x: x.view(torch.int64), "reads the bits of its input as another type"),
    "no entries": (lambda x: x[:, :0].reshape(0, 7), "gives a tensor without entries"),
    "dropout that is on": (lambda x: functional.dropout(x, training=True), "drops entries at random"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_mix_images_or_lose_positions_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    assert message in refusal_reason(Layer(function), SIZE)


def test_a_network_with_such_a_squeeze_has_no_field() -> None:
    with pytest.raises(InputError, match=r"`squeeze` drops the images of a batch of one"):
        wrap(nn.Sequential(nn.Conv2d(3, 4, 3), Layer(lambda x: x.squeeze())), classes=4).field(6, 6)


def test_the_rules_never_count_the_images() -> None:
    # A million images cost nothing: no rule builds what has an entry for each of them.
    layout = derive_layout(Layer(lambda x: functional.pad(x, (1, 1, 0, 0, 0, 0, 0, 0))), SIZE)
    assert layout.shape == (IMAGES, 3, 6, 9)
    huge = Layout.of_images(2**61 - 1, 3, 4, 5)
    assert view(Call("view", {"self": huge}, ((3 * (2**61 - 1), 20),))).shape == (3 * (2**61 - 1), 20)


def test_a_rule_that_changes_the_shape_unasked_is_refused() -> None:
    image = Layout.of_images(7, 3, 4, 5)
    with pytest.raises(RuleError, match="changes the shape"):
        first_input_elementwise(Call("prelu", {"self": image, "weight": Constant((3,))}, ((7, 3, 4, 6),)))
    with pytest.raises(RuleError, match="drops entries at random"):
        dropout(Call("dropout", {"input": image, "p": 0.5, "train": True}, (image.shape,)))
    with pytest.raises(RuleError, match="changes the number of entries"):
        image.view((7, 3, 4, 6))
