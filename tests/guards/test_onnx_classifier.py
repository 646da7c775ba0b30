"""`pg.defend` around ONNX files: onnxruntime computes, the masks and the proof are the same."""

from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import patchguard as pg
from patchguard.errors import InputError
from patchguard.patch import Patch

SIDE, CLASSES = 12, 3
WEIGHT = 20 * torch.eye(CLASSES)


def write_network(path: Path) -> Path:
    """Write a network whose scores are 20 times the mean of each color."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["images"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weight"], ["scores"]),
    ]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, SIDE, SIDE])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])
    weight = numpy_helper.from_array(WEIGHT.numpy(), "weight")
    graph = helper.make_graph(nodes, "colors", [images], [scores], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, path)
    return path


class Colors(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)) @ WEIGHT


def test_an_onnx_file_is_certified_like_the_same_torch_module(tmp_path: Path) -> None:
    path = write_network(tmp_path / "colors.onnx")
    images = torch.rand(8, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    images[:4, 1] += 1 - images[:4, 1].amax((1, 2), keepdim=True)  # some lead clearly
    images = images.clamp(0, 1)
    guards = [pg.defend(each, Patch(3), size=(SIDE, SIDE), masks=3) for each in (path, Colors())]
    exported, module = (guard.certify(images, Patch(3)) for guard in guards)
    assert torch.equal(exported.label, module.label)
    assert torch.allclose(exported.margin, module.margin, atol=1e-4)
    assert 0 < int(exported.certified.sum()) < 8
    other = write_network(tmp_path / "same.onnx")
    assert pg.defend(other, Patch(3), size=(SIDE, SIDE), masks=3).digest == guards[0].digest


def test_a_missing_or_broken_onnx_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be an ONNX file"):
        pg.defend(tmp_path / "none.onnx", Patch(3), size=(SIDE, SIDE))
    (tmp_path / "broken.onnx").write_bytes(b"not a network")
    with pytest.raises(InputError, match=r"broken\.onnx"):
        pg.defend(tmp_path / "broken.onnx", Patch(3), size=(SIDE, SIDE))
