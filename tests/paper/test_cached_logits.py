"""Cached logits are what the network says, rounded; computed once, and again only where they would be wrong."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.reproduction import IMAGES, pixels, save_model, thin_guard

from patchguard.data.decode import Unreadable
from patchguard.data.source import Source
from patchguard.errors import InputError
from patchguard.geometry.preprocess import Preprocess, Resize
from patchguard.guards.local import LocalGuard
from patchguard.paper import cached_logits
from patchguard.paper.context import Context
from patchguard.paper.counting import count_rounding, window_spaces
from patchguard.paper.experiment import Missing
from patchguard.paper.fast_certificates import masking_query
from patchguard.patch import Patch
from patchguard.storage import zoo

MODEL = "cifar10_mask_srf"


@pytest.fixture
def passes(monkeypatch):
    """How many images go through the network."""
    seen = []
    forward = LocalGuard.local_logits
    monkeypatch.setattr(
        LocalGuard, "local_logits", lambda self, images: seen.append(len(images)) or forward(self, images)
    )
    return seen


def restart(context: Context, **changes) -> Context:
    """The same context as a later process has it."""
    settings = {"cache": context.cache, "root": context.root, "limit": context.limit, "seed": context.seed}
    return Context(**{**settings, **changes})


def kill(*words):
    raise KeyboardInterrupt


def test_cached_logits_are_the_networks_in_half_precision(logits, guard, source):
    direct = guard.local_logits(pixels(source))
    assert torch.equal(torch.from_numpy(np.array(logits.local_logits)), direct.half())
    assert logits.targets.tolist() == list(source.targets)
    exact, rounded = logits.sample(torch.device("cpu"))
    assert torch.equal(exact, direct[list(logits.sample_indices)])
    assert not torch.equal(exact, rounded)
    assert torch.allclose(exact, rounded, rtol=1e-3, atol=1e-3)


def test_a_second_run_reads_what_the_first_one_wrote(own_context, passes):
    first = own_context.logits(MODEL, "cifar10")
    assert sum(passes) == IMAGES
    second = restart(own_context).logits(MODEL, "cifar10")
    assert sum(passes) == IMAGES
    assert np.array_equal(first.local_logits, second.local_logits)
    assert isinstance(second.local_logits, np.memmap)


def test_other_images_or_another_model_are_other_logits(own_context, passes, source, monkeypatch):
    own_context.logits(MODEL, "cifar10")
    monkeypatch.setattr(Context, "images", lambda self, dataset: source.subset(range(6)))
    assert len(restart(own_context).logits(MODEL, "cifar10")) == 6
    assert sum(passes) == IMAGES + 6
    (file,) = own_context.cache.glob("models/*/*.safetensors")
    other = zoo.load(file)
    next(iter(other.model.parameters())).data.add_(0.5)
    file.unlink()
    zoo.save(other, file)
    restart(own_context).logits(MODEL, "cifar10")
    assert sum(passes) == IMAGES + 12


@pytest.mark.parametrize("harm", ["bytes", "cut", "gone", "json", "sample"])
def test_a_damaged_folder_is_computed_again(own_context, passes, caplog, harm):
    whole = np.array(own_context.logits(MODEL, "cifar10").local_logits)
    (folder,) = (own_context.cache / "maps").iterdir()
    file = folder / {"json": "maps.json", "sample": "sample.npy"}.get(harm, "maps.npy")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(content[:-10] if harm in ("cut", "json") else content)
    with caplog.at_level(logging.WARNING):
        mended = restart(own_context).logits(MODEL, "cifar10")
    assert "computed again" in caplog.text
    assert sum(passes) == 2 * IMAGES
    assert np.array_equal(mended.local_logits, whole)
    assert [path.name for path in (own_context.cache / "maps").iterdir()] == [folder.name]


def test_a_run_that_is_killed_loses_one_block_at_most(own_context, logits, passes, monkeypatch):
    monkeypatch.setattr(cached_logits, "BLOCK", 5)
    with monkeypatch.context() as patched:
        forward = LocalGuard.local_logits
        patched.setattr(LocalGuard, "local_logits", lambda self, images: kill() if passes else forward(self, images))
        with pytest.raises(KeyboardInterrupt):
            own_context.logits(MODEL, "cifar10")
    (parts,) = (own_context.cache / "maps").iterdir()
    assert [path.name for path in parts.iterdir()] == ["000000000.npz"]
    resumed = restart(own_context).logits(MODEL, "cifar10")
    assert sum(passes) == IMAGES
    assert np.array_equal(resumed.local_logits, logits.local_logits)
    assert [path.name for path in (own_context.cache / "maps").iterdir()] == [parts.name[1:].removesuffix(".parts")]


def test_a_damaged_block_is_computed_again(own_context, passes, monkeypatch):
    monkeypatch.setattr(cached_logits, "BLOCK", 5)
    with monkeypatch.context() as patched:
        patched.setattr(cached_logits, "_join_blocks", kill)
        with pytest.raises(KeyboardInterrupt):
            own_context.logits(MODEL, "cifar10")
    (parts,) = (own_context.cache / "maps").iterdir()
    first, second, *_ = sorted(parts.iterdir())
    first.write_bytes(first.read_bytes()[:-50])
    content = bytearray(second.read_bytes())
    content[200] ^= 1
    second.write_bytes(content)
    own_context.logits(MODEL, "cifar10")
    assert sum(passes) == IMAGES + 10


def test_what_a_killed_process_of_the_same_number_left_is_no_hindrance(own_context, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(cached_logits.shutil, "rmtree", lambda *words, **more: None)
        patched.setattr(cached_logits, "_digest", kill)
        with pytest.raises(KeyboardInterrupt):
            own_context.logits(MODEL, "cifar10")
    assert list((own_context.cache / "maps").glob(".*.draft"))
    assert len(own_context.logits(MODEL, "cifar10"))
    assert not list((own_context.cache / "maps").glob(".*"))


def test_images_that_cannot_be_read_are_left_out(own_context, source, monkeypatch):
    def read(index):
        if index == 4:
            raise Unreadable("four.png", "torn")
        return source.read(index)

    broken = Source(source.names, source.targets, source.class_names, read)
    monkeypatch.setattr(Context, "images", lambda self, dataset: broken)
    logits = own_context.logits(MODEL, "cifar10")
    assert logits.targets.tolist() == [target for index, target in enumerate(source.targets) if index != 4]
    assert len(logits.local_logits) == IMAGES - 1
    assert max(logits.sample_indices) < IMAGES - 1


def test_rounding_is_measured_where_it_happens(logits):
    query = masking_query(logits.windows(Patch(5)))
    device = torch.device("cpu")
    assert count_rounding(logits, query, device) == {"images": IMAGES, "clean": 0, "robust": 0}
    coarse = replace(logits, local_logits=np.round(np.array(logits.local_logits)))
    changed = count_rounding(coarse, query, device)
    assert changed["robust"] + changed["clean"] > 0


UNTRAINED = ("cifar10_mask_bn17_nearest",)  # which the zoo does not have


def test_a_missing_model_says_the_command(context):
    with pytest.raises(
        Missing, match=r"no trained cifar10_mask_bn17_nearest here. patchguard train --recipe cifar10_"
    ) as it:
        context.logits(UNTRAINED, "cifar10")
    # What it starts from comes first, and the last command finds it where the first one leaves it.
    *first, last = str(it.value).split("; ")
    assert len({*first, last}) == len(first) + 1 == 3
    before = context.cache / "models" / "cifar10_mask_bn17_nearest_provable"
    assert f"--recipe cifar10_mask_bn17_nearest_provable --out {before}" in first[-1]
    assert f"--recipe cifar10_mask_bn17_nearest --out {context.cache / 'models' / 'cifar10_mask_bn17_nearest'}" in last
    assert f"--set init_from={before / before.name}.safetensors" in last
    with pytest.raises(Missing, match=r"patchguard[.]training[.]pretrained"):
        context.logits("imagenette_resnet50", "cifar10")


def test_training_fills_the_gap_and_the_next_run_finds_it(own_context, monkeypatch):
    from patchguard.training import run

    trained = []

    def train(options):
        trained.append((options.recipe.name, options.recipe.model.init_from))
        options.out.mkdir(parents=True)
        zoo.save(thin_guard(), options.out / f"{options.recipe.name}.safetensors")

    monkeypatch.setattr(run, "train", train)
    assert restart(own_context, train=True).choose(UNTRAINED) == "cifar10_mask_bn17_nearest"
    first = own_context.cache / "models" / "cifar10_mask_bn17_nearest_provable"
    assert [name for name, _ in trained] == [
        "cifar10_resnet18",
        "cifar10_mask_bn17_nearest_provable",
        "cifar10_mask_bn17_nearest",
    ]
    assert trained[-1][1] == str(first / f"{first.name}.safetensors")
    assert restart(own_context).find(UNTRAINED) == "cifar10_mask_bn17_nearest"


def test_a_missing_dataset_says_the_command(tmp_path):
    with pytest.raises(Missing, match="patchguard data get cifar10"):
        Context(root=tmp_path).images("cifar10")


def test_a_cache_that_cannot_be_written_is_one_line(own_context):
    (own_context.cache / "maps").write_text("a file")
    with pytest.raises(InputError, match="--cache"):
        own_context.logits(MODEL, "cifar10")


@pytest.mark.slow
def test_an_enlarged_image_has_the_papers_windows_and_the_true_ones(own_context, source, monkeypatch):
    preprocess = Preprocess((Resize(height=192, width=192, mode="bicubic"),))
    guard = replace(thin_guard("bagnet17", width=0.02), preprocess=preprocess)
    save_model(own_context, "cifar10_mask_bn17", guard)
    monkeypatch.setattr(Context, "images", lambda self, dataset: source.subset(range(3)))
    logits = own_context.logits("cifar10_mask_bn17", "cifar10")
    assert logits.grid == (22, 22)
    assert logits.enlargement == 6
    paper, true = (windows_of(Patch(5)) for windows_of in window_spaces(logits).values())
    assert {stop - start for start, stop in paper.rows} == {6}
    assert max(stop - start for start, stop in true.rows) == 8
    described = json.loads(next((own_context.cache / "maps").glob("*/maps.json")).read_text())
    assert described["images"] == 3
