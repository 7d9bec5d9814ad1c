"""The list of dropped pages of a whole run."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines import publish
from pipelines.plan import ModelFile, Plan
from pipelines.recipe import load_recipe
from pipelines.staging import DROPS_SCHEMA, write_drops


def test_drops_of_many_inputs_share_a_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_ROW_GROUP_DROPS", 10)
    empty = dict.fromkeys(DROPS_SCHEMA.names)
    lists = [
        [empty | {"url": f"http://{unit}/{page}", "reason": "too_short"} for page in range(count)]
        for unit, count in enumerate([0, 3, 3, 4, 0, 25, 0, 1, 0])
    ]
    reports = [{"drops_path": str(tmp_path / f"{unit}.parquet")} for unit in range(len(lists))]
    for report, drops in zip(reports, lists, strict=True):
        write_drops(drops, report["drops_path"])
    model = ModelFile(name="model", path="model", sha256="0" * 64)
    recipe = load_recipe("default", [f"output.directory={tmp_path}/out"])
    plan = Plan(recipe=recipe, inputs=(), language_id=model, language_models={}, cutoffs=None,
                index_in_xxh3=None, ranges=1, staging="staging")  # fmt: skip
    entry = publish._drops(plan, reports)
    with pq.ParquetFile(tmp_path / "out" / entry.path, pre_buffer=False) as written:
        sizes = [written.metadata.row_group(n).num_rows for n in range(written.num_row_groups)]
        assert written.read().to_pylist() == [drop for drops in lists for drop in drops]
    assert sizes == [10, 25, 1]
    assert entry.rows == 36
    nothing = publish._drops(plan, [reports[0]])
    assert (nothing.rows, pq.read_metadata(tmp_path / "out" / nothing.path).num_rows) == (0, 0)
