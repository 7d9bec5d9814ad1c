"""What a run says while it goes on: metrics.jsonl, TensorBoard, a live line on stderr.

metrics.jsonl has one object a line, with `kind` and `step` (steps done). `train`: means since the
line before, over all ranks. `evaluation`: held-out losses. `skipped`: a step that was not taken.
Everything that depends on the clock stands under `times`; without it, a run that was stopped and
resumed writes the lines of an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models.errors import Fault
from training import json_lines

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from training.objectives import Losses
    from training.strategy import Placement

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_HEAD = {"kind", "step"}
_DIGITS = 6
_TERMINAL_S = 0.5
_LOG_S = 10.0
"""Seconds between lines on stderr: on a terminal, where a line replaces the last; elsewhere."""
_SPEED_STEPS = 50


class Window:
    """Sums of losses, labels and hits by term and domain, of this rank's examples."""

    def __init__(self, terms: Sequence[str], domains: Sequence[str], device: torch.device) -> None:
        self.terms, self.domains = tuple(terms), tuple(domains)
        self.sums = torch.zeros(
            (3, len(self.terms), len(self.domains)), dtype=torch.float64, device=device
        )

    def add(self, losses: Losses, domains: torch.Tensor) -> None:
        """Count the examples of one microbatch; `domains` (examples,) are their domains."""
        parts = (losses.sums, losses.counts, losses.correct)
        found = torch.stack([part.detach().double() for part in parts])
        self.sums.index_add_(2, domains, found)

    def merge(self, other: Window) -> None:
        """Count what `other` has counted."""
        self.sums += other.sums

    def fold(self, place: Placement) -> None:
        """Let the first rank hold the sums of all ranks, and the others nothing.

        Done before a checkpoint and before a line, in every run alike, so that a resumed run adds
        up the same numbers in the same order.
        """
        total = place.total(self.sums)
        self.sums = (total if place.first else torch.zeros_like(total)).to(self.sums.device)

    def clear(self) -> None:
        """Forget everything."""
        self.sums.zero_()

    def state(self) -> list[list[list[float]]]:
        """The sums for a checkpoint, exactly."""
        state: list[list[list[float]]] = self.sums.tolist()
        return state

    def restore(self, state: list[list[list[float]]]) -> None:
        """Take up `state`."""
        self.sums = torch.tensor(state, dtype=torch.float64, device=self.sums.device)

    def means(self) -> dict[str, Any]:
        """Loss and accuracy of each term, and the loss of each term in each domain seen.

        `loss` is their sum over terms, which is what the optimiser lowers; None without a label.
        """
        losses, counts, correct = self.sums.cpu()
        empty = not counts.any()
        terms: dict[str, dict[str, float | None]] = {}
        domains: dict[str, dict[str, float | None]] = {}
        loss = 0.0
        for number, term in enumerate(self.terms):
            count = float(counts[number].sum())
            if count:
                mean = float(losses[number].sum()) / count
                loss += mean
                terms[term] = {
                    "loss": _rounded(mean),
                    "accuracy": _rounded(float(correct[number].sum()) / count),
                }
        for number, domain in enumerate(self.domains):
            if counts[:, number].any():
                domains[domain] = {
                    term: _rounded(float(losses[row, number] / counts[row, number]))
                    for row, term in enumerate(self.terms)
                    if counts[row, number]
                }
        return {"loss": None if empty else _rounded(loss), "terms": terms, "domains": domains}


