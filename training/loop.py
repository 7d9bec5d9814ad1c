"""A training run from its recipe to the exported model: the whole story, from top to bottom.

Each step takes the next examples of the global stream, computes this rank's microbatches of them,
and moves the weights by the gradient of

    sum over terms of (sum of the losses of all labels / labels in the global batch)

so padding, uneven microbatches and ranks with fewer examples change nothing. (Another loss, as
that of DoReMi's proxy, comes in as a `training.learning.Learning`.) The same recipe and
data give the same curve on any number of ranks, up to the rounding of sums (with dropout: for
every number of ranks that divides the microbatches of a step, see `training.microbatches`; the
masks of a pipeline are others than those of the other strategies, and the same for every cut and
number of stages). On one
machine, on a CPU with one thread a process, the curve is the same bit for bit. What breaks that:
more threads, or another number of them; CUDA (attention's backward pass and embeddings add up in
any order); another version of torch.

What a checkpoint holds, where it lies and when it is refused: `training.checkpoint`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models.tokenizer import profile_of
from training import (
    checkpoint,
    identity,
    microbatches,
    placing,
    run_folder,
    run_manifest,
    skips,
)
from training.evaluations import Evaluations
from training.export import export, max_tokens
from training.flops import flops_per_token, labelled_share, peak_flops
from training.learning import Learning, Plain
from training.metrics import Clock, LiveLine, MetricsLog, Window
from training.microbatches import Passed
from training.networks import build_network
from training.objectives import Objective
from training.optimisers import build_optimiser
from training.pipelined import Pipelined
from training.prepare import Prepared, check_pipeline, prepare
from training.recipe import TrainRecipe
from training.run_folder import MODEL_FOLDER
from training.sampler import ExampleStream, merge_states
from training.schedules import learning_rate_factor
from training.stopping import StopRequest
from training.strategy import Placement, placed
from training.summary import already_finished, summary
from training.together import on_first


def train(
    recipe: TrainRecipe,
    *,
    restart: bool = False,
    quiet: bool = False,
    learning: Learning | None = None,
) -> dict[str, Any]:
    """Train the recipe's model, or go on with it, until its last step or a signal.

    Every rank calls it (see `training.strategy.placed`). Gives the summary: `status` is 'finished',
    'already finished' or 'stopped' (SIGTERM, Ctrl+C: saved, to go on by the same call). `restart`
    throws away what an earlier run left in the folder; `quiet` keeps stderr silent. `learning`:
    what a step lowers, where it is not the loss above. Raises UserError; Fault when the gradients
    stay infinite or a checkpoint cannot be written.
    """
    learning = learning or Plain()
    prepared = learning.prepared(recipe, prepare(recipe))
    directory = recipe.output.directory
    with placed(recipe.run) as place, StopRequest() as stop, run_folder.held(directory):
        check_pipeline(recipe, place.ranks)
        if restart:
            named = (recipe.model.tokenizer, recipe.model.init, recipe.data.weights_file)
            inputs = [*filter(None, named), *learning.inputs]
            on_first(
                lambda: run_folder.clear(directory, inputs, current=prepared.identity),
                "cannot restart",
            )
        manifest = run_folder.finished(directory, prepared.identity)
        if manifest is not None:
            return already_finished(recipe, manifest)
        settled, reason = place, ""
        if isinstance(learning, Plain):
            recipe, settled, reason = placing.settle(recipe, place, prepared.vocab_size)
        run = _Run(recipe, prepared, settled, stop, learning, quiet=quiet)
        if reason:
            run.live.say(reason)
        summary = run.run()
        del run  # what it holds ends before the process group
        return summary


@dataclass
class Counters:
    """What a run has done, over all ranks; part of a checkpoint."""

    examples: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


class _Run:
    def __init__(
        self,
        recipe: TrainRecipe,
        prepared: Prepared,
        place: Placement,
        stop: StopRequest,
        learning: Learning,
        *,
        quiet: bool,
    ) -> None:
        self.recipe, self.prepared, self.place, self.stop = recipe, prepared, place, stop
        self.learning = learning
        self.directory = Path(recipe.output.directory)
        self.steps = recipe.schedule.steps
        self.batch_examples = recipe.batch.examples(recipe.examples.sequence_length)
        self.microbatches = microbatches.count(
            self.batch_examples, recipe.batch.microbatch, place.data_ranks
        )
        self.counters = Counters()
        self.pages: dict[str, dict[str, Any]] = {"counts": {}, "damage": {}}
        self.live = LiveLine(self.steps, shown=place.first and not quiet)

    def run(self) -> dict[str, Any]:
        """Everything between the recipe and the summary."""
        recipe, place = self.recipe, self.place
        self.newest = checkpoint.latest(self.directory)
        if self.newest is not None:  # before anything is taken from another run's
            saved = checkpoint.read_state(self.newest)["state"]["identity"]
            identity.check(saved, self.prepared.identity, str(self.directory))
        network = build_network(recipe, self.prepared.vocab_size)
        self.parameters = sum(parameter.numel() for parameter in network.parameters())
        self.clock = Clock(
            flops_per_token(
                network.config, recipe.examples.sequence_length, labelled_share(recipe)
            ),
            self._peak(),
            self.steps,
        )
        self.config = network.config
        self.parallel = placing.put(
            Objective(network), place, recipe, passes=self.microbatches, newest=self.newest
        )
        self.objective = self.parallel.objective
        del network  # of a pipeline, each rank keeps its own part
        if isinstance(self.parallel, Pipelined) and self.parallel.table:
            self.live.say(self.parallel.table)
        self.evaluations = Evaluations(recipe, self.prepared, place, self.parallel, self.stop)
        self.optimiser = build_optimiser(recipe.optimiser, self.objective.network)
        self.window = self._window()
        done, stream_state, learning_state = self._resume()
        stream = ExampleStream(
            self.prepared.corpus, self.prepared.weights, self.prepared.builder,
            data=recipe.data, rank=place.data_rank, ranks=place.data_ranks, state=stream_state,
        )  # fmt: skip
        log = (
            MetricsLog(self.directory, step=done, tensorboard=recipe.run.tensorboard)
            if place.first
            else None
        )
        try:
            self.learning.begin(self.place, done, learning_state)
            return self._train(done, stream, log)
        finally:
            stream.close()
            self.learning.close()
            if log is not None:
                log.close()

    def _window(self) -> Window:
        """An empty window."""
        return Window(self.objective.terms, self.prepared.corpus.names, self.place.device)

    def _peak(self) -> float | None:
        peak = peak_flops(self.place.device, self.recipe.run.precision)
        return None if peak is None else peak * self.place.ranks

    def _resume(self) -> tuple[int, dict[str, Any] | None, dict[str, Any]]:
        """Steps done, and the states of stream and learning: of the newest checkpoint, if any."""
        newest = self.newest
        if newest is None:
            return 0, None, {}
        state = checkpoint.load(newest, objective=self.objective, optimiser=self.optimiser)
        self.counters, self.pages = Counters(**state["counters"]), state["pages"]
        if self.place.first:
            self.window.restore(state["window"])
        self.live.say(f"going on after step {state['step']:,} of {self.steps:,}")
        return int(state["step"]), state["stream"], state.get("learning", {})

    def _train(self, done: int, stream: ExampleStream, log: MetricsLog | None) -> dict[str, Any]:
        recipe, place, counters = self.recipe, self.place, self.counters
        evaluated: dict[str, Any] = {}
        stopped = self.stop.agreed()
        if done and not stopped and self.evaluations.due(done):
            # The run had been stopped in its evaluation, or after its last step.
            there = place.gather(log is not None and log.evaluated)[0]
            if not there or done == self.steps:
                evaluated, stopped = self.evaluations.losses(
                    done, None if there else log, self.clock
                )
        while done < self.steps and not stopped:
            # 1. The gradient of the global batch.
            begin_s = time.monotonic()
            dealt = microbatches.deal(
                stream.take(self.batch_examples), self.microbatches,
                place.data_rank, place.data_ranks,
            )  # fmt: skip
            batches = [
                microbatches.batch(
                    part, recipe.model.family, recipe.examples.sequence_length, place.device,
                    one_shape=recipe.run.compile,
                )
                for part in dealt
            ]  # fmt: skip
            waited_s = time.monotonic() - begin_s
            passed = self.learning.gradients(
                self.parallel, dealt, batches, self._window(), seed=recipe.run.seed, step=done
            )
            norm = self.parallel.gradient_norm()  # the same on all ranks: they decide alike

            # 2. The move, unless the gradient is infinite; too many such steps end the run.
            rate = recipe.optimiser.learning_rate * learning_rate_factor(recipe.schedule, done)
            done += 1
            counters.examples += self.batch_examples
            counters.tokens += passed.tokens
            self.learning.settle(done, taken=math.isfinite(norm))
            if math.isfinite(norm):
                self._move(norm, rate)
                self.window.merge(passed.window)
                counters.skipped_in_a_row = 0
            else:
                self._skip(done, passed, log)
            self.optimiser.zero_grad()
            self.clock.step(time.monotonic() - begin_s, waited_s, passed.tokens)

            # 3. What the run says.
            if done % recipe.run.log_every == 0 or done == self.steps:
                self._log_line(done, rate, norm, log)
            self.live.tell_once({**stream.empty, **stream.damage})
            if math.isfinite(norm) and self.live.due(done):
                self.live.show(done, passed.window.means()["loss"], self.clock)

            # 4. A checkpoint: when it is time, at the end, and before leaving on a signal.
            stopped = self.stop.agreed()
            saved = stopped or done == self.steps or done % recipe.checkpoint.every == 0
            if saved:
                self._save(done, stream, log)

            # 5. Held-out losses. A signal cuts them off: the next run begins with them.
            if not stopped and self.evaluations.due(done):
                evaluated, stopped = self.evaluations.losses(done, log, self.clock)
                if stopped and not saved:
                    self._save(done, stream, log)
        if stopped:
            what = f"saved after step {done:,}" if done else "stopped before the first step"
            self.live.say(f"{self.stop.name or 'another rank'}: {what}")
            return self._summary("stopped", done, evaluated)
        return self._finish(done, evaluated, stream)

    def _move(self, norm: float, rate: float) -> None:
        """Clip the gradients, whose norm is `norm`, and move the weights."""
        longest = self.recipe.optimiser.max_gradient_norm
        if longest is not None and norm > longest:
            self.parallel.scale_gradients(longest / norm)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()

    def _skip(self, done: int, passed: Passed, log: MetricsLog | None) -> None:
        """Tell of a step whose gradients are not finite. Raises Fault after too many in a row."""
        counters, most = self.counters, self.recipe.run.max_skipped_steps
        counters.skipped_steps += 1
        counters.skipped_in_a_row += 1
        indexes = sorted(index for part in self.place.gather(passed.non_finite()) for index in part)
        first = (done - 1) * self.batch_examples
        line = skips.line(
            done, first, first + self.batch_examples - 1, indexes, counters.skipped_in_a_row
        )
        if log is not None:
            log.write({**line, "times": self.clock.figures()})
        self.live.say(skips.text(line))
        if counters.skipped_in_a_row >= most:
            raise skips.too_many(most, done, self.directory / checkpoint.FOLDER)

    def _log_line(self, done: int, rate: float, norm: float, log: MetricsLog | None) -> None:
        """One line about the steps since the last one."""
        self.window.fold(self.place)
        if log is not None:
            log.write(
                {
                    "kind": "train",
                    "step": done,
                    **self.window.means(),
                    "learning_rate": rate,
                    "gradient_norm": float(f"{norm:.6g}") if math.isfinite(norm) else None,
                    **asdict(self.counters),
                    **self.learning.line(),
                    "times": self.clock.figures(),
                }
            )
        self.window.clear()

    def _save(self, done: int, stream: ExampleStream, log: MetricsLog | None) -> None:
        """A checkpoint of everything that the next step depends on."""
        if log is not None:
            log.sync()
        learning = self.learning.state()
        self.window.fold(self.place)
        state = {
            **self._state(done),
            "stream": merge_states(self._of_data_ranks(stream.state_dict())),
            "window": self.place.gather(self.window.state())[0],
            "pages": self._pages(stream),
            **({"learning": learning} if learning else {}),
            **self.parallel.saved(),
        }
        checkpoint.save(
            self.directory, done, objective=self.objective, optimiser=self.optimiser, state=state,
            keep=self.recipe.checkpoint.keep, tokenizer=self.recipe.model.tokenizer,
        )  # fmt: skip

    def _pages(self, stream: ExampleStream) -> dict[str, dict[str, Any]]:
        """What became of the pages of all ranks since the run began."""
        counts: Counter[str] = Counter(self.pages["counts"])
        damage = dict(self.pages["damage"])
        for own_counts, own_damage in self._of_data_ranks((stream.counts, stream.damage)):
            counts.update(own_counts)
            damage |= own_damage
        return {"counts": dict(sorted(counts.items())), "damage": dict(sorted(damage.items()))}

    def _of_data_ranks(self, value: Any) -> list[Any]:
        """`value` of one rank of each part of the data."""
        return self.place.gather(value)[: self.place.data_ranks]

    def _state(self, done: int) -> dict[str, Any]:
        return {
            "step": done,
            "counters": asdict(self.counters),
            "identity": self.prepared.identity,
        }

    def _finish(
        self, done: int, evaluated: dict[str, Any], stream: ExampleStream
    ) -> dict[str, Any]:
        """The model and the manifest; then the run is finished."""
        recipe = self.recipe
        pages = self._pages(stream)
        network = self.objective.network
        if isinstance(self.parallel, Pipelined):
            # In parts here, whole in the checkpoint of the last step.
            network = checkpoint.whole_network(self.directory, done)
        export(
            network,
            recipe.model.tokenizer,
            self.directory / MODEL_FOLDER,
            max_length=max_tokens(self.config, recipe.examples.sequence_length),
            state=self._state(done),
        )
        found = self.learning.finish()
        on_first(
            lambda: run_manifest.write(
                self.directory, recipe=recipe, identity=self.prepared.identity,
                profile=profile_of(self.prepared.tokenizer),
                vocab_size=self.prepared.vocab_size, steps=done, counters=asdict(self.counters),
                pages=pages["counts"], damaged=list(pages["damage"]), held_out=evaluated,
                proxy_weights=found,
            ),
            f"cannot finish '{self.directory}'",
        )  # fmt: skip
        return self._summary("finished", done, evaluated)

    def _summary(self, status: str, done: int, evaluated: dict[str, Any]) -> dict[str, Any]:
        return summary(
            self.recipe, self.place, status=status, step=done, counters=asdict(self.counters),
            parameters=self.parameters, evaluation=evaluated, figures=self.clock.figures(),
        )  # fmt: skip
