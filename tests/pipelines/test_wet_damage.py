"""The WET reader on damaged files: exactly what is damaged is lost, and nothing wrong is read."""

from __future__ import annotations

import gzip
import random
import time
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import containers, wet_window
from pipelines.wet import WetReader
from tests.pipelines.wet_files import (
    CONTAINERS,
    EXPECTED,
    MEMBERS,
    NEXT,
    NEXT_PAGE,
    RECORDS,
    STARTS,
    STORED,
    A,
    Page,
    losses,
    naive,
    read,
    record,
    sample_records,
    store,
    warcinfo,
    zstd_frames,
)


def without(number: int) -> list[Page]:
    """The pages but the one of record `number` (0 is the warcinfo)."""
    return [page for i, page in enumerate(EXPECTED, 1) if i != number]


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


# What the fuzzer found


@pytest.mark.parametrize("container", ["gzip members", "zstd frames"])
def test_a_header_line_cut_by_its_member_does_not_take_in_the_next_record(container: str) -> None:
    """The page of the next member was lost without a trace, as lines of the cut header."""
    for cut in range(12, 60):
        first = warcinfo()[:cut]
        pages, reader = read(store([first, RECORDS[1]], container))
        assert pages == EXPECTED[:1]
        (loss,) = reader.losses
        assert (loss.offset, loss.reason) == (0, "truncated_record")
        assert loss.offset + loss.bytes == len(store([first], container))


@pytest.mark.parametrize("container", ["gzip members", "zstd frames"])
@pytest.mark.parametrize("junk", [b"junk\r\n", b"\njunk"])
def test_the_end_of_its_member_vouches_for_a_length(container: str, junk: bytes) -> None:
    """LF LF and no digest: the junk of the next member became the end of the page."""
    page = record(b"a page\n", eol=b"\n", digest=False)
    pages, reader = read(store([page, junk, NEXT], container))
    assert pages == [Page("http://a.example/", b"a page\n"), NEXT_PAGE]
    assert reader.counts.length_corrected == 0
    size = len(store([page], container))
    # Line ends that begin a member are passed over; the block that holds them is lost whole.
    assert losses(reader) == [(size, len(store([junk], container)), "not_warc", False)]


def test_a_damaged_member_does_not_read_on_in_the_next_one() -> None:
    """Its last step ran over the beginning of the next member, and so did its offsets."""
    for cut in range(20, len(MEMBERS[2]) - 1):
        stored = MEMBERS[1] + MEMBERS[2][:cut] + MEMBERS[3]
        end = len(MEMBERS[1]) + cut
        for item in containers.read(memoryview(stored)):
            if isinstance(item, containers.Chunk) and item.fault:
                assert item.stored[-1] < item.stored_end <= end
        pages, reader = read(stored)
        assert pages == [EXPECTED[0], EXPECTED[2]]
        assert losses(reader) == [(len(MEMBERS[1]), cut, "damaged_member", True)]


@pytest.mark.parametrize("chunk_bytes", [1, 64, 1 << 18])
def test_padding_behind_a_lost_block_is_no_loss(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was one hung on where the chunks of the reader end."""
    monkeypatch.setattr(containers, "CHUNK_BYTES", chunk_bytes)
    junk = gzip.compress(b"junk\n")
    for behind in (b"", MEMBERS[1]):
        _, reader = read(junk + bytes(9) + gzip.compress(b"") + behind)
        assert losses(reader) == [(0, len(junk), "not_warc", False)]


# Limits, to the byte


def limited(stored: bytes, **limits: int) -> tuple[list[bytes], list[str]]:
    reader = WetReader(stored, **limits)
    return [one.body for one in reader], [loss.reason for loss in reader.losses]


def test_a_header_as_long_as_the_limit_is_read_and_one_byte_more_is_lost() -> None:
    page, following = record(b"a page"), record(b"next", "u", digest=False)
    size = page.index(b"\r\n\r\n") + 4
    assert limited(page + following, max_header_bytes=size) == ([b"a page", b"next"], [])
    for less in (1, 2):
        found = limited(page + following, max_header_bytes=size - less)
        assert found == ([b"next"], ["header_too_large"])


@pytest.mark.parametrize("length", [None, 3, 60, ""])
def test_a_body_as_long_as_the_limit_is_read_and_one_byte_more_is_lost(
    length: int | str | None,
) -> None:
    """Whatever length it states."""
    body = b"x" * 50
    page = record(body, length=length, digest=False)
    assert limited(page + A, max_record_bytes=50)[0][0] == body
    bodies, reasons = limited(page + A, max_record_bytes=49)
    assert (body in bodies, reasons[0]) == (False, "record_too_large")


def test_no_record_begins_in_mid_line_where_the_window_moves_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The window keeps the byte before its position, in whatever chunks the file comes."""
    monkeypatch.setattr(wet_window, "CHUNK_BYTES", 64)
    monkeypatch.setattr(containers, "CHUNK_BYTES", 64)
    for size in range(1, 200):
        stored = b"j" * size + A + NEXT
        assert limited(stored, max_header_bytes=300) == ([NEXT_PAGE.body], ["not_warc"])


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
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_bytes(tail: bytes) -> None:
    for head in (b"", b"\x1f\x8b\x08", MEMBERS[0], A, b"\x28\xb5\x2f\xfd", zstd_frames([A])[0]):
        read(head + tail)
