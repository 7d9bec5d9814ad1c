"""What each verb of `gristmill` takes on the command line."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any

from models.errors import UserError

Verb = Callable[[argparse.Namespace], int]
SAMPLE_CHARS = 50_000_000


def parse(verbs: Sequence[Verb], words: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; `function` is the verb's, whose docstring is its help.

    Raises UserError for a verb, an action or an option that does not exist, with the closest one;
    for other mistakes argparse prints the usage and ends the program with code 2.
    """
    parser, parsers = _parsers(verbs)
    names = [verb.__name__ for verb in verbs]
    _check_name(words, names, "verb", "gristmill")
    command = tuple(words[:1])
    if words[:1] and words[0] in _ACTIONS:
        actions = [path[1] for path in parsers if path[0] == words[0]]
        _check_name(words[1:], actions, "action", f"gristmill {words[0]}")
        command = tuple(words[:2])
    if command in parsers:
        _check_options(words[len(command) :], parsers[command])
    return parser.parse_args(words)


def _check_name(words: Sequence[str], valid: Sequence[str], what: str, command: str) -> None:
    if not words or words[0].startswith("-") or words[0] in valid:
        return
    raise UserError(
        f"'{command}' has no {what} '{words[0]}': {_close(words[0], valid)}"
        f"choose {', '.join(valid)}"
    )


