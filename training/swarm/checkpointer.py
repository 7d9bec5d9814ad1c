"""Checkpoints of a swarm, written by the coordinator once most peers agree on the weights.

A state is held, copied, at the start of an epoch, and written when more than half of the active
peers have announced its hash for that epoch. Until then it may be the coordinator that has gone
astray, and nothing is written. The folder is one of `training.checkpoint`:

    RUN/checkpoints/step-00000123/state.safetensors   weights, moments, outer momentum, metadata
                                  config.json, tokenizer.json, tokenizer_config.json
                                  state.json          sealed: epoch, hash, votes, counts, digests

so `gristmill export` opens it. `state.safetensors` is the file that peers send each other: its
hash is the one that they announced. A folder appears whole or not at all; the newest `keep` stay.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from models import files
from models.errors import DamagedInput, Fault, UserError
from pipelines.sealed import write_sealed
from training import checkpoint, checkpoint_tensors, folders, model_files
from training.export import export, max_tokens
from training.swarm.metrics_store import CheckpointRow
from training.swarm.state import NoState, read_state, state_hash, write_state
from training.swarm.types import Announcement, State

STATE_FILE = "state.safetensors"
_EPOCHS_OF_VOTES = 16
_WRITE_ERRORS = (
    OSError, ValueError, RuntimeError, SafetensorError, UserError, Fault, DamagedInput
)  # fmt: skip
"""A full disk comes as SafetensorError out of transformers, as RuntimeError out of torch."""


@dataclass(frozen=True)
class Plan:
    """When and where. every: epochs between checkpoints. patience_s: how long a state waits for
    the others' votes. export_to: folder of transformers' form, renewed with each checkpoint."""

    directory: Path
    every: int = 500
    keep: int = 2
    active_s: float = 30.0
    patience_s: float = 300.0
    export_to: Path | None = None


@dataclass(frozen=True)
class Resumed:
    """What a coordinator goes on from. counters: of the run until then (`examples`, `tokens`)."""

    state: State
    state_hash: str
    counters: Mapping[str, int]
    path: Path


@dataclass(frozen=True)
class Quorum:
    """What the active peers announced for one epoch: the hash of the most, and their number."""

    state_hash: str
    votes: int
    active: int

    @property
    def reached(self) -> bool:
        """Whether more than half of the active peers said this hash."""
        return self.votes * 2 > self.active


class Votes:
    """Which weights each peer announced for the last epochs. A peer has one vote an epoch."""

    def __init__(self, active_s: float) -> None:
        self._active_s = active_s
        self._said: dict[str, tuple[float, float]] = {}  # when by its clock, when by ours
        self._votes: dict[str, dict[int, str]] = {}

    def observe(self, announcements: Iterable[Announcement], now: float) -> None:
        """Take in the newest announcements; forget peers that said nothing new for too long."""
        for one in announcements:
            peer_id = one.peer.peer_id
            before = self._said.get(peer_id)
            if before is None or before[0] != one.time:
                self._said[peer_id] = (one.time, now)
            votes = self._votes.setdefault(peer_id, {})
            votes.pop(one.epoch, None)
            votes[one.epoch] = one.state_hash  # the last said stands last
            if len(votes) > _EPOCHS_OF_VOTES:
                del votes[next(iter(votes))]
        gone = [peer for peer, said in self._said.items() if now - said[1] > self._active_s]
        for peer in gone:
            del self._said[peer], self._votes[peer]

    def on(self, epoch: int) -> Quorum:
        """The vote on the weights at the start of `epoch`, by the peers that are active now.

        A peer that announces no hash has no weights (an auxiliary) and no vote.
        """
        counted = Counter(found for votes in self._votes.values() if (found := votes.get(epoch)))
        winner, count = max(counted.items(), key=lambda item: (item[1], item[0]), default=("", 0))
        active = sum(any(votes.values()) for votes in self._votes.values())
        return Quorum(winner, count, active)


@dataclass(frozen=True)
class _Held:
    state: State
    state_hash: str
    counters: Mapping[str, int]
    since: float


class Checkpointer:
    """Writes the checkpoints of one run. `trouble` says in a line why the last try failed."""

    def __init__(
        self, plan: Plan, *, network: torch.nn.Module, tokenizer: str, identity: Mapping[str, Any]
    ) -> None:
        """network: a plain transformers network, for its configuration. tokenizer: folder or
        tokenizer.json. identity: of the run (`training.identity`). Raises UserError for a URL."""
        self.trouble: str | None = None
        self._plan, self._network, self._tokenizer = plan, network, tokenizer
        self._identity = dict(identity)
        self._folder = folders.local(plan.directory) / checkpoint.FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        folders.sweep(self._folder)
        self._votes = Votes(plan.active_s)
        self._held: _Held | None = None
        self._written = -1

    def resume(self) -> Resumed | None:
        """The newest sound checkpoint; None when there is none. Raises UserError when there are
        checkpoints and none is sound, or when they are of another run."""
        found = checkpoint.latest(self._plan.directory)
        if found is None:
            return None
        saved = checkpoint.read_state(found)["state"]
        digest = saved["identity"].get("recipe_digest")
        if digest != self._identity.get("recipe_digest"):
            raise UserError(
                f"'{self._plan.directory}' holds another run: its recipe digest is '{digest}', not "
                f"'{self._identity.get('recipe_digest')}': give another output.directory"
            )
        resumed = read(found)
        self._written = resumed.state.epoch
        return resumed

    @property
    def holding(self) -> bool:
        """Whether a state waits for its votes."""
        return self._held is not None

    def due(self, epoch: int) -> bool:
        """Whether the state at the start of `epoch` is to be held."""
        later = epoch > self._written and (self._held is None or epoch > self._held.state.epoch)
        return later and epoch > 0 and epoch % self._plan.every == 0

    def hold(
        self,
        state: State,
        hash_of_it: str,
        *,
        counters: Mapping[str, int],
        now: float | None = None,
    ) -> None:
        """Copy a state and wait for the votes on it; one that still waited gives way.

        counters: `examples` and `tokens` of the run so far.
        """
        copies = {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in state.tensors.items()
        }
        held = State(state.epoch, copies, dict(state.metadata))
        if self._held is not None:
            self._give_up(f"epoch {state.epoch} came first")
        self._held = _Held(held, hash_of_it, dict(counters), time.time() if now is None else now)

    def look(
        self, announcements: Iterable[Announcement], now: float | None = None
    ) -> CheckpointRow | None:
        """Count the votes; write the held state when they suffice, and say what was written.

        Failures do not stop the run: see `trouble`.
        """
        now = time.time() if now is None else now
        self._votes.observe(announcements, now)
        held = self._held
        if held is None:
            return None
        vote = self._votes.on(held.state.epoch)
        if not vote.reached:
            if now - held.since > self._plan.patience_s:
                self._give_up(f"only {vote.votes} of {vote.active} active peers agreed on weights")
            return None
        if vote.state_hash != held.state_hash:
            self._give_up(f"{vote.votes} of {vote.active} peers have other weights than this one")
            return None
        self._held = None
        try:
            row = self._write(held, vote, now)
        except _WRITE_ERRORS as error:
            reason = _reason(error)
            self.trouble = f"No checkpoint of epoch {held.state.epoch}: {reason}"
            return None
        self.trouble = self._export(row)
        return row

    def _export(self, row: CheckpointRow) -> str | None:
        """Renew the model in transformers' form; why it failed, where it did: the checkpoint
        itself is written then all the same."""
        if self._plan.export_to is None:
            return None
        try:
            export_to(Path(row.path), self._plan.export_to)
        except _WRITE_ERRORS as error:
            return f"No model of epoch {row.epoch}, whose checkpoint is written: {_reason(error)}"
        return None

    def _give_up(self, reason: str) -> None:
        if self._held is not None:
            self.trouble = f"No checkpoint of epoch {self._held.state.epoch}: {reason}"
        self._held = None

    def _write(self, held: _Held, vote: Quorum, now: float) -> CheckpointRow:
        epoch = held.state.epoch
        for name, tensor in held.state.tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise Fault(f"'{name}' is not finite")
        target = self._folder / f"step-{epoch:08d}"
        with folders.atomic_folder(target) as folder:
            written = write_state(folder / STATE_FILE, held.state).hash
            if written != held.state_hash:
                raise Fault(f"the state has the hash '{written[:12]}…', not the announced one")
            model_files.write_config(self._network, folder)
            model_files.write_tokenizer(self._tokenizer, folder)
            listed = {
                path.name: {"bytes": path.stat().st_size, "xxh3": files.xxh3_file(path)}
                for path in sorted(folder.iterdir())
            }
            state = {
                "step": epoch,
                "counters": dict(held.counters),
                "identity": self._identity,
                "swarm": {
                    "state_hash": held.state_hash,
                    "votes": vote.votes,
                    "active": vote.active,
                    "time": now,
                },
            }
            sealed = {"format": checkpoint.FORMAT, "step": epoch, "state": state, "files": listed}
            write_sealed(folder / checkpoint.STATE_FILE, sealed)
        self._written = epoch
        self._point(target)
        size = sum(path.stat().st_size for path in target.iterdir())
        return CheckpointRow(
            epoch, held.state_hash, vote.votes, vote.active, size, now, str(target)
        )

    def _point(self, target: Path) -> None:
        """Let `latest` name `target`; then remove what is older than the newest `keep`."""
        files.write_atomic(self._folder / checkpoint.LATEST_FILE, f"{target.name}\n")
        folders.sync(self._folder)
        older = sorted(path for path in self._folder.glob("step-*") if path.name < target.name)
        for path in older[: max(0, len(older) - (self._plan.keep - 1))]:
            folders.remove(path)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror}: '{error.filename}'"
    return str(error)


def read(path: Path) -> Resumed:
    """The checkpoint `path`, whose files `training.checkpoint` found sound. Raises UserError."""
    try:
        saved = checkpoint.read_state(path)["state"]
        expected = saved["swarm"]["state_hash"]
        state = read_state(path / STATE_FILE)
    except (KeyError, OSError, DamagedInput, NoState) as error:
        raise UserError(f"'{path}' is no checkpoint of a swarm: {error}") from None
    if state_hash(state) != expected:
        raise UserError(f"'{path}' holds other weights than its hash says: take another checkpoint")
    return Resumed(state, expected, saved["counters"], path)


def export_to(path: Path, directory: Path) -> Path:
    """Write the checkpoint `path` in transformers' form to `directory`; an older one goes away."""
    network = model_files.network_of(path)
    checkpoint_tensors.read_network(str(path), network)
    state = checkpoint.read_state(path)["state"]
    length = int(state["identity"]["recipe"]["examples"]["sequence_length"])
    return export(
        network, str(path), directory, max_length=max_tokens(network.config, length), state=state
    )
