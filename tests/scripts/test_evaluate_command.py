"""`gristmill evaluate` from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from scripts.cli import main
from tests.training.corpora import make_corpus, random_pages
from tests.training.tiny_checkpoints import save_checkpoint, write_table

_FAST = ("epochs=1", "seeds=[0, 1]", "learning_rates=[1e-3]", "max_length=40")
FAST = [word for setting in _FAST for word in ("--set", f"fine_tuning.{setting}")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "model"))


@pytest.fixture
def task(tmp_path: Path) -> str:
    for seed, name in enumerate(("train.tsv", "test.tsv")):
        write_table(tmp_path / name, 40, seed)
    path = tmp_path / "task.toml"
    path.write_text(
        'name = "mine"\nkind = "sequence-classification"\n'
        '[data]\ndirectory = "nowhere"\ntrain = "train.tsv"\ntest = "test.tsv"\n'
    )
    return str(path)


def test_a_task(
    checkpoint: str, task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    words = ["evaluate", checkpoint, task, "--data", str(tmp_path), "--output", str(output), *FAST]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert (output / "table.txt").read_text() == shown.out
    lines = shown.out.split("\n")
    assert lines[0].startswith("mine: sequence-classification")
    assert [line.split("  ")[0] for line in lines[4:7]] == [
        "model", "random, as model", lines[6].split("  ")[0]
    ]  # fmt: skip
    assert lines[6].startswith("always p")
    assert "seed 1: epoch 1 of 1" in shown.err
    assert main([*words, "--json"]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out) == json.loads((output / "result.json").read_text())
    assert again.err.count("finished before") == 4
    assert main([*words, "--set", "name=other"]) == 2
    assert "holds a result of 'mine', not of 'other'" in capsys.readouterr().err


def test_without_the_random_baseline(
    checkpoint: str, task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", checkpoint, task, "--data", str(tmp_path), *FAST]
    assert main([*words, "--no-random-baseline", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in result["models"]] == ["model"]
    assert result["differences"] == []


def test_held_out(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crawl = make_corpus(tmp_path / "crawl", {"en": random_pages(30), "de": random_pages(30)})
    output = tmp_path / "out"
    words = ["evaluate", checkpoint, "held-out", "--data", crawl, "--output", str(output),
             "--set", "data.held_out=0.5", "--set", "examples.sequence_length=64"]  # fmt: skip
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert (output / "table.txt").read_text() == shown
    assert [line.split()[0] for line in shown.split("\n")[3:8]] == [
        "domain", "de", "en", "all", "mean"
    ]  # fmt: skip
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    assert main(["evaluate", checkpoint, str(other), *words[2:5], *words[7:]]) == 0
    both = capsys.readouterr().out
    assert shown.rstrip() in both
    side = both.split("side by side: masked token loss in nats\n\n")[1].split("\n")
    assert side[0].split() == ["domain", "model", "other", "other", "less", "model"]
    assert [line.split()[-1] for line in side[1:4]] == ["+0.000"] * 3
    assert main([*words, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert found["settings"]["data"]["held_out"] == 0.5
    assert found["total"]["examples"] == sum(one["examples"] for one in found["domains"].values())
    assert found["total"]["terms"]["masked_token"]["loss"] == pytest.approx(3.2, abs=1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-task"], "no task 'no-task': the last word is 'held-out', 'bn-ner'"),
        (["bn-ner", "--data", "a", "b"], "--data a b: a task has one folder"),
        (["bn-ner", "--data", "a"], "data file 'a/rifat_train_data.txt' cannot be read"),
        (["bn-ner", "--set", "fine_tuning.epoch=1"], "did you mean 'epochs'?"),
        (["bn-ner", "--set", "fine_tuning.seeds=[1, 1]"], "has one value twice"),
        (["bn-ner", "--set", "fine_tuning.search_seeds=9"], "is more than the 3"),
        (["held-out"], "give --data MANIFEST"),
        (["held-out", "--no-random-baseline"], "held-out trains no model"),
    ],
)
def test_mistakes(
    checkpoint: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", checkpoint, *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    error = [line for line in shown.err.split("\n") if line.startswith("gristmill: ")]
    assert len(error) == 1
    assert message in error[0]


def test_an_output_that_cannot_be_written_is_told_before_any_work(
    checkpoint: str, task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    for place in ("file", "file/out"):
        words = ["evaluate", checkpoint, task, "--data", str(tmp_path), *FAST]
        assert main([*words, "--output", str(tmp_path / place)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"gristmill: --output '{tmp_path / place}' cannot be written (")
        assert error.count("\n") == 1


@pytest.mark.slow
def test_every_shipped_task_learns_from_its_real_files(
    checkpoint: str, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for task, folder in (("bn-ner", "ner"), ("bn-news", "cls"), ("bn-sentiment", "cls")):
        words = ["evaluate", checkpoint, task, "--data", str(data_dir / "bn" / folder), *FAST,
                 "--set", "data.train_examples=32", "--no-random-baseline", "--json"]  # fmt: skip
        assert main(words) == 0
        (model,) = json.loads(capsys.readouterr().out)["models"]
        assert len(model["runs"]) == 2
