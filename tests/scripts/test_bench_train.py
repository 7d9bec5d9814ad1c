"""The benchmark of training steps: its figures agree with each other, and it refuses in a line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from scripts.bench_train import VOCAB_SIZE, main
from training.flops import known_peak

TINY = ["--recipe", "decoder-small", "--set", "model.size=tiny", "--microbatch", "1", "--steps",
        "2", "--set", "examples.sequence_length=32", "--set", "run.device=cpu"]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_figures_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--json", str(tmp_path / "figures.json")]) == 0
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["tokens_per_step"] == 4 * 32
    assert found["tokens_per_s"] == pytest.approx(128 / found["step_s"], rel=0.05)
    assert found["tflops_per_s"] == pytest.approx(
        found["tokens_per_s"] * found["flops_per_token"] / 1e12, abs=1e-3
    )
    assert found["first_loss"] == pytest.approx(math.log(VOCAB_SIZE), abs=0.5)
    assert found["last_loss"] < found["first_loss"]
    assert found["mfu"] is None
    assert known_peak(found["device"], "bf16") is None
    assert "mfu                       unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipe", "albert-small"], "'albert-small' is of 'albert'"),
        (["--recipe", "nothing"], "'nothing'"),
        ([*TINY, "--steps", "0"], "--steps '0'"),
        ([*TINY, "--microbatch", "0"], "batch.microbatch"),
    ],
)
def test_refusals_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert (output.out, output.err.count("\n")) == ("", 1)
