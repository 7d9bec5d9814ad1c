"""Where the workers of a run are, and what they can reach from there.

The plan names files by path or URL. Workers in other processes have another working folder,
workers on other machines other disks: the plan that they read has whole paths, and its models
stand where they can be fetched.
"""

from __future__ import annotations

import sys
from typing import Any

from models import files
from models.errors import UserError
from models.remote_models import publish_model
from pipelines.engine import LOCAL_RUNNER, PORTABLE_RUNNERS, runner_name
from pipelines.plan import LanguageModel, ModelFile, Plan

_ON_THIS_MACHINE = {LOCAL_RUNNER, "SwitchingDirectRunner", "BundleBasedDirectRunner", "PrismRunner"}


def workers_share_this_machine(pipeline: Any) -> bool:
    """Whether the workers see the same local folders as this process, as far as options tell."""
    name = runner_name(pipeline)
    if name in _ON_THIS_MACHINE:
        return True
    if name == "DaskRunner":
        from apache_beam.runners.dask.dask_runner import DaskOptions  # noqa: PLC0415

        dask = pipeline.options.view_as(DaskOptions)
        return not dask.scheduler_file and (not dask.address or _is_this_host(dask.address))
    if name in PORTABLE_RUNNERS:
        from apache_beam.options.pipeline_options import PortableOptions  # noqa: PLC0415

        portable = pipeline.options.view_as(PortableOptions)
        kind = portable.environment_type
        if kind is None:  # Beam uses containers, but for an engine that it starts in this machine
            return _starts_its_engine(pipeline)
        return kind == "LOOPBACK" or (
            kind == "EXTERNAL" and _is_this_host(portable.environment_config or "")
        )
    return False


def _starts_its_engine(pipeline: Any) -> bool:
    from apache_beam.options import pipeline_options  # noqa: PLC0415

    if runner_name(pipeline) == "FlinkRunner":
        flink = pipeline.options.view_as(pipeline_options.FlinkRunnerOptions)
        return flink.flink_master in ("[auto]", "[local]")
    if runner_name(pipeline) == "SparkRunner":
        spark = pipeline.options.view_as(pipeline_options.SparkRunnerOptions)
        return str(spark.spark_master_url).startswith("local")
    return False


def _is_this_host(address: str) -> bool:
    host = address.rsplit("://", 1)[-1].rsplit(":", 1)[0].strip("[]")
    return host in ("localhost", "127.0.0.1", "::1")


def check_places(pipeline: Any, plan: Plan) -> None:
    """See that workers elsewhere can reach what the recipe names.

    Raises UserError on Dataflow, whose machines see no folder of ours. On other clusters a local
    path may be a shared file system: a line on stderr says what must hold.
    """
    if workers_share_this_machine(pipeline):
        return
    dedup = plan.recipe.dedup
    places = [
        ("output.directory", plan.recipe.output.directory),
        ("run.staging", plan.staging),
        ("dedup.index_in", dedup.index_in),
        ("dedup.index_out", dedup.index_out),
        *(("input.paths", file.url) for file in plan.inputs),
    ]
    local = [(field, place) for field, place in places if place and files.is_local(place)]
    if not local:
        return
    field, place = local[0]
    if runner_name(pipeline) == "DataflowRunner":
        raise UserError(
            f"{field} = '{place}' is a path of this machine, which the workers of "
            "DataflowRunner cannot see: give a URL (gs://...)"
        )
    print(
        f"warning: {field} = '{place}' is a local path: the workers of {runner_name(pipeline)} "
        "must all see the same folder there (a shared file system), or give a URL",
        file=sys.stderr,
    )


def plan_for_workers(pipeline: Any, plan: Plan) -> Plan:
    """The plan as workers read it: whole paths, and models where the workers can get them.

    Workers elsewhere find the models of a remote `quality.models` there, and all others in the
    staging folder; a machine copies one from a URL once. Raises OSError.
    """
    if runner_name(pipeline) == LOCAL_RUNNER:
        return plan
    elsewhere = not workers_share_this_machine(pipeline)
    recipe, staging = plan.recipe, _whole(plan.staging)

    def placed(model: ModelFile, source: str | None = None) -> ModelFile:
        path = _whole(model.path)
        if elsewhere and source is not None and not files.is_local(source):
            path = files.join(source, model.name)
        elif elsewhere:
            path = publish_model(path, model.sha256, files.join(staging, "models"))
        return model.model_copy(update={"path": path})

    output = recipe.output.model_copy(update={"directory": _whole(recipe.output.directory)})
    indexes = {"index_in": recipe.dedup.index_in, "index_out": recipe.dedup.index_out}
    dedup = recipe.dedup.model_copy(
        update={name: place and _whole(place) for name, place in indexes.items()}
    )
    source = recipe.quality.models
    changes = {
        "recipe": recipe.model_copy(update={"output": output, "dedup": dedup}),
        "inputs": tuple(f.model_copy(update={"url": _whole(f.url)}) for f in plan.inputs),
        "staging": staging,
        "language_id": placed(plan.language_id),
        "language_models": {
            language: LanguageModel(
                tokenizer=placed(pair.tokenizer, source), ngram=placed(pair.ngram, source)
            )
            for language, pair in plan.language_models.items()
        },
    }
    return plan.model_copy(update=changes)


def _whole(place: str) -> str:
    return str(files.local_path(place).absolute()) if files.is_local(place) else place
