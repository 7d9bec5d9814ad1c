"""How the row groups of all staging files are divided into tasks."""

from __future__ import annotations

import random
from typing import Any

from pipelines.plan import ModelFile, Plan
from pipelines.recipe import load_recipe
from pipelines.regroup import Sources

TARGET_BYTES = 5_000_000


def plan_of_target() -> Plan:
    recipe = load_recipe("default", [f"output.target_bytes={TARGET_BYTES}"])
    model = ModelFile(name="model", path="model", sha256="0" * 64)
    return Plan(recipe=recipe, inputs=(), language_id=model, language_models={}, cutoffs=None,
                index_in_xxh3=None, ranges=1, staging="staging")  # fmt: skip


def reports_of(count: int) -> list[dict[str, Any]]:
    draw = random.Random(1)
    reports: list[dict[str, Any]] = []
    for unit in range(count):
        groups = [
            {"language": language, "bytes": draw.randrange(1, 3_000_000)}
            for language in ("bn", "de", "sw")
            for _ in range(draw.randrange(4))
        ]
        report = {"unit": unit, "path": f"{unit}.parquet", "xxh3": f"{unit:x}"}
        reports.append(report | {"row_groups": groups})
    return reports


def test_each_row_group_is_in_one_task_in_crawl_order() -> None:
    reports = reports_of(50)
    cutoffs = {"de": (100.0, 200.0)}
    sources = Sources()
    for report in random.Random(2).sample(reports, len(reports)):  # a shuffle keeps no order
        sources.add(report)
    sources.add({"unit": 50, "failed": "damaged"})
    tasks = list(sources.tasks(plan_of_target(), cutoffs))
    assert list(sources.tasks(plan_of_target(), cutoffs)) == tasks
    for language in ("bn", "de", "sw"):
        own = [task for task in tasks if task["language"] == language]
        assert [task["part"] for task in own] == list(range(len(own)))
        assert {task["cutoffs"] for task in own} == {cutoffs.get(language)}
        found = [
            (source["path"], source["xxh3"], group)
            for task in own for source in task["sources"] for group in source["groups"]
        ]  # fmt: skip
        assert found == [
            (report["path"], report["xxh3"], number)
            for report in reports
            for number, group in enumerate(report["row_groups"])
            if group["language"] == language
        ]
    by_source = {
        (source["path"], task["language"]): source["bytes"]
        for task in tasks for source in task["sources"]
    }  # fmt: skip
    for report in reports:
        for language in {group["language"] for group in report["row_groups"]}:
            sizes = [g["bytes"] for g in report["row_groups"] if g["language"] == language]
            assert by_source[report["path"], language] == sum(sizes)
    assert sources.bytes == sum(by_source.values())


def test_a_task_comes_near_the_target_for_each_of_its_parts() -> None:
    sources = Sources()
    for report in reports_of(200):
        sources.add(report)
    tasks = list(sources.tasks(plan_of_target(), {"de": (100.0, 200.0)}))
    for language, parts in (("bn", 1), ("de", 3)):
        sizes = [
            sum(source["bytes"] for source in task["sources"])
            for task in tasks if task["language"] == language
        ]  # fmt: skip
        largest = 9_000_000  # of one file: three row groups
        assert len(sizes) > 5
        assert all(abs(size - parts * TARGET_BYTES) <= largest / 2 for size in sizes[:-1])


def test_no_file_no_task() -> None:
    assert list(Sources().tasks(plan_of_target(), {})) == []
