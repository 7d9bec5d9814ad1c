"""Whole runs on every kind of input: damaged, odd, empty, remote, earlier crawls, CCNet's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.crawl import CrawlFile, CrawlManifest
from pipelines.recipe import load_recipe
from pipelines.run import mine
from scripts.inspection import verify_manifest
from tests.pipelines.mining import NO_LANGUAGE_FILTER, rows_of, run
from tests.pipelines.test_wet_real import EXPECTED
from tests.pipelines.wet_files import Page, member_bounds, write_wet

pytestmark = pytest.mark.usefixtures("registered_models")


NAMES = ("river", "mill", "school", "bridge", "market", "church", "harbour", "garden")
WORDS = [f"a paragraph about the {name} of this village, long enough to stay" for name in NAMES]


def word(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def test_a_second_equal_crawl_loses_everything_a_disjoint_one_nothing(
    small: list[Path], tmp_path: Path
) -> None:
    index = tmp_path / "index"
    first = run(small[:1], tmp_path / "a", NO_LANGUAGE_FILTER, f"dedup.index_out={index}",
                "dedup.ranges=4")  # fmt: skip
    again = run(small[:1], tmp_path / "b", NO_LANGUAGE_FILTER, f"dedup.index_in={index}")
    assert first.counts.pages.written > 200
    assert again.counts.pages.written == again.counts.paragraphs.kept == 0
    assert again.outputs == ()
    assert again.counts.keys.repeated == again.counts.keys.distinct == first.counts.keys.distinct
    other = write_wet(
        tmp_path / "other.warc.wet.gz",
        [
            Page(f"http://x.example/{i}", "\n".join(f"{w} {word(i)}" for w in WORDS).encode())
            for i in range(9)
        ],
    )
    alone = run(other, tmp_path / "c", NO_LANGUAGE_FILTER)
    beside = run(other, tmp_path / "d", NO_LANGUAGE_FILTER, f"dedup.index_in={index}",
                 f"dedup.index_out={tmp_path / 'both'}")  # fmt: skip
    assert beside.counts.paragraphs == alone.counts.paragraphs
    assert alone.counts.paragraphs.kept == 9 * len(WORDS)
    both = json.loads((tmp_path / "both" / "index.json").read_text())
    keys = sum(part["keys"] for part in both["ranges"])
    assert keys == first.counts.keys.distinct + alone.counts.keys.distinct


def test_two_halves_with_an_index_are_the_whole(small: list[Path], tmp_path: Path) -> None:
    index = tmp_path / "index"
    whole = run(small, tmp_path / "whole", NO_LANGUAGE_FILTER, "dedup.common_pages=65535")
    run(small[:2], tmp_path / "one", NO_LANGUAGE_FILTER, f"dedup.index_out={index}",
        "dedup.common_pages=65535")  # fmt: skip
    two = run(small[2:], tmp_path / "two", NO_LANGUAGE_FILTER, f"dedup.index_in={index}",
              "dedup.ranges=2", "dedup.common_pages=65535")  # fmt: skip
    texts = {row["url"]: row["text"] for row in rows_of(whole, tmp_path / "whole")}
    later = {row["url"]: row["text"] for row in rows_of(two, tmp_path / "two")}
    assert later
    assert later == {url: text for url, text in texts.items() if url in later}
    assert sum(row["warc_file"] in {p.name for p in small[2:]}
               for row in rows_of(whole, tmp_path / "whole")) == len(later)  # fmt: skip


def test_damage_in_mid_shard_costs_one_record(data_dir: Path, tmp_path: Path) -> None:
    shard = sorted((data_dir / "wet_docs").glob("*.warc.wet.gz"))[0]
    bounds = member_bounds(shard.read_bytes())
    start, stop = bounds[3000]
    data = bytearray(shard.read_bytes())
    for at in range(start + 40, start + 60):
        data[at] ^= 0xFF
    damaged = tmp_path / shard.name
    damaged.write_bytes(data)
    manifest = run(damaged, tmp_path / "out", "language.max_chars=200")
    assert (len(bounds) - 1, manifest.counts.records.read) == (6079, 6078)
    assert manifest.counts.records.lost == 1
    (loss,) = manifest.losses
    assert (loss.name, loss.offset, loss.bytes) == (shard.name, start, stop - start)


def test_every_odd_file_goes_through_in_one_run(data_dir: Path, tmp_path: Path) -> None:
    paths = [
        path
        for folder in ("wet_real", "wet_odd")
        for path in sorted((data_dir / folder).iterdir())
        if path.name != "INDEX.md"
    ]
    manifest = run(paths, tmp_path, NO_LANGUAGE_FILTER, "pages.min_chars=1", "output.drops=true",
                   'input.max_failed_shards="100%"')  # fmt: skip
    names = {entry.name: entry for entry in manifest.inputs}
    assert names.keys() == {f"{path.parent.name}/{path.name}" for path in paths}
    # Failed are those without one record, of whatever kind.
    assert {name.rpartition("/")[2] for name, entry in names.items() if entry.failed} == {
        path.name for path in paths if EXPECTED[path.name][:2] == (0, 0)
    }
    # Each file's records and losses are those found by hand (test_wet_real.py).
    table = [EXPECTED[path.name] for path in paths]
    records = manifest.counts.records
    found = (records.read, records.not_pages, records.lost, records.length_corrected)
    assert found == tuple(sum(row[column] for row in table) for column in range(4))
    expected_losses = {
        (path.name, offset, size, reason)
        for path in paths
        for offset, size, reason, _ in EXPECTED[path.name][4]
    }
    assert {
        (loss.name.rpartition("/")[2], loss.offset, loss.bytes, loss.reason)
        for loss in manifest.losses
    } == expected_losses
    # Each page is in exactly one place: written, or in the drop list.
    assert manifest.drops is not None
    drops = pq.ParquetFile(tmp_path / manifest.drops.path, pre_buffer=False).read().to_pylist()
    rows = rows_of(manifest, tmp_path)
    assert len(rows) + len(drops) == records.read


def test_ccnets_figures(data_dir: Path, tmp_path: Path) -> None:
    """Measured on CCNet's own code, with the language header taken out of its way (CCNET.md §2)."""
    paths = sorted((data_dir / "wet_docs").glob("*.warc.wet.gz"))
    manifest = run(paths, tmp_path, "dedup.window_shards=4", "run.workers=2", recipe="ccnet")
    pages = manifest.counts.pages
    entered = pages.read - pages.dropped["too_short"]
    after_dedup = entered - pages.dropped["emptied_by_dedup"]
    assert manifest.counts.records.read == pages.read == 23_977
    assert (entered, after_dedup, pages.written) == (23_068, 20_210, 19_253)
    assert (
        manifest.counts.paragraphs.read - manifest.counts.paragraphs.dropped["page_too_short"]
        == 1_146_815
    )


