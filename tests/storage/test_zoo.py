"""Guards as files: what is saved is what is loaded, and a file that is not right is refused whole."""

import json
import shutil
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from helpers.small_guards import build_thin_model, random_images, randomize_weights, srf_guard
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import patchguard
from patchguard import models
from patchguard.defenses import (
    CellMasking,
    ClippedSum,
    DoubleMasking,
    MajorityVote,
    MaskedAgreement,
    Median,
    RobustMasking,
    TrimmedMean,
    Undefended,
)
from patchguard.defenses import serialization as config
from patchguard.defenses.evidence import Evidence
from patchguard.errors import InputError
from patchguard.geometry.preprocess import CenterCrop, Preprocess, Resize
from patchguard.geometry.windows import Windows
from patchguard.guards.identity import digest_tensors
from patchguard.guards.local import LocalGuard
from patchguard.models import build
from patchguard.patch import Patch
from patchguard.storage import presets, zoo
from patchguard.storage.presets import PRESETS
from patchguard.storage.published_models import CHECKPOINTS

MASKS = Windows.sliding(grid=(1, 7), size=(1, 3), wrap=(False, True), count=2)
DEFENSES = [
    RobustMasking(masks=MASKS, threshold=Fraction(1, 5)),
    RobustMasking(masks=MASKS),
    DoubleMasking(masks=Windows.from_boxes([(0, 1, 0, 2), (1, 3, 1, 2)], grid=(4, 4))),
    DoubleMasking(masks=MASKS, tau=0.25),
    ClippedSum(spatial=False),
    MajorityVote(),
    CellMasking(cells=3),
    Median(),
    TrimmedMean(trim=2),
    MaskedAgreement(masks=MASKS, tau=0.25),
    Undefended(mean=True),
]


@pytest.fixture
def path(tmp_path):
    """A good file."""
    where = tmp_path / "guard.safetensors"
    zoo.save(srf_guard(), where, recipe={"epochs": 3})
    return where


def altered(path, *, settings=None, tensors=None, digest=None):
    """Write the file anew with other contents; the digest is right unless it is given."""
    with safe_open(path, framework="pt") as archive:
        held = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
        written = json.loads(archive.metadata()["patchguard"])
    for key, value in (settings or {}).items():
        *parents, last = key.split(".")
        inner = written
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    held.update(tensors or {})
    held = {name: tensor for name, tensor in held.items() if tensor is not None}
    text = json.dumps(written, sort_keys=True, separators=(",", ":"))
    save_file(held, path, metadata={"patchguard": text, "digest": digest or digest_tensors(held, text)})
    return path


# -- round trips -------------------------------------------------------------------------------------------------------


def test_a_loaded_guard_answers_like_the_saved_one(tmp_path):
    guard = replace(
        srf_guard(),
        preprocess=Preprocess((Resize(shorter=20, mode="bicubic"), CenterCrop(height=16, width=16))),
        class_names=("cat", "dog", "größe"),
    )
    zoo.save(guard, tmp_path / "guard.safetensors")
    assert [each.name for each in tmp_path.iterdir()] == ["guard.safetensors"]
    before = torch.random.get_rng_state()
    again = patchguard.load(tmp_path / "guard.safetensors")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not again.model.training
    assert (again.preprocess, again.evidence, again.defense) == (guard.preprocess, guard.evidence, guard.defense)
    assert (again.class_names, again.model.config()) == (guard.class_names, guard.model.config())
    images = random_images(5, 24, 31)
    assert torch.equal(again.local_logits(images), guard.local_logits(images))
    assert again.digest == guard.digest


def test_a_digest_sees_every_part(path):
    guard = zoo.load(path)
    others = [replace(guard, evidence=Evidence(low=None)), replace(guard, class_names=("a", "b", "c"))]
    changed = zoo.load(path)
    changed.model.fc.bias.data[0] += 1e-3
    assert len({each.digest for each in [guard, changed, *others]}) == 4


