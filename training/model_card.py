"""The README.md of an exported model: what it is made of, as one chain of digests."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

FILE = "README.md"
_SHOWN_DOMAINS = 20

_HEAD = """---
library_name: transformers
tags:
- gristmill
---

# {kind}

Trained by Gristmill {version} on cleaned Common Crawl text.

| | |
|---|---|
"""
_USE = """
```python
from transformers import AutoTokenizer, {auto}

model = {auto}.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```
"""
_AUTO = {"albert": "AutoModelForMaskedLM", "llama": "AutoModelForCausalLM"}


def card(network: Any, parameters: int, state: Mapping[str, Any]) -> str:
    """The text of the card. state: of a checkpoint (`step`, `counters`, `identity`)."""
    identity, counters = state["identity"], state["counters"]
    recipe = identity["recipe"]
    rows = [
        ("network", f"{recipe['model']['family']} {recipe['model']['size']}"),
        ("parameters", f"{parameters:,}"),
        ("steps", f"{state['step']:,} of {recipe['schedule']['steps']:,}"),
        ("examples", f"{counters['examples']:,}"),
        ("tokens", f"{counters['tokens']:,}"),
        ("sequence length", f"{recipe['examples']['sequence_length']:,}"),
        ("training recipe, XXH3", f"`{identity['recipe_digest']}`"),
        ("tokenizer.json of the training, SHA-256", f"`{identity['tokenizer_sha256']}`"),
    ]
    for source in identity["sources"]:
        rows.append(("mined crawl's manifest.json, SHA-256", f"`{source['manifest_sha256']}`"))
        rows.append(("its mining recipe, XXH3", f"`{source['recipe_digest']}`"))
    for name, digest in (identity["init_sha256"] or {}).items():
        rows.append((f"began with {name}, SHA-256", f"`{digest}`"))
    domains = sorted(identity["domains"].items(), key=lambda item: (-item[1], item[0]))
    for name, weight in domains[:_SHOWN_DOMAINS]:
        rows.append((f"domain `{name}`", f"{weight:.2%} of the examples"))
    if len(domains) > _SHOWN_DOMAINS:
        rest = sum(weight for _, weight in domains[_SHOWN_DOMAINS:])
        rows.append((f"{len(domains) - _SHOWN_DOMAINS} other domains", f"{rest:.2%}"))
    use = _USE.format(auto=_AUTO[network.config.model_type])
    head = _HEAD.format(kind=network.config.model_type, version=version("gristmill"))
    return head + "".join(f"| {name} | {value} |\n" for name, value in rows) + use
