"""What reading WET costs beside bare FastWARC, in one process on the same files.

    python -m scripts.bench_reader [--input 'DIR/*.warc.wet.gz'] [--rounds 7]

Prints CPU seconds for each GB (1e9 bytes) of uncompressed WET and the ratio to FastWARC, which
reads each body and looks at no header. All take turns in each round; each figure is the best of
the rounds. "containers" is the part of the reader that decompresses and verifies.
"""

from __future__ import annotations

import argparse
import glob
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from fastwarc.warc import ArchiveIterator, WarcRecordType

from models.errors import UserError
from pipelines import containers
from pipelines.containers import Chunk
from pipelines.wet import WetReader


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; prints one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--input", default="../shared/data/wet_docs/*.warc.wet.gz")
    parser.add_argument("--rounds", type=int, default=7)
    parsed = parser.parse_args(arguments)
    paths = sorted(glob.glob(parsed.input))  # noqa: PTH207 - a whole pattern
    if not paths:
        raise UserError(f"no file matches '{parsed.input}': give WET files with --input")
    stored = [Path(path).read_bytes() for path in paths]
    subjects: dict[str, Callable[[], tuple[int, int]]] = {
        "FastWARC, bodies": lambda: _sum(_fastwarc(path, headers=False) for path in paths),
        "FastWARC, with headers": lambda: _sum(_fastwarc(path, headers=True) for path in paths),
        "Gristmill": lambda: _sum(_reader(data) for data in stored),
        "  of it containers": lambda: _sum(_containers(data) for data in stored),
    }
    best: dict[str, float] = {}
    found: dict[str, tuple[int, int]] = {}
    for number in range(parsed.rounds):
        print(f"round {number + 1} of {parsed.rounds}", file=sys.stderr)
        for name, work in subjects.items():
            begin = time.process_time()
            found[name] = work()
            seconds = time.process_time() - begin
            best[name] = min(seconds, best.get(name, seconds))
    bodies = {found[name] for name in subjects if "containers" not in name}
    if len(bodies) != 1:
        raise UserError(f"pages and bytes of the readers differ: {found}: use undamaged files")
    wet_bytes = found["  of it containers"][1]
    print(f"{'':24}{'CPU-s/GB':>10}{'ratio':>8}")
    for name, seconds in best.items():
        ratio = seconds / best["FastWARC, bodies"]
        print(f"{name:24}{seconds / wet_bytes * 1e9:10.2f}{ratio:8.2f}")
    pages, body_bytes = bodies.pop()
    print(
        f"\n{len(paths)} files, {wet_bytes:,} bytes of WET, {pages:,} pages of {body_bytes:,} bytes"
    )
    return 0


def _sum(results: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Pages and bytes of all files."""
    pages, size = zip(*results, strict=True)
    return sum(pages), sum(size)


def _fastwarc(path: str, *, headers: bool) -> tuple[int, int]:
    pages = size = 0
    for record in ArchiveIterator(
        path, record_types=WarcRecordType.conversion, parse_http=False, fsspec_args=False
    ):
        if headers:
            dict(record.headers)
        pages += 1
        size += len(record.reader.read())
    return pages, size


def _reader(data: bytes) -> tuple[int, int]:
    pages = size = 0
    for record in WetReader(data):
        pages += 1
        size += len(record.body)
    return pages, size


def _containers(data: bytes) -> tuple[int, int]:
    items = containers.read(memoryview(data))
    return 0, sum(len(item.data) for item in items if isinstance(item, Chunk))


if __name__ == "__main__":
    sys.exit(main())
