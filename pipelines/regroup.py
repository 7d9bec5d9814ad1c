"""Pass 4: staging files become the final Parquet shards, by language and bucket.

Once every WET file is staged the cutoffs are known. A task takes one language from a run of
consecutive staging files, reads it once, and writes one part for each bucket; the length of the
run is chosen so that a part comes near the target size. Rows stay in crawl order.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from models import files
from models.errors import DamagedInput
from pipelines.buckets import BUCKETS, buckets_of, percentile_cutoffs
from pipelines.clean import Report
from pipelines.manifest import SCHEMA_VERSION
from pipelines.plan import Plan
from pipelines.sealed import read_sealed, write_sealed
from pipelines.staging import STAGING_SCHEMA, read_row_groups

_NAME = pa.dictionary(pa.int32(), pa.string())
# As dictionaries, language and bucket agree with what Arrow infers from the folder names, so
# that pandas and pyarrow open the whole folder.
SHARD_SCHEMA = pa.schema(
    [
        *(
            field.with_type(_NAME) if field.name == "language" else field
            for field in STAGING_SCHEMA
            if field.name not in ("title", "text", "line_ids", "original_lines",
                                  "original_bytes", "chars")
        ),
        pa.field("bucket", _NAME),
        *(STAGING_SCHEMA.field(name) for name in ("title", "text", "line_ids", "original_lines",
                                                  "original_bytes", "chars")),
    ]
)  # fmt: skip
_ROW_GROUP_BYTES = 16 << 20
PAGES = "pages"
"""The shards have a folder of their own, so that Arrow, pandas and Spark open it as it is."""

Task = dict[str, Any]
Output = dict[str, Any]


def cutoffs_of_run(
    plan: Plan, histograms: Mapping[str, Mapping[int, int]]
) -> dict[str, tuple[float, float]]:
    """Perplexity cutoffs by language: the recipe's, or the percentiles of this run's pages.

    histograms: of all pages with a perplexity (`pipelines.buckets.histogram`), by language.
    """
    if plan.cutoffs is not None:
        return {lang: pair for lang, pair in plan.cutoffs.items() if lang in plan.language_models}
    found = {
        language: percentile_cutoffs([counts], plan.recipe.quality.percentiles)
        for language, counts in sorted(histograms.items())
    }
    return {language: pair for language, pair in found.items() if pair is not None}


class Sources:
    """Where the rows of each language are, over all staging files: 32 bytes for each pair.

    The one worker that plans the tasks of 90,000 files with 160 languages holds 14 million pairs.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._files: dict[int, tuple[str, str]] = {}
        self._pairs: dict[str, array[int]] = {}  # unit, first row group, their number, bytes

    def add(self, report: Report) -> None:
        """Take in the row groups of one report; a language's stand one behind the other."""
        groups = report.get("row_groups", [])
        if groups:
            self._files[report["unit"]] = report["path"], report["xxh3"]
        first = 0
        for language, found in itertools.groupby(groups, key=operator.itemgetter("language")):
            sizes = [group["bytes"] for group in found]
            pair = (report["unit"], first, len(sizes), sum(sizes))
            self._pairs.setdefault(language, array("q")).extend(pair)
            self.bytes += sum(sizes)
            first += len(sizes)

    def tasks(self, plan: Plan, cutoffs: dict[str, tuple[float, float]]) -> Iterator[Task]:
        """Cut each language into tasks, in crawl order."""
        for language in sorted(self._pairs):
            bounds = cutoffs.get(language)
            run_bytes = plan.recipe.output.target_bytes * (len(BUCKETS) if bounds else 1)
            for part, run in enumerate(_runs(self._of(language), run_bytes)):
                yield {"language": language, "part": part, "cutoffs": bounds, "sources": run}

    def _of(self, language: str) -> Iterator[dict[str, Any]]:
        pairs = np.frombuffer(self._pairs[language], np.int64).reshape(-1, 4)
        for row in np.argsort(pairs[:, 0]).tolist():
            unit, first, count, size = pairs[row].tolist()
            path, xxh3 = self._files[unit]
            groups = list(range(first, first + count))
            yield {"path": path, "xxh3": xxh3, "groups": groups, "bytes": size}


def task_bytes(task: Task) -> int:
    """Bytes of the text that a task reads."""
    return sum(source["bytes"] for source in task["sources"])


def _runs(sources: Iterable[dict[str, Any]], run_bytes: int) -> Iterator[list[dict[str, Any]]]:
    """Consecutive sources; a run ends where it comes nearest to `run_bytes`."""
    run: list[dict[str, Any]] = []
    size = 0
    for source in sources:
        if run and size + source["bytes"] / 2 > run_bytes:
            yield run
            run, size = [], 0
        run.append(source)
        size += source["bytes"]
    if run:
        yield run


def regroup(plan: Plan, task: Task) -> list[Output]:
    """Write the parts of one task; gives path (relative), rows, bytes, digest, language, bucket."""
    marker = files.join(plan.staging, "parts", f"{_digest(plan, task)}.json")
    outputs = _finished(plan, marker)
    if outputs is None:
        outputs = _write_parts(plan, task)
        write_sealed(marker, outputs)
    return outputs