def test_the_settings_of_a_file_can_be_read_alone(path):
    settings = zoo.inspect(path)
    assert settings["recipe"] == {"epochs": 3}
    assert settings["model"]["name"] == "srf"
    assert len(settings["digest"]) == 64


def test_half_precision_takes_half_the_space_and_loads_as_float32(tmp_path):
    model = randomize_weights(build("srf", classes=3, widths=[64, 64]))
    guard = LocalGuard(Preprocess(), model, Evidence(low=None), Median())
    whole, half = tmp_path / "whole.safetensors", tmp_path / "half.safetensors"
    zoo.save(guard, whole)
    zoo.save(guard, half, half=True)
    assert half.stat().st_size < 0.6 * whole.stat().st_size
    again = zoo.load(half)
    assert {parameter.dtype for parameter in again.model.parameters()} == {torch.float32}
    images = random_images(2, 12)
    assert torch.allclose(again.local_logits(images), guard.local_logits(images), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("defense", DEFENSES, ids=lambda defense: type(defense).__name__)
def test_defenses_survive_json_exactly(defense):
    written = json.loads(json.dumps(config.defense_to_json(defense), allow_nan=False))
    assert config.defense_from_json(written) == defense


def test_a_tau_is_written_only_where_there_is_one():
    plain = config.defense_to_json(DoubleMasking(masks=MASKS))
    assert set(plain) == {"name", "masks"}
    assert config.defense_from_json(plain).tau == 0
    assert config.defense_to_json(DoubleMasking(masks=MASKS, tau=2.0)) == {**plain, "tau": 2.0}
    assert "tau" in config.defense_to_json(MaskedAgreement(masks=MASKS))  # as ever


def test_tau_is_part_of_a_saved_guard(tmp_path):
    plain = srf_guard()
    guard = replace(plain, defense=replace(plain.defense, tau=2.0))
    zoo.save(guard, tmp_path / "guard.safetensors")
    again = zoo.load(tmp_path / "guard.safetensors")
    assert again.defense == guard.defense
    assert again.digest == guard.digest != plain.digest


def test_every_defense_of_the_package_can_be_saved():
    assert set(config.DEFENSES) == {type(defense).__name__ for defense in DEFENSES}
    assert set(config.DEFENSES) == set(patchguard.defenses.__all__) - {"Defense"}


@pytest.mark.parametrize(
    "evidence", [Evidence(low=None, drift=1e-3), Evidence(kind="vote", threshold=0.3), Evidence(high=7.0)]
)
def test_evidence_survives_json_exactly(evidence):
    written = json.loads(json.dumps(config.evidence_to_json(evidence), allow_nan=False))
    assert config.evidence_from_json(written) == evidence


@pytest.mark.parametrize("name", list(models.REGISTRY))
def test_every_network_can_be_saved_and_loaded(name, tmp_path):
    own = {"srf": {"widths": [8, 8, 8]}, "srf_wide": {"stride": 1}, "interval_cnn": {"widths": [4, 4, 4, 4]}}
    thin = own.get(name, {"width": 0.05})
    guard = zoo.build(name, classes=2, **thin)
    zoo.save(guard, tmp_path / "network.safetensors")
    again = zoo.load(tmp_path / "network.safetensors")
    assert type(again.model) is type(guard.model)
    assert all(torch.equal(tensor, guard.model.state_dict()[name]) for name, tensor in again.model.state_dict().items())


# -- the zoo -----------------------------------------------------------------------------------------------------------


def test_every_name_has_one_line_about_it():
    entries = zoo.available()
    assert {entry.name for entry in entries} >= {*PRESETS, *models.REGISTRY}
    assert all(entry.description and "\n" not in entry.description for entry in entries)
    assert all(zoo.usual_size(entry.name) for entry in entries if entry.kind != "checkpoint")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "_bn_" in name else name for name in PRESETS]
)
def test_presets_withstand_the_patch_they_name(name, monkeypatch):
    monkeypatch.setattr(presets, "build", lambda network, **_: build_thin_model(network))
    guard = zoo.build(name)
    preset = PRESETS[name]
    placed = guard if preset.patch_space == "source" else guard.without_preprocess()
    windows = placed.windows(preset.patch, *preset.size)
    assert guard.defense.masks == windows
    assert not guard.defense.masks.cover(placed.windows(Patch(preset.patch.height + 8), *preset.size))
    assert guard.preprocess.output_size(*preset.source_size) == {
        "bagnet17": (192, 192) if "cifar10" in name else (224, 224),
        "ds_resnet50": (299, 299),
    }.get(preset.model, (32, 32))
    assert len(guard.class_names) in (0, guard.model.classes)
    sides = {
        "mask_bn_imagenet": (6, 6),
        "mask_bn_imagenette": (6, 6),
        "mask_bn_cifar10": (8, 8),
        "mask_bn_cifar10_nearest": (6, 6),
        "mask_ds_imagenet": (1, 66),
        "mask_ds_imagenette": (1, 66),
        "mask_ds_cifar10": (1, 8),
        "double_srf_cifar10": (11, 11),
    }
    assert tuple(max(b - a for a, b in axis) for axis in (windows.rows, windows.columns)) == sides[name]


