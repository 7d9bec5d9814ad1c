"""`gristmill`: the front door. Each verb is one function; its docstring is its help."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from models.errors import Fault, UserError

if TYPE_CHECKING:
    from pipelines.plan import Plan
    from pipelines.recipe import MineRecipe

EXIT_FAULT = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
_EXIT_BY_SIGNAL = 128
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
    """Show a mined crawl (the funnel), a Parquet shard, or a WET file.

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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gristmill",
        allow_abbrev=False,
        description="From raw Common Crawl text to a trained language model.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    verb = _verb(verbs, mine)
    verb.add_argument("recipe", metavar="RECIPE")
    verb.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE",
                      help="override one field of the recipe; may be repeated")  # fmt: skip
    verb.add_argument("--input", action="append", metavar="PATH", help="short for input.paths")
    verb.add_argument("--output", metavar="DIR", help="short for output.directory")
    verb.add_argument("--workers", type=_positive, metavar="N", help="local processes")
    verb.add_argument("--max-failed-shards", metavar="N|P%",
                      help="inputs that may fail (1%%)")  # fmt: skip
    verb.add_argument("--progress", choices=["auto", "none", "json"], default="auto",
                      help="auto: live on a terminal; json: an object a line")  # fmt: skip
    verb.add_argument("--restart", action="store_true", help="throw an earlier run's files away")
    verb.add_argument("--dry-run", action="store_true", help="print the recipe and the plan only")
    verb.add_argument(
        "--json", action="store_true", help="print the manifest, or the plan, as JSON"
    )

    verb = _verb(verbs, crawl)
    verb.add_argument("source", metavar="SNAPSHOT")
    verb.add_argument("--output", metavar="DIR", default="wet",
                      help="folder of crawl.json and of downloads (default: wet)")  # fmt: skip
    verb.add_argument("--base-url", metavar="URL", default="https://data.commoncrawl.org")
    verb.add_argument("--num-shards", type=_positive, metavar="N", help="group files as CCNet does")
    verb.add_argument("--segments-per-shard", type=_positive, metavar="N", default=-1,
                      help="take the first N files of each shard only")  # fmt: skip
    verb.add_argument("--sample", type=_positive, metavar="N", help="N files spread over the crawl")
    verb.add_argument("--seed", type=int, default=0, help="of --sample (default: 0)")
    verb.add_argument("--download", type=_positive, nargs="?", const=0, metavar="N",
                      help="fetch the files, or the first N of them")  # fmt: skip
    verb.add_argument("--json", action="store_true", help="print the crawl manifest")

    verb = _verb(verbs, inspect)
    verb.add_argument("target", metavar="MANIFEST_OR_SHARD")
    verb.add_argument("--verify", action="store_true", help="check every sum and digest")
    verb.add_argument("--sample", nargs="*", metavar="COLUMN=VALUE",
                      help="print pages; columns language, bucket, host")  # fmt: skip
    verb.add_argument("--html", metavar="FILE", help="write the report as one HTML page")
    verb.add_argument("-n", type=_positive, default=3, metavar="N", help="how many pages (3)")
    verb.add_argument("--json", action="store_true", help="for programs")

    verb = _verb(verbs, models)
    _model_actions(verb)

    verb = _verb(verbs, train)
    _train_arguments(verb)

    verb = _verb(verbs, evaluate)
    verb.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    verb.add_argument("task", metavar="TASK")
    verb.add_argument("--data", action="extend", nargs="+", metavar="PATH",
                      help="held-out: mined crawls; a task: the folder of its files")  # fmt: skip
    verb.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE",
                      help="override one field of the recipe; may be repeated")  # fmt: skip
    verb.add_argument("--output", metavar="DIR",
                      help="folder of the results; runs in it are not repeated")  # fmt: skip
    verb.add_argument("--no-random-baseline", action="store_true",
                      help="leave out the randomly initialised models")  # fmt: skip
    verb.add_argument("--json", action="store_true", help="for programs")

    verb = _verb(verbs, export)
    verb.add_argument("source", metavar="RUN_OR_CHECKPOINT")
    verb.add_argument("--output", metavar="DIR", required=True, help="new folder of the model")
    verb.add_argument("--json", action="store_true", help="print the files' SHA-256")

    verb = _verb(verbs, demo)
    verb.add_argument("directory", nargs="?", default="out/demo", metavar="DIR")
    verb.add_argument("--workers", type=_positive, metavar="N", help="local processes")
    return parser


def _train_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("recipe", metavar="RECIPE")
    verb.add_argument("--data", action="extend", nargs="+", metavar="MANIFEST",
                      help="mined crawls; short for data.manifests")  # fmt: skip
    verb.add_argument("--tokenizer", metavar="DIR", help="short for model.tokenizer")
    verb.add_argument("--output", metavar="DIR", help="short for output.directory")
    verb.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE",
                      help="override one field of the recipe; may be repeated")  # fmt: skip
    verb.add_argument("--processes", type=_positive, metavar="N", help="ranks on this machine (1)")
    verb.add_argument("--restart", action="store_true", help="throw an earlier run's files away")
    verb.add_argument("--dry-run", action="store_true", help="print the recipe and the plan only")
    verb.add_argument("--json", action="store_true", help="print the summary, or the plan, as JSON")


