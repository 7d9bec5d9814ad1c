"""Folders that appear whole: written under a hidden name beside the target, synced, renamed.

`models.files.atomic_path` does this for one file. A rename of a folder is only atomic on a local
or shared file system, so URLs of object stores are refused here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from models import files
from models.errors import UserError

PARTIAL_SUFFIX = ".gristmill-partial"


def local(directory: str | os.PathLike[str]) -> Path:
    """The path of `directory`. Raises UserError for the URL of an object store."""
    if not files.is_local(directory):
        raise UserError(
            f"output.directory = '{os.fspath(directory)}' is a URL: checkpoints and exports need "
            "a local or shared file system; copy the finished folder to the store afterwards"
        )
    return files.local_path(directory)


def partial(target: Path) -> Path:
    """Where the folder `target` is written: the same name on every rank, on the same disk."""
    return target.with_name(f".{target.name}{PARTIAL_SUFFIX}")


def sweep(parent: Path) -> None:
    """Remove the unfinished folders and files that killed runs left in `parent`."""
    for path in parent.glob(f".*{PARTIAL_SUFFIX}"):
        shutil.rmtree(path, ignore_errors=True)
    files.sweep(parent)


def publish(temporary: Path, target: Path) -> None:
    """Sync everything in `temporary` and give it the name `target`; an older one goes away.

    Killed at any moment, either nothing or a complete folder stands under `target`.
    """
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    retired = _hide(target) if target.exists() else None
    temporary.rename(target)
    sync(target.parent)
    if retired is not None:
        shutil.rmtree(retired)


def remove(target: Path) -> None:
    """Remove the folder `target`, which is never seen half removed."""
    shutil.rmtree(_hide(target))


def _hide(target: Path) -> Path:
    hidden = partial(target.with_name(f"{target.name}.old"))
    shutil.rmtree(hidden, ignore_errors=True)
    target.rename(hidden)
    return hidden


def sync(path: Path) -> None:
    """Let the disk hold what `path` (a file or a folder) is now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """An empty folder that becomes `target` when the block ends without an error."""
    temporary = partial(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
