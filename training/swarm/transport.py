"""The real transport of a swarm: hivemind's DHT for announcements, RoundAverager for the rest.

Processes of one peer: the trainer (here), the DHT with the p2pd daemon below it, the averager.
All but the trainer end when it does, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hivemind.compression import CompressionInfo
from hivemind.dht import DHT
from hivemind.dht.validation import RecordValidatorBase
from hivemind.utils import get_dht_time

from models import files
from models.errors import Fault, UserError
from training.swarm import announcements, codec_check
from training.swarm.averager import AveragerSettings, RoundAverager, RoundReport
from training.swarm.codecs import Codec, codec, fault
from training.swarm.following import follow_parent
from training.swarm.process_memory import keep_shared
from training.swarm.rates import LinkRates, SeenRound
from training.swarm.state import NoState, read_state, write_state
from training.swarm.state_transfer import CorruptDonor, DonorFailed
from training.swarm.types import Announcement, Role, RoundResult, State

if TYPE_CHECKING:
    from training.swarm.guard import Guard

log = logging.getLogger(__name__)

_LEAVE_S = 1.5
"""Each of the four steps of leaving may take so long."""
_RETRY_S = 0.5
_FETCH_ENDS_S = 5.0
_TAKEN = "is already taken by another peer"  # as hivemind 1.1.12 has it
_LASTS_LONGER_S = 30.0
"""So much may clocks, and what is told at the end, add to how long an announcement lasts."""


@dataclass(frozen=True)
class TransportSettings:
    """How one peer of `run` averages; the same at every peer but for the last group."""

    run: str
    codec: str = "float16"
    matchmaking_s: float = 5.0
    """How long a group gathers: a round takes at least this."""
    sender_timeout_s: float = 10.0
    """A peer that sends nothing for so long in a round has failed it (a reducer: for twice)."""
    allreduce_timeout_s: float = 300.0
    exclusion_s: float = 30.0
    """A peer that failed a round joins no group with us for so long; 10 times that for a forger."""
    weight_cap: float = 1e6
    norm_cap: float | None = None
    """The largest Euclidean norm of one peer's tensors that reducers accept."""
    part_bytes: int = 1 << 19
    """The largest part of a round (`pacing.part_bytes`): on slow links they are smaller."""
    announcement_s: float = 60.0
    """An announcement is forgotten after so long."""

    folder: Path = Path("swarm-state")
    """Of this peer alone: the states it serves and downloads."""
    role: Role = "node"
    up_mbit: float | None = None
    down_mbit: float | None = None
    donors_at_once: int = 3
    upload_limit_mbit: float | None = None
    """Of each download of a state from this peer."""


class Gone(Fault):
    """The processes of this peer do not work any more; started anew, it goes on."""


class Taken(UserError):
    """Another process of the run has this peer's identity."""


class FollowingDHT(DHT):  # type: ignore[misc]
    """hivemind's DHT process, ended with its parent, its daemon too."""

    def run(self) -> None:
        """The body of the process."""
        follow_parent(self._parent_pid)
        super().run()


