"""The WET reader on whole files and on every kind of damage; small files made here.

Real files and measured shards: `test_wet_real.py`.
"""

from __future__ import annotations

import gzip
import random
import time
import tracemalloc
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import wet
from pipelines.wet import WetReader
from tests.pipelines.wet_files import (
    Page,
    gzip_members,
    losses,
    naive,
    read,
    record,
    sample_records,
    text_body,
    warcinfo,
    zstd_frames,
)

PAGES = 6
RECORDS = sample_records(PAGES)
RAW = b"".join(RECORDS)
EXPECTED = naive(RAW)
MEMBERS = gzip_members(RECORDS)
STORED = b"".join(MEMBERS)
STARTS = [sum(map(len, MEMBERS[:i])) for i in range(len(MEMBERS) + 1)]
NEXT = record(b"the next page\n", "http://next.example/")
NEXT_PAGE = Page("http://next.example/", b"the next page\n")


def without(number: int) -> list[Page]:
    """The pages but the one of record `number` (0 is the warcinfo)."""
    return [page for i, page in enumerate(EXPECTED, 1) if i != number]


# Whole files


def store(records: list[bytes], container: str) -> bytes:
    raw = b"".join(records)
    return {
        "gzip members": lambda: b"".join(gzip_members(records)),
        "one gzip member": lambda: gzip.compress(raw),
        "zstd frames": lambda: b"".join(zstd_frames(records)),
        "one zstd frame": lambda: zstandard.ZstdCompressor().compress(raw),
        "plain": lambda: raw,
    }[container]()


CONTAINERS = ["gzip members", "one gzip member", "zstd frames", "one zstd frame", "plain"]

EMBEDDED = NEXT + b"WARC/1.0\r\n\r\nWARC/1.0\nWARC-Type: conversion\n"
bodies = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=80).map(str.encode),
    st.sampled_from([b"", b"\r\n\r\n", b"\n", b"WARC/1.0\r\n", b"x\r\n\r\nWARC/1.0", EMBEDDED]),
    st.integers(1, 60).map(lambda lines: text_body(lines, lines)),
)
extra_headers = st.lists(
    st.sampled_from(
        [
            "WARC-Date: 2024-05-01T00:00:00Z",
            "WARC-Record-ID: <urn:uuid:1>",
            "WARC-Identified-Content-Language: ben,eng",
            "Content-Type: text/plain",
            "X-Unknown: WARC/1.0",
            "X-Empty:",
            "x-Space :  a  b ",
        ]
    ),
    unique=True,
)


@st.composite
def well_formed_records(draw: st.DrawFn) -> list[bytes]:
    eol = draw(st.sampled_from([b"\r\n", b"\n"]))
    records = [warcinfo(eol)] if draw(st.booleans()) else []
    for i, body in enumerate(draw(st.lists(bodies, max_size=5))):
        kind = draw(st.sampled_from(["conversion"] * 4 + ["metadata"]))
        one = record(body, f"http://{i}.example/", kind=kind, eol=eol)
        head, blank, rest = one.partition(eol * 2)
        first, *lines = head.split(eol)
        lines = draw(st.permutations(lines + [h.encode() for h in draw(extra_headers)]))
        case = draw(st.sampled_from([bytes, bytes.lower, bytes.upper]))
        named = [case(name) + b":" + value for name, value in (x.split(b":", 1) for x in lines)]
        records.append(eol.join([first, *named]) + blank + rest)
    return records


@given(well_formed_records(), st.sampled_from(CONTAINERS))
@settings(max_examples=3000, deadline=None)
def test_whole_files_give_what_the_simple_reader_gives(
    records: list[bytes], container: str
) -> None:
    stored = store(records, container)
    pages, reader = read(stored)
    assert pages == naive(b"".join(records))
    assert reader.losses == []
    assert (reader.counts.lost, reader.counts.length_corrected) == (0, 0)
    assert reader.counts.read + reader.counts.not_pages == len(records)


