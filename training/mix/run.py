"""A mix from its recipe to the compared mixtures: the whole story, from top to bottom.

1. Open everything and check it (`training.mix.inputs`); take the folder (`training.mix.folder`).
2. Train what can begin, until nothing is left (`training.mix.stages` says what that is), here or in
   worker processes (`training.mix.pool`). Finished runs are found again by their manifests, half
   ones by their checkpoints: a mix that was ended at any moment goes on by the same command.
3. Read the runs' held-out losses, and write weights.json and manifest.json
   (`training.mix.results`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models import files
from models.errors import GristmillError, UserError
from training import run_folder, run_manifest
from training.doremi import read_weights
from training.metrics import duration
from training.mix import folder, guards, results
from training.mix.inputs import MixInputs, open_inputs, ranks_here
from training.mix.law import fit_law
from training.mix.pool import Executor, InProcess, Outcome, Pool
from training.mix.recipe import MixRecipe
from training.mix.results import TERM, MixManifest, RoundEntry, RunEntry
from training.mix.stages import Catalogue, DoReMiStages, LawStages, MixRun, Weights
from training.run_manifest import MANIFEST_FILE
from training.stopping import StopRequest
from training.strategy import placed
from training.together import on_first, rank

_POLL_S = 0.2


class Stopped(Exception):
    """A signal stopped the mix; what was running has been saved, to go on by the same call."""


def run_mix(
    recipe: MixRecipe, *, jobs: int = 1, restart: bool = False, quiet: bool = False
) -> MixManifest:
    """Find the recipe's mixture and compare it with the baselines, or go on with that.

    jobs: runs at once, each in a process; with one, all ranks of torchrun (or `gristmill mix
    --processes N`) train every run together, and every rank calls this. `restart` throws away what
    an earlier mix left in the folder; `quiet` keeps stderr silent. Raises UserError; Fault when a
    run fails; Stopped after SIGTERM or Ctrl+C.
    """
    if jobs > 1 and ranks_here() > 1:
        raise UserError(
            f"--jobs '{jobs}' with {ranks_here()} ranks: every run takes all ranks, one after the "
            "other: give --jobs or --processes, not both"
        )
    inputs = open_inputs(recipe)
    directory = recipe.output.directory
    place = placed(recipe.run) if jobs == 1 else contextlib.nullcontext()
    with place, StopRequest() as stop, run_folder.held(directory):
        if restart:
            on_first(lambda: folder.clear(directory, _read_by(recipe)), "cannot restart")
        manifest = on_first(
            lambda: folder.claim(directory, inputs.identity), f"cannot begin '{directory}'"
        )
        say = _Voice(shown=rank() == 0 and not quiet)
        if manifest is not None:
            say(f"already finished: {len(manifest.runs)} runs")
            return manifest
        return _Mix(recipe, inputs, stop, say, jobs=jobs, quiet=quiet).run()


class _Voice:
    """Lines on stderr."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown

    def __call__(self, text: str) -> None:
        if self._shown:
            print(text, file=sys.stderr, flush=True)


