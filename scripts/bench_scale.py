"""How mining grows: cost, memory, disk and shuffle at several input sizes, against the estimate.

    python -m scripts.bench_scale --sizes 0.1 0.5 1 --workers 1 2

A size is in GB (1e9 bytes) of uncompressed WET, made once by `scripts/vary_shards.py` below
`out/bench`. Each run is `gristmill mine` in a process of its own. What is measured, and how:

- CPU and peak resident memory by pass: `timings.json`, which the run itself leaves.
- CPU in all: what the system charged that process and its workers for; where workers were ended
  without being waited for, the passes' sum and the process itself.
- Staging: the bytes in the staging folder at the end of the run. Files are only ever added to it.
- Shuffle: the encoded bytes (keys, values, windows) that Beam's local runner hands to its
  GroupByKeys, counted where they arrive. A cluster's runner may add framing, or compress.

Each figure stands beside the one that `gristmill mine --dry-run` gives (pipelines/estimate.py).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from models.errors import UserError
from pipelines.estimate import Estimate, estimate
from pipelines.manifest import Counts, read_manifest
from pipelines.plan import make_plan
from pipelines.recipe import MineRecipe, load_recipe
from pipelines.timings import TIMINGS_FILE
from scripts.bench_mine import train_models
from scripts.vary_shards import uncompressed_bytes, vary

PASSES = ("hash", "judge", "clean", "regroup")
_MIB = 1 << 20


class Run(NamedTuple):
    """One measured run. cpu_s: by pass, with "other" for what is in none; shuffle: by step."""

    size_gb: float
    workers: int
    wall_s: float
    cpu_s: dict[str, float]
    rss_bytes: dict[str, int]
    staging_bytes: int
    output_bytes: int
    shuffle: dict[str, int]
    counts: Counts
    kept_bytes: int
    scored_bytes: int
    expected: Estimate

    @property
    def total_cpu_s(self) -> float:
        return sum(self.cpu_s.values())

    @property
    def worker_bytes(self) -> int:
        return max(self.rss_bytes[name] for name in PASSES)

    @property
    def shuffled_per_key(self) -> float:
        return sum(self.shuffle.values()) / self.counts.keys.distinct


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; prints one table for each run, then growth and speed-up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.1, 0.5], metavar="GB")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--rounds", type=int, default=1, help="the run of least CPU counts")
    parser.add_argument("--source", default="../shared/data/wet_docs", help="folder of real shards")
    parser.add_argument("--wiki", default="../shared/data/wiki", help="prose for language models")
    parser.add_argument("--work", default="out/bench", help="folder for input, models and results")
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    work = Path(parsed.work)
    train_models(Path(parsed.wiki), work / "models")
    runs: dict[tuple[float, int], Run] = {}
    for size_gb in sorted(parsed.sizes):
        folder = make_input(Path(parsed.source), work, size_gb, parsed.seed)
        wet_bytes = sum(map(uncompressed_bytes, folder.glob("*.gz")))
        for workers in parsed.workers:
            rounds = []
            for _ in range(parsed.rounds):
                print(f"mining {size_gb} GB with {workers} workers", file=sys.stderr)
                recipe = _recipe(parsed.recipe, parsed.set, folder, work, workers)
                rounds.append(measure(recipe, wet_bytes, work))
            run = min(rounds, key=lambda run: run.total_cpu_s)
            runs[size_gb, workers] = run
            print_run(run)
    print_comparisons(runs)
    return 0


def make_input(source: Path, work: Path, size_gb: float, seed: int) -> Path:
    """The folder of varied shards of `size_gb`; made unless it stands there whole."""
    folder = work / f"varied-{size_gb:g}-seed{seed}"
    whole = folder / "whole"
    if not whole.exists():
        print(f"making {size_gb} GB of input", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        sources = sorted(map(str, source.glob("*.warc.wet.gz")))
        if not sources:
            raise UserError(f"no WET file in '{source}': give a folder with --source")
        vary(sources, folder, round(size_gb * 1e9), seed, workers=os.cpu_count() or 1)
        whole.touch()
    return folder


def _recipe(name: str, settings: list[str], folder: Path, work: Path, workers: int) -> MineRecipe:
    return load_recipe(name, [
        f"quality.models={work / 'models'}",
        *settings,
        f"input.paths={json.dumps(f'{folder}/*.warc.wet.gz')}",
        f"output.directory={work / 'mined'}",
        f"run.staging={work / 'staging'}",
        "run.keep_staging=true",
        f"run.workers={workers}",
    ])  # fmt: skip


def measure(recipe: MineRecipe, wet_bytes: int, work: Path) -> Run:
    """Mine in a fresh process; what it took, and what was expected before."""
    plan = make_plan(recipe)
    expected = estimate(plan)
    for folder in (plan.staging, plan.recipe.output.directory):
        shutil.rmtree(folder, ignore_errors=True)
    request, figures_path = work / "request.json", work / "figures.json"
    request.write_text(recipe.model_dump_json())
    code = "import sys; from scripts.bench_scale import run_measured; run_measured(*sys.argv[1:])"
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", code, str(request), str(figures_path)], check=True)
    wall_s = time.monotonic() - begin
    figures = json.loads(figures_path.read_text())
    output = Path(recipe.output.directory)
    timings = json.loads((output / TIMINGS_FILE).read_text())
    cpu_s = {name: float(timings[name]["cpu_s"]) for name in PASSES if name in timings}
    in_passes = sum(cpu_s.values())
    in_process = 0.0 if recipe.run.workers > 1 else in_passes
    in_workers = max(figures["children_cpu_s"], in_passes - in_process)
    cpu_s["other"] = figures["own_cpu_s"] + in_workers - in_passes
    rss = {name: int(timings[name]["peak_rss_bytes"]) for name in PASSES if name in timings}
    manifest = read_manifest(str(output))
    run = Run(
        size_gb=wet_bytes / 1e9,
        workers=recipe.run.workers,
        wall_s=wall_s,
        cpu_s=cpu_s,
        rss_bytes=rss | {"runner": figures["peak_rss_bytes"]},
        staging_bytes=_tree_bytes(Path(plan.staging)),
        output_bytes=_tree_bytes(output / "pages"),
        shuffle=figures["shuffle"],
        counts=manifest.counts,
        kept_bytes=sum(part.text_bytes for part in manifest.outputs),
        scored_bytes=sum(part.text_bytes for part in manifest.outputs if part.bucket != "all"),
        expected=expected,
    )
    shutil.rmtree(plan.staging)
    return run


def _tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run_measured(recipe_path: str, figures_path: str) -> None:
    """Mine by the recipe at `recipe_path`, in this process, and leave the figures."""
    from apache_beam.runners.portability.fn_api_runner import (  # noqa: PLC0415
        execution as beam_execution,
    )

    from pipelines.run import mine  # noqa: PLC0415

    execution: Any = beam_execution
    shuffled: Counter[str] = Counter()
    steps: dict[int, str] = {}
    get_buffer = execution.BundleContextManager.get_buffer
    append = execution.GroupingBuffer.append

    def named(self: Any, buffer_id: bytes, transform_id: str) -> Any:
        buffer = get_buffer(self, buffer_id, transform_id)
        kind, name = execution.split_buffer_id(buffer_id)
        if kind == "group":
            steps[id(buffer)] = name
        return buffer

    def counted(self: Any, elements_data: bytes) -> None:
        shuffled[steps.get(id(self), "unknown")] += len(elements_data)
        append(self, elements_data)

    execution.BundleContextManager.get_buffer = named
    execution.GroupingBuffer.append = counted
    mine(MineRecipe.model_validate_json(Path(recipe_path).read_bytes()), progress_mode="none")
    own, children = (resource.getrusage(who) for who in
                     (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))  # fmt: skip
    figures = {
        "own_cpu_s": own.ru_utime + own.ru_stime,
        "children_cpu_s": children.ru_utime + children.ru_stime,
        "peak_rss_bytes": own.ru_maxrss * 1024,
        "shuffle": dict(shuffled),
    }
    Path(figures_path).write_text(json.dumps(figures))


def print_run(run: Run) -> None:
    """What one run took, beside what the estimate said."""
    expected, gb = run.expected, run.size_gb
    paragraphs = run.counts.paragraphs
    print(
        f"\n{gb:.3f} GB, {run.workers} workers, K = {expected.ranges}: "
        f"{paragraphs.read:,} paragraphs, {run.counts.keys.distinct / paragraphs.read:.4f} "
        f"distinct, {paragraphs.kept / paragraphs.read:.4f} kept"
    )
    print(f"{'':34}{'measured':>10}{'estimate':>10}{'error':>8}{'RSS MiB':>9}")
    for name, seconds in run.cpu_s.items():
        rss = f"{run.rss_bytes[name] / _MIB:9.0f}" if name in run.rss_bytes else ""
        _row(f"{name}, CPU-s/GB", seconds / gb, expected.cpu_s[name] / gb, rss)
    total = sum(expected.cpu_s.values())
    _row("all, CPU-s/GB", run.total_cpu_s / gb, total / gb)
    _row("wall, s", run.wall_s, expected.wall_s)
    _row("RAM of a worker at peak, MiB", run.worker_bytes / _MIB, expected.worker_bytes / _MIB)
    _row("RAM of the runner process, MiB", run.rss_bytes["runner"] / _MIB,
         (expected.worker_bytes if run.workers == 1 else expected.runner_bytes) / _MIB)  # fmt: skip
    _row("staging at peak, MB", run.staging_bytes / 1e6, expected.staging.needed_bytes / 1e6)
    _row("output, MB", run.output_bytes / 1e6, expected.output.needed_bytes / 1e6)
    _row("text (WET), MB", gb * 1e3, expected.wet_bytes / 1e6)
    _row("text kept, MB", run.kept_bytes / 1e6, expected.kept_bytes / 1e6)
    _row("text scored, MB", run.scored_bytes / 1e6,
         expected.kept_bytes * expected.scored_share / 1e6)  # fmt: skip
    _row("shuffle, MB", sum(run.shuffle.values()) / 1e6, expected.shuffle_bytes / 1e6)
    print(f"{'shuffle, bytes for each unique key':34}{run.shuffled_per_key:10.2f}   (target <= 9)")
    steps = ", ".join(f"{_step(name)} {size:,}" for name, size in run.shuffle.items())
    print(f"  {steps}")
    quiet = expected.machine_factor
    print(
        "  costs for pipelines/estimate.py: "
        f"hash_s_per_gb {run.cpu_s['hash'] / gb / quiet:.1f}, "
        f"judge_s_per_million_keys {run.cpu_s['judge'] / expected.keys * 1e6 / quiet:.2f}, "
        f"clean pass {run.cpu_s['clean'] / gb / quiet:.1f} for each GB of text, "
        f"regroup_s_per_kept_gb {run.cpu_s['regroup'] / run.kept_bytes * 1e9 / quiet:.1f}, "
        f"kept_share {run.kept_bytes / gb / 1e9:.3f}, "
        f"stored_per_kept_byte {run.output_bytes / run.kept_bytes:.3f} "
        f"(this machine taken as {quiet:.2f} times as slow)"
    )


def _row(name: str, measured: float, expected: float, more: str = "") -> None:
    error = f"{expected / measured - 1:+8.0%}" if measured else f"{'':8}"
    print(f"{name:34}{measured:10.2f}{expected:10.2f}{error}{more}")


def _step(name: str) -> str:
    """`by range` of Beam's `ref_AppliedPTransform_by-range_16`."""
    return " ".join(name.removeprefix("ref_AppliedPTransform_").split("_")[0].split("-")[:2])


