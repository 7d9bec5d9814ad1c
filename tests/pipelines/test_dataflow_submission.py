"""Mining on Dataflow as a user does it, against a local service that runs the submitted graph."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.recipe import load_recipe
from pipelines.run import mine as run_mine
from scripts.cli import EXIT_FAULT, EXIT_USER_ERROR, main
from tests.pipelines.mining import run
from tests.pipelines.wet_files import Page, text_body, write_wet

WHY = "needs the extra 'dataflow': pip install 'gristmill[dataflow]'"
pytest.importorskip("google.cloud.dataflow_v1beta3", reason=WHY)
pytest.importorskip("gcsfs", reason=WHY)
from tests.fake_dataflow import (  # noqa: E402
    FakeGoogle,
    connected,
    run_staged_graph,
    staged_graph,
)

IMAGE = "us-docker.pkg.dev/proj-one/gristmill/worker:0.1.0"
SHARDS = 2


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two shards that share pages, so that dedup has work."""
    folder = tmp_path_factory.mktemp("wet")
    return [
        write_wet(
            folder / f"{number}.warc.wet.gz",
            [Page(f"http://{number}.example/{i}", text_body(i)) for i in range(number, number + 6)],
        )
        for number in range(SHARDS)
    ]


@pytest.fixture
def cloud(
    shards: list[Path],
    registered_models: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[FakeGoogle]:
    """The services with the shards in gs://bkt/wet, and an empty cache for the worker."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    with connected() as fake:
        for path in shards:
            fake.store(f"bkt/wet/{path.name}", path.read_bytes())
        yield fake


def mine(fake: FakeGoogle, *more: str, before: tuple[str, ...] = (), inputs: str = "*.gz") -> int:
    return main([
        "mine", "default", "--input", f"gs://bkt/wet/{inputs}", "--output", "gs://bkt/mined",
        "--set", "language.threshold=0", *before, "--", *options(fake), *more,
    ])  # fmt: skip


def options(fake: FakeGoogle) -> list[str]:
    return [
        "--runner=DataflowRunner", "--project=proj-one", "--region=us-central1",
        "--temp_location=gs://bkt/tmp", f"--sdk_container_image={IMAGE}", "--no_auth",
        f"--dataflow_endpoint={fake.url}",
    ]  # fmt: skip


def stored(fake: FakeGoogle, folder: str) -> dict[str, bytes]:
    return {
        key.removeprefix(folder): data
        for key, data in fake.objects.items()
        if key.startswith(folder) and not key.endswith("timings.json")
    }


def test_a_whole_run_gives_the_bytes_of_a_local_one(
    cloud: FakeGoogle, shards: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert mine(cloud) == 0
    said = capfd.readouterr()
    assert "Dataflow job 'gristmill-bcd176d97a544452' (job-1) is submitted: https://" in said.err
    assert "gcloud dataflow jobs cancel job-1 --project=proj-one --region=us-central1" in said.err
    assert "Traceback" not in said.err
    run(shards, tmp_path / "local", "language.threshold=0")
    local = {
        str(path.relative_to(tmp_path / "local")): path.read_bytes()
        for path in (tmp_path / "local").rglob("*")
        if path.is_file() and path.name != "timings.json"
    }
    assert len(local) > 1
    assert stored(cloud, "bkt/mined/") == local  # and no staging file is left
    assert mine(cloud) == 0
    assert "already finished" in capfd.readouterr().err
    assert len(cloud.jobs) == 1


def test_the_job(cloud: FakeGoogle) -> None:
    graphs: list[Any] = []
    staging: dict[str, bytes] = {}

    def look(fake: FakeGoogle, job: dict[str, Any]) -> None:
        graphs.append(staged_graph(fake, job))
        staging.update(stored(fake, "bkt/mined/.staging/"))
        raise RuntimeError("seen enough")

    cloud.execute = look
    assert mine(cloud, "--machine_type=n2-highmem-4", "--max_num_workers=50") == EXIT_FAULT
    (job,) = cloud.jobs
    assert job["name"] == "gristmill-bcd176d97a544452"
    environment = job["environment"]
    assert "disable_logging_submission_environment" in environment["experiments"]
    (pool,) = environment["workerPools"]
    assert pool["machineType"] == "n2-highmem-4"
    assert pool["autoscalingSettings"]["maxNumWorkers"] == 50
    assert pool["numThreadsPerWorker"] == 1
    (container,) = pool["sdkHarnessContainerImages"]
    assert container["containerImage"] == IMAGE
    # One container for all processes of a worker: they share the models of its disk.
    assert "beam:protocol:sibling_workers:v1" in container["capabilities"]
    options = environment["sdkPipelineOptions"]["options"]
    assert options["sdk_location"] == "container"
    assert options["save_main_session"] is False
    assert options["number_of_worker_harness_threads"] == 1
    # Nothing to install is staged, only the graph; a worker trusts no byte that it cannot check.
    staged = [key for key in cloud.objects if key.startswith("bkt/tmp/")]
    assert [key.rpartition("/")[2] for key in staged] == ["pipeline.pb"]
    assert len(json.dumps(job)) < 20_000
    (graph,) = graphs
    assert [list(one.dependencies) for one in graph.components.environments.values()] == [[]]
    # The plan, the claim and the model stand in the staging folder, the model by its SHA-256.
    (model,) = [key for key in staging if key.startswith("models/")]
    assert hashlib.sha256(staging[model]).hexdigest() == model.split("/")[1]
    (plan,) = [json.loads(staging[key]) for key in staging if key.startswith("plan-")]
    assert plan["language_id"]["path"] == f"gs://bkt/mined/.staging/{model}"
    assert [file["url"] for file in plan["inputs"]] == [
        f"gs://bkt/wet/{number}.warc.wet.gz" for number in range(SHARDS)
    ]
    assert [file["bytes"] for file in plan["inputs"]] == [
        len(cloud.objects[f"bkt/wet/{number}.warc.wet.gz"]) for number in range(SHARDS)
    ]


def test_a_failed_job_is_named_in_one_line_and_the_next_command_goes_on(
    cloud: FakeGoogle, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(fake: FakeGoogle, job: dict[str, Any]) -> None:
        raise RuntimeError("the quota 'CPUS' is used up")

    cloud.execute = fail
    assert mine(cloud) == EXIT_FAULT
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert line == (
        "gristmill: fault: Dataflow job 'gristmill-bcd176d97a544452' (job-1) ended as FAILED: "
        "Workflow failed. Causes: the quota 'CPUS' is used up; its log: "
        "https://console.cloud.google.com/dataflow/jobs/us-central1/job-1?project=proj-one; "
        "repair it and run the same command again to go on"
    )
    cloud.execute = run_staged_graph
    assert mine(cloud) == 0
    assert [job["currentState"] for job in cloud.jobs] == ["JOB_STATE_FAILED", "JOB_STATE_DONE"]
    assert not stored(cloud, "bkt/mined/.staging")


def test_the_same_command_waits_for_the_job_that_is_at_work(
    cloud: FakeGoogle, capfd: pytest.CaptureFixture[str]
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slowly(fake: FakeGoogle, job: dict[str, Any]) -> None:
        began.set()
        assert go_on.wait(60)
        run_staged_graph(fake, job)

    cloud.execute = slowly
    # The command that was left with Ctrl+C, and whose job is still at work.
    settings = ["input.paths=gs://bkt/wet/*.gz", "output.directory=gs://bkt/mined",
                "language.threshold=0"]  # fmt: skip
    recipe = load_recipe("default", settings)
    first = threading.Thread(target=run_mine, args=(recipe, options(cloud)), daemon=True)
    first.start()
    assert began.wait(60)
    record = "bkt/mined/.staging/job.json"
    while record not in cloud.objects:
        first.join(0.05)
    assert json.loads(cloud.objects[record]) == {
        "project": "proj-one", "region": "us-central1", "job_id": "job-1",
    }  # fmt: skip
    before = dict(cloud.objects)
    assert mine(cloud, before=("--restart",)) == EXIT_USER_ERROR
    assert "job 'job-1' is at work in output 'gs://bkt/mined'" in capfd.readouterr().err
    assert mine(cloud, "--region=europe-west4") == EXIT_USER_ERROR
    assert "was started with --region=us-central1" in capfd.readouterr().err
    assert cloud.objects == before
    # On another machine, or after the record is lost, the service itself is the lock.
    del cloud.objects[record]
    assert mine(cloud) == EXIT_USER_ERROR
    said = capfd.readouterr().err
    assert "another run is at work for this output, as job 'gristmill-" in said
    assert "(job-1): wait for it, or stop it: gcloud dataflow jobs cancel job-1 --project" in said
    assert "--job_name" not in said  # another name would be a second run for this output
    cloud.objects[record] = before[record]
    threading.Timer(0.5, go_on.set).start()
    assert mine(cloud) == 0
    first.join(60)
    assert len(cloud.jobs) == 1
    assert "bkt/mined/manifest.json" in cloud.objects


def test_a_fault_inside_the_job_is_reported_from_the_staging_folder(
    cloud: FakeGoogle, capfd: pytest.CaptureFixture[str]
) -> None:
    def without_its_model(fake: FakeGoogle, job: dict[str, Any]) -> None:
        (model,) = [key for key in fake.objects if "/models/" in key]
        del fake.objects[model]
        run_staged_graph(fake, job)

    cloud.execute = without_its_model
    assert mine(cloud) == EXIT_FAULT
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("gristmill: fault: input '0.warc.wet.gz': ")
    assert "bkt/mined/manifest.json" not in cloud.objects


def test_a_folder_of_this_machine_is_refused(
    cloud: FakeGoogle, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert mine(cloud, before=("--set", f"run.staging={tmp_path}")) == EXIT_USER_ERROR
    assert "is a path of this machine" in capfd.readouterr().err
    assert cloud.jobs == []
