"""Staging files: what one WET file leaves of pages, in rows sorted by language, scored.

A language's rows stand in row groups of their own, so that the regroup pass reads just those of
its language. Beside it stands, if asked for, the list of the pages that were dropped.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from models import files, remote
from models.errors import Fault, GristmillError
from models.ngram import PageScorer
from pipelines.buckets import histogram
from pipelines.pages import Page
from pipelines.plan import Plan

STAGING_SCHEMA = pa.schema(
    [
        ("url", pa.string()),
        ("host", pa.string()),
        ("date", pa.string()),
        ("digest", pa.string()),
        ("record_id", pa.string()),
        ("warc_file", pa.string()),
        ("warc_offset", pa.int64()),
        ("language", pa.string()),
        ("language_score", pa.float64()),
        ("perplexity", pa.float64()),
        ("title", pa.string()),
        ("text", pa.string()),
        ("line_ids", pa.list_(pa.int32())),
        ("original_lines", pa.int32()),
        ("original_bytes", pa.int64()),
        ("chars", pa.int32()),
    ]
)
DROPS_SCHEMA = pa.schema(
    [
        ("url", pa.string()),
        ("record_id", pa.string()),
        ("warc_file", pa.string()),
        ("warc_offset", pa.int64()),
        ("reason", pa.string()),
        ("language", pa.string()),
        ("language_score", pa.float64()),
        ("chars", pa.int32()),
    ]
)
_ROW_GROUP_PAGES = 1024
_TAIL_BYTES = 64 << 10
"""What Arrow reads of the end of a file to find its footer."""
# Nearly every address is of this kind; urlsplit takes 50 times as long.
_USUAL_HOST = re.compile(r"https?://([a-z0-9.-]+)(?::[0-9]+)?(?=[/?#]|$)")

RowGroup = dict[str, Any]
"""Of one row group: language, pages, bytes of text, histogram of perplexities as pairs."""


def rows_of(
    pages: Sequence[Page],
    texts: list[str],
    line_ids: Sequence[np.ndarray],
    languages: list[str],
    scores: list[float],
    *,
    warc_file: str,
) -> pa.Table:
    """A row for each page, not scored yet. line_ids: int32, of the paragraphs that stay."""
    records = [page.record for page in pages]
    starts = np.cumsum([0, *(ids.size for ids in line_ids)])
    flat = np.concatenate([np.empty(0, np.int32), *line_ids])
    count = len(pages)
    columns = {
        "url": [record.url for record in records],
        "host": [host_of(record.url) for record in records],
        "date": [record.date for record in records],
        "digest": [record.digest for record in records],
        "record_id": [record.record_id for record in records],
        "warc_file": [warc_file] * count,
        "warc_offset": [record.warc_offset for record in records],
        "language": languages,
        "language_score": scores,
        "perplexity": pa.nulls(count, pa.float64()),
        "title": [page.title for page in pages],
        "text": texts,
        "line_ids": pa.ListArray.from_arrays(pa.array(starts, pa.int32()), pa.array(flat)),
        "original_lines": [len(page.lines) for page in pages],
        "original_bytes": [len(record.body) for record in records],
        "chars": [len(text) for text in texts],
    }
    return pa.table(columns, schema=STAGING_SCHEMA)


def write_staging(plan: Plan, tables: list[pa.Table], url: str) -> tuple[list[RowGroup], str]:
    """Score the rows of `tables` and write them; gives the row groups and the file's XXH3.

    Empties `tables`: their text is held once.
    """
    table = pa.concat_tables([STAGING_SCHEMA.empty_table(), *tables])
    tables.clear()
    order = pc.sort_indices(table["language"].combine_chunks())  # stable
    table = table.combine_chunks().take(order)
    row_groups: list[RowGroup] = []
    with files.atomic_path(url, durable=False) as temporary:
        with pq.ParquetWriter(
            temporary, STAGING_SCHEMA, compression="zstd", compression_level=1,
            use_dictionary=["host", "language", "warc_file"], write_page_checksum=True,
        ) as writer:  # fmt: skip
            runs = pc.run_end_encode(table["language"].combine_chunks())
            first = 0
            for language, last in zip(
                runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True
            ):
                for start in range(first, last, _ROW_GROUP_PAGES):
                    rows = table.slice(start, min(_ROW_GROUP_PAGES, last - start))
                    row_groups.append(_write_row_group(plan, writer, language, rows))
                first = last
        return row_groups, files.xxh3_file(temporary)


def _write_row_group(
    plan: Plan, writer: pq.ParquetWriter, language: str, rows: pa.Table
) -> RowGroup:
    perplexities = np.full(rows.num_rows, np.nan)
    model = plan.language_models.get(language)
    if model is not None:
        scorer = PageScorer(
            model.tokenizer.local(),
            model.ngram.local(),
            plan.recipe.quality.profile,
            min_chars=plan.recipe.quality.min_chars,
        )
        perplexities = scorer.score(rows["text"].to_pylist())
        column = pa.array(perplexities, mask=np.isnan(perplexities))
        rows = rows.set_column(rows.schema.get_field_index("perplexity"), "perplexity", column)
    writer.write_table(rows, row_group_size=rows.num_rows)
    return {
        "language": language,
        "pages": rows.num_rows,
        "bytes": pc.sum(pc.binary_length(rows["text"])).as_py(),
        "histogram": sorted(histogram(perplexities).items()),
    }


def read_row_groups(url: str, xxh3: str, groups: Sequence[int]) -> Iterator[pa.Table]:
    """The row groups `groups` of a staging file; of a remote one, nothing else is fetched.

    xxh3: the file's. Raises Fault, naming the file, when it cannot be read or is damaged.
    """
    with _named(url), contextlib.ExitStack() as stack:
        metadata = _footer(url, xxh3)
        last = metadata.row_group(metadata.num_row_groups - 1)
        remote_file = None if files.is_local(url) else _Piece(_bounds(last)[1])
        # pre_buffer=False: with it, pyarrow 25 now and then aborts at process exit
        staged = stack.enter_context(
            pq.ParquetFile(
                remote_file or pa.BufferReader(stack.enter_context(files.mapped(url))),
                metadata=metadata,
                pre_buffer=False,
                page_checksum_verification=True,
            )
        )
        for group in groups:
            if remote_file is not None:
                start, stop = _bounds(metadata.row_group(group))
                remote_file.hold(start, remote.read(url, start, stop))
            yield staged.read_row_group(group, use_threads=False)


def read_drops(url: str) -> pa.Table:
    """What `write_drops` wrote. Raises Fault, naming the file, when that cannot be read."""
    with _named(url), files.mapped(url) as data:
        return pq.read_table(pa.BufferReader(data), pre_buffer=False, use_threads=False)


@contextlib.contextmanager
def _named(url: str) -> Iterator[None]:
    """What Arrow says of a damaged file, which names none, as a Fault that does."""
    try:
        yield
    except GristmillError:
        raise
    except (pa.ArrowInvalid, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).split("\n", 1)[0]
        raise Fault(
            f"staging file '{url}' cannot be read ({reason}); the next run makes it anew if need be"
        ) from error


@functools.lru_cache(maxsize=16)  # with 160 languages each takes 3 MB
def _footer(url: str, xxh3: str) -> pq.FileMetaData:
    """The footer of a staging file, which every language in it asks for.

    xxh3: only part of the cache's key, so that a file made anew is read anew.
    """
    with files.ranged(url) as file:
        end = file.size_bytes
        footer_bytes = int.from_bytes(file.read(max(end - 8, 0), max(end - 4, 0)), "little")
        start = max(end - max(footer_bytes + 8, _TAIL_BYTES), 0)
        tail = _Piece(end)
        tail.hold(start, file.read(start, end))
        return pq.read_metadata(tail)


def _bounds(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """Where a row group begins and ends in its file: its columns stand one behind the other."""
    columns = [group.column(number) for number in range(group.num_columns)]
    starts = [
        offset
        for column in columns
        for offset in (column.dictionary_page_offset, column.data_page_offset)
        if offset is not None
    ]
    return min(starts), min(starts) + sum(column.total_compressed_size for column in columns)


class _Piece(io.RawIOBase):
    """A file of which one piece is held at a time, for Arrow to read in."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self.hold(0, b"")

    def hold(self, start: int, data: bytes | memoryview) -> None:
        """Let go of the last piece, and take `data`, which begins at `start` of the file."""
        self._start, self._data = start, data
        self._place = start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size_bytes}
        self._place = bases[whence] + offset
        return self._place

    def read(self, size: int = -1) -> bytes:
        first = self._place - self._start
        if first < 0:
            raise OSError(f"byte {self._place:,} lies outside of what its footer tells")
        last = len(self._data) if size < 0 else first + size
        found = bytes(self._data[first:last])
        self._place += len(found)
        return found


def write_drops(drops: list[dict[str, Any]], url: str) -> str:
    """Write the list of dropped pages; gives the file's XXH3."""
    with files.atomic_path(url, durable=False) as temporary:
        pq.write_table(pa.Table.from_pylist(drops, DROPS_SCHEMA), temporary)
        return files.xxh3_file(temporary)


def host_of(url: str) -> str:
    """The host of an address, lower case, without user and port; "" when there is none."""
    usual = _USUAL_HOST.match(url)
    if usual is not None:
        return usual[1]
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
