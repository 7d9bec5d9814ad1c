"""`gristmill swarm start` and `join`, inside their supervisor: the same, with an end at once.

When the work is done and told, hivemind's threads and exit handlers may hold Python for ten seconds
and more. Nothing is left for them to do, and what is left of processes the supervisor ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

from scripts.cli import EXIT_FAULT, main


def run() -> None:
    """Run the command line and end this process with its exit code."""
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else EXIT_FAULT
    except BaseException:
        traceback.print_exc()
        code = EXIT_FAULT
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
