"""Whose the folder of a mix is, and what --restart takes away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from tests.training.fake_mixes import fake_mix
from training.mix import folder

MIX: dict[str, Any] = {
    "recipe_digest": "d1",
    "recipe": {"schedule": {"steps": 8}, "mix": {"seeds": [0, 1], "method": "regress"}},
    "tokenizer_sha256": "t",
    "table_sha256": None,
}


def write(root: Path, *names: str, text: str = "mine") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


OURS = [
    "weights.json", "runs.csv",
    "runs/proportional/seed-0/model/config.json", "runs/proxy-2/seed-10/checkpoints/latest",
    "runs/small-1234/seed-0/model/README.md", "runs/specialist-12/seed-0/model/tokenizer.json",
]  # fmt: skip


def test_the_same_mix_goes_on_and_another_one_is_told_the_difference(tmp_path: Path) -> None:
    assert folder.claim(str(tmp_path), MIX) is None
    assert json.loads((tmp_path / "mix.json").read_text()) == MIX
    assert folder.claim(str(tmp_path), MIX) is None
    for change, said in (
        ({"recipe": {"schedule": {"steps": 9}, "mix": {"seeds": [0, 1], "method": "regress"}}},
         "schedule.steps = '9' is '8' there"),
        ({"recipe": {"schedule": {"steps": 8}, "mix": {"seeds": [0], "method": "regress"}}},
         r"mix.seeds = '\[0\]' is '\[0, 1\]' there"),
        ({"tokenizer_sha256": "u"}, "tokenizer_sha256 = 'u' is 't' there"),
        ({"table_sha256": "x"}, "table_sha256 = 'x' is 'not set' there"),
        ({"recipe_digest": "d2"}, "it was begun by another version of Gristmill"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"holds another mix: {said}: set it back, or give"):
            folder.claim(str(tmp_path), {**MIX, **change})


@pytest.mark.parametrize("name", ["weights.json", "manifest.json", "runs.csv", "runs/notes.txt"])
def test_what_stands_without_a_mix_is_somebody_elses(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, "notes.txt")
    before, shown = tree(tmp_path), name.partition("/")[0]
    for call in (lambda: folder.claim(str(tmp_path), MIX), lambda: folder.clear(str(tmp_path))):
        with pytest.raises(UserError, match=f"holds '{shown}', which no run of"):
            call()
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    ["runs/notes.txt", "runs/other/seed-0/x", "runs/uniform/best/x", "runs/small-1/seed-0/x",
     "runs/uniform/seed-0/model/weights.bin", "runs/uniform/seed-0/checkpoints/old/x"],
)  # fmt: skip
def test_restart_refuses_foreign_files_and_removes_nothing(tmp_path: Path, name: str) -> None:
    folder.claim(str(tmp_path), MIX)
    write(tmp_path, *OURS, name)
    before = tree(tmp_path)
    with pytest.raises(UserError, match=r"no run of `gristmill (mix|train)` made"):
        folder.clear(str(tmp_path))
    assert tree(tmp_path) == before


def test_restart_removes_what_a_mix_wrote_and_nothing_else(tmp_path: Path) -> None:
    folder.claim(str(tmp_path), MIX)
    write(tmp_path, *OURS, "notes.txt", "runs/proportional/seed-0/notes.txt")
    write(tmp_path, "manifest.json", text='{"rounds": [], "runs": [], "specialists": []}')
    folder.clear(str(tmp_path))
    assert tree(tmp_path) == ["notes.txt", "runs/proportional/seed-0/notes.txt"]
    assert not (tmp_path / "runs" / "proxy-2").exists()
    folder.clear(str(tmp_path / "new"))  # there is nothing to throw away


@pytest.mark.parametrize("name", ["runs/proportional/seed-0/model", "weights.json", "runs.csv"])
def test_restart_keeps_what_the_new_mix_reads(tmp_path: Path, name: str) -> None:
    folder.claim(str(tmp_path), MIX)
    write(tmp_path, *OURS)
    before = tree(tmp_path)
    with pytest.raises(UserError, match=f"would throw away '{tmp_path / name}'"):
        folder.clear(str(tmp_path), ["gs://bucket/x", str(tmp_path / name)])
    assert tree(tmp_path) == before


@pytest.mark.parametrize("text", ["mine", '{"recipe": {}, "files": []}'])
def test_restart_keeps_the_manifest_of_something_else(tmp_path: Path, text: str) -> None:
    """As of a `gristmill train` whose --output was the folder of a mix."""
    folder.claim(str(tmp_path), MIX)
    write(tmp_path, *OURS)
    write(tmp_path, "manifest.json", text=text)
    before = tree(tmp_path)
    with pytest.raises(UserError, match=r"holds 'manifest.json', which no run of `gristmill mix`"):
        folder.clear(str(tmp_path))
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "change",
    [{"recipe": {"mix": {"method": "doremi"}}, "table_sha256": None}, {"table_sha256": "x"}],
)
def test_restart_keeps_a_table_that_no_such_mix_writes(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """Only a law over runs of its own writes runs.csv."""
    folder.claim(str(tmp_path), {**MIX, **change})
    write(tmp_path, *OURS)
    folder.clear(str(tmp_path))
    assert tree(tmp_path) == ["runs.csv"]


def test_a_finished_mix_gets_its_weights_back(tmp_path: Path) -> None:
    made = fake_mix(tmp_path, chars={"a": 1, "b": 3}, rounds=1, steps=3)
    text = (tmp_path / "weights.json").read_bytes()
    for name in ("weights.json", "manifest.json"):
        (tmp_path / name).rename(tmp_path / f"kept-{name}")
    (tmp_path / "runs").rename(tmp_path / "kept")
    assert folder.claim(str(tmp_path), MIX) is None
    (tmp_path / "kept-manifest.json").rename(tmp_path / "manifest.json")
    assert folder.claim(str(tmp_path), MIX) == made
    assert (tmp_path / "weights.json").read_bytes() == text
