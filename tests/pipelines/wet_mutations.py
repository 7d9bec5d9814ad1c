"""Makes a damaged WET file from a seed: known pages, then mutations that know the structure.

A file is a list of parts, at first one for each record. Mutations of the text change a record
before it is packed, mutations of the store change what lies in the file. A part that no mutation
touched stays `intact`, wherever it moves: its page has to be found.
The mutations of the text are in `wet_text_mutations`, those of the store here.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace

import zstandard

from tests.pipelines.wet_files import Page, record
from tests.pipelines.wet_model import (
    CONTAINERS,
    Case,
    Part,
    gzip_member,
    make_records,
    pack,
    zstd_frame,
)
from tests.pipelines.wet_text_mutations import TEXT_MUTATIONS

_MAGIC = (b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\x53\x2a\x4d\x18")


def make_case(seed: int) -> Case:
    """The case of `seed`: always the same."""
    rng = random.Random(seed)
    records = make_records(rng, digest=rng.random() < 0.75)
    container = rng.choice(CONTAINERS)
    mutations: list[str] = []
    has_digests = all(b"WARC-Block-Digest" in part.data for part in records)
    text_level = rng.choice((0, 0, 1, 1, 2))
    for _ in range(text_level):
        name, mutate_text = rng.choice(TEXT_MUTATIONS)
        mutations.append(name)
        index = rng.randrange(len(records))
        new = mutate_text(rng, records[index].data)
        if new != records[index].data:
            records[index] = Part(new, intact=False)
    if text_level and rng.random() < 0.2:
        mutations.append("text between records")
        junk = rng.choice(
            (b"junk", b"junk\r\n", b"\r\n\r\n\n", b"WARC/1.0", b"\0\0", b"\xef\xbb\xbf")
        )
        records.insert(rng.randrange(len(records) + 1), Part(junk, intact=False))
    parts = pack(records, container, rng)
    store_level = rng.choice((0, 1, 2)) if text_level else rng.choice((1, 1, 2, 3, 4))
    for _ in range(store_level):
        name, mutate_store = rng.choice(STORE_MUTATIONS)
        mutations.append(name)
        parts = mutate_store(rng, parts) or [Part(b"")]
    limits = {}
    if rng.random() < 0.2:
        limits = {
            "max_record_bytes": rng.choice((300, 3000)),
            "max_header_bytes": rng.choice((600, 1024)),
        }
    bodies = frozenset(page.body for part in [*records, *parts] for page in part.pages)
    one_each = container in ("gzip members", "zstd frames") and "splice" not in mutations
    nests = any(b"WARC/" in body for body in bodies)
    certain = one_each or (container in ("one gzip member", "gzip groups") and not nests)
    known = certain and has_digests and not text_level
    return Case(seed, container, parts, mutations, limits, bodies if known else None)


def mutate_bytes(seed: int, data: bytes, name: str) -> Case:
    """A case of byte-level mutations of a real file."""
    rng = random.Random(seed)
    parts = [Part(data, intact=False)]
    mutations = [name]
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        label, mutate_store = rng.choice(STORE_MUTATIONS)
        mutations.append(label)
        parts = mutate_store(rng, parts) or [Part(b"")]
    return Case(seed, "real", parts, mutations)


# Mutations of the store: the parts of the file

_StoreMutation = Callable[[random.Random, list[Part]], list[Part]]


def _edit(change: Callable[[random.Random, bytes], bytes]) -> _StoreMutation:
    """A mutation of the bytes of one part."""

    def mutate(rng: random.Random, parts: list[Part]) -> list[Part]:
        index = rng.randrange(len(parts))
        new = change(rng, parts[index].data)
        if new == parts[index].data:
            return parts
        touched = replace(parts[index], data=new, intact=False)
        return [*parts[:index], touched, *parts[index + 1 :]]

    return mutate


def _place(make: Callable[[random.Random, list[Part]], Part]) -> _StoreMutation:
    """A mutation that puts a new part between two."""

    def mutate(rng: random.Random, parts: list[Part]) -> list[Part]:
        index = rng.choice((rng.randrange(len(parts) + 1), len(parts)))
        return [*parts[:index], make(rng, parts), *parts[index:]]

    return mutate


def _span(rng: random.Random, data: bytes) -> tuple[int, int]:
    at = rng.randrange(len(data) + 1)
    return at, min(len(data), at + rng.choice((1, 2, 8, 40, 600)))


def _flip(rng: random.Random, data: bytes) -> bytes:
    new = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20)) if data else 0):
        new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
    return bytes(new)


def _delete(rng: random.Random, data: bytes) -> bytes:
    a, b = _span(rng, data)
    return data[:a] + data[b:]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + _junk(rng) + data[at:]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    a, b = _span(rng, data)
    return data[:b] + data[a:b] + data[b:]


def _overwrite(rng: random.Random, data: bytes) -> bytes:
    a, b = _span(rng, data)
    return data[:a] + rng.choice((bytes(b - a), rng.randbytes(b - a))) + data[b:]


def _junk(rng: random.Random) -> bytes:
    return rng.choice(
        (rng.randbytes(rng.choice((1, 7, 300))), b"x", bytes(rng.choice((1, 9, 512))), b"\r\n\r\n",
         rng.choice(_MAGIC), rng.choice(_MAGIC) + rng.randbytes(40), b"WARC/1.0\r\n", b"PK\3\4junk")
    )  # fmt: skip


def _truncate(rng: random.Random, parts: list[Part]) -> list[Part]:
    index = rng.randrange(len(parts))
    data = parts[index].data
    at = rng.randrange(len(data) + 1)
    if at == len(data):
        return parts[: index + 1]
    return [*parts[:index], replace(parts[index], data=data[:at], intact=False)]


def _cut_front(rng: random.Random, parts: list[Part]) -> list[Part]:
    index = rng.randrange(min(2, len(parts)))
    data = parts[index].data
    rest = data[rng.randrange(len(data) + 1) :]
    return [replace(parts[index], data=rest, intact=False), *parts[index + 1 :]]


def _swap(rng: random.Random, parts: list[Part]) -> list[Part]:
    return rng.sample(parts, len(parts))


def _remove(rng: random.Random, parts: list[Part]) -> list[Part]:
    index = rng.randrange(len(parts))
    return parts[:index] + parts[index + 1 :]


def _splice(rng: random.Random, parts: list[Part]) -> list[Part]:
    """The beginning of this file and the end of another one."""
    container = rng.choice([one for one in CONTAINERS if one != "gzip slices"])
    other = pack(make_records(rng, digest=True), container, rng)
    stub = other[rng.randrange(len(other))]
    tail = [replace(stub, data=stub.data[rng.randrange(len(stub.data) + 1) :]), *other]
    cut = _truncate(rng, parts)
    return [*cut, *[replace(part, intact=False) for part in tail]]


def _copy(rng: random.Random, parts: list[Part]) -> Part:
    return rng.choice(parts)


def _foreign(rng: random.Random, _: list[Part]) -> Part:
    """A page in another container, or a member that says nothing."""
    page = record(b"foreign", "http://foreign.example/")
    data = rng.choice(
        (gzip_member(page), zstd_frame(page), page, gzip_member(b""), zstd_frame(b""),
         zstandard.ZstdCompressor().compress(page), gzip_member(b"no record"), gzip_member(b"\r\n"),
         b"\x53\x2a\x4d\x18" + struct.pack("<I", 5) + b"hello", zlib.compress(page), bytes(700))
    )  # fmt: skip
    return Part(data, (Page("http://foreign.example/", b"foreign"),), intact=False)


def _trailer(rng: random.Random, data: bytes) -> bytes:
    """Wrong CRC, wrong length, or the member cut before or in them."""
    if len(data) < 18:
        return data
    crc, size = struct.unpack("<II", data[-8:])
    return rng.choice(
        (data[:-8] + struct.pack("<II", crc ^ 1, size), data[:-4] + struct.pack("<I", size + 1),
         data[:-8], data[:-4], data[:-1], data[:-8] + bytes(8), data + data[-8:])
    )  # fmt: skip


def _header(rng: random.Random, data: bytes) -> bytes:
    size = rng.choice((1, 3, 10))
    return (
        rng.choice((bytes(size), rng.randbytes(size), b"\x1f\x8b\x08\xff" * 3))[:size] + data[size:]
    )


def _flags(rng: random.Random, data: bytes) -> bytes:
    """Optional header fields of gzip, some of them wrong."""
    if data[:4] != b"\x1f\x8b\x08\0":
        return data
    flags, extra = rng.randrange(32), rng.randbytes(rng.choice((0, 4, 3000)))
    head = b"\x1f\x8b\x08" + bytes([flags]) + data[4:10]
    if flags & 4:
        head += struct.pack("<H", len(extra) + rng.choice((0, 0, 0, 50, 60_000)))[:2] + extra
    if flags & 8:
        head += b"name" + rng.choice((b"\0", b"\0", b""))
    if flags & 16:
        head += "Kommentar äöü".encode("latin-1") + b"\0"
    if flags & 2:
        head += struct.pack("<H", (zlib.crc32(head) & 0xFFFF) ^ rng.choice((0, 0, 1)))
    return head + data[10:]


STORE_MUTATIONS: list[tuple[str, _StoreMutation]] = [
    ("bits flipped", _edit(_flip)),
    ("bits flipped", _edit(_flip)),
    ("bytes deleted", _edit(_delete)),
    ("bytes inserted", _edit(_insert)),
    ("bytes repeated", _edit(_repeat)),
    ("bytes overwritten", _edit(_overwrite)),
    ("file cut", _truncate),
    ("front cut", _cut_front),
    ("parts shuffled", _swap),
    ("part removed", _remove),
    ("part repeated", _place(_copy)),
    ("splice", _splice),
    ("junk between parts", _place(lambda rng, _: Part(_junk(rng), intact=False))),
    ("foreign part", _place(_foreign)),
    ("member trailer", _edit(_trailer)),
    ("member header", _edit(_header)),
    ("member flags", _edit(_flags)),
]
