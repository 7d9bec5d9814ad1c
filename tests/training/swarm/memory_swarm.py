"""A swarm in one process, with time of its own: for a seed, the same run each time.

Every peer is a thread, but only one runs at a time: it gives up its turn where it waits (for
messages, a group, a download, time), and the world picks who goes on. Time jumps to the next
moment at which somebody waits no more, so that hours pass in milliseconds. A peer is killed where
it stands: its announcements stay until they are stale, a round it was in breaks, and which of the
survivors have everything by then is drawn by lot.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from training.swarm.state import NoState, state_hash
from training.swarm.types import Announcement, Member, PeerInfo, RoundResult, State

LEFT_OUT_S = 60.0


class Killed(BaseException):
    """Ends the thread of a killed peer, wherever it is."""


class Actor:
    """One thread of a peer."""

    def __init__(self, world: World, owner: str, work: Callable[[], Any]) -> None:
        self.owner = owner
        self.until = 0.0
        self.ready: Callable[[], bool] | None = None
        self.killed = self.finished = False
        self.error: BaseException | None = None
        self.value: Any = None
        self.turn = threading.Semaphore(0)
        self._world, self._work = world, work
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.turn.acquire()
        self._world.local.actor = self
        try:
            if not self.killed:
                self.value = self._work()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.finished = True
        self._world.back.release()

    # A job, as `training.swarm.optimiser` asks for.

    def done(self) -> bool:
        return self.finished

    def result(self) -> Any:
        self._world.wait(ready=self.done)
        return self.value


@dataclass
class Waiting:
    """A peer that looks for a group."""

    peer: PeerInfo
    tensors: Sequence[Tensor]
    weight: float
    gathered: Mapping[str, Any]
    group: Group | None = None


@dataclass
class Group:
    """A round on its way."""

    number: int
    epoch: int
    members: list[Waiting]
    averages: list[Tensor] = field(default_factory=list)
    broken_at: frozenset[str] = frozenset()
    """Peers that this round is not complete for, by a fault of the network."""


class World:
    """Time, and everything between the peers.

    window_s: how long a group waits for more. lag_s: age at which an announcement is seen.
    breaks: peers that a round is not complete for, from its number and its members. blamed: of
    those members, whom all leave out of groups for a while afterwards.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        window_s: float = 2.0,
        reduce_s: float = 0.5,
        download_s: float = 1.0,
        fresh_s: float = 20.0,
        lag_s: float = 0.1,
        half: bool = False,
        breaks: Callable[[int, Sequence[str]], Collection[str]] = lambda number, names: (),
        blamed: Collection[str] = (),
    ) -> None:
        self.random = random.Random(seed)
        self.window_s, self.reduce_s, self.download_s = window_s, reduce_s, download_s
        self.fresh_s, self.lag_s, self.half, self.breaks = fresh_s, lag_s, half, breaks
        self.blamed = frozenset(blamed)
        self.left_out: dict[str, float] = {}
        self.now = 0.0
        self.actors: list[Actor] = []
        self.local = threading.local()
        self.back = threading.Semaphore(0)
        self.board: dict[str, list[tuple[float, Announcement]]] = {}
        self.shared: dict[str, State] = {}
        self.queues: dict[int, list[Waiting]] = {}
        self.opened: dict[int, float] = {}
        self.groups: list[Group] = []
        self.dead: set[str] = set()
        self.corrupt: set[str] = set()
        self.downloads: list[tuple[str, str]] = []
        """Of (who, from whom), that went well."""

    # Time and turns

    def start(self, owner: str, work: Callable[[], Any], *, at: float | None = None) -> Actor:
        actor = Actor(self, owner, work)
        actor.until = self.now if at is None else at
        self.actors.append(actor)
        return actor

    def run(self, limit_s: float = 10_000.0) -> None:
        """Until every thread has ended; raises what one has raised."""
        try:
            while left := [one for one in self.actors if not one.finished]:
                able = [
                    one for one in left
                    if one.killed or one.until <= self.now or (one.ready and one.ready())
                ]  # fmt: skip
                if not able:
                    self.now = min(one.until for one in left)
                    assert self.now < limit_s, f"at {limit_s} s {[one.owner for one in left]} wait"
                    continue
                self._turn(self.random.choice(able))
        finally:
            for one in self.actors:
                one.killed = True
            while left := [one for one in self.actors if not one.finished]:
                self._turn(left[0], heed=False)

    def _turn(self, actor: Actor, *, heed: bool = True) -> None:
        actor.turn.release()
        self.back.acquire()
        if actor.error is not None and heed:
            raise actor.error

    def wait(self, until: float = float("inf"), ready: Callable[[], bool] | None = None) -> None:
        """Give up the turn of the calling thread until a moment or a condition."""
        actor: Actor = self.local.actor
        actor.until, actor.ready = until, ready
        self.back.release()
        actor.turn.acquire()
        actor.ready = None
        if actor.killed:
            raise Killed

    def pause(self, seconds: float) -> None:
        self.wait(self.now + seconds * self.random.uniform(0.5, 1.5))

    def kill(self, owner: str) -> None:
        """End a peer's threads; raises `Killed` in one of them."""
        self.dead.add(owner)
        for queue in self.queues.values():
            queue[:] = [one for one in queue if one.peer.peer_id != owner]
        for actor in self.actors:
            if actor.owner == owner:
                actor.killed = True
        if self.local.actor.owner == owner:
            raise Killed

    # The optimiser's clock

    def time(self) -> float:
        return 1.7e9 + self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.wait(self.now + seconds)

    # Rounds

    def close(self, epoch: int) -> None:
        """Make a group of those who wait for `epoch`, and whom no round has failed on lately."""
        members = [
            one for one in self.queues[epoch]
            if self.left_out.get(one.peer.peer_id, 0.0) <= self.now
        ]  # fmt: skip
        if all(one.peer.role == "auxiliary" for one in members):
            return
        if len(members) < 2:
            return
        self.queues[epoch] = [one for one in self.queues[epoch] if one not in members]
        self.opened[epoch] = self.now
        group = Group(len(self.groups), epoch, members)
        names = [one.peer.peer_id for one in members]
        group.broken_at = frozenset(self.breaks(group.number, names))
        if group.broken_at:
            self.left_out |= dict.fromkeys(self.blamed & set(names), self.now + LEFT_OUT_S)
        weight = sum(one.weight for one in members)
        if weight == 0:
            group.broken_at = frozenset(names)
        else:
            for parts in zip(*(one.tensors for one in members), strict=True):
                total = sum(
                    part.double() * one.weight for part, one in zip(parts, members, strict=True)
                )
                mean = (total / weight).float()  # type: ignore[operator]
                group.averages.append(mean.half().float() if self.half else mean)
        self.groups.append(group)
        for one in members:
            one.group = group


