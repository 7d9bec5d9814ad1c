"""How far a run is, on stderr, while it goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from models import files
from pipelines import timings
from pipelines.plan import Plan

_PROGRESS_S = 2.0


@contextlib.contextmanager
def progress(plan: Plan) -> Iterator[None]:
    """Say on stderr, every few seconds, how far each pass is. Local staging only."""
    if not files.is_local(plan.staging):
        yield
        return
    stop = threading.Event()
    groups = len({file.group for file in plan.inputs})
    totals = {
        "hash": len(plan.inputs),
        "judge": groups * plan.ranges,
        "clean": len(plan.inputs),
        "regroup": 0,
    }
    thread = threading.Thread(target=_report, args=(plan, totals, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _report(plan: Plan, totals: dict[str, int], stop: threading.Event) -> None:
    begin = time.monotonic()
    live = sys.stderr.isatty() and "CI" not in os.environ
    last = ""
    while not stop.wait(_PROGRESS_S):
        done = timings.pieces_done(plan)
        parts = [
            f"{name} {done.get(name, 0)}" + (f"/{total}" if total else "")
            for name, total in totals.items()
        ]
        line = "  ".join(parts)
        if live:
            print(f"\r{line}  {time.monotonic() - begin:.0f} s", end="", file=sys.stderr)
        elif line != last:
            print(f"{line}  {time.monotonic() - begin:.0f} s", file=sys.stderr)
        last = line
    if live and last:
        print(file=sys.stderr)
