from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from patchguard.errors import InputError
from patchguard.geometry.field import Axis
from patchguard.models.ablation import (
    Ablation,
    block_resnet18,
    ds_resnet18,
    ds_resnet50,
    rename_smoothing_checkpoint,
)
from patchguard.models.band_logits import describe_architecture
from patchguard.models.band_plan import Layer, lay_out, plan_bands
from patchguard.models.resnet import BasicBlock, Bottleneck, ResNet, StrideOn


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def as_if_trained(network: nn.Module, seed: int = 0) -> nn.Module:
    """Give every batch normalization statistics of its own, so that no layer maps zeros to zeros."""
    generator = torch.Generator().manual_seed(seed)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.weight.data, layer.running_var):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            for tensor in (layer.bias.data, layer.running_mean):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return network.eval()


def narrow(
    block: type[BasicBlock] | type[Bottleneck],
    layers: tuple[int, ...],
    *,
    small_images: bool = False,
    stride_on: StrideOn = "3x3",
) -> ResNet:
    return ResNet(block, layers, classes=5, in_channels=6, small_images=small_images, width=0.125, stride_on=stride_on)


def random_images(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


class Listener(nn.Module):
    """Not a ResNet: a sum over all pixels in which every pixel has a weight of its own."""

    def forward(self, inputs: Tensor) -> Tensor:
        weights = torch.arange(1, inputs[0].numel() + 1, dtype=inputs.dtype).view(inputs.shape[1:])
        total = (inputs * weights).sum((1, 2, 3))
        return torch.stack([total, -total], dim=1)


def listening(region: str, *, band: int, stride: int = 1, wrap: bool = True) -> Ablation:
    return Ablation(Listener(), classes=2, region=region, band=band, stride=stride, wrap=wrap)


FAST = [
    pytest.param(BasicBlock, (2, 2, 2, 2), False, "3x3", 45, 61, 5, 1, id="resnet18"),
    pytest.param(BasicBlock, (1, 1, 1, 1), False, "3x3", 61, 45, 5, 3, id="resnet10-every-third"),
    pytest.param(Bottleneck, (2, 2, 2, 1), False, "3x3", 33, 97, 7, 2, id="bottleneck"),
    pytest.param(Bottleneck, (2, 2, 2, 1), False, "1x1", 45, 64, 1, 1, id="bottleneck-stride-on-1x1"),
    pytest.param(BasicBlock, (2, 2, 2, 2), True, "3x3", 9, 32, 4, 1, id="small-images"),
    pytest.param(Bottleneck, (1, 2, 1, 1), True, "1x1", 12, 45, 5, 1, id="small-images-bottleneck"),
]


@pytest.mark.parametrize(("block", "layers", "small_images", "stride_on", "height", "width", "band", "stride"), FAST)
@pytest.mark.parametrize("region", ["column", "row"])
def test_fast_bands_equal_full_images(
    block: type[BasicBlock] | type[Bottleneck],
    layers: tuple[int, ...],
    small_images: bool,
    stride_on: StrideOn,
    height: int,
    width: int,
    band: int,
    stride: int,
    region: str,
) -> None:
    network = narrow(block, layers, small_images=small_images, stride_on=stride_on)
    model = Ablation(as_if_trained(network), classes=5, region=region, band=band, stride=stride, chunk=50).double()
    images = random_images(2, 3, height, width).double()
    if region == "row":
        images = images.mT.contiguous()
    assert model.runs_fast(*images.shape[2:])
    full = model.plain_logits(images)
    assert full.std((2, 3)).min() > 1e-3, "bands that all look alike prove nothing"
    torch.testing.assert_close(model(images), full, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("channels_last", [False, True])
def test_fast_bands_equal_full_images_in_single_precision_and_either_memory_format(
    channels_last: bool,
) -> None:
    torch.manual_seed(0)
    model = as_if_trained(ds_resnet50(classes=7, band=9, stride=4, width=0.125))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    images = random_images(1, 3, 40, 129)
    assert model.runs_fast(40, 129)
    full = model.plain_logits(model.normalize(images))
    assert (model(images) - full).abs().max() < 1e-4 * full.abs().max()


def test_an_answer_does_not_depend_on_the_chunk() -> None:
    model = as_if_trained(ds_resnet18(width=0.125)).double()
    images = random_images(3, 3, 16, 24).double()
    results = []
    for chunk in (1, 2, 7, 1000):
        model.chunk = chunk
        results += [model(images), model.plain_logits(images)]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-10, atol=1e-10)


def test_gradients_of_fast_bands_equal_those_of_full_images() -> None:
    model = as_if_trained(ds_resnet18(width=0.125, stride=3)).double()
    gradients = []
    with torch.enable_grad():
        for way in (model.local_logits, model.plain_logits):
            images = random_images(1, 3, 12, 32).double().requires_grad_()
            logits = way(images)
            (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
            gradients.append((images.grad, model.backbone.conv1.weight.grad))
            model.zero_grad()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-8, atol=1e-8)


def test_with_batch_statistics_bands_are_evaluated_in_full() -> None:
    model = ds_resnet18(width=0.125)
    assert not model.train().runs_fast(32, 32)
    assert model.eval().runs_fast(32, 32)
    model.fast = False
    assert not model.runs_fast(32, 32)
    assert not block_resnet18(width=0.125).eval().runs_fast(32, 32)


@pytest.mark.parametrize("fast", [False, True])
def test_only_the_bands_that_show_a_column_move_with_it(fast: bool) -> None:
    model = as_if_trained(ds_resnet18(classes=3, band=5, stride=2, width=0.125))
    model.fast = fast
    height, width = 6, 25
    images = random_images(1, 3, height, width)
    before = model(images)
    assert before.shape == (1, 3, 1, 13)
    columns = model.field(height, width).columns
    assert columns.wrap
    for column in range(width):
        changed = images.clone()
        changed[..., column] = torch.nan if column % 2 else -1e3
        moved = (model(changed) != before).any(dim=1)[0, 0]
        assert moved.tolist() == columns.touched_cells(column, 1).tolist()


@pytest.mark.parametrize("region", ["column", "row", "block"])
@pytest.mark.parametrize(("stride", "wrap"), [(1, True), (3, True), (2, False)])
def test_the_field_is_what_moves_when_a_pixel_changes(region: str, stride: int, wrap: bool) -> None:
    model = listening(region, band=4, stride=stride, wrap=wrap).double()
    height, width = 7, 9
    images = random_images(1, 3, height, width).double()
    field = model.field(height, width)
    before = model(images)
    assert before.shape[2:] == field.grid
    for row in range(height):
        for column in range(width):
            changed = images.clone()
            changed[0, :, row, column] += 0.25
            moved = (model(changed) != before).any(dim=1)[0]
            assert moved.tolist() == field.touched_cells((row, column, 1, 1)).tolist()


def test_a_band_past_the_border_goes_on_at_the_first_column() -> None:
    model = listening("column", band=3)
    images = random_images(1, 3, 2, 5)
    inputs = model.ablate(images, torch.tensor([[0, 4]]))
    assert torch.equal(inputs[0, :3, :, [4, 0, 1]], images[0, :, :, [4, 0, 1]])
    assert torch.equal(inputs[0, 3:, :, [4, 0, 1]], 1 - images[0, :, :, [4, 0, 1]])
    assert not inputs[..., [2, 3]].any()


def test_x_and_one_minus_x_are_of_the_normalized_image() -> None:
    model = ds_resnet50(classes=2, band=2, width=0.05)
    images = random_images(1, 3, 2, 4)
    inputs = model.ablate(images, torch.tensor([[0, 1]]))
    torch.testing.assert_close(inputs[:, :3, :, 1:3], model.normalize(images)[..., 1:3])
    torch.testing.assert_close(inputs[:, 3:, :, 1:3], 1 - model.normalize(images)[..., 1:3])


def test_blocks_have_one_cell_per_start_and_only_wrap_if_told() -> None:
    circle = block_resnet18(band=12, stride=4, width=0.05).field(32, 32)
    assert circle.grid == (8, 8)
    assert circle.rows == circle.columns
    assert circle.rows == Axis(tuple(range(0, 32, 4)), (12,) * 8, 32, wrap=True)
    line = block_resnet18(band=12, stride=4, wrap=False, width=0.05).field(32, 40)
    assert line.grid == (6, 8)
    assert not line.rows.wrap
    assert not line.columns.runs_past_the_end


def test_a_block_ensemble_is_the_backbone_applied_to_each_block() -> None:
    model = as_if_trained(block_resnet18(classes=4, band=3, stride=4, width=0.05, small_images=True)).double()
    model.chunk = 5
    images = random_images(2, 3, 8, 12).double()
    logits = model(images)
    assert logits.shape == (2, 4, 2, 3)
    for row in range(2):
        for column in range(3):
            inputs = model.ablate(images, torch.tensor([[4 * row, 4 * column]] * 2))
            torch.testing.assert_close(logits[:, :, row, column], model.backbone(inputs))


def test_training_inputs_show_one_region_each_and_reach_every_cell() -> None:
    model = listening("column", band=3, stride=2)
    images = random_images(400, 3, 4, 10)
    inputs = model.random_region(images, torch.Generator().manual_seed(3))
    shown = inputs[:, 0].ne(0).any(dim=1)
    regions = {tuple(row.nonzero().flatten().tolist()) for row in shown}
    assert regions == {(0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (0, 8, 9)}
    again = model.random_region(images, torch.Generator().manual_seed(3))
    assert torch.equal(inputs, again)


def test_a_training_input_is_what_some_cell_sees() -> None:
    model = as_if_trained(ds_resnet18(classes=3, width=0.125)).double()
    images = random_images(4, 3, 8, 12).double()
    drawn = model.backbone(model.random_region(images, torch.Generator().manual_seed(5)))
    distance = (model(images)[:, :, 0] - drawn[:, :, None]).abs().amax(dim=1)
    assert distance.amin(dim=1).max() < 1e-10


def test_public_cifar_checkpoints_load_strictly() -> None:
    model = as_if_trained(ds_resnet18(width=0.125))
    public = {}
    for name, tensor in model.backbone.state_dict().items():
        public["module." + name.replace("downsample", "shortcut").replace("fc.", "linear.")] = tensor
    other = ds_resnet18(width=0.125).eval()
    other.load_state_dict(rename_smoothing_checkpoint({"net": public, "acc": 83.1, "epoch": 199}), strict=True)
    images = random_images(1, 3, 8, 32)
    assert torch.equal(other(images), model(images))


@pytest.mark.parametrize("preset", [ds_resnet18, ds_resnet50, block_resnet18])
def test_a_preset_is_rebuilt_from_its_config(preset: type[Ablation]) -> None:
    model = preset(classes=3, band=6, stride=5, wrap=False, width=0.0625)
    again = preset(**model.config())
    assert model.name == preset.__name__
    assert again.config() == model.config()
    assert again.field(30, 31) == model.field(30, 31)
    again.load_state_dict(model.state_dict(), strict=True)


def test_multiply_adds_of_ds_resnet50_fall_by_the_published_geometry() -> None:
    with torch.device("meta"):
        model = ds_resnet50()
    cost = model.cost(299, 299)
    assert cost is not None
    assert cost.plain / 299 == pytest.approx(7.84e9, rel=1e-3)
    assert cost.least < cost.fast
    assert cost.plain / cost.fast > 1.95
    assert cost.plain / cost.least == pytest.approx(2.16, abs=0.01)


def test_bands_that_leave_little_empty_are_not_worth_a_strip() -> None:
    model = ds_resnet18(band=20, width=0.125).eval()
    assert not model.runs_fast(32, 32)
    assert listening("column", band=3).cost(8, 8) is None


def test_changed_columns_are_those_that_read_a_changed_column() -> None:
    for layer in (Layer(7, 2, 3), Layer(3, 2, 1), Layer(3, 1, 1), Layer(1, 2, 0), Layer(1, 1, 0)):
        for size in (9, 10):
            for low in range(size):
                for high in range(low, size):
                    expected = [
                        output
                        for output in range(layer.outputs(size))
                        for first in [output * layer.stride - layer.padding]
                        if first <= high and first + layer.kernel > low
                    ]
                    (intervals,) = layer.changed([[(low, high)]], size)
                    assert [c for start, stop in intervals for c in range(start, stop + 1)] == expected


def test_a_strip_keeps_intervals_apart_that_the_border_cut() -> None:
    strip = lay_out([[(0, 2)], [(4, 5)], [(2, 3)], [(0, 1), (4, 5)]], 6)
    # The gap is column 6. Right-cut intervals come before left-cut ones and share a gap with them.
    assert strip.column.tolist() == [2, 3, 4, 5, 6, 0, 1, 2, 4, 5, 6, 0, 1, 6]
    assert strip.band[[0, 2, 5, 8, 11]].tolist() == [2, 1, 0, 3, 3]
    assert strip.column[strip.zero] == 6


def test_a_plan_counts_what_an_evaluation_multiplies() -> None:
    network = narrow(Bottleneck, (1, 1, 1, 1))
    starts = tuple(range(0, 61, 4))
    plan = plan_bands(describe_architecture(network), 61, 45, starts, 5)
    model = Ablation(network.eval(), classes=5, band=5, stride=4, chunk=100)
    images = random_images(1, 3, 45, 61)
    empty_image = plan.plain // len(starts) - 5 * network.fc.in_features
    for way, expected in ((model.plain_logits, plan.plain), (model.local_logits, plan.fast + empty_image)):
        with FlopCounterMode(display=False) as counter:
            way(images)
        assert counter.get_total_flops() == 2 * expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"region": "diagonal"}, "`region` must be 'column', 'row' or 'block'; got 'diagonal'"),
        ({"band": 0}, "`band` must be a whole number of at least 1; got 0"),
        ({"stride": True}, "`stride` must be a whole number"),
        ({"chunk": -1}, "`chunk` must be a whole number"),
        ({"classes": 0}, "`classes` must be a whole number"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Ablation(Listener(), **{"classes": 2, "band": 3, **settings})


def test_a_backbone_for_other_channels_or_classes_is_refused() -> None:
    network = ResNet(BasicBlock, (1, 1, 1, 1), classes=2, width=0.05)
    with pytest.raises(InputError, match="six channels"):
        Ablation(network, classes=2, band=3)
    with pytest.raises(InputError, match="must be those of `backbone`, 5; got 2"):
        Ablation(narrow(BasicBlock, (1, 1, 1, 1)), classes=2, band=3)


@pytest.mark.parametrize("region", ["column", "row", "block"])
def test_an_image_no_larger_than_a_region_is_refused(region: str) -> None:
    model = listening(region, band=6)
    assert model(random_images(1, 3, *model.smallest_input())).shape[0] == 1
    with pytest.raises(InputError, match="got 6 x 6"):
        model(random_images(1, 3, 6, 6))
    with pytest.raises(InputError, match="got 6 x 6"):
        model.random_region(random_images(1, 3, 6, 6))


def test_a_checkpoint_that_holds_no_tensors_is_refused() -> None:
    with pytest.raises(InputError, match="mapping from names to tensors"):
        rename_smoothing_checkpoint({"net": {"conv1.weight": [1.0]}})
