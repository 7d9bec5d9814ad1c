"""The coordinator is killed in the middle of a run and started again: nobody else notices much."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest

from tests.training.swarm.swarm_commands import RECIPE, Commands, credential, free_port, lines
from tests.training.tiny_runs import Place, make_place
from training.swarm import checkpointer, run_file
from training.swarm.ledger import FILE as LEDGER_FILE
from training.swarm.metrics_store import FILE as METRICS_FILE
from training.swarm.revocation import Trust

pytestmark = pytest.mark.peers
STEPS = 18


def rows(path: Path, query: str) -> list[tuple[int, ...]]:
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        return database.execute(query).fetchall()


def test_a_killed_coordinator(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place: Place = make_place(tmp_path / "place")
    recipe = RECIPE.replace("steps = 24", f"steps = {STEPS}").replace("every = 4", "every = 2")
    (tmp_path / "recipe.toml").write_text(recipe)
    run = tmp_path / "run"
    begin = ["start", str(tmp_path / "recipe.toml"), "--data", place.manifest, "--tokenizer",
             place.tokenizer, "--output", str(run), "--json",
             "--set", f"coordinator.port={free_port()}",
             "--set", f"coordinator.page_port={free_port()}"]  # fmt: skip
    commands.start("run", *begin)
    commands.wait_for(lambda: "page: " in commands.said("run"), "run")
    url = commands.told("run", r"join: gristmill swarm join (\S+)")
    key = credential(run, "alice", capsys)
    for name in ("one", "two"):
        commands.start(name, "join", url, "--user", "alice", "--credential", str(key), "--data",
                       place.manifest, "--output", str(tmp_path / name), "--name", name, "--json",
                       "--set", "peer.host=127.0.0.1")  # fmt: skip
    commands.wait_for(lambda: "checkpoint of epoch" in commands.said("run"), "run")
    before = run_file.read(str(run))

    def epoch() -> int:
        """Epochs that the first peer has done."""
        return len(re.findall(r"epoch \d+ done", commands.said("one")))

    commands.kill("run")
    killed = epoch()
    told = len(commands.said("run"))
    commands.wait_for(lambda: epoch() >= killed + 2, "one")  # they go on meanwhile
    commands.start("run", *begin)
    commands.wait_for(lambda: "page: " in commands.said("run")[told:], "run")
    back = epoch()
    commands.wait_for(lambda: "checkpoint of epoch" in commands.said("run")[told:], "run")
    assert epoch() < STEPS, "the run was over before the coordinator was back"

    after = run_file.read(str(run))
    assert (after.authority, after.digest) == (before.authority, before.digest)
    assert after.addresses == before.addresses  # the same peer at the same port
    ends = {name: commands.end(name)[1] for name in ("one", "two", "run")}
    assert {end["status"] for end in ends.values()} == {"finished"}
    assert len({end["state_hash"] for end in ends.values()}) == 1
    own = lines(tmp_path / "one" / "metrics.jsonl")
    assert [line["epoch"] for line in own] == list(range(STEPS))
    assert all(line["peers"] == 2 and line["fraction"] == 1.0 for line in own)

    # The tokens of before are good under the authority of after.
    for name in ("one", "two"):
        trust = Trust(after.run, list(after.authority))
        token = (tmp_path / name / "token").read_text().strip()
        assert trust.check(token, ends[name]["peer"]).user == "alice"

    # The page and the ledger know every epoch but those of the absence.
    away = set(range(killed - 2, back + 2))
    seen = {row[0] for row in rows(run / METRICS_FILE, "SELECT epoch FROM epochs")}
    assert set(range(STEPS - 1)) - away <= seen
    counted = {row[0] for row in rows(run / LEDGER_FILE, "SELECT DISTINCT epoch FROM receipts")}
    assert set(range(STEPS - 1)) - away <= counted

    # Checkpoints of before and after, each with the weights that the peers had.
    hashes = {line["epoch"] + 1: line["state_hash"] for line in own}
    kept = sorted((run / "checkpoints").glob("step-*"))
    assert int(kept[-1].name[5:]) == STEPS
    for folder in kept:
        assert checkpointer.read(folder).state_hash == hashes[int(folder.name[5:])]
    written = rows(run / METRICS_FILE, "SELECT epoch FROM checkpoints ORDER BY epoch")
    assert written[0][0] <= killed < written[-1][0] == STEPS
    assert json.loads((run / "addresses.json").read_text())
