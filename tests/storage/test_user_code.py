"""Networks of the user's own: they run only when trusted, and a saved one comes back as it was."""

import sys
import types

import pytest
import torch
from helpers.small_guards import random_images
from torch import nn
from typer.testing import CliRunner

import patchguard as pg
from patchguard.cli import app
from patchguard.errors import InputError
from patchguard.storage import zoo

CODE = """
from torch import nn

def make_cells():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1))

def make_scores(pretrained=True):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    nn.init.constant_(network[3].bias, 0.5 if pretrained else 0.0)
    return network

def make_wide():
    return nn.Conv2d(3, 3, 31, padding=15)

def make_guard():
    import patchguard as pg
    return pg.defend(make_scores(), pg.Patch(2), size=(12, 12), masks=2)

def make_function():
    return lambda images: images.mean((2, 3))

def make_nothing():
    pass

def make_weights():
    return make_cells().state_dict()

def fail():
    return 1 / 0

number = 3
"""
SIZE = {"patch": pg.Patch(2), "size": (12, 12)}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "net.py"
    path.write_text(CODE)
    return path


def load(function: str) -> pg.Guard:
    return zoo.load(f"net.py:{function}", trust_code=True, **SIZE)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("make_cells", "LocalGuard"),
        ("make_scores", "PixelMaskGuard"),
        ("make_wide", "PixelMaskGuard"),
        ("make_guard", "PixelMaskGuard"),
    ],
)
def test_a_network_gets_the_guard_that_fits_it_and_survives_a_file(file, tmp_path, function, kind):
    guard, images = load(function), random_images(3, 12)
    assert type(guard).__name__ == kind
    assert guard.digest == load(function).digest  # random weights are drawn the same every time
    for parameter in guard.model.parameters():
        parameter.data.mul_(2)
    saved = tmp_path / "mine.safetensors"
    pg.save(guard, saved)
    with pytest.raises(InputError, match=f"`net.py:{function}` makes, and loading it runs that code.*--trust-code"):
        zoo.load(saved)
    again = zoo.load(saved, trust_code=True)
    assert again.digest == guard.digest
    before, after = (each.certify(images, pg.Patch(2)) for each in (guard, again))
    assert torch.equal(before.label, after.label)
    assert torch.equal(before.margin, after.margin)


def test_code_runs_only_when_it_is_trusted(file):
    file.write_text("raise SystemExit('ran')")
    with pytest.raises(InputError, match=r"is code: loading it runs it. If you trust net.py, add --trust-code"):
        zoo.load("net.py:make_cells", **SIZE)


def test_a_saved_guard_refuses_code_that_changed_and_files_that_did(file, tmp_path):
    saved = tmp_path / "mine.safetensors"
    pg.save(load("make_cells"), saved)
    file.write_text(CODE + "# another")
    with pytest.raises(InputError, match=r"net.py has changed since mine.safetensors was saved"):
        zoo.load(saved, trust_code=True)
    file.write_text("raise SystemExit('ran')")
    content = bytearray(saved.read_bytes())
    content[-1] ^= 1
    saved.write_bytes(content)
    with pytest.raises(InputError, match="is damaged"):
        zoo.load(saved, trust_code=True)


def test_other_code_gives_another_digest(file):
    before = [load(name).digest for name in ("make_cells", "make_scores")]
    file.write_text(CODE + "# another")
    after = [load(name).digest for name in ("make_cells", "make_scores")]
    assert not set(before) & set(after)


def test_a_function_of_images_is_defended_under_its_name(file):
    guard = load("make_function")
    assert guard.classes == 3
    assert len(guard.digest) == 64


