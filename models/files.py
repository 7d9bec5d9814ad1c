"""Files by path or fsspec URL: atomic writes, digests, whole-file reads.

Every file that Gristmill publishes goes through `atomic_path`: written under a temporary name
and renamed, so that no partial file ever stands under a final name. A plain path and a
`file://` URL are handled with the operating system alone; other URLs go through fsspec
(gs, s3, hdfs, https; `models.remote`), where one PUT of the finished file takes the place of the
rename.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import mmap
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from models import remote, remote_listing
from models.errors import UserError

# Python and Arrow do not say which file they were writing when the disk was full.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TEMPORARY_SUFFIX = ".gristmill-tmp"
_BLOCK_BYTES = 1 << 20
_TAIL_BYTES = 1 << 18
"""What `ranged` reads first of a remote file: all of a small one."""


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
    """The fsspec file system of `url`, and the path inside it; it caches no directory listing.

    What is done with it directly is not tried again after a failure. Raises UserError when no
    file system is known or installed for the scheme.
    """
    return remote.connect(url)


def find(folder: str | os.PathLike[str], pattern: str) -> list[str]:
    """Files below `folder` that match the glob `pattern`; `folder` itself is taken literally.

    Paths of a local folder (of folders in it too), URLs of a remote one.
    """
    if not is_local(folder):
        return sorted(remote_listing.glob(os.fspath(folder), pattern))
    system, root = filesystem(folder)
    return sorted(str(path) for path in system.glob(f"{glob.escape(root)}/{pattern}"))


def has_magic(pattern: str) -> bool:
    """Whether `pattern` holds a wildcard: `*`, `?` or `[`."""
    return remote_listing.has_magic(pattern)


def glob_sizes_bytes(pattern: str) -> dict[str, int | None]:
    """Remote files that match the URL `pattern`, with their sizes where the store tells them.

    Raises OSError; UserError for a wildcard in the name of the bucket or host.
    """
    parts = pattern.split("/")
    first = next(number for number, part in enumerate(parts) if has_magic(part))
    if first < 3:  # scheme, "", bucket
        raise UserError(f"'{pattern}' has a wildcard before the first folder: write that name out")
    return remote_listing.glob("/".join(parts[:first]), "/".join(parts[first:]))


def exists(url: str | os.PathLike[str]) -> bool:
    """Whether something stands at `url`. Raises OSError when a store does not say."""
    if is_local(url):
        return local_path(url).exists()
    try:
        remote.state(url)
    except FileNotFoundError:
        return False
    return True


def size_bytes(url: str | os.PathLike[str]) -> int:
    """Size of the file at `url`. Raises OSError when it cannot be read."""
    if is_local(url):
        return local_path(url).stat().st_size
    size = remote.state(url).get("size")
    if size is None:
        raise OSError(f"the server does not say how large {os.fspath(url)!r} is")
    return int(size)


def sizes_bytes(urls: Sequence[str]) -> dict[str, int | None]:
    """Each file in `urls` that is there, with its size where it is known, in few requests."""
    found: dict[str, int | None] = {}
    for url in urls:
        if is_local(url):
            with contextlib.suppress(OSError):
                found[url] = size_bytes(url)
    return found | remote_listing.sizes([url for url in urls if not is_local(url)])


def read_bytes(url: str | os.PathLike[str]) -> bytes:
    """The whole file at `url`. Raises OSError."""
    return local_path(url).read_bytes() if is_local(url) else remote.read(url)


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
            remote.download(url, str(path))
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


class Ranged:
    """A file of `size_bytes` that is read in pieces. Use `ranged`."""

    def __init__(self, size_bytes: int, fetch: Callable[[int, int], memoryview]) -> None:
        self.size_bytes = size_bytes
        self._fetch = fetch

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes `start:stop`, cut at the end of the file. Raises OSError."""
        return self._fetch(start, min(stop, self.size_bytes))


@contextlib.contextmanager
def ranged(url: str | os.PathLike[str]) -> Iterator[Ranged]:
    """The file at `url` for reading pieces of it: mapped, or by range requests where it is remote.

    The end of a remote file is read at once (it holds the table of contents of the formats that
    are read this way) and kept. Raises OSError.
    """
    if is_local(url):
        with mapped(url) as view:
            yield Ranged(len(view), lambda start, stop: view[start:stop])
        return
    size = size_bytes(url)
    tail_start = max(0, size - _TAIL_BYTES)
    tail = memoryview(remote.read(url, tail_start, size))

    def fetch(start: int, stop: int) -> memoryview:
        if start >= tail_start:
            return tail[start - tail_start : stop - tail_start]
        return memoryview(remote.read(url, start, stop))

    yield Ranged(size, fetch)


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
                remote.upload(str(temporary), url)
        except OSError as error:
            if error.errno in _NO_ROOM and error.filename is None:
                raise OSError(error.errno, os.strerror(error.errno), os.fspath(url)) from error
            raise
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


def remove(url: str | os.PathLike[str]) -> None:
    """Remove the file at `url`; nothing happens when it is not there."""
    if is_local(url):
        local_path(url).unlink(missing_ok=True)
    else:
        remote.remove(url)


def remove_tree(url: str | os.PathLike[str]) -> None:
    """Remove the folder `url` and all in it; nothing happens when it is not there."""
    if not is_local(url):
        remote.remove_tree(url)
        return
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
