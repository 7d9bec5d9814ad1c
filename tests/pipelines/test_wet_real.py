"""The WET reader on real files: every sample of `../shared/data`, and damage in a whole shard."""

from __future__ import annotations

import time
import zlib
from pathlib import Path

import pytest

from tests.pipelines.wet_files import Page, losses, naive, read, sha1

# file: (pages read, complete records of other types, pages known lost, lengths corrected,
#        losses: offset, bytes, reason, whether a page is known to be lost)
# Each row was checked by hand against the file: a zlib-only dump of its members, version lines,
# types, stated lengths and real ones. The two INDEX.md describe the files.
EXPECTED: dict[str, tuple[int, int, int, int, list[tuple[int, int, str, bool]]]] = {
    "cc_net__sample.warc.txt": (3, 1, 0, 3, []),
    "ccscala__CC-MAIN-2016-50_head16.warc.wet.gz": (15, 1, 0, 0, []),
    "ccscala__filter_test_1.wet.gz": (25, 1, 0, 0, []),
    "ccscala__fragment3.wet.gz": (5, 1, 0, 0, []),
    "pycommoncrawl__file0.warc.wet.gz": (0, 0, 0, 0, [(0, 427, "truncated_record", False)]),
    "pycommoncrawl__file1.warc.wet.gz": (2, 0, 0, 1, []),
    "whirlwind__whirlwind.warc.wet": (1, 1, 0, 0, []),
    "whirlwind__whirlwind.warc.wet.gz": (1, 1, 0, 0, []),
    "ccscala__appended_zip_fragment_unexpected_eof.wet.gz": (
        15,
        1,
        1,
        0,
        [(49258, 1942, "truncated_member", True)],
    ),
    "ccscala__corrupt_starts_with_conversion.wet.gz": (5, 1, 0, 0, []),
    "ccscala__corrupt_two_warcinfo.wet.gz": (5, 2, 0, 0, []),
    "ccscala__corrupt_warcconversion_1.wet.gz": (5, 1, 0, 0, []),
    "ccscala__corrupt_warcconversion_2.wet.gz": (1, 1, 0, 0, []),
    "ccscala__corrupt_warcinfo_1.wet.gz": (5, 1, 0, 0, []),
    "ccscala__file_and_wet_headers_only.wet.gz": (0, 1, 1, 0, [(0, 611, "truncated_record", True)]),
    "ccscala__file_headers_only.wet.gz": (0, 0, 0, 0, [(0, 397, "truncated_record", False)]),
    "ccscala__fragment1_asthma_incomplete_last.wet.gz": (
        1,
        1,
        1,
        1,
        [(0, 4335, "truncated_record", True)],
    ),
    "ccscala__fragment1_incomplete_last.wet.gz": (
        1,
        1,
        1,
        0,
        [(0, 4349, "truncated_record", True)],
    ),
    "ccscala__fragment2_no_header.wet.gz": (1, 0, 1, 0, [(0, 7813, "truncated_record", True)]),
    "iawebcommons__IAH-20080430204825-00000-blackbook-truncated.arc": (
        0,
        0,
        0,
        0,
        [(0, 87348, "not_warc", False)],
    ),
    "iawebcommons__IAH-urls-wget.warc.gz": (0, 36, 0, 0, []),
    "iawebcommons__abcd.gz": (0, 0, 0, 0, [(0, 24, "not_warc", False)]),
    "iawebcommons__double-single-inflate-error.gz": (
        0,
        0,
        0,
        0,
        [(0, 200, "damaged_member", False), (200, 649, "not_warc", False)],
    ),
    "iawebcommons__empty.gz": (0, 0, 0, 0, []),
    "iawebcommons__hi-2.gz": (0, 0, 0, 0, [(0, 46, "not_warc", False)]),
    "iawebcommons__hi.gz": (0, 0, 0, 0, [(0, 23, "not_warc", False)]),
    "iawebcommons__html-lang-attribute.warc": (0, 5, 0, 0, []),
    "iawebcommons__mutliple-headers.warc": (0, 1, 0, 0, []),
    "iawebcommons__text-extraction-test.warc": (0, 4, 0, 0, []),
    "jwarc__cc.warc.gz": (0, 1, 0, 0, []),
    "jwarc__gzip_extra_sl.warc.gz": (0, 1, 0, 0, []),
    "pycommoncrawl__file0.warc.gz": (0, 1, 0, 0, [(0, 770, "truncated_record", False)]),
    "pycommoncrawl__file1.warc.gz": (0, 2, 0, 0, [(0, 1000, "truncated_record", False)]),
    "resiliparse__block-sized-records.warc.gz": (0, 3, 0, 0, []),
    "resiliparse__clipped.warc.gz": (0, 0, 0, 0, [(0, 18184, "truncated_member", False)]),
    "resiliparse__clueweb-quirk.warc.gz": (0, 30, 0, 0, []),
    "resiliparse__warcfile.warc.gz": (0, 50, 0, 0, []),
    "tfds__cc_0.warc.wet": (1, 1, 1, 1, [(1027, 385, "truncated_record", True)]),
    "tfds__cc_0.warc.wet.gz": (1, 1, 1, 1, [(0, 762, "truncated_record", True)]),
    "toimik__conversion.warc": (3, 0, 0, 0, []),
    "toimik__invalid.warc": (0, 1, 0, 0, []),
    "toimik__warcinfo.warc": (0, 1, 0, 0, []),
    "ungoliant__garbage.txt": (0, 0, 0, 0, [(0, 434502, "not_warc", False)]),
    "warc3__crlf_at_1k_boundary.warc.gz": (0, 1, 0, 0, []),
    "warcio__bad.arc": (0, 0, 0, 0, [(0, 331, "not_warc", False)]),
    "warcio__example-bad-non-chunked.warc.gz": (0, 6, 0, 0, []),
    "warcio__example-bad.warc.gz.bad": (0, 6, 0, 0, []),
    "warcio__example-digest.warc": (0, 4, 0, 0, []),
    "warcio__example-iana.org-chunked.warc": (0, 3, 0, 0, []),
    "warcio__example-resource.warc.gz": (0, 3, 0, 0, []),
    "warcio__example-space-in-target-uri.warc.gz": (0, 2, 0, 0, []),
    "warcio__example-space-in-url.arc": (0, 0, 0, 0, [(0, 1873, "not_warc", False)]),
    "warcio__example-trunc.warc": (0, 4, 0, 0, []),
    "warcio__example-wget-bad-target-uri.warc.gz": (0, 6, 0, 0, []),
    "warcio__example-wrong-chunks.warc.gz": (0, 2, 0, 0, []),
    "warcio__example.arc": (0, 0, 0, 0, [(0, 1808, "not_warc", False)]),
    "warcio__example.arc.gz": (0, 0, 0, 0, [(0, 1027, "not_warc", False)]),
    "warcio__example.warc": (0, 6, 0, 0, []),
    "warcio__example.warc.gz": (0, 6, 0, 0, []),
    "warcio__post-test.warc.gz": (0, 6, 0, 0, []),
}


