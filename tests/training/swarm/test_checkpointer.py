"""Checkpoints of a swarm: written when a majority agrees, whole or not at all, and opened again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from models.albert import build_albert
from models.errors import UserError
from models.tokenizer import save_tokenizer, train_tokenizer
from scripts import cli
from tests.training.checkpointed import STATE
from tests.training.swarm.watched_runs import announcement
from training import checkpoint
from training.checkpoint_tensors import plain_tensors
from training.swarm.checkpointer import STATE_FILE, Checkpointer, Plan, Votes, read
from training.swarm.state import state_hash
from training.swarm.types import State

IDENTITY: dict[str, Any] = STATE["identity"] | {
    "recipe": STATE["identity"]["recipe"] | {"model": {"family": "albert", "size": "tiny"}}
}
COUNTERS = {"examples": 4096, "tokens": 8192}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ["grain wheat flour river stone mill", "wind and water turn the mill stones"] * 9
    save_tokenizer(train_tokenizer(texts, vocab_size=30), folder, {})
    return str(folder)


@pytest.fixture(scope="module")
def network() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return build_albert("tiny", 30, max_length=12)


def state_of(network: Any, epoch: int) -> State:
    """Weights and moments with the names of `training.checkpoint_tensors`."""
    tensors = {
        f"network.{name}": tensor.detach() for name, tensor in plain_tensors(network).items()
    }
    name = next(name for name, _ in network.named_parameters())
    moment = torch.full_like(dict(network.named_parameters())[name], 1 / (epoch + 1))
    tensors |= {
        f"optimiser.{name}.exp_avg": moment.detach(),
        f"optimiser.{name}.step": torch.tensor(float(epoch)),
        f"outer.{name}": -moment.detach(),
    }
    return State(epoch, tensors, {"scheduler": {"last_epoch": epoch}})


class Writing:
    """A checkpointer, its peers' words and a clock."""

    def __init__(self, folder: Path, network: Any, tokenizer: str, **plan: Any) -> None:
        plan = {"every": 2, "keep": 2, "active_s": 30.0, "patience_s": 60.0} | plan
        self.network, self.now, self.folder = network, 1000.0, folder / "checkpoints"
        self.writer = Checkpointer(
            Plan(folder, **plan), network=network, tokenizer=tokenizer, identity=IDENTITY
        )

    def hold(self, epoch: int, **changes: Any) -> str:
        state = replace(state_of(self.network, epoch), **changes)
        found = state_hash(state)
        self.writer.hold(state, found, counters=COUNTERS, now=self.now)
        return found

    def say(self, epoch: int, hashes: dict[str, str]) -> Any:
        self.now += 1
        return self.writer.look(
            [announcement(peer, epoch, 1, time=self.now, state_hash=one)
             for peer, one in hashes.items()],
            self.now,
        )  # fmt: skip

    def agreed(self, epoch: int) -> Any:
        found = self.hold(epoch)
        return self.say(epoch, dict.fromkeys("abc", found))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def writing(tmp_path: Path, network: Any, tokenizer: str) -> Writing:
    return Writing(tmp_path, network, tokenizer)


def test_it_is_due_every_so_many_epochs_and_once(writing: Writing) -> None:
    assert [epoch for epoch in range(9) if writing.writer.due(epoch)] == [2, 4, 6, 8]
    writing.agreed(4)
    assert [epoch for epoch in range(9) if writing.writer.due(epoch)] == [6, 8]
    writing.hold(6)
    assert [epoch for epoch in range(9) if writing.writer.due(epoch)] == [8]


def test_a_majority_of_the_active_peers_is_waited_for(writing: Writing) -> None:
    found = writing.hold(2)
    assert writing.say(2, {"a": found, "b": "", "c": "other", "d": "other2"}) is None
    assert writing.names() == []
    # c comes round; d is still astray: 2 of 3 that have weights.
    row = writing.say(2, {"c": found, "d": "other2"})
    assert (row.epoch, row.state_hash, row.votes, row.active) == (2, found, 2, 3)
    assert writing.names() == ["latest", "step-00000002"]
    assert row.bytes == sum(path.stat().st_size for path in Path(row.path).iterdir())
    saved = checkpoint.read_state(row.path)
    assert saved["step"] == 2
    assert saved["state"]["swarm"] == {
        "state_hash": found, "votes": 2, "active": 3, "time": writing.now,
    }  # fmt: skip
    assert saved["state"]["counters"] == COUNTERS


