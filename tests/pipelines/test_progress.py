"""The progress of a run: true figures, one line a pass, silence where nobody looks."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
from pathlib import Path

import pytest

from pipelines.plan import make_plan
from pipelines.progress import PassState, _Pieces, _Reporter, live_line
from pipelines.recipe import load_recipe
from tests.pipelines.fault_runs import Runs, contents

KEYS = ["pass", "files", "files_total", "bytes", "bytes_total", "bytes_per_s", "eta_s",
        "pages_kept", "losses", "failed", "elapsed_s"]  # fmt: skip
PASSES = ["hash", "judge", "clean", "regroup", "publish"]


def check_against_the_manifest(lines: list[dict[str, object]], output: Path) -> None:
    """The last object of each pass has the figures of the manifest."""
    manifest = json.loads((output / "manifest.json").read_text())
    assert all(list(line) == KEYS for line in lines)
    names = [line["pass"] for line in lines]
    assert sorted(set(names), key=names.index) == PASSES
    assert names == sorted(names, key=PASSES.index)
    last = {line["pass"]: line for line in lines}
    for line in last.values():
        assert line["files"] == line["files_total"]
        assert line["eta_s"] == 0.0
        assert 0 <= line["elapsed_s"] < 120
    good = [entry for entry in manifest["inputs"] if not entry["failed"]]
    failed = len(manifest["inputs"]) - len(good)
    stored = sum(entry["bytes"] for entry in good)
    written = manifest["counts"]["pages"]["written"]
    outputs = manifest["outputs"]
    assert (last["hash"]["files"], last["hash"]["failed"]) == (len(good) + failed, failed)
    assert last["hash"]["bytes"] == last["clean"]["bytes"] == last["clean"]["bytes_total"] == stored
    assert last["hash"]["bytes_total"] == stored
    assert last["judge"]["files"] == 4
    assert last["clean"]["files"] == len(good)
    assert last["clean"]["pages_kept"] == last["regroup"]["pages_kept"] == written > 0
    assert last["publish"]["pages_kept"] == written
    assert last["clean"]["losses"] == last["publish"]["losses"] == len(manifest["losses"]) > 0
    assert last["regroup"]["bytes"] == sum(entry["text_bytes"] for entry in outputs)
    assert last["publish"]["bytes"] == sum(entry["bytes"] for entry in outputs)
    for line in lines:
        if line["files_total"] is not None:
            assert line["files"] <= line["files_total"]


def test_json_lines_end_with_the_figures_of_the_manifest(
    runs: Runs, shards: list[Path], tmp_path: Path
) -> None:
    """With a damaged file and, in a crawl manifest, one that is not there; then after a resume."""
    damaged = Path(shutil.copy(shards[1], tmp_path / "damaged.warc.wet.gz"))
    data = damaged.read_bytes()
    damaged.write_bytes(data[: len(data) // 2] + bytes(60) + data[len(data) // 2 + 60 :])
    crawl = tmp_path / "crawl.json"
    from pipelines.crawl import CrawlFile, CrawlManifest

    files = [shards[0], damaged, tmp_path / "absent.wet.gz"]
    CrawlManifest(
        name="x", source="x", num_shards=3,
        files=tuple(CrawlFile(path=path.name, url=str(path), shard=shard)
                    for shard, path in enumerate(files)),
    ).write(crawl)  # fmt: skip
    output = tmp_path / "output"
    words = ["--progress", "json", "--max-failed-shards", "1"]
    for _ in range(2):  # the second finds all work done: a failed input lets it run again
        ended = runs.finish([crawl], output, *words)
        lines = [json.loads(line) for line in ended.lines() if line.startswith("{")]
        check_against_the_manifest(lines, output)


def test_a_terminal_gets_one_line_a_pass(runs: Runs, shards: list[Path], tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    running = runs.start(shards, tmp_path, terminal=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        shown += piece
        if not piece:
            break
    assert running.end().code == 0
    text = shown.decode()
    assert text.count("\n") == len(PASSES)
    final = [line.rpartition("\r")[2].replace("\x1b[K", "")
             for line in text.replace("\r\n", "\n").strip().split("\n")]  # fmt: skip
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    stored = sum(entry["bytes"] for entry in manifest["inputs"]) / 1e6
    written = manifest["counts"]["pages"]["written"]
    assert [line.split()[0] for line in final] == PASSES
    assert re.fullmatch(rf"hash    4/4 files  {stored:.1f}/{stored:.1f} MB  in \d+ s.*", final[0])
    assert re.fullmatch(r"judge   4/4 ranges  in \d+ s", final[1])
    assert re.fullmatch(rf"clean   4/4 files  .*  in \d+ s  .*{written} pages kept", final[2])


@pytest.mark.parametrize("words", [[], ["--progress", "none"]])
def test_silence_without_a_terminal(
    words: list[str], runs: Runs, shards: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    ended = runs.finish(shards, tmp_path, *words)
    assert ended.stderr == ""
    assert contents(tmp_path) == whole


def test_a_folder_that_has_not_changed_is_not_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda at: listed.append(os.fspath(at)) or scandir(at))

    def leave(number: int) -> None:
        folder = tmp_path / f"{number // 1000:04d}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:07d}.json").touch()
        (folder / f".{number:07d}.json.x.gristmill-tmp").touch()
        settled_ns = folder.stat().st_mtime_ns - 5_000_000_000
        os.utime(folder, ns=(settled_ns, settled_ns))

    pieces = _Pieces(str(tmp_path))
    assert pieces.new() == []
    for number in (0, 999, 1000, 2500):
        leave(number)
    assert sorted(number for number, _ in pieces.new()) == [0, 999, 1000, 2500]
    listed.clear()
    assert pieces.new() == []
    assert listed == [str(tmp_path)]
    leave(1001)
    listed.clear()
    assert [number for number, _ in pieces.new()] == [1001]
    assert listed == [str(tmp_path), str(tmp_path / "0001")]


def test_a_listing_that_fails_is_tried_again(
    data_dir: Path, shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """As a store does for a moment: neither the thread nor the run ends with it."""
    monkeypatch.setenv("GRISTMILL_DATA", str(data_dir))
    paths = json.dumps([str(path) for path in shards])
    settings = [f"input.paths={paths}", f"output.directory={tmp_path}"]
    reporter = _Reporter(make_plan(load_recipe("default", settings)), live=False)
    answers = iter([OSError("slow down"), []])

    def new(_: _Pieces) -> list[tuple[int, str]]:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(_Pieces, "new", new)
    reporter._tick()
    assert capfd.readouterr().err == ""
    reporter._tick()
    assert json.loads(capfd.readouterr().err)["files_total"] == 4


def test_rate_and_time_left_are_those_of_the_last_two_minutes() -> None:
    state = PassState("clean", files=0, files_total=100, bytes=0, bytes_total=10_000)
    begin = state.begin_unix_s
    assert state.rate(begin) is None
    state.bytes = 5000  # found done: a resume goes through these in no time
    assert state.rate(begin + 1) == 5000.0
    for second in range(10, 400, 10):
        state.bytes = 5000 + 10 * second
        rate = state.rate(begin + second)
    assert rate == pytest.approx(10.0)
    state.files, state.last_end_unix_s = 100, begin + 500
    state.bytes = 10_000
    assert state.rate(begin + 999) == pytest.approx(20.0)
    assert state.elapsed_s(begin + 999) == 500


@pytest.mark.parametrize(
    ("figures", "finished", "line"),
    [
        ({"pass": "hash", "files": 1200, "files_total": 90_000, "bytes": 84e9, "bytes_total": 6e12,
          "bytes_per_s": 35_200_000, "eta_s": 7384.0, "failed": 2, "elapsed_s": 5.0}, False,
         "hash    1,200/90,000 files  84.0/6,000.0 GB  2 h 3 min left  35.2 MB/s  2 unreadable"),
        ({"pass": "regroup", "files": 0, "bytes": 0, "elapsed_s": 61.2}, False,
         "regroup 0/? tasks  1 min 1 s"),
        ({"pass": "clean", "files": 4, "files_total": 4, "bytes": 2e6, "bytes_total": 2e6,
          "bytes_per_s": 1e6, "eta_s": 0.0, "pages_kept": 1234, "losses": 1, "elapsed_s": 2.4},
         True, "clean   4/4 files  2.0/2.0 MB  in 2 s  1.0 MB/s  1,234 pages kept  1 loss"),
    ],
)  # fmt: skip
def test_the_live_line(figures: dict[str, object], finished: bool, line: str) -> None:
    assert live_line(dict.fromkeys(KEYS) | figures, finished=finished) == line
