"""Many remote files at once: globs and sizes in few requests.

A store answers a listing with 1,000 files, each with its size; asked one by one, the 90,000 files
of a crawl would take 90,000 requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsspec.utils import glob_translate

from models.remote import RemoteRefused, call, connect, protocols, state

_REQUESTS_AT_ONCE = 16
_WORTH_LISTING = 20  # files wanted from one folder


def glob(folder: str, pattern: str) -> dict[str, int | None]:
    """Files below `folder`, taken literally, that match `pattern`: URLs with sizes in bytes.

    `*`, `?` and `[...]` match within one path component, `**` across. One listing for each folder
    that the pattern reaches, some at a time; 1,000 files a request on S3.
    """
    system, _ = connect(folder)
    literal: list[str] = []
    parts = pattern.split("/")
    while len(parts) > 1 and not has_magic(parts[0]):
        literal.append(parts.pop(0))
    base = "/".join([folder.rstrip("/"), *literal])
    if "http" in protocols(system) or "**" in pattern:
        return _glob_deep(base, "/".join(parts))
    folders = [base]
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        while True:
            part = re.compile(glob_translate(parts.pop(0)))
            names = {
                name: info
                for listing in pool.map(_children, folders)
                for name, info in listing.items()
                if part.match(name.rsplit("/", 1)[-1])
            }
            if not parts:
                return {name: i["size"] for name, i in names.items() if i["type"] == "file"}
            folders = sorted(name for name, info in names.items() if info["type"] == "directory")
            while len(parts) > 1 and not has_magic(parts[0]):
                folders = [f"{name}/{parts[0]}" for name in folders]
                parts.pop(0)


def has_magic(text: str) -> bool:
    """Whether `text` holds a character that `glob` gives a meaning."""
    return any(c in text for c in "*?[")


def sizes(urls: Sequence[str]) -> dict[str, int | None]:
    """Each file in `urls` that is there, with its size in bytes where the store states it.

    A folder of which many files are wanted is listed (1,000 files a request on S3); others are
    asked one by one, some at a time. Raises RemoteRefused when the store refuses all of them.
    """
    wanted: dict[str, list[str]] = {}
    for url in urls:
        wanted.setdefault(url.rsplit("/", 1)[0], []).append(url)
    found: dict[str, int | None] = {}
    refused: list[RemoteRefused] = []

    def ask(url: str) -> dict[str, Any] | None:
        try:
            return state(url)
        except RemoteRefused as error:
            refused.append(error)
        except OSError:
            pass
        return None

    def look(folder: str) -> dict[str, dict[str, Any]]:
        try:
            return _children(folder)
        except OSError:  # a right to read is not always a right to list
            return {}

    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        folders = [
            folder
            for folder, inside in wanted.items()
            if len(inside) >= _WORTH_LISTING and not folder.startswith(("http://", "https://"))
        ]
        for folder, listing in zip(folders, pool.map(look, folders), strict=True):
            for url in wanted[folder]:
                if url in listing and listing[url]["type"] == "file":
                    found[url] = listing[url]["size"]
        rest = [url for url in urls if url not in found]
        for url, info in zip(rest, pool.map(ask, rest), strict=True):
            if info is not None and info.get("type", "file") == "file":
                found[url] = info.get("size")
    if refused and not found:
        raise refused[0]
    return found


def _children(folder: str) -> dict[str, dict[str, Any]]:
    """What stands directly in `folder`, by URL; nothing when it is not there."""
    system, path = connect(folder)
    try:
        listing = call(folder, lambda: system.ls(path, detail=True))
    except FileNotFoundError:
        return {}
    base = folder.rstrip("/")
    return {
        f"{base}/{name}": info
        for info in listing
        if (name := _below(path, info["name"])) and "/" not in name
    }


def _glob_deep(base: str, pattern: str) -> dict[str, int | None]:
    """`glob` by one listing of all that is below `base`."""
    system, path = connect(base)
    if "http" in protocols(system):
        found = call(base, lambda: system.glob(f"{path.rstrip('/')}/{pattern}", detail=True))
        return {name: i["size"] for name, i in found.items() if i["type"] == "file"}
    matches = re.compile(glob_translate(pattern))
    listing = call(base, lambda: system.find(path, detail=True))
    return {
        f"{base}/{name}": info["size"]
        for full, info in listing.items()
        if (name := _below(path, full)) and matches.match(name)
    }


def _below(folder: str, name: str) -> str:
    """`name` relative to `folder`; "" when it is not inside."""
    prefix = folder.strip("/") + "/"
    name = name.strip("/")
    return name.removeprefix(prefix) if name.startswith(prefix) else ""
