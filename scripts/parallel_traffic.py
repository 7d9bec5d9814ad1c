"""Bytes that a step sends, counted: every byte between ranks passes `lo` of a network namespace.

`bench_parallel` starts this as a program in a namespace of its own (`unshare -n`, root), in which
nothing else sends: what /proc/net/dev says after some steps less what it said before is theirs,
over all ranks, with the headers of TCP (about 0.1 %). Model T of `parallel_models`, 4 ranks, one
global batch of 1,024 tokens; the formulas are those of `training.parallel.traffic`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from scripts.bench_peers import RunFailed
from scripts.parallel_chains import real_batch, real_chain
from scripts.parallel_models import SHAPES, build, mean_loss, tokens
from scripts.parallel_ranks import in_ranks
from training.parallel.pipeline import Pipeline
from training.parallel.profile import profile_chain
from training.parallel.schedules import SCHEDULES
from training.parallel.traffic import by_rank, data_parallel
from training.parallel.units import Cut, Pipe

RANKS = 4
MICROBATCHES = 4
"""Of the global batch; a rank of data parallel takes one in a step, a pipeline of 2 x 2 two."""
_WARMUP_STEPS, _STEPS = 2, 4
_MODEL = "T"
_STRATEGIES = {"DDP": "ddp", "FSDP2, no reshard": "zero1", "FSDP2, reshard": "zero3"}
"""As `parallel.traffic` knows them, with one microbatch a step."""
_STAGES = {"pipeline of 4": 4, "DDP 2 x pipeline of 2": 2}
_CUTS = {4: (0, 3, 5, 7, 10), 2: (0, 5, 10)}
"""By stages."""


@dataclass(frozen=True)
class Counted:
    """Bytes of a step over all ranks."""

    method: str
    formula: str
    ring_bytes: int
    """By the formula, reduce-scatter at the price that NCCL's rings have."""
    gloo_bytes: int
    """By the formula, with gloo's reduce-scatter, which is an all-reduce inside."""
    counted_bytes: float


def count_bytes(work: Path) -> list[Counted]:
    """Every method, in a new namespace; raises RunFailed where this user may make none."""
    words = ["unshare", "-n", sys.executable, "-m", "scripts.parallel_traffic", "--work", str(work)]
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True)
    except OSError as error:
        raise RunFailed(f"no network namespace: {error}") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise RunFailed(f"exit {done.returncode}: {(lines or ['no output'])[-1][:200]}")
    return [Counted(**one) for one in json.loads(done.stdout)]


def received_bytes(table: str, interface: str = "lo") -> int:
    """What an interface has received, from the text of /proc/net/dev."""
    for line in table.splitlines():
        name, colon, figures = line.partition(":")
        if colon and name.strip() == interface:
            return int(figures.split()[0])
    raise ValueError(f"no interface '{interface}' in /proc/net/dev")


def expected(method: str) -> tuple[str, int, int]:
    """Formula of a method, and its bytes over all ranks by what `gristmill plan` reckons with:
    with rings, and as gloo does it, whose reduce-scatter sends what an all-reduce does."""
    profile = profile_chain(real_chain(_MODEL), real_batch(_MODEL, 0))
    if method in _STAGES:
        stages = _STAGES[method]
        replicas = RANKS // stages
        found = by_rank(
            profile,
            Cut(_CUTS[stages]),
            Pipe(stages, MICROBATCHES // replicas),
            replicas=replicas,
            shard=False,
            bf16=False,
        )
        sent = replicas * sum(one.total for one in found)
        return f"sum over ranks of {found[0].formula}", sent, sent
    strategy = _STRATEGIES[method]
    one = data_parallel(
        strategy,
        profile.parameters(0, len(profile.units)),
        sum(unit.parameters for unit in profile.units[1:-1]),
        ranks=RANKS,
        microbatches=1,
        bf16=False,
    )
    scattered = 0 if strategy == "ddp" else one.gradients
    return f"n x {one.formula}", RANKS * one.total, RANKS * (one.total + scattered)


def counted(method: str) -> float:
    """Bytes of a step of a method over all ranks; every rank of the group calls it."""
    step = _METHODS[method]()
    for _ in range(_WARMUP_STEPS):
        step()
    before = _received()
    for _ in range(_STEPS):
        step()
    return (_received() - before) / _STEPS


def _received() -> int:
    dist.barrier()
    found = received_bytes(Path("/proc/net/dev").read_text())
    dist.barrier()  # nobody goes on before all have read
    return found


def _data_parallel(wrap: Callable[[nn.Sequential], nn.Module]) -> Callable[[], object]:
    network = wrap(build(SHAPES[_MODEL]))
    ids, labels = tokens(SHAPES[_MODEL], dist.get_rank())

    def step() -> None:
        torch.autograd.backward(mean_loss(network(ids), labels))
        for parameter in network.parameters():
            parameter.grad = None

    return step


def _sharded(*, reshard: bool) -> Callable[[nn.Sequential], nn.Module]:
    def wrap(network: nn.Sequential) -> nn.Module:
        mesh = init_device_mesh("cpu", (RANKS,))
        for block in list(network)[1:-1]:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        # As `training.strategy`: what is in no block is needed first and last, and stays.
        fully_shard(network, mesh=mesh, reshard_after_forward=False)
        return network

    return wrap


def _pipelines(stages: int) -> Callable[[], object]:
    replicas = RANKS // stages
    mesh = init_device_mesh("cpu", (replicas, stages), mesh_dim_names=("data", "pipe"))
    each = MICROBATCHES // replicas
    pipeline = Pipeline(
        real_chain(_MODEL),
        Cut(_CUTS[stages]),
        schedule=SCHEDULES["1f1b"],
        stages_per_rank=1,
        microbatches=each,
        mesh=mesh,
        device=torch.device("cpu"),
    )
    first = mesh.get_local_rank("data") * each
    batches = [real_batch(_MODEL, first + number) for number in range(each)]

    def step() -> None:
        pipeline.step(batches, lambda output, _: output.sum(), seed=0, step=0)
        for parameter in pipeline.module.parameters():
            parameter.grad = None

    return step


_METHODS: dict[str, Callable[[], Callable[[], object]]] = {
    "DDP": lambda: _data_parallel(DistributedDataParallel),
    "FSDP2, reshard": lambda: _data_parallel(_sharded(reshard=True)),
    "FSDP2, no reshard": lambda: _data_parallel(_sharded(reshard=False)),
    "pipeline of 4": lambda: _pipelines(4),
    "DDP 2 x pipeline of 2": lambda: _pipelines(2),
}


def all_counted() -> list[dict[str, Any]]:
    """`Counted` of each method, on every rank."""
    return [asdict(Counted(method, *expected(method), counted(method))) for method in _METHODS]


def main(arguments: list[str] | None = None) -> int:
    """In a namespace whose `lo` is still down: bring it up, count, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--work", type=Path, required=True)
    parsed = parser.parse_args(arguments)
    if received_bytes(Path("/proc/net/dev").read_text()):
        print("lo has been used already: start this with `unshare -n`", file=sys.stderr)
        return 2
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print(json.dumps(in_ranks(all_counted, (), RANKS, parsed.work)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
