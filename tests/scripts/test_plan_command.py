"""`gristmill plan`: quantities, mistakes in one line, a ladder without data and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.arguments import parse
from scripts.cli import VERBS, main
from scripts.plan_command import devices_of, quantity

TINY = ["--set", "model.size=tiny", "--set", "examples.sequence_length=64", "--set",
        "batch.microbatch=2", "--set", "batch.tokens=512", "--vocab-size", "500"]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GiB", 24 * 2**30), ("80e9", 80e9), ("80 GB", 80e9), ("512mib", 2**29), ("1.5TB", 1.5e12)],
)
def test_bytes(text: str, expected: float) -> None:
    assert quantity("--memory", text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("450GB", 450e9), ("450GB/s", 450e9), ("400Gbit/s", 50e9), ("1e9", 1e9)]
)
def test_bytes_each_second(text: str, expected: float) -> None:
    assert quantity("--bandwidth", text, per_second=True) == expected


def test_devices() -> None:
    words = ["plan", "x", "--devices", "16x8", "--memory", "80GiB", "--bandwidth", "450GB",
             "--bandwidth-between", "400Gbit", "--device", "h100", "--efficiency",
             "0.5"]  # fmt: skip
    found = devices_of(parse(VERBS, words))
    assert (found.nodes, found.per_node, found.ranks) == (16, 8, 128)
    assert (found.bandwidth(inside=True), found.bandwidth(inside=False)) == (450e9, 50e9)
    assert (found.name, found.speed("bf16"), found.speed("fp32")) == ("H100", 494.5e12, 33.5e12)


@pytest.mark.parametrize(
    ("peak", "precision", "bf16", "fp32"),
    [
        ("1e12", "fp32", None, 0.4e12),
        ("1e12", "bf16", 0.4e12, None),
        ("2e12,1e12", "fp32", 0.8e12, 0.4e12),
    ],
)
def test_one_peak_is_that_of_the_recipes_precision(
    peak: str, precision: str, bf16: float | None, fp32: float | None
) -> None:
    words = ["plan", "x", "--devices", "1", "--memory", "1GB", "--peak", peak]
    found = devices_of(parse(VERBS, words), precision)
    assert (found.speed("bf16"), found.speed("fp32")) == (bf16, fp32)


MISTAKES = {
    "memory": (["--memory", "much"], "--memory 'much' is no number of bytes: give one, as 24GiB"),
    "memory in bits": (["--memory", "8Gbit"], "--memory '8Gbit' is no number of bytes"),
    "no memory": (["--memory", "0"], "--memory '0' is no number of bytes"),
    "devices": (["--devices", "8x"], "--devices '8x' is no number of devices: give N, or NODESx"),
    "no devices": (["--devices", "0"], "--devices '0' is no number of devices"),
    "device": (["--device", "H10"], "--device 'H10' is not known: did you mean 'H100'? give one"),
    "two peaks": (["--device", "H100", "--peak", "1e12"], "--device 'H100' and --peak '1e12'"),
    "peak": (["--peak", "-3"], "--peak '-3' is no speed"),
    "three peaks": (["--peak", "1e12,2e12,3e12"], "or in bf16 and in fp32, as 312e12,19.5e12"),
    "peak in words": (["--peak", "fast"], "--peak 'fast' is not a number"),
    "efficiency": (["--peak", "1e12", "--efficiency", "40"], "--efficiency '40' is no share"),
    "efficiency of nothing": (["--efficiency", "0.4"], "--efficiency '0.4' of what?"),
    "between nothing": (["--bandwidth", "1GB", "--bandwidth-between", "1GB"], "are of one node"),
    "between alone": (
        ["--devices", "2x2", "--bandwidth-between", "1GB"], "alone: give --bandwidth too",
    ),
    "tokenizer": (["--set", "model.tokenizer=nowhere"], "'nowhere'"),
    "setting": (["--set", "model.size=9b"], "'9b'"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_gets_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = MISTAKES[name]
    assert main(["plan", "decoder-small", "--devices", "1", "--memory", "1GB", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert message in output.err


def test_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    words = ["plan", "decoder-small", "--devices", "2", "--memory", "1GB", *TINY]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "network   decoder tiny, " in text
    assert "first that fits: data parallel" in text
    command = text.strip().split("\n")[-1]
    assert command.startswith("gristmill train decoder-small --set model.size=tiny ")
    assert "run.strategy=ddp" in command
    assert main([*words, "--json", "--device", "H100"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["chosen"] == "data parallel"
    assert value["rungs"][0]["step_s"] > 0
    assert value["command"] == command
    assert not list(tmp_path.iterdir())


def test_settings_of_a_pipeline_stay_out_of_a_command_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`gristmill train` refuses them with any other strategy."""
    words = ["plan", "decoder-small", "--devices", "2", "--memory", "1GB", *TINY]
    assert main([*words, "--set", "run.pipeline.schedule=zbv"]) == 0
    command = capsys.readouterr().out.strip().split("\n")[-1]
    assert "run.strategy=ddp" in command
    assert "run.pipeline" not in command


def test_a_plan_in_which_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "decoder-small", "--devices", "1", "--memory", "1MB", *TINY]) == 0
    text = capsys.readouterr().out
    assert "nothing fits: the least is" in text
    assert "gristmill train" not in text