def test_all_fields_of_a_record() -> None:
    page = record(
        b"text\n",
        "<http://a.example/with a space>",
        headers=(
            "WARC-Date: 2024-05-01T00:00:00Z",
            "WARC-Record-ID: <urn:uuid:1>",
            "WARC-Identified-Content-Language: ben,eng",
        ),
    )
    (found,) = WetReader(warcinfo() + page)
    assert found.url == "http://a.example/with a space"
    assert found.date == "2024-05-01T00:00:00Z"
    assert found.record_id == "<urn:uuid:1>"
    assert found.identified_language == "ben,eng"
    assert found.digest.startswith("sha1:")
    assert found.warc_offset == len(warcinfo())
    assert found.body == b"text\n"
    (bare,) = WetReader(b"WARC/1.1\nWARC-Type: conversion\nContent-Length: 0\n\n")
    assert (bare.url, bare.date, bare.digest, bare.record_id, bare.identified_language) == ("",) * 5


@pytest.mark.parametrize("container", CONTAINERS)
def test_offsets_lead_back_to_the_record(container: str) -> None:
    stored = store(RECORDS, container)
    found = list(WetReader(stored))
    for page, raw in zip(found, RECORDS[1:], strict=True):
        at = stored[page.warc_offset :]
        if container == "gzip members":
            at = zlib.decompressobj(31).decompress(at)
        elif container == "zstd frames":
            at = zstandard.ZstdDecompressor().decompressobj().decompress(at)
        if container.startswith("one"):
            assert page.warc_offset == 0
        else:
            assert at.startswith(raw)


def test_files_of_many_chunks_and_records_larger_than_a_chunk() -> None:
    rng = random.Random(1)
    sizes = [10, 3 << 20, 50, (1 << 20) - 400, 5, 200_000, 4 << 20, 7]
    records = [
        record(rng.randbytes(size).hex()[:size].encode(), f"http://{i}.example/")
        for i, size in enumerate(sizes * 2)
    ]
    for container in ("gzip members", "one gzip member", "one zstd frame", "plain"):
        pages, reader = read(store(records, container))
        assert pages == naive(b"".join(records))
        assert reader.losses == []


# FastWARC and the careful parser


@st.composite
def odd_records(draw: st.DrawFn) -> bytes:
    lines = draw(
        st.lists(
            st.one_of(
                st.sampled_from(
                    [
                        b"WARC-Target-URI: http://a/",
                        b"WARC-Target-URI:  <http://b/ c> ",
                        b"warc-target-uri: http://d/",
                        b"WARC-Target-URI : http://e/",
                        b" folded: line",
                        b"\tfolded",
                        b"no colon",
                        b": no name",
                        b"X: a\nY: b",
                        b"X: a\rY: b",
                        b"X: \xff\xe9",
                        b"WARC-Date:\x0b2024\x0c",
                        b"WARC-Date: \xc2\xa02024\xc2\xa0",
                        b"WARC-Block-Digest: sha1:A",
                        b"Content-Length: 3",
                        b"WARC-Type: conversion",
                        b"WARC-Type: metadata",
                    ]
                ),
                st.binary(max_size=12).filter(lambda x: b"\n" not in x and x.strip(b"\r")),
            ),
            max_size=6,
        )
    )
    length = draw(
        st.sampled_from([b"Content-Length: 5", b"content-length: 5", b"Content-Length:+5"])
    )
    lines = draw(st.permutations([*lines, b"WARC-Type: conversion", length]))
    version = draw(st.sampled_from([b"WARC/1.0", b"WARC/1.1", b"WARC/0.18", b"WARC/1.0 "]))
    trailer = draw(st.sampled_from([b"\r\n\r\n"] * 4 + [b"\n\n", b"", b"\r\n", b"\r\n\r\n\r\n"]))
    return b"\r\n".join([version, *lines, b"", b""]) + b"hello" + trailer


