"""What workers can reach: whole paths, models where they are fetched, one clear line otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from models.files import sha256_file
from pipelines.engine import exchange_of, make_pipeline, slices_of
from pipelines.places import check_places, plan_for_workers, workers_share_this_machine
from pipelines.plan import InputFile, LanguageModel, ModelFile, Plan
from pipelines.recipe import MineRecipe

PORTABLE = ["--runner=PortableRunner", "--job_endpoint=far:1"]
FLINK = ["--runner=FlinkRunner"]
SPARK = ["--runner=SparkRunner"]
HERE = {
    "local": [],
    "loopback": [*PORTABLE, "--environment_type=LOOPBACK"],
    "pool on this host": [
        *PORTABLE, "--environment_type=EXTERNAL", "--environment_config=localhost:5",
    ],
    "own Flink": FLINK,
    "own Spark": SPARK,
    "own Dask": ["--runner=DaskRunner"],
    "Dask on this host": ["--runner=DaskRunner", "--dask_client_address=tcp://127.0.0.1:5"],
}  # fmt: skip
ELSEWHERE = {
    "containers": PORTABLE,
    "pool on another host": [
        *PORTABLE, "--environment_type=EXTERNAL", "--environment_config=far:5",
    ],
    "Flink cluster": [*FLINK, "--flink_master=far:8081"],
    "Flink cluster, processes": [
        *FLINK, "--environment_type=PROCESS", '--environment_config={"command": "x"}',
    ],
    "Spark cluster": [*SPARK, "--spark_master_url=spark://far:7077"],
    "Dask on another host": ["--runner=DaskRunner", "--dask_client_address=tcp://far:5"],
    "Dask by a file": ["--runner=DaskRunner", "--dask_scheduler_file=/shared/scheduler.json"],
}  # fmt: skip


def pipeline_on(options: list[str]) -> Any:
    if any("Dask" in option for option in options):
        pytest.importorskip("distributed", reason="needs the extra 'dask'")
    return make_pipeline(1, options)


def plan_of(staging: str, output: str, models: str | None, folder: Path) -> Plan:
    def model(name: str) -> ModelFile:
        path = folder / name
        path.write_text(f"the model {name}")
        return ModelFile(name=name, path=str(path), sha256=sha256_file(path))

    recipe = MineRecipe.model_validate(
        {"output": {"directory": output}, "quality": {"models": models},
         "run": {"staging": staging}, "dedup": {"index_out": "idx"}}
    )  # fmt: skip
    pair = LanguageModel(tokenizer=model("bn.sp.model"), ngram=model("bn.arpa.bin"))
    file = InputFile(index=0, name="a", url="gs://in/a", bytes=1, shard=0, group=0)
    return Plan(
        recipe=recipe, inputs=(file,), language_id=model("lid"), language_models={"bn": pair},
        cutoffs=None, index_in_xxh3=None, ranges=1, staging=recipe.staging_directory(),
    )  # fmt: skip


@pytest.mark.parametrize("engine", [*HERE, *ELSEWHERE])
def test_where_the_workers_are(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = engine in HERE
    pipeline = pipeline_on((HERE | ELSEWHERE)[engine])
    assert workers_share_this_machine(pipeline) == here
    capsys.readouterr()
    check_places(pipeline, plan_of("s", "out", None, tmp_path))
    said = capsys.readouterr().err
    expected = "" if here else "warning: output.directory = 'out' is a local path: the workers of "
    assert said.startswith(expected)
    assert said.count("\n") == (not here)


def test_how_keys_are_exchanged(tmp_path: Path) -> None:
    local, portable = pipeline_on([]), pipeline_on(HERE["loopback"])
    on_disk = plan_of(str(tmp_path / "s"), "out", None, tmp_path)
    remote = plan_of("memory://s", "out", None, tmp_path)
    assert exchange_of(local, on_disk) == "files"
    assert exchange_of(local, remote) == "files"
    assert exchange_of(portable, on_disk) == "shuffle"
    for choice in ("files", "shuffle"):
        run = on_disk.recipe.run.model_copy(update={"exchange": choice})
        recipe = on_disk.recipe.model_copy(update={"run": run})
        chosen = on_disk.model_copy(update={"recipe": recipe})
        assert exchange_of(local, chosen) == exchange_of(portable, chosen) == choice


def test_only_dask_begins_with_many_elements() -> None:
    assert slices_of(pipeline_on([])) == slices_of(pipeline_on(FLINK)) == 1
    assert slices_of(pipeline_on(["--runner=DaskRunner"])) == 16
    assert slices_of(pipeline_on(["--runner=DaskRunner", "--dask_npartitions=5"])) == 5


def test_workers_here_get_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_of("s", "out", "lm", tmp_path)
    given = plan_for_workers(pipeline_on(HERE["loopback"]), plan)
    assert given.staging == f"{tmp_path}/{plan.staging}"
    assert given.recipe.output.directory == f"{tmp_path}/out"
    assert given.recipe.dedup.index_out == f"{tmp_path}/idx"
    assert given.language_id.path == plan.language_id.path
    assert given.digest() == plan.digest()
    assert plan_for_workers(pipeline_on([]), plan) == plan


@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "object store"])
def test_workers_elsewhere_find_the_models_in_staging(shared: bool, tmp_path: Path) -> None:
    staging = str(tmp_path / "s") if shared else f"memory://{tmp_path.name}-staging"
    plan = plan_of(staging, "gs://bucket/out", "lm", tmp_path)
    cluster = pipeline_on(ELSEWHERE["pool on another host"])
    given = plan_for_workers(cluster, plan)
    for before, after in (
        (plan.language_id, given.language_id),
        (plan.language_models["bn"].ngram, given.language_models["bn"].ngram),
    ):
        assert after.path == f"{plan.staging}/models/{before.sha256}/{before.name}"
        assert sha256_file(after.path) == before.sha256
    assert given.digest() == plan.digest()
    assert plan_for_workers(cluster, plan) == given  # what is there stays


def test_workers_elsewhere_take_models_from_their_url(tmp_path: Path) -> None:
    plan = plan_of(f"memory://{tmp_path.name}", "gs://bucket/out", "gs://bucket/lm", tmp_path)
    given = plan_for_workers(pipeline_on(ELSEWHERE["containers"]), plan)
    assert given.language_models["bn"].ngram.path == "gs://bucket/lm/bn.arpa.bin"
    assert given.language_id.path.startswith("memory://")


def test_dataflow_takes_no_path_of_this_machine(tmp_path: Path) -> None:
    class DataflowRunner:
        pass

    class Pipeline:
        runner = DataflowRunner()

    with pytest.raises(UserError, match=r"run.staging = 's/gristmill-.*' is a path of this mach"):
        check_places(Pipeline(), plan_of("s", "gs://bucket/out", None, tmp_path))
