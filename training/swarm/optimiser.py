"""The optimiser of a swarm: every peer runs one, and all take the same steps.

    optimiser.start()
    while optimiser.epoch < steps:
        if optimiser.wants_samples:
            optimiser.backward(objective(batch))
        applied = optimiser.step()

`step` looks after everything else: it reports, finds out whether the epoch has ended, averages
with the others, takes the step that follows, and downloads the others' weights where this peer has
fallen behind. The rules are in `training.swarm.epochs` and `training.swarm.whereabouts`, what is
averaged in `training.swarm.modes`.
An auxiliary peer runs the same loop, or calls `assist`, which gives it its rounds; it never wants
samples and takes no step, but its `epoch` goes with that of the others.

In delayed mode a round runs in a thread beside the next epoch's gradients, which are computed with
the weights of before it until it ends. Nothing else here has a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.errors import Fault, UserError
from training.objectives import Losses
from training.swarm import epochs, modes, portable, whereabouts
from training.swarm.epochs import Stage, Verdict
from training.swarm.gradients import Gathered
from training.swarm.modes import Batch
from training.swarm.rounds import Averaged, Clock, Job, in_a_thread, rss_bytes
from training.swarm.settings import Collaboration
from training.swarm.state import NoState, state_hash
from training.swarm.types import Announcement, Member, PeerInfo, RoundResult, State, Transport
from training.swarm.whereabouts import Elsewhere, View

_RATE_MEMORY = 0.9
"""What is left of a peer's older speed after each microbatch."""

Tell = Callable[[Stage, int, str], None]
"""Hears of each stage: its name, the epoch, and what there is to say."""


@dataclass(frozen=True)
class Applied:
    """A step that this peer took with the others, or with them did not take.

    `epoch`: steps done now. `result`: the round; its group has no name where the peer was alone.
    """

    epoch: int
    taken: bool
    norm: float
    samples: int
    result: RoundResult


@dataclass(frozen=True)
class _Pending:
    sealed: Gathered
    attempt: int
    job: Job


