"""Files: all or nothing, whatever the file system; a passing failure is tried again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import fsspec
import pytest
import xxhash

from models import files, remote
from models.errors import UserError


@pytest.fixture(params=["local", "file URL", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        return "memory://folder"
    return str(tmp_path) if request.param == "local" else f"file://{tmp_path}"


def test_round_trip(folder: str) -> None:
    url = files.join(folder, "sub", "a.txt")
    assert not files.exists(url)
    files.write_atomic(url, "বল")
    assert files.exists(url)
    data = "বল".encode()
    assert files.read_bytes(url) == data
    assert files.size_bytes(url) == len(data)
    with files.mapped(url) as view:
        assert bytes(view) == data
    assert files.xxh3_file(url) == files.xxh3_bytes(data) == xxhash.xxh3_128_hexdigest(data)
    assert files.sha256_file(url) == hashlib.sha256(data).hexdigest()
    assert [path.rsplit("/", 1)[-1] for path in files.find(folder, "sub/*")] == ["a.txt"]
    files.remove_tree(files.join(folder, "sub"))
    assert not files.exists(url)
    files.remove_tree(files.join(folder, "sub"))


def test_an_error_leaves_nothing(folder: str) -> None:
    url = files.join(folder, "a.txt")
    files.write_atomic(url, b"before")
    with pytest.raises(RuntimeError), files.atomic_path(url) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert files.read_bytes(url) == b"before"
    assert len(files.find(folder, "*")) == 1


def test_an_empty_file(folder: str) -> None:
    url = files.join(folder, "empty")
    files.write_atomic(url, b"")
    with files.mapped(url) as view:
        assert len(view) == 0


def test_a_slice_outlives_the_mapping(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    with files.mapped(tmp_path / "a") as view:
        kept = view[2:5]
    assert bytes(kept) == b"234"


def test_leftovers_are_swept(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / f".x.0123{files.TEMPORARY_SUFFIX}").write_bytes(b"half")
    (tmp_path / "sub" / "x").write_bytes(b"whole")
    files.sweep(tmp_path)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["x"]


def test_home_is_expanded_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    files.write_atomic("~/a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"
    assert files.find("~", "*") == [str(tmp_path / "a")]


def test_an_unknown_scheme_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="'nope://x'"):
        files.exists("nope://x")


class Flaky:
    """A remote file system that fails some times, in its own way."""

    protocol = "flaky"

    def __init__(self, failures: list[Exception | bytes]) -> None:
        self.failures = failures
        self.tries = 0

    def info(self, remote: str) -> dict[str, Any]:
        return {"type": "file", "size": len(b"content")}

    def get_file(self, remote: str, local: str) -> None:
        self.tries += 1
        failure = self.failures.pop(0) if self.failures else b"content"
        if isinstance(failure, Exception):
            raise failure
        Path(local).write_bytes(failure)


class HTTPStatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.status = status


def test_a_passing_failure_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)

    def read(*failures: Exception | bytes) -> tuple[Any, int]:
        system = Flaky(list(failures))
        monkeypatch.setattr(remote, "connect", lambda url: (system, "x"))
        try:
            with files.mapped("far://x") as view:
                return bytes(view), system.tries
        except OSError as error:
            return error, system.tries

    assert read(RuntimeError("503"), TimeoutError()) == (b"content", 3)
    assert [round(wait / full, 9) <= 1.0 for wait, full in zip(waits, [1, 4], strict=True)] == [
        True, True]  # fmt: skip
    assert waits[0] >= 0.5
    assert waits[1] >= 2
    assert read(b"cont", b"") == (b"content", 3)
    assert read(HTTPStatusError(503), HTTPStatusError(429)) == (b"content", 3)
    error, tries = read(*(RuntimeError("503") for _ in range(9)))
    assert (error.strerror, error.filename, tries) == ("RuntimeError: 503", "far://x", 4)
    error, tries = read(*(b"cont" for _ in range(9)))
    assert (error.strerror, tries) == ("4 of 7 bytes came through", 4)
    for final in (FileNotFoundError(2, "gone"), PermissionError(13, "gone"), OSError(28, "gone")):
        error, tries = read(final)
        assert (type(error), error.strerror, tries) == (type(final), "gone", 1)
    error, tries = read(HTTPStatusError(403))
    assert (error.strerror, tries) == ("HTTPStatusError: 403", 1)