def print_comparisons(runs: dict[tuple[float, int], Run]) -> None:
    """Growth of the cost from the smallest size on, and two workers against one."""
    print()
    first: dict[int, Run] = {}
    for (_, workers), run in runs.items():
        base = first.setdefault(workers, run)
        if run is base:
            continue
        growth = run.total_cpu_s / run.size_gb / (base.total_cpu_s / base.size_gb)
        by_pass = ", ".join(
            f"{name} {run.cpu_s[name] / run.size_gb / (base.cpu_s[name] / base.size_gb):.2f}"
            for name in run.cpu_s
        )
        print(
            f"growth of CPU-s/GB, {base.size_gb:.2f} -> {run.size_gb:.2f} GB, {workers} workers: "
            f"{growth:.3f} (target <= 1.05); {by_pass}; "
            f"RAM of a worker {run.worker_bytes / base.worker_bytes:.2f}"
        )
    for (size_gb, workers), run in runs.items():
        one = runs.get((size_gb, 1))
        if workers > 1 and one is not None:
            target = " (target >= 1.8)" if workers == 2 else ""
            print(
                f"{run.size_gb:.2f} GB, {workers} workers against one: "
                f"{one.wall_s / run.wall_s:.2f} times as fast{target}"
            )


if __name__ == "__main__":
    sys.exit(main())
