"""Where the time goes: CPU seconds and peak memory of each piece of work.

Each piece leaves one small file in the staging folder; they end up in `timings.json`, beside the
manifest and apart from it, since no two runs agree on them. After a resume they tell of the last
run only. While a run goes on, the files show how far it is.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models import files
from pipelines.plan import Plan

TIMINGS_FILE = "timings.json"
_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


@contextlib.contextmanager
def timed(plan: Plan, name: str, number: int) -> Iterator[None]:
    """Measure the block and leave the figures for `collect`."""
    _reset_peak()
    cpu_s, wall_s = time.process_time(), time.monotonic()
    yield
    figures = {
        "pass": name,
        "cpu_s": time.process_time() - cpu_s,
        "wall_s": time.monotonic() - wall_s,
        "peak_rss_bytes": _peak_rss_bytes(),
    }
    path = files.join(_folder(plan), f"{name}-{number:06d}.json")
    files.write_atomic(path, json.dumps(figures), durable=False)


def _reset_peak() -> None:
    # Linux forgets the peak of this process here; elsewhere the figure is that of its whole life.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_rss_bytes() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES
    (peak_kib,) = (line.split()[1] for line in status.split("\n") if line.startswith("VmHWM:"))
    return int(peak_kib) * 1024


def clear(plan: Plan) -> None:
    """Forget what an earlier run left."""
    files.remove_tree(_folder(plan))


def pieces_done(plan: Plan) -> dict[str, int]:
    """Finished pieces of work by pass."""
    names = [path.rsplit("/", 1)[-1] for path in files.find(_folder(plan), "*.json")]
    return dict(Counter(name.split("-", 1)[0] for name in names))


def collect(plan: Plan) -> dict[str, Any]:
    """CPU seconds, wall seconds of all workers, largest peak memory, pieces: by pass."""
    system, _ = files.filesystem(_folder(plan))
    passes: dict[str, Any] = {}
    for path in files.find(_folder(plan), "*.json"):
        figures = json.loads(system.cat_file(path))
        of_pass = passes.setdefault(
            figures["pass"], {"cpu_s": 0.0, "wall_s": 0.0, "peak_rss_bytes": 0, "pieces": 0}
        )
        of_pass["cpu_s"] += figures["cpu_s"]
        of_pass["wall_s"] += figures["wall_s"]
        of_pass["peak_rss_bytes"] = max(of_pass["peak_rss_bytes"], figures["peak_rss_bytes"])
        of_pass["pieces"] += 1
    return passes


def _folder(plan: Plan) -> str:
    return files.join(plan.staging, "timings")
