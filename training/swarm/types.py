"""What the parts of a swarm tell each other: plain frozen data and the protocol of the transport.

Words: a run is one collaborative training; an epoch is one global optimiser step; a round is one
all-reduce of one group of peers. Nothing here needs hivemind, so that the optimiser is tested
with a transport in memory and the coordinator with records that a test wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["node", "client", "auxiliary"]
"""node: listens, sends and reduces. client: behind a firewall: sends and receives, never reduces.
auxiliary: reduces for the others and has no gradients of its own."""

ROLES: tuple[Role, ...] = ("node", "client", "auxiliary")


@dataclass(frozen=True)
class PeerInfo:
    """Who a peer is. `peer_id` is the libp2p id in base58, which the connection itself proves."""

    peer_id: str
    name: str
    role: Role
    device: str


@dataclass(frozen=True)
class Member:
    """One peer of a round: the weight of its tensors and what it told the group about itself.

    `gathered` holds at least epoch, samples, state_hash, role, up_mbit and down_mbit. It is the
    peer's own word: the same at every member of the round, and checked by nobody before.
    """

    peer_id: str
    weight: float
    gathered: Mapping[str, Any]


@dataclass(frozen=True)
class RoundResult:
    """How a round went, as this peer saw it.

    `fraction` is the part of this peer's numbers that now hold the average over all members, by
    every reducer; 1.0 is a whole round. `complete` is fraction 1.0 and every sender of the group
    heard in full by every reducer: only then do all members hold the same numbers.
    `rates`: bytes/s measured from and to each other member in this round.
    """

    epoch: int
    group_id: str
    members: tuple[Member, ...]
    fraction: float
    seconds: float
    sent_bytes: int
    rates: Mapping[str, float]
    complete: bool


@dataclass(frozen=True)
class Announcement:
    """What a peer tells everybody about itself, again and again.

    `samples`: gradients it has gathered in this epoch; `rate`: samples/s; `time`: seconds since
    1970 by its own clock; `state_hash`: of weights and optimiser moments at the start of `epoch`.
    """

    peer: PeerInfo
    epoch: int
    samples: int
    rate: float
    state_hash: str
    time: float
    loss: float | None
    rss_bytes: int


@dataclass(frozen=True)
class State:
    """Weights and optimiser moments at the start of `epoch`, by name, and small JSON values.

    `metadata` holds what is not a tensor (scheduler, steps, data position); it is part of the
    hash (`training.swarm.state.state_hash`), so it must be the same at every peer of the epoch.
    """

    epoch: int
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Transport(Protocol):
    """How a peer reaches the others. `training.swarm.transport` is the real one."""

    @property
    def peer_id(self) -> str: ...

    def announce(self, announcement: Announcement) -> None:
        """Tell every peer; an older announcement of this peer is replaced."""
        ...

    def announcements(self) -> list[Announcement]:
        """The newest of every peer that announced itself lately, this one included."""
        ...

    def average(
        self,
        tensors: Sequence[Tensor],
        *,
        weight: float,
        epoch: int,
        gathered: Mapping[str, Any],
        timeout_s: float,
    ) -> RoundResult | None:
        """Average `tensors` in place with peers of the same epoch; None: no group was found.

        `timeout_s` is for the search; a round that has begun has a limit of its own. After a
        round that is not complete the tensors are as they were before the call.
        """
        ...

    def leave_out(self, peer_id: str) -> None:
        """Have no round with another peer for a while: by what it says of itself, nobody could
        take a round with it."""
        ...

    def share_state(self, state: State) -> str:
        """Let other peers download `state`, in place of an older one; its hash."""
        ...

    def download_state(
        self, *, expected_hash: str | None, donors: Collection[str] = (), timeout_s: float
    ) -> State:
        """A state that was checked against `expected_hash`.

        Without one, against a hash that at least two peers announce (one, where only one peer
        is there). `donors`: whom to ask first; all that announced the hash when empty. Raises
        `training.swarm.state.NoState` when nobody gave a good one in time.
        """
        ...

    def leave(self) -> None:
        """Tell the others and stop every process of the transport."""
        ...
