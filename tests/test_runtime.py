"""Device, precision switches, seeds and the stamp of a result."""

from unittest import mock

import pytest
import torch

from patchguard import runtime
from patchguard.errors import InputError


def test_precision_switches_are_off_inside_and_restored_outside():
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    enabled = torch.backends.cudnn.enabled
    try:
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = True
        with runtime.full_precision(torch.device("cpu")):
            with runtime.full_precision(torch.device("cpu")):
                assert torch.get_float32_matmul_precision() == "highest"
            assert torch.get_float32_matmul_precision() == "highest"  # the inner one does not restore
            assert not torch.backends.cudnn.allow_tf32
            assert not torch.backends.cudnn.enabled  # its transforms mix neighboring cells
        assert torch.backends.cudnn.enabled == enabled
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9 has one set")
def test_switches_that_were_turned_one_by_one_are_restored_one_by_one():
    owners = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]
    before = [owner.fp32_precision for owner in owners]
    try:
        owners[0].fp32_precision, owners[1].fp32_precision = "tf32", "ieee"  # the older set cannot be read now
        with runtime.full_precision(torch.device("cpu")):
            assert [owner.fp32_precision for owner in owners] == ["ieee", "ieee"]
        assert [owner.fp32_precision for owner in owners] == ["tf32", "ieee"]
    finally:
        for owner, value in zip(owners, before, strict=True):
            owner.fp32_precision = value


def test_seeds_depend_on_seed_and_index_only():
    assert runtime.derive_seed(0, 5) == runtime.derive_seed(0, 5)
    seeds = {runtime.derive_seed(seed, index) for seed in range(10) for index in range(10)}
    assert len(seeds) == 100
    first, again = (torch.rand(3, generator=runtime.make_generator(1, 2)) for _ in range(2))
    assert torch.equal(first, again)
    with pytest.raises(InputError, match="at least 0"):
        runtime.make_generator(-1)


def test_the_environment_names_versions_but_no_machine():
    stamp = runtime.describe_environment()
    assert stamp["torch"] == torch.__version__
    assert stamp["cpu_count"] >= 1
    assert not any("/" in str(value) for value in stamp.values())


def test_a_device_that_is_not_here_is_refused():
    assert runtime.resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="must be auto, cpu, cuda"):
        runtime.resolve_device("gpu")
    with mock.patch("torch.cuda.device_count", return_value=1), pytest.raises(InputError, match="cuda:3"):
        runtime.resolve_device("cuda:3")


@pytest.mark.parametrize("name", ["meta", "mps", "xpu"])
def test_devices_that_nothing_here_was_tried_on_are_refused(name):
    with pytest.raises(InputError, match="auto, cpu, cuda"):
        runtime.resolve_device(name)


def test_parameters_stay_frozen_until_the_last_one_leaves():
    layer = torch.nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    first, second = runtime.frozen_parameters(layer), runtime.frozen_parameters(layer)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # another thread is still inside
    assert not layer.weight.requires_grad
    second.__exit__(None, None, None)
    assert layer.weight.requires_grad
    assert not layer.bias.requires_grad
