"""The command line: results on stdout, one line per mistake on stderr, exit status that tells."""

import re
import sys

import pytest
import torch
from helpers.small_guards import srf_guard
from torch import nn
from typer.testing import CliRunner

from patchguard import models
from patchguard.cli import app
from patchguard.defenses import Undefended
from patchguard.defenses.evidence import Evidence
from patchguard.geometry.preprocess import Preprocess
from patchguard.guards.local import LocalGuard
from patchguard.models import wrap
from patchguard.storage import zoo


@pytest.fixture
def run():
    return lambda *words: CliRunner().invoke(app, list(words))


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "guard.safetensors"
    zoo.save(srf_guard(), path)
    return str(path)


@pytest.mark.parametrize("words", [(), ("audit",), ("models",), ("verify",)])
def test_every_help_has_an_example(run, words):
    shown = run(*words, "--help")
    assert shown.exit_code == 0
    assert "Example: patchguard" in shown.stdout


def test_models_lists_the_zoo(run):
    shown = run("models")
    assert shown.exit_code == 0
    rows = {line.split()[0]: line for line in shown.stdout.splitlines() if line.strip()}
    assert set(models.REGISTRY) < set(rows)
    assert "32 px" in rows["mask_bn_imagenet"]


def test_an_audit_shows_field_windows_and_verdict(run, checkpoint):
    shown = run("audit", "--model", checkpoint, "--size", "16x18", "--device", "cpu")
    assert shown.exit_code == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    for part in (
        "source image 16 x 18 pixels",
        "cells 16 x 18",
        "field of a cell 5 x 5 pixels",
        "stride 1 x 1",
        "2 x 2 6 x 6 cells",
        "8 x 8 12 x 12 cells 50% 35",
        "passed: no cell outside its field changed",
        "so certificates can be had: a patch of 8 x 8 pixels leaves cells alone",
    ):
        assert part in text


def test_an_audit_says_how_much_it_sampled(run, checkpoint, monkeypatch):
    monkeypatch.setattr(sys.modules["patchguard.cli.audit"], "SAMPLED", 10)
    words = ("audit", "--model", checkpoint, "--size", "16x18", "--device", "cpu")
    every = re.search(r"(\d+) patches rewritten", run(*words, "--full").stdout)
    assert every is not None
    assert int(every[1]) > 10
    assert f"10 patches of {every[1]} (--full for all) rewritten" in run(*words).stdout


def test_an_audit_says_in_words_that_a_network_with_wide_cells_certifies_nothing(run, monkeypatch):
    wide = guard_of(nn.Conv2d(3, 2, 31, padding=15))
    monkeypatch.setattr(zoo, "find", lambda name, **_: wide)
    shown = run("audit", "--model", "srf", "--size", "16", "--device", "cpu")
    assert shown.exit_code == 0, shown.stderr
    assert "passed: no cell outside its field changed" in shown.stdout
    assert "but no certificates can be had: a patch of 2 x 2 pixels can touch every cell" in shown.stdout


def test_a_network_of_the_registry_is_audited_by_name(run, monkeypatch):
    small = models.build("block_resnet18", classes=2, width=0.02)
    monkeypatch.setattr("patchguard.models.srf.srf", lambda: small)
    shown = run("audit", "--model", "srf", "--device", "cpu")
    assert shown.exit_code == 0, shown.stderr
    assert "8 x 8" in shown.stdout


def guard_of(network: nn.Module) -> LocalGuard:
    torch.manual_seed(0)
    return LocalGuard(Preprocess(), wrap(network, classes=2), Evidence(low=None), Undefended())


def test_a_leaky_network_is_refused_with_status_1(run, monkeypatch):
    leaky = guard_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 1)))
    monkeypatch.setattr(zoo, "find", lambda name, **_: leaky)
    shown = run("audit", "--model", "srf", "--size", "12")
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert "(InstanceNorm2d) cannot be bounded" in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1


def test_a_leak_is_shown_with_status_1(run, monkeypatch):
    honest = guard_of(nn.Conv2d(3, 2, 3))
    field = honest.field(12, 12)
    leaky = guard_of(nn.Sequential(nn.Conv2d(3, 2, 3), nn.InstanceNorm2d(2)))
    monkeypatch.setattr(type(leaky.model), "field", lambda self, height, width: field)
    monkeypatch.setattr(zoo, "find", lambda name, **_: leaky)
    shown = run("audit", "--model", "srf", "--size", "12")
    assert shown.exit_code == 1
    assert "failed: cell (" in shown.stdout
    assert "outside its field, were rewritten" in shown.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "bagnet18"), "Did you mean 'bagnet17'?"),
        (("--model", "srf", "--size", "big"), "`--size` must be a side such as 224"),
        (("--model", "srf", "--size", "4"), "at least 7 x 7 pixels here; got 4 x 4"),
        (("--model", "srf", "--device", "gpu"), "`device` must be auto"),
        (("--model", "nowhere/guard.safetensors"), "no file is at"),
    ],
)
def test_mistakes_are_one_line_on_stderr(run, words, message):
    shown = run("audit", *words)
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert shown.stderr.startswith("patchguard: ")
    assert message in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("recipe", [{"image_side": 16, "dataset": "folder"}, {"data": {"image_size": 16}}])
def test_a_trained_model_is_audited_at_the_size_that_it_was_trained_at(run, tmp_path, recipe):
    path = tmp_path / "guard.safetensors"
    zoo.save(srf_guard(), path, recipe=recipe)
    shown = run("audit", "--model", str(path), "--device", "cpu")
    assert shown.exit_code == 0, shown.stderr
    assert "16 x 16 pixels" in shown.stdout


def test_the_embedded_model_has_a_usual_size():
    assert zoo.usual_size("cifar10") == (32, 32)


def test_a_file_without_a_recipe_needs_a_size(run, checkpoint):
    shown = run("audit", "--model", checkpoint)
    assert shown.exit_code == 1
    assert "give the size of yours" in shown.stderr


def test_flags_take_no_value_in_the_help_and_options_are_grouped():
    shown = CliRunner().invoke(app, ["certify", "--help"]).stdout
    assert not [line for line in shown.splitlines() if "bool" in line and "--help" not in line]
    for panel in ("Images and patch", "Model and rule", "The run", "Output"):
        assert panel in shown


def test_shells_are_taught_to_complete():
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).stdout
