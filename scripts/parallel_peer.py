"""DeepSpeed's pipeline beside ours: its environment, and its runs (`scripts.peer_deepspeed`)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.bench_peers import RunFailed, execute
from scripts.parallel_ranks import WARMUP_STEPS

VERSION = "0.19.8"
# The first line before the second: DeepSpeed asks the torch that is there how to build itself.
_PIP = (
    ("torch==2.13.0", "numpy", "setuptools", "wheel"),
    ("--no-build-isolation", f"deepspeed=={VERSION}"),
)
_ON_CPU = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
# What `training.host_memory` sets for our ranks: without it the logits cost DeepSpeed page faults.
_KEEP_FREED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
_REPOSITORY = Path(__file__).resolve().parent.parent
_RUN_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class PeerRun:
    """What DeepSpeed said of one way to cut."""

    bounds: tuple[int, ...]
    loss: float
    """Mean of the first step."""
    seconds: tuple[float, ...]
    """Of each timed step."""


def installed(work: Path) -> Path:
    """The Python of DeepSpeed's environment below `work`, made once by pip; raises RunFailed."""
    environment = work / "env"
    python, ready = environment / "bin" / "python", environment / "ready.json"
    wanted = json.dumps(_PIP)
    if ready.exists() and ready.read_text() == wanted:
        return python
    print(f"installing DeepSpeed {VERSION} into {environment}", file=sys.stderr)
    for old in (environment, work / "extensions"):
        shutil.rmtree(old, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    log, begin_s = work / "install.log", time.monotonic()
    execute([sys.executable, "-m", "venv", environment], log, os.environ)
    for packages in _PIP:
        execute([python, "-m", "pip", "install", *packages], log, os.environ | _ON_CPU)
    # Compiles its operator for ranks on one machine, here and not in the first timed run.
    run(python, work, model="T", method="uniform", ranks=2, microbatches=2, steps=1)
    ready.write_text(wanted)
    print(f"  {time.monotonic() - begin_s:.0f} s", file=sys.stderr)
    return python


def run(
    python: Path, work: Path, *, model: str, method: str, ranks: int, microbatches: int, steps: int
) -> PeerRun:
    """Steps of `model`, cut by DeepSpeed's `method`, on `ranks` processes; raises RunFailed."""
    answer = work / f"{method}.json"
    answer.unlink(missing_ok=True)
    for lock in work.glob("extensions/*/lock"):
        lock.unlink()  # of a build that was killed: the next one would wait for it for ever
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [python, "-m", "scripts.peer_deepspeed", "--model", model, "--method", method]
    words += ["--microbatches", microbatches, "--warmup", WARMUP_STEPS, "--steps", steps]
    words += ["--answer", answer]
    shared = os.environ | _ON_CPU | _KEEP_FREED
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(ranks)}
    shared |= {"TORCH_EXTENSIONS_DIR": str((work / "extensions").resolve())}
    logs = [work / f"rank-{rank}.log" for rank in range(ranks)]
    started = [
        _start(list(map(str, words)), log, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, log in enumerate(logs)
    ]
    try:
        _wait(started, logs)
    finally:
        for process in started:
            process.kill()
            process.wait()
    found = json.loads(answer.read_text())
    return PeerRun(tuple(found["bounds"]), found["loss"], tuple(found["seconds"]))


def _start(words: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=_REPOSITORY,
            env=environment,
        )


def _wait(started: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """Until all have ended; RunFailed with the last line of the first one that ends badly."""
    end_s = time.monotonic() + _RUN_TIMEOUT_S
    while any(process.poll() is None for process in started):
        if time.monotonic() > end_s:
            raise RunFailed(f"not done after {_RUN_TIMEOUT_S:.0f} s ({logs[0]})")
        if any(process.poll() for process in started):
            break
        time.sleep(0.1)
    for process, log in zip(started, logs, strict=True):
        if process.poll():
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            raise RunFailed(f"exit {process.returncode}: {last[:200]} ({log})")
