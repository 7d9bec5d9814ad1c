"""Files by path or fsspec URL: atomic writes, digests, whole-file reads.

Every file that Gristmill publishes goes through `atomic_path`: written under a temporary name
and renamed, so that no partial file ever stands under a final name. A plain path and a
`file://` URL are handled with the operating system alone; other URLs go through fsspec
(gs, s3, hdfs, https), where one PUT of the finished file takes the place of the rename.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import mmap
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import xxhash

from models.errors import UserError

TEMPORARY_SUFFIX = ".gristmill-tmp"
_BLOCK_BYTES = 1 << 20
_WAITS_S = (1.0, 4.0, 16.0)
"""Between tries to copy a remote file."""


def is_local(url: str | os.PathLike[str]) -> bool:
    """Whether `url` is a plain path or a file:// URL."""
    text = os.fspath(url)
    return "://" not in text or text.startswith("file://")


def local_path(url: str | os.PathLike[str]) -> Path:
    """The path of a local `url` (see `is_local`), with `~` expanded as fsspec does."""
    return Path(os.fspath(url).removeprefix("file://")).expanduser()


def join(base: str | os.PathLike[str], *parts: str) -> str:
    """`base/part/part`, for paths and URLs alike."""
    return "/".join([os.fspath(base).rstrip("/") or "/", *parts])


def filesystem(url: str | os.PathLike[str]) -> tuple[Any, str]:
    """The fsspec file system of `url`, and the path inside it.

    Raises UserError when no file system is known or installed for the scheme.
    """
    try:
        system, path = fsspec.core.url_to_fs(os.fspath(url))
    except (ImportError, ValueError) as error:
        raise UserError(f"'{os.fspath(url)}' cannot be opened: {error}") from None
    return system, str(path)


def find(folder: str | os.PathLike[str], pattern: str) -> list[str]:
    """Paths below `folder` that match the glob `pattern`; `folder` itself is taken literally."""
    system, root = filesystem(folder)
    return sorted(str(path) for path in system.glob(f"{glob.escape(root)}/{pattern}"))


def exists(url: str | os.PathLike[str]) -> bool:
    """Whether something stands at `url`."""
    if is_local(url):
        return local_path(url).exists()
    system, path = filesystem(url)
    return bool(system.exists(path))


def size_bytes(url: str | os.PathLike[str]) -> int:
    """Size of the file at `url`. Raises OSError when it cannot be read."""
    if is_local(url):
        return local_path(url).stat().st_size
    system, path = filesystem(url)
    size = system.info(path).get("size")
    if size is None:
        raise OSError(f"the server does not say how large {os.fspath(url)!r} is")
    return int(size)


def read_bytes(url: str | os.PathLike[str]) -> bytes:
    """The whole file at `url`. Raises OSError."""
    if is_local(url):
        return local_path(url).read_bytes()
    system, path = filesystem(url)
    with _as_os_errors():
        return bytes(system.cat_file(path))


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """What a remote file system raises, as the OSError that it means."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise OSError(None, f"{type(error).__name__}: {error}") from error


def _copy_down(system: Any, remote: str, path: Path) -> None:
    """Copy a remote file, again after a passing failure. Raises OSError."""
    for wait_s in (*_WAITS_S, None):
        try:
            with _as_os_errors():
                system.get_file(remote, str(path))
            return
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            raise
        except OSError:
            if wait_s is None:
                raise
            time.sleep(wait_s)


@contextlib.contextmanager
def mapped(url: str | os.PathLike[str]) -> Iterator[memoryview]:
    """The bytes of the file at `url` as a read-only view, memory-mapped.

    A remote file is first copied to a local temporary file, which goes away at the end.
    An empty file gives an empty view. Raises OSError.
    """
    with contextlib.ExitStack() as stack:
        if is_local(url):
            path = local_path(url)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gristmill-"))
            path = Path(folder) / "copy"
            system, remote = filesystem(url)
            _copy_down(system, remote, path)
        file = stack.enter_context(path.open("rb"))
        if os.fstat(file.fileno()).st_size == 0:
            yield memoryview(b"")
            return
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(mapping)
        try:
            yield view
        finally:
            # Someone may still hold a slice of the view: then the mapping goes with the last one.
            with contextlib.suppress(BufferError):
                view.release()
                mapping.close()


@contextlib.contextmanager
def atomic_path(url: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """A local temporary path that becomes the file `url` when the block ends without an error.

    Local: fsync, then a rename beside the target. Remote: one PUT of the finished file.
    After an error nothing stands under the final name and the temporary file is gone.
    durable=False leaves out the fsync: for intermediate files, which are checked when read, so
    that one cut by a power failure is only made again.
    """
    with contextlib.ExitStack() as stack:
        if is_local(url):
            target = local_path(url)
            target.parent.mkdir(parents=True, exist_ok=True)
            name = f".{target.name}.{uuid.uuid4().hex[:12]}{TEMPORARY_SUFFIX}"
            temporary = target.with_name(name)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gristmill-"))
            temporary = Path(folder) / "file"
        try:
            yield temporary
            if is_local(url):
                if durable:
                    with temporary.open("rb") as file:
                        os.fsync(file.fileno())
                temporary.replace(target)
            else:
                system, remote = filesystem(url)
                with _as_os_errors():
                    system.put_file(str(temporary), remote)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()


def write_atomic(url: str | os.PathLike[str], data: bytes | str, *, durable: bool = True) -> None:
    """Write `data` (text as UTF-8) to `url`, all of it or nothing; `durable`: see `atomic_path`."""
    with atomic_path(url, durable=durable) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def sweep(folder: str | os.PathLike[str]) -> None:
    """Remove the temporary files that a killed process left in a local `folder` and below."""
    if is_local(folder):
        for path in local_path(folder).rglob(f".*{TEMPORARY_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def remove_tree(url: str | os.PathLike[str]) -> None:
    """Remove the folder `url` and all in it; nothing happens when it is not there."""
    system, path = filesystem(url)
    if system.exists(path):
        system.rm(path, recursive=True)


def xxh3_bytes(data: bytes | bytearray | memoryview) -> str:
    """XXH3 of `data`, 128 bits, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def xxh3_file(url: str | os.PathLike[str]) -> str:
    """XXH3 of the file at `url`, 128 bits, as 32 hex digits. Raises OSError."""
    return str(_digest_file(url, xxhash.xxh3_128()))


def sha256_file(url: str | os.PathLike[str]) -> str:
    """SHA-256 of the file at `url`, as 64 hex digits. Raises OSError."""
    return str(_digest_file(url, hashlib.sha256()))


def _digest_file(url: str | os.PathLike[str], digest: Any) -> Any:
    with mapped(url) as data:
        for start in range(0, len(data), _BLOCK_BYTES):
            digest.update(data[start : start + _BLOCK_BYTES])
    return digest.hexdigest()
