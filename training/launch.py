"""`gristmill train --processes N`: the ranks of one machine, as one program to its user.

torchrun would do, but it ends with 1 when all ranks have saved and left after SIGTERM, kills them
30 s after that signal whatever they are writing, shows a page of its own for a user's mistake,
and leaves its ranks alive when it is killed itself. Several machines still need torchrun; the
ranks here get the same environment variables from this launcher.

Each rank is a session of its own, so that a signal reaches it once: through the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType

from models.errors import UserError
from training.rank_output import RankOutput

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_GRACE_S = 2.0
"""How long the other ranks may take to end by themselves after one has failed."""
_EXIT_FAULT = 1
_EXIT_USER_ERROR = 2
_EXIT_BY_SIGNAL = 128


def launch(arguments: list[str], processes: int) -> int:
    """Run `gristmill ARGUMENTS` on `processes` ranks of this machine; gives the exit code.

    0 when every rank ends with 0, also after SIGTERM or Ctrl+C, which all ranks get. When a rank
    fails, the others are ended and only its own message is shown; the code is that rank's, 128 +
    the signal where one ended it. Ranks never outlive this process (Linux). Raises UserError
    inside torchrun.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            f"--processes '{processes}' inside torchrun: leave it out, torchrun starts the ranks"
        )
    with _reserved_port() as port:
        ranks = _Ranks()
        try:
            ranks.start(arguments, processes, port)
            return ranks.wait()
        finally:
            ranks.end()


class _Ranks:
    """The processes of all ranks."""

    def __init__(self) -> None:
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._outputs: list[RankOutput] = []
        self._caught: list[int] = []
        self._passed_on: list[int] = []
        self._failed: list[int] = []
        self._before = {number: signal.signal(number, self._catch) for number in _PASSED_ON}

    def start(self, arguments: list[str], processes: int, port: int) -> None:
        command = [sys.executable, "-P", "-m", "scripts.cli", *arguments]
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        parent = os.getpid()

        def end_with_parent() -> None:
            if library is not None:
                library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(_EXIT_FAULT)

        for rank in range(processes):
            output = RankOutput(rank, shown=rank == 0)
            self._outputs.append(output)
            self._ranks.append(
                subprocess.Popen(
                    command,
                    env=_environment(rank, processes, port),
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    stderr=output.end_for_rank,
                    start_new_session=True,
                    preexec_fn=end_with_parent,  # noqa: PLW1509 - no thread runs yet
                )
            )
        for output in self._outputs:
            output.start()

    def wait(self) -> int:
        """Pass signals on until all ranks have ended; the exit code for all of them."""
        deadline_s = float("inf")
        while any(rank.poll() is None for rank in self._ranks):
            while self._caught:
                self._passed_on.append(self._caught.pop(0))
                for rank in self._ranks:
                    rank.send_signal(self._passed_on[-1])
            self._note_failures()
            if self._failed and deadline_s == float("inf"):
                deadline_s = time.monotonic() + _GRACE_S
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        self._note_failures()
        return self._say_first() if self._failed else 0

    def end(self) -> None:
        """Leave nothing behind: neither ranks nor processes that they started."""
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(number)

    def _note_failures(self) -> None:
        for number, rank in enumerate(self._ranks):
            if rank.poll() not in (None, 0) and number not in self._failed:
                self._failed.append(number)

    def _say_first(self) -> int:
        """Show the message of the rank that made the others fail; gives its exit code."""
        texts = {number: self._outputs[number].kept() for number in self._failed}

        def order(number: int) -> tuple[bool, bool, bool]:
            code, text = self._ranks[number].returncode, texts[number]
            # What a rank says on purpose comes before what it suffered from another one.
            return code != _EXIT_USER_ERROR, "Traceback (most" in text, code > 0

        first = min(self._failed, key=order)  # of equals: the one that ended first
        if 0 in self._failed and self._ranks[0].returncode == _EXIT_USER_ERROR:
            first = 0  # the same mistake, and rank 0's line has been shown already
        code, text = self._ranks[first].returncode, texts[first]
        if code < 0:
            if -code not in self._passed_on:
                name = signal.Signals(-code).name
                print(f"gristmill: fault: rank {first} was ended by {name}", file=sys.stderr)
            return _EXIT_BY_SIGNAL - code
        own = [line for line in text.splitlines() if line.startswith("gristmill: ")]
        if first > 0 and own:
            text = own[-1].replace("gristmill: ", f"gristmill: rank {first}: ", 1)
        if text:
            print(text, file=sys.stderr)
        return int(code)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return (
        {"OMP_NUM_THREADS": str(threads)}
        | dict(os.environ)
        | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    )


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that no other program is given until rank 0 listens on it: bound, not listening."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
