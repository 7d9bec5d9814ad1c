"""Whose the folder of a run is: one run at a time, and nothing of anybody else is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from models.errors import UserError
from tests.conftest import REPOSITORY
from training import run_folder

HOLD = """
import sys, time
from pathlib import Path
from pipelines import lock
descriptor = lock.take(Path(sys.argv[1]) / "run.lock")
print("held", flush=True)
time.sleep(60)
"""


def test_one_run_at_a_time_and_a_crash_lets_go(tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(output)], stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with (
            pytest.raises(UserError, match=rf"another run is at work in output '{output}': "),
            run_folder.held(str(output)),
        ):
            pass
    finally:
        process.kill()
        process.communicate()
    assert (output / run_folder.LOCK_FILE).exists()
    with run_folder.held(str(output)):
        assert (output / run_folder.LOCK_FILE).exists()
    assert list(output.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"cannot be written: Not a directory: .*--output"),
        run_folder.held(str(tmp_path / "file" / "run")),
    ):
        pass


OURS = [
    "checkpoints/step-00000002/state.json",
    "checkpoints/latest",
    "checkpoints/.step-00000004.gristmill-partial/state.json",
    "checkpoints/.latest.0123456789ab.gristmill-tmp",
    "model/config.json",
    "model/README.md",
    "model/model.safetensors",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
    "tensorboard/events.out.tfevents.1764612345.host.1.0",
]


def write(folder: Path, *names: str, text: str = "mine") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_restart_removes_what_a_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, *OURS, "notes.txt", "data/pages.parquet")
    write(tmp_path, "metrics.jsonl", text='{"kind": "train", "step": 1}\n')
    assert run_folder.finished(str(tmp_path), {}) is None
    run_folder.clear(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "notes.txt"]


@pytest.mark.parametrize("name", ["model", "checkpoints/step-00000002", "model/tokenizer.json"])
def test_restart_keeps_what_the_new_run_needs(tmp_path: Path, name: str) -> None:
    """As --set model.init=RUN/model --output RUN --restart."""
    write(tmp_path, *OURS)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=rf"would throw away '{tmp_path / name}'"):
        run_folder.clear(str(tmp_path), ["gs://bucket/tokenizer", str(tmp_path / name)])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "name",
    ["checkpoints/checkpoint-500/model.bin", "model/weights.bin", "tensorboard/x", "metrics.jsonl",
     "checkpoints", "model"],
)  # fmt: skip
def test_files_of_somebody_else_are_named_and_stay(tmp_path: Path, name: str) -> None:
    if not name.startswith("checkpoints"):
        write(tmp_path, *OURS[:2])  # also beside a run of ours
    write(tmp_path, name, text='{"loss": 1}\n')
    before = sorted(tmp_path.rglob("*"))
    shown = "/".join(name.split("/")[:2])
    with pytest.raises(UserError, match=f"holds '{shown}', which no run"):
        run_folder.finished(str(tmp_path), {})
    with pytest.raises(UserError, match=f"holds '{shown}', which no run"):
        run_folder.clear(str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


TRACE = '{"domains": ["bn", "hi"]}\n{"step": 1, "alpha": [0.5, 0.5]}\n'


@pytest.mark.parametrize("text", ['{"loss": 1}', '{"loss": 1, "domains": []}\n', "notes\nmore"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "alpha.jsonl"])
def test_logs_of_somebody_else_are_none_that_a_kill_has_cut(
    tmp_path: Path, name: str, text: str
) -> None:
    write(tmp_path, name, text=text)
    for work in (lambda: run_folder.finished(str(tmp_path), {}),
                 lambda: run_folder.clear(str(tmp_path))):  # fmt: skip
        with pytest.raises(UserError, match=f"holds '{name}', which no run"):
            work()
    assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize("end", [0, 1, 5, 15, None])
def test_logs_that_a_kill_has_cut_are_a_runs(tmp_path: Path, end: int | None) -> None:
    write(tmp_path, "alpha.jsonl", text=TRACE[:end])
    write(tmp_path, "metrics.jsonl", text='{"kind": "train", "step": 1}\n'[:end])
    assert run_folder.finished(str(tmp_path), {}) is None
    run_folder.clear(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_restart_of_a_proxy_beside_foreign_weights_removes_nothing(tmp_path: Path) -> None:
    """It would be refused, so what the run there has learned must stay."""
    write(tmp_path, *OURS, "weights.json")
    before = sorted(tmp_path.rglob("*"))
    proxy = {"proxy": {"method": "doremi"}}
    for work in (lambda: run_folder.finished(str(tmp_path), proxy),
                 lambda: run_folder.clear(str(tmp_path), current=proxy)):  # fmt: skip
        with pytest.raises(UserError, match=r"holds 'weights\.json', which no run"):
            work()
    assert sorted(tmp_path.rglob("*")) == before
    run_folder.clear(str(tmp_path), current={})
    assert [path.name for path in tmp_path.iterdir()] == ["weights.json"]


@pytest.mark.parametrize("name", ["weights.json", "alpha.jsonl"])
def test_restart_keeps_the_weights_that_the_new_run_needs(tmp_path: Path, name: str) -> None:
    """As --set data.weights=PROXY/weights.json --output PROXY --restart."""
    write(tmp_path, *OURS, "weights.json")
    write(tmp_path, "alpha.jsonl", text=TRACE)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=rf"would throw away '{tmp_path / name}'"):
        run_folder.clear(str(tmp_path), [str(tmp_path / name)])
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "alpha.jsonl").unlink()
    run_folder.clear(str(tmp_path), [str(tmp_path / "weights.json")])  # which is nobody's trace
    assert [path.name for path in tmp_path.iterdir()] == ["weights.json"]