def _model_actions(verb: argparse.ArgumentParser) -> None:
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    action = actions.add_parser("list", help="registered models, and which are here")
    action.add_argument("--json", action="store_true", help="for programs")
    action = actions.add_parser("fetch", help="download registered models")
    action.add_argument("names", nargs="+", metavar="NAME")
    action.add_argument("--trust-first-use", action="store_true",
                        help="accept an unknown SHA-256 and remember it")  # fmt: skip
    actions.add_parser("verify", help="check the digest of every model that is here")
    actions.add_parser("build-kenlm", help="build lmplz and build_binary, once")
    for name, what in (("train-sentencepiece", "SentencePiece unigram"), ("train-ngram", "KenLM")):
        action = actions.add_parser(name, help=f"train a {what} model from plain text")
        action.add_argument("texts", nargs="+", metavar="TEXT", help="files, a paragraph a line")
        action.add_argument("--language", required=True, metavar="CODE")
        action.add_argument("--output", required=True, metavar="DIR")
        action.add_argument("--profile", choices=["unicode", "ccnet"], default="unicode",
                            help="text normalisation; the recipe's quality.profile")  # fmt: skip
        if name == "train-sentencepiece":
            action.add_argument("--vocab-size", default="auto", metavar="N",
                                help="pieces, or 'auto': as many as the text allows")  # fmt: skip
        else:
            action.add_argument("--order", type=_positive, default=5, metavar="N")
    _train_tokenizer_action(actions)


def _train_tokenizer_action(actions: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    action = actions.add_parser(
        "train-tokenizer",
        help="train the tokenizer of the models to train, from mined crawls",
        epilog="example: gristmill models train-tokenizer out/mined --languages bn "
        "--profile bn-v2 --output out/tokenizer",
    )
    action.add_argument("manifests", nargs="+", metavar="MANIFEST",
                        help="mined crawls: folders or manifest.json")  # fmt: skip
    action.add_argument("--output", required=True, metavar="DIR")
    action.add_argument("--vocab-size", default="32000", metavar="N",
                        help="pieces (32000), or 'auto': as many of these as the text "
                        "allows")  # fmt: skip
    action.add_argument("--profile", default="default", metavar="P",
                        help="normalisation: default, default-lower, bn, bn-v2")  # fmt: skip
    action.add_argument("--by", nargs="+", choices=["language", "bucket", "source"],
                        default=["language"],
                        help="what tells domains apart (language)")  # fmt: skip
    action.add_argument("--languages", nargs="+", default=[], metavar="CODE", help="these only")
    action.add_argument("--weights", nargs="+", default=["smoothed"], metavar="W",
                        help="shares of the domains: smoothed (to the root of the characters), "
                        "proportional, uniform, a weights file, or DOMAIN=SHARE for "
                        "each")  # fmt: skip
    action.add_argument("--sample-chars", type=_positive, default=50_000_000, metavar="N",
                        help="characters to train on, at most about (50000000)")  # fmt: skip
    action.add_argument("--character-coverage", type=float, metavar="SHARE",
                        help="of the text, by the alphabet; the rest is [UNK] (all, or 0.9995 "
                        "where the characters are many)")  # fmt: skip
    action.add_argument("--held-out", type=float, default=0.01, metavar="SHARE",
                        help="pages left out, as data.held_out of the recipe (0.01)")  # fmt: skip
    action.add_argument("--seed", type=_natural, default=0, metavar="N", help="of the sample (0)")
    action.add_argument("--json", action="store_true", help="print the manifest as JSON")


def _verb(verbs: argparse._SubParsersAction, function: Callable) -> argparse.ArgumentParser:  # type: ignore[type-arg]
    name = function.__name__
    text = (function.__doc__ or "").strip()
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        allow_abbrev=False,
        help=text.split("\n", 1)[0],
        description="\n".join(line.strip() for line in text.split("\n")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(function=function)
    return parser


def _line(error: Exception, kind: str = "") -> str:
    return f"gristmill: {kind}{error}".replace("\n", "\\n")


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 1 or more")
    return number


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 0 or more")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done, 1 a fault, 2 the user's mistake, 130 Ctrl+C,
    143 SIGTERM."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    beam: list[str] = []
    if "--" in words:
        words, beam = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = _parser()
    parsed = parser.parse_args(words)
    parsed.beam = beam
    if beam and parsed.verb != "mine":
        parser.error(f"'-- {' '.join(beam)}': only mine passes options to Beam")
    try:
        return int(parsed.function(parsed))
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
