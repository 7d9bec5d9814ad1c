"""Steps of pipelines, timed: what `bench_parallel` runs in each of some gloo processes.

All cases take turns, step by step, so that a busy machine is busy for all of them. A step begins
when all ranks have met and ends when the last one is through. The least of the steps counts;
their median is kept beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from models import files
from scripts.parallel_chains import real_batch, real_chain, sleeping_batch, sleeping_chain
from training.batches import Batch
from training.host_memory import keep_freed_memory
from training.parallel.chain import Chain, run_chain
from training.parallel.pipeline import Pipeline
from training.parallel.schedules import SCHEDULES
from training.parallel.units import Cut, Profile
from training.strategy import let_go

WARMUP_STEPS = 1
"""After the first step, whose loss is noted."""
_LEARNING_RATE = 1e-4  # as `peer_deepspeed`


_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Case:
    """A pipeline to time."""

    model: str
    bounds: tuple[int, ...]
    """Of the stages; one stage is rank 0 alone, without a pipeline, while the others wait."""
    microbatches: int
    schedule: str = "1f1b"
    profile: Profile | None = None
    """Of units that sleep; None: the real ones."""
    optimiser: bool = False
    """Whether a step ends with one of AdamW."""


@dataclass(frozen=True)
class Measured:
    """One case: seconds of a step, and the mean loss of the first one."""

    least_s: float
    median_s: float
    loss: float


@dataclass(frozen=True)
class _Place:
    """What every rank is told."""

    ranks: int
    port: int
    answer: str
    urgent: bool


def measure(
    cases: Sequence[Case], ranks: int, steps: int, work: Path, *, start_method: str = "spawn"
) -> list[Measured]:
    """Each case on `ranks` processes of this machine, `steps` timed steps each, in turn."""
    urgent = all(case.profile is not None for case in cases)
    with awake() if urgent else contextlib.nullcontext():
        found = in_ranks(
            timed_cases, (tuple(cases), steps), ranks, work, urgent=urgent,
            start_method=start_method,
        )  # fmt: skip
    return [Measured(**one) for one in found]


def in_ranks(
    program: Callable[..., Any],
    arguments: tuple[Any, ...],
    ranks: int,
    work: Path,
    *,
    urgent: bool = False,
    start_method: str = "spawn",
) -> Any:
    """What rank 0 of `program(*arguments)` gives, run in `ranks` processes of one group.

    It goes through a JSON file in `work`. The processes have one thread each. Urgent ones, which
    must take next to no processor time, go before all others where this user may ask for that.
    """
    work.mkdir(parents=True, exist_ok=True)
    answer = work / "ranks.json"
    answer.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = _Place(ranks, port, str(answer), urgent)
    given = (program, arguments, place)
    start_processes(_rank, given, ranks, start_method=start_method)  # type: ignore[no-untyped-call]
    return json.loads(answer.read_text())


def _rank(
    rank: int, program: Callable[..., Any], arguments: tuple[Any, ...], place: _Place
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(place.port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    keep_freed_memory()
    if place.urgent:
        with contextlib.suppress(PermissionError):
            # Before there is a group: its threads inherit it. No niceness is enough: a process
            # that runs may end its turn first, some milliseconds at each of three threads.
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo", rank=rank, world_size=place.ranks, timeout=_TIMEOUT)
    try:
        found = program(*arguments)
        if rank == 0:
            files.write_atomic(place.answer, json.dumps(found))
    finally:
        let_go()
        dist.destroy_process_group()


def timed_cases(cases: Sequence[Case], steps: int) -> list[dict[str, float]]:
    """The figures of `Measured` for each case, on every rank."""
    step_of = [_prepared(case) for case in cases]
    losses = [_mean_on_all(step()) for step in step_of]
    seconds: list[list[float]] = [[] for _ in cases]
    for turn in range(WARMUP_STEPS + steps):
        for step, into in zip(step_of, seconds, strict=True):
            took_s = timed(step)
            if turn >= WARMUP_STEPS:
                into.append(took_s)
    return [
        asdict(Measured(min(one), statistics.median(one), loss))
        for one, loss in zip(seconds, losses, strict=True)
    ]


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """Keep the cores from falling asleep, in the block, by work that gives way to all other.

    A core of a virtual machine that has been idle for some milliseconds takes several to come
    back: each microbatch would pay for that at each rank, and devices at work do not.
    """
    spinners = [
        subprocess.Popen([sys.executable, "-c", _SPIN, str(os.getpid())])
        for _ in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


_SPIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[1]):
    sum(range(100000))
"""


def latency(pauses: int = 30, pause_s: float = 0.02) -> float:
    """Seconds that a number takes from one rank to another that waits for it, on every rank.

    The sender has rested before, as with units that sleep: the median of some there and backs.
    """
    number, took = torch.zeros(1), []
    first, second = dist.get_rank() == 0, dist.get_rank() == 1
    for _ in range(pauses):
        dist.barrier()
        begin_s = time.perf_counter()
        if first:
            time.sleep(pause_s)
            dist.send(number, 1)
            dist.recv(number, 1)
        elif second:
            dist.recv(number, 0)
            time.sleep(pause_s)
            dist.send(number, 0)
        took.append((time.perf_counter() - begin_s - 2 * pause_s) / 2)
    found = torch.tensor(statistics.median(took), dtype=torch.float64)
    dist.broadcast(found, 0)
    return max(0.0, float(found))


def timed(step: Callable[[], object]) -> float:
    """Seconds from the meeting of all ranks until the last one is through."""
    dist.barrier()
    begin_s = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - begin_s, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _prepared(case: Case) -> Callable[[], list[Tensor]]:
    """One step of the case: gives the losses of the microbatches where the last stage is."""
    numbers = range(case.microbatches)
    if case.profile is None:
        chain = real_chain(case.model)
        batches = [real_batch(case.model, number) for number in numbers]
    else:
        chain, batches = sleeping_chain(case.profile), list(map(sleeping_batch, numbers))
    if len(case.bounds) == 2:
        return lambda: _alone(chain, batches) if dist.get_rank() == 0 else []
    pipeline = Pipeline(
        chain,
        Cut(case.bounds),
        schedule=SCHEDULES[case.schedule],
        stages_per_rank=1,
        microbatches=case.microbatches,
        mesh=None,
        device=torch.device("cpu"),
    )
    parameters = list(pipeline.module.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=_LEARNING_RATE) if case.optimiser else None
    done = iter(range(1 << 30))

    def step() -> list[Tensor]:
        outputs = pipeline.step(batches, _weigh, seed=0, step=next(done))
        if optimiser is not None:
            optimiser.step()
        for parameter in parameters:
            parameter.grad = None
        return outputs or []

    return step


def _weigh(output: Tensor, _: Batch) -> Tensor:
    return output.sum()


def _alone(chain: Chain, batches: Sequence[Batch]) -> list[Tensor]:
    """The step without a pipeline."""
    losses = []
    for batch in batches:
        loss = run_chain(chain, batch)
        torch.autograd.backward(loss.sum())
        losses.append(loss.detach())
    return losses


def _mean_on_all(losses: list[Tensor]) -> float:
    """Mean of the losses that one rank has, on every rank."""
    both = torch.tensor([sum(map(float, losses)), len(losses)], dtype=torch.float64)
    dist.all_reduce(both)
    return float(both[0] / both[1])
