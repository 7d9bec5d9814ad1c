"""The fuzzer of the WET reader: runs cases, and shows one.

python -m tests.pipelines.wet_fuzzer SEED              # the case of SEED, and what is read
python -m tests.pipelines.wet_fuzzer SEED --save FILE  # its bytes
python -m tests.pipelines.wet_fuzzer FIRST LAST        # all cases of a range
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines import containers, wet, wet_window
from pipelines.wet import Loss, Record, WetReader
from tests.pipelines.wet_account import VERSION, Run, check_account, headers
from tests.pipelines.wet_files import NEVER, Page
from tests.pipelines.wet_loss_account import check_losses
from tests.pipelines.wet_model import Case
from tests.pipelines.wet_mutations import make_case, mutate_bytes

CASE_LIMIT_S = 20
REAL_FILE_LIMIT_BYTES = 60_000


def check_case(case: Case) -> WetReader:
    """Read `case` and fail, with what repeats it in the message, unless all holds.

    Nothing raises, and reading takes its time. Each byte is explained (`check_account`), and what
    was lost has its reason (`check_losses`). It is the same when read twice, wherever the bytes
    lie in memory, by both parsers, in chunks of any size. Pages that nothing touched are there,
    with their offsets. Where checksums and digests guard the text, no other text is.
    """
    try:
        with time_limit(CASE_LIMIT_S):
            return _check(case)
    except Exception as error:
        raise AssertionError(
            f"seed {case.seed} ({case.container}: {', '.join(case.mutations)}): "
            f"{type(error).__name__}: {error}\n"
            f"repeat it: python -m tests.pipelines.wet_fuzzer {case.seed}"
        ) from error


def _check(case: Case) -> WetReader:
    data = case.data
    reader = WetReader(data, **case.limits)
    records = list(reader)
    first = (records, reader.counts, reader.losses)
    assert (list(reader), reader.counts, reader.losses) == first, "a second reading differs"
    shift = 1 + case.seed % 7
    with small_steps((16, 250, 4000)[case.seed % 3]):
        moved = WetReader(memoryview(bytearray(shift) + data)[shift:], **case.limits)
        moved_records = list(moved)
    assert (moved_records, moved.counts, moved.losses) == first, (
        "from a view, in small chunks and by the careful parser alone the same is not read"
    )
    limit = case.limits.get("max_record_bytes", 64 << 20)
    assert all(len(one.body) <= limit for one in records), "a body is over the limit"
    items = check_account(data, reader, records)
    check_losses(data, reader, records, items, case.limits)
    runs = [item for item in items if isinstance(item, Run)]
    _check_promises(case, data, reader, records, runs)
    if case.bodies is not None and _shows_its_container(case, data):
        wrong = [one for one in records if one.body not in case.bodies]
        assert not wrong, f"text that never was: {wrong[0]}"
    return reader


def _check_promises(
    case: Case, data: bytes, reader: WetReader, records: list[Record], runs: list[Run]
) -> None:
    promises = case.promises
    if not promises or not _shows_its_container(case, data):
        return
    delivered = Counter((one.warc_offset, one.url, one.body) for one in records)
    limit = case.limits.get("max_record_bytes", 1 << 30)
    open_ends, losses = case.open_ends, reader.losses
    for offset, page in promises:
        key = (offset, page.url, page.body)
        if delivered[key] or len(page.body) > limit:
            delivered[key] -= 1
            continue
        assert (
            offset in open_ends and _has_another_end(offset, page, records, losses)
        ) or _excused(offset, page, runs), f"lost without reason: {key}"


def _has_another_end(offset: int, page: Page, records: list[Record], losses: list[Loss]) -> bool:
    """Whether a page whose end nothing shows has another one by what follows.

    It took that in, got too large by it, or ended at a record that its text holds.
    """
    return any(
        one.warc_offset == offset
        and one.length_corrected
        and one.url == page.url
        and (
            one.body.startswith(page.body)
            or (b"WARC/" in page.body and page.body.startswith(one.body))
        )
        for one in records
    ) or any(
        one.offset <= offset < one.offset + one.bytes and one.reason == "record_too_large"
        for one in losses
    )


def _shows_its_container(case: Case, data: bytes) -> bool:
    """Whether damage has not made the file look like one of another kind."""
    codec = containers._detect(memoryview(data))
    skippable = b"\x2a\x4d\x18" in b"".join(p.data for p in case.parts if not p.intact)
    if codec is None or case.container == "plain":
        return codec is None and case.container == "plain"
    magic = b"\x1f" if "gzip" in case.container else b"\x28"
    return codec.magic[:1] == magic and not (skippable and magic == b"\x28")


def _excused(offset: int, page: Page, runs: list[Run]) -> bool:
    """Whether a page that is there was rightly not seen.

    It does not begin a line, or lies inside a record that was read: one with a length that takes
    it in, and that the reader delivered or counted.
    """
    for run in runs:
        at = _place_of(offset, page, run)
        if at is not None:
            inside = any(start < at < end for start, end in run.spans)
            return inside or not run.begins_line(at)
    return False


def _place_of(offset: int, page: Page, run: Run) -> int | None:
    """Where in the text of `run` the page begins that was packed into the part at `offset`."""
    if run.exact:
        return offset - run.blocks[0].stored
    bounds = [b.at for b in run.blocks if b.member == offset]
    if not bounds:
        return None
    for version in VERSION.finditer(run.text, bounds[0]):
        head = run.text[version.start() :].replace(b"\r\n", b"\n").split(b"\n\n", 1)[0]
        if headers(head).get("warc-target-uri") == page.url:
            return version.start()
    return None


@contextmanager
def small_steps(chunk_bytes: int) -> Iterator[None]:
    """The reader takes small chunks, so that each record crosses several, and no fast path."""
    before = containers.CHUNK_BYTES, wet_window.CHUNK_BYTES, wet.USUAL_PAGE
    containers.CHUNK_BYTES = wet_window.CHUNK_BYTES = chunk_bytes
    wet.USUAL_PAGE = NEVER
    try:
        yield
    finally:
        containers.CHUNK_BYTES, wet_window.CHUNK_BYTES, wet.USUAL_PAGE = before


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError after so much CPU time."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} CPU seconds")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def real_files(data_dir: Path) -> list[Path]:
    """The real and odd files that are small enough to be mutated often."""
    return [
        path
        for folder in ("wet_odd", "wet_real")
        for path in sorted((data_dir / folder).iterdir())
        if path.suffix != ".md" and path.stat().st_size <= REAL_FILE_LIMIT_BYTES
    ]


def real_case(seed: int, paths: list[Path]) -> Case:
    """The case of `seed` among those of real files."""
    path = paths[seed % len(paths)]
    return mutate_bytes(seed, path.read_bytes(), path.name)


def main(arguments: list[str] | None = None) -> int:
    """Run the cases of a range of seeds, or show the one of a seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?")
    parser.add_argument("--save", type=Path, help="write the bytes of the case")
    parser.add_argument("--real", type=Path, help="mutate the real files of this data folder")
    parsed = parser.parse_args(arguments)
    paths = real_files(parsed.real) if parsed.real else []

    def make(seed: int) -> Case:
        return real_case(seed, paths) if paths else make_case(seed)

    if parsed.last is None:
        return show(make(parsed.first), parsed.save)
    failed, slowest = 0, (0.0, 0)
    for seed in range(parsed.first, parsed.last):
        began = time.process_time()
        try:
            check_case(make(seed))
        except AssertionError as error:
            failed += 1
            print(error, flush=True)
        slowest = max(slowest, (time.process_time() - began, seed))
        if seed % 5000 == 0:
            print(f"{seed}: {time.process_time():.0f} CPU s, {failed} failed", file=sys.stderr)
    print(f"{parsed.last - parsed.first} cases, {failed} failed, {time.process_time():.0f} CPU s")
    print(f"slowest: {slowest[0]:.2f} s, seed {slowest[1]}")
    return 1 if failed else 0


def show(case: Case, save: Path | None) -> int:
    """Print `case` and what is read of it; 1 when it fails."""
    print(f"{case.container}, {len(case.data)} bytes, limits {case.limits}: {case.mutations}")
    at = 0
    for part in case.parts:
        state = "intact" if part.intact else "touched"
        print(f"{at:8} {state:8} {part.data[:60]!r} {[page.url for page in part.pages]}")
        at += len(part.data)
    if save is not None:
        save.write_bytes(case.data)
    reader = WetReader(case.data, **case.limits)
    for one in reader:
        print(f"page at {one.warc_offset}: {one.url} {one.length_corrected} {one.body[:60]!r}")
    print(reader.counts, *reader.losses, sep="\n")
    try:
        check_case(case)
    except AssertionError as error:
        print(error)
        return 1
    print("all holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
