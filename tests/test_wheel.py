"""The wheel, built and installed elsewhere, does from a foreign folder what the source tree does."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import patchguard

ROOT = Path(__file__).parents[1]
PACKAGE = Path(patchguard.__file__).parent

pytestmark = pytest.mark.slow

USE = """
import json, sys
import patchguard as pg
from patchguard.data import sample
from patchguard.storage import certificate_file
from PIL import Image

guard, data = pg.load("cifar10"), sample.load()
images = data.images[:2]
proof = guard.certify(images.float() / 255, pg.Patch(5))
certificate_file.write("first.pgc", guard, images[0], pg.Patch(5))
Image.fromarray(images[0].permute(1, 2, 0).numpy()).save("first.png")
found = {
    "home": pg.__file__,
    "label": guard.predict(images.float() / 255).label.tolist(),
    "certified": proof.certified.tolist(),
    "margin": proof.margin.tolist(),
    "digest": guard.digest,
    "images": len(data),
}
print(json.dumps(found))
"""


def run(*command: str, cwd: Path, path: Path | None = None, status: int = 0) -> str:
    """Run a command in a folder that is not the source tree's, with packages from `path` before all others."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PATCHGUARD_ZOO")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    shown = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == status, shown.stdout + shown.stderr
    return shown.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    shown = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    return folder / shown.stdout.split()[-1]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    run(*pip, "--no-deps", "--no-compile", "--target", str(folder), str(wheel), cwd=folder)
    return folder


def test_the_wheel_holds_the_package_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {path.relative_to(PACKAGE.parent).as_posix() for path in files} | {"pytest_patchguard.py"}
    assert names >= {
        "patchguard/py.typed",
        "patchguard/checkpoints/cifar10.safetensors",
        "patchguard/data/sample/cifar10.npz",
        "patchguard/report/templates/page.css",
        "patchguard/report/templates/report.html.j2",
    }


def test_the_installed_package_brings_its_fixture_to_every_pytest(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "test_rule.py").write_text(
        "from patchguard.defenses import Median\n\n\n"
        "def test_the_median_is_sound(check_defense):\n    assert check_defense(Median())\n"
    )
    shown = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path, path=installed)
    assert "1 passed" in shown


def test_the_installed_package_certifies_and_verifies_from_a_foreign_folder(installed: Path, tmp_path: Path) -> None:
    from patchguard.data import sample
    from patchguard.storage import zoo

    found = json.loads(run(sys.executable, "-c", USE, cwd=tmp_path, path=installed))
    assert Path(found["home"]).is_relative_to(installed)
    assert found["images"] == 500
    guard = zoo.load("cifar10")
    images = sample.load().images[:2].float() / 255
    proof = guard.certify(images, patchguard.Patch(5))
    assert found["digest"] == guard.digest
    assert found["label"] == proof.label.tolist()
    assert found["certified"] == proof.certified.tolist()
    assert found["margin"] == proof.margin.tolist()

    command = str(installed / "bin" / "patchguard")
    assert "certify" in run(command, "--help", cwd=tmp_path, path=installed)
    words = ("verify", "--json", "first.pgc")
    told = json.loads(run(command, *words, "--model", "cifar10", "--image", "first.png", cwd=tmp_path, path=installed))
    assert (told["valid"], told["certified"]) == (True, found["certified"][0])
    data = bytearray((tmp_path / "first.pgc").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "first.pgc").write_bytes(data)
    told = json.loads(run(command, *words, cwd=tmp_path, path=installed, status=1))
    assert told["valid"] is False
