"""What makes a result the result of a run: everything that it depends on, and its own bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from models.errors import UserError
from models.files import xxh3_file
from pipelines.crawl import CrawlFile, CrawlManifest
from tests.pipelines.mining import NO_LANGUAGE_FILTER, rows_of, run, same_files
from tests.pipelines.wet_files import Page, write_wet

pytestmark = pytest.mark.usefixtures("registered_models")

TOPICS = ("river", "mill", "school", "bridge", "market", "church")


def pages(names: str) -> list[Page]:
    """A page for each letter: six paragraphs that no other letter has."""
    return [
        Page(f"http://{name}.example/",
             "\n".join(f"The {topic} of {name * 9} is told of here at length, so that it stays."
                       for topic in TOPICS).encode())
        for name in names
    ]  # fmt: skip


def written(folder: Path, *overrides: str, inputs: Path | list[Path], output: str = "out") -> int:
    manifest = run(inputs, folder / output, NO_LANGUAGE_FILTER, *overrides)
    return manifest.counts.pages.written


def test_another_index_is_another_run(tmp_path: Path) -> None:
    wet = write_wet(tmp_path / "x.warc.wet.gz", pages("abc"))
    other = write_wet(tmp_path / "y.warc.wet.gz", pages("cde"))
    index, disjoint = f"{tmp_path}/abc", f"{tmp_path}/none"
    assert written(tmp_path, f"dedup.index_out={index}", inputs=wet, output="1") == 3
    far = write_wet(tmp_path / "z.warc.wet.gz", pages("xyz"))
    assert written(tmp_path, f"dedup.index_out={disjoint}", inputs=far, output="2") == 3
    assert written(tmp_path, f"dedup.index_in={index}", inputs=other) == 2
    with pytest.raises(UserError, match="another run"):
        written(tmp_path, f"dedup.index_in={disjoint}", inputs=other)


def test_an_index_is_written_or_refused_never_forgotten(tmp_path: Path) -> None:
    wet = write_wet(tmp_path / "x.warc.wet.gz", pages("abc"))
    index = tmp_path / "index"
    written(tmp_path, f"dedup.index_out={index}", inputs=wet)
    listing = (index / "index.json").read_bytes()
    (index / "index.json").unlink()
    written(tmp_path, f"dedup.index_out={index}", inputs=wet)
    assert (index / "index.json").read_bytes() == listing
    second = tmp_path / "second"
    written(tmp_path, f"dedup.index_out={second}", inputs=wet)
    assert (second / "index.json").read_bytes() == listing
    with pytest.raises(UserError, match="index of another run"):
        written(tmp_path, f"dedup.index_out={index}", inputs=wet, output="other")


def test_an_input_that_changed_is_mined_again(tmp_path: Path) -> None:
    wet = write_wet(tmp_path / "x.warc.wet.gz", pages("abc"))
    assert written(tmp_path, inputs=wet) == 3
    data = bytearray(wet.read_bytes())
    data[-40] ^= 0xFF  # same size, last page damaged
    wet.write_bytes(data)
    assert written(tmp_path, inputs=wet) == 2


def test_an_input_of_another_size_is_named(tmp_path: Path) -> None:
    """It may be another file altogether, so the finished output is not thrown away unasked."""
    wet = write_wet(tmp_path / "x.warc.wet.gz", pages("abc"))
    assert written(tmp_path, inputs=wet) == 3
    before = wet.stat().st_size
    write_wet(wet, pages("ab"))
    with pytest.raises(UserError) as caught:
        written(tmp_path, inputs=wet)
    assert str(caught.value) == (
        f"output '{tmp_path}/out' was made when input '{wet}' had {before:,} bytes, now it has "
        f"{wet.stat().st_size:,}: put the old file back, or choose another output folder, or add "
        "--restart to throw that away"
    )


def test_parts_that_are_not_made_again_go(tmp_path: Path) -> None:
    wet = write_wet(tmp_path / "x.warc.wet.gz", pages("abc"))
    assert written(tmp_path, inputs=wet) == 3
    size = wet.stat().st_size
    wet.write_bytes(b"\0" * size)
    anything = "input.max_failed_shards=1"
    # `run` verifies that nothing else stands there.
    assert written(tmp_path, anything, inputs=wet) == 0


@pytest.mark.parametrize("what", ["part", "drops"])
def test_a_damaged_result_is_made_again(what: str, tmp_path: Path) -> None:
    wet = write_wet(tmp_path / "x.warc.wet.gz", pages("abc"))
    written(tmp_path, "output.drops=true", inputs=wet)
    shutil.copytree(tmp_path / "out", tmp_path / "before")
    found = (tmp_path / "out").rglob("part-*.parquet" if what == "part" else "drops.parquet")
    (path,) = found
    path.write_bytes(b"")
    written(tmp_path, "output.drops=true", inputs=wet)
    same_files(tmp_path / "out", tmp_path / "before")


def test_damaged_staging_is_made_again(tmp_path: Path) -> None:
    wet = write_wet(tmp_path / "x.warc.wet.gz", pages("abc"))
    written(tmp_path, "run.keep_staging=true", inputs=wet)
    staging = tmp_path / "out" / ".staging"
    digests = {path: xxh3_file(path) for path in (tmp_path / "out").rglob("part-*")}
    for path in [*staging.glob("keys/*"), *staging.glob("pages/*.parquet")]:
        data = bytearray(path.read_bytes())
        for at in (100, len(data) // 2, len(data) - 200):
            data[at] ^= 0xFF
        path.write_bytes(data)
    (tmp_path / "out" / "manifest.json").unlink()
    written(tmp_path, "run.keep_staging=true", inputs=wet)
    assert {path: xxh3_file(path) for path in (tmp_path / "out").rglob("part-*")} == digests


def test_shards_of_crawl_manifests_add_up(tmp_path: Path) -> None:
    crawls = []
    for number in (1, 2):
        wet = write_wet(tmp_path / f"{number}.warc.wet.gz", pages("ab"))
        crawl = CrawlManifest(
            name="x", source="x", num_shards=1,
            files=(CrawlFile(path=wet.name, url=str(wet), shard=0),),
        )  # fmt: skip
        crawl.write(tmp_path / f"crawl{number}.json")
        crawls.append(tmp_path / f"crawl{number}.json")
    assert written(tmp_path, "dedup.scope=shard", inputs=crawls, output="shard") == 4
    assert written(tmp_path, inputs=crawls, output="crawl") == 2


def test_deny_and_allow_speak_of_undetermined_pages_too(tmp_path: Path) -> None:
    wet = write_wet(tmp_path / "x.warc.wet.gz", pages("abc"))
    settings = ["language.threshold=1", "language.keep_undetermined=true"]
    kept = run(wet, tmp_path / "kept", *settings)
    assert {row["language"] for row in rows_of(kept, tmp_path / "kept")} == {"und"}
    for name, rule in (("deny", 'language.deny=["und"]'), ("allow", 'language.allow=["en"]')):
        manifest = run(wet, tmp_path / name, *settings, rule)
        assert manifest.counts.pages.dropped == {"language_not_wanted": 3}


def test_odd_names_are_taken_literally(tmp_path: Path) -> None:
    folder = tmp_path / "a b[1]"
    folder.mkdir()
    wet = write_wet(folder / "x[2] ü.warc.wet.gz", pages("abc"))
    assert written(folder, inputs=wet, output="o[3]") == 3
    with pytest.raises(UserError, match="another run"):
        written(folder, "pages.min_chars=1", inputs=wet, output="o[3]")
    (folder / "o[3]" / "manifest.json").unlink()
    with pytest.raises(UserError, match="without a manifest"):
        written(folder, inputs=wet, output="o[3]")
