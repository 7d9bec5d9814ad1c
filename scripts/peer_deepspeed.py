"""Steps of DeepSpeed's pipeline on a model of `parallel_models`; `bench_parallel` runs this.

It runs in DeepSpeed's own virtual environment, one process for each rank, with RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT set; rank 0 writes its figures as JSON. The work is that of our own
runs: the same weights, the same microbatches, fp32, AdamW of torch without clipping, one thread a
rank, freed memory kept. DeepSpeed's step takes its data from an iterator, which here holds tensors
that are ready.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from scripts.parallel_models import MICROBATCH, SHAPES, build, mean_loss, tokens

_LEARNING_RATE = 1e-4


def main() -> int:
    """Time some steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", choices=sorted(SHAPES), required=True)
    parser.add_argument("--method", required=True, help="how DeepSpeed cuts: uniform, parameters")
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--answer", type=Path, required=True)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    found = run(parsed.model, parsed.method, parsed.microbatches, parsed.warmup, parsed.steps)
    if dist.get_rank() == 0:
        parsed.answer.write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


def run(model: str, method: str, microbatches: int, warmup: int, steps: int) -> dict[str, object]:
    """Bounds of the stages in units, the mean loss of the first step, seconds of the others."""
    # ruff: noqa: PLC0415 - what DeepSpeed's environment has, and Gristmill's does not
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found]

    deepspeed.init_distributed("gloo")
    shape = SHAPES[model]
    network = PipelineModule(
        layers=list(build(shape)),
        num_stages=dist.get_world_size(),
        loss_fn=mean_loss,
        partition_method=method,
        activation_checkpoint_interval=0,
    )
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE),
        config={
            "train_micro_batch_size_per_gpu": MICROBATCH,
            "gradient_accumulation_steps": microbatches,
            "steps_per_print": 1 << 30,
        },
    )
    ready = [tokens(shape, number) for number in range(microbatches)]
    losses, seconds = [], []
    for _ in range(1 + warmup + steps):
        dist.barrier()
        begin_s = time.perf_counter()
        losses.append(float(engine.train_batch(iter(ready))))
        took = torch.tensor(time.perf_counter() - begin_s, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(float(took))
    return {
        "bounds": [int(bound) for bound in network.parts],
        "loss": losses[0],
        "seconds": seconds[1 + warmup :],
    }


if __name__ == "__main__":
    sys.exit(main())
