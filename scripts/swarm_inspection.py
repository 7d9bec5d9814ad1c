"""`gristmill swarm size`, `doctor` and `status`: before a run, at its door, while it runs."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import UserError
from scripts.swarm_command import TIMEOUT_S, own_overrides, path_of

if TYPE_CHECKING:
    from training.swarm.recipe import SwarmRecipe
    from training.swarm.run_file import RunFile
    from training.swarm.sizing import Design

_EXIT_FAULT = 1


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


def doctor(arguments: argparse.Namespace) -> int:
    """Check this machine; 1 where something would keep it out."""
    from training.swarm import doctor as checks  # noqa: PLC0415
    from training.swarm import run_file  # noqa: PLC0415

    ca_file = path_of(arguments.ca_file)
    run = run_file.read(arguments.place, pinned=arguments.authority, ca_file=ca_file)
    recipe = run_file.joined(run, own_overrides(arguments))
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


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "size": size,
    "doctor": doctor,
    "status": status,
}


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
    from models.tokenizer import tokenizer_digest  # noqa: PLC0415
    from training.prepare import prepare  # noqa: PLC0415
    from training.swarm import run_file  # noqa: PLC0415
    from training.swarm.doctor import Check  # noqa: PLC0415

    tokenizer, reduces_only = recipe.model.tokenizer, recipe.peer.role == "auxiliary"
    if reduces_only and not tokenizer:
        return Check("inputs", "skipped", "an auxiliary peer reads no data; its tokenizer comes "
                     "from the coordinator")  # fmt: skip
    if not reduces_only and not (recipe.data.manifests and tokenizer and recipe.output.directory):
        return Check("inputs", "skipped", "give --data, --tokenizer and --output to check them")
    try:
        if reduces_only:
            run_file.check_tokenizer(run, tokenizer_digest(tokenizer))
        else:
            run_file.check_inputs(run, prepare(recipe).identity)
    except UserError as error:
        return Check("inputs", "failed", str(error))
    which = "the tokenizer is that" if reduces_only else "crawls and tokenizer are those"
    return Check("inputs", "ok", f"{which} of the run")


def _status_of_url(url: str) -> dict[str, Any]:
    import requests  # noqa: PLC0415

    address = f"{url.rstrip('/')}/status.json"
    try:
        answer = requests.get(address, timeout=TIMEOUT_S, allow_redirects=False)
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
