"""The Beam graph has the one shape that every runner executes the same way (DESIGN §3)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import apache_beam as beam
import pytest

from pipelines.mine import build

READS = "beam:transform:impulse:v1"
GROUPS = "beam:transform:group_by_key:v1"


@pytest.fixture(scope="module")
def graph() -> Any:
    pipeline = beam.Pipeline()
    build(pipeline, "plan.json")
    return pipeline.to_runner_api()


def leaves_of(graph: Any) -> list[Any]:
    """The primitive transforms; a step that hands on what it gets is none."""
    return [
        transform
        for transform in graph.components.transforms.values()
        if not transform.subtransforms
        and transform.spec.urn
        and list(transform.inputs.values()) != list(transform.outputs.values())
    ]


def test_a_straight_chain(graph: Any) -> None:
    transforms = leaves_of(graph)
    assert all(len(transform.inputs) <= 1 for transform in transforms)  # no side inputs
    assert all(len(transform.outputs) == 1 for transform in transforms)  # no tagged outputs
    made = {name for transform in transforms for name in transform.outputs.values()}
    uses = Counter(name for transform in transforms for name in transform.inputs.values())
    assert set(uses.values()) == {1}  # nothing is read twice
    assert len(made - set(uses)) == 1  # one end
    assert sum(not transform.inputs for transform in transforms) == 1  # one beginning


def test_no_beam_sources_or_sinks(graph: Any) -> None:
    urns = Counter(transform.spec.urn for transform in leaves_of(graph))
    # Units are spread by a Reshuffle, which groups too; then the five groups of mine.py.
    assert urns[GROUPS] == 6
    assert urns[READS] == 1
    assert set(urns) <= {READS, GROUPS, "beam:transform:pardo:v1", "beam:transform:window_into:v1",
                         "beam:transform:flatten:v1"}  # fmt: skip


STEPS = ["plan", "units", "spread units", "hash", "by range", "judge", "by unit", "clean",
         "all reports", "tasks", "by task", "regroup", "all parts", "publish"]  # fmt: skip


def test_labels_are_those_of_the_story(graph: Any) -> None:
    (root,) = (graph.components.transforms[name] for name in graph.root_transform_ids)
    steps = [graph.components.transforms[name].unique_name for name in root.subtransforms]
    assert steps == STEPS


def test_no_coder_needs_code_of_ours(graph: Any) -> None:
    # References, bits and blocks are plain tuples and bytes: what Beam encodes by itself.
    urns = {coder.spec.urn for coder in graph.components.coders.values()}
    assert all(urn.startswith("beam:coder:") for urn in urns)


def build_size(**options: Any) -> int:
    pipeline = beam.Pipeline()
    build(pipeline, "plan.json", **options)
    return int(pipeline.to_runner_api().ByteSize())


def test_its_size_does_not_depend_on_the_input(graph: Any) -> None:
    # The plan's path is all that the graph knows of a run, and 10 MB is Dataflow's limit.
    assert graph.ByteSize() < 50_000
    assert build_size(exchange="shuffle", slices=1024) < 100_000