class MetricsLog:
    """Writer of metrics.jsonl and of TensorBoard's events; of the first rank only.

    A run that goes on from a checkpoint opens it at the checkpoint's step: lines of later steps,
    and one that was cut by a kill, go away.
    """

    def __init__(self, directory: Path, *, step: int, tensorboard: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / METRICS_FILE
        self.evaluated = {"kind": "evaluation", "step": step} in _truncate(self._path, step)
        """Whether it holds the evaluation of the step that it was opened at."""
        self._file = self._path.open("a", encoding="utf-8")
        self._tensorboard: SummaryWriter | None = None
        if tensorboard:
            # Loads slowly, and only where it is wanted.
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

            self._tensorboard = SummaryWriter(
                str(directory / TENSORBOARD_FOLDER), purge_step=step + 1
            )

    def write(self, line: dict[str, Any]) -> None:
        """Add one line; its numbers go to TensorBoard under `kind`/... Raises Fault."""
        try:
            self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise Fault(f"cannot write '{self._path}': {error.strerror}") from None
        if self._tensorboard is not None:
            self._scalars(line["kind"], line, line["step"])
            self._tensorboard.flush()

    def _scalars(self, tag: str, value: Any, step: int) -> None:
        assert self._tensorboard is not None
        if isinstance(value, dict):
            for name, part in value.items():
                if name != "step":
                    self._scalars(f"{tag}/{name}", part, step)
        elif isinstance(value, (int, float)):
            self._tensorboard.add_scalar(tag, value, step)

    def sync(self) -> None:
        """Let the disk hold every line, before a checkpoint says that these steps are done."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the files."""
        with contextlib.suppress(OSError):  # `write` has told of it
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


class Clock:
    """Speed of the run from the steps of this process; times of evaluations do not count."""

    def __init__(self, flops_per_token: float, peak_flops: float | None, steps: int) -> None:
        self._flops_per_token, self._peak, self._steps = flops_per_token, peak_flops, steps
        self._recent: deque[tuple[float, float]] = deque(maxlen=_SPEED_STEPS)
        self.begin_s = time.monotonic()
        self.computed_s = self.wait_s = 0.0
        self.tokens = 0.0

    def step(self, seconds: float, waited_s: float, tokens: float) -> None:
        """Count a step of `tokens` (all ranks') that took `seconds`, `waited_s` of it for data."""
        self._recent.append((seconds, tokens))
        self.computed_s += seconds
        self.wait_s += waited_s
        self.tokens += tokens

    def figures(self) -> dict[str, Any]:
        """`times` of a line: recent tokens/s and MFU (None where the peak is not known)."""
        seconds = sum(one for one, _ in self._recent)
        speed = sum(tokens for _, tokens in self._recent) / seconds if seconds else 0.0
        mfu = None if self._peak is None else speed * self._flops_per_token / self._peak
        return {
            "unix_s": round(time.time(), 3),
            "elapsed_s": round(time.monotonic() - self.begin_s, 3),
            "tokens_per_s": round(speed, 1),
            "mfu": None if mfu is None else round(mfu, 4),
            "waiting_for_data": round(self.wait_s / self.computed_s, 4) if self.computed_s else 0.0,
        }

    def left_s(self, step: int) -> float | None:
        """Seconds until the last step, as fast as the recent ones; None before the first."""
        if not self._recent:
            return None
        return (self._steps - step) * sum(one for one, _ in self._recent) / len(self._recent)


class LiveLine:
    """One line on stderr: replaced in place on a terminal, else a new one every ten seconds."""

    def __init__(self, steps: int, *, shown: bool) -> None:
        self._steps, self._shown = steps, shown
        self._terminal = sys.stderr.isatty()
        self._next_s = 0.0
        self._told: set[str] = set()

    def due(self, step: int) -> bool:
        """Whether it is time for a line."""
        return self._shown and (time.monotonic() >= self._next_s or step == self._steps)

    def show(self, step: int, loss: float | None, clock: Clock) -> None:
        """Show the state after `step` steps. loss: of this rank's examples, if it has any."""
        self._next_s = time.monotonic() + (_TERMINAL_S if self._terminal else _LOG_S)
        figures = clock.figures()
        left_s = clock.left_s(step)
        parts = [
            f"step {step:,}/{self._steps:,}",
            *([] if loss is None else [f"loss {loss:.4f}"]),
            f"{figures['tokens_per_s']:,.0f} tokens/s",
            *([] if figures["mfu"] is None else [f"MFU {figures['mfu']:.0%}"]),
            *([] if left_s is None else [f"{duration(left_s)} left"]),
        ]
        text = "  ".join(parts)
        end = "" if self._terminal and step < self._steps else "\n"
        print(f"\r\x1b[K{text}" if self._terminal else text, end=end, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Show a line that stays."""
        if self._shown:
            start = "\r\x1b[K" if self._terminal else ""
            print(f"{start}{text}", file=sys.stderr, flush=True)

    def tell_once(self, faults: Mapping[str, str]) -> None:
        """Warn of each part of the data (domain, shard, row group) that cannot be read: why."""
        for name in sorted(faults.keys() - self._told):
            self._told.add(name)
            self.say(f"warning: '{name}': {faults[name]}")


def duration(seconds: float) -> str:
    """A time as a person says it: '42 s', '12 min', '3 h 20 min', '5 d 4 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def _rounded(value: float) -> float | None:
    return round(value, _DIGITS) if math.isfinite(value) else None


def _truncate(path: Path, step: int) -> list[dict[str, Any]]:
    """Keep the whole lines of steps up to `step`; their kinds and steps."""
    lines = json_lines.keep(path, lambda line: "kind" in line and json_lines.is_up_to(line, step))
    return [{name: line[name] for name in _HEAD} for line in lines]
