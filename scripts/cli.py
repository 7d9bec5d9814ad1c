"""`gristmill`: the front door. Each verb is one function; its docstring is its help."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from models.errors import Fault, UserError
from scripts.arguments import parse

if TYPE_CHECKING:
    from pipelines.plan import Plan
    from pipelines.recipe import MineRecipe

EXIT_FAULT = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
_EXIT_BY_SIGNAL = 128
# What the extra `train` brings, or `swarm`, and mining does without.
_TRAINING_PACKAGES = frozenset(
    {"datasets", "safetensors", "seqeval", "sklearn", "tensorboard", "tokenizers", "torch",
     "transformers"}
)  # fmt: skip
_SWARM_PACKAGES = frozenset({"base58", "cryptography", "hivemind", "starlette", "uvicorn"})
_STOPPED = "gristmill: stopped; run the same command again to go on"


def mine(arguments: argparse.Namespace) -> int:
    """Mine WET files: dedup, language, quality, Parquet shards and a manifest.

    RECIPE is a TOML file or the name of a shipped recipe. What stands after -- goes to Beam.

    example: gristmill mine default --input 'wet/*.gz' --output out/mined --workers 2
    """
    from pipelines.recipe import load_recipe
    from pipelines.report import funnel
    from pipelines.run import FailedInputs
    from pipelines.run import mine as run_mine

    overrides = list(arguments.set)
    if arguments.input:
        overrides.append(f"input.paths={json.dumps(arguments.input)}")
    if arguments.output:
        overrides.append(f"output.directory={json.dumps(arguments.output)}")
    if arguments.workers:
        overrides.append(f"run.workers={arguments.workers}")
    if arguments.max_failed_shards is not None:
        overrides.append(f"input.max_failed_shards={json.dumps(arguments.max_failed_shards)}")
    recipe = load_recipe(arguments.recipe, overrides)
    if arguments.dry_run:
        return _dry_run(recipe, arguments)
    try:
        with _stopped_by_signals():
            manifest = run_mine(
                recipe, arguments.beam, restart=arguments.restart, progress_mode=arguments.progress
            )
    except FailedInputs as error:
        for name, reason in error.inputs:
            print(f"gristmill: input '{name}' {reason}", file=sys.stderr)
        raise
    print(manifest.to_json() if arguments.json else funnel(manifest))
    for entry in manifest.inputs:
        if entry.failed:
            print(f"warning: input '{entry.name}' {entry.failed}", file=sys.stderr)
    damaged = {loss.name for loss in manifest.losses}
    if damaged:
        print(f"warning: bytes were lost in {len(damaged):,} damaged files, see the losses",
              file=sys.stderr)  # fmt: skip
    if manifest.counts.records.read + manifest.counts.records.not_pages == 0:
        print("gristmill: fault: not one WARC record in all inputs", file=sys.stderr)
        return EXIT_FAULT
    if not manifest.outputs:
        print("warning: no page was kept: see the reasons above", file=sys.stderr)
    return 0


def _dry_run(recipe: MineRecipe, arguments: argparse.Namespace) -> int:
    """Print the recipe, the plan and what the run would take; write nothing."""
    from pipelines.estimate import estimate, table
    from pipelines.plan import make_plan
    from pipelines.run import is_done

    plan = make_plan(recipe)
    if not arguments.restart and is_done(plan):
        print("already finished: the run would have nothing to do", file=sys.stderr)
    found = estimate(_as_run(plan, arguments.beam))
    settings = recipe.model_dump(mode="json")
    if arguments.json:
        plan_json, estimate_json = plan.model_dump(mode="json"), found.model_dump(mode="json")
        print(json.dumps({"recipe": settings, "plan": plan_json, "estimate": estimate_json}))
        return 0
    print(json.dumps(settings, indent=1, ensure_ascii=False))
    print(f"language models: {', '.join(plan.language_models) or 'none'}")
    print(table(found))
    return 0


def _as_run(plan: Plan, beam: list[str]) -> Plan:
    """The plan with the exchange that the runner behind -- gets; refuses what Beam refuses."""
    if not beam:
        return plan
    from pipelines.engine import exchange_of, make_pipeline

    run = plan.recipe.run
    pipeline = make_pipeline(run.workers, beam)
    run = run.model_copy(update={"exchange": exchange_of(pipeline, plan)})
    return plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"run": run})})


def crawl(arguments: argparse.Namespace) -> int:
    """Resolve a Common Crawl snapshot, or any list of WET files, into a crawl manifest.

    SNAPSHOT is CC-MAIN-YYYY-WW, or the path or URL of a wet.paths or wet.paths.gz file. The
    manifest is an input of `gristmill mine`.

    example: gristmill crawl CC-MAIN-2026-04 --sample 8 --download --output wet
    """
    from scripts.crawl_command import crawl as run_crawl

    return run_crawl(arguments)


def inspect(arguments: argparse.Namespace) -> int:
    """Show a mined crawl (the funnel), a training run, a mix, a Parquet shard, or a WET file.

    --html writes one page with charts, tables and pages to read; it needs no network.

    example: gristmill inspect out/mined --sample language=bn bucket=head -n 5
    """
    from scripts.inspection import inspect as run_inspect

    return run_inspect(
        arguments.target,
        verify=arguments.verify,
        as_json=arguments.json,
        sample=arguments.sample,
        count=arguments.n,
        html=arguments.html,
    )


def models(arguments: argparse.Namespace) -> int:
    """List, fetch and verify registered models; train SentencePiece and KenLM models.

    example: gristmill models train-ngram prose/bn.txt --language bn --output lm
    """
    from scripts.models_command import COMMANDS

    return COMMANDS[arguments.action](arguments)


def train(arguments: argparse.Namespace) -> int:
    """Train a model on mined pages: tokenizer, examples, checkpoints, held-out losses, export.

    RECIPE is a TOML file or the name of a shipped recipe. The same command goes on where a run
    was stopped. Several machines: torchrun -m scripts.cli train ...

    example: gristmill train albert-small --data out/mined --tokenizer out/tok --output out/run
    """
    from scripts.train_command import train as run_train

    return run_train(arguments)


def plan(arguments: argparse.Namespace) -> int:
    """Plan a training run on devices that need not be here: what fits, and why the rest does not.

    RECIPE is a TOML file or the name of a shipped recipe; no data and no tokenizer are needed.
    Climbs from data parallel over bf16, small microbatches, recomputation and shards to a
    pipeline, with memory, traffic and (--device, --peak) time of each, and prints the command of
    the first that fits.

    example: gristmill plan decoder-280m --devices 2x8 --memory 80GiB --set model.size=8b
    """
    from scripts.plan_command import plan as run_plan

    return run_plan(arguments)


def mix(arguments: argparse.Namespace) -> int:
    """Find the weights of the domains (DoReMi, or a law fitted to small runs) and compare them.

    RECIPE is a TOML file or the name of a shipped recipe. Trains the models that the method needs,
    and the proportional and uniform baselines at equal budget. The same command goes on where a
    mix was stopped.

    example: gristmill mix doremi --data out/mined --tokenizer out/tok --output out/mix --jobs 2
    """
    from scripts.mix_command import mix as run_mix

    return run_mix(arguments)


def swarm(arguments: argparse.Namespace) -> int:
    """Train one model together, over the internet: start a run, join it, watch it.

    Peers come and go, each with its own speed and network; a coordinator lets them in, keeps
    checkpoints and shows the run on a page.

    example: gristmill swarm join https://swarm.example.org --user alice --credential alice.key
    """
    from scripts import swarm_command, swarm_inspection

    commands = swarm_command.COMMANDS | swarm_inspection.COMMANDS
    return commands[arguments.action](arguments)


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate checkpoints: held-out loss by domain, or fine-tuning on a labelled task.

    CHECKPOINT is an exported model or the folder of a finished run. TASK is 'held-out' (give the
    mined crawls by --data), the name of a shipped task, or a TOML file.

    example: gristmill evaluate out/run bn-ner --data ner --output out/bn-ner
    """
    from scripts.evaluate_command import evaluate as run_evaluate

    with _stopped_by_signals():
        return run_evaluate(arguments)


