"""Fine-tuning and comparison on tasks whose answer is known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from models.errors import UserError
from tests.training.tiny_checkpoints import save_checkpoint, write_sentences, write_table
from training.evaluate import comparison, fine_tuning
from training.evaluate.checkpoint_folder import find_checkpoints
from training.evaluate.comparison import compare, contenders_of
from training.evaluate.tables import task_table
from training.evaluate.task_recipe import TaskRecipe
from training.evaluate.tasks import SealedLabels, load_task

TOKENS, SEQUENCES = "token-classification", "sequence-classification"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "model")


def _recipe(folder: Path, kind: str, **fine_tuning: Any) -> TaskRecipe:
    settings = {"learning_rates": [3e-3], "seeds": [0], "epochs": 6, "max_length": 40, "batch": 16}
    return TaskRecipe.model_validate(
        {
            "name": "tiny",
            "kind": kind,
            "data": {"directory": str(folder), "train": "train", "test": "test"},
            "fine_tuning": {"device": "cpu", **settings, **fine_tuning},
        }
    )


def _files(folder: Path, kind: str, *, count: int = 300, shuffled: bool = False) -> Path:
    for seed, name in enumerate(("train", "test")):
        if kind == TOKENS:
            write_sentences(folder / name, count, seed)
        else:
            write_table(folder / name, count, seed, shuffled=shuffled)
    return folder


def _compare(recipe: TaskRecipe, checkpoint: Path, **options: Any) -> dict[str, Any]:
    return compare(recipe, load_task(recipe), find_checkpoints([str(checkpoint)]), **options)


def test_entities_that_words_tell_are_learnt(tmp_path: Path, checkpoint: Path) -> None:
    recipe = _recipe(_files(tmp_path, TOKENS), TOKENS)
    result = _compare(recipe, checkpoint, random_baseline=False)
    assert result["models"][0]["test"]["f1"]["mean"] > 0.9
    assert result["constant"]["name"] == "always O"
    assert result["constant"]["test"]["f1"] == 0.0


def test_classes_that_a_word_tells_are_learnt(tmp_path: Path, checkpoint: Path) -> None:
    recipe = _recipe(_files(tmp_path, SEQUENCES), SEQUENCES)
    result = _compare(recipe, checkpoint, random_baseline=False)
    assert result["models"][0]["test"]["accuracy"]["mean"] > 0.9


def test_labels_at_random_are_not_learnt(tmp_path: Path, checkpoint: Path) -> None:
    recipe = _recipe(_files(tmp_path, SEQUENCES, shuffled=True), SEQUENCES)
    result = _compare(recipe, checkpoint, random_baseline=False)
    # 300 coins: five standard deviations are 0.144.
    assert abs(result["models"][0]["test"]["accuracy"]["mean"] - 0.5) < 0.144


def test_a_decoder_takes_both_kinds(tmp_path: Path) -> None:
    decoder = save_checkpoint(tmp_path / "decoder", family="decoder")
    for kind in (TOKENS, SEQUENCES):
        folder = tmp_path / kind
        folder.mkdir()
        recipe = _recipe(_files(folder, kind), kind)
        result = _compare(recipe, decoder, random_baseline=False)
        assert result["models"][0]["test"][result["main_score"]]["mean"] > 0.8


def test_test_labels_are_opened_once_after_every_choice(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    opened, tuned = SealedLabels.open, comparison.fine_tune

    def spied_open(self: SealedLabels) -> tuple[tuple[str, ...], ...]:
        events.append("open")
        return opened(self)

    def spied_tune(*arguments: Any, **options: Any) -> fine_tuning.Run:
        events.append("tune")
        return tuned(*arguments, **options)

    monkeypatch.setattr(SealedLabels, "open", spied_open)
    monkeypatch.setattr(comparison, "fine_tune", spied_tune)
    recipe = _recipe(
        _files(tmp_path, SEQUENCES, count=40), SEQUENCES,
        learning_rates=[1e-3, 3e-3], seeds=[0, 1, 2], epochs=1,
    )  # fmt: skip
    _compare(recipe, checkpoint)
    # Two models, each 2 rates with the first seed and the best with 2 more.
    assert events == ["tune"] * 2 * (2 + 2) + ["open"]


def test_test_labels_change_scores_and_nothing_else(tmp_path: Path, checkpoint: Path) -> None:
    found = []
    for name in ("right", "wrong"):
        folder = tmp_path / name
        folder.mkdir()
        _files(folder, SEQUENCES)
        if name == "wrong":
            text = (folder / "test").read_text()
            swapped = text.replace("\tperson", "\t?").replace("\tplace", "\tperson")
            (folder / "test").write_text(swapped.replace("\t?", "\tplace"))
        recipe = _recipe(folder, SEQUENCES, learning_rates=[1e-5, 3e-3], epochs=4)
        found.append(_compare(recipe, checkpoint, random_baseline=False, output=str(folder)))
    first, second = (one["models"][0] for one in found)
    for same in ("learning_rate", "validation_by_learning_rate"):
        assert first[same] == second[same]
    assert first["learning_rate"] == 3e-3
    (seed_1,), (seed_2,) = (
        [json.loads(path.read_text()) for path in (tmp_path / name / "models").rglob("*.json")]
        for name in ("right", "wrong")
    )
    for same in ("best_epoch", "epochs", "test_predictions"):
        assert seed_1[same] == seed_2[same]
    accuracy = first["test"]["accuracy"]["mean"]
    assert second["test"]["accuracy"]["mean"] == pytest.approx(1 - accuracy)


def test_the_best_learning_rate_and_epoch_are_those_of_validation(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {(1e-3, 0): 0.2, (1e-3, 1): 0.9, (2e-3, 0): 0.5, (2e-3, 1): 0.7}  # means 0.55, 0.6

    def tuned(*_: Any, learning_rate: float, seed: int, **__: Any) -> fine_tuning.Run:
        answers = [["person"]] * 40
        epochs = [{"validation_loss": 1.0}]
        return fine_tuning.Run(learning_rate, seed, epochs, 1, scores[learning_rate, seed], answers)

    monkeypatch.setattr(comparison, "fine_tune", tuned)
    recipe = _recipe(
        _files(tmp_path, SEQUENCES, count=40), SEQUENCES,
        learning_rates=[1e-3, 2e-3], seeds=[0, 1], search_seeds=2,
    )  # fmt: skip
    (model,) = _compare(recipe, checkpoint, random_baseline=False)["models"]
    assert model["learning_rate"] == 2e-3
    assert model["validation_by_learning_rate"] == pytest.approx({"0.001": 0.55, "0.002": 0.6})
    assert [run["validation_score"] for run in model["runs"]] == [0.5, 0.7]


def test_of_equal_scores_the_lower_loss_is_taken(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no entity found at any rate all scores are 0; the first rate is no better for that."""
    losses = {1e-3: 0.9, 2e-3: 0.4, 3e-3: 0.6}

    def tuned(*_: Any, learning_rate: float, seed: int, **__: Any) -> fine_tuning.Run:
        epochs = [{"validation_loss": losses.get(learning_rate, 0.0)}]
        best = int(learning_rate in losses)  # at the last rate the loss is NaN in the first epoch
        return fine_tuning.Run(learning_rate, seed, epochs, best, best - 1.0, [["person"]] * 40)

    monkeypatch.setattr(comparison, "fine_tune", tuned)
    rates = [*losses, 4e-3]
    recipe = _recipe(_files(tmp_path, SEQUENCES, count=40), SEQUENCES, learning_rates=rates)
    (model,) = _compare(recipe, checkpoint, random_baseline=False)["models"]
    assert model["learning_rate"] == 2e-3


