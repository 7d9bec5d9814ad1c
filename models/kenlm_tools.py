"""Where KenLM's training programs stand: `lmplz` and `build_binary`.

The Python package `kenlm` only queries models. The two programs that train one are compiled
once by `scripts/build_kenlm.py` into the user's cache; this module knows the place, so that
`models` need not import `scripts`.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Literal

from models.errors import UserError

KENLM_VERSION = "0.3.0"
BUILD_COMMAND = "python -m scripts.build_kenlm"

Tool = Literal["lmplz", "build_binary"]
TOOLS: tuple[Tool, ...] = ("lmplz", "build_binary")


def cache_dir() -> Path:
    """The user's cache: `$GRISTMILL_CACHE`, or `~/.cache/gristmill`. It may not exist yet."""
    configured = os.environ.get("GRISTMILL_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "gristmill"


def tools_dir() -> Path:
    """The folder of this machine's KenLM programs. It may not exist yet."""
    return cache_dir() / f"kenlm-{KENLM_VERSION}-{sysconfig.get_platform()}"


def tool_path(tool: Tool) -> Path:
    """The program `tool`. Raises UserError, with the command that builds it, when it is absent."""
    path = tools_dir() / tool
    if not os.access(path, os.X_OK):
        raise UserError(
            f"KenLM's program '{tool}' is not at '{path}'; build it once (about a minute, needs "
            f"a C++ compiler) with: {BUILD_COMMAND}"
        )
    return path
