"""Logs of one JSON object a line, which a run that goes on cuts back to its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models import files


def keep(path: Path, stays: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Leave only the lines of `path` that `stays` is true of, and give them.

    A line that was cut by a kill, or is no object, goes away. Nothing is written where all stay.
    """
    if not path.exists():
        return []
    before = path.read_bytes()
    lines = [(line, parsed(line)) for line in before.splitlines(keepends=True)]
    kept = [(line, value) for line, value in lines if value is not None and stays(value)]
    after = b"".join(line for line, _ in kept)
    if after != before:
        files.write_atomic(path, after)
    return [value for _, value in kept]


def begins(path: Path, start: bytes) -> bool:
    """Whether the file `path` begins with `start`, or was cut by a kill before the end of it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return start.startswith(file.read(len(start)))


def parsed(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line; None for one that was cut or is another thing."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and line[-1:] == b"\n" else None


def is_up_to(line: dict[str, Any], step: int) -> bool:
    """Whether `line` is of a step up to `step`."""
    own = line.get("step")
    return isinstance(own, int) and own <= step
