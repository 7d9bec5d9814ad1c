"""Tiny fastText models, trained where a test needs them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

_LANGUAGES = {
    "xa": ["kala", "mito", "suvo", "kalamito", "näkö", "ei"],
    "xb": ["grund", "straße", "wolke", "und", "der"],
    "xc": ["привет", "мир", "слово", "и"],
    "xd": ["東京都", "日本語", "です", "😀"],
    "xe": ["zz", "zzy", "grundzz", "kalazz"],
}


def sentences(seed: int, count: int) -> list[tuple[str, str]]:
    """(label, text) of five made languages, the first ones more often."""
    rng = random.Random(seed)
    names = list(_LANGUAGES)
    found = []
    for _ in range(count):
        name = names[min(int(rng.expovariate(0.6)), len(names) - 1)]
        words = rng.choices(_LANGUAGES[name], k=rng.randint(3, 12))
        words += rng.choices([w for ws in _LANGUAGES.values() for w in ws], k=rng.randint(0, 3))
        found.append((name, " ".join(words)))
    return found


def train(folder: Path, quantised: dict[str, Any] | None = None, **settings: Any) -> Path:
    """A model of `sentences`, saved in `folder`; `quantised`: the arguments of quantize."""
    import fasttext

    text = folder / "train.txt"
    lines = [f"__label__{name} {line}\n" for name, line in sentences(1, 400)]
    # fastText quantises no fewer than 256 rows: of words, and of labels.
    lines += [f"__label__rare{i} rare{i} both{i} rare{i}\n" for i in range(260)]
    text.write_text("".join(lines), encoding="utf-8")
    given = {"dim": 10, "epoch": 5, "lr": 0.5, "minn": 2, "maxn": 4, "bucket": 500} | settings
    model = fasttext.train_supervised(str(text), thread=1, verbose=0, **given)
    path = folder / "model.bin"
    if quantised is not None:
        model.quantize(str(text), thread=1, verbose=0, **quantised)
        path = folder / "model.ftz"
    model.save_model(str(path))
    return path