def test_half_is_no_majority_and_who_is_gone_has_no_vote(writing: Writing) -> None:
    found = writing.hold(2)
    assert writing.say(2, {"a": found, "b": found, "c": "x", "d": "x"}) is None
    # c and d fall silent for longer than a peer may: a and b are all there are.
    writing.now += 31
    row = writing.say(2, {"a": found, "b": found})
    assert (row.votes, row.active) == (2, 2)


def test_peers_that_went_on_keep_their_vote(writing: Writing) -> None:
    found = writing.hold(2)
    assert writing.say(2, {"a": found}) is not None
    found = writing.hold(4)
    writing.say(3, dict.fromkeys("bc", "earlier"))
    assert writing.say(4, {"b": found}) is None
    row = writing.say(5, dict.fromkeys("ab", "later"))
    assert row is None
    assert writing.say(4, {"c": found}).votes == 2


def test_the_coordinators_own_weights_do_not_pass_for_the_swarms(writing: Writing) -> None:
    writing.hold(2)
    assert writing.say(2, dict.fromkeys("abc", "theirs")) is None
    assert writing.writer.trouble == (
        "No checkpoint of epoch 2: 3 of 3 peers have other weights than this one"
    )
    assert writing.names() == []
    assert writing.agreed(4) is not None
    assert writing.writer.trouble is None


def test_it_does_not_wait_for_ever(writing: Writing) -> None:
    found = writing.hold(2)
    writing.say(2, {"a": found, "b": "x"})
    writing.now += 60
    writing.say(2, {"a": found, "b": "x"})
    assert writing.writer.trouble == (
        "No checkpoint of epoch 2: only 1 of 2 active peers agreed on weights"
    )
    writing.hold(4)
    writing.hold(6)
    assert writing.writer.trouble == "No checkpoint of epoch 4: epoch 6 came first"