@contextlib.contextmanager
def _own_interrupt() -> Iterator[None]:
    """hivemind lets its caller ignore Ctrl+C, not only the child that it starts: put it back."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def start_dht(
    initial_peers: Sequence[str] = (),
    *,
    role: Role,
    host_addresses: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
    announce_addresses: Sequence[str] = (),
    identity_path: Path | None = None,
    validators: Iterable[RecordValidatorBase] = (),
    startup_s: float = 60.0,
    **options: Any,
) -> DHT:
    """A running DHT process of this peer. Raises UserError when it does not come up
    (Taken: the identity answers for another process already).

    `options` go to hivemind's DHTNode and P2P (authorizer, relays).
    """
    keep_shared()
    dht = FollowingDHT(
        list(initial_peers),
        start=False,
        record_validators=list(validators),
        client_mode=role == "client",
        host_maddrs=list(host_addresses),
        announce_maddrs=list(announce_addresses) or None,
        identity_path=None if identity_path is None else str(identity_path),
        startup_timeout=startup_s,
        **options,
    )
    try:
        with _own_interrupt():
            dht.run_in_background(await_ready=True, timeout=2 * startup_s)
    except Exception as error:
        with contextlib.suppress(Exception):
            dht.kill()
        if _TAKEN in str(error):
            raise Taken(
                f"a peer with the identity in '{identity_path}' is in the run already: end it, or "
                "give a folder of its own with --output (not a copy of another peer's)"
            ) from error
        peers = ", ".join(f"'{peer}'" for peer in initial_peers) or "none"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise UserError(
            f"the DHT did not start (first peers: {peers}): {reason}: check with "
            "`gristmill swarm doctor`"
        ) from error
    return dht


class SwarmTransport:
    """`training.swarm.types.Transport` over hivemind. Make it in the main thread.

    `tensors`: what `average` will be given is of these shapes and types. `guard`: None lets
    everybody in. Raises UserError for settings that cannot work.
    """

    def __init__(
        self,
        dht: DHT,
        settings: TransportSettings,
        tensors: Sequence[torch.Tensor],
        guard: Guard | None = None,
    ) -> None:
        if not settings.run or "." in settings.run:
            raise UserError(f"swarm.run = '{settings.run}' must be a name without a dot")
        self._codec: Codec = codec(settings.codec)
        codec_check.self_test(settings.codec)
        self._settings, self._dht, self._guard = settings, dht, guard
        self._peer_id: str = dht.peer_id.to_base58()
        shared = [torch.zeros(t.shape, dtype=t.dtype) for t in tensors]
        if any(t.numel() == 0 or t.dtype != torch.float32 for t in shared):
            raise ValueError("tensors to average must be float32 and not empty")
        self._vector_bytes = _encoded_bytes(self._codec, shared)
        self._rates = LinkRates(self._peer_id, settings.up_mbit, settings.down_mbit)
        self._lock = threading.Lock()  # of the averager's pipe
        self._last_store: Any = None
        self._heard: tuple[float, list[Announcement]] = (time.monotonic(), [])
        settings.folder.mkdir(parents=True, exist_ok=True)
        files.sweep(settings.folder)
        for old in settings.folder.glob("shared-*.safetensors"):
            old.unlink()
        self._averager = RoundAverager(
            shared,
            dht,
            AveragerSettings(
                prefix=f"{settings.run}_rounds",
                role=settings.role,
                codec=self._codec,
                matchmaking_s=settings.matchmaking_s,
                sender_timeout_s=settings.sender_timeout_s,
                allreduce_timeout_s=settings.allreduce_timeout_s,
                exclusion_s=settings.exclusion_s,
                weight_cap=settings.weight_cap,
                norm_cap=settings.norm_cap,
                part_bytes=settings.part_bytes,
                donors_at_once=settings.donors_at_once,
                upload_limit_mbit=settings.upload_limit_mbit,
            ),
            guard,
        )
        with _own_interrupt():
            self._averager.run_in_background(await_ready=True, timeout=60.0)

    @property
    def peer_id(self) -> str:
        """This peer's libp2p id in base58."""
        return self._peer_id

    # Announcements.

    def announce(self, announcement: Announcement) -> None:
        """Tell every peer, without waiting for it; a failure of the last time is logged.

        Raises Fault when the DHT's process is gone.
        """
        self._check_dht()
        if announcement.peer.peer_id != self._peer_id:
            raise ValueError(f"'{announcement.peer.peer_id}' is not this peer, '{self._peer_id}'")
        if self._last_store is not None and self._last_store.done():
            error = self._last_store.exception()
            if error is not None or not self._last_store.result():
                log.warning("an announcement was not stored: %r", error)
        self._last_store = self._store(announcements.to_value(announcement), 0.0)

    def _store(self, value: Any, extra_s: float) -> Any:
        return self._dht.store(
            announcements.dht_key(self._settings.run),
            subkey=self._peer_id,
            value=value,
            expiration_time=get_dht_time() + self._settings.announcement_s + extra_s,
            return_future=True,
        )

    def announcements(self) -> list[Announcement]:
        """The newest of every peer that takes part and has not left; by peer id.

        What is no announcement is left out, and what a peer said that the guard refuses: it is
        never believed, so it can move nobody. So is what would last for longer than announcements
        do. When the DHT is slow, what was heard last stands: silence would mean that this peer is
        alone. Raises Fault when the DHT is gone, or silent for as long as an announcement lasts.
        """
        self._check_dht()
        key = announcements.dht_key(self._settings.run)
        try:
            found = self._dht.get(key, latest=True, return_future=True).result(timeout=10.0)
        except FutureTimeout as error:
            at, heard = self._heard
            if time.monotonic() - at > self._settings.announcement_s:
                raise Gone("the DHT does not answer any more: start this peer again") from error
            log.warning("the DHT did not answer in 10 s")
            return heard
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        latest = get_dht_time() + self._settings.announcement_s + _LASTS_LONGER_S
        read = [
            announcements.from_value(peer, entry.value)
            for peer, entry in entries.items()
            if entry.expiration_time <= latest
        ]
        believed = [one for one in read if one is not None and self._believes(one.peer.peer_id)]
        heard = sorted(believed, key=lambda one: one.peer.peer_id)
        self._heard = (time.monotonic(), heard)
        return heard

    def _others(self) -> list[Announcement]:
        return [one for one in self.announcements() if one.peer.peer_id != self._peer_id]

    def _check_dht(self) -> None:
        if not self._dht.is_alive():
            raise Gone("the DHT's process has ended: start this peer again")

    def _believes(self, peer_id: str) -> bool:
        return self._guard is None or peer_id == self._peer_id or self._guard.allowed(peer_id)

    # Rounds.

    def average(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        weight: float,
        epoch: int,
        gathered: Mapping[str, Any],
        timeout_s: float,
    ) -> RoundResult | None:
        """Average `tensors` in place with peers of `epoch`; None: no group within `timeout_s`.

        Tensors change only in a complete round. The all-reduce itself may take
        `allreduce_timeout_s` more. Raises ValueError for tensors or a weight that no reducer
        would take, Fault when the averager's process is gone.
        """
        if not 0 <= weight <= self._settings.weight_cap:
            raise ValueError(
                f"the weight '{weight}' is not from 0 to {self._settings.weight_cap:g}"
            )
        if reason := fault(self._codec, tensors):
            raise ValueError(reason)
        is_auxiliary = self._settings.role == "auxiliary"
        told = {
            **gathered,
            **self._rates.gathered(time.monotonic()),
            "role": self._settings.role,
            "weight": 0.0 if is_auxiliary else float(weight),
            "epoch": epoch,
        }
        with self._averager.get_tensors() as shared:
            for mine, given in zip(shared, tensors, strict=True):
                mine.copy_(given.detach())
        future = self._ask("round", epoch=epoch, gathered=told, timeout_s=timeout_s)
        limit_s = timeout_s + self._settings.allreduce_timeout_s + 30.0
        report: RoundReport | None = self._wait(future, limit_s)
        if report is None:
            return None
        result = report.result
        if result.complete:
            self._learn(report)
            if not is_auxiliary:
                with self._averager.get_tensors() as shared, torch.no_grad():
                    for mine, given in zip(shared, tensors, strict=True):
                        given.copy_(mine)
        return result

    def _wait(self, future: Any, limit_s: float) -> Any:
        """The result of an order to the averager. Raises Fault when its process is gone."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return future.result(timeout=1.0)
            except FutureTimeout as error:
                if not self._averager.is_alive():
                    raise Gone("the averager's process has ended: start this peer again") from error
                if time.monotonic() > deadline:
                    raise Gone(f"the averager did not answer in {limit_s:g} s") from error

    def leave_out(self, peer_id: str) -> None:
        """Be in no group with another peer for `exclusion_s`. Raises Fault when the averager's
        process is gone."""
        self._wait(self._ask("leave_out", peer_id=peer_id), 30.0)

    def _learn(self, report: RoundReport) -> None:
        seen = SeenRound(
            report.links,
            report.shares,
            self._vector_bytes,
            report.result.seconds,
            report.waited_s,
            report.reducing_s,
        )
        self._rates.observe(seen, time.monotonic())

    def _ask(self, method: str, **arguments: Any) -> Any:
        with self._lock:
            return self._averager.ask(method, **arguments)

    # States.

    def share_state(self, state: State) -> str:
        """Serve `state` to joiners from now on (and the one before, for those midway); its hash.

        A client cannot be reached, so it only computes the hash.
        """
        # Written first under a name that is not its hash: that is known when it is written.
        temporary = self._settings.folder / "shared-new.safetensors"
        digests = write_state(temporary, state)
        if self._settings.role == "client":
            temporary.unlink()
            return digests.hash
        path = temporary.with_name(f"shared-{digests.hash}.safetensors")
        temporary.replace(path)
        offer = self._ask("offer_state", path=str(path), digests=digests.to_json())
        self._wait(offer, 30.0)
        return digests.hash

    def download_state(
        self, *, expected_hash: str | None, donors: Collection[str] = (), timeout_s: float
    ) -> State:
        """A state whose every chunk was checked against its hash (see the protocol).

        What came from donors that failed is kept: the next one sends the rest. Raises NoState: at
        once where the swarm has left the state `expected_hash` behind.
        """
        deadline = time.monotonic() + timeout_s
        tried: dict[str, str] = {}
        corrupt: set[tuple[str, str]] = set()
        while time.monotonic() < deadline:
            heard = self._others()
            wanted = expected_hash or agreed_hash(heard)
            if wanted is None:
                tried[""] = "no two peers announce the same state"
            else:
                tried.pop("", None)
                for donor in _donors(heard, wanted, donors):
                    if (donor, wanted) in corrupt:
                        continue
                    path = self._fetch(donor, wanted, deadline, tried, corrupt)
                    if path is not None:
                        try:
                            return read_state(path)
                        finally:
                            path.unlink(missing_ok=True)
                if expected_hash and _left_behind(self._others(), expected_hash):
                    tried[""] = "nobody announces it any more"
                    break
            time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
        reasons = "; ".join(f"{peer or 'swarm'}: {why}" for peer, why in tried.items())
        which = f" {expected_hash[:12]}" if expected_hash else ""
        raise NoState(f"no state{which}: {reasons or 'nobody announces one'}")

    def _fetch(
        self,
        donor: str,
        wanted: str,
        deadline: float,
        tried: dict[str, str],
        corrupt: set[tuple[str, str]],
    ) -> Path | None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return None
        future = self._ask(
            "fetch_state",
            donor=donor,
            wanted=wanted,
            folder=str(self._settings.folder),
            chunk_timeout_s=min(self._settings.sender_timeout_s, left_s),
            timeout_s=left_s,
        )
        try:
            return Path(self._wait(future, left_s + _FETCH_ENDS_S))
        except DonorFailed as error:
            tried[donor] = str(error)
            if isinstance(error, CorruptDonor):
                corrupt.add((donor, wanted))
            log.warning("donor %s: %s", donor, error)
        return None

    # The end.

    def leave(self) -> None:
        """Tell the others, let the last round end, stop all processes: within 8 seconds."""
        with contextlib.suppress(Exception):
            self._store(announcements.LEFT, 1.0).result(timeout=_LEAVE_S)
        with contextlib.suppress(Exception):
            self._ask("drain", timeout_s=_LEAVE_S).result(timeout=_LEAVE_S + 0.5)
        self._averager.stop(_LEAVE_S)
        self._dht.shutdown_timeout = _LEAVE_S
        with contextlib.suppress(Exception):
            self._dht.shutdown()
        self._dht.join(0.5)
        if self._dht.is_alive():
            self._dht.kill()


def agreed_hash(heard: Sequence[Announcement]) -> str | None:
    """The state of the newest epoch that two peers announce alike; of the only peer there is."""
    told = [one for one in heard if one.state_hash]
    if len(told) == 1:
        return told[0].state_hash
    counts = Counter((one.epoch, one.state_hash) for one in told)
    agreed = [(epoch, n, digest) for (epoch, digest), n in counts.items() if n >= 2]
    return max(agreed)[2] if agreed else None


def _left_behind(heard: Sequence[Announcement], wanted: str) -> bool:
    """Whether others are heard, and none of them has the state `wanted` any more."""
    told = {one.state_hash for one in heard if one.state_hash}
    return bool(told) and wanted not in told


def _donors(heard: Sequence[Announcement], wanted: str, asked: Collection[str]) -> list[str]:
    """Who can give the state `wanted`: those asked for first, then the others, in random order."""
    able = [
        one.peer.peer_id
        for one in heard
        if one.peer.role != "client" and one.state_hash == wanted and one.peer.peer_id not in asked
    ]
    first = list(asked)
    random.shuffle(first)  # many joiners must not all choose the same donor
    random.shuffle(able)
    return first + able


def _encoded_bytes(codec: Codec, tensors: Sequence[torch.Tensor]) -> float:
    ratio = codec.compression.estimate_compression_ratio
    return sum(
        t.numel() * t.element_size() * float(ratio(CompressionInfo.from_tensor(t))) for t in tensors
    )
