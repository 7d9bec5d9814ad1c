"""Makes a larger crawl out of real WET shards, for tests of scale.

    python -m scripts.vary_shards --input 'DIR/*.warc.wet.gz' --output DIR --bytes 5e9 --seed 0

Each output shard is one source shard once more, with other words. What dedup finds stays what it
is in the source, at every size:

- A paragraph's edit (a word inserted, exchanged, or one inserted and one deleted) is settled by
  the seed, the paragraph as dedup sees it, and a variant number: copies of a paragraph that were
  equal stay equal, and what was distinct stays distinct.
- Normally the variant is the number of the copy. One paragraph in eight wanders: the variant also
  moves by 0 to 3 with the page, around all copies. So duplicates meet across copies, each variant
  has as many pages as the source's paragraph, and over whole copies there are as many variants
  as copies.
- Then paragraphs change places between nearby pages of the same host and language.

URLs, record ids, lengths and digests are new; host, date and language stay. Left out on purpose:
records that are no pages, and headers that the reader does not read.
The same inputs, size and seed give the same text; the gzip bytes also depend on isal.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import functools
import hashlib
import itertools
import string
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from isal import igzip

from models import files
from models.errors import UserError
from pipelines import containers
from pipelines.paragraphs import split_lines
from pipelines.wet import Record, WetReader

PHRASES = 4096
"""Different words for the variants of one paragraph: the largest number of copies."""
_BATCH_BYTES = 2 << 20
_GZIP_LEVEL = 2
_SPREAD = 4  # copies over which a wandering paragraph is dealt out
_SHORT_CHARS = 24  # a shorter paragraph only grows: without a word it might be another one
_LINES_PER_SWAP = 16
_GROWTH = 1.07  # what the inserted words add, on wet_docs
_SAMPLED_FILES = 4
_SAMPLED_PAGES = 16  # every sixteenth
_WORD_CHARS = 8
_NAME_TIME = "20260401000000-20260401030000"
_PUNCTUATION = string.punctuation + "।،。、：；！？「」（）“”‘’«»…–—·•©®™"
# Near enough to the keys of paragraph dedup, and far faster: no case, no digits, no punctuation.
_FOLD = bytes.maketrans(string.digits.encode(), b"0" * 10)
_FOLDED_AWAY = (string.punctuation + " \t\r\v\f").encode()

Phrases = dict[int, list[str]]
"""For each block of 128 code points PHRASES words, or pairs of words."""


@dataclass(frozen=True)
class Shard:
    """One output shard. copy: how many times its source was taken before; copies: in all."""

    source: str
    target: Path
    number: int
    copy: int
    copies: int
    seed: int


def main(arguments: list[str] | None = None) -> int:
    """Make the crawl; prints what was made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--input", required=True, help="WET files: a path or glob")
    parser.add_argument("--output", required=True, help="folder of the new shards")
    parser.add_argument("--bytes", type=float, required=True, help="uncompressed bytes, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parsed = parser.parse_args(arguments)
    try:
        sources = files.find(*_folder_and_pattern(parsed.input))
        paths = vary(sources, parsed.output, int(parsed.bytes), parsed.seed, parsed.workers)
    except UserError as error:
        print(f"vary_shards: {error}", file=sys.stderr)
        return 2
    print(f"{len(paths):,} shards in '{parsed.output}'")
    return 0


def _folder_and_pattern(path: str) -> tuple[Path, str]:
    return Path(path).parent, Path(path).name


def vary(
    sources: Sequence[str], output: str | Path, size_bytes: int, seed: int = 0, workers: int = 1
) -> list[Path]:
    """Write shards of about `size_bytes` (uncompressed, whole shards) to the folder `output`.

    Gives their paths in order. Memory: a few batches of 2 MiB for each worker. Raises UserError.
    """
    if not sources:
        raise UserError("no source shard: --input matches no file")
    if size_bytes < 1:
        raise UserError(f"'{size_bytes}' bytes is no size: give 1 or more")
    source_bytes = max(round(size_bytes / _GROWTH), 1)
    count = _shard_count(_sizes(sources, source_bytes), source_bytes)
    copies = -(-count // len(sources))
    if copies > PHRASES:
        raise UserError(f"{copies} copies of the source: at most {PHRASES}; give more shards")
    shards = [
        Shard(
            source=sources[number % len(sources)],
            target=Path(output) / f"CC-VARIED-{_NAME_TIME}-{number:05d}.warc.wet.gz",
            number=number,
            copy=number // len(sources),
            copies=copies,
            seed=seed,
        )
        for number in range(count)
    ]
    phrases = collect_phrases(sources)
    write = functools.partial(_write_shard, phrases)
    if workers == 1:
        return list(map(write, shards))
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        return list(pool.map(write, shards))


def _sizes(sources: Sequence[str], wanted_bytes: int) -> list[int]:
    """Uncompressed sizes of the sources, as many as are needed to reach `wanted_bytes`."""
    sizes: list[int] = []
    for source in sources:
        if sum(sizes) >= wanted_bytes:
            break
        sizes.append(uncompressed_bytes(source))
        if not sizes[-1]:
            raise UserError(f"source '{source}' holds nothing to read: leave it out")
    return sizes


def uncompressed_bytes(path: str | Path) -> int:
    """How many bytes the stored WET file at `path` holds."""
    with files.mapped(path) as data:
        chunks = (chunk for chunk in containers.read(data) if isinstance(chunk, containers.Chunk))
        return sum(len(chunk.data) for chunk in chunks)


def _shard_count(sizes: list[int], wanted_bytes: int) -> int:
    """How many shards, taken around and around, come nearest to `wanted_bytes`."""
    rounds, rest = divmod(wanted_bytes, sum(sizes))
    count = rounds * len(sizes)
    for size in sizes:
        if rest < size / 2:
            break
        count, rest = count + 1, rest - size
    return max(count, 1)


def collect_phrases(sources: Sequence[str]) -> Phrases:
    """Words of the sources by block of code points, distinct for dedup; always block 0, Latin."""
    words: dict[int, dict[str, str]] = {}
    for source in sources[:: -(-len(sources) // _SAMPLED_FILES)]:
        with files.mapped(source) as data:
            for number, record in enumerate(WetReader(data)):
                if number % _SAMPLED_PAGES == 0:
                    _collect_words(record.body.decode("utf-8", "replace"), words)
    phrases = {
        block: _fill(list(of_block.values()))
        for block, of_block in sorted(words.items())
        if len(of_block) ** 2 >= PHRASES
    }
    if 0 not in phrases:
        phrases[0] = _fill([a + b for a in "bdfgklmprstvwhnj" for b in "aeio"])
    return phrases


def _collect_words(text: str, words: dict[int, dict[str, str]]) -> None:
    for word in {piece.strip(_PUNCTUATION): 0 for piece in text.split()}:
        if 2 <= len(word) <= _WORD_CHARS and word[0].isalpha():
            of_block = words.setdefault(ord(max(word)) >> 7, {})
            if len(of_block) < PHRASES:
                of_block.setdefault(word.casefold(), word)


def _fill(words: list[str]) -> list[str]:
    if len(words) >= PHRASES:
        return words[:PHRASES]
    width = int(PHRASES**0.5)
    return [f"{words[i // width]} {words[i % width]}" for i in range(PHRASES)]


def _write_shard(phrases: Phrases, shard: Shard) -> Path:
    with (
        files.mapped(shard.source) as data,
        files.atomic_path(shard.target, durable=False) as temporary,
        temporary.open("wb") as file,
    ):
        file.write(_member(_warcinfo(shard)))
        first_page = 0
        for batch in _batches(WetReader(data)):
            for number, (record, text) in enumerate(
                zip(batch, vary_pages(batch, first_page, shard, phrases), strict=True), first_page
            ):
                file.write(_member(_conversion(record, text, number, shard)))
            first_page += len(batch)
    return shard.target


def _batches(records: WetReader) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.body)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def vary_pages(
    records: Sequence[Record], first_page: int, shard: Shard, phrases: Phrases
) -> list[bytes]:
    """New bodies for consecutive pages, the first of which is number `first_page` of its file."""
    # surrogateescape: bytes that are not UTF-8 come out as they went in.
    pages = [split_lines(record.body.decode("utf-8", "surrogateescape")) for record in records]
    flat = [line for page in pages for line in page]
    text = "\n".join(flat).lower().encode("utf-8", "surrogateescape")
    folded = text.translate(_FOLD, _FOLDED_AWAY).split(b"\n")
    keys = np.fromiter(map(xxhash.xxh3_64_intdigest, folded), np.uint64, len(flat))
    keys = _mixed(keys ^ _mixed(np.uint64(shard.seed & 0xFFFF_FFFF)))
    counts = [len(page) for page in pages]
    numbers = np.repeat(np.arange(first_page, first_page + len(pages), dtype=np.uint64), counts)
    # By page: two copies in one page stay equal.
    shift = np.where((keys & np.uint64(7)) == 0, _mixed(numbers ^ keys) % np.uint64(_SPREAD), 0)
    variant = (np.uint64(shard.copy) + shift.astype(np.uint64)) % np.uint64(shard.copies)
    slots = ((keys >> np.uint64(8)) + variant * np.uint64(2_654_435_761)) % np.uint64(PHRASES)
    kinds, places = (keys >> np.uint64(20)) & np.uint64(3), (keys >> np.uint64(24)) & np.uint64(255)
    edited = [
        _edited(line, phrases, slot, kind, place) if key else line
        for line, key, slot, kind, place in zip(
            flat, folded, slots.tolist(), kinds.tolist(), places.tolist(), strict=True
        )
    ]
    bounds = np.cumsum([0, *counts]).tolist()
    pages = [edited[start:stop] for start, stop in itertools.pairwise(bounds)]
    _swap_paragraphs(records, pages, first_page, shard)
    return ["\n".join(page).encode("utf-8", "surrogateescape") for page in pages]


def _edited(line: str, phrases: Phrases, slot: int, kind: int, place: int) -> str:
    chars = len(line)
    if chars <= 4 and not any(map(str.isalnum, line)):
        return line  # a mark without a word has no key, and must not get one
    block = ord(max(line[0], line[chars >> 1], line[-1])) >> 7
    phrase = (phrases.get(block) or phrases[0])[slot]
    at = line.find(" ", place * chars >> 8)
    if at < 0:
        return f"{line} {phrase}"
    if kind == 0 or chars < _SHORT_CHARS:
        return f"{line[:at]} {phrase}{line[at:]}"
    if kind == 3:
        first = line.find(" ")
        return f"{line[first + 1 : at]} {phrase}{line[at:]}"
    after = line.find(" ", at + 1)
    return f"{line[:at]} {phrase}{line[after:] if after > 0 else ''}"


def _swap_paragraphs(
    records: Sequence[Record], pages: list[list[str]], first_page: int, shard: Shard
) -> None:
    """Let each page and the one before it of the same host and language exchange paragraphs."""
    before: dict[tuple[str, str], list[str]] = {}
    for number, (record, page) in enumerate(zip(records, pages, strict=True), first_page):
        place = "/".join(record.url.split("/", 3)[:3]), record.identified_language
        other = before.get(place)
        if other is not None:
            swaps = max(min(len(page), len(other)) // _LINES_PER_SWAP, 1)
            draw = xxhash.xxh3_64_intdigest(f"{shard.seed}/{shard.copy}/{number}".encode())
            for step in range(swaps):
                i = (draw + 0x9E37_79B1 * step) % len(page)
                j = ((draw >> 32) + 0x85EB_CA77 * step) % len(other)
                page[i], other[j] = other[j], page[i]
        before[place] = page


def _mixed(values: np.ndarray | np.uint64) -> np.ndarray:
    """Each uint64 scattered over all 64 bits (the finaliser of SplitMix64)."""
    mixed = np.atleast_1d(values) + np.uint64(0x9E37_79B9_7F4A_7C15)
    for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    scattered: np.ndarray = mixed ^ (mixed >> np.uint64(31))
    return scattered


def _warcinfo(shard: Shard) -> bytes:
    body = (
        f"Software-Info: scripts/vary_shards.py\r\nisPartOf: CC-VARIED-SEED-{shard.seed}\r\n"
        f"description: copy {shard.copy} of {Path(shard.source).name} with other words, "
        "not Common Crawl\r\n"
    ).encode()
    return _record(
        [
            ("WARC-Type", "warcinfo"),
            ("WARC-Date", "2026-04-10T00:00:00Z"),
            ("WARC-Filename", shard.target.name),
            ("WARC-Record-ID", _record_id(shard, "warcinfo")),
            ("Content-Type", "application/warc-fields"),
        ],
        body,
    )


def _conversion(record: Record, body: bytes, number: int, shard: Shard) -> bytes:
    digest = base64.b32encode(hashlib.sha1(body, usedforsecurity=False).digest()).decode()
    return _record(
        [
            ("WARC-Type", "conversion"),
            ("WARC-Target-URI", _url(record.url, shard.copy)),
            ("WARC-Date", record.date),
            ("WARC-Record-ID", _record_id(shard, f"{number}")),
            ("WARC-Refers-To", _record_id(shard, f"{number} as crawled")),
            ("WARC-Block-Digest", f"sha1:{digest}"),
            ("WARC-Identified-Content-Language", record.identified_language),
            ("Content-Type", "text/plain"),
        ],
        body,
    )


def _url(url: str, copy: int) -> str:
    if not url:
        return ""
    address, hash_sign, fragment = url.partition("#")
    return f"{address}{'&' if '?' in address else '?'}copy={copy}{hash_sign}{fragment}"


def _record_id(shard: Shard, what: str) -> str:
    digest = xxhash.xxh3_128_digest(f"{shard.seed}/{shard.number}/{what}".encode())
    return f"<urn:uuid:{uuid.UUID(bytes=digest, version=5)}>"


def _record(fields: list[tuple[str, str]], body: bytes) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in fields if value]
    head = "".join(["WARC/1.0\r\n", *lines, f"Content-Length: {len(body)}\r\n\r\n"])
    return head.encode("utf-8", "surrogateescape") + body + b"\r\n\r\n"


def _member(record: bytes) -> bytes:
    compressed: bytes = igzip.compress(record, _GZIP_LEVEL, mtime=0)
    return compressed


if __name__ == "__main__":
    sys.exit(main())
