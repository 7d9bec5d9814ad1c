"""`gristmill swarm`: start a run, join it, let peers in.

`start` and `join` run twice: as the supervisor of a process group, which is what the user calls,
and in that group as the process that does the work (`scripts.swarm_process`, with `_INSIDE` in its
environment).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models import files
from models.errors import Fault, UserError
from scripts.train_command import overrides_of

if TYPE_CHECKING:
    from training.swarm.recipe import SwarmRecipe
    from training.swarm.run_file import RunFile
    from training.swarm.token_client import Account

_INSIDE = "GRISTMILL_SWARM_INSIDE"
TIMEOUT_S = 15.0
_NO_FOLDER = "no output folder: give --output DIR, or output.directory in the recipe"


def start(arguments: argparse.Namespace) -> int:
    """Coordinate a run until its last epoch or a signal."""
    from training.swarm.recipe import load_recipe  # noqa: PLC0415

    recipe = load_recipe(arguments.recipe, overrides_of(arguments))
    if arguments.dry_run:
        return _dry_run(recipe, as_json=arguments.json)
    if not recipe.output.directory:
        raise UserError(_NO_FOLDER)
    if _INSIDE not in os.environ:
        words = ["start", arguments.recipe, *_options(arguments, "certificate", "private_key")]
        return _supervised([*words, *["--behind-proxy"] * arguments.behind_proxy], arguments)
    from training.swarm.coordinator import Doors, coordinate  # noqa: PLC0415

    doors = Doors(
        path_of(arguments.certificate), path_of(arguments.private_key), arguments.behind_proxy
    )
    summary = coordinate(recipe, doors, say=_say)
    if "exit_code" not in summary:
        print(json.dumps(summary) if arguments.json else _end_of_run(summary))
    return int(summary.get("exit_code", 0))


def join(arguments: argparse.Namespace) -> int:
    """Take part in a run until its last epoch or a signal."""
    from training.swarm import run_file  # noqa: PLC0415

    if not arguments.output:
        raise UserError("no folder for this peer's identity and state: give --output DIR")
    folder = Path(arguments.output)
    if _INSIDE in os.environ:
        run = run_file.parse((folder / run_file.FILE).read_bytes(), str(folder))
        return _joined(run, arguments)
    run = _run_of(arguments, folder)
    recipe = run_file.joined(run, own_overrides(arguments))
    if not recipe.data.manifests and recipe.peer.role != "auxiliary":
        raise UserError("no data: name the run's mined crawls with --data DIR")
    if recipe.swarm.authorisation:
        _check_entry(run, arguments, folder)
    if not recipe.model.tokenizer:
        _fetch_tokenizer(run, folder, path_of(arguments.ca_file))
        arguments.tokenizer = str(folder / "tokenizer")
    run.write(folder / run_file.FILE)
    options = ("user", "credential", "token", "ca_file", "role", "name", "port", "up", "down")
    words = ["join", arguments.place, *_options(arguments, *options)]
    if arguments.announce:
        words += ["--announce", *arguments.announce]
    return _supervised(words, arguments)


def allow(arguments: argparse.Namespace) -> int:
    """Change who may take part, or list them."""
    authority = _authority(arguments.run)
    change, name = arguments.change, arguments.name
    if change in ("list", "rotate"):
        if name is not None:
            raise UserError(f"'swarm allow {change}' takes no name: leave '{name}' out")
    elif name is None:
        raise UserError(f"'swarm allow {change}' needs a name: see gristmill swarm allow --help")
    told: dict[str, Any] = {"run": authority.run, "change": change, "name": name}
    if change == "list":
        users = [{"user": one.name, "added": one.added} for one in authority.allow_list()]
        lines = [f"{one['user']:<32}{_day(one['added'])}" for one in users]
        told = {"run": authority.run, "users": users}
        text = "\n".join(lines) or "nobody is on the list: gristmill swarm allow add NAME"
    elif change in ("add", "renew"):
        told["credential"] = authority.allow_add(name, renew=change == "renew")
        text = str(told["credential"])
        print("the credential, shown only now; its file must have mode 0600:", file=sys.stderr)
    elif change == "rotate":
        told["name"] = authority.rotate()
        text = f"the new key '{told['name']}' signs in two minutes; then: swarm allow retire OLD"
    else:
        what = {"remove": authority.allow_remove, "revoke": authority.revoke,
                "restore": authority.restore, "retire": authority.retire}[change](name)  # fmt: skip
        text = f"{change}: {what or ''} '{name}'".replace("  ", " ")
    print(json.dumps(told) if arguments.json else text)
    return 0


def token(arguments: argparse.Namespace) -> int:
    """Write a token to a file."""
    authority = _authority(arguments.run)
    text = authority.issue(arguments.user, arguments.peer, life_s=arguments.days * 86_400)
    files.write_atomic(arguments.output, text + "\n")
    print(f"{arguments.output}: for the peer '{arguments.peer}' of '{arguments.user}', "
          f"{arguments.days} days")  # fmt: skip
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "start": start,
    "join": join,
    "allow": allow,
    "token": token,
}


# Start and join


def _supervised(words: list[str], arguments: argparse.Namespace) -> int:
    from training.swarm.supervisor import supervise  # noqa: PLC0415

    overrides = overrides_of(arguments)
    sets = [word for override in overrides for word in ("--set", override)]
    output = ["--output", arguments.output] if arguments.output else []
    command = [sys.executable, "-P", "-m", "scripts.swarm_process", "swarm", *words, *sets, *output]
    return supervise(
        command + ["--json"] * arguments.json,
        environment={"HIVEMIND_LOGLEVEL": "WARNING", **os.environ, _INSIDE: "1"},
        say=_say,
    )


def _joined(run: RunFile, arguments: argparse.Namespace) -> int:
    from training.swarm import run_file  # noqa: PLC0415
    from training.swarm.auxiliary import run_auxiliary  # noqa: PLC0415
    from training.swarm.trainer import run_peer  # noqa: PLC0415

    recipe = run_file.joined(run, own_overrides(arguments))
    account = _account(run, arguments) if recipe.swarm.authorisation else None
    run_role = run_auxiliary if recipe.peer.role == "auxiliary" else run_peer
    summary = run_role(recipe, run, account, say=_say)
    if "exit_code" not in summary:
        print(json.dumps(summary) if arguments.json else _end_of_peer(summary))
    return int(summary.get("exit_code", 0))


def _run_of(arguments: argparse.Namespace, folder: Path) -> RunFile:
    """The run file that the user names, against the one of an earlier time."""
    from training.swarm import run_file  # noqa: PLC0415

    own = folder / run_file.FILE
    known = run_file.parse(own.read_bytes(), str(own)) if own.exists() else None
    if known is not None and (folder / "authority").exists():
        raise UserError(f"'{folder}' is the folder of `swarm start`: give another with --output")
    try:
        run = run_file.read(
            arguments.place, pinned=arguments.authority, known=known,
            ca_file=path_of(arguments.ca_file),
        )  # fmt: skip
    except Fault as error:
        if known is None:
            raise Fault(
                f"'{arguments.place}' does not answer: check the address, and that `gristmill "
                "swarm start` runs there, then run the same command again"
            ) from error
        _say(f"warning: {error}; joining by the run file and the addresses of the last time")
        return run_file.read(str(own), pinned=arguments.authority, known=known)
    if known is None and not arguments.authority:
        _say(f"run '{run.run}', signed by {run.authority[0]}: compare that with the authority's")
    return run


def own_overrides(arguments: argparse.Namespace) -> list[str]:
    """What the options of a peer say, as overrides of the recipe."""
    found = overrides_of(arguments)
    pairs = {"role": "role", "name": "name", "port": "port", "announce": "announce",
             "up": "up_mbit", "down": "down_mbit"}  # fmt: skip
    for option, name in pairs.items():
        value = getattr(arguments, option)
        if value is not None:
            found.append(f"peer.{name}={json.dumps(value)}")
    return found


def _check_entry(run: RunFile, arguments: argparse.Namespace, folder: Path) -> None:
    """A mistake in how this peer is let in is told before anything is started."""
    from training.swarm import identity  # noqa: PLC0415
    from training.swarm.membership import IDENTITY_FILE, TOKEN_FILE  # noqa: PLC0415
    from training.swarm.tokens import TokenFile  # noqa: PLC0415

    peer_id = identity.load_or_create(folder / IDENTITY_FILE).peer_id
    own = TokenFile(folder / TOKEN_FILE)
    if arguments.token:
        text = TokenFile(Path(arguments.token)).text()
        if not text:
            raise UserError(f"'{arguments.token}' holds no token: ask the run's authority for one")
        own.write(text)
    elif _account(run, arguments) is None and not own.text():
        raise UserError(
            f"the run '{run.run}' lets in allowed users only: give --user NAME --credential FILE, "
            f"or --token FILE, made for this peer: '{peer_id}'"
        )


def _account(run: RunFile, arguments: argparse.Namespace) -> Account | None:
    """Where this peer's tokens come from."""
    from training.swarm import keys  # noqa: PLC0415
    from training.swarm.token_client import Account  # noqa: PLC0415

    if arguments.token:
        return None
    if (arguments.user is None) != (arguments.credential is None):
        raise UserError("--user and --credential belong together: give both, or --token FILE")
    if arguments.user is None:
        return None
    if not run.service:
        raise UserError(
            f"the run '{run.run}' has no service that gives tokens: ask its authority for a token "
            "and give --token FILE"
        )
    credential = keys.read_secret(Path(arguments.credential)).decode(errors="replace").strip()
    return Account(run.service, arguments.user, credential, path_of(arguments.ca_file))


