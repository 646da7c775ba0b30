import pytest
import torch
from helpers.pixel_influence import build_random, changed_cells, expected_cells, intervals, random_image

from patchguard.errors import InputError
from patchguard.models.resnet import BasicBlock, ResNet, build_resnet, resnet18, resnet50


def torchvision_shapes(depth: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of torchvision's ResNet-18 or ResNet-50, as (kernel, widening) of each convolution."""
    blocks, kernels = ((2, 2, 2, 2), (3, 3)) if depth == 18 else ((3, 4, 6, 3), (1, 3, 1))
    expansion = 1 if depth == 18 else 4
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, norm: str, outputs: int, inputs: int, kernel: int) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs, kernel, kernel)
        for key in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{norm}.{key}"] = (outputs,)
        shapes[f"{norm}.num_batches_tracked"] = ()

    convolution("conv1", "bn1", 64, 3, 7)
    inputs = 64
    for stage, count in enumerate(blocks):
        channels = 64 << stage
        for block in range(count):
            at, before = f"layer{stage + 1}.{block}", inputs
            for index, kernel in enumerate(kernels, start=1):
                after = expansion * channels if index == len(kernels) else channels
                convolution(f"{at}.conv{index}", f"{at}.bn{index}", after, before, kernel)
                before = after
            if block == 0 and (stage > 0 or depth == 50):
                convolution(f"{at}.downsample.0", f"{at}.downsample.1", before, inputs, 1)
            inputs = before
    shapes |= {"fc.weight": (1000, inputs), "fc.bias": (1000,)}
    return shapes


@pytest.mark.parametrize(("factory", "depth"), [(resnet18, 18), (resnet50, 50)])
def test_the_backbone_has_the_names_and_shapes_of_torchvision(factory, depth):
    with torch.device("meta"):
        state = factory().backbone.state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == torchvision_shapes(depth)


@pytest.mark.parametrize(("depth", "millions"), [(18, 11.689512), (50, 25.557032)])
def test_the_published_numbers_of_parameters_come_out(depth, millions):
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in build_resnet(depth).parameters()) == round(millions * 1e6)


@pytest.mark.parametrize("factory", [resnet18, resnet50])
@pytest.mark.parametrize(("small_images", "size"), [(True, (32, 24)), (False, (96, 64))])
def test_the_mean_of_local_logits_equals_the_global_logits(factory, small_images, size):
    model = build_random(factory, classes=5, width=0.1, small_images=small_images)
    images = random_image(*size, batch=2)
    with torch.inference_mode():
        local_logits = model(images)
        stride = 8 if small_images else 32
        assert local_logits.shape == (2, 5, size[0] // stride, size[1] // stride)
        torch.testing.assert_close(local_logits.mean((2, 3)), model.backbone(model.normalize(images)))


@pytest.mark.parametrize(
    ("factory", "settings", "field"),
    [
        # 1 + sum (kernel - 1) * stride before: 3x3 stem 2, then 4 * 2, 2 + 3 * 4, 4 + 3 * 8, 8 + 3 * 16.
        (resnet18, {}, 109),
        # One 3x3 per block: 2, then 3 * 2, 2 + 3 * 4, 4 + 5 * 8, 8 + 2 * 16.
        (resnet50, {}, 107),
        # The stride comes before the first 3x3 of a stage: 2, then 3 * 2, 4 * 4, 6 * 8, 3 * 16.
        (resnet50, {"stride_on": "1x1"}, 121),
    ],
)
def test_a_pixel_moves_exactly_the_cells_whose_field_holds_it(factory, settings, field):
    model = build_random(factory, classes=3, width=0.1, small_images=True, **settings)
    # Every 3x3 convolution is padded by one pixel, so that cell u is centered on pixel 8u.
    for pixel in [(0, 0), (64, 80), (60, 159)]:
        seen = changed_cells(model, 128, 160, pixel)
        assert (seen == expected_cells(seen.shape, pixel, size=field, stride=8, first=-(field // 2))).all(), pixel
        assert not seen.all()


@pytest.mark.slow
def test_the_traced_field_agrees_with_the_arithmetic():
    columns = resnet18(classes=2, width=0.05, small_images=True).field(8, 160).columns
    expected = intervals(20, 160, size=109, stride=8, first=-54)
    assert list(zip(columns.starts, columns.lengths, strict=True)) == expected


def test_the_stride_can_sit_on_the_first_1x1_convolution():
    first = resnet50(classes=2, width=0.05, stride_on="1x1").backbone.layer2[0]
    usual = resnet50(classes=2, width=0.05).backbone.layer2[0]
    assert (first.conv1.stride, first.conv2.stride) == ((2, 2), (1, 1))
    assert (usual.conv1.stride, usual.conv2.stride) == ((1, 1), (2, 2))


def test_a_backbone_takes_six_channels():
    network = build_resnet(18, classes=4, in_channels=6, small_images=True, width=0.1).eval()
    inputs = torch.rand(2, 6, 32, 32)
    with torch.inference_mode():
        assert network.features(inputs).shape == (2, 51, 4, 4)
        assert torch.equal(network.logits(inputs), network(inputs))
        assert network(inputs).shape == (2, 4)


def test_an_unknown_depth_is_refused():
    with pytest.raises(InputError, match="`depth` must be 18 or 50; got 34"):
        build_resnet(34)


def test_a_basic_block_has_no_1x1_convolution_to_carry_the_stride():
    with pytest.raises(InputError, match="must be '3x3' for blocks without a 1x1 convolution"):
        ResNet(BasicBlock, (1, 1, 1, 1), stride_on="1x1")


def test_an_image_smaller_than_one_stride_is_refused():
    with pytest.raises(InputError, match="at least 32 x 32 pixels here; got 31 x 64"):
        resnet18(classes=2, width=0.05)(torch.rand(1, 3, 31, 64))
