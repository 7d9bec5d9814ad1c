"""What averaging costs a swarm, what adaptive shares save, and whether it stands an hour of kills.

    python -m scripts.bench_swarm [--parts allreduce share links soak] [--output FILE]

- allreduce: seconds of a round, search and all-reduce apart, for 1 M and 18 M parameters, 2 and 4
  peers, by codec, over the real transport on loopback; bytes that a peer sends and the formula.
- share: part of an epoch of four seconds that averaging takes, in sync and in delayed mode.
- links: three network namespaces (root) at 200, 50 and 20 Mbit/s: equal shares against adaptive
  ones, which begin without knowing any rate and learn them from finished rounds.
- soak: four peers for `--minutes`, each minute one is killed or one joins, by `--seed`.

Every peer is a real one, some six processes. Prints Markdown; targets that are missed are said, and
the exit code is then 1. On two idle cores: allreduce some 5 minutes, share 3, links 3, soak its
minutes. Without root, or a kernel with namespaces, `links` says so and is left out.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from scripts import swarm_bench_tables
from scripts.bench_parts import Part, run_parts
from scripts.swarm_bench_links import (
    ADAPTIVE_ROUNDS,
    EQUAL_ROUNDS,
    PARAMETERS,
    link_rounds,
)
from scripts.swarm_bench_orders import TENSORS
from scripts.swarm_bench_rounds import CODECS, COUNTS, SIZES, round_rows
from scripts.swarm_bench_share import hidden, share_rows
from scripts.swarm_bench_soak import EVERY_S, Soak
from training.swarm.codecs import LONG_VALUES
from training.swarm.transport import TransportSettings


def allreduce(work: Path, given: argparse.Namespace) -> Part:
    """Part (a). Raises RunFailed."""
    rows = round_rows(
        work, sizes=given.sizes, counts=given.peers, codecs=given.codecs, rounds=given.rounds
    )
    figures = [asdict(row) | {"formula_bytes": row.formula_bytes} for row in rows]
    table, targets = swarm_bench_tables.rounds_table(rows), swarm_bench_tables.rounds_targets(rows)
    return table, targets, figures


def share(work: Path, given: argparse.Namespace) -> Part:
    """Part (b). Raises RunFailed."""
    rows = share_rows(work, given.epochs)
    figures = {"rows": list(map(asdict, rows)), "hidden": hidden(rows)}
    table, targets = swarm_bench_tables.share_table(rows), swarm_bench_tables.share_targets(rows)
    return table, targets, figures


def links(work: Path, given: argparse.Namespace) -> Part:
    """Part (c). Raises NotPermitted, RunFailed."""
    found = link_rounds(
        work, parameters=PARAMETERS, equal=given.equal_rounds, adaptive=given.adaptive_rounds,
        part_bytes=given.part_kib * 1024,
    )  # fmt: skip
    table, targets = swarm_bench_tables.links_table(found), swarm_bench_tables.links_targets(found)
    return table, targets, asdict(found) | {"learned_after": found.learned_after}


def soak(work: Path, given: argparse.Namespace) -> Part:
    """Part (d). Raises RunFailed."""
    found = Soak(work / "soak", given.minutes, given.seed, given.every).run()
    table, targets = swarm_bench_tables.soak_table(found), swarm_bench_tables.soak_targets(found)
    return table, targets, asdict(found)


PARTS: dict[str, tuple[str, Callable[[Path, argparse.Namespace], Part]]] = {
    "allreduce": ("A round on loopback", allreduce),
    "share": ("Part of an epoch that averaging takes", share),
    "links": ("Equal and adaptive shares on links of 200, 50 and 20 Mbit/s", links),
    "soak": ("Peers killed and joining, each minute", soak),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_swarm", description=(__doc__ or "").split("\n", 1)[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
        help=f"some of {', '.join(PARTS)} (all)")  # fmt: skip
    add("--work", default="out/bench/swarm", help="folder for all that it makes")
    add("--output", metavar="FILE", help="write all figures there, as JSON")
    group = parser.add_argument_group("allreduce")
    group.add_argument("--sizes", nargs="+", type=_whole(TENSORS * LONG_VALUES), metavar="N",
                       default=list(SIZES), help="parameters")  # fmt: skip
    group.add_argument("--peers", nargs="+", type=_whole(2, 8), default=list(COUNTS), metavar="N")
    group.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS), metavar="C",
                       help=f"some of {', '.join(CODECS)} (all)")  # fmt: skip
    group.add_argument("--rounds", type=_whole(1), default=5, help="of each, after one uncounted")
    group = parser.add_argument_group("share")
    group.add_argument("--epochs", type=_whole(2), default=10, help="of each mode")
    group = parser.add_argument_group("links")
    group.add_argument("--equal-rounds", type=_whole(1), default=EQUAL_ROUNDS)
    group.add_argument("--adaptive-rounds", type=_whole(1), default=ADAPTIVE_ROUNDS)
    group.add_argument("--part-kib", type=_whole(16, 4096),
                       default=TransportSettings.part_bytes // 1024,
                       help="of a part of the vector (the transport's own)")  # fmt: skip
    group = parser.add_argument_group("soak")
    group.add_argument("--minutes", type=_positive, default=60.0)
    group.add_argument("--seed", type=_whole(0), default=1)
    group.add_argument("--every", type=_positive, default=EVERY_S, help="seconds between two acts")
    return parser


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number in a range, from an argument."""

    def read(text: str) -> int:
        limit = "" if most is None else f" to {most}"
        message = f"'{text}' must be a whole number from {least}{limit or ' on'}"
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(message) from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(message)
        return value

    return read


def _positive(text: str) -> float:
    """A finite number above 0, from an argument."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' must be a number above 0")
    return value


def main(arguments: list[str] | None = None) -> int:
    """Run the parts. Exit code 1 for a missed target or a part that failed, 2 for a mistake."""
    given = _parser().parse_args(arguments)
    work = Path(given.work).resolve()
    chosen = {
        name: (PARTS[name][0], functools.partial(PARTS[name][1], work, given))
        for name in dict.fromkeys(given.parts)
    }
    return run_parts("bench_swarm", chosen, given.output)


if __name__ == "__main__":
    sys.exit(main())
