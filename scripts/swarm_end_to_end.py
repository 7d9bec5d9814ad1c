"""From mined Bengali pages to two labelled tasks, by a swarm and by one process of the same budget.

    python -m scripts.swarm_end_to_end [--output out/swarm-bn] [--epochs 500] [--batch 256]

Every step is a `gristmill` command as a user would type it, and is printed. The swarm has three
peers of one thread each on this machine: a client, a node that is killed with SIGKILL half way, and
a node that comes late, after a quarter. Then the coordinator's checkpoint is exported, a single
process is trained with the same settings on as many examples as the swarm counted, and both are
evaluated: held-out loss, entities (`bn-ner`) and news (`bn-news`), each with three seeds.

Steps whose result is there are not done again, so that the same command goes on after a break.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from models.errors import Fault, GristmillError
from training import checkpoint

_BASE = """\
name = "{name}"

[data]
languages = ["bn"]
held_out = 0.1

[examples]
sequence_length = 64
masking = "token"

[model]
family = "albert"
size = "small"
dropout = 0.1

[batch]
samples = {batch}
microbatch = 16

[optimiser]
name = "adamw"
learning_rate = 2e-3
betas = [0.9, 0.98]

[schedule]
steps = {steps}
warmup_steps = {warmup}

[checkpoint]
every = {every}
"""
# 15 % of an example's 54 tokens on average, and one order.
_SWARM = """
[collaboration]
labels_per_sample = [8.0, 1.0]
min_peers = 2
announce_s = 0.5
look_s = 0.25
round_timeout_s = 20

[swarm]
matchmaking_s = 1.0
sender_s = 5

[peer]
host = "127.0.0.1"

