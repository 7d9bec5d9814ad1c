"""Fixtures of the tests that mine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines.fault_runs import Runs, contents, runs_of
from tests.pipelines.wet_files import member_bounds


@pytest.fixture(scope="module")
def registered_models(data_dir: Path) -> Iterator[None]:
    """The language model comes from the shared data: nothing is fetched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_DATA", str(data_dir))
        yield


@pytest.fixture(scope="module")
def small(data_dir: Path) -> list[Path]:
    """Four small shards of real text."""
    return sorted((data_dir / "wet_docs_small").glob("*.warc.wet.gz"))


@pytest.fixture(scope="session")
def runs(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Starts whole runs that a test may break."""
    settings = [
        "language.threshold=0", 'language.allow=["en","de","ru","bn"]', "dedup.ranges=4",
        "output.target_bytes=20000", "output.drops=true",
    ]  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    with runs_of(tmp_path_factory.mktemp("runs"), data_dir, words) as started:
        yield started


@pytest.fixture(scope="session")
def shards(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four shards of real text, the beginning of each: 40 to 55 pages, the first file largest."""
    folder = tmp_path_factory.mktemp("shards")
    found = []
    for number, path in enumerate(sorted((data_dir / "wet_docs_small").glob("*.warc.wet.gz"))):
        data = path.read_bytes()
        records = 56 - 5 * number
        found.append(folder / f"{number}.warc.wet.gz")
        found[-1].write_bytes(data[: member_bounds(data)[records][0]])
    return found


@pytest.fixture(scope="session")
def kept(runs: Runs, shards: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run, with its staging files."""
    folder = tmp_path_factory.mktemp("kept")
    runs.finish(shards, folder, "--set", "run.keep_staging=true")
    return folder


@pytest.fixture(scope="session")
def whole(kept: Path) -> dict[str, bytes]:
    """What an uninterrupted run leaves: every file but the timings, with its bytes."""
    found = contents(kept)
    return {name: data for name, data in found.items() if not name.startswith(".staging/")}
