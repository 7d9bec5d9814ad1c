"""An auxiliary peer: it lends its link to the rounds of the others, and learns nothing.

It reduces its share of every round's vector and sends the averages back. So it has no data, no
gradients, no weights and no vote; its network is made for the shapes of the tensors alone, on the
CPU, with weights that nobody reads. What it is good for: rounds among peers with slow links, or
that are all behind firewalls. Its folder is that of any peer, without what is read and learned.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from models.tokenizer import load_tokenizer, tokenizer_digest
from training.swarm import run_file
from training.swarm.leaving import Leave
from training.swarm.membership import Say
from training.swarm.peer import Peer, Start, take_part
from training.swarm.recipe import SwarmRecipe
from training.swarm.run_file import RunFile
from training.swarm.token_client import Account
from training.swarm.types import Announcement, RoundResult

_SILENT_S = 120.0
"""Who hears nobody for so long in the last epoch has missed the end."""


def run_auxiliary(
    recipe: SwarmRecipe, run: RunFile, account: Account | None, *, say: Say = lambda _: None
) -> dict[str, Any]:
    """Reduce in `run` until its last epoch or a signal: as `training.swarm.peer.take_part`."""

    def peer(start: Start) -> Peer:
        run_file.check_tokenizer(run, tokenizer_digest(recipe.model.tokenizer))
        return _Auxiliary(start, load_tokenizer(recipe.model.tokenizer).get_vocab_size())

    return take_part(_shapes_only(recipe), run, account, peer, say)


def _shapes_only(recipe: SwarmRecipe) -> SwarmRecipe:
    """The recipe without what only weights that are used would need."""
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"init": None}),
            "run": recipe.run.model_copy(update={"device": "cpu"}),
        }
    )


class _Auxiliary(Peer):
    def __init__(self, start: Start, vocabulary: int) -> None:
        self._last, self._sent_bytes, self._alone_since = -1, 0, time.monotonic()
        super().__init__(start, vocabulary)

    def _done(self) -> bool:
        """Whether the trainers are at the last epoch, or the coordinator keeps its weights."""
        steps = self.recipe.schedule.steps
        return super()._done() or is_kept(self._others(), self.coordinator, steps)

    def _turn(self) -> None:
        result = self.optimiser.assist()
        if result is not None:
            self._assisted(result)
        if self._others():
            self._alone_since = time.monotonic()
        silent_s = time.monotonic() - self._alone_since
        if has_missed_the_end(self.optimiser.epoch, self.recipe.schedule.steps, silent_s):
            self.say("nobody is heard any more, and the last epoch was under way")
            raise Leave

    def _assisted(self, result: RoundResult) -> None:
        """Count a round, and bear witness to it."""
        if not result.complete:
            return
        self.teller.tell(result, time.time())
        self.progress.epochs += result.epoch != self._last
        self._last = result.epoch
        self._sent_bytes += result.sent_bytes
        self._note({
            "kind": "round", "epoch": result.epoch, "peers": len(result.members),
            "samples": round(sum(one.weight for one in result.members)),
            "fraction": result.fraction, "sent_bytes": result.sent_bytes,
            "times": {"time": round(time.time(), 3), "round_s": round(result.seconds, 3)},
        })  # fmt: skip
        self.say(
            f"epoch {result.epoch:,}: reduced with {len(result.members)} peers, "
            f"{result.sent_bytes:,} bytes sent"
        )

    def _summary(self, status: str) -> dict[str, Any]:
        steps = self.recipe.schedule.steps
        return super()._summary(status) | {
            "epoch": steps if status == "finished" else self.optimiser.epoch,
            "sent_bytes": self._sent_bytes,
        }


def is_kept(others: Iterable[Announcement], coordinator: str, epoch: int) -> bool:
    """Whether the coordinator has the weights of `epoch` on disk, or newer ones."""
    return any(
        one.peer.peer_id == coordinator and one.epoch >= epoch and bool(one.state_hash)
        for one in others
    )


def has_missed_the_end(epoch: int, steps: int, silent_s: float) -> bool:
    """Whether a run of `steps` epochs, at `epoch` when it was last heard, has ended meanwhile: all
    leave within seconds then, and a search for a group may take longer."""
    return epoch >= steps - 1 and silent_s > _SILENT_S