[coordinator]
port = 0
page_port = 0
poll_s = 1.0
gone_s = 20
"""
_START_S = 180.0
_POLL_S = 0.5
_PEERS = ("client", "killed", "late")


class Steps:
    """Commands, printed and run in the repository's own environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def command(self, words: list[str]) -> list[str]:
        print("$ gristmill " + shlex.join(words), flush=True)
        return [sys.executable, "-m", "scripts.cli", *words]

    def run(self, *words: str) -> str:
        """Its standard output. Raises Fault when it fails."""
        done = subprocess.run(
            self.command(list(words)), stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise Fault(f"'gristmill {shlex.join(words)}' ended with {done.returncode}")
        return done.stdout

    def once(self, result: Path, *words: str) -> None:
        """`run`, where `result` is not there yet."""
        if not result.exists():
            self.run(*words)

    def start(self, name: str, *words: str) -> None:
        """Beside the others; what it says goes to NAME.log, its summary to NAME.json."""
        with self.log(name).open("wb") as said, self.summary(name).open("wb") as told:
            self.running[name] = subprocess.Popen(
                self.command([*words, "--json"]), stdout=told, stderr=said,
                env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def summary(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def said(self, name: str, pattern: str) -> list[str]:
        return re.findall(pattern, self.log(name).read_text(errors="replace"))

    def wait(self, name: str, ready: Callable[[], bool], limit_s: float) -> None:
        """Until `ready`. Raises Fault when the command ends before, or after `limit_s`."""
        until_s = time.monotonic() + limit_s
        while not ready():
            if self.running[name].poll() is not None or time.monotonic() > until_s:
                raise Fault(f"'{name}' did not get on: see '{self.log(name)}'")
            time.sleep(_POLL_S)

    def finish(self, name: str, limit_s: float) -> dict[str, Any]:
        """The summary of a command that ends by itself."""
        code = self.running.pop(name).wait(timeout=limit_s)
        if code:
            raise Fault(f"'{name}' ended with {code}: see '{self.log(name)}'")
        found: dict[str, Any] = json.loads(self.summary(name).read_text())
        return found

    def kill(self, name: str) -> None:
        """SIGKILL to the command, and so to all of its processes (see the supervisor)."""
        process = self.running.pop(name)
        print(f"# kill -9 of '{name}'", flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(arguments: list[str] | None = None) -> int:
    """Run what is not done yet; the tables at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("out/swarm-bn"))
    parser.add_argument("--data", type=Path, default=Path("out/docs"), help="mined where missing")
    parser.add_argument("--tokenizer", type=Path, default=Path("out/bn/tokenizer"))
    parser.add_argument("--labelled", type=Path, default=Path("../shared/data/bn"))
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--try", dest="trial", action="store_true",
                        help="one seed, one rate: whether everything fits together")  # fmt: skip
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    steps = Steps(options.output)
    try:
        _prepare(steps, options)
        swarm = _swarm(steps, options)
        single = _single(steps, options, swarm["samples"])
        _evaluate(steps, options)
    except (GristmillError, OSError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        for name in list(steps.running):
            steps.kill(name)
    _show(options, swarm, single)
    return 0


def _prepare(steps: Steps, options: argparse.Namespace) -> None:
    """Shards and tokenizer."""
    data, tokenizer = str(options.data), str(options.tokenizer)
    steps.once(options.data / "manifest.json", "mine", "docs", "--output", data, "--workers", "2")
    steps.once(
        options.tokenizer / "tokenizer.json", "models", "train-tokenizer", data, "--languages",
        "bn", "--profile", "bn-v2", "--vocab-size", "6000", "--held-out", "0.1",
        "--output", tokenizer,
    )  # fmt: skip


def _recipe(options: argparse.Namespace, name: str, epochs: int, more: str = "") -> Path:
    path: Path = options.output / f"{name}.toml"
    text = _BASE.format(
        name=name, batch=options.batch, steps=epochs, warmup=max(1, epochs // 10),
        every=max(1, epochs // 8),
    )  # fmt: skip
    path.write_text(text + more)
    return path


def _swarm(steps: Steps, options: argparse.Namespace) -> dict[str, Any]:
    """Three peers and a coordinator, from nothing to the last epoch."""
    summary, model = options.output / "swarm.json", options.output / "swarm-model"
    if not summary.exists():
        summary.write_text(json.dumps(_trained(steps, options)))
    steps.once(model, "export", str(options.output / "run"), "--output", str(model))
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def _trained(steps: Steps, options: argparse.Namespace) -> dict[str, Any]:
    run, epochs = options.output / "run", options.epochs
    data = ["--data", str(options.data)]
    recipe = str(_recipe(options, "bengali", epochs, _SWARM))
    began = time.monotonic()
    steps.start("coordinator", "swarm", "start", recipe, *data, "--tokenizer",
                str(options.tokenizer), "--output", str(run))  # fmt: skip
    steps.wait("coordinator", lambda: bool(steps.said("coordinator", r"page: \S+")), _START_S)
    url = steps.said("coordinator", r"join: gristmill swarm join (\S+)")[-1]

    def join(name: str, *more: str) -> None:
        credential = options.output / f"{name}.key"
        if not credential.exists():
            text = steps.run("swarm", "allow", "add", name, "--run", str(run))
            credential.touch(mode=0o600)
            credential.write_text(text)
        steps.start(name, "swarm", "join", url, "--user", name, "--credential", str(credential),
                    *data, "--output", str(options.output / f"peer-{name}"), "--name", name,
                    "--set", "peer.host=127.0.0.1", *more)  # fmt: skip

    def reached(name: str, epoch: int) -> Callable[[], bool]:
        return lambda: any(
            int(one.replace(",", "")) >= epoch for one in steps.said(name, r"epoch ([\d,]+) done")
        )

    limit_s = 3600.0
    join("client", "--role", "client")
    join("killed")
    steps.wait("client", reached("client", epochs // 4), limit_s)
    join("late")
    steps.wait("client", reached("client", epochs // 2), limit_s)
    # A client serves nobody: with the only node that has the weights gone, nobody could come in.
    steps.wait("late", reached("late", 0), limit_s)
    steps.kill("killed")
    ends = {name: steps.finish(name, limit_s) for name in ("client", "late", "coordinator")}
    seconds = time.monotonic() - began
    hashes = {end["state_hash"] for end in ends.values()}
    if len(hashes) != 1 or {end["epoch"] for end in ends.values()} != {epochs}:
        raise Fault(f"the peers did not end alike: see '{options.output}/*.json'")
    saved = checkpoint.latest(run)
    if saved is None or saved.name != f"step-{epochs:08d}":
        raise Fault(f"'{run}' has no checkpoint of epoch {epochs}")
    counters = checkpoint.read_state(saved)["state"]["counters"]
    return {
        "epochs": epochs, "samples": int(counters["examples"]), "seconds": round(seconds, 1),
        "state_hash": hashes.pop(), "peers": {name: _given(options, name) for name in _PEERS},
        "slowest_epochs_s": _slowest(options.output / "peer-client" / "metrics.jsonl"),
    }  # fmt: skip


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _given(options: argparse.Namespace, name: str) -> dict[str, int]:
    """What a peer gave, by its own log."""
    lines = _lines(options.output / f"peer-{name}" / "metrics.jsonl")
    own = [line for line in lines if line["own_samples"]]
    return {"epochs": len(own), "samples": sum(line["own_samples"] for line in own)}


def _slowest(path: Path) -> list[float]:
    """The three longest waits between two epochs."""
    times = [line["times"]["time"] for line in _lines(path)]
    waits = (round(after - before, 1) for before, after in itertools.pairwise(times))
    return sorted(waits, reverse=True)[:3]


def _single(steps: Steps, options: argparse.Namespace, samples: int) -> dict[str, Any]:
    """One process, the same settings, as many examples as the swarm counted."""
    count = max(1, round(samples / options.batch))
    run, summary = options.output / "single", options.output / "single.json"
    recipe = _recipe(options, "bengali-single", count)
    if not summary.exists():
        began = time.monotonic()
        steps.run("train", str(recipe), "--data", str(options.data), "--tokenizer",
                  str(options.tokenizer), "--output", str(run))  # fmt: skip
        facts = {
            "steps": count, "samples": count * options.batch,
            "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip
        summary.write_text(json.dumps(facts))
    model = options.output / "single-model"
    steps.once(model, "export", str(run), "--output", str(model))
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def _evaluate(steps: Steps, options: argparse.Namespace) -> None:
    """Held-out loss, entities and news, both models in one table each."""
    models = [str(options.output / f"{name}-model") for name in ("swarm", "single")]
    few = ["--set", "fine_tuning.seeds=[0]", "--set", "fine_tuning.learning_rates=[1e-3]",
           "--set", "fine_tuning.epochs=1", "--no-random-baseline"] * options.trial  # fmt: skip
    tasks = {"held-out": [str(options.data)], "bn-ner": [str(options.labelled / "ner")],
             "bn-news": [str(options.labelled / "cls")]}  # fmt: skip
    for task, data in tasks.items():
        table = options.output / f"{task}.txt"
        if table.exists():
            continue
        own = [] if task == "held-out" else ["--output", str(options.output / task), *few]
        text = steps.run("evaluate", *models, task, "--data", *data, *own)
        table.write_text(text)


def _show(options: argparse.Namespace, swarm: Mapping[str, Any], single: Mapping[str, Any]) -> None:
    print(f"\nswarm: {swarm['epochs']:,} epochs, {swarm['samples']:,} samples, "
          f"{swarm['seconds']:,.0f} s, longest epochs {swarm['slowest_epochs_s']} s, "
          f"state {swarm['state_hash'][:12]}")  # fmt: skip
    for name, given in swarm["peers"].items():
        print(f"  {name:<8}{given['samples']:>9,} samples in {given['epochs']:,} epochs")
    print(f"single: {single['steps']:,} steps, {single['samples']:,} samples, "
          f"{single['seconds']:,.0f} s")  # fmt: skip
    for task in ("held-out", "bn-ner", "bn-news"):
        print(f"\n{(options.output / f'{task}.txt').read_text().rstrip()}")


if __name__ == "__main__":
    sys.exit(main())
