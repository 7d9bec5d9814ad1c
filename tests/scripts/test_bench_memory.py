"""The memory benchmark: one small case in a process of its own, and what the command says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from scripts import bench_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")


def test_a_process_takes_what_is_foretold() -> None:
    """A network of 2 M parameters, whose logits are 131 MB each time."""
    case = ["decoder-small", "model.size=tiny", "batch.microbatch=8", "run.precision=fp32",
            "examples.sequence_length=128", "run.compile=false"]  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-m", "scripts.bench_memory", "--case", *case],
        env=os.environ | bench_memory.MAPPED, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    row = json.loads(found.stdout)
    assert row["foretold_bytes"] > 3 * 131_072_000
    assert row["measured_above_constant"] == pytest.approx(1, abs=bench_memory.WITHIN)
    assert row["peak"] == "backward of head"


def test_figures_that_are_off_end_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"recipe": "r", "recomputation": False, "foretold_bytes": 10**9, "peak": "optimiser",
           "measured_bytes": 13 * 10**8, "measured_above_constant": 1.27}  # fmt: skip

    def run(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, json.dumps(row))

    monkeypatch.setattr(bench_memory.subprocess, "run", run)
    assert bench_memory.main([]) == 1
    assert "1,000 MB    1,300 MB   1.270  optimiser" in capsys.readouterr().out
    row["measured_above_constant"] = 0.81
    assert bench_memory.main([]) == 0
    row["measured_above_constant"] = 1.27
    assert bench_memory.main(["--allocator", "kept"]) == 0  # gaps are no fault of the figures


def test_cuda_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_memory.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench_memory.main(["--device", "cuda"])
    assert "--device 'cuda', but torch sees no CUDA device" in capsys.readouterr().err
