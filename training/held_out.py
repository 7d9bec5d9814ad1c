"""Which pages are kept for evaluation: a property of the URL alone.

So a page stays on its side when shards are added, when the crawl is mined again with another
recipe, and when a later crawl has the page again; with a larger share, pages only join.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

_SALT = 0x6865_6C64_206F_7574  # so that no other hash of URLs in Gristmill agrees with this one


def is_held_out(url: str, share: float) -> bool:
    """Whether the page at `url` is among the `share` (below 1) of all pages never trained on.

    http and https are the same page.
    """
    return _hash(url) < int(share * 2.0**64)


def held_out(urls: Sequence[str], share: float) -> np.ndarray:
    """`is_held_out` of many: bool (urls,)."""
    if share == 0:
        return np.zeros(len(urls), bool)
    hashes = np.fromiter(map(_hash, urls), np.uint64, len(urls))
    found: np.ndarray = hashes < np.uint64(int(share * 2.0**64))
    return found


def _hash(url: str) -> int:
    return int(xxhash.xxh3_64_intdigest(url.split("://", 1)[-1].encode(), _SALT))