def test_a_preset_takes_another_patch_and_other_classes():
    guard = zoo.build("double_srf_cifar10", patch=Patch(2), classes=4, widths=[8, 8])
    assert guard.defense.masks == guard.windows(Patch(2), 32, 32)
    assert (guard.model.classes, guard.class_names) == (4, ())


def test_a_preset_certifies_end_to_end():
    guard = zoo.build("double_srf_cifar10", widths=[8, 8, 8])
    assert guard.certify(random_images(2, 32), Patch(5)).margin.shape == (2,)


# -- bad names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: zoo.build("mask_bn_cifar"), "Did you mean 'mask_bn_cifar10'"),
        (lambda: zoo.load("bagnet18"), "`bagnet18` is neither a file nor a known name. Did you mean 'bagnet17'"),
        (lambda: zoo.load("bagnet17"), "'bagnet17' has no trained weights"),
        (lambda: zoo.load("nowhere/guard.safetensors"), "no file is at `nowhere/guard.safetensors`"),
        (lambda: zoo.inspect("nowhere.safetensors"), "no file is at"),
        (lambda: zoo.build("srf", fields=5), "has no setting 'fields'"),
    ],
)
def test_unknown_names_get_a_hint(ask, message):
    with pytest.raises(InputError, match=message):
        ask()


# -- names mean names --------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory, with a folder of models for PATCHGUARD_ZOO below it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("PATCHGUARD_ZOO", str(tmp_path / "mine"))
    return tmp_path


EMBEDDED = CHECKPOINTS / "cifar10.safetensors"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_or_folder_called_like_a_model_does_not_replace_it(elsewhere, kind):
    zoo.save(srf_guard(), elsewhere / "cifar10") if kind == "file" else (elsewhere / "cifar10").mkdir()
    assert zoo.load("cifar10").model.classes == zoo.find("cifar10").model.classes == 10
    assert zoo.recipe("cifar10") == zoo.inspect(EMBEDDED)["recipe"]
    assert zoo.file_of("cifar10") == zoo.ModelFile(EMBEDDED, zoo.load(EMBEDDED).digest)
    if kind == "file":
        assert zoo.load("./cifar10").model.classes == 3
        assert zoo.load(elsewhere / "cifar10").model.classes == 3
        assert "cifar10, digest " in str(zoo.file_of("./cifar10"))
    else:
        with pytest.raises(InputError, match=r"no file is at `\./cifar10`"):
            zoo.load("./cifar10")


