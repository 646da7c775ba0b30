"""One file over HTTP from a server on this machine, cut connections and wrong files included."""

import hashlib
from pathlib import Path

import pytest
from helpers.file_server import FileServer, serve

from patchguard.data import download as module
from patchguard.data.catalog import data_root
from patchguard.data.download import cache_folder, download
from patchguard.errors import InputError

CONTENT = bytes(range(256)) * 40
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.0)
    monkeypatch.setattr(module, "CHUNK", 1000)
    monkeypatch.delenv("http_proxy", raising=False)


def get(server: FileServer, path: Path, **settings: object) -> None:
    download(f"{server.url}/a.bin", path, **{"limit": len(CONTENT), "digest": DIGEST, **settings})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_arrives_whole_and_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    with serve(FileServer({"/a.bin": CONTENT})) as server:
        get(server, tmp_path / "a.bin", progress=lambda *counts: told.append(counts))
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert names(tmp_path) == ["a.bin"]
    assert told[0] == (1000, len(CONTENT))
    assert told[-1] == (len(CONTENT), len(CONTENT))


def test_a_cut_connection_is_resumed_in_the_same_call(tmp_path: Path) -> None:
    with serve(FileServer({"/a.bin": CONTENT}, cuts=[3000, 2500])) as server:
        get(server, tmp_path / "a.bin")
        assert [span for _, span in server.asked] == [None, "bytes=3000-", "bytes=5500-"]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_failed_download_keeps_its_part_and_the_next_call_goes_on(tmp_path: Path) -> None:
    with serve(FileServer({"/a.bin": CONTENT}, cuts=[3000, 0])) as server:
        with pytest.raises(InputError, match=r"ended after 3,000 of 10,240 bytes\. Try again\."):
            get(server, tmp_path / "a.bin", advice="Try again.")
        assert names(tmp_path) == ["a.bin.part"]
        get(server, tmp_path / "a.bin")
        assert server.asked[-1] == ("/a.bin", "bytes=3000-")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert names(tmp_path) == ["a.bin"]


def test_connections_that_bring_little_come_to_an_end(tmp_path: Path) -> None:
    with (
        serve(FileServer({"/a.bin": CONTENT}, cuts=[1] * 100)) as server,
        pytest.raises(InputError, match="ended after 5 of"),
    ):
        get(server, tmp_path / "a.bin")
    assert len(server.asked) == module.CONNECTIONS


def test_a_server_that_cannot_resume_sends_everything_again(tmp_path: Path) -> None:
    with serve(FileServer({"/a.bin": CONTENT}, resumes=False, cuts=[3000])) as server:
        get(server, tmp_path / "a.bin")
        assert [span for _, span in server.asked] == [None, "bytes=3000-"]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_part_that_is_already_all_of_it_is_only_checked(tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    with serve(FileServer({"/a.bin": CONTENT})) as server:
        get(server, tmp_path / "a.bin")
        assert server.asked == [("/a.bin", "bytes=10240-")]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("part", [b"x" * 3000, b"x" * len(CONTENT), b"x" * 50_000], ids=["shorter", "equal", "longer"])
def test_a_part_of_something_else_is_thrown_away(tmp_path: Path, part: bytes) -> None:
    (tmp_path / "a.bin.part").write_bytes(part)
    with serve(FileServer({"/a.bin": CONTENT})) as server:
        get(server, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert names(tmp_path) == ["a.bin"]


def test_a_wrong_digest_keeps_nothing(tmp_path: Path) -> None:
    with (
        serve(FileServer({"/a.bin": CONTENT[:-1] + b"!"})) as server,
        pytest.raises(InputError, match=rf"came with sha256 \w{{64}} and must have {DIGEST[7:]}"),
    ):
        get(server, tmp_path / "a.bin")
    assert names(tmp_path) == []


def test_an_old_file_stays_until_the_new_one_is_right(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"old")
    with serve(FileServer({"/a.bin": b"wrong"})) as server, pytest.raises(InputError, match="must have"):
        get(server, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == b"old"


@pytest.mark.parametrize(("announces", "verb"), [(True, "offers 10,240"), (False, "sent 6,000")])
def test_more_than_the_limit_is_not_taken(tmp_path: Path, announces: bool, verb: str) -> None:
    with (
        serve(FileServer({"/a.bin": CONTENT}, announces_length=announces)) as server,
        pytest.raises(InputError, match=f"{verb} bytes, more than the limit of 5,500"),
    ):
        get(server, tmp_path / "a.bin", limit=5500)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("status", "message"), [(200, "404 Not Found"), (403, "403 Forbidden"), (503, "503 Service")])
def test_a_refusal_of_the_server_is_quoted(tmp_path: Path, status: int, message: str) -> None:
    with (
        serve(FileServer({}, status=status)) as server,
        pytest.raises(InputError, match=f"cannot be downloaded: the server answers {message}"),
    ):
        get(server, tmp_path / "a.bin")
    assert len(server.asked) == 1


def test_nobody_at_the_address_is_one_sentence(tmp_path: Path) -> None:
    with serve(FileServer({})) as server:
        pass
    with pytest.raises(InputError, match=r"cannot be downloaded: .*[Cc]onnection refused"):
        get(server, tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "home/.cache/patchguard"),
        ("linux", {"XDG_CACHE_HOME": "xdg"}, "xdg/patchguard"),
        ("darwin", {"LOCALAPPDATA": "local"}, "home/.cache/patchguard"),
        ("win32", {"LOCALAPPDATA": "local", "XDG_CACHE_HOME": "xdg"}, "local/patchguard"),
        ("linux", {"PATCHGUARD_CACHE": "~/mine", "XDG_CACHE_HOME": "xdg"}, "home/mine"),
    ],
)
def test_downloads_lie_in_the_users_cache_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA", "PATCHGUARD_CACHE", "PATCHGUARD_DATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "home", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module.sys, "platform", platform)
    assert cache_folder() == Path(expected)
    assert data_root() == Path(expected) / "data"
