"""Maps are what the network says, rounded; computed once, and again only where they would be wrong."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.reproduction import IMAGES, pixels, put, thin_guard

from patchguard.data.source import Source
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess, Resize
from patchguard.guards.local import LocalGuard
from patchguard.paper import maps as maps_on_disk
from patchguard.paper.context import Context
from patchguard.paper.experiment import Missing
from patchguard.paper.rows import enlargement, spaces
from patchguard.paper.tally import masking, rounding
from patchguard.patch import Patch


@pytest.fixture
def passes(monkeypatch):
    """How many images go through the network."""
    seen = []
    forward = LocalGuard.local_logits
    monkeypatch.setattr(
        LocalGuard, "local_logits", lambda self, images: seen.append(len(images)) or forward(self, images)
    )
    return seen


def again(context: Context, **changes) -> Context:
    """The same context as a later process has it."""
    settings = {"cache": context.cache, "data_root": context.data_root, "limit": context.limit, "seed": context.seed}
    return Context(**{**settings, **changes})


def test_maps_are_the_networks_logits_in_half_precision(maps, guard, source):
    direct = guard.local_logits(pixels(source))
    assert torch.equal(torch.from_numpy(np.array(maps.local_logits)), direct.half())
    assert maps.targets.tolist() == list(source.targets)
    exact, rounded = maps.sample(torch.device("cpu"))
    assert torch.equal(exact, direct[list(maps.sample_places)])
    assert not torch.equal(exact, rounded)
    assert torch.allclose(exact, rounded, rtol=1e-3, atol=1e-3)


def test_a_second_run_reads_what_the_first_one_wrote(context, passes):
    first = context.maps("cifar10_mask_srf", "cifar10")
    assert sum(passes) == IMAGES
    second = again(context).maps("cifar10_mask_srf", "cifar10")
    assert sum(passes) == IMAGES
    assert np.array_equal(first.local_logits, second.local_logits)
    assert isinstance(second.local_logits, np.memmap)


def test_other_images_or_another_model_are_other_maps(context, passes, source, monkeypatch):
    context.maps("cifar10_mask_srf", "cifar10")
    monkeypatch.setattr(Context, "images", lambda self, dataset: source.subset(range(6)))
    assert len(again(context).maps("cifar10_mask_srf", "cifar10")) == 6
    assert sum(passes) == IMAGES + 6
    other = thin_guard()
    next(iter(other.model.parameters())).data.add_(0.5)
    (context.cache / "models" / "cifar10_mask_srf" / "cifar10_mask_srf.safetensors").unlink()
    (context.cache / "models" / "cifar10_mask_srf").rmdir()
    put(context, "cifar10_mask_srf", other)
    again(context).maps("cifar10_mask_srf", "cifar10")
    assert sum(passes) == IMAGES + 12


@pytest.mark.parametrize("harm", ["bytes", "cut", "gone", "json", "sample"])
def test_a_damaged_folder_is_made_anew(context, passes, caplog, harm):
    whole = np.array(context.maps("cifar10_mask_srf", "cifar10").local_logits)
    (folder,) = (context.cache / "maps").iterdir()
    file = folder / {"json": "maps.json", "sample": "sample.npy"}.get(harm, "maps.npy")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(content[:-10] if harm in ("cut", "json") else content)
    with caplog.at_level(logging.WARNING):
        mended = again(context).maps("cifar10_mask_srf", "cifar10")
    assert "made anew" in caplog.text
    assert sum(passes) == 2 * IMAGES
    assert np.array_equal(mended.local_logits, whole)
    assert [path.name for path in (context.cache / "maps").iterdir()] == [folder.name]


def test_a_run_that_is_killed_loses_one_block_at_most(context, passes, monkeypatch):
    whole = np.array(context.maps("cifar10_mask_srf", "cifar10").local_logits)
    cache = context.cache.with_name("other")
    monkeypatch.setattr(maps_on_disk, "BLOCK", 5)
    put(again(context, cache=cache), "cifar10_mask_srf", thin_guard())
    passes.clear()
    with monkeypatch.context() as patched:
        forward = LocalGuard.local_logits
        patched.setattr(LocalGuard, "local_logits", lambda self, images: _killed() if passes else forward(self, images))
        with pytest.raises(KeyboardInterrupt):
            again(context, cache=cache).maps("cifar10_mask_srf", "cifar10")
    (parts,) = (cache / "maps").iterdir()
    assert [path.name for path in parts.iterdir()] == ["000000000.npz"]
    found = again(context, cache=cache).maps("cifar10_mask_srf", "cifar10")
    assert sum(passes) == IMAGES
    assert np.array_equal(found.local_logits, whole)
    assert [path.name for path in (cache / "maps").iterdir()] == [parts.name[1:].removesuffix(".parts")]


def test_a_damaged_block_is_computed_again(context, passes, monkeypatch):
    monkeypatch.setattr(maps_on_disk, "BLOCK", 5)
    with monkeypatch.context() as patched:
        patched.setattr(maps_on_disk, "_join", _killed)
        with pytest.raises(KeyboardInterrupt):
            context.maps("cifar10_mask_srf", "cifar10")
    (parts,) = (context.cache / "maps").iterdir()
    first, second, *_ = sorted(parts.iterdir())
    first.write_bytes(first.read_bytes()[:-50])
    content = bytearray(second.read_bytes())
    content[200] ^= 1
    second.write_bytes(content)
    context.maps("cifar10_mask_srf", "cifar10")
    assert sum(passes) == IMAGES + 10


def test_what_a_killed_process_of_the_same_number_left_is_no_hindrance(context, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(maps_on_disk.shutil, "rmtree", lambda *words, **more: None)
        patched.setattr(maps_on_disk, "_digest", _killed)
        with pytest.raises(KeyboardInterrupt):
            context.maps("cifar10_mask_srf", "cifar10")
    assert list((context.cache / "maps").glob(".*.draft"))
    assert len(context.maps("cifar10_mask_srf", "cifar10"))
    assert not list((context.cache / "maps").glob(".*"))


def _killed(*words):
    raise KeyboardInterrupt


def test_images_that_cannot_be_read_are_left_out(context, source, monkeypatch):
    from patchguard.data.decode import Unreadable

    def read(place):
        if place == 4:
            raise Unreadable("four.png", "torn")
        return source.read(place)

    broken = Source(source.names, source.targets, source.class_names, read)
    monkeypatch.setattr(Context, "images", lambda self, dataset: broken)
    found = context.maps("cifar10_mask_srf", "cifar10")
    assert found.targets.tolist() == [target for place, target in enumerate(source.targets) if place != 4]
    assert len(found.local_logits) == IMAGES - 1
    assert max(found.sample_places) < IMAGES - 1


def test_rounding_is_measured_where_it_happens(maps):
    question = masking(maps.windows(Patch(5)))
    device = torch.device("cpu")
    assert rounding(maps, question, device) == {"images": IMAGES, "clean": 0, "robust": 0}
    coarse = replace(maps, local_logits=np.round(np.array(maps.local_logits)))
    found = rounding(coarse, question, device)
    assert found["robust"] + found["clean"] > 0


UNTRAINED = ("cifar10_mask_bn17_nearest",)  # which the zoo does not have


def test_a_missing_model_says_the_command(context):
    with pytest.raises(
        Missing, match=r"no trained cifar10_mask_bn17_nearest here. patchguard train --recipe cifar10_"
    ) as it:
        context.maps(UNTRAINED, "cifar10")
    # What it begins with comes first, and the last command finds it where the first one leaves it.
    *first, last = str(it.value).split("; ")
    assert len({*first, last}) == len(first) + 1 == 3
    before = context.cache / "models" / "cifar10_mask_bn17_nearest_provable"
    assert f"--recipe cifar10_mask_bn17_nearest_provable --out {before}" in first[-1]
    assert f"--recipe cifar10_mask_bn17_nearest --out {context.cache / 'models' / 'cifar10_mask_bn17_nearest'}" in last
    assert f"--set init_from={before / before.name}.safetensors" in last
    with pytest.raises(Missing, match=r"patchguard[.]training[.]pretrained"):
        context.maps("imagenette_resnet50", "cifar10")


def test_training_fills_the_gap_and_the_next_run_finds_it(context, monkeypatch):
    from patchguard.training import run

    trained = []

    def train(options):
        trained.append((options.recipe.name, options.recipe.model.init_from))
        options.out.mkdir(parents=True)
        from patchguard.storage import zoo

        zoo.save(thin_guard(), options.out / f"{options.recipe.name}.safetensors")

    monkeypatch.setattr(run, "train", train)
    names = UNTRAINED
    made = again(context, train=True)
    assert made.maps(names, "cifar10").model == "cifar10_mask_bn17_nearest"
    first = (
        context.cache
        / "models"
        / "cifar10_mask_bn17_nearest_provable"
        / "cifar10_mask_bn17_nearest_provable.safetensors"
    )
    assert [name for name, _ in trained] == [
        "cifar10_resnet18",
        "cifar10_mask_bn17_nearest_provable",
        "cifar10_mask_bn17_nearest",
    ]
    assert trained[-1][1] == str(first)
    assert again(context).find(names) == "cifar10_mask_bn17_nearest"


def test_a_missing_data_set_says_the_command(tmp_path):
    with pytest.raises(Missing, match="patchguard data get cifar10"):
        Context(data_root=tmp_path).images("cifar10")


def test_a_cache_that_cannot_be_written_is_one_line(context, tmp_path):
    (tmp_path / "cache" / "maps").write_text("a file")
    with pytest.raises(InputError, match="--cache"):
        context.maps("cifar10_mask_srf", "cifar10")


def test_an_enlarged_image_has_the_papers_windows_and_the_true_ones(context, source, monkeypatch):
    preprocess = Preprocess((Resize(height=192, width=192, mode="bicubic"),))
    guard = replace(thin_guard("bagnet17", width=0.02), preprocess=preprocess)
    put(context, "cifar10_mask_bn17", guard)
    monkeypatch.setattr(Context, "images", lambda self, dataset: source.subset(range(3)))
    found = context.maps("cifar10_mask_bn17", "cifar10")
    assert found.grid == (22, 22)
    assert enlargement(found) == 6
    paper, true = (windows_of(Patch(5)) for windows_of in spaces(found).values())
    assert {stop - start for start, stop in paper.rows} == {6}
    assert max(stop - start for start, stop in true.rows) == 8
    described = json.loads(next((context.cache / "maps").glob("*/maps.json")).read_text())
    assert described["images"] == 3