def _check_options(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """argparse takes no value that begins with two dashes: such a word is an option or wrong."""
    valid = sorted(set(re.findall(r"--[a-z][a-z-]*", parser.format_usage())) | {"--help"})
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in valid:
            raise UserError(
                f"'{parser.prog}' has no option '{name}': {_close(name, valid)}"
                f"valid here: {', '.join(valid)}"
            )


def _close(word: str, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, valid, n=1)
    return f"did you mean '{close[0]}'? " if close else ""


def _parsers(
    verbs: Sequence[Verb],
) -> tuple[argparse.ArgumentParser, dict[tuple[str, ...], argparse.ArgumentParser]]:
    """The parser of the whole line, and those of the verbs, and of the verbs' actions."""
    parser = argparse.ArgumentParser(
        prog="gristmill",
        allow_abbrev=False,
        description="From raw Common Crawl text to a trained language model.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    group = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    found: dict[tuple[str, ...], argparse.ArgumentParser] = {}
    for function in verbs:
        name, text = function.__name__, (function.__doc__ or "").strip()
        verb = group.add_parser(
            name,
            allow_abbrev=False,
            help=text.split("\n", 1)[0],
            description="\n".join(line.strip() for line in text.split("\n")),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.set_defaults(function=function)
        if name in _ACTIONS:
            found |= {(name, action): one for action, one in _ACTIONS[name](verb).items()}
        else:
            _ARGUMENTS[name](verb)
            found[name,] = verb
    return parser, found


class _Version(argparse.Action):
    """Reads the version when it is asked for: that takes longer than all the rest of `--help`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version  # noqa: PLC0415

        print(f"{parser.prog} {version('gristmill')}")
        parser.exit()


def _mine(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("recipe", metavar="RECIPE")
    _set(verb)
    verb.add_argument("--input", action="append", metavar="PATH", help="short for input.paths")
    verb.add_argument("--output", metavar="DIR", help="short for output.directory")
    verb.add_argument("--workers", type=_positive, metavar="N", help="local processes")
    verb.add_argument("--max-failed-shards", metavar="N|P%",
                      help="inputs that may fail (1%%)")  # fmt: skip
    verb.add_argument("--progress", choices=["auto", "none", "json"], default="auto",
                      help="auto: live on a terminal; json: an object a line")  # fmt: skip
    _restart_and_dry_run(verb)
    verb.add_argument(
        "--json", action="store_true", help="print the manifest, or the plan, as JSON"
    )


def _crawl(verb: argparse.ArgumentParser) -> None:
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


def _inspect(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("target", metavar="MANIFEST_OR_SHARD")
    verb.add_argument("--verify", action="store_true", help="check every sum and digest")
    verb.add_argument("--sample", nargs="*", metavar="COLUMN=VALUE",
                      help="print pages; columns language, bucket, host")  # fmt: skip
    verb.add_argument("--html", metavar="FILE", help="write the report as one HTML page")
    verb.add_argument("-n", type=_positive, default=3, metavar="N", help="how many pages (3)")
    _json(verb)


def _train(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("recipe", metavar="RECIPE")
    _inputs_and_output(verb)
    _set(verb)
    verb.add_argument("--processes", type=_positive, metavar="N", help="ranks on this machine (1)")
    _restart_and_dry_run(verb)
    verb.add_argument("--json", action="store_true", help="print the summary, or the plan, as JSON")


def _plan(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("recipe", metavar="RECIPE")
    verb.add_argument("--devices", required=True, metavar="N|NODESxN",
                      help="how many; of each node where there are several")  # fmt: skip
    verb.add_argument("--memory", required=True, metavar="BYTES",
                      help="of one device: 24GiB, 80e9")  # fmt: skip
    verb.add_argument("--bandwidth", metavar="BYTES_S",
                      help="that a device sends inside its node: 450GB, 400Gbit")  # fmt: skip
    verb.add_argument("--bandwidth-between", metavar="BYTES_S",
                      help="to one of another node (as inside)")  # fmt: skip
    verb.add_argument("--device", metavar="NAME", help="for its peak: H100, A100, RTX 4090, ...")
    verb.add_argument("--peak", metavar="FLOP_S",
                      help="or the peak, 312e12: in the recipe's precision, and rungs in the "
                      "other get no time; or both, BF16,FP32")  # fmt: skip
    verb.add_argument("--efficiency", metavar="SHARE", help="of the peak reached (0.4)")
    verb.add_argument("--vocab-size", type=_positive, metavar="N",
                      help="tokens (those of model.tokenizer, or 32000)")  # fmt: skip
    _set(verb)
    verb.add_argument("--json", action="store_true", help="print the ladder as JSON")


def _mix(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("recipe", metavar="RECIPE")
    _inputs_and_output(verb)
    verb.add_argument("--method", choices=["doremi", "regress"], help="short for mix.method")
    _set(verb)
    verb.add_argument("--jobs", type=_positive, metavar="N", help="runs at once (1)")
    verb.add_argument("--processes", type=_positive, metavar="N",
                      help="ranks on this machine for each run (1)")  # fmt: skip
    _restart_and_dry_run(verb)
    verb.add_argument("--json", action="store_true",
                      help="print the manifest, or the plan, as JSON")  # fmt: skip


def _evaluate(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    verb.add_argument("task", metavar="TASK")
    verb.add_argument("--data", action="extend", nargs="+", metavar="PATH",
                      help="held-out: mined crawls; a task: the folder of its files")  # fmt: skip
    _set(verb)
    verb.add_argument("--output", metavar="DIR",
                      help="folder of the results; runs in it are not repeated")  # fmt: skip
    verb.add_argument("--no-random-baseline", action="store_true",
                      help="leave out the randomly initialised models")  # fmt: skip
    _json(verb)


def _export(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("source", metavar="RUN_OR_CHECKPOINT")
    verb.add_argument("--output", metavar="DIR", required=True, help="new folder of the model")
    verb.add_argument("--json", action="store_true", help="print the files' SHA-256")


def _demo(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("directory", nargs="?", default="out/demo", metavar="DIR")
    verb.add_argument("--workers", type=_positive, metavar="N", help="local processes")


_ARGUMENTS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "mine": _mine,
    "crawl": _crawl,
    "inspect": _inspect,
    "train": _train,
    "plan": _plan,
    "mix": _mix,
    "evaluate": _evaluate,
    "export": _export,
    "demo": _demo,
}


def _model_actions(verb: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    found: dict[str, argparse.ArgumentParser] = {}

    def add(name: str, what: str, **options: Any) -> argparse.ArgumentParser:
        found[name] = actions.add_parser(name, help=what, allow_abbrev=False, **options)
        return found[name]

    _json(add("list", "registered models, and which are here"))
    action = add("fetch", "download registered models")
    action.add_argument("names", nargs="+", metavar="NAME")
    action.add_argument("--trust-first-use", action="store_true",
                        help="accept an unknown SHA-256 and remember it")  # fmt: skip
    add("verify", "check the digest of every model that is here")
    add("build-kenlm", "build lmplz and build_binary, once")
    for name, what in (("train-sentencepiece", "SentencePiece unigram"), ("train-ngram", "KenLM")):
        action = add(name, f"train a {what} model from plain text")
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
    _train_tokenizer(
        add(
            "train-tokenizer",
            "train the tokenizer of the models to train, from mined crawls",
            epilog="example: gristmill models train-tokenizer out/mined --languages bn "
            "--profile bn-v2 --output out/tokenizer",
        )
    )
    return found


def _swarm_actions(verb: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    found: dict[str, argparse.ArgumentParser] = {}

    def add(name: str, what: str, example: str) -> argparse.ArgumentParser:
        found[name] = actions.add_parser(
            name, help=what, description=what, allow_abbrev=False,
            epilog=f"example: gristmill swarm {name} {example}",
        )  # fmt: skip
        return found[name]

    action = add(
        "start", "coordinate a run: the way in, tokens, the page, checkpoints",
        "sahajbert-small --data out/mined --tokenizer out/tok --output out/swarm",
    )  # fmt: skip
    action.add_argument("recipe", metavar="RECIPE")
    _inputs_and_output(action)
    _set(action)
    action.add_argument("--certificate", metavar="PEM", help="HTTPS, with --private-key")
    action.add_argument("--private-key", metavar="PEM")
    action.add_argument("--behind-proxy", action="store_true",
                        help="something in front of the service speaks HTTPS")  # fmt: skip
    action.add_argument("--dry-run", action="store_true", help="print the recipe and the run only")
    _json(action)
    action = add("size", "what an epoch costs with given peers, and what to change",
                 "sahajbert --peers 40x5@100/50 10x2@20/5:client")  # fmt: skip
    action.add_argument("recipe", metavar="RECIPE")
    action.add_argument("--peers", nargs="+", required=True, metavar="PEERS",
                        help="COUNTxRATE@UP/DOWN: samples/s, Mbit/s; :client behind a firewall; "
                        "0@UP:auxiliary only reduces")  # fmt: skip
    action.add_argument("--tokenizer", metavar="DIR", help="short for model.tokenizer: its pieces")
    _set(action)
    _json(action)
    action = add("join", "take part in a run, until its end or Ctrl+C",
                 "https://swarm.example.org --user alice --credential alice.key "
                 "--data out/mined --output out/peer")  # fmt: skip
    _swarm_peer(action)
    action.add_argument("--user", metavar="NAME", help="on the run's allowlist, with --credential")
    action.add_argument("--credential", metavar="FILE",
                        help="what `swarm allow add` printed, in a file of mode 0600")  # fmt: skip
    action.add_argument("--token", metavar="FILE", help="or a token of `swarm token`")
    _set(action)
    _json(action)
    action = add("doctor", "check what could keep this machine out of a run",
                 "https://swarm.example.org --port 31337")  # fmt: skip
    _swarm_peer(action)
    _set(action)
    _json(action)
    action = add("status", "how a run stands: the coordinator's page or folder",
                 "http://127.0.0.1:8471")  # fmt: skip
    action.add_argument("place", metavar="URL_OR_DIR")
    _json(action)
    action = add("allow", "who may take part: add, renew or remove a user, revoke, restore, keys",
                 "add alice --run out/swarm")  # fmt: skip
    action.add_argument("change", choices=["list", "add", "renew", "remove", "revoke", "restore",
                                           "rotate", "retire"])  # fmt: skip
    action.add_argument("name", nargs="?", metavar="NAME",
                        help="a user; a user or peer id to revoke; a peer id to restore; a key id "
                        "to retire")  # fmt: skip
    action.add_argument("--run", required=True, metavar="DIR", help="folder of `swarm start`")
    _json(action)
    action = add("token", "a token for a peer that does not reach the coordinator's service",
                 "alice QmPeerId --run out/swarm --days 7 --output alice.token")  # fmt: skip
    action.add_argument("user", metavar="USER")
    action.add_argument("peer", metavar="PEER_ID")
    action.add_argument("--run", required=True, metavar="DIR", help="folder of `swarm start`")
    action.add_argument("--days", type=_positive, default=1, metavar="N", help="how long (1)")
    action.add_argument("--output", required=True, metavar="FILE")
    return found


def _swarm_peer(action: argparse.ArgumentParser) -> None:
    action.add_argument("place", metavar="RUN", help="URL of the coordinator, or run.json")
    _inputs_and_output(action)
    action.add_argument("--authority", nargs="+", default=[], metavar="KEY",
                        help="public keys, one of which must have signed the run file")  # fmt: skip
    action.add_argument("--ca-file", metavar="PEM", help="certificates that HTTPS trusts")
    action.add_argument("--role", choices=["node", "client", "auxiliary"],
                        help="client: behind a firewall, others cannot connect; auxiliary: reduces "
                        "for the others, without --data (node)")  # fmt: skip
    action.add_argument("--name", metavar="NAME", help="shown to the others; short for peer.name")
    action.add_argument("--port", type=_positive, metavar="N", help="short for peer.port")
    action.add_argument("--announce", nargs="+", metavar="ADDRESS",
                        help="short for peer.announce: /ip4/203.0.113.7/tcp/31337")  # fmt: skip
    action.add_argument("--up", type=_positive, metavar="MBIT", help="short for peer.up_mbit")
    action.add_argument("--down", type=_positive, metavar="MBIT", help="short for peer.down_mbit")


_ACTIONS: dict[str, Callable[[argparse.ArgumentParser], dict[str, argparse.ArgumentParser]]] = {
    "models": _model_actions,
    "swarm": _swarm_actions,
}


def _train_tokenizer(action: argparse.ArgumentParser) -> None:
    action.add_argument("manifests", nargs="+", metavar="MANIFEST",
                        help="mined crawls: folders or manifest.json")  # fmt: skip
    action.add_argument("--output", required=True, metavar="DIR")
    action.add_argument("--vocab-size", default="auto", metavar="N",
                        help="pieces; 'auto' (default): 32,000, or as many as the text "
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
    action.add_argument("--sample-chars", type=_positive, default=SAMPLE_CHARS, metavar="N",
                        help=f"characters to train on, at most about ({SAMPLE_CHARS})")  # fmt: skip
    action.add_argument("--character-coverage", type=float, metavar="SHARE",
                        help="of the text, by the alphabet; the rest is [UNK] (all, or 0.9995 "
                        "where the characters are many)")  # fmt: skip
    action.add_argument("--held-out", type=float, default=0.01, metavar="SHARE",
                        help="pages left out, as data.held_out of the recipe (0.01)")  # fmt: skip
    action.add_argument("--seed", type=_natural, default=0, metavar="N", help="of the sample (0)")
    action.add_argument("--json", action="store_true", help="print the manifest as JSON")


def _inputs_and_output(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--data", action="extend", nargs="+", metavar="MANIFEST",
                      help="mined crawls; short for data.manifests")  # fmt: skip
    verb.add_argument("--tokenizer", metavar="DIR", help="short for model.tokenizer")
    verb.add_argument("--output", metavar="DIR", help="short for output.directory")


def _set(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE",
                      help="override one field of the recipe; may be repeated")  # fmt: skip


def _restart_and_dry_run(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--restart", action="store_true", help="throw an earlier run's files away")
    verb.add_argument("--dry-run", action="store_true", help="print the recipe and the plan only")


def _json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="for programs")


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
