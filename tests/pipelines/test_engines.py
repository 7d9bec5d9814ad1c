"""One recipe, the same bytes on every engine, started as a user would."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pipelines.crawl import CrawlFile, CrawlManifest
from pipelines.manifest import read_manifest
from scripts.cli import main
from tests.pipelines.engine_services import dask_cluster, portable_services
from tests.pipelines.mining import same_files
from tests.pipelines.wet_files import member_bounds, write_wet

pytestmark = pytest.mark.usefixtures("registered_models")

RECORDS = 40


class Work(NamedTuple):
    """Arguments of `gristmill mine` for the same work, whatever the engine."""

    arguments: list[str]
    index_in: str


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with portable_services(tmp_path_factory.mktemp("portable")) as options:
        yield options


@pytest.fixture(scope="module")
def dask() -> Iterator[list[str]]:
    pytest.importorskip("distributed", reason="needs the extra 'dask'")
    with dask_cluster() as cluster:
        yield [
            "--runner=DaskRunner",
            f"--dask_client_address={cluster.scheduler_address}",
            "--dask_npartitions=3",
        ]


@pytest.fixture(scope="module")
def work(small: list[Path], golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Work:
    """Shards (three short, one without a page, one that is not there), models, an earlier index."""
    folder = tmp_path_factory.mktemp("work")
    paths = []
    for path in small[:3]:
        data = path.read_bytes()
        end = member_bounds(data)[RECORDS][1]
        paths.append(folder / path.name)
        paths[-1].write_bytes(data[:end])
    paths.append(write_wet(folder / "empty.warc.wet.gz", []))
    paths.append(folder / "missing.warc.wet.gz")
    crawl = folder / "crawl.json"
    entries = tuple(
        CrawlFile(path=path.name, url=str(path), shard=shard) for shard, path in enumerate(paths)
    )
    CrawlManifest(name="x", source="x", num_shards=5, files=entries).write(crawl)
    index = folder / "index"
    earlier = ["mine", "default", "--input", str(small[3]), "--output", str(folder / "earlier"),
               "--set", f"dedup.index_out={index}"]  # fmt: skip
    assert main(earlier) == 0
    arguments = ["mine", "default", "--input", str(crawl), "--max-failed-shards", "1"]
    for setting in (
        "output.drops=true", "dedup.ranges=4", "output.target_bytes=40000",
        f"quality.models={golden_dir / 'ccnet_golden_model'}",
    ):  # fmt: skip
        arguments += ["--set", setting]
    return Work(arguments, str(index))


def mined(work: Work, folder: Path, settings: list[str], *beam: str) -> Path:
    """Mine into `folder`; gives it."""
    output = ["--output", str(folder / "out"), *settings]
    assert main([*work.arguments, *output, "--", *beam]) == 0
    # It stays where an input has failed, and names the engine's choices.
    shutil.rmtree(folder / "out" / ".staging")
    return folder


WITH_INDEX = ["--set", "dedup.index_in={index_in}", "--set", "dedup.index_out={folder}/index"]


def with_index(work: Work, folder: Path) -> list[str]:
    return [word.format(index_in=work.index_in, folder=folder) for word in WITH_INDEX]


@pytest.fixture(scope="module")
def reference(work: Work, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    mined(work, folder, with_index(work, folder))
    manifest = read_manifest(str(folder / "out"))
    assert [entry.failed for entry in manifest.inputs][-1].startswith("unreadable")
    assert manifest.inputs[-2].failed == ""
    assert {"head", "middle", "tail"} <= set(manifest.counts.by_language["en"].buckets)
    assert manifest.counts.pages.written > 30
    assert manifest.counts.keys.repeated > 100
    assert manifest.index_out is not None
    return folder


ENGINES: dict[str, tuple[list[str], list[str] | str]] = {
    "in memory, keys by shuffle": (["--set", "run.exchange=shuffle"], []),
    "each bundle twice": ([], ["--direct_runner_bundle_repeat=1"]),
    "two workers": (["--workers", "2"], []),
    "portable, external pool": ([], "portable"),
    "dask, two processes": ([], "dask"),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_bytes_on(
    engine: str,
    work: Work,
    reference: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings, options = ENGINES[engine]
    beam = request.getfixturevalue(options) if isinstance(options, str) else options
    mined(work, tmp_path, [*settings, *with_index(work, tmp_path)], *beam)
    same_files(tmp_path, reference)
    assert "Traceback" not in capfd.readouterr().err


POLICIES = {
    "window of 2, none": ("ccnet", ["dedup.window_shards=2"]),
    "shard, first": ("default", ["dedup.scope=shard"]),
    "crawl, first, 2 pages": ("default", ["dedup.common_pages=2", "dedup.ranges=64"]),
}


@pytest.mark.parametrize(
    "policy",
    [
        "window of 2, none",
        pytest.param("shard, first", marks=pytest.mark.slow),
        "crawl, first, 2 pages",
    ],
)
def test_shuffled_keys_decide_as_key_files_do(policy: str, work: Work, tmp_path: Path) -> None:
    recipe, settings = POLICIES[policy]
    arguments = ["mine", recipe, *work.arguments[2:]]
    for setting in settings:
        arguments += ["--set", setting]
    same = Work(arguments, work.index_in)
    mined(same, tmp_path / "files", ["--set", "run.exchange=files"])
    mined(same, tmp_path / "shuffle", ["--set", "run.exchange=shuffle"])
    same_files(tmp_path / "files", tmp_path / "shuffle")


@pytest.mark.parametrize(
    "engine",
    ["memory", pytest.param("workers", marks=pytest.mark.slow), "portable", "dask"],
)
def test_a_fault_is_one_line(
    engine: str,
    work: Work,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    beam = request.getfixturevalue(engine) if engine in ("portable", "dask") else []
    output = ["--output", str(tmp_path), *(["--workers", "2"] if engine == "workers" else [])]
    (tmp_path / ".staging").mkdir()
    (tmp_path / ".staging" / "pages").write_text("where a folder has to be")
    assert main([*work.arguments, *output, "--", *beam]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith("gristmill: fault: input 'CC-DOCS-SMALL")
    assert "pages" in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("engine", ["memory", "portable", "dask"])
def test_workers_that_see_no_plan_say_so_in_one_line(
    engine: str,
    work: Work,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    beam = request.getfixturevalue(engine) if engine != "memory" else []

    class Elsewhere:
        def write(self) -> str:
            return "/only/here/plan.json"

    monkeypatch.setattr("pipelines.run.plan_for_workers", lambda pipeline, plan: Elsewhere())
    assert main([*work.arguments, "--output", str(tmp_path), "--", *beam]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith("gristmill: fault: a worker on '")
    assert "cannot read the plan '/only/here/plan.json' (No such file or directory)" in lines[-1]
    assert "set run.staging to a folder that all workers see" in lines[-1]
    assert not any("Traceback" in line for line in lines)


REFUSED_OPTIONS = {
    "unknown runner": (["--runner=Nope"], "unknown runner 'Nope': valid are BundleBasedDirect"),
    "no such module": (["--runner=no.such.Runner"], "--runner=no.such.Runner cannot be loaded"),
    "misspelt, local": (["--direct_numworkers=2"], "'--direct_numworkers' is no option of Beam's"),
    "misspelt, dask": (["--runner=DaskRunner", "--dask_adress=x"], "'--dask_adress' is no option"),
    "not a number": (["--direct_runner_bundle_repeat=x"], "Beam refuses"),
    "no option": (["DaskRunner"], "'DaskRunner' behind -- is no option"),
    "workers": (["--direct_num_workers=2"], "'--direct_num_workers' is set by --workers"),
}


@pytest.mark.parametrize("case", REFUSED_OPTIONS)
def test_wrong_options_are_one_line(
    case: str, work: Work, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options, message = REFUSED_OPTIONS[case]
    assert main([*work.arguments, "--output", str(tmp_path / "out"), "--", *options]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"gristmill: {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("runner", "module", "extra"),
    [("DaskRunner", "dask.distributed", "dask"),
     ("DataflowRunner", "apache_beam.runners.dataflow.dataflow_runner", "dataflow")],
)  # fmt: skip
def test_a_missing_extra_is_named(
    runner: str,
    module: str,
    extra: str,
    work: Work,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main([*work.arguments, "--output", str(tmp_path), "--", f"--runner={runner}"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"pip install 'gristmill[{extra}]'" in line


def test_the_exchange_is_no_part_of_the_digest() -> None:
    from pipelines.recipe import load_recipe

    digests = {
        load_recipe("default", [f"run.exchange={value}"]).digest()
        for value in ("auto", "files", "shuffle")
    }
    assert len(digests) == 1
