"""Where the time goes: CPU seconds and peak memory of each piece of work.

Each piece leaves one small file in the staging folder; they end up in `timings.json`, beside the
manifest and apart from it, since no two runs agree on them. After a resume they tell of the last
run only. While a run goes on, the files show how far it is (pipelines/progress.py): work that was
found finished leaves its file like any other. They stand a thousand to a folder, so that nobody
has to list ninety thousand at a time.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from models import files
from models.errors import DamagedInput
from pipelines.plan import Plan
from pipelines.sealed import read_sealed, write_sealed

TIMINGS_FILE = "timings.json"
Figures = dict[str, Any]
_TOTAL_FILE = "total.json"
_PIECES_PER_FOLDER = 1000
READS_AT_ONCE = 16
"""On an object store each is a request, whose answer takes long."""
_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


@contextlib.contextmanager
def timed(plan: Plan, name: str, number: int) -> Iterator[Figures]:
    """Measure the block and leave the figures for `collect`.

    The block may add what progress shows of its piece: `bytes`, `pages_kept`, `losses`. A piece
    that ends with DamagedInput is left as `failed`.
    """
    _reset_peak()
    cpu_s, wall_s = time.process_time(), time.monotonic()
    figures: Figures = {}
    try:
        yield figures
    except DamagedInput:
        figures["failed"] = True
        _leave(plan, number, figures | _measured(name, cpu_s, wall_s))
        raise
    _leave(plan, number, figures | _measured(name, cpu_s, wall_s))


def _measured(name: str, cpu_s: float, wall_s: float) -> Figures:
    return {
        "pass": name,
        "cpu_s": time.process_time() - cpu_s,
        "wall_s": time.monotonic() - wall_s,
        "peak_rss_bytes": _peak_rss_bytes(),
        "ended_unix_s": time.time(),
    }


def _leave(plan: Plan, number: int, figures: Figures) -> None:
    thousand = f"{number // _PIECES_PER_FOLDER:04d}"
    path = files.join(pass_folder(plan, figures["pass"]), thousand, f"{number:07d}.json")
    write_sealed(path, figures)


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


def announce(plan: Plan, name: str, *, pieces: int, bytes_total: int) -> None:
    """Leave word of how much work the pass `name` has, once that is known."""
    path = files.join(pass_folder(plan, name), _TOTAL_FILE)
    write_sealed(path, {"pieces": pieces, "bytes": bytes_total})


def announced(plan: Plan, name: str) -> Figures | None:
    """What `announce` left for the pass `name`; None while there is nothing."""
    return read_figures(files.join(pass_folder(plan, name), _TOTAL_FILE))


def read_figures(path: str) -> Figures | None:
    """One file of figures; None when it is absent or damaged: they are not worth a run."""
    try:
        figures: Figures = read_sealed(path)
    except (OSError, DamagedInput):
        return None
    return figures


def clear(plan: Plan) -> None:
    """Forget what an earlier run left."""
    files.remove_tree(_folder(plan))


def collect(plan: Plan) -> dict[str, Figures]:
    """CPU seconds, wall seconds of all workers, largest peak memory, pieces: by pass."""
    passes: dict[str, Figures] = {}
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        found = pool.map(read_figures, files.find(_folder(plan), "*/*/*.json"))
        pieces = [figures for figures in found if figures is not None]
    for figures in pieces:
        of_pass = passes.setdefault(
            figures["pass"], {"cpu_s": 0.0, "wall_s": 0.0, "peak_rss_bytes": 0, "pieces": 0}
        )
        of_pass["cpu_s"] += figures["cpu_s"]
        of_pass["wall_s"] += figures["wall_s"]
        of_pass["peak_rss_bytes"] = max(of_pass["peak_rss_bytes"], figures["peak_rss_bytes"])
        of_pass["pieces"] += 1
    return passes


def pass_folder(plan: Plan, name: str) -> str:
    """Where the pieces of the pass `name` leave their figures: `THOUSAND/NUMBER.json` below."""
    return files.join(_folder(plan), name)


def _folder(plan: Plan) -> str:
    return files.join(plan.staging, "timings")
