"""What Dask would lose without a word is refused before it starts; our own graph passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.io.fileio import WriteToFiles
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from models.errors import UserError
from pipelines.dask_checks import refuse_what_dask_loses
from pipelines.mine import build

HERE = str(Path(__file__))


class Batches(beam.DoFn):  # type: ignore[misc]
    def process(self, element: int) -> None:
        self.last = element

    def finish_bundle(self) -> Iterator[Any]:
        yield WindowedValue(self.last, 0, [GlobalWindow()])


def numbers(pipeline: Any) -> Any:
    return pipeline | "numbers" >> beam.Create([1, 2, 3])


def tags(pipeline: Any) -> None:
    both = numbers(pipeline) | "split" >> beam.Map(abs).with_outputs("odd", main="even")
    (both.even, both.odd) | beam.Flatten()


def caught(pipeline: Any) -> None:
    good, _ = numbers(pipeline) | "careful" >> beam.Map(abs).with_exception_handling()
    good | "on" >> beam.Map(abs)


def two_ends(pipeline: Any) -> None:
    start = numbers(pipeline)
    start | "one" >> beam.Map(abs)
    start | "other" >> beam.Map(abs)


def two_beginnings(pipeline: Any) -> None:
    (numbers(pipeline), pipeline | "more" >> beam.Create([4])) | "join" >> beam.Flatten()


def finish_bundle(pipeline: Any) -> None:
    numbers(pipeline) | "batches" >> beam.ParDo(Batches())


def read(pipeline: Any) -> None:
    pipeline | "lines" >> beam.io.ReadFromText(HERE)


def sink(pipeline: Any) -> None:
    numbers(pipeline) | "text" >> beam.io.WriteToText("out")


def file_sink(pipeline: Any) -> None:
    numbers(pipeline) | "files" >> WriteToFiles("out")


REFUSED: dict[Callable[[Any], None], str] = {
    tags: r"'split.*' has tagged outputs",
    caught: r"'careful.*' has tagged outputs",
    two_ends: r"'(one|other)' is not the only end",
    two_beginnings: r"'more.*' is a second beginning",
    finish_bundle: r"'batches' has a finish_bundle",
    read: r"'lines.*' reads with a source of Beam",
    sink: r"'text.*' writes with a sink of Beam",
    file_sink: r"'files.*' writes with a sink of Beam",
}


@pytest.mark.parametrize("construct", REFUSED, ids=lambda construct: construct.__name__)
def test_what_dask_loses_is_refused_by_name(construct: Callable[[Any], None]) -> None:
    pipeline = beam.Pipeline()
    construct(pipeline)
    with pytest.raises(UserError, match=f"DaskRunner would lose data: {REFUSED[construct]}"):
        refuse_what_dask_loses(pipeline)


def test_a_side_input_is_no_end_and_plain_chains_pass() -> None:
    pipeline = beam.Pipeline()
    start = numbers(pipeline)
    counts = start | "pairs" >> beam.Map(lambda n: (n % 2, n)) | beam.CombinePerKey(sum)
    counts | "sum" >> beam.Map(lambda pair, all_of: (pair, len(all_of)), beam.pvalue.AsList(start))
    refuse_what_dask_loses(pipeline)


@pytest.mark.parametrize("exchange", ["files", "shuffle"])
def test_our_graph_passes(exchange: Any) -> None:
    pipeline = beam.Pipeline()
    build(pipeline, "plan.json", exchange=exchange, slices=16)
    refuse_what_dask_loses(pipeline)