def _digest(plan: Plan, task: Task) -> str:
    sources = [[source["xxh3"], source["groups"]] for source in task["sources"]]
    settled = [task["language"], task["part"], task["cutoffs"], sources,
               plan.recipe.output.compression_level, _origin(plan)]  # fmt: skip
    return files.xxh3_bytes(json.dumps(settled).encode())


def _finished(plan: Plan, marker: str) -> list[Output] | None:
    try:
        outputs: list[Output] = read_sealed(marker)
        for output in outputs:
            path = files.join(plan.recipe.output.directory, output["path"])
            if files.xxh3_file(path) != output["xxh3"]:
                return None
    except (OSError, DamagedInput):
        return None
    return outputs


@functools.lru_cache(maxsize=1)
def _tool_version() -> str:
    return version("gristmill")


def _origin(plan: Plan) -> dict[str, str]:
    """Key-value metadata of each shard, the same as in the manifest, whose own digest no file that
    it lists can name."""
    return {
        "gristmill.recipe": plan.recipe.name,
        "gristmill.recipe_digest": plan.digest(),
        "gristmill.schema_version": str(SCHEMA_VERSION),
        "gristmill.tool_version": _tool_version(),
    }


class _Part:
    """One Parquet file in the making."""

    def __init__(self, plan: Plan, language: str, bucket: str, number: int) -> None:
        self.language, self.bucket = language, bucket
        self.relative = f"{PAGES}/language={language}/bucket={bucket}/part-{number:05d}.parquet"
        self.plan = plan
        self.waiting: list[pa.Table] = []
        self.waiting_bytes = 0
        self.rows = 0
        self.chars = 0
        self.text_bytes = 0
        self.output: Output = {}

    def written(self, stack: ExitStack) -> _Part:
        """Open the file; it is closed, described in `output` and renamed when `stack` unwinds."""
        url = files.join(self.plan.recipe.output.directory, self.relative)
        temporary = stack.enter_context(files.atomic_path(url))
        stack.callback(self._describe, temporary)
        self.writer = stack.enter_context(
            pq.ParquetWriter(
                temporary,
                SHARD_SCHEMA.with_metadata(_origin(self.plan)),
                compression="zstd",
                compression_level=self.plan.recipe.output.compression_level,
                use_dictionary=["host", "language", "bucket", "warc_file"],
                write_page_index=True,
                write_page_checksum=True,
            )
        )
        return self

    def add(self, rows: pa.Table) -> None:
        self.waiting.append(rows)
        size = pc.sum(pc.binary_length(rows["text"])).as_py()
        self.waiting_bytes += size
        self.text_bytes += size
        self.rows += rows.num_rows
        self.chars += pc.sum(rows["chars"]).as_py()
        if self.waiting_bytes >= _ROW_GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            table = _with_names(pa.concat_tables(self.waiting), self.language, self.bucket)
            self.writer.write_table(table, row_group_size=table.num_rows)
            self.waiting, self.waiting_bytes = [], 0

    def _describe(self, temporary: Path) -> None:
        if temporary.exists():
            self.output = {
                "path": self.relative,
                "language": self.language,
                "bucket": self.bucket,
                "rows": self.rows,
                "chars": self.chars,
                "text_bytes": self.text_bytes,
                "bytes": files.size_bytes(temporary),
                "xxh3": files.xxh3_file(temporary),
            }


def _write_parts(plan: Plan, task: Task) -> list[Output]:
    cutoffs = tuple(task["cutoffs"]) if task["cutoffs"] else None
    parts: dict[str, _Part] = {}
    with ExitStack() as stack:
        for rows in _rows(task):
            for bucket, chosen in _by_bucket(rows, cutoffs):
                if bucket not in parts:
                    part = _Part(plan, task["language"], bucket, task["part"])
                    parts[bucket] = part.written(stack)
                parts[bucket].add(chosen)
        for part in parts.values():
            part.flush()
    return [part.output for _, part in sorted(parts.items())]


def _by_bucket(
    rows: pa.Table, cutoffs: tuple[float, float] | None
) -> Iterator[tuple[str, pa.Table]]:
    names = buckets_of(rows["perplexity"].to_numpy(zero_copy_only=False), cutoffs)
    found = sorted(set(names))
    for bucket in found:
        yield bucket, rows if len(found) == 1 else rows.filter(pa.array(names == bucket))


def _rows(task: Task) -> Iterable[pa.Table]:
    """The task's rows, one staging row group at a time, in crawl order."""
    for source in task["sources"]:
        yield from read_row_groups(source["path"], source["xxh3"], source["groups"])


def _with_names(rows: pa.Table, language: str, bucket: str) -> pa.Table:
    first = pa.nulls(rows.num_rows, pa.int32()).fill_null(0)
    names = {"language": language, "bucket": bucket}
    columns = {name: pa.DictionaryArray.from_arrays(first, [names[name]]) for name in names}
    return pa.table(
        [columns[name] if name in columns else rows[name] for name in SHARD_SCHEMA.names],
        schema=SHARD_SCHEMA,
    )