def test_inputs_and_outputs_by_url(small: list[Path], tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in small[:2]:
        memory.pipe_file(f"/crawl/{path.name}", path.read_bytes())
    local = run(small[:2], tmp_path, "output.drops=true")
    settings = ['input.paths="memory://crawl/*.warc.wet.gz"', "output.directory=memory://mined",
                "output.drops=true"]  # fmt: skip
    manifest = mine(load_recipe("default", settings))
    assert verify_manifest(manifest, "memory://mined") == []
    assert manifest.outputs == local.outputs
    assert manifest.counts == local.counts
    assert manifest.inputs == local.inputs
    assert [path for path in memory.find("/mined") if ".staging" in path] == []
    again = mine(load_recipe("default", settings))
    assert again == manifest


def test_nothing_kept_is_normal(tmp_path: Path) -> None:
    empty = write_wet(tmp_path / "empty.warc.wet.gz", [])
    short = write_wet(tmp_path / "short.warc.wet.gz", [Page("http://a.example/", b"too short")])
    for workers in (1, 2):
        manifest = run([empty, short], tmp_path / f"out{workers}", f"run.workers={workers}")
        assert manifest.counts.pages.model_dump() == {
            "read": 1, "written": 0, "dropped": {"too_short": 1},
        }  # fmt: skip
        assert manifest.outputs == ()


def test_an_unreadable_file_is_named_and_the_rest_kept(small: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    good_path = folder / "good.warc.wet.gz"
    gone_path = folder / "late.warc.wet.gz"
    shutil.copy(small[0], good_path)
    crawl = CrawlManifest(
        name="x", source="x", num_shards=2,
        files=tuple(CrawlFile(path=path.name, url=str(path), shard=shard)
                    for shard, path in enumerate([good_path, gone_path])),
    )  # fmt: skip
    crawl.write(folder / "crawl.json")
    good = run(good_path, tmp_path / "a")
    both = run(folder / "crawl.json", tmp_path / "b", "input.max_failed_shards=1")
    assert both.counts == good.counts
    assert [entry.failed for entry in both.inputs] == ["", "unreadable: No such file or directory"]
    # When the file is there after all, the same command takes it in.
    shutil.copy(small[1], gone_path)
    (tmp_path / "c").mkdir()
    whole = run([good_path, gone_path], tmp_path / "c")
    later = run(folder / "crawl.json", tmp_path / "b", "dedup.scope=crawl")
    assert later.counts == whole.counts
    assert later.outputs == whole.outputs


def test_perplexity_and_buckets_are_ccnets(
    golden_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    golden = json.loads((golden_dir / "ccnet_golden.json").read_text())
    docs = [doc for doc in golden["perplexity"]["docs"] if doc["raw_content"]]
    shard = write_wet(
        tmp_path / "docs.warc.wet.gz",
        [Page(f"http://x.example/{i}", f"title\n{doc['raw_content']}\n".encode())
         for i, doc in enumerate(docs)],
    )  # fmt: skip
    manifest = run(
        shard, tmp_path / "out", NO_LANGUAGE_FILTER, "pages.min_chars=1", "dedup.within_page=all",
        f"quality.models={golden_dir / 'ccnet_golden_model'}", "pages.max_unreadable=1",
        f"quality.cutoffs={data_dir / 'models' / 'ccnet_cutoff.csv'}", recipe="ccnet",
    )  # fmt: skip
    assert manifest.cutoffs == {"en": (340.0, 520.0)}
    scored = 0
    for row in rows_of(manifest, tmp_path / "out"):
        doc = docs[int(row["url"].rpartition("/")[2])]
        if row["language"] != "en":
            assert (row["perplexity"], row["bucket"]) == (None, "all")
        elif row["text"] == doc["raw_content"]:  # not shortened by dedup
            assert row["perplexity"] == doc["perplexity"]
            low, high = manifest.cutoffs["en"]
            bucket = "head" if doc["perplexity"] < low else "middle"
            assert row["bucket"] == (bucket if doc["perplexity"] < high else "tail")
            scored += 1
    assert scored >= 5