def _fetch_tokenizer(run: RunFile, folder: Path, ca_file: Path | None) -> None:
    """The run's tokenizer, from the coordinator; checked against the run file."""
    import requests  # noqa: PLC0415

    from models.tokenizer import TOKENIZER_FILE, tokenizer_digest  # noqa: PLC0415

    target = folder / "tokenizer" / TOKENIZER_FILE
    wanted = run.inputs["tokenizer_sha256"]
    if target.exists() and tokenizer_digest(target.parent) == wanted:
        return
    if not run.service:
        raise UserError("no tokenizer: give the run's with --tokenizer DIR")
    url = f"{run.service}/tokenizer.json"
    try:
        answer = requests.get(url, timeout=TIMEOUT_S, verify=str(ca_file) if ca_file else True)
        answer.raise_for_status()
    except requests.RequestException as error:
        raise Fault(f"'{url}' does not give the tokenizer: {type(error).__name__}") from error
    files.write_atomic(target, answer.content)
    if tokenizer_digest(target.parent) != wanted:
        raise UserError(
            f"'{url}' gave another tokenizer than the run file names: give the run's with "
            "--tokenizer DIR, and tell its authority"
        )


def _dry_run(recipe: SwarmRecipe, *, as_json: bool) -> int:
    from training.prepare import prepare  # noqa: PLC0415
    from training.swarm.epoch_plan import plan_of  # noqa: PLC0415

    found = plan_of(recipe, prepare(recipe).vocab_size)
    settings = recipe.model_dump(mode="json")
    if as_json:
        print(json.dumps({"recipe": settings, "plan": found}, ensure_ascii=False))
        return 0
    print(json.dumps(settings, indent=1, ensure_ascii=False))
    print(f"digest: {recipe.digest()}")
    for name, value in found.items():
        print(f"{name.replace('_', ' ')}: {value:,}" if isinstance(value, int)
              else f"{name.replace('_', ' ')}: {value}")  # fmt: skip
    return 0


