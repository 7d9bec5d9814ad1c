"""The manifest: sums that are checked, a schema that is published."""

from __future__ import annotations

import json
from typing import Any

import pytest

from models.errors import UserError
from pipelines.manifest import Manifest, read_manifest, total
from tests.conftest import REPOSITORY

SCHEMA = REPOSITORY / "data_manifests" / "manifest.schema.json"


def test_the_published_schema_is_the_model() -> None:
    """After a change: python -m pipelines.manifest > data_manifests/manifest.schema.json"""
    assert json.loads(SCHEMA.read_text()) == Manifest.model_json_schema()


def manifest(**changes: Any) -> Manifest:
    output = {"path": "pages/x.parquet", "language": "bn", "bucket": "all", "rows": 2,
              "chars": 9, "text_bytes": 20, "bytes": 50, "xxh3": "0"}  # fmt: skip
    counts: dict[str, Any] = {
        "records": {"read": 5, "not_pages": 1, "lost": 0, "length_corrected": 0},
        "pages": {"read": 5, "written": 2, "dropped": {"too_short": 3}},
        "paragraphs": {"read": 9, "kept": 4, "dropped": {"duplicate": 2, "page_too_short": 3}},
        "keys": {"distinct": 6, "repeated": 1},
        "by_language": {"bn": {"pages": 2, "chars": 9, "buckets": {"all": 2}}},
    }
    for place, value in changes.items():
        section, _, key = place.partition("__")
        counts[section][key] = value
    return Manifest.model_validate(
        {"schema_version": 1, "tool_version": "0", "recipe": {"name": "x"}, "recipe_digest": "0",
         "inputs": [], "models": [], "cutoffs": {}, "losses": [], "counts": counts,
         "outputs": [output]}
    )  # fmt: skip


def test_sums() -> None:
    assert manifest().faults() == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"records__read": 6}, "pages.read = records.read: 5 is not 6"),
        ({"pages__dropped": {}}, "pages.read = written + dropped: 5 is not 2"),
        ({"paragraphs__kept": 5}, "paragraphs.read = kept + dropped: 9 is not 10"),
        (
            {"by_language__bn": {"pages": 2, "chars": 9, "buckets": {"all": 1}}},
            "pages of all languages = pages of all buckets: 2 is not 1",
        ),
    ],
)
def test_a_wrong_sum_is_named(changes: dict[str, Any], fault: str) -> None:
    assert fault in manifest(**changes).faults()


def test_rows_are_summed_too() -> None:
    wrong = manifest(pages__written=3, pages__dropped={"too_short": 2})
    assert wrong.faults() == [
        "pages.written = rows of all outputs: 3 is not 2",
        "pages.written = pages of all languages: 3 is not 2",
    ]


def test_reading(tmp_path: Any) -> None:
    (tmp_path / "manifest.json").write_text(manifest().to_json())
    assert read_manifest(str(tmp_path)) == manifest()
    (tmp_path / "manifest.json").write_text('{"counts": 3}')
    with pytest.raises(UserError, match="is no mining manifest"):
        read_manifest(str(tmp_path))
    with pytest.raises(UserError, match=r"no manifest at .*nowhere"):
        read_manifest(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("path", ["/etc/x", "a/../../x", "gs://b/x", "a\\b"])
def test_paths_stay_in_the_folder(path: str, tmp_path: Any) -> None:
    text = manifest().to_json().replace("pages/x.parquet", path.replace("\\", "\\\\"))
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="leads out of the manifest's folder"):
        read_manifest(str(tmp_path))


def test_totals_leave_out_zeros_and_sort() -> None:
    assert list(total([{"b": 1, "a": 0}, {"b": 2, "c": 3}]).items()) == [("b", 3), ("c", 3)]
