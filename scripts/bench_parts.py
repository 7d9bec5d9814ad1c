"""What benches of several parts have in common: run them in turn, print, judge."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from models import files
from models.errors import UserError
from scripts.bench_peers import RunFailed

Part = tuple[str, list[str], Any]
"""Table, lines of targets, figures for JSON."""


class NotPermitted(Exception):
    """A part needs what this user or kernel has not; it is left out, and that is said."""


def run_parts(
    name: str, parts: Mapping[str, tuple[str, Callable[[], Part]]], output: str | None
) -> int:
    """Run `parts` (title and work by name) of the bench `name`; `output`: a file for all figures.

    Prints Markdown. Exit code 1 for a missed target or a part that failed, 2 for a mistake.
    """
    figures: dict[str, Any] = {}
    good = True
    for part, (title, work) in parts.items():
        print(f"{name}: {part} (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
        try:
            table, targets, figures[part] = work()
        except UserError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        except NotPermitted as error:
            table, targets, figures[part] = f"skipped: {error}", [], {"skipped": str(error)}
        except RunFailed as error:
            table, targets, figures[part] = f"not run: {error}", [], {"failed": str(error)}
            good = False
        print("\n\n".join(filter(None, [f"## {title}", table, "\n".join(targets)])), flush=True)
        print()
        good = good and not any(line.startswith("- missed") for line in targets)
    if output:
        files.write_atomic(output, json.dumps(figures, indent=1) + "\n")
    return 0 if good else 1