def test_a_module_is_imported_by_name(file):
    assert type(zoo.load("net:make_cells", trust_code=True, **SIZE)).__name__ == "LocalGuard"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("net.py", r"must be followed by the function that makes the model: net.py:make_cells"),
        ("net.py:other", "net.py has no function `other`; it has make_cells"),
        ("net.py:make_nothing", "it returned None"),
        ("net.py:make_weights", "load these weights into it"),
        ("net.py:fail", "stopped in line 29 with ZeroDivisionError: division by zero"),
        ("net.py:number", "must be a function that makes a model; it is int"),
        ("broken.py:make", "broken.py has a syntax error in line 1"),
        ("script.py:make", "stopped in line 2 with SystemExit: usage"),
        ("nowhere.py:make", "no file is at `nowhere.py`"),
        ("no_such_module:make", "no module `no_such_module` can be imported"),
        ("timm:../x", "must name a network of timm"),
    ],
)
def test_mistakes_are_one_sentence(file, tmp_path, name, message):
    (tmp_path / "broken.py").write_text("def make(:")
    (tmp_path / "script.py").write_text("import sys\nsys.exit('usage')")
    with pytest.raises(InputError, match=message):
        zoo.load(name, trust_code=True, **SIZE)


def test_a_network_without_a_defense_needs_a_patch_and_a_size(file):
    with pytest.raises(InputError, match="`patch` and `size` must be given"):
        zoo.load("net.py:make_cells", trust_code=True)


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_weights_alone_are_refused_with_what_to_do(tmp_path, name):
    torch.save({"weight": torch.ones(1)}, tmp_path / name)
    with pytest.raises(InputError, match=r"Write a function that builds your network.*my_net.py:make_model") as refusal:
        zoo.load(tmp_path / name)
    assert "etch" not in str(refusal.value)


def fake_network() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))


def test_a_timm_name_is_made_by_timm(monkeypatch):
    def create_model(name: str, pretrained: bool) -> nn.Module:
        network = fake_network()
        network.pretrained_cfg = {"input_size": (3, 8, 8), "crop_pct": 0.5, "mean": (0.5,) * 3, "std": (0.5,) * 3}
        return network

    fake = types.ModuleType("timm")
    fake.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", fake)
    torch.manual_seed(0)
    guard = zoo.load("timm:resnet50", **SIZE)
    assert guard.model.preprocess.output_size(12, 14) == (8, 8)
    assert guard.certify(random_images(1, 12), pg.Patch(2)).label.shape == (1,)


def test_a_torchvision_name_brings_the_names_of_its_classes(monkeypatch):
    photos = types.SimpleNamespace(
        mean=[0.5] * 3, std=[0.5] * 3, resize_size=[10], crop_size=[8], interpolation="bilinear"
    )
    weights = types.SimpleNamespace(transforms=lambda: photos, meta={"categories": ["cat", "crane", "crane"]})
    fake = types.ModuleType("torchvision.models")
    fake.get_model_weights = lambda name: types.SimpleNamespace(DEFAULT=weights)
    fake.get_model = lambda name, weights: fake_network()
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", fake)
    assert zoo.load("torchvision:resnet50", **SIZE).class_names == ("cat", "crane 1", "crane 2")


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_not_installed_is_named(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=f"needs {library}, which is not here: pip install {library}"):
        zoo.load(f"{library}:resnet50", **SIZE)


@pytest.mark.parametrize("function", ["make_ten_cells", "make_ten_scores"])
def test_commands_take_a_network_of_the_users(file, function):
    file.write_text(CODE.replace("(4, 3", "(4, 10").replace("_cells", "_ten_cells").replace("_scores", "_ten_scores"))
    words = ["--model", f"net.py:{function}", "--trust-code"]
    run = ["--limit", "1", "--device", "cpu", "--patch", "5"]
    commands = [["certify", *words, *run], ["attack", "--attack", "noise", *words, *run]]
    if function == "make_ten_cells":
        commands.append(["audit", *words, "--size", "12", "--device", "cpu"])
    for command in commands:
        shown = CliRunner().invoke(app, command)
        assert shown.exit_code == 0, shown.stderr
        assert command[0] == "audit" or f"model: net.py:{function}, digest" in shown.stdout
        refused = CliRunner().invoke(app, [word for word in command if word != "--trust-code"])
        assert refused.exit_code == 1
        assert "add --trust-code" in refused.stderr
