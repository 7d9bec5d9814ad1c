"""Pages that are there already, written as the miner writes a crawl: no WET file, no Beam.

For corpora of tests and benchmarks. What the miner would have counted on the way (records,
paragraphs, keys) is 0 in the manifest, and each page states its own number as its place of origin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from models import files
from models.errors import Fault
from pipelines.manifest import (
    MANIFEST_FILE,
    SCHEMA_VERSION,
    Counts,
    KeyCounts,
    Manifest,
    OutputEntry,
    PageCounts,
    ParagraphCounts,
    RecordCounts,
    by_language,
)
from pipelines.regroup import PAGES, SHARD_SCHEMA


@dataclass(frozen=True)
class Page:
    """One mined page. url "": made up from its place. host "": that of the URL."""

    text: str
    url: str = ""
    host: str = ""
    bucket: str = "all"


def write_crawl(
    folder: str | Path,
    pages: Mapping[str, Sequence[Page]],
    *,
    name: str,
    row_group_rows: int,
    shard_rows: int,
) -> str:
    """Write a crawl of pages by language to `folder`, a path or URL; gives its manifest's path.

    A language and bucket get one shard for each `shard_rows` pages, in row groups of
    `row_group_rows` pages. `name` stands in the manifest as that of the recipe.
    """
    root = str(folder)
    outputs = []
    for language, listed in sorted(pages.items()):
        for bucket in sorted({page.bucket for page in listed}):
            rows = [
                _row(name, language, number, page)
                for number, page in enumerate(listed)
                if page.bucket == bucket
            ]
            for part in range(-(-len(rows) // shard_rows)):
                relative = f"{PAGES}/language={language}/bucket={bucket}/part-{part:05d}.parquet"
                chosen = rows[part * shard_rows : (part + 1) * shard_rows]
                outputs.append(_write_shard(root, relative, chosen, row_group_rows))
    manifest = _manifest(name, tuple(sorted(outputs, key=lambda output: output.path)))
    if faults := manifest.faults():
        raise Fault(f"the manifest of '{root}' contradicts itself: {faults[0]}")
    path = files.join(root, MANIFEST_FILE)
    files.write_atomic(path, manifest.to_json())
    return path


def _row(name: str, language: str, number: int, page: Page) -> dict[str, Any]:
    host = page.host or (urlsplit(page.url).hostname if page.url else "") or f"{language}.example"
    return {
        "url": page.url or f"https://{host}/{language}/{page.bucket}/{number}",
        "host": host,
        "date": "2026-04-01T00:00:00Z",
        "digest": f"sha1:{number}",
        "record_id": f"<urn:uuid:{language}-{page.bucket}-{number}>",
        "warc_file": f"{name}.warc.wet.gz",
        "warc_offset": number,
        "language": language,
        "language_score": 1.0,
        "perplexity": None,
        "bucket": page.bucket,
        "title": page.text.split("\n", 1)[0],
        "text": page.text,
        "line_ids": list(range(page.text.count("\n") + 1)),
        "original_lines": page.text.count("\n") + 1,
        "original_bytes": len(page.text.encode()),
        "chars": len(page.text),
    }


def _write_shard(
    root: str, relative: str, rows: list[dict[str, Any]], row_group_rows: int
) -> OutputEntry:
    url = files.join(root, relative)
    with (
        files.atomic_path(url, durable=False) as temporary,
        pq.ParquetWriter(
            temporary,
            SHARD_SCHEMA,
            compression="zstd",
            use_dictionary=["host", "language", "bucket", "warc_file"],
            write_page_index=True,
            write_page_checksum=True,
        ) as writer,
    ):
        for start in range(0, len(rows), row_group_rows):
            chosen = rows[start : start + row_group_rows]
            writer.write_table(
                pa.Table.from_pylist(chosen, SHARD_SCHEMA), row_group_size=len(chosen)
            )
    return OutputEntry(
        path=relative,
        language=rows[0]["language"],
        bucket=rows[0]["bucket"],
        rows=len(rows),
        chars=sum(row["chars"] for row in rows),
        text_bytes=sum(row["original_bytes"] for row in rows),
        bytes=files.size_bytes(url),
        xxh3=files.xxh3_file(url),
    )


def _manifest(name: str, outputs: tuple[OutputEntry, ...]) -> Manifest:
    pages = sum(output.rows for output in outputs)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        tool_version="0",
        recipe={"name": name},
        recipe_digest="0" * 32,
        inputs=(),
        models=(),
        cutoffs={},
        counts=Counts(
            records=RecordCounts(read=pages, not_pages=0, lost=0, length_corrected=0),
            pages=PageCounts(read=pages, written=pages, dropped={}),
            paragraphs=ParagraphCounts(read=0, kept=0, dropped={}),
            keys=KeyCounts(distinct=0, repeated=0),
            by_language=by_language(outputs),
        ),
        losses=(),
        outputs=outputs,
    )
