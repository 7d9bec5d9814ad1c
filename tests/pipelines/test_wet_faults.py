"""Faults of records in an uncompressed file, in exact offsets."""

from __future__ import annotations

import gzip

import pytest

from tests.pipelines.wet_files import (
    A_PAGE,
    EXPECTED,
    NEXT,
    NEXT_PAGE,
    RAW,
    RECORDS,
    A,
    Page,
    losses,
    read,
    record,
    warcinfo,
)

# Uncompressed: every fault of a record, in exact offsets

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
