"""Writes small mined crawls for tests of the report, without mining: every value is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from models import files
from pipelines.manifest import (
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
from pipelines.recipe import load_recipe
from pipelines.regroup import SHARD_SCHEMA

HOSTILE = "<script>window.hacked=1</script><img src=x onerror=window.hacked=2>\"'&]]>"


def page(number: int, language: str, bucket: str, **values: Any) -> dict[str, Any]:
    """A row; `values` replaces what is made up."""
    text = values.pop("text", f"Page {number}.\nIts second line.")
    scored = bucket != "all"
    return {
        "url": f"https://h{number % 7}.example/{number}", "host": f"h{number % 7}.example",
        "date": "", "digest": "", "record_id": f"<{number}>", "warc_file": "a.wet.gz",
        "warc_offset": number, "language": language, "language_score": 0.75,
        "perplexity": 100.0 + number if scored else None, "bucket": bucket, "title": "",
        "text": text, "line_ids": [0], "original_lines": 1, "original_bytes": len(text),
        "chars": len(text),
    } | values  # fmt: skip


def write_crawl(
    folder: Path,
    pages: list[dict[str, Any]],
    *,
    row_group_pages: int = 1000,
    file_pages: int = 10_000,
    dropped: dict[str, int] | None = None,
    losses: tuple[LossEntry, ...] = (),
    **manifest_values: Any,
) -> Manifest:
    """Write shards and manifest.json of a crawl that holds `pages`."""
    outputs = []
    for language, bucket in sorted({(one["language"], one["bucket"]) for one in pages}):
        rows = [one for one in pages if (one["language"], one["bucket"]) == (language, bucket)]
        for part, first in enumerate(range(0, len(rows), file_pages)):
            of_part = rows[first : first + file_pages]
            path = f"pages/language={language}/bucket={bucket}/part-{part:05d}.parquet"
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            table = pa.Table.from_pylist(of_part, schema=SHARD_SCHEMA)
            pq.write_table(table, folder / path, row_group_size=row_group_pages)
            outputs.append(OutputEntry(
                path=path, language=language, bucket=bucket, rows=len(of_part),
                chars=sum(one["chars"] for one in of_part),
                text_bytes=sum(len(one["text"].encode()) for one in of_part),
                bytes=(folder / path).stat().st_size, xxh3=files.xxh3_file(folder / path),
            ))  # fmt: skip
    drops = total([dropped or {}])
    read = len(pages) + sum(drops.values())
    values = {
        "schema_version": 1,
        "tool_version": "0.0",
        "recipe": load_recipe("default").published(),
        "recipe_digest": "0123456789abcdef",
        "inputs": (InputEntry(name="a.wet.gz", bytes=12_345, xxh3="ab", shard=0),),
        "models": (ModelEntry(name="lid.176.ftz", sha256="cd"),),
        "cutoffs": {},
        "counts": Counts(
            records=RecordCounts(read=read, not_pages=1, lost=2, length_corrected=3),
            pages=PageCounts(read=read, written=len(pages), dropped=drops),
            paragraphs=ParagraphCounts(
                read=3 * len(pages) + 5, kept=2 * len(pages),
                dropped=total([{"duplicate": len(pages), "page_too_short": 5}]),
            ),
            keys=KeyCounts(distinct=1_234, repeated=234),
            by_language=by_language(outputs),
        ),
        "losses": losses,
        "outputs": tuple(outputs),
    } | manifest_values  # fmt: skip
    manifest = Manifest(**values)
    assert manifest.faults() == []
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return manifest
