"""The estimate of a run: what is sampled, how its terms grow, and how near it comes."""

from __future__ import annotations

import gzip
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from apache_beam.coders import FastPrimitivesCoder

from pipelines import estimate as estimate_module
from pipelines.estimate import COSTS, Estimate, estimate, table
from pipelines.hashing import hash_file
from pipelines.input_sample import ASSUMED_RATIO, sample_inputs
from pipelines.mine import Answer, Keys
from pipelines.plan import Plan, make_plan
from pipelines.recipe import load_recipe
from tests.pipelines.mining import run
from tests.pipelines.wet_files import Page, text_body, write_wet

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def plan(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("GRISTMILL_DATA", str(data_dir))
    return plan_of(data_dir / "wet_docs_small", tmp_path)


def plan_of(inputs: Path, tmp_path: Path, *settings: str) -> Plan:
    paths = [f"input.paths={inputs}/*.gz", f"output.directory={tmp_path}/out"]
    return make_plan(load_recipe("default", [*paths, *settings]))


def with_inputs(plan: Plan, **changes: object) -> Plan:
    inputs = tuple(file.model_copy(update=changes) for file in plan.inputs)
    return plan.model_copy(update={"inputs": inputs})


def test_the_sample_is_near_the_whole(plan: Plan) -> None:
    whole = sum(len(gzip.decompress(Path(file.url).read_bytes())) for file in plan.inputs)
    found = estimate(plan)
    assert found.sampled_inputs == 4
    assert found.stored_bytes == sum(file.bytes for file in plan.inputs)
    assert found.wet_bytes == pytest.approx(whole, rel=0.05)
    assert found.scored_share == 0  # no models
    assert "language models" not in table(found)


def test_one_gzip_member_is_sampled_from_its_beginning(tmp_path: Path, plan: Plan) -> None:
    text = gzip.decompress(b"".join(Path(file.url).read_bytes() for file in plan.inputs))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one.gz").write_bytes(gzip.compress(text))
    single = plan_of(tmp_path / "in", tmp_path)
    stored = single.inputs[0].bytes
    assert stored > 2 * (512 << 10)
    assert sample_inputs(single).ratio == pytest.approx(len(text) / stored, rel=0.25)


def test_without_a_sample_the_ratio_is_assumed(plan: Plan) -> None:
    remote = with_inputs(plan, url="s3://bucket/a.warc.wet.gz", bytes=70_000_000)
    found = estimate(remote)
    assert (found.sampled_inputs, found.compression_ratio) == (0, ASSUMED_RATIO)
    assert found.wet_bytes == round(4 * 70e6 * ASSUMED_RATIO)
    assert any("no input could be sampled" in warning for warning in found.warnings)
    gone = with_inputs(plan, url="/nowhere/a.gz")
    assert estimate(gone).compression_ratio == ASSUMED_RATIO
    unknown = with_inputs(plan, url="s3://bucket/a.warc.wet.gz", bytes=0)
    found = estimate(unknown)
    assert found.wet_bytes == 0
    assert found.warnings[0].startswith("4 inputs do not tell their size")


def test_memory_is_set_by_ranges_and_the_largest_input(plan: Plan) -> None:
    judge, largest = "judge: keys of one range", "clean: largest input"
    found = estimate(plan)
    more_ranges = estimate(plan.model_copy(update={"ranges": 8}))
    assert more_ranges.memory_bytes[judge] == pytest.approx(found.memory_bytes[judge] / 8, abs=1)
    assert more_ranges.memory_bytes[largest] == found.memory_bytes[largest]
    # Four times as many inputs, and as many more ranges: a worker needs what it needed.
    many = plan.model_copy(update={"inputs": plan.inputs * 4, "ranges": 4})
    assert estimate(many).worker_bytes == pytest.approx(found.worker_bytes, rel=0.01)
    windows = [file.model_copy(update={"group": file.index}) for file in plan.inputs]
    alone = estimate(plan.model_copy(update={"inputs": tuple(windows)}))
    assert alone.dedup_groups == 4
    assert alone.memory_bytes[judge] < 0.4 * found.memory_bytes[judge]


def test_time_falls_with_workers_but_not_below_the_pieces(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(estimate_module, "machine_factor", lambda: 2.0)
    # 10 GB for each of the 4 inputs; 16 ranges
    large = with_inputs(plan, bytes=10**10).model_copy(update={"ranges": 16})

    def wall_s(workers: int) -> float:
        recipe = large.recipe
        settings = recipe.run.model_copy(update={"workers": workers})
        recipe = recipe.model_copy(update={"run": settings})
        return estimate(large.model_copy(update={"recipe": recipe})).wall_s

    one = estimate(large)
    assert one.wall_s == pytest.approx(sum(one.cpu_s.values()))
    assert wall_s(2) == pytest.approx(one.wall_s / 2, rel=0.01)
    least = (one.cpu_s["hash"] + one.cpu_s["clean"]) / 4
    assert least < wall_s(64) < least * 1.1


def test_shuffle_bytes(plan: Plan) -> None:
    found = estimate(plan)
    recipe = plan.recipe.model_copy(
        update={"run": plan.recipe.run.model_copy(update={"exchange": "shuffle"})}
    )
    through = estimate(plan.model_copy(update={"recipe": recipe}))
    paths = 4 * plan.ranges * (COSTS.reference_bytes - COSTS.block_bytes)
    more = through.shuffle_bytes - found.shuffle_bytes
    assert more == pytest.approx(8.4 * found.keys - paths, abs=1)


def test_what_is_shuffled_has_the_size_that_the_estimate_takes() -> None:
    coder = FastPrimitivesCoder()
    path = f"/data/crawl/mined/.staging/keys/{'0' * 32}.keys"

    def size(*element: object) -> int:
        return len(coder.encode(element))

    assert COSTS.reference_bytes == pytest.approx(size((0, 5), tuple(Keys(777, path))), rel=0.1)
    assert COSTS.block_bytes == pytest.approx(size((0, 5), tuple(Keys(777))), rel=0.1)
    answer = Answer(5, 777, "", "", 1000)
    assert COSTS.answer_bytes == pytest.approx(size(777, tuple(answer)), rel=0.1)


def test_a_disk_that_is_too_small_is_named(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert estimate(plan).warnings == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 9, 100_000))
    (warning,) = estimate(plan).warnings
    assert warning.startswith(f"the disk of '{plan.staging}' and '{plan.recipe.output.directory}'")
    assert "has 100 kB free" in warning
    remote = plan.model_copy(update={"staging": "s3://bucket/staging"})
    found = estimate(remote)
    assert found.staging.free_bytes is None
    assert [warning.split(" has ")[0] for warning in found.warnings] == [
        f"the disk of '{plan.recipe.output.directory}'"
    ]


def test_the_estimate_is_near_the_run(plan: Plan, tmp_path: Path) -> None:
    expected = estimate(plan)
    urls = [Path(file.url) for file in plan.inputs]
    manifest = run(urls, tmp_path / "out", "run.keep_staging=true")
    staging = Path(plan.staging)
    staged = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
    written = sum(part.bytes for part in manifest.outputs)
    assert expected.paragraphs == pytest.approx(manifest.counts.paragraphs.read, rel=0.15)
    # These shards are small and repeat little: what dedup keeps is taken from larger ones.
    assert 0.5 < expected.staging.needed_bytes / staged < 2
    assert 0.5 < expected.output.needed_bytes / written < 2


def test_unreadable_inputs_do_not_stop_the_estimate(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_DATA", str(data_dir))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "bad.gz").write_bytes(os.urandom(1000))
    write_wet(
        tmp_path / "in" / "good.gz",
        [Page(f"http://{n}.example/", text_body(n, 300)) for n in range(50)],
    )
    plan = plan_of(tmp_path / "in", tmp_path)
    found = estimate(plan)
    assert found.sampled_inputs == 1
    good = plan.inputs[1]
    with gzip.open(good.url) as file:
        assert found.compression_ratio == pytest.approx(len(file.read()) / good.bytes, rel=0.3)
    assert hash_file(plan, good)  # the plan itself is sound


def test_table(plan: Plan) -> None:
    found = Estimate.model_validate(
        {
            "inputs": 90_000, "inputs_of_unknown_size": 0, "stored_bytes": 6_300_000_000_000,
            "wet_bytes": 16_380_000_000_000, "sampled_inputs": 0, "compression_ratio": 2.6,
            "paragraphs": 182_000_000_000, "keys": 109_000_000_000, "dedup_groups": 1,
            "ranges": 4096, "kept_bytes": 9_800_000_000_000, "scored_share": 0.5,
            "machine_factor": 1.25, "cpu_s": {"hash": 7300.0, "judge": 90.0, "clean": 360_000.0},
            "workers": 2, "wall_s": 183_000, "memory_bytes": {"base": 250_000_000, "batch": 0},
            "worker_bytes": 1_500_000_000, "runner_bytes": 0, "shuffle_bytes": 14_000_000_000,
            "shuffle_bytes_per_key": 0.1284,
            "staging": {"url": "s3://b/x", "needed_bytes": 5e12, "free_bytes": None},
            "output": {"url": "/o", "needed_bytes": 4e12, "free_bytes": 1_234_000_000},
            "warnings": ["the disk is too small"],
        }
    )  # fmt: skip
    assert table(found).split("\n") == [
        "input           90,000 WET files, 6.3 TB stored",
        "text            16.4 TB                           2.60 times the stored bytes, assumed",
        "CPU             102.1 h                           hash 2.0 h, judge 90.0 s, clean 100.0 h",
        "time            50.8 h                            2 workers, nothing else on the machine",
        "RAM per worker  1.5 GB                            base 250 MB",
        "ranges (K)      4,096                             dedup groups: 1",
        "shuffle         14 GB                             0.13 for each distinct key of a file",
        "staging disk    5.0 TB                            free space not known, 's3://b/x'",
        "output disk     4.0 TB                            1.23 GB free, '/o'",
        f"(an estimate: costs measured on {estimate_module.MACHINE}, this machine takes 1.25 times "
        "as long)",
        "warning: the disk is too small",
    ]
