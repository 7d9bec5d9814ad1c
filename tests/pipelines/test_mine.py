"""Whole runs on real text, against a plain Python miner; the same bytes however they are made."""

from __future__ import annotations

import gzip
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from models.errors import UserError
from pipelines.manifest import Manifest, read_manifest
from pipelines.paragraphs import normalise
from tests.pipelines.mining import NO_LANGUAGE_FILTER, rows_of, run, same_files
from tests.pipelines.wet_files import naive

pytestmark = pytest.mark.usefixtures("registered_models")


def naive_pages(path: Path, profile: str) -> Iterator[tuple[str, list[str]]]:
    """(url, lines) of each page that enters."""
    for page in naive(gzip.decompress(path.read_bytes())):
        url, body = page.url, page.body
        text = body.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
        lines = [line.strip() for line in text.split("\n")]
        if profile == "ccnet":
            lines = lines[1:]
            if lines and not lines[-1]:
                lines.pop()  # our data ends each body with a line break
        else:
            while lines and not lines[-1]:
                lines.pop()
        full = "\n".join(lines)
        controls = sum((c < " " and c not in "\t\n") or c in "\x7f\ufffd" for c in text)
        if len(full) >= 300 and controls <= 0.05 * len(full):
            yield url, lines


@cache
def naive_key(line: str, profile: Any) -> str:
    return normalise(line, profile)


def naive_mine(
    paths: list[Path], *, profile: str, group_of: Any, keep: str, common: int | None, within: str
) -> dict[tuple[str, str], tuple[str, list[int]]]:
    """What stays of each page, by (file, address), in plain Python on dictionaries."""
    pages = [
        (group_of(number), path.name, url, lines, [naive_key(line, profile) for line in lines])
        for number, path in enumerate(paths)
        for url, lines in naive_pages(path, profile)
    ]
    pages_with: Counter[tuple[int, str]] = Counter()
    for group, _, _, _, keys in pages:
        pages_with.update((group, key) for key in set(keys))
    seen: set[tuple[int, str]] = set()
    result = {}
    for group, name, url, lines, keys in pages:
        here: set[str] = set()
        mask = []
        for key in keys:
            good = (group, key) not in seen
            if keep == "none":
                good = pages_with[group, key] == 1
            elif common is not None:
                good = good and pages_with[group, key] < common
            if within == "first":
                good = good and key not in here
            if profile == "unicode":
                good = good and key != ""
            here.add(key)
            mask.append(good)
        seen |= {(group, key) for key in here}
        kept = "\n".join(compress(lines, mask))
        if kept.strip():
            result[name, url] = kept, [i for i, good in enumerate(mask) if good]
    return result