def test_checkpoints_are_compared_with_each_other_and_with_random_weights() -> None:
    def model(name: str, shape: str, mean: float, *, random: bool = False) -> dict[str, Any]:
        return {"name": name, "random": random, "shape": shape,
                "test": {"f1": {"mean": mean, "std": 0.03}}}  # fmt: skip

    models = [model("a", "s", 0.5), model("b", "s", 0.75), model("c", "t", 0.25),
              model("r", "s", 0.125, random=True)]  # fmt: skip
    found = comparison._differences(models, "f1")
    assert [(one["name"], one["less"], one["mean"]) for one in found] == [
        ("a", "r", 0.375), ("b", "a", 0.25), ("b", "r", 0.625), ("c", "a", -0.25), ("c", "b", -0.5)
    ]  # fmt: skip
    assert found[0]["std"] == pytest.approx(0.03 * 2**0.5)


def test_weights_of_the_best_epoch_predict(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epoch 2 is made the best; the predictions are those of a run that ends there."""
    _files(tmp_path, SEQUENCES, count=60)
    real = fine_tuning._validate
    fake_scores = iter([0.1, 0.8, 0.3, 0.2, 0.9, 0.1, 0.8])

    def validate(*arguments: Any) -> dict[str, float]:
        return real(*arguments) | {"validation_score": next(fake_scores)}

    monkeypatch.setattr(fine_tuning, "_validate", validate)
    # Constant rate: so that a shorter run takes the same steps.
    monkeypatch.setattr(
        fine_tuning.torch.optim.lr_scheduler, "LambdaLR",
        lambda optimiser, _: torch.optim.lr_scheduler.ConstantLR(optimiser, factor=1.0),
    )  # fmt: skip
    runs: list[dict[str, Any]] = []
    for name, epochs, patience in (("long", 6, 2), ("short", 2, 6)):
        recipe = _recipe(tmp_path, SEQUENCES, epochs=epochs, patience=patience)
        if name == "short":
            fake_scores = iter([0.1, 0.8])
        _compare(recipe, checkpoint, random_baseline=False, output=str(tmp_path / name))
        (path,) = (tmp_path / name / "models").rglob("seed-0.json")
        runs.append(json.loads(path.read_text()))
    assert [run["best_epoch"] for run in runs] == [2, 2]
    assert [len(run["epochs"]) for run in runs] == [4, 2]  # patience 2 after epoch 2
    assert runs[0]["test_predictions"] == runs[1]["test_predictions"]


def test_finished_runs_are_not_run_again(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _files(tmp_path, SEQUENCES, count=40)
    output = str(tmp_path / "out")
    first = _recipe(tmp_path, SEQUENCES, seeds=[0, 1], epochs=1)
    before = _compare(first, checkpoint, output=output)
    calls = []
    tuned = comparison.fine_tune

    def spied(*arguments: Any, **options: Any) -> fine_tuning.Run:
        calls.append(options["seed"])
        return tuned(*arguments, **options)

    monkeypatch.setattr(comparison, "fine_tune", spied)
    assert _compare(first, checkpoint, output=output) == before
    assert calls == []
    _compare(_recipe(tmp_path, SEQUENCES, seeds=[0, 1, 7], epochs=1), checkpoint, output=output)
    assert calls == [7, 7]
    _compare(_recipe(tmp_path, SEQUENCES, seeds=[0], epochs=2), checkpoint, output=output)
    assert calls == [7, 7, 0, 0]
    saved = json.loads((tmp_path / "out" / "result.json").read_text())
    assert saved["recipe"]["fine_tuning"]["epochs"] == 2
    assert "random, as model" in (tmp_path / "out" / "table.txt").read_text()


def test_one_random_model_for_each_shape(tmp_path: Path, checkpoint: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    decoder = save_checkpoint(tmp_path / "decoder", family="decoder")
    folders = find_checkpoints([str(checkpoint), str(other), str(decoder)])
    names = [one.name for one in contenders_of(folders, random_baseline=True)]
    assert names == ["model", "other", "decoder", "random, as model", "random, as decoder"]
    assert len(contenders_of(folders, random_baseline=False)) == 3


def test_table() -> None:
    """Mean, standard deviation, difference: golden."""
    result = {
        "task": "t", "kind": TOKENS, "main_score": "f1",
        "recipe": {"fine_tuning": {"seeds": [0, 1, 2]}},
        "data": {"examples": {"train": 1500, "validation": 10, "test": 20}},
        "models": [
            {"name": "ours", "learning_rate": 3e-4,
             "runs": [{"best_epoch": 3}, {"best_epoch": 4}, {"best_epoch": 3}],
             "test": {"accuracy": {"mean": 0.9, "std": 0.01}, "f1": {"mean": 0.5, "std": 0.02}}},
        ],
        "constant": {"name": "always O", "test": {"accuracy": 0.8, "f1": 0.0}},
        "differences": [{"name": "ours", "less": "random", "mean": 0.125, "std": 0.03}],
    }  # fmt: skip
    lines = task_table(result).split("\n")
    assert lines[3:] == [
        "model     learning rate  epochs            f1      accuracy",
        "ours             0.0003   3/4/3  50.00 ± 2.00  90.00 ± 1.00",
        "always O              -       -          0.00         80.00",
        "",
        "ours less random: f1 +12.50 ± 3.00",
    ]


def test_a_loss_that_is_not_finite_is_told(tmp_path: Path, checkpoint: Path) -> None:
    recipe = _recipe(_files(tmp_path, SEQUENCES, count=40), SEQUENCES, learning_rates=[1e30])
    with pytest.raises(UserError, match=r"learning rate '1e\+30'.* went to NaN"):
        _compare(recipe, checkpoint, random_baseline=False)


def test_damaged_checkpoints(tmp_path: Path, checkpoint: Path) -> None:
    recipe = _recipe(_files(tmp_path, SEQUENCES, count=40), SEQUENCES)

    def broken(name: str) -> Path:
        shutil.copytree(checkpoint, tmp_path / name)
        return tmp_path / name

    with pytest.raises(UserError, match="is no folder"):
        find_checkpoints([str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match=r"neither config.json nor model/"):
        find_checkpoints([str(tmp_path)])
    with pytest.raises(UserError, match="is given twice"):
        find_checkpoints([str(checkpoint), str(checkpoint)])
    (broken("pickled") / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"holds no model.safetensors"):
        find_checkpoints([str(tmp_path / "pickled")])
    (broken("unknown") / "config.json").write_text('{"model_type": "no-such"}')
    with pytest.raises(UserError, match="none that transformers knows"):
        find_checkpoints([str(tmp_path / "unknown")])
    whole = (broken("cut") / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cut' cannot be loaded"):
        _compare(recipe, tmp_path / "cut", random_baseline=False)
    (broken("bare") / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        _compare(recipe, tmp_path / "bare", random_baseline=False)
    with pytest.raises(UserError, match="max_length = '65' is more than the 64 positions"):
        _compare(_recipe(tmp_path, SEQUENCES, max_length=65), checkpoint, random_baseline=False)


def test_tensors_that_are_missing_are_told(tmp_path: Path, checkpoint: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, tmp_path / "holes")
    place = tmp_path / "holes" / "model.safetensors"
    tensors = load_file(place)
    name = next(one for one in tensors if one.startswith("albert.encoder."))
    del tensors[name]
    save_file(tensors, place, metadata={"format": "pt"})
    recipe = _recipe(_files(tmp_path, SEQUENCES, count=40), SEQUENCES)
    with pytest.raises(UserError, match=f"no tensor '{name}'"):
        _compare(recipe, tmp_path / "holes", random_baseline=False)
