"""What a run would be, before it starts: data, parameters, memory, disk.

The corpus is measured on a few pages of each domain, with the run's own tokenizer and examples;
nothing of the network is computed or kept in memory: its own needs are traced without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from models.errors import UserError
from training import microbatches, placing, sampler
from training.domains import mixture
from training.flops import flops_per_token, labelled_share
from training.networks import network_config
from training.parallel import layout
from training.parallel.ladder import size, usable
from training.parallel.memory import Memory, Strategy, memory_of
from training.parallel.profile import profile_recipe
from training.parallel.units import Profile
from training.prepare import Prepared, pipeline_ranks, strategy_of
from training.recipe import TrainRecipe

_PAGES = 16
_CHARS = 100_000
"""Most pages of a domain, and characters of them, that its characters for each token come from."""
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Plan:
    """A run in numbers; `to_json` and `table` show it."""

    recipe: TrainRecipe
    ranks: int
    strategy: str
    parameters: int
    examples_per_step: int
    microbatches_per_step: int
    tokens_per_step: int
    flops_per_token: float
    domains: list[dict[str, Any]]
    memory: Memory
    """Of the rank that needs the most."""
    auto: str
    """What run.strategy = "auto" changes on this machine, and why; empty: nothing."""
    checkpoint_bytes: int

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        steps = self.recipe.schedule.steps
        return {
            "ranks": self.ranks,
            "strategy": self.strategy,
            "auto": self.auto or None,
            "parameters": self.parameters,
            "steps": steps,
            "examples_per_step": self.examples_per_step,
            "microbatches_per_step": self.microbatches_per_step,
            "tokens_per_step": self.tokens_per_step,
            "tokens": self.tokens_per_step * steps,
            "flops": self.flops_per_token * self.tokens_per_step * steps,
            "memory_bytes": {**self.memory.to_json(), "total": self.memory.total},
            "memory_peak": self.memory.peak,
            "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoints_bytes": self.checkpoint_bytes * (self.recipe.checkpoint.keep + 1),
            "domains": self.domains,
        }

    def table(self) -> str:
        """For people."""
        value = self.to_json()
        memory = ", ".join(
            f"{name} {size(count)}" for name, count in self.memory.to_json().items() if count
        )
        rows = [
            f"parameters         {self.parameters:,}",
            f"step               {self.examples_per_step:,} examples, at most "
            f"{self.tokens_per_step:,} tokens, in {self.microbatches_per_step:,} microbatches",
            f"run                {value['steps']:,} steps, at most {value['tokens']:,} tokens, "
            f"{value['flops']:.2e} FLOPs",
            f"ranks              {self.ranks}, strategy {self.strategy}",
            *[f"auto               {self.auto}"] * bool(self.auto),
            f"memory of a rank   {size(self.memory.total)} at most, at the {self.memory.peak}: "
            f"{memory}",
            f"disk               {size(value['checkpoints_bytes'])}: "
            f"{self.recipe.checkpoint.keep} checkpoints of {size(self.checkpoint_bytes)}, "
            "one more while it is written",
            "",
            f"{'domain':<24}{'share':>8}{'characters':>16}{'chars/token':>13}{'tokens':>16}"
            f"{'epochs':>9}",
        ]
        for domain in sorted(self.domains, key=lambda one: -one["share"]):
            rows.append(
                f"{domain['name']:<24}{domain['share']:>8.2%}{domain['chars']:>16,}"
                f"{_number(domain['chars_per_token'], '13.2f')}"
                f"{_number(domain['tokens'], '16,.0f')}{_number(domain['epochs'], '9.2f')}"
            )
        return "\n".join(rows)


def make_plan(recipe: TrainRecipe, prepared: Prepared, ranks: int) -> Plan:
    """The plan of `recipe` on `ranks` processes; of `auto` as it would be on this machine. Raises
    UserError."""
    recipe, auto = placing.foreseen(recipe, ranks, prepared.vocab_size)
    length, steps = recipe.examples.sequence_length, recipe.schedule.steps
    examples = recipe.batch.examples(length)
    config = network_config(recipe, prepared.vocab_size)
    replicas = ranks // _stages(recipe, ranks)
    number = microbatches.count(examples, recipe.batch.microbatch, replicas)
    profile = profile_recipe(
        recipe, prepared.vocab_size, microbatch=-(-examples // number), copies=replicas
    )
    parameters = profile.parameters(0, len(profile.units))
    return Plan(
        recipe=recipe,
        ranks=ranks,
        strategy=strategy_of(recipe.run, ranks),
        parameters=parameters,
        examples_per_step=examples,
        microbatches_per_step=number,
        tokens_per_step=examples * length,
        flops_per_token=flops_per_token(config, length, labelled_share(recipe)),
        domains=_domains(recipe, prepared, examples * length * steps),
        memory=_memory(recipe, profile, ranks, number),
        auto=auto,
        checkpoint_bytes=3 * _FLOAT_BYTES * parameters,
    )


def _stages(recipe: TrainRecipe, ranks: int) -> int:
    """Ranks that hold one copy of the network in parts."""
    if strategy_of(recipe.run, ranks) != "pipeline":
        return 1
    return pipeline_ranks(recipe.run, ranks)


def _memory(recipe: TrainRecipe, profile: Profile, ranks: int, number: int) -> Memory:
    """Of the rank that needs the most, with `number` microbatches a step. A pipeline is cut by
    counted operations, whatever run.pipeline.costs: nothing is timed for a plan; and so that it
    fits this machine, where it can."""
    strategy = strategy_of(recipe.run, ranks)
    stages = _stages(recipe, ranks)
    replicas = ranks // stages
    each = number // replicas
    if strategy != "pipeline":
        return memory_of(
            profile,
            strategy=cast(Strategy, strategy),
            ranks=replicas,
            optimiser=recipe.optimiser.name,
            microbatches=each,
        )
    here = usable(placing.memory_here(recipe, ranks))
    pipe = layout.pipe_for(recipe, stages, each, copies=replicas, usable_bytes=here)
    try:
        return layout.fitting(profile, recipe, pipe)[1]
    except UserError:  # not here, or not at all: the plan says what it would take
        return layout.smallest(profile, recipe, pipe)[1]


def _domains(recipe: TrainRecipe, prepared: Prepared, tokens: int) -> list[dict[str, Any]]:
    found = []
    shards = {shard for domain in prepared.corpus.domains for shard in domain.shards}
    all_chars = sum(shard.chars for shard in shards)
    parts = mixture(prepared.corpus, "proportional")  # of host groups, which share shards, too
    for number, domain in enumerate(prepared.corpus.domains):
        chars = round(all_chars * float(parts[number]))
        kept = chars * (1 - recipe.data.held_out)
        own_tokens = tokens * float(prepared.weights[number])
        ratio = _chars_per_token(recipe, prepared, number)
        found.append(
            {
                "name": domain.name,
                "share": float(prepared.weights[number]),
                "chars": chars,
                "chars_per_token": ratio,
                "tokens": own_tokens,
                "epochs": own_tokens * ratio / kept if ratio and kept else None,
            }
        )
    return found


def _chars_per_token(recipe: TrainRecipe, prepared: Prepared, domain: int) -> float | None:
    """Characters for each token in the first pages of a domain; None when it has none."""
    texts, chars = [], 0
    for text in islice(
        sampler.pages(prepared.corpus, domain, data=recipe.data, split="train"), _PAGES
    ):
        texts.append(text[: _CHARS - chars])
        chars += len(texts[-1])
        if chars >= _CHARS:
            break
    encoded = prepared.tokenizer.encode_batch(texts, add_special_tokens=False)
    tokens = sum(len(one.ids) for one in encoded)
    return chars / tokens if tokens else None


def _number(value: float | None, shape: str) -> str:
    width = int(shape.split(".", maxsplit=1)[0].rstrip(","))
    return f"{'?':>{width}}" if value is None else f"{value:{shape}}"
