"""How far a run is, on stderr, while it goes on.

The figures are those that the workers leave in the staging folder (pipelines/timings.py), so they
hold for any number of workers, and work that an earlier run finished counts as done. On a
terminal each pass has one line, which is updated in place and stays when the pass is done; for
programs there is one JSON object a line; otherwise there is silence.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from models import files
from pipelines import timings
from pipelines.plan import Plan

ProgressMode = Literal["auto", "none", "json"]
PROGRESS_MODES: tuple[ProgressMode, ...] = ("auto", "none", "json")
_LOCAL_TICK_S = 1.0
_REMOTE_TICK_S = 30.0
_RATE_WINDOW_S = 120.0
_MTIME_DOUBT_NS = 1_000_000_000
"""A folder that changed so shortly before it was listed may have changed again since."""
_COLUMNS = 80


@contextlib.contextmanager
def progress(plan: Plan, mode: ProgressMode = "auto") -> Iterator[None]:
    """Report on stderr how far each pass is, while the block runs.

    `auto`: a live line when stderr is a terminal, else nothing. `json`: one object a line, with
    pass, files, files_total, bytes, bytes_total, bytes_per_s, eta_s, pages_kept, losses, failed
    and elapsed_s; what a pass does not know is null. The last object of a pass has files equal to
    files_total. Files are WET files in the passes hash and clean, ranges in judge, Parquet parts'
    tasks in regroup, and the one manifest in publish.
    """
    if mode == "none" or (mode == "auto" and not sys.stderr.isatty()):
        yield
        return
    stop = threading.Event()
    reporter = _Reporter(plan, live=mode == "auto")
    thread = threading.Thread(target=reporter.run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@dataclass
class PassState:
    """What is known of one pass. None: this pass has no such figure, or not yet."""

    name: str
    files: int = 0
    files_total: int | None = None
    bytes: int | None = None
    bytes_total: int | None = None
    pages_kept: int | None = None
    losses: int | None = None
    failed: int | None = None
    begin_unix_s: float = field(default_factory=time.time)
    last_end_unix_s: float = 0.0
    samples: deque[tuple[float, int]] = field(default_factory=deque)

    def finished(self) -> bool:
        """Whether every piece is done."""
        return self.files_total is not None and self.files >= self.files_total

    def elapsed_s(self, now_s: float) -> float:
        """Seconds since the pass began; of a finished one, until its last piece was done."""
        return max((self.last_end_unix_s if self.finished() else now_s) - self.begin_unix_s, 0.0)

    def rate(self, now_s: float) -> float | None:
        """Bytes per second over the last two minutes; over the whole pass when it is done."""
        if self.bytes is None:
            return None
        if self.finished():
            return self.bytes / max(self.elapsed_s(now_s), 1e-3)
        self.samples.append((now_s, self.bytes))
        while now_s - self.samples[0][0] > _RATE_WINDOW_S:
            self.samples.popleft()
        then_s, then_bytes = self.samples[0]
        grown = self.bytes - then_bytes
        return grown / (now_s - then_s) if grown else None

    def figures(self) -> dict[str, Any]:
        """The JSON object of this moment."""
        now_s = time.time()
        rate = self.rate(now_s)
        eta_s = None
        if self.finished():
            eta_s = 0.0
        elif rate and self.bytes_total is not None and self.bytes is not None:
            eta_s = round(max(self.bytes_total - self.bytes, 0) / rate, 1)
        return {
            "pass": self.name,
            "files": self.files,
            "files_total": self.files_total,
            "bytes": self.bytes,
            "bytes_total": self.bytes_total,
            "bytes_per_s": None if rate is None else round(rate),
            "eta_s": eta_s,
            "pages_kept": self.pages_kept,
            "losses": self.losses,
            "failed": self.failed,
            "elapsed_s": round(self.elapsed_s(now_s), 1),
        }


class _Pieces:
    """The finished pieces of one pass. A folder that has not changed is not listed again."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._seen: set[int] = set()
        self._unchanged: dict[str, int] = {}

    def new(self) -> list[tuple[int, str]]:
        """Number and path of each piece that was not there at the last call."""
        found = self._local() if files.is_local(self._folder) else self._remote()
        fresh = [(number, path) for number, path in found if number not in self._seen]
        self._seen.update(number for number, _ in fresh)
        return fresh

    def _local(self) -> Iterator[tuple[int, str]]:
        try:
            folders = [e for e in os.scandir(files.local_path(self._folder)) if e.is_dir()]
        except OSError:
            return
        for folder in folders:
            now_ns = time.time_ns()
            changed_ns = folder.stat().st_mtime_ns
            if self._unchanged.get(folder.name) == changed_ns:
                continue
            for entry in os.scandir(folder):
                number, _, suffix = entry.name.partition(".")
                if suffix == "json" and number.isdecimal():  # no temporary file
                    yield int(number), entry.path
            if now_ns - changed_ns > _MTIME_DOUBT_NS:
                self._unchanged[folder.name] = changed_ns

    def _remote(self) -> Iterator[tuple[int, str]]:
        for url in files.find(self._folder, "*/*.json"):
            number = url.rpartition("/")[2].removesuffix(".json")
            if number.isdecimal():
                yield int(number), url


