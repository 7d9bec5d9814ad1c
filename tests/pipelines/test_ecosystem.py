"""Other tools open a mined crawl as it is, and find in it what the manifest says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from pipelines.manifest import Manifest
from pipelines.regroup import PAGES
from tests.pipelines.mining import NO_LANGUAGE_FILTER, rows_of, run

Counts = dict[tuple[str, str], int]


@pytest.fixture(scope="module")
def mined(
    small: list[Path],
    golden_dir: Path,
    registered_models: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Manifest, Path]:
    """A crawl of several languages, one of them in buckets and in several files."""
    folder = tmp_path_factory.mktemp("mined")
    manifest = run(
        small[:2], folder, NO_LANGUAGE_FILTER, 'language.allow=["en","de","ru","bn"]',
        f"quality.models={golden_dir / 'ccnet_golden_model'}", "output.target_bytes=100000",
    )  # fmt: skip
    assert {(output.language, output.bucket) for output in manifest.outputs} >= {
        ("en", "head"), ("en", "middle"), ("en", "tail"), ("de", "all"),
    }  # fmt: skip
    assert len(manifest.outputs) > len(listed(manifest))
    return manifest, folder


@pytest.fixture(scope="module")
def one_page(mined: tuple[Manifest, Path]) -> dict[str, Any]:
    """The last page of the largest bucket of English, as pyarrow reads it from its file."""
    rows = [row for row in rows_of(*mined) if (row["language"], row["bucket"]) == ("en", "tail")]
    return rows[-1]


def listed(manifest: Manifest) -> Counts:
    """Pages by language and bucket."""
    return {
        (language, bucket): pages
        for language, counts in manifest.counts.by_language.items()
        for bucket, pages in counts.buckets.items()
    }


def same_page(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("url", "text", "language", "bucket", "perplexity", "chars", "warc_offset"):
        assert found[name] == expected[name], name
    assert list(found["line_ids"]) == expected["line_ids"]


def test_datasets(
    mined: tuple[Manifest, Path], one_page: dict[str, Any], tmp_path: Path
) -> None:  # fmt: skip
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    manifest, folder = mined
    loaded = datasets.load_dataset(
        "parquet", data_dir=str(folder / PAGES), cache_dir=str(tmp_path), split="train"
    )
    pairs = zip(loaded["language"], loaded["bucket"], strict=True)
    assert Counter(pairs) == listed(manifest)
    (found,) = (row for row in loaded if row["url"] == one_page["url"])
    same_page(found, one_page)
    streamed = datasets.load_dataset(
        "parquet", data_dir=str(folder / PAGES), split="train", streaming=True
    )
    assert sum(1 for _ in streamed) == manifest.counts.pages.written


def test_duckdb(mined: tuple[Manifest, Path], one_page: dict[str, Any]) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    manifest, folder = mined
    with duckdb.connect() as connection:
        pages = f"read_parquet('{folder}/{PAGES}/**/*.parquet', hive_partitioning = true)"
        grouped = f"select language, bucket, count(*) from {pages} group by all"
        found = {(row[0], row[1]): row[2] for row in connection.sql(grouped).fetchall()}
        assert found == listed(manifest)
        row = connection.execute(f"select * from {pages} where url = ?", [one_page["url"]])
        names = [column[0] for column in row.description]
        same_page(dict(zip(names, row.fetchone(), strict=True)), one_page)
        chosen = f"select filename from {pages} where language = 'en' and bucket = 'tail'"
        plan = "\n".join(connection.execute(f"explain {chosen}").fetchone())
        files = sum(
            (output.language, output.bucket) == ("en", "tail") for output in manifest.outputs
        )
        # The folders' names decide which files are opened at all.
        assert f"{files}/{len(manifest.outputs)}" in plan


def test_pandas(mined: tuple[Manifest, Path], one_page: dict[str, Any]) -> None:
    manifest, folder = mined
    frame = pandas.read_parquet(folder / PAGES)
    sizes = frame.groupby(["language", "bucket"], observed=True).size()
    assert sizes.to_dict() == listed(manifest)
    (found,) = frame[frame["url"] == one_page["url"]].to_dict("records")
    same_page(found, one_page)
    tail = pandas.read_parquet(
        folder / PAGES, columns=["url"], filters=[("language", "=", "en"), ("bucket", "=", "tail")]
    )
    assert len(tail) == listed(manifest)["en", "tail"]


def test_polars(mined: tuple[Manifest, Path], one_page: dict[str, Any]) -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed")
    manifest, folder = mined
    pages = polars.scan_parquet(folder / PAGES, hive_partitioning=True)
    sizes = pages.group_by("language", "bucket").len().collect()
    assert {(language, bucket): size for language, bucket, size in sizes.rows()} == listed(manifest)
    found = pages.filter(polars.col("url") == one_page["url"]).collect()
    same_page(found.rows(named=True)[0], one_page)
    # One file alone opens too, without its folders.
    path = folder / manifest.outputs[0].path
    assert polars.read_parquet(path, hive_partitioning=False).height == manifest.outputs[0].rows


def test_arrow_sees_the_partitions(mined: tuple[Manifest, Path]) -> None:
    manifest, folder = mined
    # As pandas and `pyarrow.parquet.read_table` do it: names of folders are dictionaries.
    hive = pads.HivePartitioning.discover(infer_dictionary=True)
    found = pads.dataset(folder / PAGES, partitioning=hive)

    def keys(fragments: Iterator[Any]) -> Counter[tuple[str, str]]:
        pairs = (pads.get_partition_keys(one.partition_expression) for one in fragments)
        return Counter((pair["language"], pair["bucket"]) for pair in pairs)

    files = Counter((output.language, output.bucket) for output in manifest.outputs)
    assert keys(found.get_fragments()) == files
    chosen = (pads.field("language") == "en") & (pads.field("bucket") == "tail")
    assert keys(found.get_fragments(chosen)) == {("en", "tail"): files["en", "tail"]}


def test_each_shard_names_its_origin(mined: tuple[Manifest, Path]) -> None:
    manifest, folder = mined
    for output in manifest.outputs:
        metadata = pq.read_schema(folder / output.path).metadata
        assert metadata == {
            b"gristmill.recipe": b"default",
            b"gristmill.recipe_digest": manifest.recipe_digest.encode(),
            b"gristmill.schema_version": str(manifest.schema_version).encode(),
            b"gristmill.tool_version": manifest.tool_version.encode(),
        }
