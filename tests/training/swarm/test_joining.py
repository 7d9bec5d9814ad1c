"""A whole run from the command line: a coordinator, two peers, one that leaves and returns."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest

from scripts.cli import main
from tests.training.swarm.swarm_commands import RECIPE, Commands, credential, lines, secret
from tests.training.tiny_runs import Place, make_place
from training import checkpoint
from training.swarm import run_file
from training.swarm.supervisor import alive

pytestmark = pytest.mark.peers
STEPS = 20


def test_a_run(commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place: Place = make_place(tmp_path / "place")
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("steps = 24", f"steps = {STEPS}"))
    run, crawl = tmp_path / "run", place.manifest
    commands.start("run", "start", str(tmp_path / "recipe.toml"), "--data", crawl, "--tokenizer",
                   place.tokenizer, "--output", str(run), "--json")  # fmt: skip
    commands.wait_for(lambda: "page: " in commands.said("run"), "run")
    url = commands.told("run", r"join: gristmill swarm join (\S+)")
    page = commands.told("run", r"page: (\S+)")
    key = credential(run, "alice", capsys)

    def join(name: str, key: Path = key) -> list[str]:
        return ["join", url, "--user", "alice", "--credential", str(key), "--data", crawl,
                "--output", str(tmp_path / name), "--name", name, "--json",
                "--set", "peer.host=127.0.0.1"]  # fmt: skip

    commands.start("stranger", *join("stranger", secret(tmp_path / "wrong.key", "x" * 32)))
    for name in ("one", "two"):
        commands.start(name, *join(name))
    assert commands.running["stranger"].wait(120) == 2
    assert "refuses: user or credential is wrong" in commands.said("stranger")
    assert "Traceback" not in commands.said("stranger")
    del commands.running["stranger"]

    # All that a peer has of the run came from the coordinator.
    given = run_file.read(str(run))
    commands.wait_for(lambda: "epoch 1 done" in commands.said("two"), "two")
    for name in ("one", "two"):
        assert run_file.read(str(tmp_path / name)).sealed == given.sealed
        own = (tmp_path / name / "tokenizer" / "tokenizer.json").read_bytes()
        assert own == (Path(place.tokenizer) / "tokenizer.json").read_bytes()
    assert main(["swarm", "status", page, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert {peer["name"] for peer in status["peers"] if peer["role"] == "node"} == {"one", "two"}

    began = time.monotonic()
    commands.running["two"].send_signal(signal.SIGTERM)
    _, left = commands.end("two")
    assert (left["status"], time.monotonic() - began < 12) == ("left", True)
    assert not [line for line in commands.processes() if str(tmp_path / "two") in line]
    at = json.loads((tmp_path / "two" / "position.json").read_text())["stream"]["position"]

    commands.start("two", *join("two"))
    ends = {name: commands.end(name)[1] for name in ("one", "two", "run")}
    assert {end["status"] for end in ends.values()} == {"finished"}
    assert {end["epoch"] for end in ends.values()} == {STEPS}
    assert len({end["state_hash"] for end in ends.values()}) == 1
    assert ends["two"]["peer"] == left["peer"]
    assert ends["two"]["own_samples"] > 0  # it came in time to take part again
    log = lines(tmp_path / "two" / "examples.jsonl")
    assert all(after["first"] >= before["until"]
               for before, after in itertools.pairwise(log))  # fmt: skip
    assert log[-1]["until"] >= at
    epochs = lines(tmp_path / "one" / "metrics.jsonl")
    assert [line["epoch"] for line in epochs] == list(range(STEPS))
    assert all(line["samples"] >= 400 and line["fraction"] == 1.0 for line in epochs)
    assert checkpoint.latest(run) == run / "checkpoints" / f"step-{STEPS:08d}"
    assert (run / "model" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "one" / "addresses.json").read_text())
    assert commands.processes() == []


@pytest.mark.slow
def test_killed_parents(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 of the process that the user started leaves none of its processes, hivemind's own
    neither; and the doctor finds nothing wrong with this machine."""
    place: Place = make_place(tmp_path / "place")
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("min_peers = 2", "min_peers = 1"))
    run = tmp_path / "run"
    commands.start("run", "start", str(tmp_path / "recipe.toml"), "--data", place.manifest,
                   "--tokenizer", place.tokenizer, "--output", str(run), "--json",
                   "--set", "schedule.steps=100000")  # fmt: skip
    commands.wait_for(lambda: "page: " in commands.said("run"), "run")
    url = commands.told("run", r"join: gristmill swarm join (\S+)")
    key = credential(run, "alice", capsys)
    assert main(["swarm", "doctor", url]) == 0
    assert "FAILED" not in capsys.readouterr().out
    join = ["join", url, "--user", "alice", "--credential", str(key), "--data", place.manifest,
            "--output", str(tmp_path / "one"), "--json", "--set",
            "peer.host=127.0.0.1"]  # fmt: skip
    commands.start("one", *join)
    commands.wait_for(lambda: "epoch 1 done" in commands.said("one"), "one")

    # A service manager asks all processes of a service at once.
    for group in commands.groups(commands.running["one"].pid):
        for pid in alive(group):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    _, left = commands.end("one")
    assert left["status"] == "left"
    assert "Traceback" not in commands.said("one")
    commands.start("one", *join)
    commands.wait_for(lambda: commands.said("one").count("joined 'tiny-swarm'") == 2, "one")

    for name in ("one", "run"):
        supervisor = commands.running.pop(name)
        groups = commands.groups(supervisor.pid) - {supervisor.pid}
        below = [pid for group in groups for pid in alive(group)]
        assert len(below) >= 4  # trainer, DHT, p2pd, averager
        supervisor.kill()
        supervisor.wait()
        until = time.monotonic() + 20
        while [pid for group in groups for pid in alive(group)] and time.monotonic() < until:
            time.sleep(0.1)
        assert [pid for group in groups for pid in alive(group)] == []
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 0)
                assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