class _Reporter:
    """Follows the passes one after the other, as the pipeline does."""

    def __init__(self, plan: Plan, *, live: bool) -> None:
        self._plan = plan
        self._live = live
        self._tick_s = _LOCAL_TICK_S if files.is_local(plan.staging) else _REMOTE_TICK_S
        groups = len({file.group for file in plan.inputs})
        self._stored_bytes = sum(file.bytes for file in plan.inputs)
        self._waiting = deque(
            [
                PassState("hash", files_total=len(plan.inputs), bytes=0,
                          bytes_total=self._stored_bytes, failed=0),
                PassState("judge", files_total=groups * plan.ranges),
                PassState("clean", bytes=0, pages_kept=0, losses=0),
                PassState("regroup", bytes=0, pages_kept=0),
                PassState("publish", files_total=1, bytes=0, pages_kept=0, losses=0),
            ]
        )  # fmt: skip
        self._failed_units: set[int] = set()
        self._pieces = self._begin()

    def _begin(self, begin_unix_s: float = 0.0) -> _Pieces:
        state = self._waiting[0]
        state.begin_unix_s = begin_unix_s or time.time()
        if state.name == "clean":
            lost_bytes = sum(self._plan.inputs[unit].bytes for unit in self._failed_units)
            state.files_total = len(self._plan.inputs) - len(self._failed_units)
            state.bytes_total = self._stored_bytes - lost_bytes
        return _Pieces(timings.pass_folder(self._plan, state.name))

    def run(self, stop: threading.Event) -> None:
        """Report until `stop` is set, and once more after that."""
        while not stop.wait(self._tick_s):
            self._tick()
        self._tick()
        if self._live and self._waiting:
            print(file=sys.stderr, flush=True)

    def _tick(self) -> None:
        with contextlib.suppress(OSError):  # a store, or a terminal, that does not answer now
            self._follow()

    def _follow(self) -> None:
        while self._waiting:
            state = self._waiting[0]
            self._update(state)
            self._show(state)
            if not state.finished():
                return
            self._waiting.popleft()
            if self._waiting:
                self._pieces = self._begin(state.last_end_unix_s)

    def _update(self, state: PassState) -> None:
        if state.files_total is None:
            total = timings.announced(self._plan, state.name)
            if total is not None:
                state.files_total, state.bytes_total = total["pieces"], total["bytes"]
        for number, figures in self._new_figures():
            state.files += 1
            state.last_end_unix_s = max(state.last_end_unix_s, figures.get("ended_unix_s", 0.0))
            if figures.get("failed") and state.name == "hash":
                self._failed_units.add(number)
                state.failed = len(self._failed_units)
            if state.bytes is not None:
                state.bytes += figures.get("bytes", 0)
            if state.pages_kept is not None:
                state.pages_kept += figures.get("pages_kept", 0)
            if state.losses is not None:
                state.losses += figures.get("losses", 0)

    def _new_figures(self) -> Iterator[tuple[int, timings.Figures]]:
        fresh = self._pieces.new()
        paths = [path for _, path in fresh]
        if files.is_local(self._plan.staging):
            found = [timings.read_figures(path) for path in paths]
        else:
            with ThreadPoolExecutor(timings.READS_AT_ONCE) as pool:
                found = list(pool.map(timings.read_figures, paths))
        for (number, _), figures in zip(fresh, found, strict=True):
            yield number, figures or {}

    def _show(self, state: PassState) -> None:
        figures = state.figures()
        if not self._live:
            print(json.dumps(figures), file=sys.stderr, flush=True)
            return
        try:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
        except (OSError, ValueError):
            columns = _COLUMNS
        line = live_line(figures, finished=state.finished())[: columns - 1]
        end = "\n" if state.finished() else ""
        print(f"\r{line}\x1b[K", end=end, file=sys.stderr, flush=True)


_MANY_BYTES = 10_000_000_000
_THINGS = {"hash": "files", "judge": "ranges", "clean": "files", "regroup": "tasks"}


def live_line(figures: dict[str, Any], *, finished: bool) -> str:
    """The line of a terminal for one JSON object: a narrow one cuts what matters least."""
    name, done, total = figures["pass"], figures["files"], figures["files_total"]
    parts = []
    if name in _THINGS:
        parts.append(f"{done:,}/{'?' if total is None else f'{total:,}'} {_THINGS[name]}")
    if figures["bytes"] is not None and (figures["bytes"] or figures["bytes_total"]):
        known = figures["bytes_total"] or figures["bytes"]
        size, unit = (1e9, "GB") if known >= _MANY_BYTES else (1e6, "MB")
        of = f"/{figures['bytes_total'] / size:,.1f}" if figures["bytes_total"] else ""
        parts.append(f"{figures['bytes'] / size:,.1f}{of} {unit}")
    if finished:
        parts.append(f"in {_duration(figures['elapsed_s'])}")
    elif figures["eta_s"] is not None:
        parts.append(f"{_duration(figures['eta_s'])} left")
    else:
        parts.append(_duration(figures["elapsed_s"]))
    if figures["bytes_per_s"]:
        parts.append(f"{figures['bytes_per_s'] / 1e6:,.1f} MB/s")
    if figures["pages_kept"]:
        parts.append(f"{figures['pages_kept']:,} pages kept")
    if figures["failed"]:
        parts.append(f"{figures['failed']:,} unreadable")
    if figures["losses"]:
        parts.append(f"{figures['losses']:,} loss{'es' if figures['losses'] > 1 else ''}")
    return f"{name:8}" + "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
