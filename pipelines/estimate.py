"""What a run will take, before it runs: CPU time, memory, disk and shuffle, from its plan.

The text itself is sampled: windows of a few local inputs are read, decoded and identified, which
gives the compression ratio, paragraphs for each byte, and how much text has a language model.
What the run does with each byte, paragraph and key costs what it cost in the project's benchmark
(`scripts/bench_scale.py`, which prints the main ones anew with every run), times the speed of this
machine on a fixed piece of text. What dedup and filters keep cannot be sampled: it is taken from
the benchmark too, so for another crawl disk and time after dedup are orders of size.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from models import files
from pipelines.input_sample import ASSUMED_RATIO, Sample, assumed, sample_inputs
from pipelines.paragraphs import paragraph_hashes
from pipelines.plan import Plan

MACHINE = "2 cores of an AMD EPYC at 2.4 GHz"
_MIB = 1 << 20
_SHARED = "language models"  # mapped: one copy for all workers of a machine


class Costs(NamedTuple):
    """Measured on MACHINE, otherwise idle: varied wet_docs, 0.5 GB, recipe `default`, one worker,
    14 small models.

    The clean pass was measured as a whole; it is divided as `scripts/bench_mine.py` finds its
    kernels. Not measured are the shuffle's figures for Common Crawl: a report grows with the
    languages and the scored ones among them.
    """

    hash_s_per_gb: float = 49.0
    """CPU seconds for each 1e9 bytes of WET; `clean`: without language work."""
    judge_s_per_million_keys: float = 0.14
    clean_s_per_gb: float = 33.0
    language_s_per_kept_gb: float = 36.0
    score_s_per_scored_gb: float = 326.0
    regroup_s_per_kept_gb: float = 29.0
    start_s_per_process: float = 4.2
    probe_s: float = 0.0055
    """The fixed piece of text, see `machine_factor`."""
    keys_per_paragraph: float = 0.6
    """Keys of a file that differ, for each of its paragraphs."""
    kept_share: float = 0.6
    """Text behind dedup and filters, for each byte of WET."""
    stored_per_kept_byte: float = 0.36
    """Parquet with zstd-3; the staging files have zstd-1."""
    staged_per_kept_byte: float = 0.42
    report_bytes: int = 18_400
    """One input's report, pickled, as it goes to the cutoffs; `summary_bytes`: on from there."""
    summary_bytes: int = 770
    reference_bytes: int = 90
    """From one input to one judge, with the path of the key file; `block_bytes`: beside a block
    of keys, which needs no path; `answer_bytes`: back, without the bits."""
    block_bytes: int = 21
    answer_bytes: int = 28
    base_bytes: int = 242 * _MIB
    """A process with Beam, Arrow, the language identifier and the character tables."""
    batch_bytes: int = 130 * _MIB
    """Text being worked on, a batch at a time, and what the allocator keeps of it."""
    memory_per_tokenizer_byte: float = 10.0
    memory_per_kept_byte: float = 3.0
    """Kept text of one WET file: its tables, and their sorted copy."""
    memory_per_paragraph: int = 60
    memory_per_key: int = 60
    """Keys of one range in `judge`, with what sorting them needs."""


COSTS = Costs()


class Disk(BaseModel):
    """What a folder has to take, and the free bytes of its disk (None: remote, not known)."""

    model_config = ConfigDict(frozen=True)
    url: str
    needed_bytes: int
    free_bytes: int | None


class Estimate(BaseModel):
    """What a run will take; `bytes` without a unit prefix, CPU in seconds on this machine."""

    model_config = ConfigDict(frozen=True)
    inputs: int
    inputs_of_unknown_size: int
    stored_bytes: int
    wet_bytes: int
    sampled_inputs: int
    compression_ratio: float
    paragraphs: int
    keys: int
    dedup_groups: int
    ranges: int
    kept_bytes: int
    scored_share: float
    machine_factor: float
    cpu_s: dict[str, float]
    workers: int
    wall_s: float
    memory_bytes: dict[str, int]
    """Terms of one worker's memory; of the terms named for a pass only the largest counts."""
    worker_bytes: int
    runner_bytes: int
    shuffle_bytes: int
    shuffle_bytes_per_key: float
    staging: Disk
    output: Disk
    warnings: list[str]


