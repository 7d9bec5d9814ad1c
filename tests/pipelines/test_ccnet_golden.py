"""Profile `ccnet` against input/output pairs recorded from CCNet's own code.

Where Gristmill does otherwise on purpose, the case stands in DIFFERENCES with its reason and
with what Gristmill gives instead; everything else must be equal.
"""

from __future__ import annotations

import json
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.crawl import shard_ranges
from pipelines.dedup import Block, FileKeys, apply, judge
from pipelines.pages import read_page
from pipelines.paragraphs import paragraph_hashes
from pipelines.recipe import Pages
from pipelines.wet import WetReader

BOTH_LINES = "line 1\nline 2"
DIFFERENCES: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    # case: (reason, [(url, title, text) that Gristmill gives])
    "line WARC/1.0 in body": (
        "a record is delimited by Content-Length: CCNet loses the rest of the page",
        [("http://example.com:8080/a?b=1", "Title", "before\nWARC/1.0\nafter")],
    ),
    "language header": (
        "headers are read by name: CCNet drops every page that names its language",
        [("http://example.com:8080/a?b=1", "Title", BOTH_LINES)],
    ),
    "wrong content-length kept": (
        "a record cut by the end of the file is counted as lost, not delivered as if whole",
        [],
    ),
    "url with space": (
        "the whole address is kept: CCNet cuts it at the space",
        [("http://e.com/a b", "T1", "a")],
    ),
    "title only": ("a page without text is too short at any minimum", []),
    "empty body": ("a page without text is too short at any minimum", []),
    "WARC/1.1 first, then 1.0": (
        "any WARC version is read: CCNet sees no record in WARC/1.1",
        [
            ("http://example.com:8080/a?b=1", "T1", "a"),
            ("http://example.com:8080/a?b=1", "T2", "b"),
        ],
    ),
}


@pytest.fixture(scope="module")
def golden(golden_dir: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((golden_dir / "ccnet_golden.json").read_text())
    return loaded


def test_wet_parse(golden: dict[str, Any]) -> None:
    seen = set()
    died = {}
    for case in golden["wet_parse"]:
        config = Pages(profile="ccnet", min_chars=case["min_len"], max_unreadable=1)
        if "wet_latin1" in case:
            assert case["docs"].startswith("raises"), "CCNet loses the whole shard"
            pages = read(case["wet_latin1"].encode("latin-1"), config)
            died[case["case"]] = [(page.title, "\n".join(page.lines)) for page in pages]
            continue
        pages = read(case["wet_utf8"].encode(), config)
        got = [(page.record.url, page.title, "\n".join(page.lines)) for page in pages]
        if case["case"] in DIFFERENCES:
            seen.add(case["case"])
            theirs = [(d["url"], d["title"], d["raw_content"]) for d in case["docs"]]
            ours = DIFFERENCES[case["case"]][1]
            assert theirs != ours, f"{case['case']} is no difference any more"
            assert got == ours, case["case"]
            continue
        assert got == [(d["url"], d["title"], d["raw_content"]) for d in case["docs"]], case["case"]
        for page, doc in zip(pages, case["docs"], strict=True):
            lines = len(page.lines)
            assert (page.record.date, page.record.digest, len(page.record.body), lines) == (
                doc["date_download"], doc["digest"], doc["length"], doc["nlines"],
            ), case["case"]  # fmt: skip
    assert seen == set(DIFFERENCES)
    assert died == {
        "truncated: header then one empty line only": [],
        "invalid utf-8 byte": [("T", "\ufffd\n")],
    }
    assert len(golden["wet_parse"]) == 23


def read(data: bytes, config: Pages) -> list[Any]:
    pages = [read_page(record, config) for record in WetReader(data)]
    return [page for page in pages if not page.dropped]


def test_dedup(golden: dict[str, Any]) -> None:
    for case in golden["dedup"]:
        assert deduplicate(case["shards"]) == expected(case["output"]), case["case"]
    assert len(golden["dedup"]) == 12


def test_a_key_once_in_each_group_is_found(golden: dict[str, Any]) -> None:
    """CCNet's several passes miss it with one group a pass; with all in one group both agree."""
    case = golden["multi_pass_imperfection"]
    assert deduplicate(case["shards"]) == expected(case["group_hashes=2"])
    assert deduplicate(case["shards"]) != expected(case["group_hashes=1"])


Deduplicated = list[list[tuple[str, list[int], int] | None]]


def deduplicate(shards: list[list[str]]) -> Deduplicated:
    """CCNet's policy through our passes: one window, keep = none, first copy inside a page."""
    files = []
    for pages in shards:
        keys = paragraph_hashes([page for page in pages if page], "ccnet")
        files.append(FileKeys.of(keys.hashes, keys.offsets))
    verdict = judge([Block(file.distinct, file.page_counts) for file in files], keep="none")
    result: Deduplicated = []
    for pages, file, bits in zip(shards, files, verdict.keep, strict=True):
        mask = apply(file, bits, "first").mask
        bounds = iter(pairwise(file.offsets.tolist()))
        of_shard: list[tuple[str, list[int], int] | None] = []
        for page in pages:
            start, stop = next(bounds) if page else (0, 0)  # a page without text does not enter
            kept = mask[start:stop].tolist()
            lines = page.split("\n")
            ids = np.flatnonzero(kept).tolist()
            of_shard.append(("\n".join(compress(lines, kept)), ids, len(lines)) if ids else None)
        result.append(of_shard)
    return result


def expected(output: list[list[dict[str, Any] | None]]) -> Deduplicated:
    return [
        [doc and (doc["raw_content"], doc["line_ids"], doc["original_nlines"]) for doc in shard]
        for shard in output
    ]


def test_segment_ranges(golden: dict[str, Any]) -> None:
    for case in golden["segment_ranges"]:
        ranges = shard_ranges(
            case["n_segments"], case["num_shards"], case["num_segments_per_shard"]
        )
        for ours, theirs in zip(ranges, case["ranges"], strict=False):
            assert list(ours) == (theirs or [ours[0], ours[0]]), case
    assert len(golden["segment_ranges"]) == 5
