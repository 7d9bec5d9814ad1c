"""`gristmill inspect` on the folder of a training run: what it is, how far it is, its losses."""

from __future__ import annotations

import json
from pathlib import Path

from models import files
from training import run_manifest
from training.run_manifest import MANIFEST_FILE, ProxyEntry, RunManifest

_CHECKPOINTS_FOLDER, _LATEST_FILE = "checkpoints", "latest"


def is_run(target: str) -> bool:
    """Whether `target` is the folder or the manifest of a training run, or of an unfinished one."""
    if not files.is_local(target):
        return False
    return _is_finished(target) or _unfinished(target) is not None


def inspect_run(target: str, *, as_json: bool) -> int:
    """Print a finished run's manifest, or how far an unfinished one is. Raises UserError."""
    newest = _unfinished(target)
    if newest is not None:
        if as_json:
            print(json.dumps({"finished": False, "checkpoint": newest}))
        else:
            print(f"unfinished run; newest checkpoint: {newest}; the same command goes on from it")
        return 0
    manifest = run_manifest.read(_folder(target))
    print(manifest.to_json() if as_json else _table(manifest))
    return 0


def _folder(target: str) -> Path:
    path = files.local_path(target)
    return path.parent if path.name == MANIFEST_FILE else path


def _is_finished(target: str) -> bool:
    """Whether the manifest that stands there has the fields of a run's."""
    try:
        value = json.loads((_folder(target) / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    fields = RunManifest.model_fields
    needed = {name for name, field in fields.items() if field.is_required()}
    return isinstance(value, dict) and needed <= value.keys() <= fields.keys()


def _unfinished(target: str) -> str | None:
    """The newest checkpoint of an unfinished run."""
    folder = _folder(target)
    if (folder / MANIFEST_FILE).exists():
        return None
    pointer = folder / _CHECKPOINTS_FOLDER / _LATEST_FILE
    return pointer.read_text().strip() if pointer.is_file() else None


def _table(manifest: RunManifest) -> str:
    counts, recipe = manifest.counts, manifest.recipe
    rows = [
        ("network", f"{recipe['model']['family']} {recipe['model']['size']}"),
        ("steps", f"{counts.steps:,}, {counts.skipped_steps:,} of them skipped"),
        ("examples", f"{counts.examples:,}"),
        ("tokens", f"{counts.tokens:,}"),
        ("recipe, XXH3", manifest.recipe_digest),
        ("tokenizer, SHA-256", manifest.tokenizer.sha256),
        *(("mined crawl, SHA-256", source.manifest_sha256) for source in manifest.sources),
        *((file.path, f"{file.bytes:,} bytes, SHA-256 {file.sha256}") for file in manifest.files),
        *_proxy_rows(manifest.proxy),
    ]
    lines = [f"{name:<32}{value}" for name, value in rows]
    if manifest.proxy is not None:
        lines += ["", f"{'domain':<32}weight that it found"]
        lines += [f"{name:<32}{value:.4f}" for name, value in manifest.proxy.weights.items()]
    held_out = manifest.held_out
    if held_out is not None:
        lines += ["", f"{'held out':<32}{'examples':>10}  loss by term"]
        for name, entry in [("all", held_out.total), *sorted(held_out.domains.items())]:
            terms = "  ".join(f"{term} {one.loss:.3f}" for term, one in entry.terms.items())
            lines.append(f"{name:<32}{entry.examples:>10,}  {terms}")
    return "\n".join(lines)


def _proxy_rows(proxy: ProxyEntry | None) -> list[tuple[str, str]]:
    """How a proxy weighed its domains, and by what."""
    if proxy is None:
        return []
    settings = f"step size {proxy.step_size:g}, smoothing {proxy.smoothing:g}"
    return [
        ("proxy", f"{proxy.method}, excess '{proxy.excess}', {settings}"),
        ("its reference, SHA-256", proxy.reference_sha256),
    ]
