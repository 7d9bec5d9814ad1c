"""Examples, recipes and gradients of one step, for tests in one process and in spawned ranks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.albert import build_albert
from models.decoder import build_decoder
from training import loop, microbatches
from training.batches import blank, collate
from training.examples import IGNORED, Example
from training.metrics import Window
from training.objectives import Losses, Objective
from training.parallel import chain
from training.recipe import Run, load_recipe
from training.strategy import Parallel, Placement, placed

VOCAB = 90
LENGTH = 16
DOMAINS = ("bn", "hi")


def examples(family: str, first: int, number: int) -> list[Example]:
    """Examples `first`, `first` + 1, ...: of any length (ALBERT), of one or two documents."""
    return [_albert(index) if family == "albert" else _causal(index)
            for index in range(first, first + number)]  # fmt: skip


def _albert(index: int) -> Example:
    draw = np.random.default_rng(index)
    length = int(draw.integers(5, LENGTH + 1))
    ids = draw.integers(5, VOCAB, length, dtype=np.int32)
    labels = np.where(draw.random(length) < 0.3, ids, IGNORED).astype(np.int32)
    arrays = {
        "input_ids": ids,
        "token_type_ids": (np.arange(length) > length // 2).astype(np.int32),
        "labels": labels,
        "swapped": np.array(index % 2, dtype=np.int32),
    }
    return Example(index, index % 3 % 2, arrays)


def _causal(index: int) -> Example:
    draw = np.random.default_rng(index)
    cut = int(draw.integers(1, LENGTH + 1))
    positions = np.concatenate([np.arange(cut), np.arange(LENGTH - cut)])
    arrays = {
        "input_ids": draw.integers(5, VOCAB, LENGTH, dtype=np.int32),
        "document_ids": (np.arange(LENGTH) >= cut).astype(np.int32),
        "position_ids": positions.astype(np.int32),
    }
    return Example(index, index % 3 % 2, arrays)


def objective(family: str, dropout: float = 0.0) -> Objective:
    """The same tiny network on every call."""
    torch.manual_seed(0)
    build = build_albert if family == "albert" else build_decoder
    return Objective(build("tiny", VOCAB, dropout=dropout, max_length=LENGTH))


def window(parallel: Parallel) -> Window:
    """An empty window."""
    return Window(parallel.objective.terms, DOMAINS, parallel.place.device)


def gradients(
    parallel: Parallel,
    family: str,
    taken: Sequence[Example],
    *,
    of: int,
    microbatch: int,
    step: int,
) -> microbatches.Passed:
    """Leave the gradient of a step of `of` examples, of which this rank has `taken`."""
    place = parallel.place
    number = microbatches.count(of, microbatch, place.ranks)
    dealt = microbatches.deal(taken, number, place.rank, place.ranks)
    batches = [collate(part) if part else blank(family, LENGTH) for part in dealt]
    return microbatches.gradients(parallel, dealt, batches, window(parallel), seed=1, step=step)


def whole(objective: Objective, *, gradient: bool) -> dict[str, Tensor]:
    """Whole gradients or weights by the plain network's names."""
    found = {}
    for name, parameter in objective.network.named_parameters():
        tensor: Any = parameter.grad if gradient else parameter.detach()
        assert tensor is not None, name
        found[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
    return found


def curve(case: dict[str, Any]) -> tuple[list[float], list[dict[str, Tensor]], list[float]]:
    """Losses, gradients and norms of some steps of SGD, as this process computes them.

    case: family, strategy, examples (of a step), microbatch, steps, and fields of `Run`.
    """
    run = Run(**case.get("run", {}), strategy=case["strategy"], device="cpu")
    with placed(run) as place:
        # DDP's reducer must be gone before the process group: as its last holder it joins gloo's
        # threads under the GIL, which one of them may be waiting for.
        return _curve(case, place, run)


def _curve(
    case: dict[str, Any], place: Placement, run: Run
) -> tuple[list[float], list[dict[str, Tensor]], list[float]]:
    losses, found, norms = [], [], []
    parallel = Parallel(objective(case["family"], case.get("dropout", 0.0)), place, run)
    optimiser = torch.optim.AdamW(parallel.objective.network.parameters(), lr=1e-2, eps=1e-3)
    for step in range(case["steps"]):
        taken = [
            one for one in examples(case["family"], step * case["examples"], case["examples"])
            if one.index % place.ranks == place.rank
        ]  # fmt: skip
        passed = gradients(
            parallel, case["family"], taken,
            of=case["examples"], microbatch=case["microbatch"], step=step,
        )  # fmt: skip
        seen = passed.window
        seen.fold(place)
        losses.append(seen.means()["loss"] if place.first else 0.0)
        found.append(whole(parallel.objective, gradient=True))
        norms.append(parallel.gradient_norm())
        optimiser.step()
        optimiser.zero_grad()
    return losses, found, norms


@contextlib.contextmanager
def spoilt(passes: Collection[int]) -> Iterator[None]:
    """Let the first example of some of this process's training passes have an infinite loss.

    Of a pipeline's, where this process has its last stage.
    """
    compute, pack = Objective.forward, chain.packed
    number = -1

    def forward(self: Objective, batch: Mapping[str, Tensor]) -> Losses:
        nonlocal number
        losses = compute(self, batch)
        number += self.training
        return infinite(losses) if self.training and number in passes else losses

    def packed(losses: Losses) -> Tensor:
        nonlocal number
        number += torch.is_grad_enabled()
        return pack(infinite(losses) if torch.is_grad_enabled() and number in passes else losses)

    def infinite(losses: Losses) -> Losses:
        factors = torch.ones_like(losses.sums)
        factors[:, 0] = torch.inf
        return losses._replace(sums=losses.sums * factors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objective, "forward", forward)
        patch.setattr(chain, "packed", packed)
        yield


def rank_process(
    rank: int, ports: Sequence[int], cases: Sequence[dict[str, Any]], place: str, ranks: int = 2
) -> None:
    """One of some spawned ranks: each case's `curve`, or the run whose --set is its `train`, with
    the passes of its `spoilt` spoilt on the second rank.

    Rank 0 saves the results to `place`.

    Each case has a process group, and so a port, of its own.
    """
    os.environ.update(
        MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    results = []
    for port, case in zip(ports, cases, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        if "train" in case:
            with spoilt(case.get("spoilt", ()) if rank == 1 else ()):
                results.append(loop.train(load_recipe("demo", case["train"]), quiet=True))
        else:
            results.append(curve(case))
    if rank == 0:
        torch.save(results, place)


def free_ports(number: int) -> list[int]:
    """Ports of this machine that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
