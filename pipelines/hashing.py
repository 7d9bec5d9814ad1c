"""Pass 1: one WET file becomes a file of paragraph keys.

The key file is named by what it depends on: the WET file's bytes and the settings that choose
and normalise paragraphs. One that stands there undamaged is finished work.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterable, Iterator

import numpy as np

from models import files
from models.errors import DamagedInput, Fault
from pipelines.arrays import open_arrays
from pipelines.dedup import FileKeys
from pipelines.pages import Page, read_page
from pipelines.paragraphs import paragraph_hashes
from pipelines.plan import FORMAT, InputFile, Plan
from pipelines.recipe import MineRecipe
from pipelines.wet import WetReader

BATCH_CHARS = 2_000_000
"""Text worked on at a time: enough for vectorised work, small beside everything else."""

_COPIED_BYTES = 1 << 30
# What keeps a sound input from being opened: the machine's fault, not the input's.
_OF_THE_MACHINE = {
    errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
}  # fmt: skip


def hash_file(plan: Plan, unit: InputFile) -> str:
    """Write the paragraph keys of `unit` to the staging folder; gives the path of the key file.

    Raises DamagedInput (`unreadable`) when the WET file cannot be opened at all, Fault when it
    changed while it was read, OSError when the disk is full.
    """
    with contextlib.ExitStack() as stack:
        try:
            data = stack.enter_context(input_bytes(unit.url))
        except OSError as error:
            if error.errno in _OF_THE_MACHINE:
                raise
            # Without paths of this machine: the reason stands in the manifest.
            raise DamagedInput("unreadable", error.strerror or type(error).__name__) from error
        identity = files.xxh3_bytes(data)
        path = _key_path(plan, identity)
        if _finished(path):
            return path
        hashes, offsets = [], [np.zeros(1, np.int64)]
        pages = (read_page(record, plan.recipe.pages) for record in WetReader(data))
        for batch in batches(page for page in pages if not page.dropped):
            texts = ["\n".join(page.lines) for page in batch]
            keys = paragraph_hashes(texts, plan.recipe.paragraphs.profile)
            hashes.append(keys.hashes)
            offsets.append(keys.offsets[1:] + offsets[-1][-1])
        if files.xxh3_bytes(data) != identity:  # or the key file would bear a wrong name for good
            raise Fault(f"'{unit.name}' changed while it was read")
    keys_of_file = FileKeys.of(
        np.concatenate([np.empty(0, np.uint64), *hashes]), np.concatenate(offsets)
    )
    keys_of_file.write(path, {"xxh3": identity})
    return path


@contextlib.contextmanager
def input_bytes(url: str) -> Iterator[memoryview]:
    """The bytes of the WET file at `url`. Raises OSError.

    They are copied: a mapped file that is cut meanwhile, or whose disk fails, ends the process by
    SIGBUS, without a word. Only one that is larger than any of a crawl (1 GiB) is mapped.
    """
    if files.is_local(url) and files.size_bytes(url) <= _COPIED_BYTES:
        yield memoryview(files.read_bytes(url))
    else:
        with files.mapped(url) as data:
            yield data


def batches(pages: Iterable[Page]) -> Iterator[list[Page]]:
    """Consecutive pages of about BATCH_CHARS of text."""
    size = 0
    batch: list[Page] = []
    for page in pages:
        batch.append(page)
        size += page.chars
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _key_path(plan: Plan, identity: str) -> str:
    recipe: MineRecipe = plan.recipe
    settled = [FORMAT, identity, recipe.pages.model_dump(exclude={"min_chars_after"}),
               recipe.paragraphs.model_dump()]  # fmt: skip
    digest = files.xxh3_bytes(json.dumps(settled, sort_keys=True).encode())
    return files.join(plan.staging, "keys", f"{digest}.arrays")


def _finished(path: str) -> bool:
    try:
        with open_arrays(path) as file:
            file.verify()
    except (OSError, DamagedInput):
        return False
    return True


def pack_bits(bits: np.ndarray) -> bytes:
    """Bool array, shape (n,), as bytes: one bit for each value."""
    return np.packbits(bits).tobytes()


def unpack_bits(packed: Iterable[tuple[int, bytes]]) -> np.ndarray:
    """Bool array from (count, bytes) pieces in order."""
    pieces = [
        np.unpackbits(np.frombuffer(data, np.uint8), count=count).astype(bool)
        for count, data in packed
    ]
    return np.concatenate([np.empty(0, bool), *pieces])