@given(st.lists(odd_records(), min_size=1, max_size=4))
@settings(max_examples=4000, deadline=None)
def test_fastwarc_and_the_careful_parser_agree(records: list[bytes]) -> None:
    stored = b"".join([warcinfo(), *records, NEXT])
    fast = WetReader(stored)
    fast_records = list(fast)
    versions = wet._FAST_VERSIONS
    try:
        wet._FAST_VERSIONS = ()
        careful = WetReader(stored)
        assert list(careful) == fast_records
    finally:
        wet._FAST_VERSIONS = versions
    assert careful.counts == fast.counts
    assert careful.losses == fast.losses


def test_fastwarc_reads_what_is_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """All records of a chunk but the last, which needs a look at what follows, go through it."""
    careful: list[int] = []
    original = WetReader._careful_record

    def counting(self: WetReader, window: object) -> object:
        careful.append(1)
        return original(self, window)

    monkeypatch.setattr(WetReader, "_careful_record", counting)
    assert len(list(WetReader(STORED))) == PAGES
    assert len(careful) == 1


# Damage in files of one gzip member a record


def test_any_flipped_bit_costs_at_most_the_record_of_its_member() -> None:
    number = 3
    start, end = STARTS[number], STARTS[number + 1]
    harmless = []
    for at in range(start, end):
        for bit in (0x01, 0x10, 0x80):
            damaged = bytearray(STORED)
            damaged[at] ^= bit
            pages, reader = read(bytes(damaged))
            if pages == EXPECTED and reader.losses == []:
                harmless.append(at - start)
                continue
            assert pages == without(number)
            assert losses(reader) == [(start, end - start, "damaged_member", True)]
            assert reader.counts.lost == 1
    # FTEXT, time, extra flags and system of the gzip header; spare bits behind the last symbol.
    assert {at for at in harmless if at < end - start - 9} <= set(range(3, 10))


@pytest.mark.parametrize("containers", ["gzip", "zstd"])
def test_cut_anywhere(containers: str) -> None:
    parts = MEMBERS if containers == "gzip" else zstd_frames(RECORDS)
    stored = b"".join(parts)
    starts = [sum(map(len, parts[:i])) for i in range(len(parts) + 1)]
    for cut in range(len(stored)):
        pages, reader = read(stored[:cut])
        whole = sum(start <= cut for start in starts) - 1
        assert pages == EXPECTED[: max(0, whole - 1)]
        expected = [(starts[whole], cut - starts[whole], "truncated_member")]
        assert [loss[:3] for loss in losses(reader)] == (expected if starts[whole] < cut else [])
        if whole:
            assert reader.counts.lost == (starts[whole] < cut)


def test_two_damaged_members_in_a_row_are_two_losses() -> None:
    damaged = bytearray(STORED)
    damaged[STARTS[2] + 300] ^= 0xFF
    damaged[STARTS[3] + 300] ^= 0xFF
    pages, reader = read(bytes(damaged))
    assert pages == EXPECTED[:1] + EXPECTED[3:]
    assert losses(reader) == [
        (STARTS[2], len(MEMBERS[2]), "damaged_member", True),
        (STARTS[3], len(MEMBERS[3]), "damaged_member", True),
    ]


def test_garbage_between_members_is_one_loss_and_costs_no_record() -> None:
    junk = random.Random(2).randbytes(5_000)
    stored = STORED[: STARTS[3]] + junk + STORED[STARTS[3] :]
    pages, reader = read(stored)
    assert pages == EXPECTED
    assert losses(reader) == [(STARTS[3], len(junk), "garbage", False)]
    assert reader.counts.lost == 0


def test_a_missing_member_leaves_no_trace() -> None:
    pages, reader = read(STORED[: STARTS[3]] + STORED[STARTS[4] :])
    assert pages == without(3)
    assert reader.losses == []
    assert reader.counts.lost == 0


def test_damaged_records_that_are_no_pages_are_not_counted_as_lost() -> None:
    damaged = bytearray(STORED)
    damaged[STARTS[1] - 6] ^= 0xFF  # the checksum of the warcinfo
    pages, reader = read(bytes(damaged))
    assert pages == EXPECTED
    assert losses(reader) == [(0, STARTS[1], "damaged_member", False)]
    assert (reader.counts.lost, reader.counts.not_pages) == (0, 0)


