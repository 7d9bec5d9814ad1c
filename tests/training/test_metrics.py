"""Window sums, metrics.jsonl after a kill, speed, and FLOPs against torch's own counter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

from models.albert import build_albert
from models.decoder import build_decoder, decoder_config
from models.errors import Fault
from training import metrics
from training.flops import flops_per_token, known_peak, peak_flops, peaks
from training.metrics import Clock, LiveLine, MetricsLog, Window, duration
from training.objectives import Losses
from training.strategy import Placement

CPU = torch.device("cpu")
ALONE = Placement(0, 1, CPU, "single")


def losses(sums: list[list[float]], counts: list[list[float]], correct: list[list[float]]) -> Any:
    return Losses(
        torch.tensor(sums, requires_grad=True),
        torch.tensor(counts, dtype=torch.float64),
        torch.tensor(correct, dtype=torch.float64),
    )


def test_window_adds_up_by_term_and_domain() -> None:
    window = Window(("masked_token", "sentence_order"), ("bn", "hi", "unseen"), CPU)
    one = losses([[6.0, 2.0], [1.0, 3.0]], [[3, 1], [1, 1]], [[1, 1], [0, 1]])
    window.add(one, torch.tensor([0, 1]))
    window.add(losses([[2.0], [0.5]], [[2], [1]], [[0], [1]]), torch.tensor([0]))
    assert window.means() == {
        "loss": round(10 / 6 + 4.5 / 3, 6),
        "terms": {
            "masked_token": {"loss": 1.666667, "accuracy": 0.333333},
            "sentence_order": {"loss": 1.5, "accuracy": 0.666667},
        },
        "domains": {
            "bn": {"masked_token": 1.6, "sentence_order": 0.75},
            "hi": {"masked_token": 2.0, "sentence_order": 3.0},
        },
    }


def test_window_goes_through_a_checkpoint_exactly() -> None:
    window = Window(("next_token",), ("bn",), CPU)
    window.add(losses([[0.1, 1e-9, 7.3]], [[3, 1, 5]], [[0, 1, 2]]), torch.tensor([0, 0, 0]))
    again = Window(("next_token",), ("bn",), CPU)
    again.restore(json.loads(json.dumps(window.state())))
    assert torch.equal(again.sums, window.sums)
    again.merge(window)
    assert torch.equal(again.sums, 2 * window.sums)
    again.fold(ALONE)
    assert torch.equal(again.sums, 2 * window.sums)
    again.clear()
    assert again.means() == {"loss": None, "terms": {}, "domains": {}}


def test_resumed_log_has_no_torn_and_no_doubled_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, step=0, tensorboard=False)
    for step in (10, 20, 30):
        log.write({"kind": "train", "step": step, "loss": 1.0})
    log.close()
    path = tmp_path / "metrics.jsonl"
    before = path.read_text().splitlines(keepends=True)
    path.write_text("".join(before) + '{"kind": "train", "st')
    log = MetricsLog(tmp_path, step=25, tensorboard=False)
    assert path.read_text() == "".join(before[:2])
    log.write({"kind": "train", "step": 30, "loss": 2.0})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30]


def test_log_refuses_nan(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, step=0, tensorboard=False)
    with pytest.raises(ValueError, match="JSON"):
        log.write({"kind": "train", "step": 1, "loss": math.nan})
    log.close()


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, step=0, tensorboard=True)
    log.write({"kind": "train", "step": 4, "loss": 2.5, "domains": {"bn": {"next_token": 1.5}}})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["train/domains/bn/next_token", "train/loss"]
    [loss] = events.Scalars("train/loss")
    assert (loss.step, loss.value) == (4, 2.5)


def test_clock_knows_speed_and_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    clock = Clock(flops_per_token=1e9, peak_flops=1e13, steps=10)
    assert clock.left_s(0) is None
    clock.step(seconds=2.0, waited_s=0.5, tokens=3000)
    clock.step(seconds=4.0, waited_s=0.1, tokens=3000)
    now = 110.0
    figures = clock.figures()
    assert figures["tokens_per_s"] == 1000.0
    assert figures["mfu"] == 0.1
    assert figures["waiting_for_data"] == 0.1
    assert figures["elapsed_s"] == 10.0
    assert clock.left_s(2) == 8 * 3.0
    assert Clock(1e9, None, 10).figures()["mfu"] is None


def test_live_line_elsewhere_than_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(1e9, 1e13, 10)
    clock.step(2.0, 0.0, 4000)
    live = LiveLine(10, shown=True)
    assert live.due(1)
    live.show(1, 3.14159, clock)
    assert not live.due(2)
    assert live.due(10)
    assert capsys.readouterr().err == (
        "step 1/10  loss 3.1416  2,000 tokens/s  MFU 20%  18 s left\n"
    )
    assert not LiveLine(10, shown=False).due(10)
    live.show(2, None, clock)  # a rank without an example
    assert capsys.readouterr().err == "step 2/10  2,000 tokens/s  MFU 20%  16 s left\n"


def test_full_disk_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "METRICS_FILE", "full")
    (tmp_path / "full").symlink_to("/dev/full")
    monkeypatch.setattr(metrics, "_truncate", lambda path, step: [])
    log = MetricsLog(tmp_path, step=0, tensorboard=False)
    with pytest.raises(Fault, match=r"cannot write '.*/full': No space left on device"):
        log.write({"kind": "train", "step": 1})
    log.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (7100, "118 min"), (12_000, "3 h 20 min"),
     (7199, "2 h 0 min"), (200_000, "2 d 7 h")],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("family", ["albert", "decoder", "grouped keys"])
def test_flops_are_those_that_torch_counts(family: str) -> None:
    length, rows = 32, 3
    network: Any
    if family == "albert":
        network = build_albert("tiny", 90, max_length=length)
    elif family == "grouped keys":
        config = decoder_config("small", 90, max_length=length)
        config.num_key_value_heads = 1
        network = LlamaForCausalLM(config)
    else:
        network = build_decoder("tiny", 90, max_length=length)
    network.set_attn_implementation("eager")  # every multiplication is one that torch counts
    ids = torch.randint(5, 90, (rows, length))
    with FlopCounterMode(display=False) as counter:
        output = network(input_ids=ids)
        logits = output.prediction_logits if family == "albert" else output.logits
        logits.sum().backward()
    expected = flops_per_token(network.config, length, 1.0) * rows * length
    # Beyond the formula: the pooler and rotary tables; short of it: no gradient of the ids.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03)


def test_flops_of_known_shapes() -> None:
    config = build_decoder("tiny", 90, max_length=32).config
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 176)
    assert flops_per_token(config, 32, 0.0) == 6 * weights + 12 * 2 * 64 * 32
    assert flops_per_token(config, 32, 0.5) == 6 * (weights + 32 * 90) + 12 * 2 * 64 * 32
    config.num_key_value_heads = 1
    assert flops_per_token(config, 32, 0.0) == 6 * (weights - 2 * 2 * 64 * 32) + 12 * 2 * 64 * 32


@pytest.mark.parametrize(
    ("name", "bf16"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
     ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA GeForce RTX 4090", 165e12), ("Tesla K80", None)],
)  # fmt: skip
def test_peaks(name: str, bf16: float | None) -> None:
    assert known_peak(name, "bf16") == bf16


def test_peak_table_is_sound() -> None:
    assert peak_flops(CPU, "bf16") is None
    names = [peak.name for peak in peaks()]
    assert len(set(names)) == len(names)
    for peak in peaks():
        assert 1e13 < peak.fp32 < peak.bf16 < 1e16
        assert known_peak(peak.name, "fp32") == peak.fp32
