"""Reader processes: the same stream, the same state, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import Fault, UserError
from tests.training.corpora import data, make_corpus, random_pages
from tests.training.test_sampler import plain
from tests.training.word_examples import DyingExamples, MistakenExamples, WordExamples
from training.domains import load_corpus
from training.readers import Readers
from training.recipe import Data
from training.sampler import ExampleStream, merge_states


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> str:
    listed = {"bn": random_pages(120, seed=1), "en": random_pages(30, seed=2)}
    return make_corpus(tmp_path_factory.mktemp("readers"), listed)


def stream(settings: Data, builder: WordExamples | None = None, **more: Any) -> ExampleStream:
    corpus = load_corpus(settings)
    return ExampleStream(
        corpus, np.array([0.7, 0.3]), builder or WordExamples(), data=settings, **more
    )


def processes(one: ExampleStream) -> list[Any]:
    assert isinstance(one._source, Readers)
    return one._source._processes


def gone(pid: int) -> bool:
    """Whether a process has ended, waiting 20 s at most."""
    for _ in range(400):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # dead, and nobody has asked yet
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("lanes", [6, 5])
def test_readers_change_nothing(crawl: str, lanes: int) -> None:
    """Also where the lanes do not divide by ranks x readers."""
    settings = data(crawl, lanes=lanes, held_out=0.1)
    whole = stream(settings)
    expected = plain(whole.take(300))
    with stream(settings.model_copy(update={"readers": 2})) as one:
        found = plain(one.take(7)) + plain(one.take(0)) + plain(one.take(110))
        half = json.loads(json.dumps(one.state_dict()))
        if lanes % 2 == 0:
            middle = stream(settings)
            middle.take(117)
            assert half == middle.state_dict()
            assert one.counts == middle.counts
    assert found == expected[:117]
    settings = settings.model_copy(update={"readers": 1})
    ranks = [stream(settings, rank=rank, ranks=2, state=half, count=300) for rank in range(2)]
    for one in ranks:
        found += plain(one.take(1000))
    assert sorted(found) == expected
    state = merge_states([one.state_dict() for one in ranks])
    assert state == whole.state_dict()
    pids = [process.pid for one in ranks for process in processes(one)]
    for one in ranks:
        one.close()
        one.close()
    assert all(gone(pid) for pid in pids)


def test_a_dead_reader_is_a_fault(crawl: str) -> None:
    with stream(data(crawl, readers=1), DyingExamples()) as one:
        with pytest.raises(Fault, match="reader 0 of 1 stopped, exit code '17'"):
            one.take(10_000)
        (pid,) = (process.pid for process in processes(one))
    assert gone(pid)


def test_a_mistake_in_a_reader_is_told_as_one(crawl: str) -> None:
    with (
        stream(data(crawl, readers=1), MistakenExamples()) as one,
        pytest.raises(UserError, match=r"^'x' is wrong: choose 'y'$"),
    ):
        one.take(1)


SCRIPT = """
import sys, time
import numpy as np
from training.domains import load_corpus
from training.recipe import Data
from training.sampler import ExampleStream
from tests.training.word_examples import WordExamples

if __name__ == "__main__":
    data = Data(manifests=(sys.argv[1],), readers=2, lanes=4, held_out=0)
    one = ExampleStream(load_corpus(data), np.array([0.5, 0.5]), WordExamples(), data=data)
    one.take(40)
    print(*[process.pid for process in one._source._processes], flush=True)
    if sys.argv[2] == "wait":
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "number"), [("end", 0), ("wait", signal.SIGKILL), ("wait", signal.SIGINT)]
)
def test_no_reader_outlives_its_program(crawl: str, tmp_path: Path, how: str, number: int) -> None:
    """Which never closes the stream: it ends, is killed, or the keyboard interrupts the group."""
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    program = subprocess.Popen(
        [sys.executable, str(script), crawl, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2
        if number == signal.SIGINT:
            os.killpg(program.pid, number)
        elif number:
            program.kill()
        _, said = program.communicate(timeout=240)
        assert all(gone(pid) for pid in pids)
        # Ctrl+C: the program's own traceback, and not one word of a reader.
        assert said.count("Traceback") == (number == signal.SIGINT)
    finally:
        program.kill()


def test_readers_stay_when_a_whole_group_is_told_to_stop(crawl: str) -> None:
    """So that the rank can save what it has; the readers go with it."""
    settings = data(crawl)
    expected = plain(stream(settings).take(4000))
    with stream(settings.model_copy(update={"readers": 1})) as one:
        found = plain(one.take(10))
        for process in processes(one):
            os.kill(process.pid, signal.SIGTERM)
            os.kill(process.pid, signal.SIGINT)
        found += plain(one.take(3990))
    assert found == expected