class CollaborativeOptimiser:
    """`optimiser`, stepped with the gradients of a swarm.

    network: plain, its parameters those of `optimiser` (AdamW or LAMB; under DiLoCo any).
    terms: of the network's loss (`Objective.terms`). rate: the learning rate of step 0, 1, ...
    max_gradient_norm: of the averaged gradient; None: no clipping. Raises UserError.
    """

    def __init__(
        self,
        network: nn.Module,
        optimiser: torch.optim.Optimizer,
        *,
        transport: Transport,
        peer: PeerInfo,
        settings: Collaboration,
        terms: int,
        rate: modes.Rate,
        max_gradient_norm: float | None = 1.0,
        clock: Clock = time,
        submit: Callable[[Callable[[], Averaged]], Job] = in_a_thread,
        tell: Tell = lambda stage, epoch, text: None,
    ) -> None:
        self.transport, self.peer, self.settings = transport, peer, settings
        self._mode = modes.build(
            network, optimiser, settings=settings, terms=terms, rate=rate,
            max_gradient_norm=max_gradient_norm,
        )  # fmt: skip
        self._delayed = self._mode if settings.mode == "delayed" else None
        self._clock, self._submit, self._tell = clock, submit, tell
        self.epoch = 0
        """Steps that the swarm has taken, as far as this peer knows."""
        self.dropped = 0
        """Microbatches of this peer that were not finite."""
        self._counters: dict[str, Any] = {
            "samples": 0, "skipped": 0, "skipped_in_a_row": 0, "norms": []
        }  # fmt: skip
        self._pending: _Pending | None = None
        self._assisted = (-1, 0.0)
        """The epoch of the last round that an auxiliary was in, and when that ended."""
        self._announced_at = self._looked_at = -float("inf")
        self._stranded_since: float | None = None
        self._refusals = 0
        self._announcements: list[Announcement] = []
        self._speed = (0.0, 0.0)
        self._busy_since = clock.monotonic()
        self._hash = state_hash(self.state())

    @property
    def state_hash(self) -> str:
        """Of the weights and moments that `epoch` began with; "" for an auxiliary, without any."""
        return "" if self.peer.role == "auxiliary" else self._hash

    @property
    def gathering(self) -> int:
        """The epoch that samples count for now: the next one while a round runs beside it."""
        return self.epoch + (self._pending is not None)

    @property
    def counters(self) -> Mapping[str, Any]:
        """Of the whole swarm, equal at every peer: samples counted, steps skipped, norms."""
        return self._counters

    @property
    def wants_samples(self) -> bool:
        """Whether `backward` is of use now."""
        return self.peer.role != "auxiliary" and not self._mode.full

    def state(self) -> State:
        """The live tensors of this epoch, and the swarm's counters."""
        return State(self.epoch, self._mode.tensors(), {**self._counters})

    def load(self, state: State) -> None:
        """Go on from `state`; gradients gathered so far are dropped. Raises Fault."""
        try:
            counters = {
                **{name: int(state.metadata[name])
                   for name in ("samples", "skipped", "skipped_in_a_row")},
                "norms": [float(norm) for norm in state.metadata["norms"]],
            }  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise Fault(
                f"the swarm's state says nothing of {error}: use the same version"
            ) from None
        self._mode.load(state)
        self._pending = None
        self._counters, self.epoch = counters, state.epoch
        self._hash = state_hash(self.state())

    # The life of a peer

    def start(self) -> None:
        """Wait until enough peers are there, with the weights that most have. Raises UserError."""
        if self.peer.role == "auxiliary":
            self.epoch = self._look(now=True).newest
            self._announce(now=True)
            return
        until = self._clock.monotonic() + self.settings.start_wait_s
        self._publish()
        while True:
            seen = self._look(now=True)
            there, behind = self._where(seen)
            if there is not None:
                self._catch_up(there)
            elif not behind and (self.epoch or seen.contributors >= self.settings.min_peers):
                return
            if self._clock.monotonic() >= until:
                raise UserError(
                    f"no good copy of the swarm's weights in {self.settings.start_wait_s:g} s: "
                    "see `gristmill swarm doctor`"
                    if behind
                    else f"min_peers = '{self.settings.min_peers}', but after "
                    f"{self.settings.start_wait_s:g} s {seen.contributors} are here: start more "
                    "peers, or set a lower number"
                )
            self._announce()
            if there is None:
                self._clock.sleep(self.settings.look_s)

    def linger(self) -> None:
        """A turn after the last step: still heard, still with the weights of the others, but in no
        round, whatever was gathered beside the last one."""
        self._announce()
        there, _ = self._where(self._look())
        if there is not None:
            self._catch_up(there)

    def leave(self) -> None:
        """Tell the others and stop the transport."""
        self.transport.leave()

    def backward(self, losses: Losses) -> bool:
        """Add one microbatch, as an `Objective` gives its losses; False where it is not finite."""
        if not self._mode.gathered.samples:
            self._enter(Stage.ACCUMULATE, f"{self._mode.needed:g} samples wanted")
        good = self._mode.add(losses, self.epoch)
        now = self._clock.monotonic()
        if good:
            samples, seconds = self._speed
            self._speed = (
                samples * _RATE_MEMORY + losses.sums.shape[1],
                seconds * _RATE_MEMORY + now - self._busy_since,
            )
        else:
            self.dropped += 1
            self._enter(Stage.ACCUMULATE, "a microbatch is not finite: dropped")
        self._busy_since = now
        return good

    def step(self) -> Applied | None:
        """Do what is due now; the step, if one was taken. Raises Fault after too many skipped.

        Without anything to do it returns at once; after `look_s` for a peer that wants no samples,
        or that the others have left behind.
        """
        try:
            return self._step()
        finally:
            self._busy_since = self._clock.monotonic()

    def _step(self) -> Applied | None:
        if self.peer.role == "auxiliary":
            self.assist()
            return None
        self._announce()
        seen = self._look()
        there, behind = self._where(seen)
        if self._pending is not None:
            if self._pending.job.done() or self._over(seen) or behind:
                return self._settle(self._pending)
        elif there is not None:
            self._catch_up(there)
            return None
        elif self._over(seen) and not behind:
            if self._delayed is None or self._stranded:
                return self._rounds()  # in delayed mode too: others see and fetch its weights
            self._begin()
        if behind or not self.wants_samples:
            self._clock.sleep(self.settings.look_s)
        return None

    def assist(self) -> RoundResult | None:
        """An auxiliary's turn: it reduces in the rounds of the others' epoch, and has no weights.

        Gives the round that it was in. It is given no average, so it takes no step, announces no
        hash, and does not know whether the others took theirs. After a round it leaves them the
        time to announce the next epoch.
        """
        self._announce()
        self.epoch = self._look().newest
        seen = whereabouts.view(self._own(), self._announcements)
        epoch, at = self._assisted
        waits_s = self.settings.announce_s + self.settings.look_s
        again = epoch != self.epoch or self._clock.monotonic() - at > waits_s
        result = None
        if len(seen.trainers) > 1 and self._over(seen) and again:
            averaged = self._prepared(Gathered(), 1)()
            result = averaged.result
            self._assisted = (self.epoch, self._clock.monotonic())
            if result is None:
                self._enter(Stage.CHECK, averaged.refused or "no group was found")
            else:
                self._tell_round(result)
        self._clock.sleep(self.settings.look_s)
        return result

    def _over(self, seen: View) -> bool:
        return self._mode.ready(seen, self._clock.monotonic())

    # Announce

    def _own(self) -> Announcement:
        gathered = self._mode.gathered
        samples, seconds = self._speed
        return Announcement(
            self.peer, self.gathering, gathered.samples,
            samples / seconds if seconds > 0 else 0.0,
            self.state_hash if self._pending is None else "", self._clock.time(), gathered.loss,
            rss_bytes(),
        )  # fmt: skip

    def _announce(self, *, now: bool = False) -> None:
        if now or self._clock.monotonic() - self._announced_at >= self.settings.announce_s:
            self.transport.announce(self._own())
            self._announced_at = self._clock.monotonic()

    def _look(self, *, now: bool = False) -> View:
        if now or self._clock.monotonic() - self._looked_at >= self.settings.look_s:
            self._announcements = self.transport.announcements()
            self._looked_at = self._clock.monotonic()
        seen = whereabouts.view(self._own(), self._announcements)
        if not seen.stranded:
            self._stranded_since = None
        elif self._stranded_since is None:
            self._stranded_since = self._clock.monotonic()
        return seen

    @property
    def _stranded(self) -> bool:
        """Whether nobody had this peer's weights for longer than a round takes."""
        since = self._stranded_since
        return since is not None and (
            self._clock.monotonic() - since >= self.settings.round_timeout_s
        )

    def _where(self, seen: View) -> tuple[Elsewhere | None, bool]:
        """The weights to download; whether others are ahead, so that no round of this epoch may
        be begun, be their weights known or not."""
        there = whereabouts.elsewhere(seen)
        if there is None and self._stranded:
            there = whereabouts.refuge(seen)
        behind = there is not None or seen.left_behind or (self._stranded and bool(seen.ahead))
        return there, behind

    # Match, reduce

    def _sound(self, gathered: Gathered) -> bool:
        """Whether these gradients may be sent; if not, they are dropped.

        A few samples make a longer gradient than a whole batch, by the root of their number.
        """
        if not gathered.samples:
            return True
        few = max(1.0, self._mode.needed / gathered.samples) ** 0.5
        norm = self._mode.own_norm(gathered)
        if not epochs.too_long(norm, self._counters["norms"], self.settings.norm_ratio * few):
            return True
        self._enter(Stage.CHECK, f"own gradient of norm {norm:.3g} is not sent: dropped")
        self._mode.clear()
        self._announce(now=True)
        return False

    def _rounds(self) -> Applied | None:
        """Rounds with the same gradients until one is taken or they are of no use."""
        if not self._sound(self._mode.gathered) and not self._over(self._look(now=True)):
            return None
        for attempt in range(1, self.settings.attempts + 1):
            self._enter(Stage.ANNOUNCE, f"{self._mode.gathered.samples} samples of this peer")
            self._announce(now=True)
            averaged = self._prepared(self._mode.gathered, attempt)()
            result, verdict = self._check(averaged)
            if result is not None and verdict.accepted:
                applied = self._apply(averaged.tensors, result)
                self._mode.clear()
                self._publish()
                return applied
            if verdict.useless:
                self._mode.clear()
                return None
            seen = self._look(now=True)
            there, behind = self._where(seen)
            if there is not None:
                self._catch_up(there)
            if behind or verdict.short or not self._over(seen):
                return None
        return None

    def _prepared(self, sealed: Gathered, attempt: int) -> Callable[[], Averaged]:
        """A round with the gradients `sealed`, which does not touch this object when it runs."""
        seen = self._look(now=True)
        gathered = {
            "epoch": self.epoch, "samples": sealed.samples, "state_hash": self.state_hash,
            "role": self.peer.role, "active": seen.contributors,
            "attempt": attempt, "labels": sealed.labels or [0.0] * self._mode.terms,
        }  # fmt: skip
        transport, epoch, timeout_s = self.transport, self.epoch, self.settings.round_timeout_s
        tensors = self._mode.outgoing(sealed)
        self._enter(Stage.MATCH, f"attempt {attempt} of {self.settings.attempts}")
        if seen.alone and self.peer.role != "auxiliary":  # nobody to wait for
            return lambda: Averaged(tensors, None, gathered)

        def run() -> Averaged:
            try:
                result = transport.average(
                    tensors, weight=float(sealed.samples), epoch=epoch, gathered=gathered,
                    timeout_s=timeout_s,
                )  # fmt: skip
            except ValueError as error:  # of these tensors or this weight
                return Averaged(tensors, None, gathered, str(error))
            return Averaged(tensors, result, gathered)

        return run

    def _begin(self) -> None:
        """Let a round run beside the next epoch (delayed mode)."""
        assert isinstance(self._delayed, Batch)
        if not self._sound(self._delayed.gathered) and not self._over(self._look(now=True)):
            return
        self._enter(Stage.ANNOUNCE, f"{self._mode.gathered.samples} samples of this peer")
        self._announce(now=True)
        sealed = self._delayed.take()
        self._pending = _Pending(sealed, 1, self._submit(self._prepared(sealed, 1)))
        self._announce(now=True)

    def _settle(self, pending: _Pending) -> Applied | None:
        """Take what the round gave, or try again, or count its gradients again."""
        assert isinstance(self._delayed, Batch)
        averaged = pending.job.result()
        self._pending = None
        result, verdict = self._check(averaged)
        if result is not None and verdict.accepted:
            applied = self._apply(averaged.tensors, result)
            self._publish()
            return applied
        seen = self._look(now=True)
        there, behind = self._where(seen)
        if verdict.useless or behind:
            self._mode.clear()
            if there is not None:
                self._catch_up(there)
        elif not (verdict.short or self._stranded) and pending.attempt < self.settings.attempts:
            attempt = pending.attempt + 1
            job = self._submit(self._prepared(pending.sealed, attempt))
            self._pending = _Pending(pending.sealed, attempt, job)
        else:
            self._delayed.give_back(pending.sealed)
        self._announce(now=True)
        return None

    # Check, apply, publish

    def _check(self, averaged: Averaged) -> tuple[RoundResult | None, Verdict]:
        """Whether the round is taken. A peer that is alone is a round of its own."""
        result = self._result(averaged)
        self._refusals = self._refusals + 1 if averaged.refused else 0
        if averaged.refused:
            if self._refusals >= self.settings.attempts:
                raise Fault(
                    f"this peer's gradients can not be sent, {self._refusals} times in a row: "
                    f"{averaged.refused}"
                )
            verdict = Verdict(False, averaged.refused, useless=True)
        elif result is None:
            verdict = Verdict(False, "no group was found")
        else:
            self._tell_round(result)
            verdict = epochs.judge(
                result, self.peer.peer_id, needed=self._mode.needed,
                attempts=self.settings.attempts, terms=self._mode.terms,
            )  # fmt: skip
            if verdict.culprit not in ("", self.peer.peer_id):
                self.transport.leave_out(verdict.culprit)
        self._enter(Stage.CHECK, ("" if verdict.accepted else "refused: ") + verdict.reason)
        return result, verdict

    def _tell_round(self, result: RoundResult) -> None:
        self._enter(
            Stage.REDUCE,
            f"{result.fraction:.1%} averaged with {len(result.members)} peers in "
            f"{result.seconds:.2f} s",
        )

    def _result(self, averaged: Averaged) -> RoundResult | None:
        """The round; where no group was found, one of this peer alone if it may go on so.

        It may when nobody else has gradients, and in the last attempt when others have its
        weights: then they hear, or follow. With weights that nobody else has it waits for them, or
        it would run away from peers that it cannot reach; but not for ever for peers that are
        behind and do not go together either.
        """
        if averaged.result is not None or averaged.refused:
            return averaged.result
        seen = self._look(now=True)
        last = averaged.gathered["attempt"] >= self.settings.attempts
        free = self._stranded and not seen.ahead and not seen.outnumbered
        if not seen.alone and not (last and (seen.shared or free)):
            return None
        own = Member(self.peer.peer_id, float(averaged.gathered["samples"]), averaged.gathered)
        return RoundResult(self.epoch, "", (own,), 1.0, 0.0, 0, {}, True)

    def _apply(self, means: list[Tensor], result: RoundResult) -> Applied:
        """The step that follows from what all members of the round have in common."""
        members = [one for one in map(epochs.brought, result.members) if one is not None]
        direction = self._mode.direction(means, members)
        norm = portable.norm(direction)
        counters = dict(self._counters)
        taken = not epochs.too_long(norm, counters["norms"], self.settings.norm_ratio)
        samples = int(sum(member.counted for member in members))
        counters["samples"] += samples
        if taken:
            self._enter(Stage.APPLY, f"{samples} samples, gradient norm {norm:.4g}")
            self._mode.move(direction, norm, self.epoch)
            counters["norms"] = [*counters["norms"], norm][-epochs.KEPT_NORMS :]
            counters["skipped_in_a_row"] = 0
        else:
            self._enter(Stage.APPLY, f"step not taken: gradient norm {norm:.4g}")
            counters["skipped"] += 1
            counters["skipped_in_a_row"] += 1
        self._counters = counters
        self.epoch += 1
        return Applied(self.epoch, taken, norm, samples, result)

    def _publish(self) -> None:
        """Let everybody know, and have, the weights of now. Raises Fault."""
        self._hash = self.transport.share_state(self.state())
        self._enter(Stage.PUBLISH, f"state {self._hash[:12]}")
        self._announce(now=True)
        if self._counters["skipped_in_a_row"] >= self.settings.max_skipped:
            raise Fault(
                f"{self._counters['skipped_in_a_row']} steps in a row were not taken, because "
                "their gradients were not finite or far too long: the weights are as before them; "
                "go on from the last checkpoint with a lower optimiser.learning_rate"
            )

    # Catch up

    def _catch_up(self, there: Elsewhere) -> None:
        """Download the weights `there`; without success the peer stays where it is."""
        self._enter(
            Stage.CATCH_UP,
            f"to epoch {there.epoch}, state {there.state_hash[:12]} of {len(there.donors)} peers",
        )
        try:
            state = self.transport.download_state(
                expected_hash=there.state_hash, donors=there.donors,
                timeout_s=self.settings.download_timeout_s,
            )  # fmt: skip
        except NoState as error:
            self._enter(Stage.CATCH_UP, f"failed: {error}")
            self._clock.sleep(self.settings.look_s)
            return
        self.load(state)
        if self._hash != there.state_hash:
            raise Fault(
                f"the state {there.state_hash[:12]} of the swarm became {self._hash[:12]} here: "
                "use the same version of Gristmill as the other peers"
            )
        self._publish()

    def _enter(self, stage: Stage, text: str) -> None:
        self._tell(stage, self.epoch, text)
