"""Models on an object store: fetched once, checked, never taken half."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import fsspec
import pytest

from models import remote
from models.errors import Fault, UserError
from models.files import sha256_file
from models.remote_models import fetch_folder, local_model, publish_model


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder on a store with a pair of files, and a cache of its own."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    url = f"memory://{tmp_path.name}-{os.getpid()}"
    put(f"{url}/bn.sp.model", b"pieces")
    put(f"{url}/bn.arpa.bin", b"counts")
    put(f"{url}/readme.txt", b"not a model")
    return url


def put(url: str, data: bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(data)


def digest_of(data: bytes, folder: Path) -> str:
    (folder / "x").write_bytes(data)
    return sha256_file(folder / "x")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs that are downloaded from now on."""
    seen: list[str] = []
    download = remote.download

    def noting(url: str, target: str) -> None:
        seen.append(url)
        download(url, target)

    monkeypatch.setattr(remote, "download", noting)
    return seen


def test_a_path_is_taken_as_it_is() -> None:
    assert local_model("/some/model", "0" * 64) == "/some/model"


def test_a_url_is_fetched_once_by_all(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counted(monkeypatch)
    sha256 = digest_of(b"counts", tmp_path)
    paths: list[str] = []
    threads = [
        threading.Thread(target=lambda: paths.append(local_model(f"{store}/bn.arpa.bin", sha256)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert Path(paths[0]).read_bytes() == b"counts"
    assert Path(paths[0]).name == "bn.arpa.bin"
    assert seen == [f"{store}/bn.arpa.bin"]


def test_another_file_than_planned_is_refused(store: str, tmp_path: Path) -> None:
    sha256 = digest_of(b"other counts", tmp_path)
    with pytest.raises(Fault, match=rf"bn.arpa.bin' has the SHA-256 .*, expected {sha256}"):
        local_model(f"{store}/bn.arpa.bin", sha256)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_cache_that_has_moved(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = digest_of(b"counts", tmp_path)
    url = f"{store}/bn.arpa.bin"
    own = tmp_path / "cache" / "models" / "bn.arpa.bin"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"counts")
    seen = counted(monkeypatch)
    assert Path(local_model(url, sha256)).resolve() == own
    (tmp_path / "cache").rename(tmp_path / "moved")
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "moved"))
    assert Path(local_model(url, sha256)).read_bytes() == b"counts"
    assert seen == []


def test_a_failed_download_leaves_nothing(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(url: str, target: str) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(28, "no space left")

    monkeypatch.setattr(remote, "download", fill)
    with pytest.raises(OSError, match="no space left"):
        local_model(f"{store}/bn.arpa.bin", "0" * 64)
    with pytest.raises(OSError, match="no space left"):
        fetch_folder(store)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_link_is_changed_in_one_step(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    link = fetch_folder(store) / "bn.arpa.bin"
    put(f"{store}/bn.arpa.bin", b"better counts")
    read: list[bytes] = []
    symlink_to = Path.symlink_to

    def reading(self: Path, target: str) -> None:
        read.append(link.read_bytes())  # as another command may
        symlink_to(self, target)
        read.append(link.read_bytes())

    monkeypatch.setattr(Path, "symlink_to", reading)
    fetch_folder(store)
    assert read == [b"counts", b"counts"]
    assert link.read_bytes() == b"better counts"


def test_a_missing_one_is_an_os_error(store: str) -> None:
    with pytest.raises(FileNotFoundError):
        local_model(f"{store}/xx.arpa.bin", "0" * 64)


def test_a_folder_is_fetched_and_kept_up_to_date(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counted(monkeypatch)
    folder = fetch_folder(store)
    names = ["bn.arpa.bin", "bn.sp.model"]
    assert sorted(path.name for path in folder.glob("[!.]*")) == names
    assert (folder / "bn.arpa.bin").read_bytes() == b"counts"
    assert sorted(url.rsplit("/", 1)[1] for url in seen) == names
    # The machine that planned works with what it has: nothing comes a second time.
    sha256 = sha256_file(folder / "bn.arpa.bin")
    assert Path(local_model(f"{store}/bn.arpa.bin", sha256)).read_bytes() == b"counts"
    assert fetch_folder(store) == folder
    assert len(seen) == 2
    put(f"{store}/bn.arpa.bin", b"better counts")
    fsspec.filesystem("memory").rm(f"{store}/bn.sp.model")
    fetch_folder(store)
    assert [path.name for path in folder.glob("[!.]*")] == ["bn.arpa.bin"]
    assert (folder / "bn.arpa.bin").read_bytes() == b"better counts"
    assert len(seen) == 3


def test_a_folder_that_cannot_be_listed(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, pattern: str) -> None:
        raise PermissionError(13, "access denied")

    monkeypatch.setattr("models.remote_models.glob", refuse)
    with pytest.raises(UserError, match=r"'memory://.*' cannot be listed \(access denied\)"):
        fetch_folder(store)


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_publishing_copies_once(scheme: str, tmp_path: Path) -> None:
    model = tmp_path / "lid.ftz"
    model.write_bytes(b"labels")
    sha256 = sha256_file(model)
    folder = f"{scheme}{tmp_path}/staging/models"
    place = publish_model(str(model), sha256, folder)
    assert place == f"{folder}/{sha256}/lid.ftz"
    assert sha256_file(place) == sha256
    put(place, b"LABELS")  # the same size: it is known by its name
    assert publish_model(str(model), sha256, folder) == place
    with fsspec.open(place) as file:
        assert file.read() == b"LABELS"
    put(place, b"cut")
    publish_model(str(model), sha256, folder)
    assert sha256_file(place) == sha256
