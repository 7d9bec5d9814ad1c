"""One fine-tuning run: a checkpoint (or random weights), a learning rate, a seed.

The best epoch is chosen on the validation examples. Of the test examples only the texts are seen:
their predictions are kept, and scored elsewhere when everything has been chosen. Left out on
purpose: mixed precision and several devices; the models that are compared here are small.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from training.evaluate import scores
from training.evaluate.encoding import Encoded
from training.evaluate.task_batches import (
    IGNORED,
    EncodedTask,
    inputs,
    label_ids,
    labels_of,
    shuffled_batches,
    sorted_batches,
    targets,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.evaluate.task_recipe import FineTuning
    from training.evaluate.tasks import Task

_NO_DECAY_BELOW_DIMENSIONS = 2  # biases and norms
Weights = dict[str, torch.Tensor]


@dataclass
class Run:
    """What a run found. `epochs` holds train_loss, validation_loss and validation_score of each."""

    learning_rate: float
    seed: int
    epochs: list[dict[str, float]] = field(default_factory=list)
    best_epoch: int = 0
    """From 1; 0: the loss was NaN or infinite before the end of the first epoch."""
    validation_score: float = -1.0
    test_predictions: list[list[str]] = field(default_factory=list)
    seconds: float = 0.0


def fine_tune(
    make_network: Callable[[], PreTrainedModel],
    encoded: EncodedTask,
    settings: FineTuning,
    *,
    learning_rate: float,
    seed: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Run:
    """Train, keep the weights of the best epoch on validation, predict the test examples with them.

    `make_network` is called under the seed, as the head (or all) of the network is drawn there.
    Same arguments, same result on one machine. torch's global generator is left as it was.
    """
    start = time.monotonic()
    run = Run(learning_rate, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = make_network()
        network.to(_device(settings.device))  # type: ignore[arg-type]
        best = _train(network, encoded, settings, run, progress)
        if best is not None:
            network.load_state_dict(best)
            units = [len(units) for units in encoded.task.test_units]
            run.test_predictions, _ = _predict(
                network, encoded, encoded.test.rows, units, size=settings.batch
            )
    run.seconds = round(time.monotonic() - start, 2)
    return run


def score(
    task: Task, gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> scores.Scores:
    """The task's scores of `predicted`, one row of labels for each example."""
    if task.kind == "token-classification":
        return scores.entity_scores(gold, predicted, task.labels)
    return scores.class_scores(
        [label for (label,) in gold], [label for (label,) in predicted], task.labels
    )


def _train(
    network: PreTrainedModel,
    encoded: EncodedTask,
    settings: FineTuning,
    run: Run,
    progress: Callable[[str], None],
) -> Weights | None:
    """Weights of the best epoch; None when the loss went to NaN before there was one."""
    task, rows = encoded.task, encoded.train.rows
    ids = label_ids(rows, [example.labels for example in task.train], task.labels)
    optimiser, schedule = _optimiser(network, settings, run.learning_rate, len(rows))
    best: Weights | None = None
    best_key = (-math.inf, -math.inf)
    for epoch in range(1, settings.epochs + 1):
        network.train()
        total, labels = 0.0, 0
        for numbers in shuffled_batches(rows, settings.batch, (run.seed, epoch)):
            part = [rows[number] for number in numbers]
            gold = targets(part, [ids[number] for number in numbers]).to(network.device)
            loss, count = _loss(network(**inputs(network, part, encoded.pad_id)).logits, gold)
            if not math.isfinite(loss.item()):
                progress(f"epoch {epoch}: the loss is {loss.item()}: stopped")
                return best
            optimiser.zero_grad(set_to_none=True)
            (loss / max(count, 1)).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(network.parameters(), settings.max_gradient_norm)
            optimiser.step()
            schedule.step()
            total += loss.item()
            labels += count
        found = _validate(network, encoded, settings)
        run.epochs.append({"train_loss": total / max(labels, 1), **found})
        score_, validation_loss = found["validation_score"], found["validation_loss"]
        # Equal scores (at first often 0) are told apart by the loss.
        if (score_, -validation_loss) > best_key:
            best_key = (score_, -validation_loss)
            run.best_epoch, run.validation_score = epoch, score_
            best = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        progress(
            f"epoch {epoch} of {settings.epochs}: train loss {total / max(labels, 1):.3f}, "
            f"validation {scores.MAIN_SCORE[task.kind]} {100 * score_:.2f}"
        )
        if epoch - run.best_epoch >= settings.patience:
            break
    return best


def _validate(
    network: PreTrainedModel, encoded: EncodedTask, settings: FineTuning
) -> dict[str, float]:
    task, rows = encoded.task, encoded.validation.rows
    gold = [example.labels for example in task.validation]
    units = [len(labels) for labels in gold]
    ids = label_ids(rows, gold, task.labels)
    predicted, loss = _predict(network, encoded, rows, units, size=settings.batch, ids=ids)
    value = score(task, gold, predicted).values[scores.MAIN_SCORE[task.kind]]
    return {"validation_loss": loss, "validation_score": value}


def _predict(
    network: PreTrainedModel,
    encoded: EncodedTask,
    rows: Sequence[Encoded],
    units: Sequence[int],
    *,
    size: int,
    ids: Sequence[np.ndarray] | None = None,
) -> tuple[list[list[str]], float]:
    """Labels of each example's units, and the mean loss where the true `ids` are given."""
    network.train(False)
    guesses: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(rows)
    total, labels = 0.0, 0
    with torch.no_grad():
        for numbers in sorted_batches(rows, size):
            part = [rows[number] for number in numbers]
            logits = network(**inputs(network, part, encoded.pad_id)).logits
            guess = logits.argmax(dim=-1).cpu().numpy()
            for row, number in enumerate(numbers):
                guesses[number] = (
                    guess[row, rows[number].places] if guess.ndim == 2 else guess[row : row + 1]
                )
            if ids is not None:
                gold = targets(part, [ids[number] for number in numbers])
                loss, count = _loss(logits, gold.to(network.device))
                total += loss.item()
                labels += count
    return labels_of(guesses, rows, units, encoded.task.labels), total / max(labels, 1)


def _loss(logits: torch.Tensor, gold: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed cross entropy, and the labels, of tokens (b, t, labels) or texts (b, labels)."""
    if logits.ndim == 2:
        gold = gold[:, 0]
    loss = functional.cross_entropy(
        logits.flatten(0, -2).float(), gold.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss, int((gold != IGNORED).sum())


def _optimiser(
    network: PreTrainedModel, settings: FineTuning, learning_rate: float, rows: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW; linear warm-up, then linear down to 0 at the end of the last epoch."""
    parameters = list(network.parameters())
    groups: list[dict[str, Any]] = [
        {
            "params": [one for one in parameters if one.ndim >= _NO_DECAY_BELOW_DIMENSIONS],
            "weight_decay": settings.weight_decay,
        },
        {
            "params": [one for one in parameters if one.ndim < _NO_DECAY_BELOW_DIMENSIONS],
            "weight_decay": 0.0,
        },
    ]
    steps = settings.epochs * -(-rows // settings.batch)
    warmup = math.floor(settings.warmup_share * steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return max(steps - step, 0) / (steps - warmup)

    optimiser = torch.optim.AdamW(groups, lr=learning_rate)
    return optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, factor)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
