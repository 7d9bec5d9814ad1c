"""Whole runs of `gristmill train` as processes of their own, to be killed anywhere.

Importing torch and transformers takes most of a small run. So a server imports them once and
forks for each process; what runs then is the command line as a user starts it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from models.tokenizer import save_tokenizer, train_tokenizer
from tests.training import forked
from tests.training.corpora import make_corpus, random_pages

LIMIT_S = 300.0
RECIPE = """
data = {lanes = 4, held_out = 0.1}
examples = {sequence_length = 32}
model = {size = "tiny", dropout = 0.1}
batch = {samples = 8, microbatch = 4}
schedule = {steps = 12, warmup_steps = 2}
run = {device = "cpu", log_every = 1, tensorboard = false}
evaluation = {every = 5, examples = 8}
checkpoint = {every = 2}
"""


class Moment(NamedTuple):
    """Just before the `number`-th call of `event` in a process, of those whose path matches.

    event: an audit event of Python: open (for writing), os.rename (the path is the new name),
    os.remove, os.rmdir; "" for any of them.
    """

    event: str
    pattern: str
    number: int = 1


@dataclass(frozen=True)
class Inputs:
    """What every run of a test reads."""

    recipe: Path
    manifest: str
    tokenizer: Path

    def words(self, output: Path, *settings: str) -> list[str]:
        """The command line of one run."""
        words = ["train", str(self.recipe), "--data", self.manifest, "--tokenizer",
                 str(self.tokenizer), "--output", str(output)]  # fmt: skip
        for setting in settings:
            words += [setting] if setting.startswith("-") else ["--set", setting]
        return words


def make_inputs(folder: Path) -> Inputs:
    """A tiny mined crawl of two languages, its tokenizer and a recipe of 12 steps."""
    pages = {"bn": random_pages(120, seed=1), "hi": random_pages(60, seed=2)}
    texts = [page.text for listed in pages.values() for page in listed]
    save_tokenizer(train_tokenizer(texts, vocab_size=80), folder / "tokenizer", {})
    (folder / "tiny.toml").write_text(RECIPE)
    return Inputs(folder / "tiny.toml", make_corpus(folder / "mined", pages), folder / "tokenizer")


class Run:
    """One process of a run."""

    def __init__(self, process: Any, output: Path, log: Path) -> None:
        self.process, self.output, self._log = process, output, log

    def wait_for_step(self, step: int) -> None:
        """Wait until `step` is logged, which must happen before the end."""
        deadline_s = time.monotonic() + LIMIT_S
        while not any(line["step"] >= step for line in metrics(self.output)):
            assert self.process.is_alive(), f"the run ended before: {self.said()}"
            assert time.monotonic() < deadline_s, "the step never came"
            time.sleep(0.005)

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> int:
        """Wait for the end: the exit code, negative for a signal."""
        self.process.join(LIMIT_S)
        assert self.process.exitcode is not None, f"still running: {self.said()}"
        return int(self.process.exitcode)

    def said(self) -> str:
        """What stands on stderr."""
        return Path(f"{self._log}.stderr").read_text()


class Runs:
    """Starts runs; `close` leaves none behind."""

    def __init__(self, folder: Path, inputs: Inputs) -> None:
        self._folder, self._inputs = folder, inputs
        self._context = forked.context()
        self._runs: list[Run] = []

    def start(
        self, output: Path, *settings: str, kill_at: Moment | None = None, **environment: str
    ) -> Run:
        """Start one process. kill_at: where it ends itself by SIGKILL."""
        log = self._folder / f"{len(self._runs)}"
        process = self._context.Process(
            target=_run,
            args=(self._inputs.words(output, *settings), environment, kill_at, str(log)),
        )
        process.start()
        self._runs.append(Run(process, output, log))
        return self._runs[-1]

    def start_ranks(self, ranks: int, output: Path, *settings: str) -> list[Run]:
        """Start the processes of several ranks as torchrun does."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return [
            self.start(
                output, *settings, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def finish(self, output: Path, *settings: str) -> Run:
        """Run to the end, which must be a good one."""
        run = self.start(output, *settings)
        assert run.end() == 0, run.said()
        return run

    def close(self) -> None:
        for run in self._runs:
            run.process.kill()
            run.process.join(10)


@contextmanager
def runs_of(folder: Path, inputs: Inputs) -> Iterator[Runs]:
    """`Runs` that end with the block."""
    runs = Runs(folder, inputs)
    try:
        yield runs
    finally:
        runs.close()


def metrics(output: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, without what depends on the clock."""
    try:
        text = (output / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    for line in lines:
        line.pop("times", None)
    return lines


def result(output: Path) -> dict[str, bytes]:
    """The exported model and the manifest, byte by byte."""
    paths = [*sorted((output / "model").iterdir()), output / "manifest.json"]
    return {path.name: path.read_bytes() for path in paths}


def _run(
    words: Sequence[str], environment: dict[str, str], kill_at: Moment | None, log: str
) -> None:
    os.setsid()
    os.environ.update(environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    import torch

    from scripts import cli

    torch.set_num_threads(1)
    if kill_at is not None:
        sys.addaudithook(_killer(kill_at))
    code = cli.main(words)
    sys.stdout.flush()
    threading._shutdown()  # type: ignore[attr-defined]
    os._exit(code)


def _killer(moment: Moment) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that ends the process at `moment`."""
    left = moment.number
    files = {"os.rename": 1, "os.remove": 0, "os.rmdir": 0, "open": 0}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in files or moment.event not in ("", event):
            return
        if event == "open" and not isinstance(arguments[1], str):
            return  # os.open, as for syncing
        if event == "open" and not set(arguments[1]) & set("wax+"):
            return
        if re.search(moment.pattern, str(arguments[files[event]])):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook
