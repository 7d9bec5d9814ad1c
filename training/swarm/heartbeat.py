"""A peer goes on being heard while its trainer waits in a round.

A search for a group and an all-reduce take minutes on slow links, and the trainer announces
nothing meanwhile. Others would take it for dead, and a joiner would begin without its weights. So
its last announcement is told again, with the time of now, until it is older than a round can be.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from training.swarm.types import Announcement, RoundResult, State, Transport

if TYPE_CHECKING:
    from torch import Tensor


class Heartbeat:
    """`transport` with a thread that announces again what was not renewed for `every_s`.

    longest_s: so long after the last announcement of the trainer itself nothing is told any more.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        every_s: float,
        longest_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner, self._every_s, self._longest_s = transport, every_s, longest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last: Announcement | None = None
        self._told = self._own = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin; after the processes of the transport were started."""
        self._thread.start()

    def beat(self) -> bool:
        """Announce again where it is due; whether it was."""
        with self._lock:
            now = self._clock()
            due = now - self._told >= self._every_s and now - self._own <= self._longest_s
            if self._last is None or not due or self._ended.is_set():
                return False
            self._inner.announce(replace(self._last, time=time.time()))
            self._told = now
            return True

    def _run(self) -> None:
        while not self._ended.wait(self._every_s / 4):
            # Where the transport is broken for good the trainer meets the fault itself.
            with contextlib.suppress(Exception):
                self.beat()

    @property
    def peer_id(self) -> str:
        """The transport's."""
        return self._inner.peer_id

    def announce(self, announcement: Announcement) -> None:
        """Tell it, and remember it."""
        with self._lock:
            self._last = announcement
            self._told = self._own = self._clock()
            self._inner.announce(announcement)

    def announcements(self) -> list[Announcement]:
        """The transport's."""
        return self._inner.announcements()

    def average(
        self,
        tensors: Sequence[Tensor],
        *,
        weight: float,
        epoch: int,
        gathered: Mapping[str, Any],
        timeout_s: float,
    ) -> RoundResult | None:
        """The transport's."""
        return self._inner.average(
            tensors, weight=weight, epoch=epoch, gathered=gathered, timeout_s=timeout_s
        )

    def leave_out(self, peer_id: str) -> None:
        """The transport's."""
        self._inner.leave_out(peer_id)

    def share_state(self, state: State) -> str:
        """The transport's."""
        return self._inner.share_state(state)

    def download_state(
        self, *, expected_hash: str | None, donors: Collection[str] = (), timeout_s: float
    ) -> State:
        """The transport's."""
        return self._inner.download_state(
            expected_hash=expected_hash, donors=donors, timeout_s=timeout_s
        )

    def leave(self) -> None:
        """Fall silent first: what is told after that the peer has left would bring it back."""
        self._ended.set()
        with self._lock:
            self._last = None
        self._inner.leave()