def estimate(plan: Plan) -> Estimate:
    """Estimate the run of `plan`; reads a few windows of local inputs, in about a second."""
    known = [file.bytes for file in plan.inputs if file.bytes]
    unknown = len(plan.inputs) - len(known)
    # A remote input that would not tell its size counts as the mean of the others.
    stored = sum(known) + unknown * (sum(known) // len(known) if known else 0)
    sample = sample_inputs(plan)
    wet, paragraphs, keys = _contents(stored, sample)
    kept = round(wet * COSTS.kept_share)
    groups = len({file.group for file in plan.inputs})
    factor = machine_factor()
    cpu_s = {
        name: seconds * factor
        for name, seconds in _cpu_s(plan, wet, keys, kept, kept * sample.scored_share).items()
    }
    shuffle = _shuffle_bytes(plan, keys)
    memory, worker = _memory(plan, sample, keys)
    staging = _staging_bytes(plan, paragraphs, keys, kept)
    disks = _disks(plan, staging, round(kept * COSTS.stored_per_kept_byte))
    return Estimate(
        inputs=len(plan.inputs),
        inputs_of_unknown_size=unknown,
        stored_bytes=stored,
        wet_bytes=wet,
        sampled_inputs=sample.inputs,
        compression_ratio=sample.ratio,
        paragraphs=paragraphs,
        keys=keys,
        dedup_groups=groups,
        ranges=plan.ranges,
        kept_bytes=kept,
        scored_share=sample.scored_share,
        machine_factor=factor,
        cpu_s=cpu_s,
        workers=plan.recipe.run.workers,
        wall_s=_wall_s(plan, cpu_s),
        memory_bytes=memory,
        worker_bytes=worker,
        # In memory, as Python objects; the local runner spills nothing.
        runner_bytes=COSTS.base_bytes + 2 * shuffle,
        shuffle_bytes=shuffle,
        shuffle_bytes_per_key=shuffle / max(keys, 1),
        staging=disks[0],
        output=disks[1],
        warnings=_warnings(disks, unknown, sample),
    )


def unsampled_memory(plan: Plan) -> tuple[int, int]:
    """Memory in bytes that each worker process of `plan` has for itself, and that it shares with
    the others of its machine. Reads no input."""
    sample = assumed(plan)
    _, _, keys = _contents(sum(file.bytes for file in plan.inputs), sample)
    terms, worker = _memory(plan, sample, keys)
    return worker - terms[_SHARED], terms[_SHARED]


def _contents(stored: int, sample: Sample) -> tuple[int, int, int]:
    """Bytes of WET, paragraphs and keys in `stored` bytes."""
    wet = round(stored * sample.ratio)
    paragraphs = round(wet * sample.paragraphs_per_byte)
    return wet, paragraphs, round(paragraphs * COSTS.keys_per_paragraph)


def machine_factor() -> float:
    """CPU time of this machine for a fixed piece of text, over that of the benchmark's machine."""
    text = "\n".join(
        f"Line {i} of a text that stands for a page, with {i * 7919 % 1000} words and Ünïcode"
        for i in range(4000)
    )
    paragraph_hashes([text], "unicode")  # builds the character tables
    taken = []
    for _ in range(5):
        begin = time.process_time()
        paragraph_hashes([text], "unicode")
        taken.append(time.process_time() - begin)
    return min(taken) / COSTS.probe_s


def _cpu_s(plan: Plan, wet: int, keys: int, kept: int, scored: float) -> dict[str, float]:
    processes = plan.recipe.run.workers + (plan.recipe.run.workers > 1)
    return {
        "hash": wet / 1e9 * COSTS.hash_s_per_gb,
        "judge": keys / 1e6 * COSTS.judge_s_per_million_keys,
        "clean": (
            wet / 1e9 * COSTS.clean_s_per_gb
            + kept / 1e9 * COSTS.language_s_per_kept_gb
            + scored / 1e9 * COSTS.score_s_per_scored_gb
        ),
        "regroup": kept / 1e9 * COSTS.regroup_s_per_kept_gb,
        "other": processes * COSTS.start_s_per_process,
    }


def _wall_s(plan: Plan, cpu_s: dict[str, float]) -> float:
    """Passes one after the other, each over all workers, but no more than it has pieces or cores.

    One process starts while nothing else runs; then all workers start at once.
    """
    workers = min(plan.recipe.run.workers, os.cpu_count() or 1)
    pieces = {"hash": len(plan.inputs), "clean": len(plan.inputs),
              "judge": plan.ranges * len({file.group for file in plan.inputs})}  # fmt: skip
    passes = sum(
        seconds / min(workers, pieces.get(name, workers))
        for name, seconds in cpu_s.items()
        if name != "other"
    )
    return passes + cpu_s["other"] / plan.recipe.run.workers


def _shuffle_bytes(plan: Plan, keys: int) -> int:
    """References and bits between passes 1, 2 and 3; then each report, twice more in short."""
    through = plan.recipe.run.exchange == "shuffle"
    there = COSTS.block_bytes if through else COSTS.reference_bytes
    references = len(plan.inputs) * plan.ranges * (there + COSTS.answer_bytes)
    blocks = round(keys * 8.4) if through else 0
    reports = len(plan.inputs) * (COSTS.report_bytes + 2 * COSTS.summary_bytes)
    return references + keys // 8 + blocks + reports


def _memory(plan: Plan, sample: Sample, keys: int) -> tuple[dict[str, int], int]:
    largest = max(file.bytes for file in plan.inputs)
    wet = largest * sample.ratio
    paragraphs = wet * sample.paragraphs_per_byte * COSTS.memory_per_paragraph
    pairs = plan.language_models.values()
    terms = {
        "base": COSTS.base_bytes,
        "batch": COSTS.batch_bytes,
        _SHARED: sum(_size(pair.ngram.path) for pair in pairs),
        "tokenizers": round(
            sum(_size(pair.tokenizer.path) for pair in pairs) * COSTS.memory_per_tokenizer_byte
        ),
        "hash: largest input": round(largest + paragraphs),
        "judge: keys of one range": round(
            _largest_group_share(plan) * keys / plan.ranges * COSTS.memory_per_key
        ),
        "clean: largest input": round(
            largest + paragraphs + wet * COSTS.kept_share * COSTS.memory_per_kept_byte
        ),
    }
    in_pass = max(size for name, size in terms.items() if ":" in name)
    return terms, sum(size for name, size in terms.items() if ":" not in name) + in_pass


def _largest_group_share(plan: Plan) -> float:
    sizes: dict[int, int] = {}
    for file in plan.inputs:
        sizes[file.group] = sizes.get(file.group, 0) + file.bytes
    return max(sizes.values()) / max(sum(sizes.values()), 1)


def _size(path: str) -> int:
    return Path(path).stat().st_size


def _staging_bytes(plan: Plan, paragraphs: int, keys: int, kept: int) -> int:
    """Key files (4 bytes a paragraph, 10 a key, 8 a page), kept pages, small files."""
    return (
        4 * paragraphs
        + 10 * keys
        + round(kept * COSTS.staged_per_kept_byte)
        + len(plan.inputs) * (COSTS.report_bytes + 40_000)
    )


def _disks(plan: Plan, staging_bytes: int, output_bytes: int) -> tuple[Disk, Disk]:
    staging, output = plan.staging, plan.recipe.output.directory
    return (
        Disk(url=staging, needed_bytes=staging_bytes, free_bytes=_free_bytes(staging)),
        Disk(url=output, needed_bytes=output_bytes, free_bytes=_free_bytes(output)),
    )


def _existing(url: str) -> Path:
    path = files.local_path(url).absolute()
    while not path.exists():
        path = path.parent
    return path


def _free_bytes(url: str) -> int | None:
    return shutil.disk_usage(_existing(url)).free if files.is_local(url) else None


def _warnings(disks: tuple[Disk, Disk], unknown: int, sample: Sample) -> list[str]:
    found = []
    staging, output = disks
    local = [disk for disk in disks if disk.free_bytes is not None]
    one_disk = len({_existing(disk.url).stat().st_dev for disk in local}) == 1 and len(local) == 2
    if one_disk:
        needed, free = staging.needed_bytes + output.needed_bytes, staging.free_bytes or 0
        if needed > free:
            found.append(_too_small(f"'{staging.url}' and '{output.url}'", needed, free))
    else:
        found += [
            _too_small(f"'{disk.url}'", disk.needed_bytes, disk.free_bytes)
            for disk in local
            if disk.free_bytes is not None and disk.needed_bytes > disk.free_bytes
        ]
    if unknown:
        found.append(f"{unknown:,} inputs do not tell their size: the estimate takes the mean")
    if not sample.inputs:
        found.append(
            f"no input could be sampled: {ASSUMED_RATIO} bytes of text for each stored byte assumed"
        )
    return found


def _too_small(place: str, needed: int, free: int) -> str:
    return (
        f"the disk of {place} has {_bytes(free)} free, about {_bytes(needed)} are needed: "
        "make room, or give folders on another disk (--output, run.staging)"
    )


def table(found: Estimate) -> str:
    """The estimate as aligned lines for people."""
    source = f"{found.compression_ratio:.2f} times the stored bytes, " + (
        f"sampled in {found.sampled_inputs} inputs" if found.sampled_inputs else "assumed"
    )
    by_pass = ", ".join(f"{name} {_time(seconds)}" for name, seconds in found.cpu_s.items())
    terms = ", ".join(f"{name} {_bytes(size)}" for name, size in found.memory_bytes.items() if size)
    per_key = f"{found.shuffle_bytes_per_key:.2f} for each distinct key of a file"
    rows = [
        ("input", f"{found.inputs:,} WET files, {_bytes(found.stored_bytes)} stored", ""),
        ("text", _bytes(found.wet_bytes), source),
        ("CPU", _time(sum(found.cpu_s.values())), by_pass),
        ("time", _time(found.wall_s), f"{found.workers} workers, nothing else on the machine"),
        ("RAM per worker", _bytes(found.worker_bytes), terms),
        ("ranges (K)", f"{found.ranges:,}", f"dedup groups: {found.dedup_groups:,}"),
        ("shuffle", _bytes(found.shuffle_bytes), per_key),
        ("staging disk", _bytes(found.staging.needed_bytes), _room(found.staging)),
        ("output disk", _bytes(found.output.needed_bytes), _room(found.output)),
    ]
    lines = [f"{name:<16}{value:<34}{note}".rstrip() for name, value, note in rows]
    lines.append(
        f"(an estimate: costs measured on {MACHINE}, this machine takes "
        f"{found.machine_factor:.2f} times as long)"
    )
    return "\n".join([*lines, *(f"warning: {warning}" for warning in found.warnings)])


def _room(disk: Disk) -> str:
    free = "free space not known" if disk.free_bytes is None else f"{_bytes(disk.free_bytes)} free"
    return f"{free}, '{disk.url}'"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"