def test_what_is_held_is_a_copy(tmp_path: Path, tokenizer: str) -> None:
    network = build_albert("tiny", 30, max_length=12)
    writing = Writing(tmp_path, network, tokenizer)
    found = writing.hold(2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
    row = writing.say(2, {"a": found})
    assert read(Path(row.path)).state_hash == found


def test_weights_that_are_no_numbers_are_never_written(writing: Writing) -> None:
    tensors = dict(state_of(writing.network, 2).tensors)
    name = min(tensors)
    tensors[name] = tensors[name].clone().fill_(float("nan"))
    found = writing.hold(2, tensors=tensors)
    assert writing.say(2, {"a": found}) is None
    assert writing.writer.trouble == f"No checkpoint of epoch 2: '{name}' is not finite"
    assert writing.names() == []


def test_a_hash_that_is_not_the_states_is_noticed(writing: Writing) -> None:
    state = state_of(writing.network, 2)
    writing.writer.hold(state, "f" * 64, counters=COUNTERS, now=writing.now)
    assert writing.say(2, {"a": "f" * 64}) is None
    assert "not the announced one" in str(writing.writer.trouble)
    assert writing.names() == []


def test_a_full_disk_is_told_and_leaves_nothing(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "state.safetensors")

    monkeypatch.setattr("training.swarm.checkpointer.model_files.write_tokenizer", full)
    assert writing.agreed(2) is None
    assert writing.writer.trouble == (
        "No checkpoint of epoch 2: No space left on device: 'state.safetensors'"
    )
    assert writing.names() == []
    monkeypatch.undo()
    assert writing.agreed(4) is not None


def test_an_export_that_fails_ends_nothing_and_does_not_deny_the_checkpoint(
    tmp_path: Path, network: Any, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk comes out of transformers as SafetensorError, which is no OSError."""

    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    writing = Writing(tmp_path / "run", network, tokenizer, export_to=tmp_path / "model")
    monkeypatch.setattr("training.swarm.checkpointer.export_to", full)
    row = writing.agreed(2)
    assert row is not None and row.epoch == 2
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
    assert str(writing.writer.trouble).startswith("No model of epoch 2, whose checkpoint is writ")
    monkeypatch.undo()
    assert writing.agreed(4) is not None
    assert writing.writer.trouble is None


def test_the_newest_stay_and_a_restart_goes_on(
    writing: Writing, tmp_path: Path, network: Any, tokenizer: str
) -> None:
    for epoch in (2, 4, 6):
        writing.agreed(epoch)
    assert writing.names() == ["latest", "step-00000004", "step-00000006"]
    (writing.folder / ".step-00000008.gristmill-partial").mkdir()
    again = Writing(tmp_path, network, tokenizer)
    assert again.names() == ["latest", "step-00000004", "step-00000006"]
    resumed = again.writer.resume()
    expected = state_of(network, 6)
    assert resumed is not None
    assert resumed.state_hash == state_hash(expected) == state_hash(resumed.state)
    assert (resumed.state.epoch, resumed.counters) == (6, COUNTERS)
    assert resumed.state.metadata == {"scheduler": {"last_epoch": 6}}
    assert set(resumed.state.tensors) == set(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert torch.equal(resumed.state.tensors[name], tensor)
    assert not again.writer.due(6)
    assert again.writer.due(8)


def test_a_damaged_one_is_passed_over_for_the_last_good(
    writing: Writing, capsys: pytest.CaptureFixture[str]
) -> None:
    for epoch in (2, 4):
        writing.agreed(epoch)
    newest = writing.folder / "step-00000004" / STATE_FILE
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    resumed = writing.writer.resume()
    assert resumed is not None
    assert resumed.state.epoch == 2
    assert "is passed over" in capsys.readouterr().err
    shutil.rmtree(writing.folder / "step-00000002")
    with pytest.raises(UserError, match="can be used"):
        writing.writer.resume()


def test_another_runs_folder_is_refused(
    writing: Writing, tmp_path: Path, network: Any, tokenizer: str
) -> None:
    assert writing.writer.resume() is None
    writing.agreed(2)
    other = Checkpointer(
        Plan(tmp_path), network=network, tokenizer=tokenizer,
        identity=IDENTITY | {"recipe_digest": "o" * 32},
    )  # fmt: skip
    with pytest.raises(UserError, match="holds another run: its recipe digest is 'rrr"):
        other.resume()


def test_it_is_exported_to_transformers_form(
    tmp_path: Path, network: Any, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    target = tmp_path / "model"
    writing = Writing(tmp_path / "run", network, tokenizer, export_to=target)
    for epoch in (2, 4):
        assert writing.agreed(epoch) is not None
    # By `gristmill export` too, from the checkpoint alone.
    assert cli.main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "by-hand")]) == 0
    for folder in (target, tmp_path / "by-hand"):
        model = transformers.AutoModelForPreTraining.from_pretrained(folder)
        found = model.state_dict()
        for name, tensor in network.state_dict().items():
            assert torch.equal(found[name], tensor), name
        assert "| steps | 4 of 9 |" in (folder / "README.md").read_text()
        assert json.loads((folder / "config.json").read_text())["architectures"] == [
            "AlbertForPreTraining"
        ]
    capsys.readouterr()


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 2), st.sampled_from(["x", "y", ""])),
        max_size=40,
    )
)
def test_votes_are_counted_as_a_naive_count_does(words: list[tuple[str, int, str]]) -> None:
    votes = Votes(active_s=10.0)
    heard: dict[str, float] = {}
    cast: dict[str, dict[int, str]] = {}
    for number, (peer, epoch, one) in enumerate(words):
        now = float(number)
        votes.observe([announcement(peer, epoch, 1, time=now, state_hash=one)], now)
        heard[peer] = now
        cast.setdefault(peer, {})[epoch] = one
        for who in [who for who, at in heard.items() if now - at > 10]:
            del heard[who], cast[who]
        active = [who for who in heard if set(cast[who].values()) != {""}]
        for place in range(3):
            said = [cast[who].get(place, "") for who in active]
            found = votes.on(place)
            assert found.active == len(active)
            assert found.votes == max(said.count("x"), said.count("y"))
            winners = [one for one in "xy" if said.count(one) * 2 > len(active)]
            assert winners == ([found.state_hash] if found.reached else [])


def test_a_peer_that_votes_on_ever_new_epochs_costs_no_memory() -> None:
    votes = Votes(active_s=10.0)
    for epoch in range(1000):
        votes.observe([announcement("a", epoch, 1, time=float(epoch), state_hash="x")], 0.0)
    assert [votes.on(epoch).votes for epoch in (0, 983, 984, 999)] == [0, 0, 1, 1]