def test_two_models_of_one_name_are_refused_and_two_copies_are_not(elsewhere):
    shutil.copy(EMBEDDED, elsewhere / "mine" / "cifar10.safetensors")
    assert zoo.file_of("cifar10").path == EMBEDDED
    zoo.save(srf_guard(), elsewhere / "mine" / "cifar10.safetensors")
    for ask in (zoo.load, zoo.find, zoo.file_of, zoo.recipe):
        with pytest.raises(InputError, match=r"'cifar10' names two different models: .* Give the path of the one"):
            ask("cifar10")
    assert zoo.load("mine/cifar10.safetensors").model.classes == 3
    (elsewhere / "mine" / "cifar10.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="names two different models"):
        zoo.load("cifar10")


def test_a_name_of_ones_own_is_found_in_ones_own_folder(elsewhere):
    zoo.save(srf_guard(), elsewhere / "mine" / "small.safetensors")
    assert zoo.load("small").model.classes == 3
    assert "small" in {entry.name for entry in zoo.available()}


def test_a_file_without_a_suffix_is_named_with_its_folder(elsewhere):
    zoo.save(srf_guard(), elsewhere / "weights")
    with pytest.raises(InputError, match=r"`weights` is not a known name. Write \./weights for the file that is here"):
        zoo.load("weights")
    assert zoo.load("./weights").model.classes == 3


# -- bad files ---------------------------------------------------------------------------------------------------------


def refused(path, message):
    with pytest.raises(InputError, match=message) as caught:
        zoo.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(path, keep):
    path.write_bytes(path.read_bytes()[:keep])
    refused(path, "is not a whole safetensors file")


def test_a_foreign_file_is_refused(path):
    path.write_bytes(b"PK\x03\x04" + bytes(200))
    refused(path, "hold weights without the network")
    save_file({"weight": torch.zeros(2)}, path)
    refused(path, "was not written by patchguard")
    save_file({"weight": torch.zeros(2)}, path, metadata={"patchguard": "{", "digest": ""})
    refused(path, "are not JSON")
    save_file({"weight": torch.zeros(2)}, path, metadata={"patchguard": '{"format": NaN}', "digest": ""})
    refused(path, "are not JSON: NaN")
    save_file({"weight": torch.zeros(2)}, path, metadata={"patchguard": "[]", "digest": ""})
    refused(path, "`settings` must be an object with exactly")


def test_a_changed_bit_is_seen(path):
    contents = bytearray(path.read_bytes())
    contents[-3] ^= 1
    path.write_bytes(contents)
    refused(path, "is damaged: its digest does not match")
    zoo.save(srf_guard(), path)
    refused(altered(path, settings={"evidence.drift": 0.5}, digest=zoo.inspect(path)["digest"]), "is damaged")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"fc.weight": None}, r"must hold its \d+ tensors; this one lacks fc\.weight"),
        ({"extra": torch.zeros(1)}, "this one has besides extra"),
        ({"fc.bias": torch.zeros(4)}, r"fc\.bias must have shape \[3\]; got \[4\]"),
        ({"fc.bias": torch.zeros(3).double()}, r"fc\.bias in .* must be torch\.float32; got torch\.float64"),
        ({"fc.bias": torch.tensor([0.0, torch.nan, 0.0])}, r"fc\.bias in .* must be finite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(path, tensors, message):
    refused(altered(path, tensors=tensors), message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": 2}, "has format 2; this release reads 1"),
        ({"surprise": 1}, "`settings` must be an object with exactly the entries"),
        ({"half": 1}, "`half` must be true or false"),
        ({"recipe": "secret"}, "`recipe` must be an object or null"),
        ({"class_names": ["a"]}, "the model's 3 classes; got 1 names"),
        ({"class_names": [1, 2, 3]}, "`class_names` must be text"),
        ({"model.name": "os.system"}, "must be a known name; got 'os.system'"),
        ({"model.name": ["srf"]}, r"`model\.name` must be text"),
        ({"model.settings": []}, r"`model\.settings` must be an object"),
        ({"model.settings.classes": "three"}, "`classes` must be a whole number|do not make a srf"),
        ({"model.settings.classes": 10**12}, "must have shape"),
        ({"model.settings.widths": 5}, r"`model\.settings` do not make a srf"),
        ({"model.settings.command": "x"}, "has no setting 'command'"),
        ({"preprocess": {"steps": [{"kind": "exec"}]}}, "must have a `kind` out of"),
        ({"evidence.kind": "softmax"}, "`kind` must be one of"),
        ({"evidence.bits": True}, r"`evidence\.bits` must be a whole number"),
        ({"evidence.low": "0"}, r"`evidence\.low` must be a finite number"),
        ({"evidence.more": 1}, "`evidence` must be an object with exactly"),
        ({"defense": None}, r"`defense\.name` must be a known defense; got None"),
        ({"defense.name": "DoubleMask"}, "Did you mean 'DoubleMasking'"),
        ({"defense.name": "RobustMasking"}, "`defense` must be an object with exactly the entries name, masks, thres"),
        ({"defense.tau": "1"}, r"`defense\.tau` must be a finite number"),
        ({"defense.tau": -1.0}, "`tau` must lie between 0 and"),
        ({"defense.masks.grid": [4]}, r"`defense\.masks\.grid` must be a list of two"),
        ({"defense.masks.rows": [[0, 99]]}, "an interval must be"),
        ({"defense.masks.rows": [[0, 1.5]]}, r"`defense\.masks\.rows` must be a whole number"),
        ({"defense.masks.wrap": [0, 1]}, r"`defense\.masks\.wrap` must be true or false"),
        ({"defense.masks.pairs": {}}, r"`defense\.masks\.pairs` must be a list"),
        ({"defense.masks.count": 0}, "`count` must be a whole number of at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(path, settings, message):
    refused(altered(path, settings=settings), message)


@pytest.mark.parametrize("value", ["1/0", "-1/5", "1e3", "", "1/5/7", "½", 0.2, "9" * 99])
def test_only_plain_fractions_are_read(value):
    with pytest.raises(InputError, match="`t` must be"):
        config.fraction(value, "t")


# -- saving ------------------------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_old_file(path, monkeypatch):
    before = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("patchguard.storage.model_file.save_file", fail)
    with pytest.raises(InputError, match="cannot be written: disk full"):
        zoo.save(srf_guard(), path)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_guards_that_could_not_be_loaded_are_not_saved(tmp_path):
    where = tmp_path / "guard.safetensors"
    wrapped = models.wrap(nn.Conv2d(3, 3, 3), classes=3)
    with pytest.raises(InputError, match="made by a function in a file of yours"):
        zoo.save(replace(srf_guard(), model=wrapped), where)
    with pytest.raises(InputError, match=r"must be float32 to be saved; .* Call \.float"):
        zoo.save(replace(srf_guard(), model=build("srf", classes=3).double()), where)
    with pytest.raises(InputError, match="`recipe` must hold JSON values only"):
        zoo.save(srf_guard(), where, recipe={"rate": float("nan")})
    with pytest.raises(InputError, match="the folder of `path` must exist"):
        zoo.save(srf_guard(), tmp_path / "none" / "guard.safetensors")
    huge = build("srf", classes=3)
    huge.fc.bias.data.fill_(1e6)
    with pytest.raises(InputError, match=r"fc\.bias must be finite in float16"):
        zoo.save(replace(srf_guard(), model=huge), where, half=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["weights.pth", "weights.PT", "last.ckpt"])
def test_a_file_of_pytorch_is_told_what_to_do_with_it(name, tmp_path):
    torch.save({"weight": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(InputError, match=r"must be a model file of patchguard .* my_net.py:make_model"):
        zoo.load(tmp_path / name)
