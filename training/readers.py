"""Reader processes of one rank: they make the examples ahead, in order, and the rank takes them.

Reader r of m is what rank `rank + ranks * r` of `ranks * m` ranks would be, so readers change
nothing but the time it takes. A reader runs ahead until its queue is full. It heeds no signal
that is meant for the rank (Ctrl+C and a stop of a whole group reach both), and ends when the
rank's end of its pipe is gone: by `close`, or by the rank's death.
"""

from __future__ import annotations

import contextlib
import heapq
import multiprocessing.util
import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from models.errors import Fault, GristmillError, UserError
from training.domains import Corpus
from training.examples import ExampleBuilder
from training.lanes import Cursors, Lanes, Step, own_indexes
from training.recipe import Data

_STEPS_A_MESSAGE = 32
_MESSAGES_AHEAD = 32
_ENDLESS = 1 << 62

_Error = tuple[bool, str]  # whether it is the user's, what it says
_Notes = tuple[dict[str, str], dict[str, str]]  # Lanes.damage, Lanes.empty
_Message = tuple[list[Step], _Notes, _Error | None]


class Readers:
    """Steps of this rank's lanes, made by `data.readers` processes; see `lanes.Lanes`."""

    def __init__(
        self,
        corpus: Corpus,
        weights: Sequence[float],
        builder: ExampleBuilder,
        *,
        data: Data,
        rank: int,
        ranks: int,
        first: int,
        cursors: Cursors,
        until: int | None,
    ) -> None:
        self.damage: dict[str, str] = {}
        self.empty: dict[str, str] = {}
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._waiting: list[deque[Step]] = [deque() for _ in range(data.readers)]
        self._indexes: list[int] = []
        self._strides: list[int] = []
        # Runs at the latest before multiprocessing waits for its processes at exit.
        self._end = multiprocessing.util.Finalize(
            self, _end, args=(self._processes, self._connections), exitpriority=10
        )
        spawn = get_context("spawn")
        resource_tracker.ensure_running()  # it would unblock the signals when it starts
        for number in range(data.readers):
            ours, theirs = spawn.Pipe(duplex=False)
            part = {"rank": rank + ranks * number, "ranks": ranks * data.readers}
            settings = {
                **part,
                "corpus": corpus,
                "weights": list(weights),
                "builder": builder,
                "data": data,
                "first": first,
                "cursors": cursors,
                "cache_bytes": max(1, data.cache_bytes // data.readers),
            }
            last = _ENDLESS if until is None else until
            process = spawn.Process(
                target=_read,
                args=(theirs, last),
                kwargs=settings,
                daemon=True,
            )
            with _stop_signals_blocked():
                process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
            index, stride = own_indexes(first, lanes=data.lanes, **part)
            self._indexes.append(index)
            self._strides.append(stride)

    def steps(self, until: int) -> Iterator[Step]:
        """All steps up to index `until`, that not included, in order."""
        each = [self._steps_of(number, until) for number in range(len(self._waiting))]
        return heapq.merge(*each, key=lambda step: step.number)

    def close(self) -> None:
        """End the processes."""
        self._end()

    def _steps_of(self, number: int, until: int) -> Iterator[Step]:
        while self._indexes[number] < until:
            if not self._waiting[number]:
                self._receive(number)
            self._indexes[number] += self._strides[number]
            yield self._waiting[number].popleft()

    def _receive(self, number: int) -> None:
        try:
            message: _Message = self._connections[number].recv()
        except (EOFError, OSError) as error:
            self._processes[number].join(5)
            raise Fault(
                f"reader {number} of {len(self._processes)} stopped, exit code "
                f"'{self._processes[number].exitcode}'; start again to go on from the checkpoint"
            ) from error
        steps, (damage, empty), failure = message
        self.damage.update(damage)
        self.empty.update(empty)
        self._waiting[number].extend(steps)
        if failure is not None:
            by_user, text = failure
            raise UserError(text) if by_user else Fault(text)


def _end(processes: list[Any], connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()  # it holds nothing that anyone needs
    for process in processes:
        process.join()


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """A process that is started here has SIGINT and SIGTERM blocked for good."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _read(connection: Connection, until: int, **settings: Any) -> None:
    """Body of a reader process."""
    messages: queue.Queue[_Message | None] = queue.Queue(_MESSAGES_AHEAD)
    sender = threading.Thread(target=_send, args=(connection, messages), daemon=True)
    sender.start()
    known: _Notes = {}, {}
    try:
        lanes = Lanes(**settings)
        size = 1  # the first example is not kept waiting for others
        while lanes.next_index < until:
            steps = list(lanes.steps(min(until, lanes.next_index + size * lanes.stride)))
            notes = dict(lanes.damage), lanes.empty
            messages.put((steps, notes if notes != known else ({}, {}), None))
            known = notes
            size = min(2 * size, _STEPS_A_MESSAGE)
    except GristmillError as error:
        messages.put(([], ({}, {}), (isinstance(error, UserError), str(error))))
    except Exception as error:  # told in the rank, where someone looks
        traceback.print_exc()
        messages.put(
            ([], ({}, {}), (False, f"a reader failed: {error.__class__.__name__}: {error}"))
        )
    messages.put(None)
    sender.join()


def _send(connection: Connection, messages: queue.Queue[_Message | None]) -> None:
    while (message := messages.get()) is not None:
        try:
            connection.send(message)
        except OSError:  # the rank is gone
            os._exit(0)
    connection.close()
