"""`patchguard` in a process of its own, and the records that it left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import patchguard
from patchguard.runs.records import Folder


def lines(folder: Path) -> list[str]:
    found = [line for shard in Folder(folder).shards() for line in shard.read_text().splitlines()]
    return sorted(found, key=lambda line: json.loads(line)["index"])


def start(words: list[str], *before: str) -> subprocess.Popen:
    home = str(Path(patchguard.__file__).parents[1])
    settings = {**os.environ, "PYTHONPATH": home, "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *(before or ("-m", "patchguard")), *words], env=settings, **quiet)
