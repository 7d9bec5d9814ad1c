"""Downloads that survive bad lines: resumed, checked, and whole or not there at all.

The bytes that arrive are the bytes that are stored (no content decoding). They grow in a hidden
partial file beside the destination, which is kept between tries and between runs, together with
a note of what the server said the file was (ETag, Last-Modified, length); the rename comes last.
Resume asks with If-Range (RFC 9110 §13.1.5, §14), so that two versions are never pieced together.
Left out on purpose: several connections for one file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import requests

from models import files
from models.errors import Fault, UserError
from models.http_get import (
    DownloadFailed,
    MayPass,
    RetryPolicy,
    WillNotPass,
    body_blocks,
    content_length,
    content_range,
    expect_status,
    get,
    read_url_bytes,
    retry,
)

__all__ = ["DownloadFailed", "Progress", "RetryPolicy", "download", "exclusive", "read_url_bytes"]

Progress = Callable[[int, int | None], None]
"""Called with the bytes at hand and the total, if known. The first goes back on a restart."""

_LOCK_POLL_S = 0.2
_Note = dict[str, str | int | None]


def download(
    url: str,
    destination: Path,
    *,
    sha256: str | None = None,
    size_bytes: int | None = None,
    policy: RetryPolicy | None = None,
    progress: Progress | None = None,
) -> None:
    """Fetch `url` (http, https) to `destination`, replacing what stands there, whole or not at all.

    `sha256` (64 hex digits) and `size_bytes` are checked before the file gets its name; a wrong
    digest removes what was fetched. Of two processes with one destination the second waits, and
    takes the file of the first. Raises DownloadFailed, UserError (disk full), OSError.
    """
    policy = policy or RetryPolicy()
    deadline = policy.clock() + policy.deadline_s
    before = _identity(destination)
    with exclusive(destination, policy):
        if before != _identity(destination) and _is_file(destination, sha256, size_bytes):
            return
        transfer = _Transfer(
            url=url,
            destination=destination,
            size_bytes=size_bytes,
            policy=policy,
            deadline=deadline,
            progress=progress or (lambda done, total: None),
        )
        with requests.Session() as session:
            tries = retry(
                url, policy, deadline, lambda: transfer.attempt(session), transfer.part_bytes
            )
        if sha256 is not None and (found := files.sha256_file(transfer.part)) != sha256:
            transfer.discard()
            reason = f"its SHA-256 is {found}, expected {sha256}"
            raise DownloadFailed(url, reason, tries, permanent=True)
        with transfer.part.open("rb") as file:
            os.fsync(file.fileno())
        transfer.part.replace(destination)
        transfer.discard()


@contextlib.contextmanager
def exclusive(path: Path, policy: RetryPolicy | None = None) -> Iterator[None]:
    """Hold the right to make the file `path`, against other processes on this machine.

    A hidden lock file beside `path` lives as long as the block; the lock of a dead process is
    free at once. Raises Fault after `policy.deadline_s` of waiting, OSError.
    """
    policy = policy or RetryPolicy()
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.gristmill-lock")
    end = policy.clock() + policy.deadline_s
    while True:
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if policy.clock() >= end:
                    raise Fault(f"another process holds '{lock}' for too long") from None
                policy.sleep(_LOCK_POLL_S)
                continue
            # The holder before us may have removed the file that we opened: then others open
            # a new one, and our lock on the old one keeps nobody out.
            if _identity(lock) != (os.fstat(file.fileno()).st_dev, os.fstat(file.fileno()).st_ino):
                continue
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


@dataclass(frozen=True)
class _Transfer:
    """One file on its way: the partial file, the note beside it, and one try to go on."""

    url: str
    destination: Path
    size_bytes: int | None
    policy: RetryPolicy
    deadline: float
    progress: Progress

    @property
    def part(self) -> Path:
        return self.destination.with_name(f".{self.destination.name}.gristmill-part")

    @property
    def note(self) -> Path:
        return self.destination.with_name(f".{self.destination.name}.gristmill-part.json")

    def part_bytes(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def discard(self) -> None:
        self.part.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)

    def attempt(self, session: requests.Session) -> None:
        """Fetch what is missing. Raises MayPass, WillNotPass."""
        note = self._read_note()
        have = self.part_bytes()
        mark = _if_range(note)
        if have and have == note.get("total") and self.size_bytes in (None, have):
            return
        headers = {"Range": f"bytes={have}-", "If-Range": mark} if have and mark else {}
        with get(session, self.url, headers, self.policy) as response:
            if headers and response.status_code in (206, 416):
                start, total = content_range(response)
                whole = response.status_code == 416 and total == have
                fits = whole or (response.status_code == 206 and start == have)
                if not fits or not _same_file(response, note):
                    self.discard()
                    raise MayPass(f"the server cannot go on from byte {have} of the same file")
            else:
                expect_status(response, 200)
                whole = False
                have, total = 0, content_length(response)
                self._start_anew(response, total)
            if self.size_bytes is not None and total not in (None, self.size_bytes):
                self.discard()
                raise WillNotPass(f"the server has {total} bytes, expected {self.size_bytes}")
            if not whole:
                self._receive(response, have, total)

    def _receive(self, response: requests.Response, have: int, total: int | None) -> None:
        wanted = self.size_bytes if total is None else total
        largest = self.policy.largest_bytes if wanted is None else wanted
        _check_space(self.part, (wanted or have) - have)
        self.progress(have, wanted)
        with self.part.open("ab") as file:
            for block in body_blocks(response, self.policy, self.deadline):
                have += len(block)
                if have > largest:
                    self.discard()
                    raise WillNotPass(f"it is larger than {largest} bytes")
                try:
                    file.write(block)
                except OSError as error:
                    if error.errno == errno.ENOSPC:
                        raise _disk_full(self.part, (wanted or have) - have) from None
                    raise
                self.progress(have, wanted)
        if wanted is not None and have < wanted:
            raise MayPass(f"the body ended at byte {have} of {wanted}")

    def _start_anew(self, response: requests.Response, total: int | None) -> None:
        """A whole body comes: forget the old bytes first, then note whose bytes the new ones are.

        In this order a crash in between leaves no bytes under the wrong note.
        """
        self.discard()
        note = {"url": self.url, **_validator(response), "total": total}
        files.write_atomic(self.note, json.dumps(note))

    def _read_note(self) -> _Note:
        try:
            note = json.loads(self.note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return note if isinstance(note, dict) and note.get("url") == self.url else {}


def _validator(response: requests.Response) -> dict[str, str]:
    names = {"etag": "ETag", "last_modified": "Last-Modified"}
    return {key: response.headers[name] for key, name in names.items() if name in response.headers}


def _same_file(response: requests.Response, note: _Note) -> bool:
    return all(note.get(key) == value for key, value in _validator(response).items())


def _if_range(note: _Note) -> str | None:
    """What If-Range may hold: a weak ETag does not promise the same bytes."""
    etag = note.get("etag")
    mark = etag if isinstance(etag, str) and etag.startswith('"') else note.get("last_modified")
    return mark if isinstance(mark, str) else None


def _check_space(path: Path, missing_bytes: int) -> None:
    if shutil.disk_usage(path.parent).free < missing_bytes:
        raise _disk_full(path, missing_bytes)


def _disk_full(path: Path, missing_bytes: int) -> UserError:
    free = shutil.disk_usage(path.parent).free
    return UserError(
        f"the disk is full: '{path.parent}' has {free} bytes free and {missing_bytes} more are "
        "needed; make room or choose another folder, then run the same command: it goes on"
    )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _is_file(path: Path, sha256: str | None, size_bytes: int | None) -> bool:
    return (
        path.is_file()
        and size_bytes in (None, path.stat().st_size)
        and sha256 in (None, files.sha256_file(path))
    )
