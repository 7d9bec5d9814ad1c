"""Inputs that go, change or cannot be read: named, never mixed in silently, limited in number."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from models.errors import UserError
from models.files import xxh3_file
from pipelines.arrays import open_arrays
from pipelines.crawl import CrawlFile, CrawlManifest
from pipelines.hashing import input_bytes
from pipelines.recipe import load_recipe
from tests.pipelines.fault_runs import Running, Runs, before_file, contents
from tests.pipelines.test_identity import pages
from tests.pipelines.wet_files import write_wet


@pytest.fixture
def own(shards: list[Path], tmp_path: Path) -> list[Path]:
    """Inputs of a test's own."""
    folder = tmp_path / "in"
    folder.mkdir()
    return [Path(shutil.copy(path, folder)) for path in shards]


_ONE_HASHED = before_file("/timings/hash/")


def first_hashed(running: Running, inputs: list[Path], output: Path) -> Path:
    """Wait until pass 1 is done with one file; three others and pass 2 are to come."""
    running.paused()
    keys = next(output.glob(".staging/keys/[!.]*"))
    with open_arrays(keys) as file:
        (found,) = [path for path in inputs if xxh3_file(path) == file.header["xxh3"]]
    return found


def test_a_file_that_changes_during_the_run(runs: Runs, own: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "output"
    running = runs.start(own, output, pause=_ONE_HASHED)
    changed = first_hashed(running, own, output)
    write_wet(tmp_path / "new", pages("abcdefgh")).replace(changed)
    running.go_on()
    ended = running.end()
    assert ended.code == 1
    assert ended.lines() == [
        f"gristmill: fault: input '{changed.name}': changed during the run; the next run takes it "
        "as it then is; repair it and run the same command again to go on"
    ]
    assert not (output / "manifest.json").exists()
    runs.finish(own, output)
    runs.finish(own, tmp_path / "fresh")
    assert contents(output) == contents(tmp_path / "fresh")


def test_a_file_that_goes_during_the_run(
    runs: Runs, own: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    running = runs.start(own, output, pause=_ONE_HASHED)
    gone = first_hashed(running, own, output)
    gone.rename(tmp_path / "elsewhere")
    running.go_on()
    ended = running.end()
    assert ended.code == 1
    assert ended.lines() == [
        f"gristmill: fault: input '{gone.name}': cannot be read any more (No such file or "
        "directory): put it back, or leave it out and add --restart; repair it and run the same "
        "command again to go on"
    ]
    ended = runs.run([path for path in own if path != gone], output)
    assert ended.code == 2
    assert "add --restart" in ended.stderr
    (tmp_path / "elsewhere").rename(gone)
    runs.finish(own, output)
    assert contents(output) == whole


def test_a_file_that_is_cut_while_it_is_read(own: list[Path]) -> None:
    """Reading a mapped file beyond its new end would kill the process by SIGBUS."""
    before = own[0].read_bytes()
    with input_bytes(str(own[0])) as data:
        os.truncate(own[0], 0)
        assert bytes(data) == before


def crawl_of(folder: Path, good: list[Path], lost: int, empty: int) -> Path:
    """A crawl manifest of good files, absent ones and ones without a record."""
    files = [*good, *(folder / f"lost{number}.wet.gz" for number in range(lost))]
    for number in range(empty):
        files.append(folder / f"empty{number}.wet.gz")
        files[-1].write_bytes(b"not a record, " * 20)
    crawl = CrawlManifest(
        name="x", source="x", num_shards=len(files),
        files=tuple(CrawlFile(path=path.name, url=str(path), shard=shard)
                    for shard, path in enumerate(files)),
    )  # fmt: skip
    crawl.write(folder / "crawl.json")
    return folder / "crawl.json"


def test_too_many_failed_inputs_are_listed(
    runs: Runs, own: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    crawl = crawl_of(own[0].parent, own, lost=1, empty=2)
    output = tmp_path / "output"
    listed = [
        "gristmill: input 'lost0.wet.gz' unreadable: No such file or directory",
        "gristmill: input 'empty0.wet.gz' no_record: not one WARC record (280 bytes lost)",
        "gristmill: input 'empty1.wet.gz' no_record: not one WARC record (280 bytes lost)",
    ]
    for words, allowed in ([], "1%"), (["--max-failed-shards", "2"], "2"):
        ended = runs.run([crawl], output, *words)
        assert ended.code == 1
        assert ended.stdout == ""
        *lines, last = ended.lines()
        assert lines == listed
        assert last == (
            "gristmill: fault: 3 of 7 inputs failed, more than input.max_failed_shards = "
            f"'{allowed}' allows: repair them and run the same command again to go on, or do "
            "without them (--max-failed-shards 3); no manifest is written"
        )
        assert not (output / "manifest.json").exists()
    # At the limit the run is done, from what stands there; the files are named.
    ended = runs.finish([crawl], output, "--max-failed-shards", "43%")
    assert [line for line in ended.lines() if "lost in" not in line] == [
        line.replace("gristmill:", "warning:") for line in listed
    ]
    manifest = json.loads((output / "manifest.json").read_text())
    assert [bool(entry["failed"]) for entry in manifest["inputs"]] == [False] * 4 + [True] * 3
    parts = {name for name in whole if name.startswith("pages/")}
    assert {name: contents(output)[name] for name in parts} == {name: whole[name] for name in parts}


def test_not_one_record_in_all_is_a_fault(runs: Runs, tmp_path: Path) -> None:
    crawl = crawl_of(tmp_path, [], lost=1, empty=1)
    ended = runs.run([crawl], tmp_path / "output", "--max-failed-shards", "100%")
    assert ended.code == 1
    assert ended.lines()[-1] == "gristmill: fault: not one WARC record in all inputs"


@pytest.mark.parametrize(
    ("value", "inputs", "allowed"),
    [("0", 10, 0), ("3", 2, 3), ("1%", 99, 0), ("1%", 100, 1), ("1%", 90_000, 900),
     ("0.5%", 399, 1), ("29%", 100, 29), ("100%", 7, 7), ("0%", 7, 0)],
)  # fmt: skip
def test_what_a_limit_means(value: str, inputs: int, allowed: int) -> None:
    recipe = load_recipe("default", [f'input.max_failed_shards="{value}"'])
    assert recipe.input.failed_shards_allowed(inputs) == allowed
    assert recipe.digest() == load_recipe("default").digest()


@pytest.mark.parametrize("value", ["-1", "101%", "a few", "5 %", "true", "1.5", ""])
def test_what_is_no_limit(value: str) -> None:
    with pytest.raises(UserError, match=r"max_failed_shards"):
        load_recipe("default", [f"input.max_failed_shards={value}"])
