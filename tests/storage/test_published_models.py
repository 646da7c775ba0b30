"""Published models by name: found, or downloaded from the address in $PATCHGUARD_ZOO."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.file_server import FileServer, serve
from helpers.small_guards import srf_guard
from typer.testing import CliRunner

import patchguard
from patchguard.cli import app
from patchguard.data.download import file_digest
from patchguard.errors import InputError
from patchguard.storage import published_models, zoo
from patchguard.storage.published_models import PUBLISHED, PublishedModel, download_model

NAME = "cifar10_mask_ds"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A small model in place of a published one, on a machine that has none but the embedded one."""
    path = tmp_path / "made.safetensors"
    zoo.save(srf_guard(), path)
    content = path.read_bytes()
    monkeypatch.setitem(PUBLISHED, NAME, PublishedModel(len(content), file_digest(path)))
    monkeypatch.setattr(published_models, "CLONE", tmp_path / "no clone")
    monkeypatch.setenv("PATCHGUARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PATCHGUARD_ZOO", raising=False)
    monkeypatch.delenv("http_proxy", raising=False)
    return content


def test_every_published_file_is_the_one_in_the_table() -> None:
    for name, model in PUBLISHED.items():
        path = zoo.file_of(name).path
        assert (path.stat().st_size, file_digest(path)) == (model.size, model.sha256)


def test_a_published_model_is_downloaded_once_and_then_found(model, tmp_path, monkeypatch, caplog) -> None:
    with serve(FileServer({f"/v1/{NAME}.safetensors": model})) as server:
        monkeypatch.setenv("PATCHGUARD_ZOO", f"{server.url}/v1/")
        assert patchguard.load(NAME).model.name == "srf"
        assert f"downloading {NAME}" in caplog.text
        patchguard.load(NAME)
        assert len(server.asked) == 1
    monkeypatch.delenv("PATCHGUARD_ZOO")
    assert zoo.file_of(NAME).path == tmp_path / "cache" / "models" / f"{NAME}.safetensors"


def test_the_command_says_where_the_model_is(model, monkeypatch) -> None:
    with serve(FileServer({f"/{NAME}.safetensors": model}, cuts=[500])) as server:
        monkeypatch.setenv("PATCHGUARD_ZOO", server.url)
        listed = CliRunner().invoke(app, ["models"]).stdout
        assert f"patchguard models --download {NAME}" in listed
        shown = CliRunner().invoke(app, ["models", "--download", NAME, "--download", "cifar10"])
        assert shown.exit_code == 0, shown.output
        assert [span for _, span in server.asked] == [None, "bytes=500-"]
    lines = shown.stdout.splitlines()
    assert lines[0] == f"{NAME} is at {zoo.file_of(NAME).path}"
    assert lines[1].startswith("cifar10 is at")
    assert f"patchguard models --download {NAME}" not in CliRunner().invoke(app, ["models"]).stdout


def test_a_folder_is_searched_and_nothing_is_downloaded(model, tmp_path, monkeypatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / f"{NAME}.safetensors").write_bytes(model)
    monkeypatch.setenv("PATCHGUARD_ZOO", str(tmp_path / "mine"))
    assert download_model(NAME) == tmp_path / "mine" / f"{NAME}.safetensors"
    assert not (tmp_path / "cache").exists()


def test_several_that_ask_at_once_download_once(model, monkeypatch) -> None:
    with serve(FileServer({f"/{NAME}.safetensors": model})) as server:
        monkeypatch.setenv("PATCHGUARD_ZOO", server.url)
        threads = [threading.Thread(target=download_model, args=(NAME,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "not here: .* Set PATCHGUARD_ZOO to that folder, or to the web address"),
        ("nowhere", "not here"),
        ("ftp://example.org", "must be a folder, or an address that begins with http"),
    ],
)
def test_no_address_no_download(model, monkeypatch, address, message) -> None:
    monkeypatch.setenv("PATCHGUARD_ZOO", address)
    with pytest.raises(InputError, match=message):
        patchguard.load(NAME)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "404 Not Found.*PATCHGUARD_ZOO"),
        ({f"/{NAME}.safetensors": b"<html>please log in</html>"}, "came with sha256"),
        ({f"/{NAME}.safetensors": bytes(10**6)}, "offers 1,000,000 bytes, more than the limit"),
    ],
)
def test_what_is_not_the_model_is_one_line_and_keeps_nothing(model, tmp_path, monkeypatch, files, message) -> None:
    with serve(FileServer(files)) as server:
        monkeypatch.setenv("PATCHGUARD_ZOO", server.url)
        with pytest.raises(InputError, match=message):
            patchguard.load(NAME)
        shown = CliRunner().invoke(app, ["certify", "--model", NAME])
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert [path for path in (tmp_path / "cache").rglob("*.safetensors*") if path.suffix != ".lock"] == []


def test_a_name_that_is_not_published_is_not_asked_for(model, monkeypatch) -> None:
    with serve(FileServer({})) as server:
        monkeypatch.setenv("PATCHGUARD_ZOO", server.url)
        with pytest.raises(InputError, match="Did you mean 'cifar10_mask_ds'"):
            patchguard.load("cifar10_mask_dss")
        with pytest.raises(InputError, match="must be a published model"):
            download_model("../secrets")
        assert server.asked == []


def test_a_cache_that_cannot_be_written_is_one_sentence(model, tmp_path, monkeypatch) -> None:
    (tmp_path / "cache").write_text("in the way")
    monkeypatch.setenv("PATCHGUARD_ZOO", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"cannot be written.*PATCHGUARD_CACHE"):
        download_model(NAME)


def test_a_download_does_not_wait_for_torch() -> None:
    code = "import sys, patchguard.storage.published_models; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
