"""What a cut is worth, what a pipeline waits, what a step sends, and DeepSpeed beside it.

    python -m scripts.bench_parallel [--parts cuts bubble traffic deepspeed] [--output FILE]

- cuts: models A (eight narrow blocks below a head of 16,384 words) and B (four wide blocks, eight
  narrow ones, 4,096 words) of `scripts.parallel_models` on two ranks, eight microbatches, 1F1B: cut
  evenly by units, by the SageMaker library's algorithm and by ours, all from one profile. Once with
  units that sleep for the profiled times, which is the evidence: it needs two ranks, not two idle
  cores; once with the real units, an illustration: two ranks share the caches and the memory
  of this machine with each other and with whatever else runs.
- bubble: two equal stages, four microbatches against one process: (m + p - 1) / (m p) = 0.625.
- traffic: bytes of a step on four ranks, counted in a network namespace (root), and the formulas.
- deepspeed: model A by DeepSpeed's own cuts and by ours, each step with AdamW's; it has a virtual
  environment of its own below the work folder, made once (2 minutes, 1.1 GB).

Steps of the cuts take turns, DeepSpeed's and our runs of them too; the least of the steps
counts. Prints Markdown; targets that are missed are said, and the exit code is then 1. The whole
of it takes some 6 minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from scripts import parallel_cuts, parallel_peer, parallel_tables
from scripts.bench_parts import Part, run_parts
from scripts.parallel_cuts import MICROBATCHES, RANKS
from scripts.parallel_ranks import Case, Measured, measure
from scripts.parallel_tables import PeerRow
from scripts.parallel_traffic import count_bytes
from training.parallel.units import Cut

MODELS = ("A", "B")
_PEER_MODEL = "A"
_PEER_METHODS = ("uniform", "parameters")
_SLEEP_STEPS, _REAL_STEPS, _BUBBLE_STEPS, _PEER_STEPS, _PEER_ROUNDS = 5, 12, 4, 6, 3


def cuts(work: Path) -> Part:
    """Part (a). Raises UserError."""
    rows = []
    for units, steps in (("sleep", _SLEEP_STEPS), ("real", _REAL_STEPS)):
        print(f"cuts: units that are {units}", file=sys.stderr)
        rows += parallel_cuts.rows(MODELS, units, steps, work)
    losses = {model: parallel_cuts.loss_alone(model) for model in MODELS}
    figures = {
        "profiles": {model: asdict(parallel_cuts.profiled(model)) for model in MODELS},
        "rows": list(map(asdict, rows)),
    }
    table = parallel_tables.cuts_table(rows)
    return table, parallel_tables.cut_targets(rows, losses), figures


def bubble(work: Path) -> Part:
    """Part (b)."""
    found = parallel_cuts.bubble(_BUBBLE_STEPS, work)
    figures = asdict(found) | {"ratio": found.ratio, "formula": found.formula}
    return parallel_tables.bubble_table(found), parallel_tables.bubble_targets(found), figures


def traffic(work: Path) -> Part:
    """Part (c). Raises RunFailed where there is no namespace."""
    found = count_bytes(work)
    table, targets = parallel_tables.traffic_table(found), parallel_tables.traffic_targets(found)
    return table, targets, list(map(asdict, found))


def deepspeed(work: Path) -> Part:
    """Part (d). Raises RunFailed where DeepSpeed cannot be installed or run."""
    place = work / "deepspeed"
    python = parallel_peer.installed(place)
    ours = {
        name: cut
        for name, cut in parallel_cuts.cuts(
            parallel_cuts.profiled(_PEER_MODEL), parallel_cuts.pipe()
        ).items()
        if isinstance(cut, Cut) and name in (parallel_tables.UNIFORM, parallel_tables.OPTIMAL)
    }
    cases = [Case(_PEER_MODEL, cut.bounds, MICROBATCHES, optimiser=True) for cut in ours.values()]
    found: dict[str, tuple[tuple[int, ...], list[Measured]]] = {}
    for number in range(_PEER_ROUNDS):
        print(f"deepspeed: round {number + 1} of {_PEER_ROUNDS}", file=sys.stderr)
        for method in _PEER_METHODS:
            run = parallel_peer.run(
                python, place, model=_PEER_MODEL, method=method, ranks=RANKS,
                microbatches=MICROBATCHES, steps=_PEER_STEPS,
            )  # fmt: skip
            times = Measured(min(run.seconds), statistics.median(run.seconds), run.loss)
            name = f"DeepSpeed {parallel_peer.VERSION}, {method}"
            found.setdefault(name, (run.bounds, []))[1].append(times)
        measured = measure(cases, RANKS, _PEER_STEPS, work)
        for (name, cut), times in zip(ours.items(), measured, strict=True):
            found.setdefault(f"Gristmill, {name}", (cut.bounds, []))[1].append(times)
    rows: list[PeerRow] = [(name, bounds, best(all_)) for name, (bounds, all_) in found.items()]
    figures = [{"program": row[0], "bounds": row[1], **asdict(row[2])} for row in rows]
    return parallel_tables.peer_table(rows), parallel_tables.peer_targets(rows), figures


def best(rounds: list[Measured]) -> Measured:
    """The round with the least step; its median and loss beside it."""
    return min(rounds, key=lambda one: one.least_s)


PARTS: dict[str, tuple[str, Callable[[Path], Part]]] = {
    "cuts": ("Cuts: 2 ranks, 8 microbatches, 1F1B", cuts),
    "bubble": ("Bubble", bubble),
    "traffic": ("Bytes of a step over 4 ranks", traffic),
    "deepspeed": ("DeepSpeed beside ours: model A, real units, AdamW", deepspeed),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts. Exit code 1 for a missed target or a part that failed, 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="bench_parallel", description=(__doc__ or "").split("\n", 1)[0], allow_abbrev=False
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                        help=f"some of {', '.join(PARTS)} (all)")  # fmt: skip
    parser.add_argument("--work", default="out/bench/parallel", help="folder for all that it makes")
    parser.add_argument("--output", metavar="FILE", help="write all figures there, as JSON")
    parsed = parser.parse_args(arguments)
    work = Path(parsed.work).resolve()
    chosen = {
        name: (PARTS[name][0], functools.partial(PARTS[name][1], work))
        for name in dict.fromkeys(parsed.parts)
    }
    return run_parts("bench_parallel", chosen, parsed.output)


if __name__ == "__main__":
    sys.exit(main())