# Damage in a file that is one gzip member


def test_damage_in_a_one_member_file_never_gives_wrong_text() -> None:
    records = sample_records(40)
    raw = b"".join(records)
    stored = gzip.compress(raw, 6, mtime=0)
    good = {page.body for page in naive(raw)}
    ends = [sum(map(len, records[: i + 1])) for i in range(len(records))]
    rng = random.Random(3)
    for _ in range(150):
        at = rng.randrange(20, len(stored) - 8)
        damaged = bytearray(stored)
        damaged[at] ^= 1 << rng.randrange(8)
        pages, reader = read(bytes(damaged))
        assert {page.body for page in pages} <= good
        # What inflates before the damage, less the symbols that the decoder holds back.
        before = len(zlib.decompressobj(31).decompress(stored[:at])) - 300
        sure = sum(end <= before for end in ends[1:])
        assert [page.body for page in pages[:sure]] == [page.body for page in naive(raw)[:sure]]
        last = reader.losses[-1]
        assert last.reason == "damaged_member"
        assert last.offset + last.bytes == len(stored)


def test_one_member_file_without_digests_gives_the_records_before_the_damage() -> None:
    records = sample_records(40, digest=False)
    raw = b"".join(records)
    stored = bytearray(gzip.compress(raw, 6, mtime=0))
    at = len(stored) // 2
    stored[at : at + 64] = bytes(64)
    pages, reader = read(bytes(stored))
    before = len(zlib.decompressobj(31).decompress(stored[:at])) - 300
    sure = len([page for page in naive(raw) if raw.find(page.body) + len(page.body) < before])
    assert sure > 10
    assert pages[:sure] == naive(raw)[:sure]
    assert len(reader.losses) == 1
    assert reader.losses[0].offset + reader.losses[0].bytes == len(stored)
    assert reader.losses[0].record