class MemoryTransport:
    """`training.swarm.types.Transport` in a `World`."""

    def __init__(self, world: World, peer: PeerInfo) -> None:
        self.world, self.peer = world, peer

    @property
    def peer_id(self) -> str:
        return self.peer.peer_id

    def announce(self, announcement: Announcement) -> None:
        self.world.board.setdefault(self.peer_id, []).append((self.world.now, announcement))
        self.world.pause(0.01)

    def announcements(self) -> list[Announcement]:
        self.world.pause(0.01)
        found = []
        for told in self.world.board.values():
            seen = [one for at, one in told if at <= self.world.now - self.world.lag_s]
            if seen and seen[-1].time > self.world.time() - self.world.fresh_s:
                found.append(seen[-1])
        return found

    def average(
        self,
        tensors: Sequence[Tensor],
        *,
        weight: float,
        epoch: int,
        gathered: Mapping[str, Any],
        timeout_s: float,
    ) -> RoundResult | None:
        world, begin = self.world, self.world.now
        if not all(bool(one.isfinite().all()) for one in tensors):
            raise ValueError("a tensor is not finite")
        queue = world.queues.setdefault(epoch, [])
        own = Waiting(self.peer, tensors, weight, dict(gathered))
        if not queue:
            world.opened[epoch] = world.now
        queue.append(own)
        while own.group is None:
            closing = world.opened[epoch] + world.window_s
            if world.now >= closing:
                world.close(epoch)
                if own.group is not None:  # `close` has put it there
                    break  # type: ignore[unreachable]
                closing = world.now + world.window_s
            if world.now >= begin + timeout_s:
                world.queues[epoch] = [one for one in world.queues[epoch] if one is not own]
                return None
            world.wait(min(closing, begin + timeout_s), ready=lambda: own.group is not None)
        return self._reduced(own.group, own, begin)

    def _reduced(self, group: Group, own: Waiting, begin: float) -> RoundResult:
        world = self.world
        world.pause(world.reduce_s)
        names = [one.peer.peer_id for one in group.members]
        lost = world.dead & set(names)
        complete = self.peer_id not in group.broken_at
        if lost and complete:
            complete = world.random.random() < 0.5
        if complete and self.peer.role != "auxiliary":  # it is given no average
            for tensor, average in zip(own.tensors, group.averages, strict=True):
                tensor.copy_(average)
        members = tuple(
            Member(one.peer.peer_id, one.weight, copy.deepcopy(dict(one.gathered)))
            for one in group.members
        )
        rates = {name: 1e6 for name in names if name != self.peer_id and name not in lost}
        return RoundResult(
            group.epoch, f"{group.number:08x}", members, 1.0 if complete else 0.5,
            world.now - begin, 100, rates, complete,
        )  # fmt: skip

    def leave_out(self, peer_id: str) -> None:
        self.world.left_out[peer_id] = self.world.now + LEFT_OUT_S

    def share_state(self, state: State) -> str:
        tensors = {name: one.detach().clone() for name, one in state.tensors.items()}
        shared = State(state.epoch, tensors, copy.deepcopy(dict(state.metadata)))
        self.world.shared[self.peer_id] = shared
        return state_hash(shared)

    def download_state(
        self, *, expected_hash: str | None, donors: Collection[str] = (), timeout_s: float
    ) -> State:
        world = self.world
        for name in donors:
            world.pause(world.download_s)
            state = world.shared.get(name)
            if state is None or name in world.dead:
                continue
            if name in world.corrupt:
                tensors = {key: one + 1 for key, one in state.tensors.items()}
                state = State(state.epoch, tensors, state.metadata)
            if state_hash(state) == expected_hash:
                world.downloads.append((self.peer_id, name))
                return state
        raise NoState(f"none of {len(donors)} peers gave the state '{expected_hash}'")

    def leave(self) -> None:
        self.world.board.pop(self.peer_id, None)


def bits(state: State) -> bytes:
    """All numbers of a state, to compare two of them."""
    return b"".join(
        torch.as_tensor(one).detach().contiguous().numpy().tobytes()
        for _, one in sorted(state.tensors.items())
    )
