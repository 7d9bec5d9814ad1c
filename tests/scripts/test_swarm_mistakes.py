"""What a user may get wrong with `gristmill swarm` is one line and another exit code than 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.errors import Fault
from scripts import swarm_command
from scripts.cli import main
from training.swarm import run_file, supervisor, token_client
from training.swarm.authority import Authority
from training.swarm.recipe import load_recipe

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
INPUTS = {
    "tokenizer_sha256": "ab" * 32, "sources": [], "domains": {"bn": 1.0}, "init_sha256": None,
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with run files; nothing is started."""
    for name in ("sahajbert-small", "other"):
        authority = Authority.create(tmp_path / name / "authority", name)
        recipe = load_recipe("sahajbert-small", [f"name={name}"])
        made = run_file.make(authority, recipe, INPUTS, addresses=[ADDRESS],
                             service="http://127.0.0.1:1")  # fmt: skip
        made.write(tmp_path / name / "run.json")
    (tmp_path / "bad.json").write_text(json.dumps({"a": 1}))
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    (tmp_path / "joined").mkdir()
    (tmp_path / "joined" / "run.json").write_bytes(
        (tmp_path / "sahajbert-small" / "run.json").read_bytes()
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


MISTAKES = [
    ("start nosuch --output a", "no recipe 'nosuch'"),
    ("start sahajbert-small", "no output folder"),
    ("start sahajbert-small --output a", "no data"),
    ("join nosuch.json --output p", "'nosuch.json' cannot be read"),
    ("join bad.json --output p", "'bad.json' is no run file"),
    ("join binary.json --output p", "'binary.json' is no run file"),
    ("join sahajbert-small", "no folder for this peer's identity"),
    ("join sahajbert-small --output p", "no data"),
    ("join sahajbert-small --output sahajbert-small --data x", "is the folder of `swarm start`"),
    ("join other --output joined --data x", "is not the run file of an authority that you trust"),
    ("join http://example.org --output p", "is not https"),
    ("join ftp://example.org --output p", "cannot be read"),
    ("join sahajbert-small --output p --data x", "lets in allowed users only"),
    ("join sahajbert-small --output p --data x --user alice", "belong together"),
    ("join sahajbert-small --output p --data x --token none", "holds no token"),
    ("join sahajbert-small --output p --data x --set batch.samples=7", "for all of its peers"),
    ("join sahajbert-small --output p --authority ed25519:x", "ed25519:x"),
    ("doctor bad.json", "'bad.json' is no run file"),
    ("status nowhere", "is not there"),
    ("status http://127.0.0.1:1", "does not answer"),
    ("allow list --run nowhere", "is no folder of a run"),
    ("allow add --run sahajbert-small", "needs a name"),
    ("allow list alice --run sahajbert-small", "takes no name"),
    ("allow remove bob --run sahajbert-small", "'bob'"),
    ("token bob QmX --run sahajbert-small --output t", "'"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake(words: str, said: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", *words.split()]) == 2
    told = [line for line in capfd.readouterr().err.splitlines() if "compare that" not in line]
    assert len(told) == 1 and said in told[0], told


def test_a_service_that_does_not_answer(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new peer is told so; one that has joined before goes on by what it knows."""

    def away(*_: object) -> bytes:
        raise Fault("could not download it: refused")

    started: list[list[str]] = []

    def supervise(command: list[str], **_: object) -> int:
        started.append(command)
        return 0

    monkeypatch.setattr(token_client, "fetch_run", away)
    monkeypatch.setattr(supervisor, "supervise", supervise)
    monkeypatch.setattr(swarm_command, "_fetch_tokenizer", lambda *_: None)
    words = ["swarm", "join", "http://127.0.0.1:1", "--data", "x", "--output"]
    assert main([*words, "new"]) == 1
    assert "'http://127.0.0.1:1' does not answer: check the address" in capsys.readouterr().err
    (place / "joined" / "token").write_text("a token of before")
    assert main([*words, "joined"]) == 0
    assert "joining by the run file and the addresses of the last time" in capsys.readouterr().err
    assert len(started) == 1
    assert main([*words, "joined", "--authority", "ed25519:" + "A" * 43]) == 2
    assert "is not the run file of an authority that you trust" in capsys.readouterr().err
    assert len(started) == 1
