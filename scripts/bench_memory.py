"""Memory of training steps: what `parallel.memory` foretells, beside what a process really takes.

    python -m scripts.bench_memory [--device cpu] [--allocator mapped] [--json FILE]

Each case is a process of its own: some steps of `gristmill train` on random tokens (forward and
backward passes of two microbatches, norm, clipping, optimiser). On a CPU the peak of its resident
memory is measured from before the network is built; `CONSTANT_BYTES` of it are no tensors (code
that is loaded late, threads, kernels' workspaces). On CUDA, for decoder-280m with and without
recomputation, it is what torch's allocator gave out at most.

allocator, on a CPU: `mapped` gives every larger block back to the system as soon as it is freed, so
that what is resident is what is alive: this tests what is foretold. `glibc` as a process is
without settings, `kept` as a training run sets it (`training.host_memory`): both leave gaps,
which are theirs and not the step's. Exits with 1 where a figure without gaps is off by more than
`WITHIN`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from training import microbatches
from training.host_memory import keep_freed_memory
from training.metrics import Window
from training.networks import build_network
from training.objectives import Objective
from training.optimisers import build_optimiser
from training.parallel.memory import memory_of
from training.parallel.profile import profile_recipe, worst_batch
from training.recipe import TrainRecipe, load_recipe
from training.strategy import Parallel, Placement

VOCAB_SIZE = 32_000
CONSTANT_BYTES = 30_000_000
"""What steps of a network of 0.1 M parameters take beside its tensors (28 MB, torch 2.13)."""
WITHIN = 0.2
_MICROBATCHES, _STEPS = 2, 2
MAPPED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_TRIM_THRESHOLD_": str(1 << 18)}
_PLAIN = ("run.compile=false", "run.precision=fp32")
_CPU = {
    "albert-small": ("batch.microbatch=16", *_PLAIN),
    "decoder-small": ("batch.microbatch=4", *_PLAIN),
    "decoder-120m": ("batch.microbatch=2", "examples.sequence_length=128", *_PLAIN),
}
_CUDA = {"decoder-280m": ("run.compile=false",)}


def measure(recipe: TrainRecipe, device: torch.device, allocator: str) -> dict[str, Any]:
    """Foretold and measured bytes of one case, in this process."""
    foretold = memory_of(
        profile_recipe(recipe, VOCAB_SIZE),
        optimiser=recipe.optimiser.name,
        microbatches=_MICROBATCHES,
    )
    _warm_up(device)
    if allocator == "kept" and not keep_freed_memory():
        raise SystemExit("--allocator 'kept': this C library cannot: give mapped")
    before = _reset(device)
    place = Placement(0, 1, device, "single")
    network = build_network(recipe, VOCAB_SIZE)
    parallel = Parallel(Objective(network), place, recipe.run)
    optimiser = build_optimiser(recipe.optimiser, network)
    batches = [
        {name: tensor.to(device) for name, tensor in _batch(recipe).items()}
        for _ in range(_MICROBATCHES)
    ]
    for step in range(_STEPS):
        window = Window(parallel.objective.terms, ("random",), device)
        dealt: list[list[Any]] = [[] for _ in batches]
        microbatches.gradients(parallel, dealt, batches, window, seed=0, step=step)
        norm = parallel.gradient_norm()
        parallel.scale_gradients(min(1.0, 1.0 / norm))
        optimiser.step()
        optimiser.zero_grad()
    measured = _peak(device) - before
    tensors = measured if device.type == "cuda" else measured - CONSTANT_BYTES
    return {
        "recipe": recipe.name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "recomputation": recipe.run.activation_checkpointing,
        "precision": recipe.run.precision,
        "allocator": allocator if device.type == "cpu" else "torch",
        "foretold_bytes": foretold.total,
        "measured_bytes": measured,
        "peak": foretold.peak,
        "measured_above_constant": round(tensors / foretold.total, 4),
    }


def _batch(recipe: TrainRecipe) -> dict[str, torch.Tensor]:
    """The largest batch, of random ordinary tokens, with a token of padding."""
    batch = worst_batch(recipe, recipe.batch.microbatch)
    draw = torch.Generator().manual_seed(0)
    for name in ("input_ids", "labels"):
        ids = torch.randint(5, VOCAB_SIZE, batch[name].shape, generator=draw)
        batch[name] = torch.where(batch[name] >= 0, ids, batch[name])
    if "attention_mask" in batch:
        batch["attention_mask"][:, -1] = 0
    return batch


def _warm_up(device: torch.device) -> None:
    """Let torch load what it needs for the first backward pass."""
    layer = torch.nn.Linear(64, 64, device=device)
    layer(torch.ones(64, 64, device=device)).sum().backward()
    torch.optim.AdamW(layer.parameters(), fused=True).step()


def _reset(device: torch.device) -> int:
    """Begin to look for a peak; bytes taken now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def _status(name: str) -> int:
    """A size of this process as Linux counts it, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'recipe':<15}{'recomputes':>11}{'foretold':>12}{'measured':>12}{'ratio':>8}  peak"]
    for row in rows:
        lines.append(
            f"{row['recipe']:<15}{'yes' if row['recomputation'] else 'no':>11}"
            f"{row['foretold_bytes'] / 1e6:>9,.0f} MB{row['measured_bytes'] / 1e6:>9,.0f} MB"
            f"{row['measured_above_constant']:>8.3f}  {row['peak']}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure every case, or with --case one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--allocator", choices=("mapped", "glibc", "kept"), default="mapped")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--case", nargs="+", metavar="WORD", help="one recipe and its settings")
    words = parser.parse_args(arguments)
    device = torch.device(words.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device 'cuda', but torch sees no CUDA device: give --device cpu")
    if device.type == "cpu" and sys.platform != "linux":
        parser.error(f"'{sys.platform}' has no /proc/self/status: give --device cuda")
    if words.case:
        name, *settings = words.case
        print(json.dumps(measure(load_recipe(name, settings), device, words.allocator)))
        return 0
    rows = []
    for name, settings in (_CPU if device.type == "cpu" else _CUDA).items():
        for again in ("false", "true"):
            case = [name, *settings, f"run.activation_checkpointing={again}"]
            options = ["--device", words.device, "--allocator", words.allocator]
            command = [sys.executable, "-m", "scripts.bench_memory", *options, "--case", *case]
            extra = MAPPED if words.allocator == "mapped" else {}
            found = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | extra
            )
            rows.append(json.loads(found.stdout.splitlines()[-1]))
            print(_table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(_table(rows))
    if words.json:
        Path(words.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if device.type == "cpu" and words.allocator != "mapped":
        return 0
    return int(any(abs(row["measured_above_constant"] - 1) > WITHIN for row in rows))


if __name__ == "__main__":
    sys.exit(main())
