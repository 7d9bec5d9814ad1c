"""The model registry: which files may be fetched, from where, and what they must turn out to be.

Models stand in the user's cache under their registered names and are known by their SHA-256. A
registered model whose digest nobody has published is fetched only when the user says so; what
came then is pinned in `models.lock.toml` in the cache and is the only thing accepted afterwards.
Left out on purpose: unpacking of archives, and any removal of files that the user put there.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from models import files
from models.errors import UserError
from models.fetch import DownloadFailed, Progress, RetryPolicy, download, exclusive
from models.kenlm_tools import cache_dir
from models.registry_file import ModelEntry, Pin, read_pins, read_registry, write_pins
from models.wheel import MemberNotFound, extract_member

SHIPPED_REGISTRY = Path(__file__).resolve().parent.parent / "data_manifests" / "models.toml"

_PINS = "models.lock.toml"
_DIGESTS = "digests.json"
_INCOMING = ".incoming"
