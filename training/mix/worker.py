"""A worker of `training.mix.pool`: runs come in on stdin, what became of them goes out on stdout.

SIGTERM while a run is trained: it is saved, and the worker says so. At any other moment it ends at
once: there is nothing to save.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from models.errors import GristmillError, UserError
from training.doremi import ProxySettings
from training.mix.pool import compute
from training.mix.stages import MixRun
from training.recipe import TrainRecipe


def from_line(line: bytes) -> MixRun:
    """The run that `training.mix.pool.to_line` wrote."""
    tree = json.loads(line)
    proxy = tree["proxy"]
    return MixRun(
        label=tree["label"],
        seed=tree["seed"],
        recipe=TrainRecipe.model_validate(tree["recipe"]),
        weights=tree["weights"],
        proxy=None if proxy is None else ProxySettings(**proxy),
    )


def answer(run: MixRun) -> dict[str, Any]:
    """The summary of the run, or its error."""
    try:
        return {"summary": compute(run, quiet=True)}
    except GristmillError as error:
        return {"error": str(error), "by_user": isinstance(error, UserError)}
    except Exception as error:  # this process has to live on, and the mix names the run
        said = f"{error.__class__.__name__}: {error}".replace("\n", " ")
        return {"error": f"{said} (--jobs 1 shows the traceback)", "by_user": False}


def main() -> None:
    """Until stdin ends."""
    # What a library prints must not stand among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        answers.write(json.dumps(answer(from_line(line))).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
