"""Speed of training steps: tokens/s and MFU of a decoder on random tokens.

    python -m scripts.bench_train [--recipe decoder-280m] [--steps 20] [--json FILE]

On CUDA: `decoder-280m` in bf16, compiled, with its own microbatch, in one process. On a CPU:
`decoder-small` in fp32, since the large one would take hours; a CPU's peak is in no table, so its
MFU is unknown. What is timed is a step of `gristmill train`: forward and backward passes of
all microbatches, the norm of the gradient, clipping, and the optimiser; reading data is not in it
(`scripts.bench_loader`), and the global batch is cut to a few microbatches. Tokens are full
examples of random ids in one document each; a loss must come out that random weights can have.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.errors import UserError
from models.tokenizer import SPECIAL_TOKENS
from training import microbatches
from training.batches import Batch, collate
from training.examples import Example
from training.flops import flops_per_token, labelled_share, peak_flops
from training.metrics import Window
from training.networks import build_network
from training.objectives import Objective
from training.optimisers import build_optimiser
from training.recipe import TrainRecipe, load_recipe
from training.strategy import Parallel, Placement, placed

VOCAB_SIZE = 32_000
_MICROBATCHES = 4
_WARMUP_STEPS = 3


def bench(recipe: TrainRecipe, steps: int) -> dict[str, Any]:
    """Time `steps` steps of `recipe`'s decoder on random tokens; tokens/s by the median step.

    Raises UserError for another family, and where the device has no room.
    """
    if recipe.model.family != "decoder":
        raise UserError(f"recipe '{recipe.name}' is of '{recipe.model.family}': give a decoder's")
    with placed(recipe.run) as place:
        if place.ranks > 1:
            raise UserError(f"{place.ranks} processes: this measures one device, start one process")
        try:
            return _bench(recipe, steps, place)
        except torch.cuda.OutOfMemoryError:
            raise UserError(
                f"no room for batch.microbatch = '{recipe.batch.microbatch}' on this device: "
                "give --microbatch a smaller number"
            ) from None


def _bench(recipe: TrainRecipe, steps: int, place: Placement) -> dict[str, Any]:
    length, run = recipe.examples.sequence_length, recipe.run
    network = build_network(recipe, VOCAB_SIZE)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    work = flops_per_token(network.config, length, labelled_share(recipe))
    parallel = Parallel(Objective(network), place, run)
    optimiser = build_optimiser(recipe.optimiser, network)
    dealt = [
        [_example(part * recipe.batch.microbatch + row, length)
         for row in range(recipe.batch.microbatch)]
        for part in range(_MICROBATCHES)
    ]  # fmt: skip
    batches: list[Batch] = [
        {name: tensor.to(place.device) for name, tensor in collate(part).items()} for part in dealt
    ]
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    seconds, losses = [], []
    for step in range(_WARMUP_STEPS + steps):
        begin_s = time.perf_counter()
        window = Window(parallel.objective.terms, ("random",), place.device)
        passed = microbatches.gradients(parallel, dealt, batches, window, seed=run.seed, step=step)
        norm = parallel.gradient_norm()  # waits for the device
        parallel.scale_gradients(min(1.0, 1.0 / norm))
        optimiser.step()
        optimiser.zero_grad()
        if place.device.type == "cuda":
            torch.cuda.synchronize()
        if step >= _WARMUP_STEPS:
            seconds.append(time.perf_counter() - begin_s)
        losses.append(passed.window.means()["loss"])
    if not abs(losses[0] - math.log(VOCAB_SIZE)) < 1:
        raise AssertionError(f"a first loss of {losses[0]}: the network does not compute its task")
    speed = tokens / statistics.median(seconds)
    peak = peak_flops(place.device, run.precision)
    cuda = place.device.type == "cuda"
    return {
        "recipe": recipe.name,
        "device": torch.cuda.get_device_name(place.device) if cuda else "cpu",
        "threads": None if cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "precision": run.precision,
        "compile": run.compile,
        "activation_checkpointing": run.activation_checkpointing,
        "parameters": parameters,
        "sequence_length": length,
        "microbatch": recipe.batch.microbatch,
        "tokens_per_step": tokens,
        "steps": steps,
        "step_s": round(statistics.median(seconds), 4),
        "tokens_per_s": round(speed, 1),
        "flops_per_token": work,
        "tflops_per_s": round(speed * work / 1e12, 3),
        "mfu": None if peak is None else round(speed * work / peak, 4),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _example(index: int, length: int) -> Example:
    ids = np.random.default_rng(index).integers(
        len(SPECIAL_TOKENS), VOCAB_SIZE, length, dtype=np.int32
    )
    arrays = {
        "input_ids": ids,
        "document_ids": np.zeros(length, np.int32),
        "position_ids": np.arange(length, dtype=np.int32),
    }
    return Example(index, 0, arrays)


def _table(found: dict[str, Any]) -> str:
    shown = {
        name: "unknown" if value is None and name == "mfu" else value
        for name, value in found.items()
        if value is not None or name == "mfu"
    }
    return "\n".join(f"{name:<26}{value}" for name, value in shown.items())


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON where asked. Exit code 2 for what cannot be measured."""
    parser = argparse.ArgumentParser(
        prog="bench_train", description=(__doc__ or "").split("\n", 1)[0], allow_abbrev=False
    )
    parser.add_argument("--recipe", help="a decoder's (decoder-280m on CUDA, else decoder-small)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed steps (20)")
    parser.add_argument("--microbatch", type=int, metavar="N", help="examples at once")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    parsed = parser.parse_args(arguments)
    name = parsed.recipe or ("decoder-280m" if torch.cuda.is_available() else "decoder-small")
    overrides = list(parsed.set)
    if parsed.microbatch is not None:
        overrides.append(f"batch.microbatch={parsed.microbatch}")
    try:
        if parsed.steps < 1:
            raise UserError(f"--steps '{parsed.steps}' is not a whole number of 1 or more")
        found = bench(load_recipe(name, overrides), parsed.steps)
    except UserError as error:
        print(f"bench_train: {error}", file=sys.stderr)
        return 2
    print(_table(found))
    if parsed.json:
        Path(parsed.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
