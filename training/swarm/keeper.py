"""How the coordinator comes by the weights that it keeps: those that most peers have, no others.

One peer's word decides nothing: weights are fetched when more than half of the active peers have
announced them for that epoch, and written by the same rule (`training.swarm.checkpointer`). A
download takes minutes on slow links, so it runs beside the looks, one at a time. Weights count as
kept when they are on disk; until then they are tried again, while peers still have them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from models.errors import Fault
from training.swarm.checkpointer import Checkpointer, Votes
from training.swarm.metrics_store import CheckpointRow
from training.swarm.state import NoState
from training.swarm.types import Announcement, State, Transport

_AGAIN_S = 5.0
"""Between a download or a write that failed and the next try."""


@dataclass(frozen=True)
class Kept:
    """Weights that are on disk."""

    state: State
    state_hash: str


@dataclass
class _Download:
    epoch: int
    state_hash: str
    thread: threading.Thread | None = None
    state: State | None = None
    failed: str = ""
    ended: threading.Event = field(default_factory=threading.Event)


class Keeper:
    """The newest weights of a run that are kept, and the next ones on their way.

    last: the run's last epoch, whose weights are always kept. length: positions of an example.
    `trouble` says why the last try gave nothing; None: no trouble.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        transport: Transport,
        *,
        last: int,
        length: int,
        active_s: float,
        timeout_s: float,
        kept: Kept | None = None,
    ) -> None:
        self.kept: Kept | None = kept
        self.trouble: str | None = None
        self._checkpointer, self._transport = checkpointer, transport
        self._last, self._length, self._timeout_s = last, length, timeout_s
        self._votes = Votes(active_s)
        self._download: _Download | None = None
        self._held: Kept | None = None
        self._not_before = -float("inf")
        if kept is not None:
            transport.share_state(kept.state)

    @property
    def epoch(self) -> int:
        """Of the kept weights; 0 without any."""
        return 0 if self.kept is None else self.kept.state.epoch

    @property
    def done(self) -> bool:
        """Whether the weights of the last epoch are on disk."""
        return self.kept is not None and self.epoch >= self._last

    @property
    def busy(self) -> bool:
        """Whether weights are on their way."""
        return self._download is not None or self._held is not None

    def look(self, said: Sequence[Announcement], now: float) -> CheckpointRow | None:
        """Take in what the peers say; the checkpoint, when one was written."""
        trainers = [one for one in said if one.peer.role != "auxiliary"]
        self._votes.observe(trainers, now)
        self._take(now)
        row = self._checkpointer.look(trainers, now)
        if row is not None and self._held is not None:
            self.kept, self._held, self.trouble = self._held, None, self._checkpointer.trouble
            self._transport.share_state(self.kept.state)
        elif self._held is not None and not self._checkpointer.holding:
            self.trouble, self._held = self._checkpointer.trouble, None
            self._not_before = now + _AGAIN_S
        if not self.busy and now >= self._not_before:
            self._begin(trainers)
        return row

    def _begin(self, trainers: Sequence[Announcement]) -> None:
        """Fetch the newest weights that are due and that most peers have."""
        wanted = sorted({(one.epoch, one.state_hash) for one in trainers if one.state_hash})
        for epoch, state_hash in reversed(wanted):
            if epoch <= self.epoch or not (self._checkpointer.due(epoch) or epoch >= self._last):
                continue
            vote = self._votes.on(epoch)
            if not vote.reached or vote.state_hash != state_hash:
                continue
            donors = [
                one.peer.peer_id
                for one in trainers
                if (one.epoch, one.state_hash) == (epoch, state_hash) and one.peer.role == "node"
            ]
            self._download = download = _Download(epoch, state_hash)
            download.thread = threading.Thread(
                target=self._fetch, args=(download, donors), name="download", daemon=True
            )
            download.thread.start()
            return

    def _fetch(self, download: _Download, donors: Sequence[str]) -> None:
        try:
            state = self._transport.download_state(
                expected_hash=download.state_hash, donors=donors, timeout_s=self._timeout_s
            )
            if state.epoch == download.epoch:
                download.state = state
            else:
                download.failed = f"it is of epoch {state.epoch}"
        except (NoState, Fault, OSError) as error:
            download.failed = str(error)
        finally:
            download.ended.set()

    def _take(self, now: float) -> None:
        """Hand a download that has ended to the checkpointer, which counts the votes once more."""
        download = self._download
        if download is None or not download.ended.is_set():
            return
        self._download = None
        state = download.state
        if state is None:
            self.trouble = f"No copy of epoch {download.epoch}: {download.failed or 'unknown'}"
            self._not_before = now + _AGAIN_S
            return
        said = state.metadata.get("samples")
        samples = said if isinstance(said, int) and said >= 0 else 0
        counters = {"examples": samples, "tokens": samples * self._length}
        self._checkpointer.hold(state, download.state_hash, counters=counters, now=now)
        self._held = Kept(state, download.state_hash)
