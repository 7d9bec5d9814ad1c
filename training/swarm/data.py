"""What one peer reads: its own shuffled stream of the run's crawls, resumed where it counted.

Every peer walks over all pages (`training.sampler`), each in an order of its own, whose seed
follows from the run's seed and the peer's id: so no peer asks another what to read, any number of
them come and go, and a peer that returns goes on where it was. Example i of a peer's stream is a
function of the run's inputs, the peer's id and i alone, so anybody with the crawls can compute
again what a peer says it has read (`examples.jsonl`: from which example to which, epoch by epoch).

What counts as read is what went into the weights: a position is saved when its epoch was applied,
and gradients that were lost are computed again after a restart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models import files
from models.errors import UserError
from training import json_lines
from training.examples import Example
from training.order import mix
from training.prepare import Prepared
from training.recipe import Data
from training.sampler import ExampleStream

POSITION_FILE = "position.json"
LOG_FILE = "examples.jsonl"
_VERSION = 1


def peer_seed(run_seed: int, data_seed: int) -> int:
    """Seed of a peer's order: 63 bits from the run's `data.seed` and the peer's own."""
    return mix(run_seed, data_seed) >> 1


class PeerData:
    """The examples of one peer, with its position in `folder`.

    peer_id, data_seed: of `training.swarm.identity`. Raises UserError when the saved position is
    of another peer or other data. Close it, or use it as a context.
    """

    def __init__(
        self, prepared: Prepared, data: Data, folder: Path, *, peer_id: str, data_seed: int
    ) -> None:
        self._folder, self._peer_id = folder, peer_id
        own = data.model_copy(update={"seed": peer_seed(data.seed, data_seed)})
        saved = self._saved()
        self._epoch: int | None = None
        self._first = self._committed = 0
        if saved is not None:
            self._committed = int(saved["stream"]["position"])
        self._stream = ExampleStream(
            prepared.corpus, prepared.weights, prepared.builder, data=own,
            state=None if saved is None else saved["stream"],
        )  # fmt: skip
        self._ends: dict[int, tuple[int, dict[str, Any]]] = {}
        # Without lines that a kill has cut, or whose position was not saved.
        json_lines.keep(folder / LOG_FILE, lambda line: line.get("until", 0) <= self._committed)

    def take(self, count: int, *, epoch: int) -> list[Example]:
        """The next `count` examples, whose gradients are for `epoch`."""
        if epoch != self._epoch:
            self._end()
            self._epoch, self._first = epoch, self._stream.position
        return self._stream.take(count)

    def commit(self, epoch: int) -> None:
        """The gradients of `epoch` went into the weights: go on after its examples from now on.

        An epoch of which this peer took no example changes nothing. Raises OSError.
        """
        if epoch == self._epoch:
            self._end()
            self._epoch = None
        if epoch not in self._ends:
            return
        first, stream = self._ends[epoch]
        self._ends = {number: end for number, end in self._ends.items() if number > epoch}
        line = {"epoch": epoch, "first": first, "until": stream["position"]}
        with (self._folder / LOG_FILE).open("ab") as log:
            log.write(json.dumps(line).encode() + b"\n")
        state = {"version": _VERSION, "peer": self._peer_id, "epoch": epoch, "stream": stream}
        files.write_atomic(self._folder / POSITION_FILE, json.dumps(state) + "\n", durable=False)
        self._committed = int(stream["position"])

    @property
    def committed(self) -> int:
        """Examples up to which this peer's stream went into the weights, or was passed over."""
        return self._committed

    @property
    def damage(self) -> dict[str, str]:
        """Shards and row groups that could not be read, and domains without an example."""
        return {**self._stream.empty, **self._stream.damage}

    def close(self) -> None:
        """End the reader processes."""
        self._stream.close()

    def __enter__(self) -> PeerData:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        """Remember where the examples of the epoch so far end."""
        if self._epoch is not None and self._stream.position > self._first:
            first = self._ends.get(self._epoch, (self._first,))[0]
            self._ends[self._epoch] = first, self._stream.state_dict()

    def _saved(self) -> dict[str, Any] | None:
        path = self._folder / POSITION_FILE
        try:
            saved = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(
                f"'{path}' cannot be read ({error}): remove it to read the crawls from the start"
            ) from error
        if not isinstance(saved, dict) or saved.get("version") != _VERSION:
            raise UserError(
                f"'{path}' is no position of this version: remove it to read from the start"
            )
        if saved["peer"] != self._peer_id:
            raise UserError(
                f"'{path}' is the position of the peer '{saved['peer']}', and this one is "
                f"'{self._peer_id}': put the identity back, or remove the position"
            )
        return saved
