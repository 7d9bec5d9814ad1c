"""`gristmill inspect`: what is in a mined crawl, a Parquet shard, a WET file, a run or a mix."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from models import files
from models.errors import UserError
from pipelines.html_report import write_html_report
from pipelines.manifest import (
    MANIFEST_FILE,
    Manifest,
    OutputEntry,
    damaged_outputs,
    read_manifest,
)
from pipelines.regroup import PAGES
from pipelines.report import funnel, size
from pipelines.wet import Record, WetReader
from scripts.mix_inspection import inspect_mix, is_mix
from scripts.run_inspection import inspect_run, is_run

_PREVIEW_CHARS = 600
_BATCH_ROWS = 1000


def inspect(
    target: str,
    *,
    verify: bool,
    as_json: bool,
    sample: Sequence[str] | None,
    count: int,
    html: str | None = None,
) -> int:
    """Show `target`, or write its report to `html`; gives the exit code: 1 when `verify` found
    something wrong."""
    if not files.exists(target):
        raise UserError(f"nothing at '{target}': give a manifest, a mined folder, a shard or a WET")
    code = _of_training(
        target, verify=verify, as_json=as_json, sampled=sample is not None, html=html
    )
    if code is not None:
        return code
    is_manifest = target.endswith(".json") or files.exists(files.join(target, MANIFEST_FILE))
    if (verify or sample is not None) and not is_manifest and not target.endswith(".parquet"):
        raise UserError(f"--verify and --sample need a mined folder, '{target}' is none")
    if verify and sample is not None:
        raise UserError("--verify and --sample are two questions: give one of them")
    if html is not None:
        if verify or as_json or sample is not None:
            raise UserError(f"--html '{html}' stands alone: leave out --verify, --json, --sample")
        if not is_manifest:
            raise UserError(f"--html needs a mined folder or its manifest, '{target}' is none")
        return _html(target, html)
    if verify and not is_manifest:
        raise UserError(f"--verify needs a mined folder, '{target}' is none")
    if target.endswith(".parquet"):
        return _parquet(target, as_json=as_json, conditions=_conditions(sample), count=count)
    if is_manifest:
        return _manifest(target, verify=verify, as_json=as_json, sample=sample, count=count)
    if files.is_local(target) and files.local_path(target).is_dir():
        raise UserError(f"'{target}' holds no {MANIFEST_FILE}: give the output folder of a run")
    return _wet(target, as_json=as_json, count=count)


def _of_training(
    target: str, *, verify: bool, as_json: bool, sampled: bool, html: str | None
) -> int | None:
    """Show a training run or a mix; None: `target` is neither."""
    if is_run(target):
        if verify or sampled or html is not None:
            raise UserError(
                f"'{target}' is a training run: --verify, --sample and --html need a mined folder"
            )
        return inspect_run(target, as_json=as_json)
    if is_mix(target):
        if sampled:
            raise UserError(f"'{target}' is a mix: --sample needs a mined folder or a shard")
        if html is not None and (verify or as_json):
            raise UserError(f"--html '{html}' stands alone: leave out --verify, --json")
        return inspect_mix(target, verify=verify, as_json=as_json, html=html)
    return None


def _manifest(
    target: str, *, verify: bool, as_json: bool, sample: Sequence[str] | None, count: int
) -> int:
    manifest, folder = read_manifest(target), _folder(target)
    if sample is not None:
        conditions = _conditions(sample)
        rows = _sample_of(manifest, folder, conditions, count)
        _print_pages(rows, as_json=as_json)
        return 0
    wrong = verify_manifest(manifest, folder) if verify else []
    if as_json:
        shown = manifest.model_dump(mode="json")
        print(json.dumps(shown | ({"faults": wrong} if verify else {}), ensure_ascii=False))
    else:
        print(funnel(manifest))
        if verify:
            files_checked = len(manifest.outputs) + (manifest.drops is not None)
            print()
            print("\n".join(wrong) or f"verified: the sums add up, {files_checked} files as listed")
    return 1 if wrong else 0


def _folder(target: str) -> str:
    """The folder of a manifest, or `target` itself."""
    if not target.endswith(".json"):
        return target
    return (target.rsplit("/", 1)[0] or "/") if "/" in target else "."


def _html(target: str, html: str) -> int:
    size_bytes = write_html_report(read_manifest(target), _folder(target), html)
    print(f"{html}: {size(size_bytes)}")
    return 0


def verify_manifest(manifest: Manifest, folder: str) -> list[str]:
    """What is wrong with a mined crawl: sums, missing or changed files, rows; one line each."""
    listed = [*manifest.outputs, *([manifest.drops] if manifest.drops else [])]
    wrong = [*manifest.faults(), *damaged_outputs(manifest, folder)]
    if not wrong:
        for output in listed:
            with files.mapped(files.join(folder, output.path)) as data:
                rows = pq.read_metadata(pa.BufferReader(data)).num_rows
            if rows != output.rows:
                wrong.append(f"'{output.path}' has {rows:,} rows, the manifest {output.rows:,}")
    known = {output.path for output in listed}
    for path in files.find(folder, f"{PAGES}/language=*/bucket=*/*"):
        relative = "/".join(path.split("/")[-4:])
        if relative not in known:
            wrong.append(f"'{relative}' stands in the folder, but not in the manifest")
    return wrong


def _conditions(sample: Sequence[str] | None) -> dict[str, str]:
    conditions = {}
    for condition in sample or []:
        column, equals, value = condition.partition("=")
        if not equals or column not in ("language", "bucket", "host"):
            raise UserError(
                f"--sample '{condition}' is not of the form column=value "
                "with column language, bucket or host"
            )
        conditions[column] = value
    return conditions


def _sample_of(
    manifest: Manifest, folder: str, conditions: dict[str, str], count: int
) -> list[dict[str, Any]]:
    """The first `count` pages that meet the conditions, from as few files as needed."""
    wanted = [
        output
        for output in manifest.outputs
        if conditions.get("language", output.language) == output.language
        and conditions.get("bucket", output.bucket) == output.bucket
    ]
    if not wanted:
        asked = " ".join(f"{key}={value}" for key, value in conditions.items())
        raise UserError(f"--sample '{asked}' matches no file; there are {_there_are(manifest)}")
    rows: list[dict[str, Any]] = []
    for output in wanted:
        rows += _matching(files.join(folder, output.path), conditions, count - len(rows))
        if len(rows) >= count:
            break
    return rows


def _there_are(manifest: Manifest) -> str:
    def key(output: OutputEntry) -> str:
        return f"{output.language}/{output.bucket}"

    return ", ".join(sorted({key(output) for output in manifest.outputs})) or "no pages at all"


def _matching(url: str, conditions: dict[str, str], count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        try:
            data = stack.enter_context(files.mapped(url))
            shard = stack.enter_context(pq.ParquetFile(pa.BufferReader(data), pre_buffer=False))
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"'{url}' is no readable Parquet file: {error}") from None
        for batch in shard.iter_batches(_BATCH_ROWS, use_threads=False):
            for row in batch.to_pylist():
                if all(row.get(key) == value for key, value in conditions.items()):
                    found.append(row)
                    if len(found) >= count:
                        return found
    return found


def _print_pages(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if not rows:
        print("no page meets the conditions", file=sys.stderr)
    for row in rows:
        if as_json:
            print(json.dumps(row, ensure_ascii=False))
            continue
        perplexity = row.get("perplexity")
        print(f"{row['url']}")
        print(
            f"  {row['language']} {row['language_score']:.2f}  {row.get('bucket', '')}"
            f"  perplexity {'-' if perplexity is None else f'{perplexity:.1f}'}"
            f"  {row['chars']:,} characters,"
            f" {len(row['line_ids'])} of {row['original_lines']} lines"
        )
        text = row["text"]
        shown = text[:_PREVIEW_CHARS] + (" …" if len(text) > _PREVIEW_CHARS else "")
        print("\n".join(f"    {line}" for line in shown.split("\n")))
        print()


def _parquet(target: str, *, as_json: bool, conditions: dict[str, str], count: int) -> int:
    try:
        with files.mapped(target) as data:
            metadata = pq.read_metadata(pa.BufferReader(data))
            schema = pq.read_schema(pa.BufferReader(data))
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"'{target}' is no readable Parquet file: {error}") from None
    if not as_json:
        print(
            f"{Path(target).name}: {metadata.num_rows:,} rows, {metadata.num_row_groups} row groups"
        )
        print("columns: " + ", ".join(f"{field.name} {field.type}" for field in schema))
        print()
    if {"url", "text", "line_ids"} <= set(schema.names):
        _print_pages(_matching(target, conditions, count), as_json=as_json)
    else:
        missing = sorted(set(conditions) - set(schema.names))
        if missing:
            raise UserError(f"--sample: '{target}' has no column '{missing[0]}'")
        for row in _matching(target, conditions, count):
            print(json.dumps(row, ensure_ascii=False, default=str))
    return 0


def _wet(target: str, *, as_json: bool, count: int) -> int:
    with files.mapped(target) as data:
        reader = WetReader(data)
        shown: list[tuple[Record, str]] = []
        languages: Counter[str] = Counter()
        characters = 0
        for record in reader:
            text = record.body.decode("utf-8", "replace")
            characters += len(text)
            languages[record.identified_language or "-"] += 1
            if len(shown) < count:
                shown.append((record, text))
    counts = reader.counts
    if as_json:
        print(json.dumps({
            "records": {"read": counts.read, "not_pages": counts.not_pages, "lost": counts.lost,
                        "length_corrected": counts.length_corrected},
            "characters": characters,
            "losses": [[loss.offset, loss.bytes, loss.reason] for loss in reader.losses],
            "identified_languages": dict(languages.most_common()),
        }))  # fmt: skip
        return 0
    print("\n".join(_wet_summary(target, reader, characters)))
    for record, text in shown:
        print(f"\n{record.url}  (offset {record.warc_offset:,}, {len(record.body):,} bytes)")
        print("\n".join(f"    {line}" for line in text[:_PREVIEW_CHARS].split("\n")))
    return 0


def _wet_summary(target: str, reader: WetReader, characters: int) -> Iterator[str]:
    counts = reader.counts
    yield (
        f"{Path(target).name}: {counts.read:,} pages, {characters:,} characters, "
        f"{counts.not_pages:,} other records, {counts.lost:,} lost, "
        f"{counts.length_corrected:,} with a corrected length"
    )
    for loss in reader.losses:
        yield f"lost: {loss.bytes:,} bytes at {loss.offset:,}: {loss.reason}"
