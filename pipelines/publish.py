"""The end of a run: all reports and parts become one manifest, written last and at once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

import pyarrow as pa
import pyarrow.parquet as pq

from models import files
from models.errors import Fault
from pipelines.clean import Report
from pipelines.index import index_listing, publish_index
from pipelines.manifest import (
    MANIFEST_FILE,
    SCHEMA_VERSION,
    Counts,
    InputEntry,
    KeyCounts,
    LossEntry,
    Manifest,
    ModelEntry,
    OutputEntry,
    PageCounts,
    ParagraphCounts,
    RecordCounts,
    by_language,
    total,
)
from pipelines.plan import Plan
from pipelines.regroup import PAGES, Output
from pipelines.staging import DROPS_SCHEMA, read_drops
from pipelines.timings import TIMINGS_FILE, collect, timed

DROPS_FILE = "drops.parquet"
FAULTS_FILE = "faults.json"
_ROW_GROUP_DROPS = 1 << 18  # many inputs to a row group: the footer tells of each group at length


@dataclass(frozen=True)
class Finished:
    """A part of what the passes hand in: reports, the cutoffs (once), the parts of a task."""

    reports: list[Report] = field(default_factory=list)
    cutoffs: dict[str, tuple[float, float]] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def publish(plan: Plan, finished: list[Finished]) -> str:
    """Write the manifest of a run; gives its path.

    A fault in any pass, or more failed inputs than the recipe allows, leaves no manifest, but the
    list of them in the staging folder, and the path of that list is given. Raises Fault when not
    even that can be written, OSError when the manifest cannot.
    """
    reports = sorted(
        (report for part in finished for report in part.reports),
        key=lambda report: int(report["unit"]),
    )
    faults = [fault for part in finished for fault in part.faults]
    faults += sorted({report["fault"] for report in reports if report["fault"]})
    failed = [] if faults else failed_inputs(plan, reports)
    if faults or len(failed) > plan.recipe.input.failed_shards_allowed(len(plan.inputs)):
        path = files.join(plan.staging, FAULTS_FILE)
        try:
            files.write_atomic(path, json.dumps({"faults": faults, "failed": failed}))
        except OSError as error:
            raise Fault(faults[0] if faults else f"'{path}': {error}") from error
        return path
    good = [report for report in reports if not report["failed"]]
    directory = plan.recipe.output.directory
    listing = index_listing(plan.recipe, [entry for report in reports for entry in report["index"]])
    manifest = _manifest(plan, reports, good, finished, listing)
    wrong = manifest.faults()
    if wrong:
        raise Fault(f"the counts do not add up: {wrong[0]}")
    files.write_atomic(
        files.join(directory, TIMINGS_FILE), json.dumps(collect(plan), indent=1) + "\n"
    )
    _remove_strays(directory, manifest)
    path = files.join(directory, MANIFEST_FILE)
    files.write_atomic(path, manifest.to_json())
    # Last: an index that stands belongs to a manifest that stands.
    if plan.recipe.dedup.index_out is not None:
        publish_index(plan.recipe.dedup.index_out, listing)
    # For the last line of the progress only: the manifest stands, whatever becomes of this.
    with contextlib.suppress(OSError), timed(plan, "publish", 0) as piece:
        piece["bytes"] = sum(output.bytes for output in manifest.outputs)
        piece["pages_kept"] = manifest.counts.pages.written
        piece["losses"] = len(manifest.losses)
    return path


def failed_inputs(plan: Plan, reports: list[Report]) -> list[tuple[str, str]]:
    """(name, reason) of each input that could not be read, or held no WARC record at all."""
    found = []
    for report in sorted(reports, key=lambda report: report["unit"]):
        file = plan.inputs[report["unit"]]
        if report["failed"]:
            found.append((file.name, report["failed"]))
        elif not report["records"]["read"] and not report["records"]["not_pages"]:
            lost_bytes = sum(size for _, size, _ in report["losses"])
            lost = f" ({lost_bytes:,} bytes lost)" if lost_bytes else ""
            found.append((file.name, f"no_record: not one WARC record{lost}"))
    return found


def _remove_strays(directory: str, manifest: Manifest) -> None:
    """Remove parts that an earlier run of the same recipe left and this one has not made."""
    listed = {output.path for output in manifest.outputs}
    for path in parts_in(directory):
        if "/".join(path.split("/")[-4:]) not in listed:
            files.remove(path)


def parts_in(directory: str) -> list[str]:
    """The Parquet parts that stand in an output folder, listed in a manifest or not."""
    return files.find(directory, f"{PAGES}/language=*/bucket=*/part-*.parquet")


def _manifest(
    plan: Plan,
    reports: list[Report],
    good: list[Report],
    finished: list[Finished],
    listing: str,
) -> Manifest:
    found = [output for part in finished for output in part.outputs]
    outputs = tuple(
        OutputEntry(**output) for output in sorted(found, key=lambda output: output["path"])
    )
    failed = dict(failed_inputs(plan, reports))
    cutoffs = {code: pair for part in finished for code, pair in part.cutoffs.items()}
    models = [plan.language_id]
    for language in sorted(plan.language_models):
        pair = plan.language_models[language]
        models += [pair.tokenizer, pair.ngram]
    return Manifest(
        schema_version=SCHEMA_VERSION,
        tool_version=metadata.version("gristmill"),
        recipe=plan.recipe.published(),
        recipe_digest=plan.digest(),
        inputs=tuple(_input(plan, report, failed) for report in reports),
        models=tuple(ModelEntry(name=model.name, sha256=model.sha256) for model in models),
        cutoffs=cutoffs,
        counts=_counts(reports, good, outputs),
        losses=tuple(
            LossEntry(
                name=plan.inputs[report["unit"]].name, offset=offset, bytes=size, reason=reason
            )
            for report in good
            for offset, size, reason in report["losses"]
        ),
        outputs=outputs,
        drops=_drops(plan, good) if plan.recipe.output.drops else None,
        index_in=plan.index_in_xxh3,
        index_out=files.xxh3_bytes(listing.encode()) if plan.recipe.dedup.index_out else None,
    )


def _input(plan: Plan, report: Report, failed: Mapping[str, str]) -> InputEntry:
    file = plan.inputs[report["unit"]]
    known = {"bytes": file.bytes, "xxh3": ""} if report["failed"] else report["input"]
    return InputEntry(
        name=file.name,
        bytes=known["bytes"],
        xxh3=known["xxh3"],
        shard=file.shard,
        failed=failed.get(file.name, ""),
    )


def _counts(reports: list[Report], good: list[Report], outputs: tuple[OutputEntry, ...]) -> Counts:
    def summed(section: str, key: str) -> int:
        return sum(report[section][key] for report in good)

    return Counts(
        records=RecordCounts(**{key: summed("records", key) for key in RecordCounts.model_fields}),
        pages=PageCounts(
            read=summed("pages", "read"),
            written=summed("pages", "written"),
            dropped=total(report["pages"]["dropped"] for report in good),
        ),
        paragraphs=ParagraphCounts(
            read=summed("paragraphs", "read"),
            kept=summed("paragraphs", "kept"),
            dropped=total(report["paragraphs"]["dropped"] for report in good),
        ),
        keys=KeyCounts(
            distinct=sum(report["distinct"] for report in reports),
            repeated=sum(report["repeated"] for report in reports),
        ),
        by_language=by_language(outputs),
    )


def _drops(plan: Plan, good: list[Report]) -> OutputEntry:
    """Put the drop lists of all units into one file, in crawl order."""
    url = files.join(plan.recipe.output.directory, DROPS_FILE)
    rows = written = 0
    waiting: list[pa.Table] = []
    with (
        files.atomic_path(url) as temporary,
        pq.ParquetWriter(temporary, DROPS_SCHEMA, compression="zstd") as writer,
    ):
        for report in good:
            table = read_drops(report["drops_path"])
            if table.num_rows:
                waiting.append(table)
            rows += table.num_rows
            if rows - written >= _ROW_GROUP_DROPS:
                writer.write_table(pa.concat_tables(waiting))
                waiting, written = [], rows
        if waiting:
            writer.write_table(pa.concat_tables(waiting))
    return OutputEntry(
        path=DROPS_FILE, language="", bucket="", rows=rows, chars=0, text_bytes=0,
        bytes=files.size_bytes(url), xxh3=files.xxh3_file(url),
    )  # fmt: skip
