"""The WET reader on whole files of every container, and its limits.

Faults: `test_wet_faults.py`; damage: `test_wet_damage.py`; real files: `test_wet_real.py`.
"""

from __future__ import annotations

import gzip
import random
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest
import zstandard
from fastwarc.warc import ArchiveIterator, WarcRecordType
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import wet
from pipelines.wet import WetReader
from tests.pipelines.wet_files import (
    A_PAGE,
    CONTAINERS,
    EXPECTED,
    MEMBERS,
    NEVER,
    NEXT,
    NEXT_PAGE,
    PAGES,
    RECORDS,
    STORED,
    A,
    gzip_members,
    losses,
    naive,
    read,
    record,
    store,
    text_body,
    warcinfo,
)

# Whole files


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
@settings(max_examples=300, deadline=None, derandomize=True)
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


# The pattern for usual pages and the careful parser


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


@st.composite
def usual_records(draw: st.DrawFn) -> bytes:
    """Pages as Common Crawl writes them, but for odd spaces and bytes in the values."""
    value = st.one_of(
        st.sampled_from([b"a", b"<http://a/ b>", b" a", b"a ", b"", b"\xff\xe9", b"a\rb", b"a\r"]),
        st.binary(max_size=8).filter(lambda x: b"\n" not in x),
    )
    names = ["Target-URI", "Date", "Record-ID", "Refers-To", "Block-Digest"]
    names = [f"WARC-{name}" for name in [*names, "Identified-Content-Language"]]
    lines = [
        name.encode() + b": " + draw(value)
        for name in [*names, "Content-Type"]
        if draw(st.integers(0, 3))
    ]
    length = draw(st.sampled_from([b"5"] * 4 + [b"05", b"4", b"6", b"5 ", b"99999999999999999999"]))
    head = [b"WARC/1.0", b"WARC-Type: conversion", *lines, b"Content-Length: " + length]
    trailer = draw(st.sampled_from([b"\r\n\r\n"] * 4 + [b"\n\n", b"", b"\r\n\r\njunk"]))
    return b"\r\n".join([*head, b"", b""]) + b"hello" + trailer


@given(st.lists(st.one_of(odd_records(), usual_records()), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_usual_and_the_careful_parser_agree(records: list[bytes]) -> None:
    stored = b"".join([warcinfo(), *records, NEXT])
    fast = WetReader(stored)
    fast_records = list(fast)
    pattern = wet.USUAL_PAGE
    try:
        wet.USUAL_PAGE = NEVER
        careful = WetReader(stored)
        assert list(careful) == fast_records
    finally:
        wet.USUAL_PAGE = pattern
    assert careful.counts == fast.counts
    assert careful.losses == fast.losses


def test_fastwarc_gives_the_same_pages(data_dir: Path) -> None:
    for path in sorted((data_dir / "wet_docs_small").glob("*.warc.wet.gz")):
        expected = [
            (one.headers["WARC-Target-URI"], one.headers["WARC-Record-ID"], one.reader.read())
            for one in ArchiveIterator(
                str(path),
                record_types=WarcRecordType.conversion,
                parse_http=False,
                fsspec_args=False,
            )
        ]
        found = [(one.url, one.record_id, one.body) for one in WetReader(path.read_bytes())]
        assert len(found) > 50
        assert found == expected


def test_usual_pages_do_not_need_the_careful_parser(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the warcinfo does, and a page that the end of a chunk cuts."""
    careful: list[int] = []
    original = WetReader._careful_record

    def counting(self: WetReader, window: object) -> object:
        careful.append(1)
        return original(self, window)

    monkeypatch.setattr(WetReader, "_careful_record", counting)
    (path,) = (data_dir / "wet_docs_small").glob("*00000.warc.wet.gz")
    pages = len(list(WetReader(path.read_bytes())))
    assert pages > 50
    assert len(careful) < 1 + pages // 50


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


def test_iterating_again_gives_the_same() -> None:
    reader = WetReader(memoryview(STORED[:-20]))
    first = list(reader), reader.counts, reader.losses
    assert (list(reader), reader.counts, reader.losses) == first
    assert len(first[0]) == PAGES - 1
