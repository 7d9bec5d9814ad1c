"""What DoReMi does on four domains of which two are a waste, and what its ablations do.

    python -m scripts.bench_doremi [--seeds 0 1 2] [--steps 200] [--jobs 2] [--output FILE]

Corpus: `scripts.four_domains`. For each seed, which is that of the weights and of the data:

- baselines: a model on the proportional mixture, which is also the reference, and on the uniform;
- a proxy (`training.doremi`) for each excess: `excess`, and the paper's ablations `hardest` (the
  proxy's loss) and `easiest` (the reference's, the lower the more);
- a main run on each mean alpha: new weights, resampled data, the same budget;
- a specialist for each domain, which reads nothing else: the excess of a mixture in a domain is its
  held-out loss less the specialist's;
- with --rounds N, iterated DoReMi: the main run of a round is the reference of the next.

All are the decoder `tiny` (64 channels, 2 layers), 32 sequences of 64 characters a step, AdamW at a
constant 3e-3, gradients clipped at 1 and weight decay 0.01 as in the paper; its warm-up and decay
of the learning rate, made for a thousand times as many steps, are left out.

Prints one table in Markdown: means over seeds, with standard deviations. Runs that are finished in
the work folder are not done again, and their CPU time is not in the sum that is printed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from models import files
from models.errors import UserError
from scripts.four_domains import SHARES, Place, make
from training.doremi import ProxySettings, train_proxy
from training.mix.recipe import Excess
from training.recipe import TrainRecipe

DOMAINS = tuple(SHARES)
PROPORTIONAL, UNIFORM = "proportional", "uniform"
EXCESSES: tuple[Excess, ...] = ("excess", "hardest", "easiest")
STEPS = 200

Figures = dict[str, float]
"""By domain."""


@dataclass(frozen=True)
class Outcome:
    """One seed: mixtures and held-out losses (nats a character) by variant, and the specialists'
    losses, each on its own domain."""

    seed: int
    weights: dict[str, Figures]
    losses: dict[str, Figures]
    specialists: Figures

    def excess(self, variant: str) -> Figures:
        """Held-out loss less the specialist's."""
        return {name: loss - self.specialists[name] for name, loss in self.losses[variant].items()}

    def worst(self, variant: str) -> float:
        """The largest excess."""
        return max(self.excess(variant).values())

    def mean(self, variant: str) -> float:
        """The mean excess of the domains."""
        return statistics.fmean(self.excess(variant).values())


def recipe(
    place: Place, weights: Mapping[str, float] | str, directory: Path, *, seed: int, steps: int
) -> TrainRecipe:
    """One run of the experiment."""
    tree = {
        "name": "four-domains",
        "data": {
            "manifests": place.manifest,
            "weights": weights if isinstance(weights, str) else dict(weights),
            "held_out": 0.1,
            "seed": seed,
            "lanes": 8,
        },
        "examples": {"sequence_length": 64},
        "model": {"family": "decoder", "size": "tiny", "tokenizer": place.tokenizer},
        "batch": {"samples": 32, "microbatch": 32},
        "optimiser": {"learning_rate": 3e-3},
        "schedule": {"steps": steps, "warmup_steps": 0, "decay": "constant"},
        "run": {"seed": seed, "device": "cpu", "log_every": steps, "tensorboard": False},
        "checkpoint": {"every": steps, "keep": 1},
        "output": {"directory": str(directory)},
    }
    return TrainRecipe.model_validate(tree)


def train_on(
    place: Place, weights: Mapping[str, float] | str, directory: Path, *, seed: int, steps: int
) -> Figures:
    """Train on a mixture, unless it is done; the held-out losses."""
    from training import run_manifest  # noqa: PLC0415
    from training.loop import train  # noqa: PLC0415  (torch)

    train(recipe(place, weights, directory, seed=seed, steps=steps), quiet=True)
    held_out = run_manifest.read(directory).held_out
    assert held_out is not None
    return {name: held_out.domains[name].terms["next_token"].loss for name in DOMAINS}


