"""The job that Dataflow would get, looked at without any service: options, graph, sizes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from pipelines.dataflow import least_ram_bytes
from pipelines.estimate import COSTS
from pipelines.plan import InputFile, LanguageModel, ModelFile, Plan
from pipelines.recipe import load_recipe

WHY = "needs the extra 'dataflow': pip install 'gristmill[dataflow]'"
pytest.importorskip("google.cloud.dataflow_v1beta3", reason=WHY)
pytest.importorskip("gcsfs", reason=WHY)
from tests.fake_dataflow import FakeGoogle, connected  # noqa: E402

IMAGE = "us-docker.pkg.dev/proj-one/gristmill/worker:0.1.0"
OPTIONS = [
    "--runner=DataflowRunner",
    "--project=proj-one",
    "--region=us-central1",
    "--temp_location=gs://bkt/tmp",
    f"--sdk_container_image={IMAGE}",
]
GROUPS = "beam:transform:group_by_key:v1"
MODEL_BYTES = 1000
MB = 1_000_000


def make_plan(folder: Path, sizes: list[int], language_models: int = 0) -> Plan:
    """A plan over files that are nowhere, with model files of MODEL_BYTES."""
    path = folder / "model"
    path.write_bytes(b"m" * MODEL_BYTES)
    model = ModelFile(name="model", path=str(path), sha256="0" * 64)
    name = "CC-MAIN-20260401000000-20260401030000-{:05d}.warc.wet.gz"
    return Plan.model_construct(
        recipe=load_recipe("default", ["output.directory=gs://bkt/mined"]),
        inputs=tuple(
            InputFile(index=i, name=name.format(i), url="gs://bkt/wet/" + name.format(i),
                      bytes=size, shard=i, group=0)
            for i, size in enumerate(sizes)
        ),
        language_id=model,
        language_models={
            f"l{i}": LanguageModel(tokenizer=model, ngram=model) for i in range(language_models)
        },
        cutoffs=None,
        index_in_xxh3=None,
        ranges=4096,
        staging="gs://bkt/mined/.staging",
    )  # fmt: skip


def dry_run(plan: Plan, *more: str) -> Any:
    """The job and the graph as they would be sent; `plan` stands nowhere."""
    from apache_beam.options.pipeline_options import TestOptions

    from pipelines.dataflow import prepare
    from pipelines.engine import exchange_of, make_pipeline, slices_of
    from pipelines.mine import build

    pipeline = make_pipeline(1, [*OPTIONS, "--no_auth", *more])
    pipeline.options.view_as(TestOptions).dry_run = True
    prepare(pipeline, plan)
    build(pipeline, f"{plan.staging}/plan-0123456789abcdef.json",
          exchange=exchange_of(pipeline, plan), slices=slices_of(pipeline))  # fmt: skip
    pipeline.run()
    return pipeline.runner.job.proto, pipeline.runner.proto_pipeline


@pytest.fixture(scope="module", autouse=True)
def cloud() -> Iterator[FakeGoogle]:
    """Beam looks at the bucket of --temp_location before it makes a job."""
    with connected() as fake:
        yield fake
        assert fake.jobs == []


@pytest.fixture(scope="module")
def sent(cloud: FakeGoogle, tmp_path_factory: pytest.TempPathFactory) -> Any:
    plan = make_plan(tmp_path_factory.mktemp("plan"), [70 * MB, 60 * MB])
    return dry_run(plan, "--machine_type=n2-highmem-4", "--max_num_workers=50")


def steps(graph: Any) -> list[str]:
    """Labels of the steps of pipelines/mine.py, in order."""
    transforms = graph.components.transforms
    (root,) = (transforms[name] for name in graph.root_transform_ids)
    return [transforms[name].unique_name for name in root.subtransforms]


def test_steps(sent: Any) -> None:
    _, graph = sent
    assert steps(graph) == [
        "plan", "units", "spread units", "hash", "by range", "judge", "by unit", "clean",
        "all reports", "tasks", "by task", "regroup", "all parts", "publish",
    ]  # fmt: skip
    urns = Counter(one.spec.urn for one in graph.components.transforms.values())
    assert urns[GROUPS] == 6  # the five of mine.py, and that of "spread units"
    assert urns["beam:transform:impulse:v1"] == 1
    assert not [urn for urn in urns if "read" in urn or "write" in urn or "combine" in urn]


def test_the_shuffle_groups_by_bytes_that_every_worker_makes_the_same(sent: Any) -> None:
    from apache_beam.runners.pipeline_context import PipelineContext

    _, graph = sent
    context = PipelineContext(graph.components)
    keys = {}
    for one in graph.components.transforms.values():
        if one.spec.urn == GROUPS:
            (source,) = one.inputs.values()
            coder = context.coders.get_by_id(graph.components.pcollections[source].coder_id)
            keys[one.unique_name.split("/")[0]] = coder.key_coder()
    assert all(coder.is_deterministic() for coder in keys.values())
    assert keys.pop("spread units").encode(5) == b"\x05"
    assert keys.pop("by range").encode((0, 5)) == b"\x06\x02\x01\x00\x01\x05"
    assert set(keys) == {"by unit", "all reports", "by task", "all parts"}
    assert {coder.encode(300) for coder in keys.values()} == {b"\x01\xac\x02"}


def test_one_environment_with_image_and_memory(sent: Any) -> None:
    _, graph = sent
    from apache_beam.portability.api import beam_runner_api_pb2

    (environment,) = graph.components.environments.values()
    assert environment.urn == "beam:env:docker:v1"
    payload = beam_runner_api_pb2.DockerPayload.FromString(environment.payload)
    assert payload.container_image == IMAGE
    assert list(environment.dependencies) == []  # nothing to install when a worker starts
    expected = 4 * (2 * own_bytes(70 * MB) + MODEL_BYTES)
    assert environment.resource_hints == {"beam:resources:min_ram_bytes:v1": str(expected).encode()}


def test_user_options_win(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, [MB])
    job, graph = dry_run(plan, "--resource_hints=min_ram=16GB", "--job_name=mine-ours")  # fmt: skip
    (environment,) = graph.components.environments.values()
    assert environment.resource_hints["beam:resources:min_ram_bytes:v1"] == b"16000000000"
    assert job.name == "mine-ours"


def test_ninety_thousand_inputs_stay_under_the_limit(tmp_path: Path) -> None:
    from google.protobuf.json_format import MessageToJson

    small = make_plan(tmp_path, [70 * MB] * 4)
    large = make_plan(tmp_path, [70 * MB] * 90_000)
    assert len(large.model_dump_json()) > 10 * MB  # which is why it is no part of the graph
    sizes = []
    for plan in (small, large):
        job, graph = dry_run(plan)
        sizes.append((graph.ByteSize(), len(MessageToJson(type(job).pb(job)))))
    assert sizes[0] == sizes[1]
    graph_bytes, job_bytes = sizes[1]
    assert graph_bytes < 50_000
    assert job_bytes < 50_000


def test_the_job_name_is_that_of_the_output(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, [MB])
    name = dry_run(plan)[0].name
    assert name == "gristmill-bcd176d97a544452"  # XXH3 of gs://bkt/mined
    assert dry_run(make_plan(tmp_path, [2 * MB]))[0].name == name


def own_bytes(largest: int, tokenizers: int = 0) -> int:
    """What the estimate says that a process takes while it cleans a file of `largest` bytes."""
    wet = largest * 2.6  # nothing remote is sampled
    kept = wet * COSTS.kept_share * COSTS.memory_per_kept_byte
    of_file = round(largest + wet / 90 * COSTS.memory_per_paragraph + kept)
    of_models = round(tokenizers * MODEL_BYTES * COSTS.memory_per_tokenizer_byte)
    return COSTS.base_bytes + COSTS.batch_bytes + of_models + of_file


def test_memory_counts_the_largest_step_and_all_models(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, [10 * MB, 40 * MB], language_models=2)
    # Each process has its tokenizers and language identifier; the n-gram models are mapped.
    each = 2 * own_bytes(40 * MB, tokenizers=2) + MODEL_BYTES
    assert least_ram_bytes(plan, 1) == each + 2 * MODEL_BYTES
    assert least_ram_bytes(plan, 8) == 8 * each + 2 * MODEL_BYTES
    few = plan.model_copy(update={"ranges": 1, "inputs": plan.inputs * 100})
    keys = round(round(5_000 * MB * 2.6 / 90) * COSTS.keys_per_paragraph)
    held = round(keys * COSTS.memory_per_key)  # the judge holds all of a range
    in_judge = own_bytes(0, tokenizers=2) + held
    assert least_ram_bytes(few, 1) == 2 * in_judge + 3 * MODEL_BYTES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("-project", "needs --project= behind --: the project that pays"),
        ("-region", "needs --region="),
        ("-temp_location", "needs --temp_location="),
        ("-sdk_container_image", "the image with Gristmill in it, built from the Dockerfile"),
        ("--no_wait_until_finish", "Ctrl+C after the submission leaves the job at work"),
        ("--dry_run=True", "'--dry_run' is of no use on Dataflow: 'gristmill mine --dry-run'"),
        ("--template_location=gs://bkt/t", "a template has nothing to start"),
        ("--project=P", "Beam refuses its options: "),
        ("--temp_location=/tmp/x", "--temp_location=/tmp/x is no gs:// folder"),
        ("--zzz=1", "'--zzz' is no option of Beam's DataflowRunner"),
    ],
)
def test_options_that_cannot_work_are_refused(change: str, message: str) -> None:
    from pipelines.engine import make_pipeline

    left_out = f"-{change}=" if not change.startswith("--") else "none"
    options = [option for option in OPTIONS if not option.startswith(left_out)]
    if change.startswith("--"):
        options.append(change)
    with pytest.raises(UserError) as error:
        make_pipeline(1, options)
    assert message in str(error.value)
    assert json.dumps(str(error.value)).count("\\n") <= (2 if change == "--project=P" else 0)
