"""Two processes share every batch: the same steps, equal weights, a run that learns."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.ddp_step import take_a_step
from helpers.stripe_dataset import folder_options, write_stripes
from safetensors.torch import load_file

import patchguard
from patchguard.errors import InputError
from patchguard.training.trainer import slice_of_batch

SOURCE, TESTS = Path(patchguard.__file__).parents[1], Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), str(TESTS)]), "OMP_NUM_THREADS": "1"}


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)


def start_rank(rank: int, port: int, path: Path) -> subprocess.Popen[str]:
    """Start one of two processes as torchrun would, without waiting for torchrun itself."""
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = ENVIRONMENT | {name: str(value) for name, value in settings.items()}
    script = str(TESTS / "helpers" / "ddp_step.py")
    return subprocess.Popen([sys.executable, script, str(path)], env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_step_of_two_processes_is_that_of_one(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start_rank(rank, port, path) for rank in (0, 1)]
    take_a_step(f"{path}.alone", torch.device("cpu"))
    for process in processes:
        errors = process.communicate(timeout=240)[1]
        assert process.returncode == 0, errors
    one, first, second = (load_file(f"{path}.{name}") for name in ("alone.0", "0", "1"))
    assert one.keys() == first.keys() == second.keys()
    assert any(name.startswith("gradient.") and float(one[name].abs().max()) > 1e-3 for name in one)
    for name, tensor in one.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_run_of_two_processes_learns_stops_and_resumes(tmp_path: Path) -> None:
    data, out = write_stripes(tmp_path / "pictures"), tmp_path / "run"
    options = [*folder_options(data, out, epochs=4, other_patches=[]), "--test"]
    command = [*TORCHRUN, "-m", "patchguard", "train", *options]
    stopped = call(*command, "--minutes", "0")
    assert stopped.returncode == 0, stopped.stderr
    assert not (out / "summary.json").exists()
    ended = call(*command)
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
    assert slice_of_batch(33) == slice(11, 22)
    with pytest.raises(InputError, match=r"multiple of the 3 processes.*got 32"):
        slice_of_batch(32)