def export(arguments: argparse.Namespace) -> int:
    """Write a checkpoint as a model folder: config, safetensors, tokenizer, card.

    RUN_OR_CHECKPOINT is the folder of `gristmill train` (its newest sound checkpoint is taken), or
    one folder in its checkpoints/. Works for any strategy and number of ranks that saved it.

    example: gristmill export out/model/checkpoints/step-00000500 --output out/step-500
    """
    from scripts.export_command import export as run_export

    return run_export(arguments)


def demo(arguments: argparse.Namespace) -> int:
    """The whole chain on the sample crawl that comes with Gristmill, in minutes.

    example: gristmill demo out/demo
    """
    from scripts.demo import demo as run_demo

    with _stopped_by_signals():
        return run_demo(arguments.directory, workers=arguments.workers or 1)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Let Ctrl+C and SIGTERM end the process at once: a run can go on from any moment, and Beam's
    own unwinding takes long and prints pages."""

    def stop(number: int, frame: object) -> None:
        # Past Python's buffers, in which this very thread may be; a live line stays above.
        start = "\n" if os.isatty(2) else ""
        with contextlib.suppress(OSError):
            os.write(2, f"{start}{_STOPPED}\n".encode())
        os._exit(_EXIT_BY_SIGNAL + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


VERBS = (mine, crawl, inspect, models, train, plan, mix, swarm, evaluate, export, demo)


def _run(parsed: argparse.Namespace) -> int:
    """The verb's exit code. Raises UserError where it needs a package that an extra brings."""
    try:
        return int(parsed.function(parsed))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _TRAINING_PACKAGES | _SWARM_PACKAGES:
            raise
        action = getattr(parsed, "action", None)
        command = f"{parsed.verb} {action}" if action else parsed.verb
        extra = "swarm" if parsed.verb == "swarm" else "train"
        raise UserError(
            f"'gristmill {command}' needs the package '{package}', which is not installed: "
            f"pip install 'gristmill[{extra}]'"
        ) from None


def _line(error: Exception, kind: str = "") -> str:
    return f"gristmill: {kind}{error}".replace("\n", "\\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done, 1 a fault, 2 the user's mistake, 130 Ctrl+C,
    143 SIGTERM."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    beam: list[str] = []
    if "--" in words:
        words, beam = words[: words.index("--")], words[words.index("--") + 1 :]
    try:
        parsed = parse(VERBS, words)
        parsed.beam = beam
        if beam and parsed.verb != "mine":
            raise UserError(f"'-- {' '.join(beam)}': only mine passes options to Beam")
        return _run(parsed)
    except UserError as error:
        print(_line(error), file=sys.stderr)
        return EXIT_USER_ERROR
    except Fault as error:
        print(_line(error, "fault: "), file=sys.stderr)
        return EXIT_FAULT
    except BrokenPipeError:
        return 0
    except OSError as error:
        place = f": '{error.filename}'" if error.filename else ""
        print(_line(Exception(f"{error.strerror or error}{place}"), "fault: "), file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        print(_STOPPED, file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
