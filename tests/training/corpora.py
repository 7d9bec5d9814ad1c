"""Tiny mined crawls for tests: a manifest and Parquet shards as the miner writes them, no Beam."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.page_crawl import Page, write_crawl
from training.recipe import Data

__all__ = ["Page", "data", "make_corpus", "random_pages"]

_WORDS = tuple(
    word
    for line in (
        "river stone mill grain wheat flour wind water wheel field road market bread salt",
        "morning evening village teacher letter window garden silver copper winter summer thunder",
    )
    for word in line.split()
)


def random_pages(
    count: int,
    *,
    seed: int = 0,
    sentences: tuple[int, int] = (3, 12),
    words: Sequence[str] = _WORDS,
    stop: str = ".",
    bucket: str = "all",
    host: str = "",
) -> list[Page]:
    """Pages of made-up sentences; each page holds a number that no other page of the call has."""
    draw = random.Random(seed)
    pages = []
    for number in range(count):
        lines = []
        for _ in range(draw.randint(*sentences)):
            chosen = draw.choices(words, k=draw.randint(4, 14))
            lines.append(" ".join(chosen).capitalize() + stop)
        lines[0] = f"Page{number} " + lines[0]
        pages.append(Page("\n".join(lines), bucket=bucket, host=host))
    return pages


def make_corpus(
    folder: str | Path,
    pages: Mapping[str, Sequence[Page]],
    *,
    row_group_rows: int = 16,
    shard_rows: int = 64,
) -> str:
    """Write a crawl of pages by language to `folder`: see `scripts.page_crawl.write_crawl`."""
    return write_crawl(
        folder, pages, name="test", row_group_rows=row_group_rows, shard_rows=shard_rows
    )


def data(*manifests: str, **fields: Any) -> Data:
    """A recipe's data section on these manifests; nothing is held out unless asked for."""
    return Data(manifests=manifests, **{"held_out": 0.0, "lanes": 4, **fields})
