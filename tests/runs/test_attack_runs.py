"""Attacks on what is certified, and the page that is made of their folder."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import threshold_guard

from patchguard.attacks import Attack, build
from patchguard.attacks.adapters import FunctionAttack
from patchguard.attacks.base import AttackResult
from patchguard.data.source import Source
from patchguard.defenses import Undefended
from patchguard.errors import InputError
from patchguard.report import render as report
from patchguard.runs import gallery
from patchguard.runs.attack import Trial, describe_budget, refute
from patchguard.runs.engine import check_complete, worker_pool
from patchguard.runs.job import Job, WrittenPatch
from patchguard.runs.records import Folder

# -- runs from Python --------------------------------------------------------------------------------------------------


def trial(attack: Attack, guard=None, pixels: tuple[int, ...] = (127, 128, 90, 200)) -> Trial:
    """An attack on pictures of one grey each."""
    images = [torch.full((3, threshold_guard.SIDE, threshold_guard.SIDE), value, dtype=torch.uint8) for value in pixels]
    targets = tuple(int(value < 127.5) for value in pixels)
    names = tuple(f"{place}.png" for place in range(len(pixels)))
    job = Job(
        guard=guard or threshold_guard.make_guard(),
        source=Source(names, targets, threshold_guard.NAMES, images.__getitem__),
        patches=(WrittenPatch.read("2"),),
        curve=(),
        top_k=1,
        model="brightness",
        digest="",
        data="grey",
        certificates=None,
    )
    return Trial(job=job, attack=attack, name="mine")


def test_any_function_can_be_used_to_refute(tmp_path):
    def whiten(images, targets):
        changed = images.clone()
        changed[:, :, 4:6, 4:6] = (targets == 1).float().view(-1, 1, 1, 1)
        return changed

    attack = FunctionAttack(function=whiten)
    assert "whiten" in describe_budget(attack)["function"]
    plain = threshold_guard.make_guard(Undefended())
    outcome = refute(trial(attack, plain), tmp_path, device="cpu")
    found = sorted(Folder(tmp_path).records(), key=lambda each: each["index"])
    assert [each["broken"] for each in found] == [True, True, False, False]
    assert found[0]["places"] == [[4, 4]]
    assert outcome.summary.broken.correct == 2
    assert outcome.summary.refuted == []


class Claims(Attack):
    """Changes nothing and claims to have changed every label; a guard that rounds otherwise in a batch might agree."""

    def __call__(self, victim, images, target, patch, *, aim=None, seed=0, numbers=None) -> AttackResult:
        """Return the images as they are."""
        places = torch.zeros(len(images), 1, 2, dtype=torch.int64)
        return AttackResult(
            images=images, label=1 - target, broken=torch.ones_like(target, dtype=bool), positions=places
        )

    def run(self, *_: object) -> None:
        """Is not called."""
        raise NotImplementedError


@pytest.mark.parametrize("proved", [True, False])
def test_a_certified_label_that_the_attack_alone_saw_change_is_refuted(tmp_path, monkeypatch, proved):
    monkeypatch.setattr("patchguard.runs.attack.describe_budget", lambda attack: {})
    guard = None if proved else threshold_guard.make_guard(Undefended())
    summary = refute(trial(Claims(), guard), tmp_path, device="cpu").summary
    found = list(Folder(tmp_path).records())
    assert summary.refuted == ([0, 1, 2, 3] if proved else [])
    for each in found:
        assert (each["certified"], each["refuted"], each["broken"]) == (proved, proved, proved)
        assert each["attacked"] == (1 - each["label"] if proved else each["label"])


def test_an_attack_that_leaves_its_patch_is_a_mistake_of_the_attack(tmp_path):
    attack = FunctionAttack(function=lambda images, targets: 1 - images)
    with pytest.raises((InputError, RuntimeError)):
        refute(trial(attack), tmp_path, device="cpu")
    assert not (tmp_path / "summary.json").exists()


def test_a_run_is_summed_up_only_when_every_image_is_recorded_once(tmp_path):
    job, folder = trial(build("colors")).job, Folder(tmp_path / "run")
    counts = SimpleNamespace(images=4, errors=0, add=print)

    def recorded(*indices: int) -> Folder:
        for shard in folder.shards():
            shard.unlink()
        with folder.lock(), folder.open_shard(0) as records:
            records.append([{"index": index, "name": "x"} for index in indices])
        return folder

    check_complete(counts, job, recorded(2, 0, 3, 1), "attacked")
    for indices in ((0, 1, 2, 2), (0, 1, 2, 3, 3), (0, 1, 2, 4), (0, 1, 2, -1)):
        with pytest.raises(InputError, match=r"or is there twice\. Remove the folder"):
            check_complete(counts, job, recorded(*indices), "attacked")
    with pytest.raises(InputError, match="holds 3 records for 4 images"):
        check_complete(counts, job, recorded(0, 1, 3), "attacked")


def test_a_run_that_is_stopped_does_not_begin_what_is_queued():
    begun, go = [], threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        go.wait(10)

    def stopped() -> None:
        with worker_pool(1) as workers:
            for number in range(5):
                workers.submit(work, number)
            while not begun:
                time.sleep(0.01)
            threading.Timer(0.2, go.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert begun == [0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("attack")
    refute(trial(build("colors")), folder, device="cpu")
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    for file in finished.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_the_page_tells_the_gap_and_opens_offline(copied):
    page = report.write([copied]).read_text()
    for words in ("Clean accuracy", "Accuracy under attack", "Certified accuracy", "must be 0", "Certified, and held"):
        assert words in page
    assert page.count("<script") == 2  # the rows of the table, and what sorts them
    assert "http" not in page.replace("http-equiv", "")
    assert page.count('class="quartet"') == 4


def test_a_damaged_folder_is_one_sentence(copied):
    (copied / "gallery.npz").write_bytes(b"PK no archive")
    with pytest.raises(InputError, match=r"gallery\.npz. is damaged"):
        report.write([copied])
    summary = json.loads((copied / "summary.json").read_text())
    (copied / "summary.json").write_text(json.dumps(summary | {"refuted": ["first"]}))
    with pytest.raises(InputError, match=r"summary\.json. is damaged at .refuted\[0\].: expected `int`, got `str`"):
        report.write([copied])
    (copied / "summary.json").unlink()
    with pytest.raises(InputError, match="finished run"):
        report.write([copied])


def test_maps_of_other_shapes_are_refused(copied):
    with np.load(copied / "gallery.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    arrays["after_0"] = arrays["after_0"][:2]
    np.savez(copied / "gallery.npz", **arrays)
    with pytest.raises(InputError, match="must have one shape"):
        report.write([copied])


def test_without_a_proof_the_report_shows_the_class_that_came_closest():
    scores = torch.tensor([1.0, 9.0, 5.0, 2.0], dtype=torch.float64)
    record = {"label": 1, "attacked": 1, "margin": None, "rival": 0}
    assert gallery.find_other_class(record, scores) == 2
    assert gallery.find_other_class(record | {"margin": -1.0}, scores) == 0
    assert gallery.find_other_class(record | {"attacked": 3}, scores) == 3
