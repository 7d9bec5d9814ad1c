"""The plan: names of inputs, shards and groups, ranges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.errors import UserError
from pipelines.plan import (
    KEYS_PER_STORED_BYTE,
    InputFile,
    _inputs,
    _keys_to_judge,
    _names,
    _ranges,
    make_plan,
    read_plan,
)
from pipelines.recipe import load_recipe
from tests.misbehaving_server import Reply, misbehaving_server
from tests.pipelines.wet_files import Page, write_wet


@pytest.mark.parametrize(
    ("urls", "names"),
    [
        (["a.gz"], ["a.gz"]),
        (["x/a.gz", "x/b.gz"], ["a.gz", "b.gz"]),
        (["x/1/a.gz", "x/2/a.gz"], ["1/a.gz", "2/a.gz"]),
        (["x/a.gz", "x/2/a.gz"], ["a.gz", "2/a.gz"]),
        (["/x/a.gz", "y/a.gz"], ["/x/a.gz", "y/a.gz"]),
        (["gs://b/x/a.gz", "gs://b/y/a.gz"], ["x/a.gz", "y/a.gz"]),
        (["gs://b/x/a.gz", "s3://b/x/a.gz"], ["gs://b/x/a.gz", "s3://b/x/a.gz"]),
        (["ab/x.gz", "ac/x.gz"], ["ab/x.gz", "ac/x.gz"]),
    ],
)
def test_names_tell_inputs_apart(urls: list[str], names: list[str]) -> None:
    assert _names(urls) == names


def test_ranges_grow_with_the_input() -> None:
    assert [_ranges(keys) for keys in (0, 4_000_000, 4_000_001, 3e7, 3e10)] == [1, 1, 2, 8, 4096]


def test_ranges_are_for_the_largest_group_and_the_index(tmp_path: Path) -> None:
    inputs = [
        InputFile(index=i, name=f"{i}", url=f"{i}", bytes=10**9, shard=i, group=group)
        for i, group in enumerate([0, 1, 1, 2])
    ]
    alone = load_recipe("default", [])
    assert _keys_to_judge(alone, inputs) == pytest.approx(2e9 * KEYS_PER_STORED_BYTE)
    (tmp_path / "index.json").write_text('{"ranges": [{"keys": 5000000}, {"keys": 7}]}')
    later = load_recipe("default", [f"dedup.index_in={tmp_path}"])
    assert _keys_to_judge(later, inputs) == pytest.approx(2e9 * KEYS_PER_STORED_BYTE + 5_000_007)


@pytest.mark.parametrize(
    ("overrides", "groups"),
    [
        ([], [0, 0, 0, 0, 0]),
        (["dedup.scope=shard"], [0, 1, 2, 3, 4]),
        (["dedup.scope=window", "dedup.window_shards=2"], [0, 0, 1, 1, 2]),
        (["dedup.scope=shard", "input.num_shards=2"], [0, 0, 1, 1, 1]),
        (["dedup.scope=window", "input.num_shards=3", "dedup.window_shards=2"], [0, 0, 0, 1, 1]),
    ],
)
def test_dedup_groups(
    overrides: list[str],
    groups: list[int],
    tmp_path: Path,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRISTMILL_DATA", str(data_dir))
    for number in range(5):
        write_wet(tmp_path / f"{number}.warc.wet.gz", [Page("http://a.example/", b"text")])
    recipe = load_recipe(
        "default",
        [f"input.paths={tmp_path}/*.gz", f"output.directory={tmp_path}/out", *overrides],
    )
    plan = make_plan(recipe)
    assert [file.group for file in plan.inputs] == groups
    assert [file.name for file in plan.inputs] == [f"{n}.warc.wet.gz" for n in range(5)]
    assert read_plan(plan.write()) == plan


def test_web_addresses_are_inputs() -> None:
    """A question mark is no wildcard there, and not every server says how long a file is."""
    with misbehaving_server() as server:
        urls = [server.script("/a.gz", Reply(b"12345")),
                server.script("/b.gz?version=1", Reply(b"123", declared_bytes=-1))]  # fmt: skip
        inputs = _inputs(load_recipe("default", [f"input.paths={json.dumps(urls)}"]))
        assert [(file.url, file.bytes) for file in inputs] == [(urls[0], 5), (urls[1], 0)]
        with pytest.raises(UserError, match=r"none\.gz' matches no file"):
            _inputs(
                load_recipe("default", [f"input.paths={json.dumps([server.base + '/none.gz'])}"])
            )
