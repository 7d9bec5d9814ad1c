"""An auxiliary peer from the command line: what it is asked for, and a run that it reduces in."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from scripts.cli import main
from tests.training.swarm.swarm_commands import RECIPE, Commands, credential, lines
from tests.training.tiny_runs import Place, make_place
from training.swarm import run_file
from training.swarm.authority import Authority
from training.swarm.auxiliary import has_missed_the_end, is_kept
from training.swarm.ledger import FILE, Ledger
from training.swarm.recipe import load_recipe
from training.swarm.run_file import RunFile
from training.swarm.types import Announcement, PeerInfo

STEPS = 16
RUN = "sahajbert-small"
INPUTS: dict[str, Any] = {
    "tokenizer_sha256": "ab" * 32,
    "sources": [],
    "domains": {},
    "init_sha256": None,
}
Made = Callable[..., RunFile]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A run file, of a recipe with these overrides."""
    authority = Authority.create(tmp_path / "authority", RUN)

    def of(*overrides: str) -> RunFile:
        return run_file.make(authority, load_recipe(RUN, list(overrides)), INPUTS, addresses=[])

    return of


def test_its_settings(made: Made) -> None:
    found = run_file.joined(
        made(), ["peer.role=auxiliary", "peer.up_mbit=500", "model.tokenizer=t",
                 "output.directory=y"],
    )  # fmt: skip
    assert (found.peer.role, found.peer.up_mbit, found.data.manifests) == ("auxiliary", 500.0, ())


def test_the_crawls_that_the_run_names_are_no_mistake(made: Made) -> None:
    run = made("data.manifests=https://example.org/mined")
    found = run_file.joined(run, ["peer.role=auxiliary"])
    assert found.data.manifests == ("https://example.org/mined",)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.manifests=x", "data.manifests = '['x']' means nothing for an auxiliary peer, which "
         "reads no examples and learns nothing: leave --data out"),
        ("batch.microbatch=3", "batch.microbatch = '3' means nothing for an auxiliary peer, which "
         "reads no examples and learns nothing: leave it out"),
        ("run.device=cuda", "run.device = 'cuda' means nothing for an auxiliary peer"),
        ("model.init=x", "model.init = 'x' means nothing for an auxiliary peer"),
        ("schedule.steps=700", "schedule.steps = '700' is '200' in the run"),
    ],
)  # fmt: skip
def test_what_it_does_not_read(made: Made, override: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        run_file.joined(made(), ["peer.role=auxiliary", override])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("how", [["--role", "auxiliary"], ["--set", "peer.role=auxiliary"]])
def test_it_is_asked_for_no_data(
    made: Made, how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made().write(tmp_path / "run.json")
    words = ["swarm", "join", str(tmp_path / "run.json"), "--output", str(tmp_path / "peer")]
    assert main(words) == 2
    assert "no data" in capsys.readouterr().err
    # The next thing that an unknown peer lacks.
    assert main([*words, *how]) == 2
    assert "lets in allowed users only" in capsys.readouterr().err
    assert main([*words, *how, "--data", "out/mined"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.endswith("leave --data out")


def test_the_end_as_the_coordinator_tells_it() -> None:
    def said(peer_id: str, epoch: int, state_hash: str) -> Announcement:
        peer = PeerInfo(peer_id, peer_id, "auxiliary", "cpu")
        return Announcement(peer, epoch, 0, 0.0, state_hash, 0.0, None, 0)

    assert is_kept([said("x", 9, ""), said("c", 8, "hash")], "c", 8)
    assert not is_kept([said("c", 7, "hash")], "c", 8)
    assert not is_kept([said("c", 8, "")], "c", 8)
    assert not is_kept([said("x", 8, "hash")], "c", 8)


def test_an_end_that_nobody_told() -> None:
    assert has_missed_the_end(9, 10, 121.0)
    assert not has_missed_the_end(8, 10, 1e6)  # a pause of everybody, who may come back
    assert not has_missed_the_end(9, 10, 60.0)


@pytest.mark.peers
@pytest.mark.slow
def test_a_run(commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two nodes and an auxiliary, which leaves, comes back, and ends with the others."""
    place: Place = make_place(tmp_path / "place")
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("steps = 24", f"steps = {STEPS}"))
    run = tmp_path / "run"
    commands.start("run", "start", str(tmp_path / "recipe.toml"), "--data", place.manifest,
                   "--tokenizer", place.tokenizer, "--output", str(run), "--json")  # fmt: skip
    commands.wait_for(lambda: "page: " in commands.said("run"), "run")
    url = commands.told("run", r"join: gristmill swarm join (\S+)")
    key = credential(run, "alice", capsys)

    def join(name: str, *more: str) -> None:
        commands.start(name, "join", url, "--user", "alice", "--credential", str(key), "--output",
                       str(tmp_path / name), "--name", name, "--json", "--set",
                       "peer.host=127.0.0.1", *more)  # fmt: skip

    join("helper", "--role", "auxiliary")
    commands.wait_for(lambda: "joined 'tiny-swarm'" in commands.said("helper"), "helper")
    for name in ("one", "two"):
        join(name, "--data", place.manifest)
    commands.wait_for(lambda: "reduced with 3 peers" in commands.said("helper"), "helper")
    began = time.monotonic()
    commands.running["helper"].send_signal(signal.SIGTERM)
    _, left = commands.end("helper")
    assert (left["status"], left["role"], time.monotonic() - began < 10) == (
        "left", "auxiliary", True,
    )  # fmt: skip
    assert not [line for line in commands.processes() if str(tmp_path / "helper") in line]

    join("helper", "--role", "auxiliary")
    ends = {name: commands.end(name)[1] for name in ("one", "two", "helper", "run")}
    assert {end["status"] for end in ends.values()} == {"finished"}
    assert {end["epoch"] for end in ends.values()} == {STEPS}
    assert len({ends[name]["state_hash"] for name in ("one", "two", "run")}) == 1
    helper = ends["helper"]
    assert (helper["peer"], helper["state_hash"], helper["own_samples"]) == (left["peer"], "", 0)
    assert helper["own_epochs"] > 0  # it came back in time
    assert re.search(r"joined 'tiny-swarm' at epoch [1-9]", commands.said("helper"))

    # It was in rounds that were whole, sent averages, and the others' receipts name it.
    rounds = lines(tmp_path / "helper" / "metrics.jsonl")
    assert all(one["fraction"] == 1.0 and one["sent_bytes"] > 0 for one in rounds)
    assert left["own_epochs"] + helper["own_epochs"] == len({one["epoch"] for one in rounds})
    epochs = lines(tmp_path / "one" / "metrics.jsonl")
    together = {line["epoch"] for line in epochs if line["peers"] == 3}
    assert {one["epoch"] for one in rounds if one["peers"] == 3} & together
    with Ledger(run / FILE) as ledger:
        told = [one for epoch in together for one in ledger.contributions("tiny-swarm", epoch)]
    assert {one.weight for one in told if one.peer_id == helper["peer"]} == {0.0}
    assert json.loads((tmp_path / "helper" / "addresses.json").read_text())

    # Nothing was read, nothing was learned.
    assert not list((tmp_path / "helper").rglob("*.safetensors"))
    there = {path.name for path in (tmp_path / "helper").iterdir()}
    assert not there & {"position.json", "examples.jsonl", "model", "checkpoints"}
    assert commands.processes() == []
