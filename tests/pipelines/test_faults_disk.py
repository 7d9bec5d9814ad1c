"""A full disk in each pass: one line that names the place, nothing partial, and the run goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from models.files import TEMPORARY_SUFFIX
from tests.pipelines.fault_runs import Runs, contents

_PAGE_BYTES = 4096
_ENOUGH = "64m"
_MESSAGE = "No space left on device"
Disk = Callable[[str, int], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Makes a file system of so many pages of 4 KiB; needs root."""
    mounted: list[Path] = []

    def make(name: str, pages: int) -> Path:
        place = tmp_path / name
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={pages * _PAGE_BYTES}", "none", str(place)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def enlarge(place: Path) -> None:
    subprocess.run(["mount", "-o", f"remount,size={_ENOUGH}", str(place)], check=True)


def pages(*found: Path) -> int:
    """Pages of 4 KiB that these files, and the files in these folders, take."""
    files = [path for place in found for path in ([place] if place.is_file() else
             place.rglob("*")) if path.is_file()]  # fmt: skip
    return sum(-(-path.stat().st_size // _PAGE_BYTES) for path in files)


def full(runs: Runs, shards: list[Path], output: Path, place: Path, *words: str) -> None:
    ended = runs.run(shards, output, *words)
    assert ended.code == 1
    (line,) = ended.lines()
    assert line.startswith("gristmill: fault: ")
    assert _MESSAGE in line
    assert f"'{place}/" in line
    assert not (output / "manifest.json").exists()
    assert not list(place.rglob(f"*{TEMPORARY_SUFFIX}"))


@pytest.mark.parametrize("name", ["plan", "hash", "clean"])
def test_staging_is_full(
    name: str, disk: Disk, runs: Runs, shards: list[Path], kept: Path, whole: dict[str, bytes],
    tmp_path: Path,
) -> None:  # fmt: skip
    staging, output = kept / ".staging", tmp_path / "output"
    keys, staged = pages(staging / "keys"), pages(staging / "pages")
    plan_and_timings = 1 + 8  # of hash and judge
    room = {"plan": 0, "hash": 1 + keys // 2, "clean": plan_and_timings + keys + staged // 2}[name]
    if name == "plan":
        place = disk("staging", 1)
        (place / "other").write_bytes(bytes(_PAGE_BYTES))  # size=0 would mean no limit
    else:
        place = disk("staging", room)
    words = ["--set", f"run.staging={place}"]
    full(runs, shards, output, place, *words)
    (own,) = place.glob("gristmill-*")
    for path in own.rglob("*.*"):
        if path.parent.name in ("keys", "pages"):
            twin = staging / path.relative_to(own)
            assert path.read_bytes() == twin.read_bytes()
    assert bool(list(own.glob("pages/*"))) == (name == "clean")
    enlarge(place)
    runs.finish(shards, output, *words)
    assert contents(output) == whole
    assert [path.name for path in place.iterdir() if path.name != "other"] == []


@pytest.mark.parametrize("name", ["regroup", "publish"])
def test_output_is_full(
    name: str, disk: Disk, runs: Runs, shards: list[Path], kept: Path, whole: dict[str, bytes],
    tmp_path: Path,
) -> None:  # fmt: skip
    parts = pages(kept / "pages")
    room = {"regroup": 1 + parts // 2, "publish": 1 + parts + 1}[name]  # 1: the claim
    place = disk("output", room)
    words = ["--set", f"run.staging={tmp_path / 'staging'}"]
    full(runs, shards, place, place, *words)
    found = {str(path.relative_to(place)) for path in place.glob("pages/*/*/*")}
    listed = {path for path in whole if path.startswith("pages/")}
    assert found == listed if name == "publish" else found < listed
    for path in found:
        assert (place / path).read_bytes() == whole[path]
    enlarge(place)
    runs.finish(shards, place, *words)
    assert contents(place) == whole


def test_the_folder_of_the_index_is_full(
    disk: Disk, runs: Runs, shards: list[Path], tmp_path: Path
) -> None:
    """Pass 2 writes nothing else."""
    runs.finish(shards, tmp_path / "fresh", "--set", f"dedup.index_out={tmp_path / 'index'}")
    place = disk("small", pages(tmp_path / "index") // 2)
    words = ["--set", f"dedup.index_out={place / 'index'}"]
    full(runs, shards, tmp_path / "output", place, *words)
    enlarge(place)
    runs.finish(shards, tmp_path / "output", *words)
    assert contents(tmp_path / "output") == contents(tmp_path / "fresh")
    assert contents(place / "index") == contents(tmp_path / "index")