def test_the_table_names_every_sample(data_dir: Path) -> None:
    found = {
        path.name
        for folder in ("wet_real", "wet_odd")
        for path in (data_dir / folder).iterdir()
        if path.suffix != ".md"
    }
    assert found == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_sample(name: str, data_dir: Path) -> None:
    path = data_dir / "wet_real" / name
    if not path.exists():
        path = data_dir / "wet_odd" / name
    _, reader = read(path.read_bytes())
    counts = reader.counts
    found = (counts.read, counts.not_pages, counts.lost, counts.length_corrected, losses(reader))
    assert found == EXPECTED[name]


def test_text_of_common_crawl_is_exact(data_dir: Path) -> None:
    """Bodies as Common Crawl wrote them match the digests in their headers."""
    stored = (data_dir / "wet_real/ccscala__CC-MAIN-2016-50_head16.warc.wet.gz").read_bytes()
    pages, reader = read(stored)
    digests = [one.digest for one in reader]
    assert [sha1(page.body) for page in pages] == digests
    assert len(set(digests)) == 15


def test_corrected_bodies(data_dir: Path) -> None:
    """The bodies of cc_net's sample, whose lengths are all wrong, end where the text does."""
    raw = (data_dir / "wet_real/cc_net__sample.warc.txt").read_bytes()
    pages, _ = read(raw)
    assert [page.url for page in pages] == [
        "http://sample_english.com",
        "http://sample_chinese.zh",
        "http://sample_russian.ru",
    ]
    assert [len(page.body) for page in pages] == [354, 311, 651]
    assert pages[0].body.endswith(b"n't.")


