"""What the peers' benchmark does around the runs themselves: input, measuring, the table."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from models.errors import UserError
from pipelines.wet import WetReader
from scripts import bench_peers
from scripts.bench_peers import (
    GRISTMILL,
    PEERS,
    Result,
    RunFailed,
    Usage,
    count,
    execute,
    lay_out,
    main,
    one_page_wet,
    table,
    texts,
)

_MIB = 1 << 20


def test_the_one_page_is_a_sound_wet_file() -> None:
    reader = WetReader(gzip.compress(one_page_wet()))
    (record,) = list(reader)
    assert bytes(record.body).decode().startswith("One page, a line long")
    assert record.body[-1:] == b"\n"
    assert reader.losses == []


def test_only_the_wanted_files_are_laid_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("b.warc.wet.gz", "a.warc.wet.gz", "INDEX.md"):
        (source / name).write_text(name)
    old = tmp_path / "work" / "input" / "old.gz"
    old.parent.mkdir(parents=True)
    old.touch()
    folder = lay_out(str(source / "*.gz"), tmp_path / "work")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "a.warc.wet.gz": "a.warc.wet.gz",
        "b.warc.wet.gz": "b.warc.wet.gz",
    }


def test_input_that_cannot_be_laid_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file matches '.*none\.gz': give WET files"):
        lay_out(str(tmp_path / "none.gz"), tmp_path / "work")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.gz").touch()
    with pytest.raises(UserError, match="two files of one name"):
        lay_out(str(tmp_path / "*" / "same.gz"), tmp_path / "work")


def test_pages_and_paragraphs_with_text_are_counted(tmp_path: Path) -> None:
    part = tmp_path / "language=en" / "part-0.parquet"
    part.parent.mkdir()
    pq.write_table(pa.table({"text": ["a\n \nb", "c\u2028d"], "n": [1, 2]}), part)
    with zstandard.open(tmp_path / "x.jsonl.zst", "wt", encoding="utf-8") as file:
        file.write('{"text":"e\\nf"}\n{"text":" \\n"}\n')
    assert list(texts(tmp_path)) == ["a\n \nb", "c\u2028d", "e\nf", " \n"]
    assert count(texts(tmp_path)) == (3, 5)


def test_children_are_in_the_cpu_time_and_the_peak_is_seen(tmp_path: Path) -> None:
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}]); x = b'x' "
    end = "* (200 << 20); import time; time.sleep(0.3)"
    usage = execute([sys.executable, "-c", parent + end], tmp_path / "log", os.environ)
    assert 0.5 <= usage.cpu_s < 5
    assert 200 * _MIB < usage.peak_rss_bytes < 400 * _MIB


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = [sys.executable, "-c", "print('begun'); raise SystemExit('no such thing\\n')"]
    with pytest.raises(RunFailed, match=r"^exit 1: no such thing \(.*log\)$"):
        execute(words, log, os.environ)
    assert log.read_text().startswith("begun\n")


def test_the_table_divides_right_and_keeps_a_failed_peer() -> None:
    datatrove, dolma = PEERS
    rows = table(
        {
            GRISTMILL: Result(Usage(12.0, 300 * _MIB), Usage(2.0, 0), 1_000, 20_000),
            datatrove: Result(Usage(101.0, 200 * _MIB), Usage(1.0, 0), 990, 19_000),
            dolma: Result(failed="not installed: exit 1: no network (install.log)"),
        },
        wet_bytes=60_000_000,
    )
    assert rows[2].split()[1:] == [
        *(GRISTMILL.version, "12.0", "2.0", "5.00", "6.00", "300", "1,000", "20,000")
    ]
    assert rows[3].split() == [
        *("datatrove", "0.10.1", "101.0", "1.0", "0.59", "0.60", "200", "990", "19,000")
    ]
    assert rows[4] == "dolma 1.2.1       not installed: exit 1: no network (install.log)"
    assert rows[-2:] == [
        "Gristmill at 6 MB/s without start-up: reached",
        "Gristmill / datatrove: 10.0",
    ]


def test_the_best_round_counts_and_one_failure_does_not_stop_the_others(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    datatrove, dolma = PEERS
    (tmp_path / "page.warc.wet.gz").write_bytes(gzip.compress(one_page_wet()))
    seconds = {"Gristmill": [1, 9, 2, 7], "dolma": [1, 8, 1, 12]}
    calls: list[str] = []

    def no_pip(words: list[str | Path], log: Path, environment: object) -> Usage:
        if datatrove.name in str(log):
            raise RunFailed("exit 1: no network")
        if "venv" in words:
            Path(words[-1]).mkdir(parents=True)
        return Usage(0.0, 0)

    def fake_run(peer: bench_peers.Peer, *arguments: Path) -> Usage:
        calls.append(peer.name)
        out = tmp_path / "work" / peer.name / "run" / "out"
        out.mkdir(parents=True, exist_ok=True)
        if peer == dolma and calls.count("dolma") == 4:
            raise RunFailed("exit -9: Killed")
        return Usage(seconds[peer.name].pop(0), 0)

    monkeypatch.setattr(bench_peers, "execute", no_pip)
    monkeypatch.setattr(bench_peers, "run", fake_run)
    words = ["--input", str(tmp_path / "*.gz"), "--rounds", "2"]
    model = data_dir / "models" / "lid.176.ftz"
    assert main([*words, "--work", str(tmp_path / "work"), "--model", str(model)]) == 0
    assert calls == ["Gristmill", "Gristmill", "dolma", "dolma"] * 2
    rows = capsys.readouterr().out.split("\n")
    assert rows[2].split()[2:4] == ["7.0", "1.0"]
    assert rows[3].split(maxsplit=2)[2] == "not installed: exit 1: no network"
    assert rows[4].split(maxsplit=2)[2] == "exit -9: Killed"