@pytest.mark.parametrize("digest", [True, False])
def test_a_cut_one_member_file_gives_each_complete_record(digest: bool) -> None:
    records = sample_records(3000, digest=digest, lines=30)  # more text than one chunk
    raw = b"".join(records)
    stored = gzip.compress(raw, 6, mtime=0)
    expected = naive(raw)
    for cut in (len(stored) // 3, len(stored) - 9):
        text = zlib.decompressobj(31).decompress(stored[:cut])
        # A record counts as complete when the next one has begun.
        complete = text.count(b"WARC/1.0\r\n") - 2
        pages, reader = read(stored[:cut])
        assert pages == expected[:complete]
        (loss,) = reader.losses
        assert (loss.reason, loss.record) == ("truncated_member", True)
        assert loss.offset + loss.bytes == cut
        assert 0 < loss.bytes < 20_000
        assert reader.counts.lost == 1


def test_faults_of_records_in_one_block_share_one_loss() -> None:
    raw = b"not a record\n" + RECORDS[1] + record(b"cut", length=50, digest=False)
    pages, reader = read(gzip.compress(raw))
    assert pages == EXPECTED[:1]
    assert losses(reader) == [(0, len(gzip.compress(raw)), "truncated_record", True)]
    assert reader.counts.lost == 1


# Uncompressed: every fault of a record, in exact offsets

A = record(b"first page\n", "http://first.example/")
A_PAGE = Page("http://first.example/", b"first page\n")
PLAIN_CASES = {
    # name: (file, pages, losses, length_corrected)
    "garbage in front": (b"junk\n" + NEXT, [NEXT_PAGE], [(0, 5, "not_warc", False)], 0),
    "garbage between": (
        A + b"junk\r\njunk" * 9 + b"\n" + NEXT,
        [A_PAGE, NEXT_PAGE],
        [(len(A), 91, "not_warc", False)],
        0,
    ),
    "garbage behind": (A + b"junk", [A_PAGE], [(len(A), 4, "not_warc", False)], 0),
    "length too short": (
        record(b"a page\n\nof text\n", length=6, digest=False) + NEXT,
        [Page("http://a.example/", b"a page\n\nof text\n"), NEXT_PAGE],
        [],
        1,
    ),
    "length too long": (
        record(b"a page\n", length=30) + NEXT,
        [Page("http://a.example/", b"a page\n"), NEXT_PAGE],
        [],
        1,
    ),
    "length beyond the end": (
        record(b"a page\n", length=10**15) + NEXT,
        [Page("http://a.example/", b"a page\n"), NEXT_PAGE],
        [],
        1,
    ),
    "length missing": (
        record(b"a page\n", length="") + NEXT,
        [Page("http://a.example/", b"a page\n"), NEXT_PAGE],
        [],
        1,
    ),
    "length missing at the end": (
        record(b"a page\n", length=""),
        [Page("http://a.example/", b"a page\n")],
        [],
        1,
    ),
    "length is no number": (
        record(b"a page\n", length="-5") + NEXT,
        [Page("http://a.example/", b"a page\n"), NEXT_PAGE],
        [],
        1,
    ),
    "length too short, last record": (
        record(b"a page\nof text\n", length=6, digest=False),
        [Page("http://a.example/", b"a page\nof text\n")],
        [],
        1,
    ),
    "no trailer": (
        record(b"a", trailer=b"") + NEXT,
        [Page("http://a.example/", b"a"), NEXT_PAGE],
        [],
        0,
    ),
    "long trailer": (
        record(b"a", trailer=b"\r\n" * 9000) + NEXT,
        [Page("http://a.example/", b"a"), NEXT_PAGE],
        [],
        0,
    ),
    "no trailer at the end": (record(b"a", trailer=b""), [Page("http://a.example/", b"a")], [], 0),
    "digest vouches for the length before garbage": (
        record(b"a\n", eol=b"\n") + b"junk\n" + NEXT,
        [Page("http://a.example/", b"a\n"), NEXT_PAGE],
        [(len(record(b"a\n", eol=b"\n")), 5, "not_warc", False)],
        0,
    ),
    "cut body": (
        A + record(b"x" * 90)[:-44],
        [A_PAGE],
        [(len(A), len(record(b"x" * 90)) - 44, "truncated_record", True)],
        0,
    ),
    "cut header": (A + NEXT[:60], [A_PAGE], [(len(A), 60, "truncated_record", True)], 0),
    "cut version line": (A + b"WARC/1", [A_PAGE], [(len(A), 6, "truncated_record", True)], 0),
    "header runs into the next record": (
        A + b"WARC/1.0\r\nWARC-Type: conversion\r\n" + NEXT,
        [A_PAGE, NEXT_PAGE],
        [(len(A), 33, "truncated_record", True)],
        0,
    ),
    "other type cut": (
        A + record(b"x" * 90, kind="response")[:-50],
        [A_PAGE],
        [(len(A), len(record(b"x" * 90, kind="response")) - 50, "truncated_record", False)],
        0,
    ),
    "line WARC/1.0 in a body": (
        record(b"a\n\nWARC/1.0\r\n\r\nb") + NEXT,
        [Page("http://a.example/", b"a\n\nWARC/1.0\r\n\r\nb"), NEXT_PAGE],
        [],
        0,
    ),
    "line WARC/1.0 in a body of wrong length": (
        record(b"a\n\nWARC/1.0\nb: c\n\nd", length=1, digest=False) + NEXT,
        [Page("http://a.example/", b"a\n\nWARC/1.0\nb: c\n\nd"), NEXT_PAGE],
        [],
        1,
    ),
    "a whole record in a body": (
        record(b"a\r\n\r\n" + A) + NEXT,
        [Page("http://a.example/", b"a\r\n\r\n" + A), NEXT_PAGE],
        [],
        0,
    ),
    "first of repeated headers": (
        record(b"a", "http://x/", headers=("WARC-Target-URI: http://y/", "Content-Length: 1"))
        + NEXT,
        [Page("http://x/", b"a"), NEXT_PAGE],
        [],
        0,
    ),
    "folded header": (
        record(b"a", "http://x/", headers=(" y", "\tz")) + NEXT,
        [Page("http://x/ y z", b"a"), NEXT_PAGE],
        [],
        0,
    ),
    "no URI": (
        A.replace(b"WARC-Target-URI: http://first.example/\r\n", b"") + NEXT,
        [Page("", b"first page\n"), NEXT_PAGE],
        [],
        0,
    ),
    "bytes that are no UTF-8 in the URI": (
        A.replace(b"first.example", b"\xff.example"),
        [Page("http://\ufffd.example/", b"first page\n")],
        [],
        0,
    ),
    "two warcinfo, not in front": (A + warcinfo() + warcinfo() + NEXT, [A_PAGE, NEXT_PAGE], [], 0),
    "only line ends": (b"\r\n" * 9000, [], [], 0),
}


@pytest.mark.parametrize("container", ["plain", "gzip"])
@pytest.mark.parametrize("name", PLAIN_CASES)
def test_faults_of_records(name: str, container: str) -> None:
    raw, expected, expected_losses, corrected = PLAIN_CASES[name]
    stored = raw if container == "plain" else gzip.compress(raw)
    pages, reader = read(stored)
    assert pages == expected
    assert reader.counts.length_corrected == corrected
    assert reader.counts.lost == sum(record for *_, record in expected_losses)
    if container == "plain":
        assert losses(reader) == expected_losses
    else:
        # One stored block holds it all.
        assert [(o, b, r) for o, b, r, _ in losses(reader)] == [
            (0, len(stored), reason) for _, _, reason, _ in expected_losses
        ]


def test_a_plain_file_cut_anywhere_keeps_each_complete_record() -> None:
    ends = [sum(map(len, RECORDS[: i + 1])) for i in range(len(RECORDS))]
    for cut in range(ends[1], len(RAW), 7):
        pages, reader = read(RAW[:cut])
        # The trailer is no part of the page.
        complete = sum(end - 4 <= cut for end in ends[1:])
        assert pages == EXPECTED[:complete]
        assert reader.counts.lost == (cut - ends[complete] > 4)


def test_records_cut_in_their_own_members_stay_apart() -> None:
    """A member's beginning counts as a line's: text cut in mid-line does not swallow the next."""
    stored = gzip.compress(RECORDS[1][:-30]) + MEMBERS[2]
    pages, reader = read(stored)
    assert pages == [Page(EXPECTED[0].url, EXPECTED[0].body[:-26]), EXPECTED[1]]
    assert reader.counts.length_corrected == 1


def test_a_record_across_members_and_damage_in_them() -> None:
    raw = b"".join(sample_records(30))
    parts = [gzip.compress(raw[i : i + 1000], mtime=0) for i in range(0, len(raw), 1000)]
    pages, reader = read(b"".join(parts))
    assert (pages, reader.losses) == (naive(raw), [])
    damaged = bytearray(parts[5])
    damaged[-5] ^= 1
    pages, reader = read(b"".join([*parts[:5], bytes(damaged), *parts[6:]]))
    assert set(pages) < set(naive(raw))
    assert len(pages) >= 26
    # The record that ran into the damaged member, and one that began in it.
    assert 1 <= reader.counts.lost <= 3


# Limits


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("lie", [False, True])
def test_a_record_over_the_limit_is_lost_and_the_rest_read(container: str, lie: bool) -> None:
    body = b"WARC/1.0\r\nno header of a record\r\n\r\n" + random.Random(4).randbytes(3 << 20)
    large = record(body, length=10**12 if lie else None)
    records = [RECORDS[1], large, NEXT]
    pages, reader = read(store(records, container), max_record_bytes=1 << 20)
    assert pages == [EXPECTED[0], NEXT_PAGE]
    (loss,) = reader.losses
    assert (loss.reason, loss.record) == ("record_too_large", True)
    if container == "plain":
        assert (loss.offset, loss.bytes) == (len(RECORDS[1]), len(large))
    if container == "gzip members":
        assert (loss.offset, loss.bytes) == (len(MEMBERS[1]), len(gzip_members([large])[0]))


def test_a_record_at_the_limit_is_read() -> None:
    for size in (1000, 1001):
        for length in (None, ""):
            stored = record(b"x" * size, length=length) + NEXT
            pages, reader = read(stored, max_record_bytes=1000)
            assert [len(page.body) for page in pages] == ([1000, 14] if size == 1000 else [14])
            assert reader.counts.lost == (size > 1000)


def test_a_header_over_the_limit_is_lost_and_the_rest_read() -> None:
    large = record(b"a", headers=("X: " + "y" * 9_000,))
    pages, reader = read(A + large + NEXT, max_header_bytes=8_000)
    assert pages == [A_PAGE, NEXT_PAGE]
    assert losses(reader) == [(len(A), len(large), "header_too_large", True)]
    assert read(A + large + NEXT, max_header_bytes=10_000)[1].losses == []


def test_memory_is_bounded_by_the_limits() -> None:
    rng = random.Random(5)
    large = record(rng.randbytes(24 << 20))
    stored = gzip.compress(A + large + NEXT, 1)
    del large
    tracemalloc.start()
    reader = WetReader(stored, max_record_bytes=1 << 20)
    pages = [page.url for page in reader]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pages == ["http://first.example/", "http://next.example/"]
    assert peak < 12 << 20


@pytest.mark.parametrize(
    "unit",
    [
        b"WARC/1.0\r\n",
        b"WARC/1.0\r\nX: y\r\n",
        b"WARC/1.0\r\nWARC-Type: conversion\r\n",
        b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 99999999\r\n\r\n",
        b"WARC/1.0\r\n\r\n",
        b"WARC/1.0\r\nContent-Length: 99999\r\n\r\n",
        b"X: y\n" * 20 + b"\n\nWARC/1.0\n ",
        b"\r\n",
    ],
)
def test_hostile_text_costs_linear_time(unit: bytes) -> None:
    stored = unit * (2_000_000 // len(unit)) + b"\n" + NEXT
    began = time.process_time()
    pages, _ = read(stored)
    assert time.process_time() - began < 30
    assert pages[-1].body.endswith(b"the next page\n")


# Any bytes


def mutate(stored: bytes, rng: random.Random) -> bytes:
    data = bytearray(stored)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1)
        span = rng.choice([1, 3, 40, 600])
        match rng.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + span]
            case 2:
                data[at:at] = rng.randbytes(span)
            case 3:
                del data[at:]
            case 4:
                data[at:at] = data[max(0, at - span) : at]
            case _:
                data[at : at + span] = bytes(len(data[at : at + span]))
    return bytes(data)


@pytest.mark.parametrize("container", CONTAINERS)
def test_mutated_files(container: str) -> None:
    rng = random.Random(f"fuzz {container}")
    stored = store(sample_records(12), container)
    good = {page.body for page in naive(b"".join(sample_records(12)))}
    began = time.process_time()
    for _ in range(120):
        data = mutate(stored, rng)
        pages, _ = read(data)
        if "gzip" in container and data[:3] == b"\x1f\x8b\x08":
            # Checksums and digests: text is delivered as it was or not at all.
            assert {page.body for page in pages} <= good
    assert time.process_time() - began < 60


@given(st.binary(max_size=400))
@settings(max_examples=3000, deadline=None)
def test_any_bytes(tail: bytes) -> None:
    for head in (b"", b"\x1f\x8b\x08", MEMBERS[0], A, b"\x28\xb5\x2f\xfd", zstd_frames([A])[0]):
        read(head + tail)


def test_iterating_again_gives_the_same() -> None:
    reader = WetReader(memoryview(STORED[:-20]))
    first = list(reader), reader.counts, reader.losses
    assert (list(reader), reader.counts, reader.losses) == first
    assert len(first[0]) == PAGES - 1
