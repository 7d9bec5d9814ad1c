"""The WET reader on files that the fuzzer makes: nothing breaks, every byte is explained.

What must hold: `wet_fuzzer.check_case`. A failure names its seed and the command that repeats it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines import wet
from pipelines.wet import Loss, Record, WetReader
from tests.pipelines.wet_account import check_account
from tests.pipelines.wet_files import STORED, read
from tests.pipelines.wet_fuzzer import check_case, main, real_case, real_files
from tests.pipelines.wet_model import CONTAINERS
from tests.pipelines.wet_mutations import STORE_MUTATIONS, make_case
from tests.pipelines.wet_text_mutations import TEXT_MUTATIONS

QUICK_CASES = 600
SLOW_CASES = 100_000
SLOW_RANGE = 5_000
REAL_CASES = 200
SLOW_REAL_CASES = 10_000


def test_made_files() -> None:
    cases = [make_case(seed) for seed in range(QUICK_CASES)]
    for case in cases:
        check_case(case)
    seen = {name for case in cases for name in case.mutations}
    names = {name for name, _ in [*TEXT_MUTATIONS, *STORE_MUTATIONS]}
    assert names <= seen
    assert {case.container for case in cases} == set(CONTAINERS)
    # Many cases promise something.
    assert sum(bool(case.promises) for case in cases) > QUICK_CASES // 3
    assert sum(case.bodies is not None for case in cases) > QUICK_CASES // 6


def test_real_files(data_dir: Path) -> None:
    paths = real_files(data_dir)
    assert len(paths) > 40
    for seed in range(REAL_CASES):
        check_case(real_case(seed, paths))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SLOW_CASES, SLOW_RANGE))
def test_many_made_files(first: int) -> None:
    began = time.process_time()
    for seed in range(first, first + SLOW_RANGE):
        check_case(make_case(seed))
    print(f"seeds {first}+{SLOW_RANGE}: {time.process_time() - began:.0f} CPU s", file=sys.stderr)


@pytest.mark.slow
def test_many_damaged_real_files(data_dir: Path) -> None:
    paths = real_files(data_dir)
    for seed in range(SLOW_REAL_CASES):
        check_case(real_case(seed, paths))


# The fuzzer itself: what it would find


def test_a_seed_always_gives_the_same_case() -> None:
    assert [make_case(seed).data for seed in range(50)] == [
        make_case(seed).data for seed in range(50)
    ]


def faults(reader: WetReader, records: list[Record], fault: str) -> list[Record]:
    """What a reader with `fault` would have given."""
    if fault == "page dropped":
        return records[:-1]
    if fault == "page twice":
        return [*records, records[-1]]
    if fault == "wrong offset":
        return [*records[:-1], records[-1]._replace(warc_offset=1)]
    if fault == "wrong text":
        return [*records[:-1], records[-1]._replace(body=records[-1].body[:-1])]
    if fault == "other record uncounted":
        reader.counts.not_pages -= 1
    if fault == "loss of good bytes is no excuse":
        reader.losses = [Loss(0, 1, "not_warc", False)]
        return records[1:]
    return records


@pytest.mark.parametrize(
    "fault",
    [
        "page dropped",
        "page twice",
        "wrong offset",
        "wrong text",
        "other record uncounted",
        "loss of good bytes is no excuse",
    ],
)
def test_the_account_finds_a_fault(fault: str) -> None:
    reader = WetReader(STORED)
    records = list(reader)
    check_account(STORED, reader, records)
    records = faults(reader, records, fault)
    reader.counts.read = len(records)
    with pytest.raises(AssertionError):
        check_account(STORED, reader, records)


def test_the_account_finds_a_gap_that_is_no_loss() -> None:
    damaged = bytearray(STORED)
    damaged[len(STORED) // 2] ^= 0xFF
    _, reader = read(bytes(damaged))
    records = list(reader)
    reader.losses = []
    reader.counts.lost = 0
    with pytest.raises(AssertionError):
        check_account(bytes(damaged), reader, records)


def test_a_failure_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(wet.WetReader, "_careful_record", fail)
    with pytest.raises(AssertionError, match=r"seed 12 .*(?s:.*)wet_fuzzer 12"):
        check_case(make_case(12))


def test_an_intact_page_that_is_missing_is_found() -> None:
    case = next(one for one in map(make_case, range(100)) if len(one.promises) > 2)
    broken = replace(case, parts=case.parts)
    offset, page = case.promises[0]
    lying = replace(page, body=page.body + b"!")
    broken.parts = [
        replace(part, pages=(lying,)) if page in part.pages else part for part in case.parts
    ]
    assert broken.promises[0] == (offset, lying)
    with pytest.raises(AssertionError, match="lost without reason"):
        check_case(broken)


def test_the_command_shows_a_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["7", "--save", str(tmp_path / "case")]) == 0
    assert (tmp_path / "case").read_bytes() == make_case(7).data
    assert "all holds" in capsys.readouterr().out
    assert main(["0", "5"]) == 0
    assert "5 cases, 0 failed" in capsys.readouterr().out
