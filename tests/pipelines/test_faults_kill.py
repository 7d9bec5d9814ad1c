"""Killed at any moment of any pass, a run goes on and gives the bytes of an uninterrupted one."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from models.errors import Fault
from pipelines.worker_watch import workers_watched
from tests.pipelines.fault_runs import Moment, Runs, before_file, contents, flip

# Each pass by the file that it is about to finish, with the number of such files in a whole run.
PASSES = {
    "begin": (before_file(r"/(run|plan-\w+)\.json$"), 2),
    "hash": (before_file(r"/keys/"), 4),
    "judge": (before_file(r"/timings/judge/"), 4),
    "clean": (before_file(r"\.staging/pages/"), 12),
    "regroup": (before_file(r"/(parts|language=\w+/bucket=all)/"), 16),
    "publish": (before_file(r"/(drops\.parquet|timings\.json|manifest\.json)$"), 3),
    "clean-up": (Moment("os.remove", r"^[^/]*$|\.staging/(run|plan)[^/]*$"), 16),
    "unlock": (Moment("os.remove", r"^run\.lock$"), 1),  # the very last
}
_BOUND_S = 60.0
_STOPPED = "gristmill: stopped; run the same command again to go on"


def moment(name: str, number: int) -> Moment:
    return PASSES[name][0]._replace(number=number)


def moments(in_short: dict[str, int], most: int) -> list[object]:
    """Up to `most` files of each pass; all but the chosen are slow."""
    return [
        pytest.param(name, number, marks=[] if in_short.get(name) == number else pytest.mark.slow)
        for name, (_, files) in PASSES.items()
        for number in range(1, min(files, most) + 1)
    ]


def nothing_partial(output: Path, whole: dict[str, bytes]) -> None:
    """What stands under a final name has its final bytes."""
    for path in (*output.glob("pages/*/*/[!.]*"), *output.glob("[!.]*.*")):
        name = str(path.relative_to(output))
        if name != "timings.json":
            assert path.read_bytes() == whole[name], f"{name} is partial"


IN_SHORT = {"hash": 2, "judge": 3, "clean": 5, "regroup": 6, "publish": 3, "clean-up": 9,
            "unlock": 1}  # fmt: skip


@pytest.mark.parametrize(("name", "number"), moments(IN_SHORT, 16))
def test_the_run_is_killed(
    name: str, number: int, runs: Runs, shards: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    running = runs.start(shards, tmp_path, pause=moment(name, number))
    running.paused()
    running.kill()
    assert running.end().code == -signal.SIGKILL
    nothing_partial(tmp_path, whole)
    runs.finish(shards, tmp_path)
    assert contents(tmp_path) == whole


def test_killed_when_the_manifest_of_a_damaged_result_has_gone(
    runs: Runs, shards: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    """The parts that then stand without a manifest are still known for ours."""
    runs.finish(shards, tmp_path)
    flip(min(tmp_path.glob("pages/*/*/*.parquet")), 100)
    running = runs.start(shards, tmp_path, pause=Moment("os.remove", r"/faults\.json$"))
    running.paused()
    running.kill()
    running.end()
    assert not (tmp_path / "manifest.json").exists()
    runs.finish(shards, tmp_path)
    assert contents(tmp_path) == whole


# Only of the first two is it sure that one worker comes to so many.
@pytest.mark.parametrize(
    ("name", "number"),
    [case for case in moments({"hash": 1, "clean": 2}, 2)
     if case.values[0] in ("hash", "judge", "clean", "regroup")],
)  # fmt: skip
def test_one_worker_is_killed(
    name: str, number: int, runs: Runs, shards: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    """The run ends at once and with one line; Beam alone waits, or prints pages."""
    running = runs.start(shards, tmp_path, "--workers", "2", pause=moment(name, number))
    worker = running.paused()
    assert worker != running.process
    os.kill(worker, signal.SIGKILL)
    ended = running.end(_BOUND_S)  # and nothing of it is left behind
    nothing_partial(tmp_path, whole)
    assert ended.code == 1
    assert ended.lines() == [
        "gristmill: fault: a worker process was killed by signal 9 (SIGKILL), as happens when "
        "memory runs out: run the same command again to go on"
    ]
    runs.finish(shards, tmp_path)
    assert contents(tmp_path) == whole


def test_two_workers_die_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of Beam that wait for them say so at the same moment."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # put back at the end
    together = threading.Barrier(2)

    def wait_for_worker() -> None:
        together.wait()
        raise RuntimeError("Worker subprocess exited with return code -7")

    with workers_watched():
        signal.raise_signal(signal.SIGUSR1)  # of somebody else: nobody has died
    threads = [threading.Thread(target=wait_for_worker, name="run_worker") for _ in range(2)]
    with pytest.raises(Fault, match=r"killed by signal 7 \(SIGBUS\): run"), workers_watched():
        for thread in threads:
            thread.start()
        time.sleep(_BOUND_S)
    for thread in threads:
        thread.join()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("number", "workers", "name"),
    [
        (signal.SIGINT, 1, "clean"),
        (signal.SIGTERM, 1, "hash"),
        pytest.param(signal.SIGTERM, 2, "hash", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1, "regroup", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, "clean", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, "regroup", marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_all_of_it(
    number: signal.Signals, workers: int, name: str,
    runs: Runs, shards: list[Path], whole: dict[str, bytes], tmp_path: Path,
) -> None:  # fmt: skip
    """Ctrl+C, and what a scheduler or a spot machine sends, to the whole process group."""
    running = runs.start(shards, tmp_path, "--workers", str(workers), pause=moment(name, 2))
    running.paused()
    running.kill_group(number)
    running.go_on()
    ended = running.end(_BOUND_S)
    assert (ended.code, ended.lines()) == (128 + number, [_STOPPED])
    nothing_partial(tmp_path, whole)
    runs.finish(shards, tmp_path)
    assert contents(tmp_path) == whole
