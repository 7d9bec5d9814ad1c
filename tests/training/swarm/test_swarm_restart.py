"""A DiLoCo swarm's checkpoint, which holds no inner moments: exported, and gone on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AlbertForPreTraining

from models.tokenizer import save_tokenizer, train_tokenizer
from scripts import cli
from tests.training.checkpointed import STATE
from tests.training.swarm.memory_swarm import World
from tests.training.swarm.toy_peers import Language, ToyPeer
from tests.training.swarm.watched_runs import announcement
from training.swarm.checkpointer import Checkpointer, Plan, read
from training.swarm.settings import Collaboration, DiLoCo
from training.swarm.state import state_hash
from training.swarm.types import State

SETTINGS = Collaboration(
    mode="diloco", diloco=DiLoCo(local_steps=2, local_batch=4, patience_s=5.0), min_peers=2,
    announce_s=0.5, look_s=0.3, round_timeout_s=8.0,
)  # fmt: skip
IDENTITY: dict[str, Any] = STATE["identity"] | {
    "recipe": STATE["identity"]["recipe"] | {"model": {"family": "albert", "size": "tiny"}}
}


def run(peers: list[ToyPeer], world: World) -> None:
    for peer in peers:
        world.start(peer.name, peer.run)
    world.run()


def test_a_diloco_checkpoint_is_exported_and_gone_on_from(tmp_path: Path) -> None:
    texts = ["grain wheat flour river stone mill", "wind and water turn the mill stones"] * 9
    save_tokenizer(train_tokenizer(texts, vocab_size=30), tmp_path / "tokenizer", {})
    world = World(5)
    peers = [ToyPeer(world, name, SETTINGS, steps=2, microbatch=4, learner=Language("albert"))
             for name in "ab"]  # fmt: skip
    run(peers, world)
    own = peers[0].collaborative
    names = {name.split(".")[0] for name in own.state().tensors}
    assert names == {"network", "outer"}
    assert peers[0].optimiser.state  # and yet it has moments
    writer = Checkpointer(
        Plan(tmp_path / "run", every=1), network=peers[0].learner.network,
        tokenizer=str(tmp_path / "tokenizer"), identity=IDENTITY,
    )  # fmt: skip
    writer.hold(own.state(), own.state_hash, counters={"examples": 32, "tokens": 512}, now=9.0)
    row = writer.look(
        [announcement(one, own.epoch, 1, time=10.0, state_hash=own.state_hash) for one in "ab"],
        10.0,
    )
    assert row is not None

    target = tmp_path / "model"
    assert cli.main(["export", str(tmp_path / "run"), "--output", str(target)]) == 0
    exported = dict(AlbertForPreTraining.from_pretrained(target).named_parameters())
    for name, tensor in peers[0].learner.network.named_parameters():
        assert exported[name].equal(tensor)

    kept = read(Path(row.path)).state
    assert state_hash(kept) == own.state_hash
    assert any(bool(kept.tensors[name].any()) for name in kept.tensors if name.startswith("outer."))
    world = World(6)
    again = [ToyPeer(world, name, SETTINGS, steps=4, microbatch=4, learner=Language("albert"))
             for name in "cde"]  # fmt: skip
    for peer in again:
        copies = {name: torch.clone(one) for name, one in kept.tensors.items()}
        peer.collaborative.load(State(kept.epoch, copies, kept.metadata))
        assert peer.collaborative.state_hash == own.state_hash
        assert not peer.optimiser.state
    run(again, world)
    assert again[0].applied[0].epoch == own.epoch + 1
    assert again[0].collaborative.epoch >= 4
    assert len({peer.state() for peer in again}) == 1
    samples = sum(one.samples for one in again[0].applied)
    assert again[0].collaborative.counters["samples"] == kept.metadata["samples"] + samples
    assert again[0].collaborative.counters["skipped"] == 0
