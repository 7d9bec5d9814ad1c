"""What happens when a local worker process dies: the run ends, soon and with one line.

Beam only learns of a dead worker by closed connections; depending on the moment it waits for ever
or fails with pages of text. Its thread that waits for the process does know at once, and that is
where this module listens.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from models.errors import Fault

_BEAM_THREAD = "run_worker"
_CLOSED_CONNECTION = "RpcError"  # what Beam's other threads print of a worker that is gone
_WORKER_MODULE = "pipelines.worker"
_INTERRUPT = signal.SIGUSR1
_INTERRUPT_AGAIN_S = 10.0


@contextlib.contextmanager
def workers_watched() -> Iterator[None]:
    """Raise Fault when a worker process of ours dies before the block ends.

    The other workers are killed, so that nothing waits for them, and the main thread is taken out
    of its wait by a signal (SIGUSR1). Outside the main thread there is no such signal: then the
    Fault comes when Beam has noticed.
    """
    deaths: list[str] = []
    first = threading.Lock()  # two workers may die at once; taken once and never given back
    left = threading.Event()
    before = threading.excepthook
    in_main_thread = threading.current_thread() is threading.main_thread()

    def listen(arguments: threading.ExceptHookArgs) -> None:
        thread = arguments.thread.name if arguments.thread is not None else ""
        if thread == _BEAM_THREAD and first.acquire(blocking=False):
            deaths.append(_death(str(arguments.exc_value)))
            for process in _workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if in_main_thread:
                interrupting.start()
        elif thread != _BEAM_THREAD and arguments.exc_type.__name__ != _CLOSED_CONNECTION:
            before(arguments)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if deaths and not left.is_set():  # without a death the signal is not ours
            raise Fault(deaths[0])

    def keep_interrupting() -> None:  # Beam may swallow an exception, and then wait again
        while not left.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)
            left.wait(_INTERRUPT_AGAIN_S)

    interrupting = threading.Thread(target=keep_interrupting, daemon=True)
    old = signal.signal(_INTERRUPT, interrupt) if in_main_thread else None
    threading.excepthook = listen
    try:
        yield
    except Exception as error:
        if deaths:
            raise Fault(deaths[0]) from error
        raise
    finally:
        left.set()
        if interrupting.ident is not None:
            interrupting.join()
        if in_main_thread:
            signal.signal(_INTERRUPT, old)
        if not deaths:  # else Beam's threads still complain, until the process ends
            threading.excepthook = before


def _death(message: str) -> str:
    found = re.search(r"return code (-?\d+)", message)
    code = int(found[1]) if found else 0
    if code < 0:
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        if code == -signal.SIGKILL:
            how += ", as happens when memory runs out"
    else:
        how = f"ended with exit code {code}"
    return f"a worker process {how}: run the same command again to go on"


def _workers() -> list[int]:
    """The worker processes that this process started, as the kernel lists them (Linux)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
            if int(parent) == os.getpid() and _WORKER_MODULE in words:
                found.append(int(folder.name))
    return found
