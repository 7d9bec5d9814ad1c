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

from pipelines import containers
from pipelines.wet import Record, WetReader
from pipelines.wet_headers import VERSION_LINE, content_length, parse_headers
from tests.pipelines.wet_account import Run, check_account
from tests.pipelines.wet_files import Page
from tests.pipelines.wet_model import Case
from tests.pipelines.wet_mutations import make_case, mutate_bytes

CASE_LIMIT_S = 20
REAL_FILE_LIMIT_BYTES = 60_000


def check_case(case: Case) -> WetReader:
    """Read `case` and fail, with what repeats it in the message, unless all holds.

    Nothing raises, and reading takes its time. Each byte is explained (`check_account`). It is
    the same when read twice, and wherever the bytes lie in memory. Pages that nothing touched
    are there, with their offsets. Where checksums and digests guard the text, no other text is.
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
    moved = WetReader(memoryview(bytearray(shift) + data)[shift:], **case.limits)
    assert (list(moved), moved.counts, moved.losses) == first, "reading from a view differs"
    runs = check_account(data, reader, records)
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
        # A page whose end nothing shows takes in what follows, and may get too large by it.
        longer = offset in open_ends and (
            any(one.warc_offset == offset and one.length_corrected for one in records)
            or any(one.offset <= offset and one.reason == "record_too_large" for one in losses)
        )
        assert longer or _excused(offset, page, runs), f"lost without reason: {key}"


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

    It does not begin a line, or a record before it states a length that takes it in.
    """
    for run in runs:
        if run.exact:
            at = offset - run.blocks[0].stored
        else:
            starts = [b.at for b in run.blocks if b.stored == b.member == offset]
            if not starts:
                continue
            at = starts[0]
        if not run.begins_line(at):
            return True
        return any(
            _takes_in(run.text, version.start(), at)
            for version in VERSION_LINE.finditer(run.text, 0, at)
        )
    return False


def _takes_in(text: bytes, start: int, at: int) -> bool:
    ends = [i for i in (text.find(b"\n\n", start), text.find(b"\n\r\n", start)) if i >= 0]
    if not ends:
        return True
    head = min(ends)
    if head >= at:
        return False
    length = content_length(parse_headers(text[start:head]))
    body = head + (2 if text[head + 1 : head + 2] == b"\n" else 3)
    return length is not None and at < body + length <= len(text)


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