class _Mix:
    def __init__(
        self,
        recipe: MixRecipe,
        inputs: MixInputs,
        stop: StopRequest,
        say: _Voice,
        *,
        jobs: int,
        quiet: bool,
    ) -> None:
        self.recipe, self.inputs, self.stop, self.say = recipe, inputs, stop, say
        self.jobs, self.quiet = jobs, quiet
        self.directory = Path(recipe.output.directory)
        self.catalogue = Catalogue(recipe, inputs.mixtures)
        self.done: dict[str, Weights | None] = {}
        self.law: dict[str, Any] | None = None
        self.rounds: list[RoundEntry] = []
        self.warnings: list[str] = []
        self.stages: DoReMiStages | LawStages = (
            DoReMiStages(self.catalogue)
            if recipe.mix.method == "doremi"
            else LawStages(self.catalogue, inputs.drawn, self._fit)
        )

    def run(self) -> MixManifest:
        """Everything between the folder and the manifest."""
        for text in self.inputs.warnings:
            self._warn(text)
        self._train_all()
        return on_first(self._finish, f"cannot finish '{self.directory}'")

    def _train_all(self) -> None:
        """Train until nothing is left. Raises Stopped, and the error of a run that fails."""
        executor: Executor = InProcess(quiet=self.quiet) if self.jobs == 1 else Pool(self.jobs)
        failed: Outcome | None = None
        stopped = told = False
        begun: set[str] = set()
        todo = self.stages.todo(self.done)
        with contextlib.closing(executor):
            while True:
                stopped = self.stop.agreed() or stopped
                leaving = stopped or failed is not None
                if leaving and not told:
                    executor.stop()
                    told = True
                for run in todo if not leaving else []:
                    if executor.free and run.name not in begun:
                        begun.add(run.name)
                        if self.jobs == 1:
                            self.say(f"{run.label}, seed {run.seed}:")
                        executor.start(run)
                if not executor.busy:
                    break
                for outcome in executor.wait(_POLL_S):
                    if outcome.error is not None:
                        failed = failed or outcome
                    elif outcome.summary is not None and outcome.summary["status"] == "stopped":
                        stopped = True
                    else:
                        self._note(outcome)
                        todo = self.stages.todo(self.done)
        if failed is not None and failed.error is not None:
            raise _named(failed.error, failed.run)
        if stopped:
            raise Stopped

    def _note(self, outcome: Outcome) -> None:
        """One more run is finished."""
        run, summary = outcome.run, outcome.summary
        assert summary is not None
        weights = None
        if run.proxy is not None:
            weights = on_first(lambda: read_weights(run.folder), f"cannot read '{run.folder}'")
        self.done[run.name] = weights
        known = isinstance(self.stages, LawStages) or self.recipe.doremi.max_rounds == 1
        loss = summary["evaluation"]["total"]["terms"][TERM]["loss"]
        how = (
            duration(outcome.seconds) if summary["status"] == "finished" else "was finished already"
        )
        self.say(
            f"{run.label}, seed {run.seed}: {how}, held-out loss {loss:.4f} ({len(self.done)} of "
            f"{'' if known else 'at most '}{self.stages.most_runs()} runs)"
        )
        if isinstance(self.stages, DoReMiStages):
            self._note_rounds(self.stages)

    def _note_rounds(self, stages: DoReMiStages) -> None:
        rounds = stages.rounds(self.done)
        for entry in rounds[len(self.rounds) :]:
            end = stages.stopped(rounds[: entry.number])
            spread = "" if entry.spread is None else f", largest spread {entry.spread:.4f}"
            self.say(
                f"round {entry.number}: largest change of a weight {entry.change:.4f}{spread}"
                + ("" if end is None else f"; the last round: {end}")
            )
            for seed, weights in entry.weights.items():
                text = guards.collapsed(weights)
                if text is not None:
                    self._warn(f"round {entry.number}, seed {seed}: {text}")
        self.rounds = rounds

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self.say(f"warning: {text}")

    def _fit(self, small: Sequence[MixRun]) -> Weights:
        """The law's best mixture, from the user's table or from the small runs."""
        self.say("fitting the law")
        law = on_first(
            lambda: fit_law(self.recipe, self.inputs, small, self.directory), "cannot fit the law"
        )
        self.law = law
        for text in law["notes"]:
            self.say(f"the law: {text}")
        self.say(
            f"the law: {law['regressor']}, rank correlation {law['scores'][law['regressor']]:.2f} "
            "with runs that it had not seen"
        )
        for text in law["doubts"]:
            self._warn(f"the law: {text}")
        return {name: results.law_weights(law, "best")[name] for name in self.inputs.names}

    def _finish(self) -> MixManifest:
        """The files of the mix; then it is finished."""
        groups = dict(self.catalogue.baselines)
        stages = self.stages
        if isinstance(stages, DoReMiStages):
            found: Mapping[str, float] = self.rounds[-1].mean
            groups |= stages.stage_runs(self.rounds)
            main, end = stages.main_runs(self.rounds), stages.stopped(self.rounds)
        else:
            assert self.law is not None
            found = results.law_weights(self.law, "best")
            groups |= {run.label: [run] for run in stages.small}
            main, end = stages.main_runs(), None
        groups[stages.label] = main
        recipe = self.recipe
        length = recipe.examples.sequence_length
        tokens = main[0].recipe.schedule.steps * recipe.batch.examples(length) * length
        epochs = guards.epochs(found, tokens, self.inputs.tokens_once)
        for text in guards.repeated({stages.label: epochs}):
            self._warn(text)
        manifest = results.build(
            recipe,
            self.inputs.prepared.corpus,
            tokenizer_sha256=self.inputs.prepared.identity["tokenizer_sha256"],
            sources=self.inputs.prepared.identity["sources"],
            epochs=epochs,
            rounds=self.rounds,
            runs=self._entries(groups),
            specialists=self._entries(self.catalogue.specialists),
            law=self.law,
            warnings=self.warnings,
            stopped=end,
        )
        results.write(self.directory, manifest)
        return manifest

    def _entries(self, groups: Mapping[str, Sequence[MixRun]]) -> list[RunEntry]:
        return [self._entry(label, run) for label, runs in groups.items() for run in runs]

    def _entry(self, label: str, run: MixRun) -> RunEntry:
        manifest = run_manifest.read(run.folder)
        assert manifest.held_out is not None
        return RunEntry(
            label=label,
            seed=run.seed,
            run=Path(os.path.relpath(run.folder, self.directory)).as_posix(),
            manifest_sha256=files.sha256_file(Path(run.folder) / MANIFEST_FILE),
            size=run.recipe.model.size,
            steps=manifest.counts.steps,
            tokens=manifest.counts.tokens,
            weights=manifest.domains,
            losses=results.held_out_losses(manifest),
            standard_errors={
                name: entry.terms[TERM].standard_error
                for name, entry in manifest.held_out.domains.items()
                if entry.terms
            },
        )


def _named(error: GristmillError, run: MixRun) -> GristmillError:
    """The same error, which says what run it ended."""
    return type(error)(f"run '{run.label}' of seed {run.seed}: {error}")


def _read_by(recipe: MixRecipe) -> list[str]:
    """Files and folders that the mix reads, which --restart must not take away."""
    doremi = recipe.doremi
    names = [recipe.model.tokenizer, recipe.model.init, doremi.reference_run, recipe.regress.table]
    if isinstance(doremi.reference, str) and doremi.reference not in ("proportional", "uniform"):
        names.append(doremi.reference)
    return [name for name in names if name]
