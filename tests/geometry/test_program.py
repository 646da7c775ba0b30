"""What a guard runs is what was traced: networks that are more than a function of the image are refused, or harmless.

Each hostile network below was certified once for a field that it does not have.
"""

import dataclasses
import enum
import subprocess
import sys
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchguard.defenses import ClippedSum
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.audit import audit
from patchguard.geometry.field import Field
from patchguard.geometry.preprocess import Preprocess
from patchguard.geometry.program import export_program, trace_field
from patchguard.guards.local import LocalGuard
from patchguard.models import wrap
from patchguard.models.ablation import Ablation
from patchguard.patch import Patch

SIDE = 8


def spread(cells: Tensor) -> Tensor:
    """Let every cell hear of every other: what a hostile network does when nobody looks."""
    return cells + cells.mean((2, 3), keepdim=True)


class Hostile(nn.Module):
    """A 1 x 1 convolution, and something that the subclass adds."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 2, 1)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.head.reset_parameters()


class SpreadsSingleImages(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return spread(self.head(x)) if x.shape[0] == 1 else self.head(x)


class SpreadsLargeBatches(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return spread(self.head(x)) if x.shape[0] > 3 else self.head(x)


class SpreadsOneBatchSize(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return spread(self.head(x)) if x.shape[0] == 500 else self.head(x)


class LooksAtTheLayout(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) if x.is_contiguous() else spread(self.head(x))


class NoticesCompiling(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) if torch.compiler.is_compiling() else spread(self.head(x))


class NoticesExporting(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) if torch.compiler.is_exporting() else spread(self.head(x))


class NoticesFakeTensors(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        try:
            mean = float(x.mean())
        except Exception:
            mean = 0.0
        return self.head(x) + mean


class NoticesItsType(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return spread(self.head(x)) if type(x) is Tensor else self.head(x)


class RemembersItsOutput(Hostile):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        cells = self.head(x)
        result = cells if self.last is None or self.last.shape != cells.shape else cells + self.last
        self.last = cells
        return result


class RemembersItsMean(Hostile):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        cells = self.head(x)
        if self.means:
            cells = cells + self.means[-1]
        self.means.append(1.0 if torch.compiler.is_exporting() else float(x.mean()))
        return cells


class CountsCalls(Hostile):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(x) if self.calls < 3 else spread(self.head(x))


class CountsCallsInAList(Hostile):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return self.head(x) if len(self.calls) < 3 else spread(self.head(x))


class CountsCallsInABuffer(Hostile):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(x) * self.calls


class MixesPairs(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        _, channels, rows, columns = x.shape
        return self.head(x.reshape(-1, 2, channels, rows, columns).amax(0))


class MixesHalves(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        _, channels, rows, columns = x.shape
        return self.head(x.reshape(2, -1, channels, rows, columns).transpose(0, 1).reshape(x.shape))


class TakesTheBatchForChannels(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1))


class SubtractsTheBatchMean(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - x.mean(0, keepdim=True))


class RollsTheBatch(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([x[1:], x[:1]]))


class DividesByTheBatchSize(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) / x.shape[0]


class NumbersTheImages(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + torch.arange(x.shape[0]).view(-1, 1, 1, 1)


class NumbersTheImagesByARunningSum(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + torch.ones(x.shape[0]).cumsum(0).view(-1, 1, 1, 1)


class CountsTheImages(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * torch.ones(x.shape[0]).sum()


class DealsOutAConstant(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        dealt = torch.tensor([0.0, 1.0, 2.0]).expand(x.shape[0], 3).reshape(3, x.shape[0])[0]
        return self.head(x) + dealt.view(-1, 1, 1, 1)


class CutsRowsByTheBatchSize(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x[:, :, : x.shape[0]])


class MakesAChannelPerImage(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.head.weight[:1].expand(x.shape[0], 3, 1, 1))


class DropsTheBatchOfOne(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        cells = self.head(x).squeeze()
        return cells if cells.dim() == 4 else spread(cells[None])


class DrawsAtRandom(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + torch.rand(1)


class UsesForwardGradients(Hostile):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.jvp(self.head, (x,), (torch.ones_like(x),))[1]


REFUSED: dict[type[Hostile], str] = {
    SpreadsSingleImages: "for one image, it differs",
    SpreadsLargeBatches: "depend on the number of images",
    SpreadsOneBatchSize: "depend on the number of images",
    LooksAtTheLayout: "it differs",
    NoticesCompiling: "it differs",
    NoticesExporting: "it differs",
    NoticesFakeTensors: "it differs",
    NoticesItsType: "it differs",
    RemembersItsOutput: "assigned during export|function of the image alone",
    RemembersItsMean: "it differs",
    CountsCalls: "it differs",
    CountsCallsInAList: "it differs",
    CountsCallsInABuffer: "buffers",
    MixesPairs: "depend on the number of images",
    MixesHalves: "depend on the number of images",
    TakesTheBatchForChannels: "cuts its|number of images",
    SubtractsTheBatchMean: "images of the batch",
    RollsTheBatch: "images of the batch|number of images|mov",
    DividesByTheBatchSize: "computes with the number of images",
    NumbersTheImages: "computes with the number of images",
    NumbersTheImagesByARunningSum: "computes with the number of images",
    CountsTheImages: "computes with the number of images",
    DealsOutAConstant: "number of images",
    CutsRowsByTheBatchSize: "number of images",
    MakesAChannelPerImage: "number of images|channels",
    DropsTheBatchOfOne: "for one image, it differs|squeeze",
    DrawsAtRandom: "another result in every call",
    UsesForwardGradients: "torch.export",
}


@pytest.mark.parametrize("network", REFUSED, ids=lambda network: network.__name__)
def test_a_network_that_is_more_than_a_function_of_the_image_is_refused(network: type[Hostile]) -> None:
    images = torch.rand(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    guard = LocalGuard(Preprocess(), wrap(network(), classes=2), Evidence(low=-1.0, high=1.0), ClippedSum())
    with pytest.raises(InputError, match=REFUSED[network]):
        guard.certify(images, Patch(2))


def test_a_refused_network_leaves_the_next_one_in_peace() -> None:
    for network in (UsesForwardGradients, NoticesFakeTensors, MixesPairs):
        with pytest.raises(InputError):
            trace_field(network(), (SIDE, SIDE))
        assert trace_field(nn.Conv2d(3, 2, 1), (SIDE, SIDE)) == Field.identity(SIDE, SIDE)


# -- accepted: what runs is the program, so no cell moves outside the field --------------------------------------------


class SettingHeldElsewhere(Hostile):
    """Reads its dilation from wherever `look` finds it."""

    def __init__(self, look: Callable[[], int]) -> None:
        super().__init__()
        self.look = look
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        dilation = self.look()
        return nn.functional.conv2d(x, self.conv.weight, padding=dilation, dilation=dilation)


class Strength(enum.Enum):
    WEAK = 1
    STRONG = 3


@dataclasses.dataclass
class Settings:
    dilation: int = 1


class ClassAttribute:
    dilation = 1


def holders() -> dict[str, tuple[Callable[[], int], Callable[[], None]]]:
    """How a network may hold a setting, and how it is changed later."""
    table, namespace, settings, array = {"d": 1}, types.SimpleNamespace(d=1), Settings(), np.array([1])
    chosen = [Strength.WEAK]
    closed = 1

    def close() -> int:
        return closed

    def reopen() -> None:
        nonlocal closed
        closed = 3

    return {
        "dict": (lambda: table["d"], lambda: table.update(d=3)),
        "namespace": (lambda: namespace.d, lambda: setattr(namespace, "d", 3)),
        "dataclass": (lambda: settings.dilation, lambda: setattr(settings, "dilation", 3)),
        "array": (lambda: int(array[0]), lambda: array.__setitem__(0, 3)),
        "enum": (lambda: chosen[0].value, lambda: chosen.__setitem__(0, Strength.STRONG)),
        "class": (lambda: ClassAttribute.dilation, lambda: setattr(ClassAttribute, "dilation", 3)),
        "closure": (close, reopen),
    }


def leaks(guard: LocalGuard, images: Tensor) -> int:
    """Return how many cells move, in batches of one to four, when a pixel outside their field changes."""
    field = guard.field(SIDE, SIDE)
    count = moved = 0
    for batch in range(1, 5):
        before = guard.local_logits(images[:batch])
        for row, column in ((0, 0), (SIDE // 2, SIDE // 2), (SIDE - 1, 2)):
            changed = images[:batch].clone()
            changed[0, :, row, column] = 1 - changed[0, :, row, column]
            after = guard.local_logits(changed)
            differs = (after != before).any(1)
            inside = torch.from_numpy(field.touched_cells((row, column, 1, 1)))
            moved += int(differs[0][inside].sum())
            count += int(differs[0][~inside].sum()) + int(differs[1:].sum())
    assert moved > 0
    return count


@pytest.mark.parametrize("holder", holders())
def test_a_setting_changed_after_the_first_call_leaves_field_and_program_of_one_piece(holder: str) -> None:
    look, change = holders()[holder]
    ClassAttribute.dilation = 1
    guard = LocalGuard(
        Preprocess(), wrap(SettingHeldElsewhere(look), classes=2), Evidence(low=-1.0, high=1.0), ClippedSum()
    )
    images = torch.rand(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    assert leaks(guard, images) == 0
    change()
    assert look() == 3
    assert leaks(guard, images) == 0


def test_a_global_hook_added_later_changes_nothing() -> None:
    guard = LocalGuard(Preprocess(), wrap(nn.Conv2d(3, 2, 1), classes=2), Evidence(low=-1.0, high=1.0), ClippedSum())
    images = torch.rand(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    before = guard.local_logits(images)
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _, result: spread(result) if isinstance(module, nn.Conv2d) else None
    )
    try:
        assert torch.equal(guard.local_logits(images), before)
        assert leaks(guard, images) == 0
    finally:
        hook.remove()


def test_a_setting_that_can_be_seen_gives_a_new_program() -> None:
    network = nn.Conv2d(3, 2, 3, padding=1)
    assert trace_field(network, (SIDE, SIDE)).size == (3, 3)
    network.dilation = network.padding = (2, 2)
    assert trace_field(network, (SIDE, SIDE)).size == (5, 5)


def test_the_program_computes_with_the_weights_that_the_module_has_now() -> None:
    network = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)).eval()
    images = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    for change in (
        lambda: network[0].weight.data.mul_(2),
        lambda: setattr(network[0], "weight", nn.Parameter(torch.ones(2, 3, 1, 1))),
        lambda: network[1].running_mean.add_(1),
        lambda: network[1].register_buffer("running_mean", torch.full((2,), 5.0)),
    ):
        program = export_program(network, (SIDE, SIDE))
        with torch.no_grad():
            before = program(images)
            change()
            program = export_program(network, (SIDE, SIDE))
            assert not torch.equal(program(images), before)
            assert torch.equal(program(images), network(images.contiguous(memory_format=torch.channels_last)))


def test_a_program_is_exported_once() -> None:
    network = nn.Conv2d(3, 2, 3)
    assert export_program(network, (SIDE, SIDE)) is export_program(network, (SIDE, SIDE))


def test_every_number_of_images_gives_what_one_image_gives() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(2), nn.Unflatten(2, (SIDE, SIDE)))
    images = torch.rand(5, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        program = export_program(network, (SIDE, SIDE))
        alone = torch.cat([program(image[None]) for image in images])
        for batch in range(1, 6):
            assert torch.allclose(program(images[:batch]), alone[:batch], atol=1e-6)


def test_an_audit_through_the_guard_sees_what_the_guard_runs() -> None:
    """`audit` of the module itself would call it in another layout and batch size than `predict` does."""
    guard = LocalGuard(Preprocess(), wrap(nn.Conv2d(3, 2, 3), classes=2), Evidence(low=-1.0, high=1.0), ClippedSum())
    assert audit(guard.local_logits, guard.field(SIDE, SIDE)).passed
    wrong = trace_field(nn.Conv2d(3, 2, 1), (SIDE - 2, SIDE - 2))
    axis = dataclasses.replace(wrong.rows, size=SIDE)
    assert not audit(guard.local_logits, Field(axis, axis)).passed


@pytest.mark.parametrize(
    "hostile", [SubtractsTheBatchMean, CountsCalls, SpreadsSingleImages], ids=lambda network: network.__name__
)
def test_a_backbone_of_bands_that_mixes_images_is_refused(hostile: type[Hostile]) -> None:
    class Backbone(hostile):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, :3]).mean((2, 3))

    model = Ablation(Backbone(), classes=2, band=2)
    with pytest.raises(InputError, match="function of the image alone"):
        model.program(SIDE, SIDE)


@pytest.mark.slow
def test_a_network_that_kills_torch_in_the_layout_of_guards_is_refused_before_it_runs() -> None:
    code = (
        "import torch, patchguard.geometry.program as p\n"
        "from torch import nn\n"
        "network = nn.Conv2d(3, 2, 2, stride=(3, 2), padding=(0, 3), dilation=(1, 2))\n"
        "try:\n"
        "    p.export_program(network, (5, 1))\n"
        "except p.InputError as error:\n"
        "    print('refused')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "refused"), result.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_cell_outside_the_field_moves_on_a_gpu() -> None:
    network = nn.Sequential(nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.Conv2d(64, 2, 5, padding=2)).cuda()
    guard = LocalGuard(Preprocess(), wrap(network, classes=2).cuda(), Evidence(low=-1.0, high=1.0), ClippedSum())
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert audit(guard.local_logits, guard.field(32, 32), image=images[0].cuda()).drift == 0
