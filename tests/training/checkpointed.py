"""A few steps of training between two checkpoints, on one rank or several gloo processes."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from models.albert import build_albert
from models.decoder import build_decoder
from tests.training import forked
from training import checkpoint
from training.objectives import IGNORED, Objective
from training.optimisers import build_optimiser
from training.recipe import Optimiser, Run
from training.strategy import Parallel, Placement

VOCAB = 90
EXAMPLES = 4
STATE: dict[str, Any] = {
    "step": 2,
    "counters": {"examples": 8, "tokens": 96},
    "identity": {
        "recipe_digest": "r" * 32,
        "recipe": {
            "model": {"family": "decoder", "size": "tiny"},
            "schedule": {"steps": 9},
            "examples": {"sequence_length": 12},
        },
        "tokenizer_sha256": "t" * 64,
        "sources": [{"manifest_sha256": "m" * 64, "recipe_digest": "c" * 32}],
        "domains": {"bn": 0.75, "hi": 0.25},
        "init_sha256": None,
    },
}


class Job(NamedTuple):
    """Load (or begin), train, save. losses: of `steps` steps come back."""

    family: str
    optimiser: str
    strategy: str
    steps: int
    start: int = 0
    load: str | None = None
    save: str | None = None
    recompute: bool = False


class Trained:
    """An objective with its optimiser, wrapped as a run wraps it."""

    def __init__(self, job: Job, rank: int = 0, ranks: int = 1) -> None:
        torch.manual_seed(1)
        build = build_decoder if job.family == "decoder" else build_albert
        self.objective = Objective(build("tiny", VOCAB, max_length=32))
        place = Placement(rank, ranks, torch.device("cpu"), job.strategy)
        run = Run(activation_checkpointing=job.recompute)
        self.parallel = Parallel(self.objective, place, run)
        recipe = Optimiser.model_validate({"name": job.optimiser, "learning_rate": 0.01})
        self.optimiser = build_optimiser(recipe, self.objective.network)
        self.rank, self.ranks = rank, ranks

    def step(self, number: int) -> float:
        """Take one step; the loss of its whole batch."""
        batch = _batch(number, self.objective.terms)
        counts = Objective.counts(batch)
        part = {name: tensor[self.rank :: self.ranks] for name, tensor in batch.items()}
        with self.parallel.microbatch(last=True):
            loss = (self.parallel(part).sums.sum(dim=1) / counts).sum()
            (loss * self.ranks).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        total = loss.detach().clone()
        if self.ranks > 1:
            dist.all_reduce(total)
        return float(total)

    def save(self, directory: str | Path, step: int, *, keep: int = 2, **more: Any) -> Path:
        state = more.pop("state", STATE)
        return checkpoint.save(
            directory, step, objective=self.objective, optimiser=self.optimiser, state=state,
            keep=keep, **more,
        )  # fmt: skip

    def load(self, path: str | Path) -> dict[str, Any]:
        return checkpoint.load(path, objective=self.objective, optimiser=self.optimiser)


def work(job: Job, rank: int = 0, ranks: int = 1) -> list[float]:
    """Do one job; losses of its steps."""
    trained = Trained(job, rank, ranks)
    if job.load is not None:
        found = checkpoint.latest(job.load)
        assert found is not None
        assert trained.load(found) == STATE
    losses = [trained.step(job.start + number) for number in range(job.steps)]
    if job.save is not None:
        trained.save(job.save, job.start + job.steps)
    return losses


def on_ranks(ranks: int, jobs: Sequence[Any], do: Any = work) -> list[Any]:
    """What `do(job, rank, ranks)` gives for each job on rank 0 of `ranks` processes."""
    context = forked.context()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, port, list(jobs), do, results))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        found = [results.get() for _ in processes]
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    wrong = [error for _, _, error in found if error]
    assert not wrong, wrong[0]
    return next(losses for rank, losses, _ in found if rank == 0)


def _rank(rank: int, ranks: int, port: int, jobs: list[Any], do: Any, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
        results.put((rank, [do(job, rank, ranks) for job in jobs], ""))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, [], traceback.format_exc()))


def _batch(step: int, terms: tuple[str, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(5, VOCAB, (EXAMPLES, 12), generator=generator)
    if terms == ("next_token",):
        labels = ids.roll(-1, 1)
        labels[:, -1] = IGNORED
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(12).expand(4, -1)}
    masked = torch.rand(ids.shape, generator=generator) < 0.5
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (torch.arange(12) > 5).long().expand(EXAMPLES, -1),
        "labels": torch.where(masked, ids, IGNORED),
        "sentence_order_label": torch.arange(EXAMPLES) % 2,
    }
