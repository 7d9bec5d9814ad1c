"""Models on an object store, fetched to the machine that works with them.

KenLM maps its files into memory, so they have to stand on a local disk. Each machine fetches a
model once, under a lock, into `remote-models/SHA-256/NAME` of the user's cache; the digest is
checked before the file gets that name, so that a file there is known to be right. Left out on
purpose: removal of anything from the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

from models import files, remote
from models.errors import Fault, UserError
from models.fetch import exclusive
from models.kenlm_tools import cache_dir
from models.ngram import MODEL_SUFFIX, SIDECAR_SUFFIX, TOKENIZER_SUFFIX
from models.remote_listing import glob

_INCOMING = ".incoming"


def local_model(path_or_url: str, sha256: str) -> str:
    """The model as a file of this machine: a path as it stands, a URL after it was fetched.

    `sha256`: 64 hex digits. Raises Fault when the store now holds another file, OSError.
    """
    if files.is_local(path_or_url):
        return path_or_url
    target = _cached(sha256, path_or_url)
    if target.is_file():
        return str(target)
    own = cache_dir() / "models" / target.name  # a container image may bring it (Dockerfile)
    with exclusive(target):
        if not target.is_file() and own.is_file() and files.sha256_file(own) == sha256:
            target.unlink(missing_ok=True)  # a link into a cache that has moved
            target.symlink_to(own)
        if not target.is_file():
            incoming = target.with_name(f".{target.name}{_INCOMING}")
            _download(path_or_url, incoming)
            found = files.sha256_file(incoming)
            if found != sha256:
                incoming.unlink()
                raise Fault(
                    f"model '{path_or_url}' has the SHA-256 {found}, expected {sha256}: it was "
                    "changed during the run; put it back, or begin anew with --restart"
                )
            incoming.replace(target)
    return str(target)


def publish_model(path: str, sha256: str, folder: str) -> str:
    """Copy the local model file `path` below `folder` (path or URL); gives its new place.

    A file that stands there with the right size is kept: its name holds its digest.
    Raises OSError.
    """
    target = files.join(folder, sha256, files.local_path(path).name)
    with contextlib.suppress(OSError):
        if files.size_bytes(target) == files.size_bytes(path):
            return target
    if files.is_local(target):
        with files.atomic_path(target) as temporary:
            shutil.copyfile(files.local_path(path), temporary)
    else:
        remote.upload(str(files.local_path(path)), target)
    return target


def fetch_folder(url: str) -> Path:
    """A local folder with the language models that stand directly in the remote folder `url`.

    The files are links into the cache; one whose store states the same version as last time is
    not fetched again. Raises UserError when the folder cannot be listed, OSError.
    """
    try:
        names = [found.rsplit("/", 1)[-1] for found in glob(url, "*")]
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"the folder '{url}' cannot be listed ({reason}): check the URL") from None
    suffixes = (MODEL_SUFFIX, SIDECAR_SUFFIX, TOKENIZER_SUFFIX)
    wanted = [name for name in names if name.endswith(suffixes) and not name.startswith(".")]
    folder = cache_dir() / "remote-models" / files.xxh3_bytes(url.rstrip("/").encode())[:16]
    with exclusive(folder / "links"):
        for link in folder.glob("[!.]*"):
            if link.name not in wanted:
                link.unlink()
        for name in wanted:
            _link(files.join(url, name), folder / name)
    return folder


def _link(url: str, link: Path) -> None:
    note = link.with_name(f".{link.name}.json")
    # What a store says of a file (ETag, generation, time, size) changes when the file does.
    version = files.xxh3_bytes(repr(sorted(remote.state(url).items(), key=str)).encode())
    with contextlib.suppress(OSError, ValueError, KeyError):
        if json.loads(note.read_text())["version"] == version and link.is_file():
            return
    incoming = link.with_name(f".{link.name}{_INCOMING}")
    _download(url, incoming)
    target = _cached(files.sha256_file(incoming), url)
    target.parent.mkdir(parents=True, exist_ok=True)
    incoming.replace(target)
    fresh = link.with_name(f".{link.name}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(target, link.parent))
    fresh.replace(link)  # at no moment is there none: another command may be about to open it
    files.write_atomic(note, json.dumps({"version": version}))


def _download(url: str, incoming: Path) -> None:
    try:
        remote.download(url, str(incoming))
    except BaseException:
        incoming.unlink(missing_ok=True)  # gigabytes perhaps, on a disk that is full
        raise


def _cached(sha256: str, url: str) -> Path:
    return cache_dir() / "remote-models" / sha256 / url.rsplit("/", 1)[-1]