POLICIES = {
    "crawl, first, 100 pages": ("default", [], lambda n: 0, "first", 100, "first"),
    "crawl, first, 3 pages, repeats stay": (
        "default", ["dedup.common_pages=3", "dedup.within_page=all"],
        lambda n: 0, "first", 3, "all",
    ),
    "window of 2, first": (
        "docs", ["dedup.scope=window", "dedup.window_shards=2", "dedup.ranges=8"],
        lambda n: n // 2, "first", 100, "first",
    ),
    "shard of 2 files, ccnet": (
        "ccnet", ["dedup.scope=shard", "input.num_shards=2"], lambda n: n // 2,
        "none", None, "first",
    ),
    "window of 50, ccnet": ("ccnet", ["dedup.ranges=4"], lambda n: 0, "none", None, "first"),
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_a_plain_python_miner(policy: str, small: list[Path], tmp_path: Path) -> None:
    recipe, overrides, group_of, keep, common, within = POLICIES[policy]
    manifest = run(small, tmp_path, NO_LANGUAGE_FILTER, *overrides, recipe=recipe)
    profile = "ccnet" if recipe == "ccnet" else "unicode"
    expected = naive_mine(
        small, profile=profile, group_of=group_of, keep=keep, common=common, within=within
    )
    rows = rows_of(manifest, tmp_path)
    got = {(row["warc_file"], row["url"]): (row["text"], row["line_ids"]) for row in rows}
    assert len(got) == len(rows) == manifest.counts.pages.written
    assert got == expected
    assert manifest.counts.records.read == 1040
    assert manifest.counts.paragraphs.kept == sum(len(ids) for _, ids in expected.values())
    assert all(row["chars"] == len(row["text"]) for row in rows)


@pytest.fixture(scope="module")
def reference(small: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("reference")
    return folder, run(small, folder, "output.drops=true", "dedup.ranges=2")


@pytest.mark.parametrize(
    ("overrides", "beam"),
    [
        (["run.workers=2"], ()),
        ([], ("--direct_runner_bundle_repeat=1",)),
        (["dedup.ranges=16"], ()),
    ],
    ids=["two workers", "each bundle twice", "sixteen ranges"],
)
def test_same_bytes(
    overrides: list[str],
    beam: tuple[str, ...],
    small: list[Path],
    reference: tuple[Path, Manifest],
    tmp_path: Path,
) -> None:
    run(small, tmp_path, "output.drops=true", "dedup.ranges=2", *overrides, beam=beam)
    if any("ranges" in override for override in overrides):
        # The number of ranges is part of the recipe, whose digest stands in each shard; what it
        # must not change is the result: the same rows in the same files.
        manifest = read_manifest(str(tmp_path))
        assert [one.path for one in manifest.outputs] == [one.path for one in reference[1].outputs]
        assert rows_of(manifest, tmp_path) == rows_of(reference[1], reference[0])
        return
    same_files(tmp_path, reference[0])


def test_rows_stand_in_crawl_order_and_lead_back_to_the_wet_file(
    reference: tuple[Path, Manifest], small: list[Path]
) -> None:
    folder, manifest = reference
    bodies = {
        (path.name, page.url): page.body
        for path in small
        for page in naive(gzip.decompress(path.read_bytes()))
    }
    for output in manifest.outputs:
        rows = pq.ParquetFile(folder / output.path, pre_buffer=False).read().to_pylist()
        places = [(row["warc_file"], row["warc_offset"]) for row in rows]
        assert places == sorted(places)
        assert {row["language"] for row in rows} == {output.language}
        for row in rows:
            body = bodies[row["warc_file"], row["url"]]
            lines = [line.strip() for line in body.decode("utf-8", "replace").split("\n")]
            assert row["text"] == "\n".join(lines[i] for i in row["line_ids"])
            assert row["title"] == lines[0]
            assert row["original_bytes"] == len(body)
            assert row["host"] in row["url"]


def test_the_drop_list_has_each_dropped_page(reference: tuple[Path, Manifest]) -> None:
    folder, manifest = reference
    assert manifest.drops is not None
    drops = pq.ParquetFile(folder / manifest.drops.path, pre_buffer=False).read().to_pylist()
    assert Counter(row["reason"] for row in drops) == manifest.counts.pages.dropped
    kept = {row["url"] for row in rows_of(manifest, folder)}
    assert kept.isdisjoint(row["url"] for row in drops)


def test_opens_in_pandas_duckdb_and_arrow(reference: tuple[Path, Manifest]) -> None:
    import duckdb
    import pandas as pd

    folder, manifest = reference
    pages = manifest.counts.pages.written
    frame = pd.read_parquet(folder / "pages", filters=[("language", "==", "bn")])
    assert len(frame) == manifest.counts.by_language["bn"].pages
    shards = f"'{folder}/pages/language=*/bucket=*/*.parquet'"
    found = duckdb.sql(f"select count(*), count(distinct language) from {shards}").fetchall()
    assert found == [(pages, len(manifest.counts.by_language))]
    assert pq.read_table(folder / "pages" / "language=bn", pre_buffer=False).num_rows == len(frame)


def test_the_manifest_has_no_time_and_no_place(
    reference: tuple[Path, Manifest], small: list[Path]
) -> None:
    text = (reference[0] / "manifest.json").read_text()
    for place in (small[0].parent, reference[0], Path.cwd()):
        assert str(place) not in text
    assert read_manifest(str(reference[0])).inputs[0].name == small[0].name


def test_running_again_does_nothing_another_recipe_is_refused(
    reference: tuple[Path, Manifest], small: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(reference[0], folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run(small, folder, "output.drops=true", "dedup.ranges=2", "run.workers=2")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    for overrides in (["pages.min_chars=200"], ["dedup.keep=none", "dedup.common_pages=2"]):
        with pytest.raises(UserError, match=r"result of another run|common_pages"):
            run(small, folder, "output.drops=true", *overrides)
    with pytest.raises(UserError, match=r"result of another run.*--restart"):
        run(small[:2], folder, "output.drops=true", "dedup.ranges=2")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_lost_part_is_made_again(
    reference: tuple[Path, Manifest], small: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(reference[0], folder)
    (folder / reference[1].outputs[3].path).unlink()
    run(small, folder, "output.drops=true", "dedup.ranges=2")
    same_files(folder, reference[0])


def test_a_staging_folder_of_the_users_keeps_what_is_in_it(
    small: list[Path], tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "precious").write_text("mine")
    run(small[:1], tmp_path / "out", f"run.staging={scratch}")
    assert [path.name for path in scratch.iterdir()] == ["precious"]
    run(small[:1], tmp_path / "kept", f"run.staging={scratch}", "run.keep_staging=true")
    (own,) = (path for path in scratch.iterdir() if path.is_dir())
    assert {"keys", "pages", "parts", "timings"} <= {path.name for path in own.iterdir()}
    same_files(tmp_path / "out", tmp_path / "kept")
