"""Brings the WET files of a crawl manifest into a folder: resumable, checked, one by one.

Left out on purpose: several connections at once. Common Crawl asks its users to be sparing, and
mining reads straight from the URLs, so that a download is for samples and offline machines.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from models import files
from models.errors import UserError
from models.fetch import DownloadFailed, RetryPolicy
from models.fetch import download as fetch_file
from pipelines.crawl import CrawlFile, CrawlManifest

Progress = Callable[[int, int, int, int | None], None]
"""Called with: number of the file (from 1), number of files, bytes at hand, total if known."""

_FAILURES_IN_A_ROW = 5
_TAIL_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b\x08"


@dataclass(frozen=True)
class FailedFile:
    """A file that could not be brought, as listed, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class DownloadResult:
    """manifest: what is complete, with local paths, bytes and digests. failures: what is not.

    cut: listed paths of complete files that end inside a gzip member, as some that Common Crawl
    published do; mining keeps their complete records and counts the rest.
    """

    manifest: CrawlManifest
    failures: tuple[FailedFile, ...]
    cut: tuple[str, ...]


def download(
    manifest: CrawlManifest,
    folder: Path,
    *,
    count: int | None = None,
    progress: Progress | None = None,
    policy: RetryPolicy | None = None,
) -> DownloadResult:
    """Bring the first `count` files of `manifest` (or all) into `folder`, by their listed paths.

    A complete file already there is not fetched again. A file that fails does not stop the rest;
    after five failures in a row the rest is not tried, as then something larger is wrong.
    Raises UserError (nothing to do, colliding names, disk full).
    """
    if count is not None and count < 1:
        raise UserError(f"the number of files to download is '{count}': give 1 or more")
    chosen = manifest.files[:count]
    targets = [_target(folder, file) for file in chosen]
    if len(set(targets)) < len(targets):
        raise UserError(
            f"two files of '{manifest.name}' would get the same name below '{folder}'; download "
            "them from two lists into two folders"
        )
    complete: list[CrawlFile] = []
    failures: list[FailedFile] = []
    in_a_row = 0
    for number, (file, target) in enumerate(zip(chosen, targets, strict=True), 1):

        def report(done: int, total: int | None, number: int = number) -> None:
            if progress:
                progress(number, len(chosen), done, total)

        if in_a_row == _FAILURES_IN_A_ROW:
            failures.append(FailedFile(file.path, f"not tried after {in_a_row} failures in a row"))
            continue
        try:
            complete.append(_bring(file, target, report, policy))
            in_a_row = 0
        except (DownloadFailed, OSError) as error:
            reason = error.reason if isinstance(error, DownloadFailed) else str(error)
            failures.append(FailedFile(file.path, reason))
            in_a_row += 1
    cut = tuple(file.path for file in complete if ends_whole(Path(file.url)) is False)
    return DownloadResult(
        manifest.model_copy(update={"files": tuple(complete)}), tuple(failures), cut
    )


def ends_whole(path: Path) -> bool | None:
    """Whether a gzip file ends at the end of a member; None when that cannot be told cheaply.

    Only the last MiB is read, which holds the start of the last member of a WET file (one member
    a record). A file cut exactly between two members looks whole. Raises OSError.
    """
    with path.open("rb") as file:
        if file.read(len(_GZIP_MAGIC)) != _GZIP_MAGIC:
            return None
        start = max(0, path.stat().st_size - _TAIL_BYTES)
        file.seek(start)
        tail = file.read()
    unfinished = False
    at = tail.rfind(_GZIP_MAGIC)
    while at >= 0:
        member = zlib.decompressobj(wbits=31)
        try:
            member.decompress(tail[at:])
        except zlib.error:
            pass  # these three bytes were data, no start of a member
        else:
            if member.eof and not member.unused_data:
                return True
            unfinished = unfinished or not member.eof
        at = tail.rfind(_GZIP_MAGIC, 0, at)
    return False if unfinished else None


def _target(folder: Path, file: CrawlFile) -> Path:
    target = folder.absolute() / file.place
    # The manifest's paths are checked when it is read; a link inside the folder is not.
    if not target.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"'{file.path}' would be written outside of '{folder}', through a link")
    return target


def _bring(
    file: CrawlFile,
    target: Path,
    report: Callable[[int, int | None], None],
    policy: RetryPolicy | None,
) -> CrawlFile:
    """The complete file at `target`, fetched if need be. Raises DownloadFailed, OSError."""
    here = _stored(file, target)
    # Without a known size, a file that someone else left here may be the start of one.
    cut = here is not None and file.bytes is None and ends_whole(target) is False
    if here is None or cut or not _fits(here, file):
        if file.url.startswith(("http://", "https://")):
            fetch_file(file.url, target, size_bytes=file.bytes, policy=policy, progress=report)
        else:
            _copy(file.url, target)
        here = _stored(file, target)
        if here is None or not _fits(here, file):
            target.unlink(missing_ok=True)
            raise OSError(f"what came from '{file.url}' is not the file of the manifest")
    size_bytes = target.stat().st_size
    report(size_bytes, size_bytes)
    return here


def _stored(file: CrawlFile, target: Path) -> CrawlFile | None:
    if not target.is_file():
        return None
    found = {"url": str(target), "bytes": target.stat().st_size, "xxh3": files.xxh3_file(target)}
    return file.model_copy(update=found)


def _fits(here: CrawlFile, file: CrawlFile) -> bool:
    return file.bytes in (None, here.bytes) and file.xxh3 in (None, here.xxh3)


def _copy(url: str, target: Path) -> None:
    with files.atomic_path(target) as temporary:
        if files.is_local(url):
            shutil.copyfile(files.local_path(url), temporary)
            return
        try:
            system, path = files.filesystem(url)
            system.get_file(path, str(temporary))
        except Exception as error:
            # Each storage library has exceptions of its own, with no common base.
            raise OSError(f"'{url}': {type(error).__name__}: {error}") from error
