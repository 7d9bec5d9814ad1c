"""A whole run from the command line: a coordinator, two peers, one that leaves and returns."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.cli import main
from tests.conftest import REPOSITORY
from tests.training.tiny_runs import Place, make_place
from training import checkpoint

pytestmark = pytest.mark.slow  # three peers of real processes: a minute or two on two cores

RECIPE = """
name = "tiny-swarm"
data = {lanes = 4, held_out = 0.1}
examples = {sequence_length = 32}
model = {family = "albert", size = "tiny"}
batch = {samples = 400, microbatch = 4}
optimiser = {name = "lamb", learning_rate = 5e-3, epsilon = 1e-6}
schedule = {steps = 24, warmup_steps = 2}
checkpoint = {every = 4}
swarm = {codec = "none", matchmaking_s = 1.0, sender_s = 5}
peer = {host = "127.0.0.1"}
coordinator = {port = 0, page_port = 0, poll_s = 0.5, gone_s = 10}
[collaboration]
labels_per_sample = [4.0, 1.0]
min_peers = 2
announce_s = 0.3
look_s = 0.2
round_timeout_s = 20
"""


class Commands:
    """`gristmill swarm ...`, each as a process of its own with its output in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, dict[str, subprocess.Popen[str]]()

    def start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.err").open("a") as said:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "scripts.cli", "swarm", *words],
                cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=said, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()

    def wait_for(self, what: Callable[[], bool], name: str) -> None:
        until = time.monotonic() + 180
        while not what():
            assert self.running[name].poll() is None, self.said(name)
            assert time.monotonic() < until, self.said(name)
            time.sleep(0.1)

    def end(self, name: str) -> tuple[int, dict[str, Any]]:
        text, _ = self.running[name].communicate(timeout=240)
        code = self.running.pop(name).returncode
        assert code == 0, self.said(name)
        return code, json.loads(text)

    def processes(self) -> list[str]:
        """Command lines of all processes that name the test's folder, or stand below one."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environment = path.read_bytes()
                line = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if (
                b"GRISTMILL_SWARM_INSIDE" in environment
                and line
                and (str(self.folder) in line or f"PWD={self.folder}".encode() in environment)
            ):
                found.append(line)
        return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    found = Commands(tmp_path)
    yield found
    for process in found.running.values():
        process.kill()
        process.wait()


def test_a_run(commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place: Place = make_place(tmp_path / "place")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    run, crawl = tmp_path / "run", place.manifest
    commands.start("run", "start", str(tmp_path / "recipe.toml"), "--data", crawl, "--tokenizer",
                   place.tokenizer, "--output", str(run), "--json")  # fmt: skip
    commands.wait_for(lambda: "page: " in commands.said("run"), "run")
    found = re.search(r"join: gristmill swarm join (\S+)", commands.said("run"))
    page = re.search(r"page: (\S+)", commands.said("run"))
    assert found is not None and page is not None
    url = found[1]

    assert main(["swarm", "allow", "add", "alice", "--run", str(run)]) == 0
    key, wrong = tmp_path / "alice.key", tmp_path / "wrong.key"
    for file, text in ((key, capsys.readouterr().out), (wrong, "x" * 32)):
        file.touch(mode=0o600)
        file.write_text(text)

    def join(name: str, credential: Path = key) -> list[str]:
        return ["join", url, "--user", "alice", "--credential", str(credential), "--data", crawl,
                "--output", str(tmp_path / name), "--name", name, "--json",
                "--set", "peer.host=127.0.0.1"]  # fmt: skip

    commands.start("stranger", *join("stranger", wrong))
    assert commands.running["stranger"].wait(120) == 2
    assert "refuses: user or credential is wrong" in commands.said("stranger")
    assert "Traceback" not in commands.said("stranger")
    del commands.running["stranger"]

    for name in ("one", "two"):
        commands.start(name, *join(name))
    commands.wait_for(lambda: "epoch 1 done" in commands.said("two"), "two")
    assert main(["swarm", "status", page[1], "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert {peer["name"] for peer in status["peers"] if peer["role"] == "node"} == {"one", "two"}
    assert main(["swarm", "doctor", url]) == 0
    assert "FAILED" not in capsys.readouterr().out

    began = time.monotonic()
    commands.running["two"].send_signal(signal.SIGTERM)
    _, left = commands.end("two")
    assert (left["status"], time.monotonic() - began < 12) == ("left", True)
    assert not [line for line in commands.processes() if str(tmp_path / "two") in line]
    at = json.loads((tmp_path / "two" / "position.json").read_text())["stream"]["position"]

    commands.start("two", *join("two"))
    ends = {name: commands.end(name)[1] for name in ("one", "two", "run")}
    assert {end["status"] for end in ends.values()} == {"finished"}
    assert {end["epoch"] for end in ends.values()} == {24}
    assert len({end["state_hash"] for end in ends.values()}) == 1
    assert ends["two"]["peer"] == left["peer"]
    log = lines(tmp_path / "two" / "examples.jsonl")
    assert all(after["first"] >= before["until"]
               for before, after in itertools.pairwise(log))  # fmt: skip
    assert log[-1]["until"] >= at
    epochs = lines(tmp_path / "one" / "metrics.jsonl")
    assert [line["epoch"] for line in epochs] == list(range(24))
    assert all(line["samples"] >= 400 and line["fraction"] == 1.0 for line in epochs)
    assert checkpoint.latest(run) == run / "checkpoints" / "step-00000024"
    assert (run / "model" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "one" / "addresses.json").read_text())
    assert commands.processes() == []
