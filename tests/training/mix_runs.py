"""Whole mixes of `gristmill mix` as processes of their own: `train_runs` with another verb."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tests.training import train_runs
from tests.training.train_runs import LIMIT_S, Inputs, Run
from training.mix.recipe import MixRecipe, load_recipe

RECIPE = """
data = {lanes = 4, held_out = 0.1}
examples = {sequence_length = 32}
model = {family = "decoder", size = "tiny"}
batch = {samples = 8, microbatch = 4}
schedule = {steps = 6, warmup_steps = 2}
run = {device = "cpu", log_every = 1, tensorboard = false}
evaluation = {examples = 8}
checkpoint = {every = 2}
mix = {seeds = [0, 1]}
"""


@dataclass(frozen=True)
class MixInputs(Inputs):
    """What every mix of a test reads."""

    def words(self, output: Path, *settings: str) -> list[str]:
        """The command line of one mix."""
        return ["mix", *super().words(output, *settings)[1:]]

    def load(self, output: Path, *fields: str) -> MixRecipe:
        """The recipe of one mix."""
        return load_recipe(
            str(self.recipe),
            [f'data.manifests="{self.manifest}"', f'model.tokenizer="{self.tokenizer}"',
             f'output.directory="{output}"', *fields],
        )  # fmt: skip


def make_inputs(folder: Path) -> MixInputs:
    """A tiny mined crawl of two languages, its tokenizer and a recipe of 6 steps for each run."""
    made = train_runs.make_inputs(folder)
    (folder / "mix.toml").write_text(RECIPE)
    return MixInputs(folder / "mix.toml", made.manifest, made.tokenizer)


def result(output: Path) -> dict[str, bytes]:
    """The files of a finished mix, byte by byte."""
    return {name: (output / name).read_bytes() for name in ("weights.json", "manifest.json")}


def wait_for_run(run: Run, name: str, step: int) -> None:
    """Wait until the run `name` of the mix has logged `step`."""
    part = Run(run.process, run.output / "runs" / name, Path())
    part.said = run.said  # type: ignore[method-assign]
    part.wait_for_step(step)


def workers(parent: int) -> list[int]:
    """Process ids of the workers that the process `parent` has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(fields[1]) == parent and b"training.mix.worker" in command:
            found.append(int(stat.parent.name))
    return found


def gone(process: int) -> bool:
    """Whether a process has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return fields[0] == "Z"


def wait_until_gone(processes: list[int]) -> None:
    """Wait until all have ended."""
    deadline_s = time.monotonic() + LIMIT_S
    while not all(map(gone, processes)):
        assert time.monotonic() < deadline_s, f"still there: {processes}, {os.getpid()}"
        time.sleep(0.02)
