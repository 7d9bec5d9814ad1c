"""Whole WET files whose pages are known: the fuzzer's model, and how it is packed."""

from __future__ import annotations

import gzip
import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import zstandard

from tests.pipelines.wet_files import Page, record, text_body, warcinfo

CONTAINERS = (
    "plain", "gzip members", "gzip members", "one gzip member", "gzip groups", "gzip slices",
    "zstd frames", "one zstd frame",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Bytes of the text, or of the stored file, and the pages that were packed into them."""

    data: bytes
    pages: tuple[Page, ...] = ()
    intact: bool = True


@dataclass
class Case:
    """A WET file and what is known of it."""

    seed: int
    container: str
    parts: list[Part]
    mutations: list[str] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    bodies: frozenset[bytes] | None = None
    """All that may be delivered; None where a mutation changed the text itself."""

    @property
    def data(self) -> bytes:
        return b"".join(part.data for part in self.parts)

    @property
    def promises(self) -> list[tuple[int, Page]]:
        """The pages of intact parts, each with the offset of its part in the stored file."""
        found, at = [], 0
        for part in self.parts:
            if part.intact:
                found += [(at, page) for page in part.pages]
            at += len(part.data)
        return found

    @property
    def open_ends(self) -> set[int]:
        """Offsets of the parts that a touched one follows: nothing shows where they end.

        Only CRLFCRLF does, or a digest; behind LF LF whatever comes may belong to the page.
        """
        found, at = set(), 0
        for part, following in zip(self.parts, [*self.parts[1:], Part(b"")], strict=True):
            if not following.intact and b"WARC/1.0\n" in part.data[:10]:
                found.add(at)
            at += len(part.data)
        return found


# The model


def make_records(rng: random.Random, *, digest: bool) -> list[Part]:
    """The records of a whole file, each a part; `digest`: whether they have block digests."""
    eol = rng.choice((b"\r\n", b"\r\n", b"\r\n", b"\n"))
    parts = [Part(warcinfo(eol))] if rng.random() < 0.9 else []
    for number in range(rng.choice((1, 2, 3, 4, 6, 12))):
        body, url = _body(rng, number), f"http://p{number}.example/"
        kind = "metadata" if rng.random() < 0.1 else "conversion"
        headers = tuple(
            h
            for h in (
                "WARC-Date: 2024-05-01T00:00:00Z",
                f"WARC-Record-ID: <urn:uuid:{number}>",
                "WARC-Identified-Content-Language: ben,eng",
                "Content-Type: text/plain",
                "X-Unknown: yes",
            )
            if rng.random() < 0.5
        )
        raw = record(body, url, kind=kind, eol=eol, headers=headers, digest=digest)
        parts.append(Part(raw, (Page(url, body),) if kind == "conversion" else ()))
    return parts


def _body(rng: random.Random, number: int) -> bytes:  # noqa: PLR0911 - a table of bodies
    match rng.randrange(14):
        case 0:
            return b""
        case 1:
            return rng.choice(
                (b"\r\n\r\n", b"\n", b"\r\n\r\n\r\n", b"x\r\n\r\nWARC/1.0", b"WARC/1.0\r\n")
            )
        case 2:
            return b"before\r\n\r\n" + record(b"nested", "http://nested.example/") + b"behind"
        case 3:
            return "Straße, façade\n".encode("latin-1") * 5
        case 4:
            return "\ufeffПривет, мир\n".encode("utf-16") * 5
        case 5:
            return b"a\0b\0\0c\n" * 9 + b"\xed\xa0\x80 surrogate"
        case 6:
            return rng.randbytes(rng.choice((1, 50, 700)))
        case 7 if rng.random() < 0.1:
            return rng.randbytes(rng.choice((5000, 9000, 150_000))).hex().encode()
    return text_body(rng.randrange(1 << 30) + number, rng.choice((1, 5, 12)))


# Packing


def gzip_member(text: bytes) -> bytes:
    return gzip.compress(text, 6, mtime=0)


def zstd_frame(text: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(text)


def pack(records: list[Part], container: str, rng: random.Random) -> list[Part]:
    """`records` as parts of a stored file."""
    if container == "plain":
        return records
    if container in ("gzip members", "zstd frames"):
        packer = gzip_member if container == "gzip members" else zstd_frame
        return [replace(part, data=packer(part.data)) for part in records]
    if container == "gzip slices":
        text, bounds = b"".join(part.data for part in records), [0]
        while bounds[-1] < len(text):
            bounds.append(min(len(text), bounds[-1] + rng.choice((1, 100, 1000, 40_000))))
        pieces = [text[a:b] for a, b in pairwise(bounds)]
        return [Part(gzip_member(piece), intact=False) for piece in pieces] or [Part(b"")]
    size = len(records) if container.startswith("one") else rng.choice((2, 3))
    groups = [records[i : i + size] for i in range(0, len(records), size)]
    packer = zstd_frame if "zstd" in container else gzip_member
    return [
        Part(
            packer(b"".join(part.data for part in group)),
            tuple(page for part in group for page in part.pages),
            all(part.intact for part in group),
        )
        for group in groups
    ]
