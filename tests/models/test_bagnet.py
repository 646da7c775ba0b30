import pytest
import torch
from helpers.pixel_influence import build_random, changed_cells, expected_cells, intervals, random_image

from patchguard.errors import InputError
from patchguard.models.bagnet import BagNet, bagnet9, bagnet17, bagnet33

FAMILY = [(bagnet9, 9), (bagnet17, 17), (bagnet33, 33)]


def public_shapes(kernels: tuple[int, int, int, int], classes: int = 1000) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a public BagNet checkpoint; `kernels` is that of the first block in each stage."""
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, outputs: int, inputs: int, kernel: int = 1) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs, kernel, kernel)

    def batch_norm(name: str, channels: int) -> None:
        for key in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.{key}"] = (channels,)
        shapes[f"{name}.num_batches_tracked"] = ()

    convolution("conv1", 64, 3)
    convolution("conv2", 64, 64, 3)
    batch_norm("bn1", 64)
    inputs = 64
    stages = zip((3, 4, 6, 3), (64, 128, 256, 512), kernels, strict=True)
    for stage, (blocks, middle, kernel) in enumerate(stages, start=1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            convolution(f"{at}.conv1", middle, inputs)
            convolution(f"{at}.conv2", middle, middle, kernel if block == 0 else 1)
            convolution(f"{at}.conv3", 4 * middle, middle)
            for key, channels in (("bn1", middle), ("bn2", middle), ("bn3", 4 * middle)):
                batch_norm(f"{at}.{key}", channels)
            if block == 0:
                convolution(f"{at}.downsample.0", 4 * middle, inputs)
                batch_norm(f"{at}.downsample.1", 4 * middle)
            inputs = 4 * middle
    shapes |= {"fc.weight": (classes, inputs), "fc.bias": (classes,)}
    return shapes


@pytest.mark.parametrize(
    ("factory", "kernels"),
    [(bagnet9, (3, 3, 1, 1)), (bagnet17, (3, 3, 3, 1)), (bagnet33, (3, 3, 3, 3))],
)
def test_names_and_shapes_are_those_of_the_public_checkpoints(factory, kernels):
    with torch.device("meta"):
        model = factory()
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == public_shapes(kernels)


@pytest.mark.parametrize("counters", [True, False])
def test_a_public_state_dict_loads_strictly(counters):
    # Checkpoints older than PyTorch 0.4.1 have no batch counters.
    state = {
        key: torch.full(shape, 0.5)
        for key, shape in public_shapes((3, 3, 3, 1), classes=4).items()
        if counters or not key.endswith("num_batches_tracked")
    }
    model = bagnet17(classes=4)
    assert model.load_state_dict(state, strict=True).missing_keys == []
    assert model.layer3[0].conv2.weight.unique().tolist() == [0.5]


def test_a_state_dict_with_a_stray_tensor_is_refused():
    model = bagnet17(classes=4, width=0.1)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"head.weight\""):
        model.load_state_dict(model.state_dict() | {"head.weight": torch.zeros(1)})


def test_bagnet17_at_224_pixels_has_26_by_26_cells():
    with torch.inference_mode():
        assert bagnet17(classes=5, width=0.05).eval()(torch.rand(2, 3, 224, 224)).shape == (2, 5, 26, 26)


@pytest.mark.parametrize(("factory", "field"), FAMILY)
def test_the_number_of_cells_follows_each_axis(factory, field):
    model = build_random(factory, classes=3, width=0.05)
    with torch.inference_mode():
        for height, width in ((field, field + 7), (field + 8, field), (field + 21, field + 50)):
            cells = ((height - field) // 8 + 1, (width - field) // 8 + 1)
            assert model(random_image(height, width)).shape == (1, 3, *cells)


@pytest.mark.parametrize(("factory", "field"), FAMILY)
def test_a_pixel_moves_exactly_the_cells_whose_field_holds_it(factory, field):
    model = build_random(factory, classes=3, width=0.1)
    height, width = field + 29, field + 34  # 5 rows and 2 columns at the far border are read by no cell
    pixels = [(0, 0), (7, 8), (field - 1, field), (field, field - 1), (height - 6, width - 3), (20, 3)]
    for pixel in pixels:
        seen = changed_cells(model, height, width, pixel)
        assert (seen == expected_cells(seen.shape, pixel, size=field, stride=8, first=0)).all(), pixel
    for pixel in [(height - 5, 0), (0, width - 2), (height - 1, width - 1)]:
        assert not changed_cells(model, height, width, pixel).any(), pixel


@pytest.mark.slow
def test_the_traced_field_agrees_with_the_arithmetic():
    field = bagnet17(classes=2, width=0.05).field(46, 51)
    for axis, count, pixels in ((field.rows, 4, 46), (field.columns, 5, 51)):
        expected = intervals(count, pixels, size=17, stride=8, first=0)
        assert list(zip(axis.starts, axis.lengths, strict=True)) == expected


def test_a_cell_of_a_large_image_equals_the_cell_of_its_crop():
    model = build_random(bagnet17, classes=3, width=0.1)
    image = random_image(41, 57)
    with torch.inference_mode():
        whole, crop = model(image), model(image[..., 16:33, 32:49])
    torch.testing.assert_close(whole[..., 2, 4], crop[..., 0, 0])


def test_the_residual_enters_at_the_near_corner_of_the_field():
    # With f silenced only the cropped shortcuts are left: cell u then reads the stem at 8u, that is 3 pixels.
    model = build_random(bagnet33, classes=3, width=0.1)
    for name, layer in model.named_modules():
        if name.endswith("bn3"):
            layer.weight.data.zero_()
    for pixel in [(8, 16), (10, 18), (11, 16), (15, 15)]:
        seen = changed_cells(model, 49, 57, pixel)
        assert (seen == expected_cells(seen.shape, pixel, size=3, stride=8, first=0)).all(), pixel


@pytest.mark.parametrize(("height", "width"), [(16, 40), (40, 16)])
def test_an_image_smaller_than_the_field_is_refused(height, width):
    model = bagnet17(classes=2, width=0.05)
    with pytest.raises(InputError, match=rf"at least 17 x 17 pixels here; got {height} x {width}"):
        model(torch.rand(1, 3, height, width))


def test_an_unknown_field_is_refused():
    with pytest.raises(InputError, match="must be 9, 17 or 33 pixels; got 16"):
        BagNet(field=16)


@pytest.mark.parametrize("width", [0.0, -1.0, float("nan")])
def test_a_width_that_is_not_positive_is_refused(width):
    with pytest.raises(InputError, match="`width` must be a positive multiplier"):
        bagnet9(width=width)


@pytest.mark.parametrize("classes", [0, -3, True])
def test_a_class_count_that_is_no_count_is_refused(classes):
    with pytest.raises(InputError, match="`classes` must be a whole number"):
        bagnet9(classes=classes)