def _authority(folder: str) -> Any:
    from training.swarm.authority import Authority  # noqa: PLC0415

    place = Path(folder) / "authority"
    if not place.is_dir():
        raise UserError(
            f"'{folder}' is no folder of a run: give that of `gristmill swarm start --output`"
        )
    return Authority.load(place)


def _options(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Options as words again."""
    words = []
    for name in names:
        value = getattr(arguments, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def path_of(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _say(text: str) -> None:
    from pipelines.report_parts import visible  # noqa: PLC0415

    # Texts hold what peers say of themselves.
    print(f"{time.strftime('%H:%M:%S')} {visible(text)}", file=sys.stderr, flush=True)


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _end_of_run(summary: dict[str, Any]) -> str:
    lines = [f"{summary['status']}: checkpoint of epoch {summary['epoch']:,} of "
             f"{summary['epochs']:,}"]  # fmt: skip
    if summary["model"]:
        lines.append(f"model: {summary['model']}")
    if summary["status"] == "stopped":
        lines.append("run the same command again to go on")
    return "\n".join(lines)


def _end_of_peer(summary: dict[str, Any]) -> str:
    gave = (
        f"reduced in the rounds of {summary['own_epochs']:,} epochs"
        if summary["role"] == "auxiliary"
        else f"gave {summary['own_samples']:,} samples in {summary['own_epochs']:,} epochs"
    )
    line = (
        f"{summary['status']} at epoch {summary['epoch']:,} of {summary['epochs']:,}; this peer "
        f"{gave}"
    )
    return line if summary["status"] == "finished" else f"{line}; run the same command to rejoin"
