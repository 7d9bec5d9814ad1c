"""One local worker process: Beam's own, but quiet, single-threaded, and gone with its parent.

`pipelines/run.py` starts it as `python -m pipelines.worker PARENT_PID`; Beam passes the addresses
in the environment.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time

_PARENT_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve Beam's bundles until the runner is done or dead."""
    parent = int(sys.argv.pop())  # asked for here, it might be dead already
    _leave_with(parent)
    # Without a handler of ours, Beam's import writes warnings to stderr, and then every detail.
    logging.getLogger().addHandler(logging.NullHandler())
    import pyarrow  # noqa: PLC0415
    from apache_beam.runners.worker import sdk_worker_main  # noqa: PLC0415

    pyarrow.set_cpu_count(1)  # the number of workers says how many cores are used
    sdk_worker_main.main(sys.argv)


def _leave_with(parent: int) -> None:
    """End this process when `parent` ends, however it does (SIGKILL sends no message).

    Linux kills it at once, before it can complain of closed connections; elsewhere, and for a
    parent that was gone before, a thread looks every second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
