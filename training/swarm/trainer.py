"""A node or a client of a swarm: it learns from its data (`data`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from training import microbatches
from training.identity import identity as inputs_of
from training.networks import checkpoint_blocks
from training.objectives import Losses
from training.prepare import Prepared, prepare
from training.swarm import run_file
from training.swarm.data import PeerData
from training.swarm.membership import Say
from training.swarm.optimiser import Applied
from training.swarm.peer import Lost, Peer, Start, take_part
from training.swarm.recipe import SwarmRecipe
from training.swarm.run_file import RunFile
from training.swarm.state import NoState
from training.swarm.token_client import Account

_HEAR_S = 20.0
"""A joiner waits so long to hear the coordinator, which may have newer weights than all."""


def run_peer(
    recipe: SwarmRecipe, run: RunFile, account: Account | None, *, say: Say = lambda _: None
) -> dict[str, Any]:
    """Learn in `run` until its last epoch or a signal: as `training.swarm.peer.take_part`."""

    def peer(start: Start) -> Peer:
        prepared = prepare(recipe)
        run_file.check_inputs(run, inputs_of(recipe, prepared.corpus, list(prepared.weights)))
        return _Trainer(start, prepared)

    return take_part(recipe, run, account, peer, say)


class _Trainer(Peer):
    """A node or a client: it learns from its data."""

    def __init__(self, start: Start, prepared: Prepared) -> None:
        self._prepared = prepared
        super().__init__(start, prepared.vocab_size)

    def _open(self, stack: contextlib.ExitStack) -> None:
        recipe = self.recipe
        if recipe.run.activation_checkpointing:
            checkpoint_blocks(self.network)
        forward = torch.compile(self.objective) if recipe.run.compile else self.objective
        self._forward: Callable[..., Losses] = forward
        self.data = stack.enter_context(
            PeerData(
                self._prepared, recipe.data, self.folder, peer_id=self.peer_id,
                data_seed=self.member.identity.data_seed,
            )
        )  # fmt: skip

    def _begin(self) -> None:
        self._take_over()
        super()._begin()

    def _take_over(self) -> None:
        """Begin with what the coordinator has kept, where no peer is there with newer weights.

        Raises Lost when they do not come: a start from nothing beside them would be a second run.
        """
        until_s = time.monotonic() + _HEAR_S
        while True:
            others = self._others()
            found = [one for one in others if one.peer.peer_id == self.coordinator]
            trained = any(one.epoch and one.peer.role != "auxiliary" for one in others)
            if found or trained or not self.coordinator or time.monotonic() > until_s:
                break
            time.sleep(self.recipe.collaboration.look_s)
        if not found or not found[0].state_hash or found[0].epoch <= self.optimiser.epoch:
            return
        kept = found[0]
        self.say(f"going on after epoch {kept.epoch:,}, which the coordinator has kept")
        try:
            state = self.transport.download_state(
                expected_hash=kept.state_hash, donors=[self.coordinator],
                timeout_s=self.recipe.collaboration.download_timeout_s,
            )  # fmt: skip
        except NoState as error:
            raise Lost(f"the weights that the coordinator keeps do not come: {error}") from error
        self.optimiser.load(state)

    def _turn(self) -> None:
        self._microbatch()
        applied = self.optimiser.step()
        if applied is not None:
            self._applied(applied)

    def _microbatch(self) -> None:
        """The gradients of one microbatch, if any are wanted."""
        recipe, optimiser = self.recipe, self.optimiser
        if not optimiser.wants_samples:
            return
        examples = self.data.take(recipe.batch.microbatch, epoch=optimiser.gathering)
        batch = microbatches.batch(
            examples, recipe.model.family, recipe.examples.sequence_length, self.place.device,
            one_shape=recipe.run.compile,
        )  # fmt: skip
        # Dropout's masks follow from the example, so that they need no state.
        own = self.member.identity.data_seed
        torch.manual_seed(microbatches.dropout_seed(recipe.run.seed, examples[0].index, own))
        with torch.autocast(
            self.place.device.type, torch.bfloat16, enabled=recipe.run.precision == "bf16"
        ):
            losses = self._forward(batch)
        optimiser.backward(losses)

    def _applied(self, applied: Applied) -> None:
        """Count an epoch, and let the others know how its round went."""
        done = applied.epoch - 1
        own = next(
            (round(one.weight) for one in applied.result.members if one.peer_id == self.peer_id), 0
        )
        self.data.commit(done)
        self.teller.tell(applied.result, time.time())
        self.progress.epochs += 1
        self.progress.samples += own
        line = {
            "kind": "epoch", "epoch": done, "taken": applied.taken, "samples": applied.samples,
            "own_samples": own, "peers": len(applied.result.members),
            "fraction": applied.result.fraction, "gradient_norm": float(f"{applied.norm:.6g}"),
            "state_hash": self.optimiser.state_hash, "dropped": self.optimiser.dropped,
            "times": {"time": round(time.time(), 3), "round_s": round(applied.result.seconds, 3)},
        }  # fmt: skip
        self._note(line)
        self.say(
            f"epoch {done:,} done: {applied.samples:,} samples of {len(applied.result.members)} "
            f"peers, {own:,} of them here"
        )

    def _end(self) -> None:
        """Serve the last weights until the coordinator has written them. No step is taken any
        more, whatever was gathered beside the last round."""
        until_s = time.monotonic() + self.recipe.collaboration.download_timeout_s
        while time.monotonic() < until_s and not self.stop.requested:
            said = [one for one in self._others() if one.peer.peer_id == self.coordinator]
            if not said or (said[0].epoch >= self.optimiser.epoch and said[0].state_hash):
                return
            self.optimiser.linger()
            time.sleep(self.recipe.collaboration.look_s)
