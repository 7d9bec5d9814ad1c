"""Every file that a run or the next one believes, cut or with a changed byte: made again, or
refused by name; never a wrong output."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import DamagedInput
from pipelines.arrays import open_arrays
from pipelines.clean import _finished
from pipelines.sealed import read_sealed, write_sealed
from tests.pipelines.fault_runs import Runs, before_file, contents, flip

KINDS = {
    "keys": ".staging/keys/*.arrays",
    "staged pages": ".staging/pages/*[0-9a-f].parquet",
    "staged drops": ".staging/pages/*.drops.parquet",
    "report": ".staging/pages/*.json",
    "part marker": ".staging/parts/*.json",
    "part": "pages/*/*/*.parquet",
}
OFFSETS = settings(max_examples=60, deadline=None, database=None, derandomize=True)


def unfinished(kept: Path, output: Path) -> Path:
    """A copy of a run as it stands when it is killed before its manifest."""
    shutil.copytree(kept, output)
    (output / "manifest.json").unlink()
    return output


@pytest.mark.parametrize(
    ("kind", "how"),
    [pytest.param(kind, how, marks=pytest.mark.slow if (number + second) % 2 else [])
     for number, kind in enumerate(KINDS) for second, how in enumerate(("cut", "flipped"))],
)  # fmt: skip
def test_damaged_before_a_resume(
    kind: str, how: str, runs: Runs, shards: list[Path], kept: Path, whole: dict[str, bytes],
    tmp_path: Path,
) -> None:  # fmt: skip
    output = unfinished(kept, tmp_path / "output")
    rng = random.Random(kind)
    found = [path for path in sorted(output.glob(KINDS[kind])) if "drops" in kind or
             not path.name.endswith(".drops.parquet")]  # fmt: skip
    assert found
    for path in found:
        size = path.stat().st_size
        if how == "cut":
            path.write_bytes(path.read_bytes()[: rng.randrange(size)])
        else:
            flip(path, rng.randrange(size))
    runs.finish(shards, output)
    assert contents(output) == whole


def test_a_changed_digit_in_a_report_or_marker_is_not_believed(
    runs: Runs, shards: list[Path], kept: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """Valid JSON that says something else."""
    output = unfinished(kept, tmp_path / "output")
    for pattern, key in ((KINDS["report"], b'"kept": '), (KINDS["part marker"], b'"rows": ')):
        for path in output.glob(pattern):
            data = path.read_bytes()
            at = data.index(key) + len(key)
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    runs.finish(shards, output)
    assert contents(output) == whole


def test_damaged_timings_cost_nothing_but_themselves(
    runs: Runs, shards: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    running = runs.start(shards, tmp_path, pause=before_file("/timings/hash/", 3))
    running.paused()
    damaged = list((tmp_path / ".staging" / "timings").glob("hash/*/[!.]*.json"))
    assert len(damaged) == 2
    for path in damaged:
        path.write_bytes(b"{")
    running.go_on()
    assert running.end().code == 0
    assert contents(tmp_path) == whole
    pieces = json.loads((tmp_path / "timings.json").read_text())
    assert pieces["hash"]["pieces"] == 4 - 2
    assert pieces["clean"]["pieces"] == 4


def test_a_key_file_flipped_between_two_passes(
    runs: Runs, shards: list[Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    """After pass 1 has checked or written it."""
    running = runs.start(shards, tmp_path, pause=before_file("/timings/hash/", 4))
    running.paused()
    path = min((tmp_path / ".staging" / "keys").glob("[!.]*.arrays"))
    flip(path, path.stat().st_size // 3)
    running.go_on()
    ended = running.end()
    assert ended.code == 1
    (line,) = ended.lines()
    assert line.startswith("gristmill: fault: ")
    assert f"'{path}' differs from its checksum" in line
    assert line.endswith("run the same command again to go on")
    runs.finish(shards, tmp_path)
    assert contents(tmp_path) == whole


def test_an_index_is_refused_by_name_and_a_finished_one_made_again(
    runs: Runs, shards: list[Path], tmp_path: Path
) -> None:
    index, first, second = tmp_path / "index", tmp_path / "first", tmp_path / "second"
    makes = ["--set", f"dedup.index_out={index}"]
    takes = ["--set", f"dedup.index_in={index}"]
    runs.finish(shards[:2], first, *makes)
    before = contents(index)
    path = sorted(index.glob("*.arrays"))[2]
    flip(path, path.stat().st_size // 2)
    ended = runs.run(shards[2:], second, *takes)
    assert ended.code == 1
    assert f"'{path}' is missing or differs from its digest" in ended.stderr
    assert not (second / "manifest.json").exists()
    ended = runs.finish(shards[:2], first, *makes)  # it makes the index whole again
    assert "already finished" not in ended.stderr
    assert contents(index) == before
    runs.finish(shards[2:], second, *takes)
    runs.finish(shards[2:], tmp_path / "third", *takes)
    assert contents(second) == contents(tmp_path / "third")


def test_a_damaged_claim_is_refused_by_name(
    runs: Runs, shards: list[Path], kept: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    output = unfinished(kept, tmp_path / "output")
    claim = output / ".staging" / "run.json"
    claim.write_bytes(claim.read_bytes()[:20])
    ended = runs.run(shards, output)
    assert ended.code == 2
    assert "belongs to an unfinished other run" in ended.stderr
    runs.finish(shards, output, "--restart")
    assert contents(output) == whole


def test_a_model_that_is_replaced_during_the_run(
    data_dir: Path, runs: Runs, shards: list[Path], tmp_path: Path
) -> None:
    model, output = tmp_path / "own.ftz", tmp_path / "output"
    original = (data_dir / "models" / "lid.176.ftz").read_bytes()
    model.write_bytes(original)
    settings = ["--set", f"language.model={model}"]
    running = runs.start(shards, output, *settings, pause=before_file("/timings/hash/"))
    running.paused()
    other = tmp_path / "other.ftz"
    other.write_bytes(original[:-100] + bytes(100))
    other.replace(model)
    running.go_on()
    ended = running.end()
    assert ended.code == 1
    assert f"model '{model}' changed during the run" in ended.stderr
    ended = runs.run(shards, output, *settings)  # other models are another run
    assert ended.code == 2
    assert "belongs to an unfinished other run" in ended.stderr
    model.write_bytes(original)
    runs.finish(shards, output, *settings)
    runs.finish(shards, tmp_path / "fresh", *settings)
    assert contents(output) == contents(tmp_path / "fresh")


def test_a_registered_model_of_the_wrong_digest(
    data_dir: Path, runs: Runs, shards: list[Path], tmp_path: Path
) -> None:
    wrong = tmp_path / "data" / "models" / "lid.176.ftz"
    wrong.parent.mkdir(parents=True)
    wrong.write_bytes((data_dir / "models" / "lid.176.ftz").read_bytes())
    flip(wrong, 5000)
    ended = runs.start(
        shards, tmp_path / "output", GRISTMILL_DATA=str(tmp_path / "data"),
        GRISTMILL_CACHE=str(tmp_path / "cache"),
    ).end()  # fmt: skip
    assert ended.code == 2
    (line,) = ended.lines()
    assert f"'{wrong}'" in line
    assert "gristmill models fetch lid.176.ftz" in line
    assert not (tmp_path / "output").exists()


@given(data=st.data())
@OFFSETS
def test_any_byte_of_a_key_file(kept: Path, data: st.DataObject) -> None:
    """A changed byte is found, or it is one between the arrays, which nothing reads."""
    path = sorted((kept / ".staging" / "keys").glob("*.arrays"))[0]
    raw = path.read_bytes()
    at = data.draw(st.integers(0, len(raw) - 1))
    stop = data.draw(st.one_of(st.none(), st.integers(0, len(raw) - 1)))
    changed = bytearray(raw)
    changed[at] ^= data.draw(st.integers(1, 255))
    copy = path.with_name("changed")
    copy.write_bytes(changed[:stop])
    try:
        with open_arrays(path) as sound, open_arrays(copy) as file:
            file.verify()
            assert stop is None
            assert file.header == sound.header
            for name in ("distinct", "page_counts", "inverse", "offsets"):
                assert np.array_equal(file.read(name), sound.read(name))
    except DamagedInput:
        pass
    finally:
        copy.unlink()


@given(data=st.data())
@OFFSETS
def test_any_byte_of_a_staging_file_and_its_report(kept: Path, data: st.DataObject) -> None:
    report = sorted((kept / ".staging" / "pages").glob("*.json"))[0]
    base = str(report).removesuffix(".json")
    assert _finished(base) is not None
    path = Path(base + data.draw(st.sampled_from([".parquet", ".drops.parquet", ".json"])))
    raw = path.read_bytes()
    changed = bytearray(raw)
    changed[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        path.write_bytes(changed)
        assert _finished(base) is None
    finally:
        path.write_bytes(raw)


@given(at=st.integers(0, 10_000), mask=st.integers(1, 255), cut=st.booleans())
@OFFSETS
def test_any_byte_of_a_sealed_file(
    at: int, mask: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    value = {"rows": 12, "text": "বাংলা", "none": None, "list": [1.5, True]}
    path = tmp_path_factory.mktemp("sealed") / "value.json"
    write_sealed(path, value)
    assert read_sealed(path) == json.loads(path.read_text())["value"] == value
    raw = bytearray(path.read_bytes())
    at %= len(raw)
    if cut:
        del raw[at:]
    else:
        raw[at] ^= mask
    path.write_bytes(raw)
    with pytest.raises(DamagedInput, match="differs from its checksum"):
        read_sealed(path)
