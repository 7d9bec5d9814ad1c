"""A peer's processes as one: a clean leave on SIGTERM, and nothing left behind by any death.

A peer is a process with five more below it (torch's memory manager, the DHT, the averagers, the
daemon p2pd), which go on when their parent is killed. So the trainer is started as the leader of
a process group of its own, and two look after that group:

- the supervisor (this process), which passes SIGTERM and Ctrl+C on, waits `grace_s` for a clean
  leave, and ends the group when the trainer has ended in any way;
- a watcher, which reads a pipe that only the supervisor can write to: when the supervisor is
  killed, the pipe ends and the watcher ends the group. It is a session of its own, so that what
  ends the supervisor's group does not end it first.

The trainer itself also ends with the supervisor (PR_SET_PDEATHSIG), at once. Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

GRACE_S = 10.0
"""How long a clean leave may take."""
EXIT_AGAIN = 75
"""A trainer that ends with this code is started anew: the network was lost, not the work."""
WORKED_S = 600.0
"""A trainer that ran for so long had got in; what ends it then is told, and no reason to retry."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
_EXIT_FAULT = 1
_EXIT_USER_ERROR = 2
_EXIT_BY_SIGNAL = 128
_WATCHER = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
group = b""
while byte := os.read(0, 64):
    group += byte
if group.endswith(b"\\n"):
    try:
        os.killpg(int(group.split()[-1]), signal.SIGKILL)
    except (ProcessLookupError, PermissionError, ValueError):
        pass
"""


def supervise(
    command: Sequence[str],
    *,
    grace_s: float = GRACE_S,
    pause_s: float = _PAUSE_S,
    worked_s: float = WORKED_S,
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Run `command` and everything that it starts; gives its exit code, 128 + the signal where one
    ended it. When this returns, none of those processes is alive.

    SIGTERM, SIGINT and SIGHUP (as SIGTERM) go to the command's own process alone, which has
    `grace_s` to leave; a second Ctrl+C ends all at once. A command that ends with EXIT_AGAIN is
    started anew after `pause_s`. What then keeps it out (an entrance or a service that is away)
    will pass, so an error within `worked_s` is no end: it is tried again, after pauses that double
    up to five minutes. Use in the main thread.
    """
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, catch) for number in _PASSED_ON}
    anew, wait_s = False, pause_s
    try:
        while True:
            began = time.monotonic()
            code = _once(command, caught, grace_s, environment or {}, say)
            had_worked = time.monotonic() - began >= worked_s
            kept_out = anew and not had_worked and code in (_EXIT_FAULT, _EXIT_USER_ERROR)
            if caught or not (kept_out or code == EXIT_AGAIN):
                return code
            if had_worked:
                wait_s = pause_s
            say(f"joining anew in {wait_s:.0f} s")
            _sleep(wait_s, caught)
            if caught:
                return 0
            anew = True
            wait_s = min(2 * wait_s, _LONGEST_PAUSE_S)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _once(
    command: Sequence[str],
    caught: list[int],
    grace_s: float,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> int:
    with contextlib.ExitStack() as stack:
        told, tell = os.pipe()
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCHER],
            stdin=told, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(told)
        stack.callback(watcher.wait)
        stack.callback(os.close, tell)
        stack.callback(os.write, tell, b"done")  # the watcher has nothing to end any more
        trainer = subprocess.Popen(
            command,
            start_new_session=True,
            env={**os.environ, **environment},
            preexec_fn=_end_with(os.getpid()),  # noqa: PLW1509 - no thread runs yet
        )
        stack.callback(_end_group, trainer.pid)
        os.write(tell, f"{trainer.pid}\n".encode())
        return _watched(trainer, caught, grace_s, say)


def _watched(
    trainer: subprocess.Popen[bytes], caught: list[int], grace_s: float, say: Callable[[str], None]
) -> int:
    """Wait for the trainer and pass signals on."""
    passed = 0
    deadline_s = float("inf")
    while trainer.poll() is None:
        if len(caught) > passed:
            again = passed and caught[passed] == signal.SIGINT == caught[passed - 1]
            if again:
                break
            number = caught[passed]
            trainer.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
            passed += 1
            deadline_s = min(deadline_s, time.monotonic() + grace_s)
        if time.monotonic() > deadline_s:
            say(f"not left after {grace_s:.0f} s: ended")
            break
        time.sleep(_POLL_S)
    code = trainer.poll()
    if code is None:
        return _EXIT_BY_SIGNAL + (caught[-1] if caught else signal.SIGKILL)
    return code if code >= 0 else _EXIT_BY_SIGNAL - code


def _end_with(parent: int) -> Callable[[], None]:
    """What a child does before it becomes the command: end when this process does."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if library is not None:
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(_EXIT_FAULT)

    return prepare


def _end_group(group: int) -> None:
    """End every process of `group` and wait until none is left."""
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(group, os.WNOHANG)
        if not alive(group):
            return
        time.sleep(_POLL_S)


def alive(group: int) -> list[int]:
    """The processes of a group; without those that ended and that nobody has asked after yet,
    which a container without an init keeps for ever."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, own_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(own_group) == group and state not in "ZX":
                found.append(int(folder.name))
    return found


def _sleep(seconds: float, caught: Sequence[int]) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and not caught:
        time.sleep(_POLL_S)
