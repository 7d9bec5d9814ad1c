"""`gristmill swarm`: size a run, start it, join it, check the machine, see how it stands, let in.

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
    from training.swarm.sizing import Design
    from training.swarm.token_client import Account

_INSIDE = "GRISTMILL_SWARM_INSIDE"
_EXIT_FAULT = 1
_TIMEOUT_S = 15.0
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
        _path(arguments.certificate), _path(arguments.private_key), arguments.behind_proxy
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
    recipe = run_file.joined(run, _own_overrides(arguments))
    if not recipe.data.manifests:
        raise UserError("no data: name the run's mined crawls with --data DIR")
    if recipe.swarm.authorisation:
        _check_entry(run, arguments, folder)
    if not recipe.model.tokenizer:
        _fetch_tokenizer(run, folder, _path(arguments.ca_file))
        arguments.tokenizer = str(folder / "tokenizer")
    run.write(folder / run_file.FILE)
    options = ("user", "credential", "token", "ca_file", "role", "name", "port", "up", "down")
    words = ["join", arguments.place, *_options(arguments, *options)]
    if arguments.announce:
        words += ["--announce", *arguments.announce]
    return _supervised(words, arguments)


def doctor(arguments: argparse.Namespace) -> int:
    """Check this machine; 1 where something would keep it out."""
    from training.swarm import doctor as checks  # noqa: PLC0415
    from training.swarm import run_file  # noqa: PLC0415

    ca_file = _path(arguments.ca_file)
    run = run_file.read(arguments.place, pinned=arguments.authority, ca_file=ca_file)
    recipe = run_file.joined(run, _own_overrides(arguments))
    peer, found = recipe.peer, []
    tests: list[Callable[[], checks.Check]] = [
        checks.versions,
        checks.daemon,
        lambda: checks.codec(recipe.swarm.codec),
        lambda: checks.shared_memory(checks.shared_bytes(_parameters(recipe))),
        lambda: checks.clock(run.service, ca_file),
        lambda: checks.entrances(run.addresses),
        lambda: checks.port(peer.host, peer.port, run.service, peer.role, ca_file),
        lambda: checks.bandwidth(
            run.service, up_mbit=peer.up_mbit, down_mbit=peer.down_mbit, ca_file=ca_file
        ),
        lambda: _inputs(run, recipe),
    ]
    for test in tests:
        found.append(test())
        if not arguments.json:
            print(found[-1].line(), flush=True)
    if arguments.json:
        print(json.dumps([one.to_json() for one in found]))
    return _EXIT_FAULT if checks.worst(found) == "failed" else 0


def status(arguments: argparse.Namespace) -> int:
    """How a run stands."""
    place = arguments.place
    found = _status_of_url(place) if "://" in place else _status_of_folder(Path(place))
    print(json.dumps(found, ensure_ascii=False) if arguments.json else _status_text(found))
    return 0


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


def size(arguments: argparse.Namespace) -> int:
    """What an epoch of a recipe costs with given peers, and what to change."""
    from training.swarm import sizing  # noqa: PLC0415
    from training.swarm.recipe import load_recipe  # noqa: PLC0415

    peers = sizing.machines(arguments.peers)
    tokenizer = arguments.tokenizer
    chosen = [f"model.tokenizer={json.dumps(tokenizer)}"] if tokenizer else []
    recipe = load_recipe(arguments.recipe, [*arguments.set, *chosen])
    design = _design(recipe)
    found = sizing.size(design, peers)
    if arguments.json:
        print(json.dumps({"parameters": design.parameters, "peers": len(peers)} | found.to_json()))
    else:
        print(f"{recipe.name}: {design.mode}, {design.parameters:,} parameters, {design.codec}")
        print(sizing.table(found, peers))
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "start": start,
    "join": join,
    "size": size,
    "doctor": doctor,
    "status": status,
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
    from training.swarm.peer import run_peer  # noqa: PLC0415

    recipe = run_file.joined(run, _own_overrides(arguments))
    account = _account(run, arguments) if recipe.swarm.authorisation else None
    summary = run_peer(recipe, run, account, say=_say)
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
            ca_file=_path(arguments.ca_file),
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


def _own_overrides(arguments: argparse.Namespace) -> list[str]:
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
    return Account(run.service, arguments.user, credential, _path(arguments.ca_file))


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
        answer = requests.get(url, timeout=_TIMEOUT_S, verify=str(ca_file) if ca_file else True)
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


def _design(recipe: SwarmRecipe) -> Design:
    """What the sizing helper needs of a recipe."""
    from training.swarm.epoch_plan import plan_of  # noqa: PLC0415
    from training.swarm.sizing import CODEC_BYTES, Design  # noqa: PLC0415

    settings, diloco = recipe.settings(), recipe.collaboration.diloco
    plan = plan_of(recipe, _vocabulary(recipe))
    parameters, codec = int(plan["parameters"]), recipe.swarm.codec
    return Design(
        parameters=parameters, codec=codec, mode=settings.mode,
        target_batch=settings.target_batch, microbatch=recipe.batch.microbatch,
        matchmaking_s=recipe.swarm.matchmaking_s, epochs=recipe.schedule.steps,
        vectors=int(plan["round_bytes"]) // (parameters * CODEC_BYTES[codec]),
        local_steps=diloco.local_steps, local_batch=diloco.local_batch or 1,
        patience_s=diloco.patience_s, allreduce_limit_s=recipe.swarm.allreduce_s,
        download_limit_s=settings.download_timeout_s,
    )  # fmt: skip


# Doctor


def _vocabulary(recipe: SwarmRecipe) -> int:
    """Of the tokenizer where one is given."""
    from models.tokenizer import load_tokenizer  # noqa: PLC0415
    from training.swarm.epoch_plan import DEFAULT_VOCABULARY  # noqa: PLC0415

    tokenizer = recipe.model.tokenizer
    return load_tokenizer(tokenizer).get_vocab_size() if tokenizer else DEFAULT_VOCABULARY


def _parameters(recipe: SwarmRecipe) -> int:
    """Of the network; with the vocabulary of the tokenizer where one is given."""
    from training.swarm.epoch_plan import parameters_of  # noqa: PLC0415

    return parameters_of(recipe, _vocabulary(recipe))


def _inputs(run: RunFile, recipe: SwarmRecipe) -> Any:
    from training.prepare import prepare  # noqa: PLC0415
    from training.swarm import run_file  # noqa: PLC0415
    from training.swarm.doctor import Check  # noqa: PLC0415

    if not recipe.data.manifests or not recipe.model.tokenizer or not recipe.output.directory:
        return Check("inputs", "skipped", "give --data, --tokenizer and --output to check them")
    try:
        run_file.check_inputs(run, prepare(recipe).identity)
    except UserError as error:
        return Check("inputs", "failed", str(error))
    return Check("inputs", "ok", "crawls and tokenizer are those of the run")


# Status


def _status_of_url(url: str) -> dict[str, Any]:
    import requests  # noqa: PLC0415

    address = f"{url.rstrip('/')}/status.json"
    try:
        answer = requests.get(address, timeout=_TIMEOUT_S, allow_redirects=False)
    except requests.RequestException as error:
        raise UserError(
            f"'{address}' does not answer ({type(error).__name__}): give the URL of the page that "
            "`gristmill swarm start` shows"
        ) from error
    try:
        found = answer.json() if answer.status_code == 200 else None
    except ValueError:
        found = None
    if not isinstance(found, dict) or "progress" not in found:
        raise UserError(
            f"'{address}' is no page of a swarm (HTTP {answer.status_code}): give the URL of the "
            "page that `gristmill swarm start` shows"
        )
    return found


def _status_of_folder(folder: Path) -> dict[str, Any]:
    from training.swarm.metrics_store import FILE, MetricsStore  # noqa: PLC0415
    from training.swarm.views import Views  # noqa: PLC0415

    with MetricsStore(folder / FILE, read_only=True) as store:
        return Views(store).status(time.time())


def _status_text(found: dict[str, Any]) -> str:
    run, progress = found["run"], found["progress"]
    epochs = run.get("epochs")
    of = f" of {epochs:,}" if epochs else ""
    lines = [f"run '{run.get('name')}'{', finished' if found.get('finished') else ''}: epoch "
             f"{found['epoch'] or 0:,}{of}, {progress['samples']:,} of {progress['target']:,} "
             f"samples gathered, {found['rate']:,.1f} samples/s"]  # fmt: skip
    if found["loss"] is not None:
        lines.append(f"loss {found['loss']:.3f} after {found['samples']:,} samples")
    for peer in found["peers"]:
        if peer["active"]:
            lines.append(f"  {peer['name']:<32}{peer['role']:<11}epoch {peer['epoch']:>7,}"
                         f"{peer['rate']:>9,.1f} samples/s  {peer['device']}")  # fmt: skip
    lines += [f"{alarm['level']}: {alarm['text']}" for alarm in found["alarms"]]
    return "\n".join(lines)


# All


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


def _path(text: str | None) -> Path | None:
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
    line = (
        f"{summary['status']} at epoch {summary['epoch']:,} of {summary['epochs']:,}; this peer "
        f"gave {summary['own_samples']:,} samples in {summary['own_epochs']:,} epochs"
    )
    return line if summary["status"] == "finished" else f"{line}; run the same command to rejoin"
