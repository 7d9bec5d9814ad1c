"""What a proxy run leaves of its domain weights: alpha.jsonl, step by step, and weights.json.

alpha.jsonl: first {"domains": [k names]}, then one line a step, t = 1 ... T:
{"step": t, "alpha": [k], "excess": [k], "tokens": [k]}, in the order of the domains; to nine
digits. excess: lambda_t; tokens: labelled ones of the global batch. A step that was skipped, its
gradients not finite, has "excess": null and the alpha before it; the mean leaves it out.
weights.json: {"weights": {domain: mean of alpha over 1 ... T}}, which `data.weights` can name.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models import files
from models.errors import Fault, UserError
from training import json_lines

ALPHA_FILE = "alpha.jsonl"
WEIGHTS_FILE = "weights.json"
_KEYS = {"step", "alpha", "excess", "tokens"}
_START = b'{"domains": ['


@dataclass(frozen=True)
class Trace:
    """alpha.jsonl as float64 arrays (steps, domains); `excess` of a skipped step is NaN."""

    domains: tuple[str, ...]
    alpha: np.ndarray
    excess: np.ndarray
    tokens: np.ndarray


class TraceLog:
    """Writer of alpha.jsonl; of the first rank only.

    Opened at the step that the run goes on after: lines of later steps go away. Raises UserError
    when lines of earlier ones are missing.
    """

    def __init__(self, directory: Path, domains: Sequence[str], *, step: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / ALPHA_FILE
        head = {"domains": list(domains)}
        lines = json_lines.keep(
            self._path,
            lambda line: line == head or (line.keys() >= _KEYS and json_lines.is_up_to(line, step)),
        )
        if step and [line.get("step") for line in lines] != [None, *range(1, step + 1)]:
            raise UserError(
                f"'{self._path}' has not the {step:,} steps of the checkpoint: put it back, or "
                "start anew with --restart"
            )
        self._file = self._path.open("a", encoding="utf-8")
        if not lines:
            self._write(head)

    def write(
        self, step: int, alpha: np.ndarray, excess: np.ndarray | None, tokens: np.ndarray
    ) -> None:
        """Add one step; `excess` is None when it was skipped. Raises Fault."""
        line = {
            "step": step,
            "alpha": _rounded(alpha),
            "excess": None if excess is None else _rounded(excess),
            "tokens": [round(count) for count in tokens.tolist()],
        }
        self._write(line)

    def _write(self, line: object) -> None:
        try:
            self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise Fault(f"cannot write '{self._path}': {error.strerror}") from None

    def sync(self) -> None:
        """Let the disk hold every line, before a checkpoint says that these steps are done."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # `write` has told of it
            self._file.close()


def is_trace(path: Path) -> bool:
    """Whether `path` is an alpha.jsonl of a proxy run, or one whose first line was cut."""
    return json_lines.begins(path, _START)


def read_trace(folder: str | os.PathLike[str]) -> Trace:
    """The weights of a proxy run, step by step, as far as it has come. Raises UserError."""
    path = Path(folder) / ALPHA_FILE
    try:
        found = [json_lines.parsed(line) for line in path.read_bytes().splitlines(keepends=True)]
    except OSError as error:
        raise UserError(
            f"no trace at '{path}' ({error.__class__.__name__}): only the run of a proxy has one"
        ) from None
    if found and found[-1] is None:
        found.pop()  # being written, or cut by a kill
    head, *lines = [line or {} for line in found] or [{}]
    try:
        if [line["step"] for line in lines] != list(range(1, len(lines) + 1)):
            raise ValueError("a step is missing")
        domains = tuple(str(name) for name in head["domains"])
        shape = (len(lines), len(domains))
        nothing = [float("nan")] * len(domains)
        return Trace(
            domains,
            np.array([line["alpha"] for line in lines], float).reshape(shape),
            np.array([line["excess"] or nothing for line in lines], float).reshape(shape),
            np.array([line["tokens"] for line in lines], float).reshape(shape),
        )
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"'{path}' is no trace of a proxy, or not a whole one: give the folder of its run"
        ) from None


def write_weights(folder: str | os.PathLike[str], domains: Sequence[str], mean: np.ndarray) -> None:
    """Write weights.json. Raises OSError."""
    tree = {"weights": dict(zip(domains, mean.tolist(), strict=True))}
    files.write_atomic(
        Path(folder) / WEIGHTS_FILE, json.dumps(tree, indent=1, ensure_ascii=False) + "\n"
    )


def read_weights(folder: str | os.PathLike[str]) -> dict[str, float]:
    """The mean weights that a finished proxy run has found. Raises UserError."""
    path = Path(folder) / WEIGHTS_FILE
    try:
        weights = json.loads(path.read_bytes())["weights"]
        return {str(name): float(weight) for name, weight in weights.items()}
    except OSError as error:
        raise UserError(
            f"no weights at '{path}' ({error.__class__.__name__}): the proxy has not finished"
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            f"'{path}' holds no weights: it needs {{\"weights\": {{domain: share}}}}"
        ) from None


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.9g}") for value in values.tolist()]
