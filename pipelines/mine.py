"""The mining pipeline: WET files in, Parquet shards and a manifest out, as one Beam graph.

    plan -> units -> hash -> [by range] -> judge -> [by unit] -> clean
         -> [all] -> cutoffs and tasks -> [by task] -> regroup -> [all] -> manifest

One root, one leaf, a straight chain: the shape that every Beam runner executes the same way
(DESIGN §3 "Runners"). Page text passes through no shuffle: passes 1, 3 and 4 read files and write
files named by content, and what moves are references, keys, bits and counts. Work that stands
finished under its name is taken as it is: that is how an interrupted run resumes, and why a
retried bundle does no harm. Faults travel as records, so that one line can name all of them at
the end.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import apache_beam as beam

from models.errors import DamagedInput, Fault, GristmillError
from pipelines.arrays import open_arrays
from pipelines.clean import Report, clean_file
from pipelines.dedup import Block, judge, read_all_ranges, read_range
from pipelines.hashing import hash_file, pack_bits, unpack_bits
from pipelines.index import read_index_range, write_index_range
from pipelines.plan import read_plan
from pipelines.publish import Finished, publish
from pipelines.regroup import Sources, cutoffs_of_run, regroup, task_bytes
from pipelines.timings import announce, timed

_ALL = 0
_REPORTS = 0  # the task number under which the reports travel; real tasks count from 1


class Keys(NamedTuple):
    """Pass 1 -> 2: where the keys of a unit are, or why there are none.

    failed: the unit could not be read, the run goes on without it. fault: the run cannot go on.
    block: the keys of one range themselves (`Block.to_bytes`), when they go through the shuffle;
    then only range 0 has the path. Shuffled as a plain tuple, which Beam encodes in few bytes:
    there are as many as units times ranges.
    """

    unit: int
    path: str = ""
    failed: str = ""
    fault: str = ""
    block: bytes = b""


class Answer(NamedTuple):
    """Pass 2 -> 3: what one range decided for one unit. bits: `size` of them, packed.

    The counts of the whole range, and its file in the new index, ride on its first unit. Only
    range 0 brings the path of the keys. Shuffled as a plain tuple, as Keys.
    """

    part: int
    unit: int
    path: str
    failed: str
    size: int = 0
    bits: bytes = b""
    distinct: int = 0
    repeated: int = 0
    index_entry: dict[str, Any] | None = None
    fault: str = ""


def build(
    pipeline: Any,
    plan_path: str,
    *,
    exchange: Literal["files", "shuffle"] = "files",
    slices: int = 1,
) -> Any:
    """Add the whole graph to `pipeline`; the plan at `plan_path` says what to do.

    exchange: whether judges read the key files, or get the keys through the shuffle. slices: how
    many elements the graph begins with, for a runner that never has more bundles than those.
    """
    return (
        pipeline
        | "plan" >> beam.Create(list(range(slices)))
        | "units" >> beam.FlatMap(_units, plan_path, slices)
        | "spread units" >> beam.Reshuffle()
        # Pass 1. Next key: dedup group and range; value: whose keys are in it. Every unit sends
        # itself to each range, also an empty or failed one, so that each unit comes back.
        | "hash" >> beam.FlatMap(_hash, plan_path, exchange)
        | "by range" >> beam.GroupByKey()
        # Pass 2. Next key: unit; value: one bit for each of its distinct keys in this range.
        | "judge" >> beam.FlatMap(_judge, plan_path)
        | "by unit" >> beam.GroupByKey()
        # Pass 3. Next key: one for all; value: a unit's report. The cutoffs need every report.
        | "clean" >> beam.Map(_clean, plan_path)
        | "all reports" >> beam.GroupByKey()
        # Pass 4. Next key: task number; value: the task. The reports travel on, each by itself,
        # as number 0.
        | "tasks" >> beam.FlatMap(_tasks, plan_path)
        | "by task" >> beam.GroupByKey()
        | "regroup" >> beam.FlatMap(_regroup, plan_path)
        | "all parts" >> beam.GroupByKey()
        | "publish" >> beam.Map(_publish, plan_path)
    )


def _units(number: int, plan_path: str, slices: int) -> list[int]:
    """Unit numbers of one slice, large files first: local runners deal bundles out once."""
    try:
        inputs = read_plan(plan_path).inputs
    except OSError as error:
        raise Fault(
            f"a worker on '{socket.gethostname()}' cannot read the plan '{plan_path}' "
            f"({error.strerror or error}): set run.staging to a folder that all workers see"
        ) from None
    order = sorted(inputs, key=lambda file: (-file.bytes, file.index))
    return [file.index for file in order[number::slices]]


def _hash(
    unit: int, plan_path: str, exchange: Literal["files", "shuffle"]
) -> Iterator[tuple[tuple[int, int], tuple[Any, ...]]]:
    plan = read_plan(plan_path)
    file = plan.inputs[unit]
    blocks = [b""] * plan.ranges
    try:
        with timed(plan, "hash", unit) as piece:
            piece["bytes"] = file.bytes
            keys = Keys(unit, hash_file(plan, file))
            if exchange == "shuffle":
                blocks = _blocks(keys.path, plan.ranges)
    except DamagedInput as error:
        keys = Keys(unit, failed=str(error))
    except (GristmillError, OSError) as error:
        keys = Keys(unit, fault=f"keys of '{file.name}': {error}")
    for part, block in enumerate(blocks):
        path = "" if block and part else keys.path
        yield (file.group, part), tuple(keys._replace(path=path, block=block))


def _blocks(path: str, ranges: int) -> list[bytes]:
    try:
        with open_arrays(path) as file:
            return [block.to_bytes() for block in read_all_ranges(file, ranges)]
    except DamagedInput as error:  # our own file, just checked: this is no matter of the input
        raise Fault(str(error)) from error


def _judge(
    element: tuple[tuple[int, int], Iterable[tuple[Any, ...]]], plan_path: str
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    (group, part), values = element
    units = sorted(Keys(*value) for value in values)  # crawl order; a shuffle has none
    faults = [keys.fault for keys in units if keys.fault]
    try:
        if faults:
            raise Fault(faults[0])
        with timed(read_plan(plan_path), "judge", group * read_plan(plan_path).ranges + part):
            answers = _judge_range(units, part, plan_path)
    except (GristmillError, OSError) as error:
        answers = [_answer(part, keys)._replace(fault=str(error)) for keys in units]
    for answer in answers:
        yield answer.unit, tuple(answer)


def _answer(part: int, keys: Keys) -> Answer:
    return Answer(part, keys.unit, "" if part else keys.path, keys.failed)


def _judge_range(units: list[Keys], part: int, plan_path: str) -> list[Answer]:
    plan = read_plan(plan_path)
    dedup = plan.recipe.dedup
    blocks = []
    for keys in units:
        if keys.failed:
            blocks.append(Block.empty())
        elif keys.block:
            blocks.append(Block.from_bytes(keys.block))
        else:
            with open_arrays(keys.path) as file:
                blocks.append(read_range(file, part, plan.ranges))
    earlier = read_index_range(dedup.index_in, part, plan.ranges) if dedup.index_in else None
    verdict = judge(blocks, keep=dedup.keep, common_pages=dedup.common_pages, index=earlier)
    answers = [
        _answer(part, keys)._replace(size=bits.size, bits=pack_bits(bits))
        for keys, bits in zip(units, verdict.keep, strict=True)
    ]
    entry = None
    if dedup.index_out:
        entry = write_index_range(dedup.index_out, part, plan.ranges, verdict.index)
    answers[0] = answers[0]._replace(
        distinct=verdict.distinct, repeated=verdict.repeated, index_entry=entry
    )
    return answers


def _clean(element: tuple[int, Iterable[tuple[Any, ...]]], plan_path: str) -> tuple[int, Report]:
    unit, values = element
    plan = read_plan(plan_path)
    answers = sorted((Answer(*value) for value in values), key=lambda answer: answer.part)
    path, failed = answers[0].path, answers[0].failed
    report: Report = {}
    faults = [answer.fault for answer in answers if answer.fault]
    if not faults and not failed:
        bits = unpack_bits((answer.size, answer.bits) for answer in answers)
        try:
            with timed(plan, "clean", unit) as piece:
                report = clean_file(plan, plan.inputs[unit], path, bits)
                piece["bytes"] = plan.inputs[unit].bytes
                piece["pages_kept"] = report["pages"]["written"]
                piece["losses"] = len(report["losses"])
        except (GristmillError, OSError) as error:
            # With keep = "first" this unit owns paragraphs that other units have dropped for its
            # sake: the run cannot go on without it.
            faults = [f"input '{plan.inputs[unit].name}': {error}"]
    return _ALL, report | {
        "unit": unit,
        "failed": failed,
        "fault": faults[0] if faults else "",
        "distinct": sum(answer.distinct for answer in answers),
        "repeated": sum(answer.repeated for answer in answers),
        "index": [answer.index_entry for answer in answers if answer.index_entry],
    }


def _tasks(element: tuple[int, Iterable[Report]], plan_path: str) -> Iterator[tuple[int, Any]]:
    plan = read_plan(plan_path)
    histograms: dict[str, Counter[int]] = {}
    sources = Sources()
    faulty = False
    for report in element[1]:  # a report is mostly row groups: none is held
        for group in report.get("row_groups", []):
            of_language = histograms.setdefault(group["language"], Counter())
            of_language.update(dict(group["histogram"]))
        sources.add(report)
        faulty = faulty or bool(report["fault"])
        of_publish = {key: value for key, value in report.items() if key != "row_groups"}
        yield _REPORTS, Finished(reports=[of_publish])
    cutoffs = cutoffs_of_run(plan, histograms)
    yield _REPORTS, Finished(cutoffs=cutoffs)
    if not faulty:
        pieces = sum(1 for _ in sources.tasks(plan, cutoffs))
        announce(plan, "regroup", pieces=pieces, bytes_total=sources.bytes)
        yield from enumerate(sources.tasks(plan, cutoffs), start=1)


def _regroup(element: tuple[int, Iterable[Any]], plan_path: str) -> Iterator[tuple[int, Finished]]:
    number, values = element
    if number == _REPORTS:
        yield from ((_ALL, finished) for finished in values)
        return
    (task,) = values
    yield _ALL, _regroup_task(number, task, plan_path)


def _regroup_task(number: int, value: Any, plan_path: str) -> Finished:
    plan = read_plan(plan_path)
    try:
        with timed(plan, "regroup", number) as piece:
            outputs = regroup(plan, value)
            piece["bytes"] = task_bytes(value)
            piece["pages_kept"] = sum(output["rows"] for output in outputs)
        return Finished(outputs=outputs)
    except (GristmillError, OSError) as error:
        return Finished(faults=[f"part of language '{value['language']}': {error}"])


def _publish(element: tuple[int, Iterable[Finished]], plan_path: str) -> str:
    plan, finished = read_plan(plan_path), list(element[1])
    try:
        return publish(plan, finished)
    except (GristmillError, OSError) as error:
        return publish(plan, [*finished, Finished(faults=[f"the manifest: {error}"])])
