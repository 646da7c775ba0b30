"""Two processes that torchrun starts share every batch: the same steps, equal weights, a run that learns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.stripe_dataset import folder, folder_options
from safetensors.torch import load_file

import patchguard
from patchguard.errors import InputError
from patchguard.training.trainer import part_of

SOURCE, TESTS = Path(patchguard.__file__).parents[1], Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def ran(*command: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": os.pathsep.join([str(SOURCE), str(TESTS)]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, timeout=240, check=False)


def test_a_step_of_two_processes_is_that_of_one(tmp_path: Path) -> None:
    script, path = str(TESTS / "helpers" / "ddp_step.py"), str(tmp_path / "state")
    alone = ran(sys.executable, script, f"{path}.alone")
    together = ran(*TORCHRUN, script, path)
    assert (alone.returncode, together.returncode) == (0, 0), alone.stderr + together.stderr
    one, first, second = (load_file(f"{path}.{name}") for name in ("alone.0", "0", "1"))
    assert one.keys() == first.keys() == second.keys()
    assert any(name.startswith("gradient.") and float(one[name].abs().max()) > 1e-3 for name in one)
    for name, tensor in one.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_run_of_two_processes_learns_stops_and_goes_on(tmp_path: Path) -> None:
    data, out = folder(tmp_path / "pictures"), tmp_path / "run"
    options = [*folder_options(data, out, epochs=4, other_patches=[]), "--test"]
    command = [*TORCHRUN, "-m", "patchguard.training.run", *options]
    stopped = ran(*command, "--minutes", "0")
    assert stopped.returncode == 0, stopped.stderr
    assert not (out / "summary.json").exists()
    ended = ran(*command)
    assert ended.returncode == 0, ended.stderr
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in log] == [1, 2, 3, 4]
    assert log[-1]["loss"] < log[0]["loss"]
    summary = json.loads(ended.stdout)  # of one process only
    assert summary["processes"] == 2
    assert summary["test"][0]["clean"] > 0.6


def test_a_batch_that_cannot_be_shared_evenly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    assert part_of(33) == slice(11, 22)
    with pytest.raises(InputError, match=r"multiple of the 3 processes.*got 32"):
        part_of(32)