# A whole shard


@pytest.fixture(scope="module")
def shard(data_dir: Path) -> bytes:
    (path,) = (data_dir / "wet_docs").glob("*00000.warc.wet.gz")
    return path.read_bytes()


@pytest.fixture(scope="module")
def members(shard: bytes) -> tuple[list[int], list[bytes]]:
    """Offsets of the members (with the end of the file), and their texts."""
    starts, texts = [0], []
    while starts[-1] < len(shard):
        one = zlib.decompressobj(31)
        start = starts[-1]
        text = one.decompress(shard[start : start + 4096])
        stop = start + 4096
        while not one.eof:
            text += one.decompress(shard[stop : stop + 65_536])
            stop += 65_536
        starts.append(min(stop, len(shard)) - len(one.unused_data))
        texts.append(text)
    return starts, texts


@pytest.fixture(scope="module")
def pages(members: tuple[list[int], list[bytes]]) -> list[Page]:
    return naive(b"".join(members[1]))


def test_whole_shard(
    shard: bytes, members: tuple[list[int], list[bytes]], pages: list[Page]
) -> None:
    found, reader = read(shard)
    assert found == pages
    assert len(pages) == 6_079
    assert (reader.counts.not_pages, reader.counts.lost, reader.losses) == (1, 0, [])
    assert [one.warc_offset for one in reader] == members[0][1:-1]


def test_damaged_member_in_mid_shard(
    shard: bytes, members: tuple[list[int], list[bytes]], pages: list[Page]
) -> None:
    number = 3_000
    start, end = members[0][number], members[0][number + 1]
    damaged = bytearray(shard)
    damaged[(start + end) // 2] ^= 0xFF
    found, reader = read(bytes(damaged))
    assert found == pages[: number - 1] + pages[number:]
    assert losses(reader) == [(start, end - start, "damaged_member", True)]
    assert (reader.counts.read, reader.counts.lost) == (6_078, 1)


def test_shard_cut_in_a_member(
    shard: bytes, members: tuple[list[int], list[bytes]], pages: list[Page]
) -> None:
    number = 5_000
    start, end = members[0][number], members[0][number + 1]
    cut = (start + end) // 2
    found, reader = read(shard[:cut])
    assert found == pages[: number - 1]
    assert losses(reader) == [(start, cut - start, "truncated_member", True)]
    assert reader.counts.lost == 1


def test_garbage_in_a_shard(
    shard: bytes, members: tuple[list[int], list[bytes]], pages: list[Page]
) -> None:
    at = members[0][4_000]
    junk = shard[at + 20 : at + 900]  # compressed text without its beginning
    found, reader = read(shard[:at] + junk + shard[at:])
    assert found == pages
    assert losses(reader) == [(at, len(junk), "garbage", False)]
    assert reader.counts.lost == 0


def test_member_removed_from_a_shard(
    shard: bytes, members: tuple[list[int], list[bytes]], pages: list[Page]
) -> None:
    """All others are kept. Nothing in the file says that one is missing, and none is invented."""
    number = 2_000
    start, end = members[0][number], members[0][number + 1]
    found, reader = read(shard[:start] + shard[end:])
    assert found == pages[: number - 1] + pages[number:]
    assert (reader.losses, reader.counts.lost) == ([], 0)


def test_shard_in_one_member_damaged_at_its_middle(
    members: tuple[list[int], list[bytes]], pages: list[Page]
) -> None:
    text = b"".join(members[1])
    packer = zlib.compressobj(6, wbits=31)
    stored = bytearray(packer.compress(text) + packer.flush())
    at = len(stored) // 2
    before = len(zlib.decompressobj(31).decompress(stored[:at])) - 1_000
    stored[at : at + 100] = bytes(100)
    began = time.process_time()
    found, reader = read(bytes(stored))
    assert time.process_time() - began < 20
    ends, sure = 0, -1  # the warcinfo is no page
    for one in members[1]:
        ends += len(one)
        sure += ends < before
    assert sure > 1_000
    assert found[:sure] == pages[:sure]
    assert {page.body for page in found} <= {page.body for page in pages}
    last = reader.losses[-1]
    assert last.reason == "damaged_member"
    assert last.offset + last.bytes == len(stored)
    assert abs(reader.losses[0].offset - at) < 20_000