def experiment(
    place: Place,
    folder: Path,
    seed: int,
    *,
    steps: int = STEPS,
    excesses: Sequence[Excess] = ("excess",),
    rounds: int = 1,
    uniform: bool = True,
) -> Outcome:
    """Everything for one seed, below `folder`."""
    run = partial(train_on, place, seed=seed, steps=steps)
    losses = {PROPORTIONAL: run(PROPORTIONAL, folder / PROPORTIONAL)}
    weights: dict[str, Figures] = {PROPORTIONAL: dict(SHARES)}
    if uniform:
        losses[UNIFORM] = run(UNIFORM, folder / UNIFORM)
        weights[UNIFORM] = dict.fromkeys(DOMAINS, 1 / len(DOMAINS))
    for excess in excesses:
        reference = folder / PROPORTIONAL
        for number in range(1, (rounds if excess == "excess" else 1) + 1):
            variant = excess if number == 1 else f"{excess}, round {number}"
            proxy = recipe(
                place, UNIFORM, folder / f"proxy-{excess}-{number}", seed=seed, steps=steps
            )
            settings = ProxySettings(reference=str(reference), excess=excess)
            found = train_proxy(proxy, settings, quiet=True)["weights"]
            if found is None:
                raise UserError(f"'{proxy.output.directory}' was stopped: the same call goes on")
            weights[variant] = {name: found[name] for name in DOMAINS}
            reference = folder / f"main-{excess}-{number}"
            losses[variant] = run(weights[variant], reference)
    specialists = {
        name: run({other: float(other == name) for other in DOMAINS}, folder / f"only-{name}")[name]
        for name in DOMAINS
    }
    return Outcome(seed, weights, losses, specialists)


def table(outcomes: Sequence[Outcome]) -> str:
    """Weights, held-out losses, worst and mean excess by variant, over the seeds."""
    weights = [f"weight {name}" for name in DOMAINS]
    losses = [f"loss {name}" for name in DOMAINS]
    heads = ["variant", *weights, *losses, "worst excess", "mean excess"]
    rows = [heads, ["---"] * len(heads)]
    for variant in outcomes[0].weights:
        cells = [[outcome.weights[variant][name] for outcome in outcomes] for name in DOMAINS] + [
            [outcome.losses[variant][name] for outcome in outcomes] for name in DOMAINS
        ]
        cells += [
            [outcome.worst(variant) for outcome in outcomes],
            [outcome.mean(variant) for outcome in outcomes],
        ]
        rows.append([variant, *map(_spread, cells)])
    specialists = [_spread([outcome.specialists[name] for outcome in outcomes]) for name in DOMAINS]
    rows.append(["specialists", *[""] * len(DOMAINS), *specialists, "", ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _spread(values: Sequence[float]) -> str:
    """Mean and, of more than one value, standard deviation."""
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment; print the table and the CPU time. Exit code 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="bench_doremi", description=(__doc__ or "").split("\n", 1)[0], allow_abbrev=False
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="of every run (200)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="of iterated DoReMi (1)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="seeds side by side (1)")
    parser.add_argument("--prose", metavar="FILE", help="English text (the shared data's)")
    parser.add_argument("--work", default="out/bench/doremi", help="folder of corpus and runs")
    parser.add_argument("--output", metavar="FILE", help="write all figures there, as JSON")
    parsed = parser.parse_args(arguments)
    try:
        outcomes = run_seeds(parsed)
    except UserError as error:
        print(f"bench_doremi: {error}", file=sys.stderr)
        return 2
    print(table(outcomes))
    spent_s = sum(
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    seeds = ", ".join(map(str, parsed.seeds))
    print(f"\nseeds {seeds}; {parsed.steps} steps; {spent_s:.0f} s of CPU time")
    if parsed.output:
        files.write_atomic(parsed.output, json.dumps(list(map(asdict, outcomes)), indent=1) + "\n")
    return 0


def run_seeds(parsed: argparse.Namespace) -> list[Outcome]:
    """The experiment for each seed, `--jobs` of them at a time. Raises UserError."""
    for name in ("steps", "rounds", "jobs"):
        if getattr(parsed, name) < 1:
            raise UserError(
                f"--{name} '{getattr(parsed, name)}' is not a whole number of 1 or more"
            )
    if len(set(parsed.seeds)) < len(parsed.seeds) or min(parsed.seeds) < 0:
        raise UserError(f"--seeds '{parsed.seeds}': give different whole numbers from 0 up")
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread a process: the same curve bit for bit
    work = Path(parsed.work)
    place = make(work, prose=parsed.prose)
    one = partial(_one_seed, place, work, steps=parsed.steps, rounds=parsed.rounds)
    # Processes of their own even for one job: torch reads the number of threads when it starts.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parsed.jobs, mp_context=context) as pool:
        return list(pool.map(one, parsed.seeds))


def _one_seed(place: Place, work: Path, seed: int, *, steps: int, rounds: int) -> Outcome:
    folder = work / f"steps-{steps}" / f"seed-{seed}"
    found = experiment(place, folder, seed, steps=steps, excesses=EXCESSES, rounds=rounds)
    print(f"seed {seed}: done", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
