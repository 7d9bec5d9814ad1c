"""What Beam's DaskRunner loses without a word, refused before it starts.

Seen with Beam 2.77 (each case is in `tests/pipelines/test_engines_dask.py`): of several ends only
the last is computed; each tag of a tagged output gets every element; what finish_bundle hands
out is dropped; Beam's sinks leave an empty file or none; a Read fails for want of an input.
"""

from __future__ import annotations

from typing import Any

import apache_beam as beam
from apache_beam.io.fileio import WriteToFiles
from apache_beam.io.iobase import Read, Write
from apache_beam.pipeline import PipelineVisitor
from apache_beam.pvalue import PBegin
from apache_beam.transforms.core import DoFn, _MultiParDo

from models.errors import UserError


def refuse_what_dask_loses(pipeline: Any) -> None:
    """Raises UserError, naming the transform, when Dask would lose data of this pipeline."""
    visitor = _Visitor()
    pipeline.visit(visitor)
    visitor.check_ends()


class _Visitor(PipelineVisitor):
    def __init__(self) -> None:
        self.beginnings: list[str] = []
        self.made: dict[Any, str] = {}
        self.used: set[Any] = set()

    def enter_composite_transform(self, node: Any) -> None:
        if isinstance(node.transform, WriteToFiles | Write):
            raise _refusal(node.full_label, "writes with a sink of Beam, which leaves no file")
        if isinstance(node.transform, Read):
            raise _refusal(node.full_label, "reads with a source of Beam, which fails there")
        if isinstance(node.transform, _MultiParDo):
            raise _refusal(node.full_label, "has tagged outputs: each would get every element")

    def visit_transform(self, node: Any) -> None:
        self.enter_composite_transform(node)
        if len(node.outputs) > 1:
            raise _refusal(node.full_label, "has tagged outputs: each would get every element")
        if isinstance(node.transform, beam.ParDo):
            fn = type(node.transform.fn)
            if fn.finish_bundle is not DoFn.finish_bundle:
                raise _refusal(node.full_label, "has a finish_bundle, whose output is dropped")
        if any(isinstance(value, PBegin) for value in node.inputs):
            self.beginnings.append(node.full_label)
        self.used |= set(node.inputs) | {side.pvalue for side in node.side_inputs}
        self.made |= dict.fromkeys(node.outputs.values(), node.full_label)

    def check_ends(self) -> None:
        if len(self.beginnings) > 1:
            raise _refusal(self.beginnings[1], "is a second beginning: only one is computed")
        ends = [label for value, label in self.made.items() if value not in self.used]
        if len(ends) > 1:
            raise _refusal(ends[0], "is not the only end: only the last one is computed")


def _refusal(label: str, why: str) -> UserError:
    return UserError(f"DaskRunner would lose data: '{label}' {why}; use another --runner")
