"""The dedup index: the paragraph keys of all crawls so far, for incremental dedup.

An index is a folder: one array file of sorted keys and page counts for each range of the 64-bit
space, and `index.json`, which lists them with their digests and is written last. A file that
`index.json` does not list is no part of the index.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from models import files
from models.errors import DamagedInput, UserError
from pipelines.arrays import open_arrays, write_arrays
from pipelines.dedup import Block
from pipelines.recipe import MineRecipe

INDEX_FILE = "index.json"


def check_index(recipe: MineRecipe) -> None:
    """Refuse an `index_in` that is missing, damaged or made with other keys. Raises UserError."""
    folder = recipe.dedup.index_in
    if folder is None:
        return
    if recipe.dedup.index_out is not None and _place(folder) == _place(recipe.dedup.index_out):
        raise UserError(f"dedup.index_in and index_out are both '{folder}': give two folders")
    try:
        found = json.loads(files.read_bytes(files.join(folder, INDEX_FILE)))
        theirs, parts = found["keys"], found["ranges"]
        missing = [p["path"] for p in parts if not files.exists(files.join(folder, p["path"]))]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"dedup.index_in = '{folder}' holds no readable {INDEX_FILE}: "
            "give a folder that a finished run wrote as index_out"
        ) from None
    if missing:
        raise UserError(f"dedup.index_in = '{folder}' lacks '{missing[0]}', which it lists")
    if theirs != keys_of(recipe):
        raise UserError(
            f"dedup.index_in = '{folder}' has keys of '{theirs}', this recipe '{keys_of(recipe)}': "
            "use the same paragraphs.profile, or another index"
        )


def index_keys(folder: str | None) -> int:
    """How many keys the index at `folder` lists, which `check_index` has seen; 0 without one."""
    if folder is None:
        return 0
    listed = json.loads(files.read_bytes(files.join(folder, INDEX_FILE)))["ranges"]
    return sum(int(entry["keys"]) for entry in listed)


def _place(folder: str) -> str:
    if files.is_local(folder):
        return str(files.local_path(folder).resolve())
    return files.filesystem(folder)[1].rstrip("/")


def keys_of(recipe: MineRecipe) -> str:
    """What the keys of an index mean: keys made otherwise cannot be compared."""
    return f"sha1-64/{recipe.paragraphs.profile}"


def read_index_range(folder: str, part: int, parts: int) -> Block:
    """The keys of range `part` of `parts` in the index at `folder`, whatever its own parts are.

    Raises DamagedInput when a file of the index is cut or changed.
    """
    listed: list[dict[str, Any]] = json.loads(files.read_bytes(files.join(folder, INDEX_FILE)))[
        "ranges"
    ]
    low, high = part * len(listed), (part + 1) * len(listed)  # in units of 1 / (parts * theirs)
    blocks = []
    for theirs, entry in enumerate(listed):
        if theirs * parts < high and (theirs + 1) * parts > low:
            path = files.join(folder, entry["path"])
            if not _is_whole(folder, entry):
                raise DamagedInput(
                    "damaged_index", f"'{path}' is missing or differs from its digest"
                )
            with open_arrays(path) as file:
                keys, counts = file.read("keys"), file.read("page_counts")
            width = 2**64 // parts
            first = int(np.searchsorted(keys, np.uint64(part * width)))
            last = keys.size
            if part + 1 < parts:
                last = int(np.searchsorted(keys, np.uint64((part + 1) * width)))
            blocks.append(Block(keys[first:last], counts[first:last]))
    return Block(
        np.concatenate([block.keys for block in blocks]),
        np.concatenate([block.page_counts for block in blocks]),
    )


def write_index_range(folder: str, part: int, parts: int, block: Block) -> dict[str, Any]:
    """Write one range of a new index; gives its entry for `publish_index`."""
    digest = files.xxh3_bytes(block.keys.tobytes() + block.page_counts.tobytes())[:16]
    name = f"keys-{part:05d}-of-{parts:05d}-{digest}.arrays"
    path = files.join(folder, name)
    write_arrays(path, {"keys": block.keys, "page_counts": block.page_counts}, {})
    return {"path": name, "keys": int(block.keys.size), "xxh3": files.xxh3_file(path)}


def damaged_ranges(folder: str) -> list[str]:
    """Range files of the index in `folder` that are missing or differ from their digest."""
    listing = json.loads(files.read_bytes(files.join(folder, INDEX_FILE)))
    return [entry["path"] for entry in listing["ranges"] if not _is_whole(folder, entry)]


def _is_whole(folder: str, entry: dict[str, Any]) -> bool:
    try:
        return bool(files.xxh3_file(files.join(folder, entry["path"])) == entry["xxh3"])
    except OSError:
        return False


def index_listing(recipe: MineRecipe, entries: list[dict[str, Any]]) -> str:
    """The text of `index.json` for the range files `entries`."""
    listing = {"keys": keys_of(recipe), "ranges": entries}
    return json.dumps(listing, indent=1, sort_keys=True) + "\n"


def publish_index(folder: str, listing: str) -> None:
    """Write `index.json`: from now on the index exists."""
    files.write_atomic(files.join(folder, INDEX_FILE), listing)


def index_xxh3(folder: str | None) -> str | None:
    """XXH3 of the listing of the index in `folder`; None when there is no index."""
    if folder is None or not files.exists(files.join(folder, INDEX_FILE)):
        return None
    return files.xxh3_file(files.join(folder, INDEX_FILE))
