"""Language of a page with a fastText model: any model, any label style.

Language and score come out as they are; whether a page passes is a separate question
(`passes`). Profiles:

- `default`: line breaks become spaces, so that neighbouring words stay apart; a text without
  a single letter is `und` with score 0, since fastText answers something even to "";
- `ccnet`: line breaks are deleted and the score is rounded half-even to two places, as CCNet
  does (`CCNET.md` §5), so that 0.495 passes a threshold of 0.5.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from models.errors import UserError
from models.languages import UNDETERMINED, parse_label

Profile = Literal["ccnet", "default"]

_LETTER = re.compile(r"[^\W\d_]")
# fastText takes this word for the end of the line and would not see the rest of the page.
_END_OF_LINE_WORD = "</s>"


@dataclass(frozen=True, slots=True)
class LanguageIdentifier:
    """Identifies languages with the fastText model at `path` (a local file).

    `max_chars`: only so many first characters of a page are looked at; None means all of it.
    The model is loaded at first use, once in a process; the object itself is small and can be
    sent to workers. Raises UserError, at first use, when the file is not a fastText model.
    """

    path: str | os.PathLike[str]
    profile: Profile = "default"
    max_chars: int | None = None

    def __post_init__(self) -> None:
        if self.profile not in ("ccnet", "default"):
            raise UserError(
                f"unknown language identification profile '{self.profile}'; valid: "
                "'default', 'ccnet'"
            )
        if self.max_chars is not None and self.max_chars < 1:
            raise UserError(f"max_chars is '{self.max_chars}'; it must be at least 1, or absent")

    def identify(self, texts: Sequence[str]) -> tuple[list[str], npt.NDArray[np.float64]]:
        """The canonical language code of each text, and the model's probability for it.

        Codes are those of `models.languages`; a label outside its table stays as it is, without
        prefix and script. Scores are float64, unrounded under the default profile.
        """
        model, codes = _load(os.fspath(self.path))
        predict = model.f.predict
        languages: list[str] = []
        scores = np.zeros(len(texts), dtype=np.float64)
        for index, text in enumerate(texts):
            line = self._line(text)
            if line is None:
                languages.append(UNDETERMINED)
                continue
            # The raw binding: under NumPy 1 and 2 alike, and nothing copied into arrays.
            score, label = predict(line + "\n", 1, 0.0, "strict")[0]
            languages.append(codes[label])
            scores[index] = score
        if self.profile == "ccnet":
            # NumPy's rounding, as CCNet's: 0.495 gives 0.5, where Python's gives 0.49.
            return languages, np.round(scores, 2)
        # fastText adds 1e-5 before its logarithm, so that a score may come out above 1.
        return languages, np.minimum(scores, 1.0)

    def languages(self) -> frozenset[str]:
        """Every code that `identify` can give, without `und`."""
        return frozenset(_load(os.fspath(self.path))[1].values()) - {UNDETERMINED}

    def _line(self, text: str) -> str | None:
        """What fastText reads, or None when there is nothing to identify."""
        if self.profile == "ccnet":
            line = text.replace("\n", "")
            return line[: self.max_chars] if line else None
        line = text[: self.max_chars]
        if _LETTER.search(line) is None:
            return None
        line = " ".join(line.splitlines())
        return line.replace(_END_OF_LINE_WORD, " ") if _END_OF_LINE_WORD in line else line


def passes(scores: npt.ArrayLike, threshold: float) -> npt.NDArray[np.bool_]:
    """Which scores reach `threshold` (0 to 1); they are compared as they are, unrounded."""
    return np.asarray(scores, dtype=np.float64) >= threshold


@functools.lru_cache(maxsize=4)
def _load(path: str) -> tuple[Any, dict[str, str]]:
    """The model at `path` and the canonical code of each of its labels."""
    import fasttext  # noqa: PLC0415  (a worker that identifies nothing does not load it)

    if not Path(path).is_file():
        raise UserError(
            f"there is no language identification model at '{path}'; fetch it with: "
            "gristmill models fetch"
        )
    try:
        model = fasttext.load_model(path)
        labels = model.get_labels()
    except (ValueError, RuntimeError, MemoryError) as error:
        raise UserError(
            f"'{path}' is not a fastText model ({error}); fetch it again with: "
            "gristmill models fetch"
        ) from error
    if not labels or not str(labels[0]).startswith("__label__"):
        raise UserError(
            f"the fastText model '{path}' has no labels: it holds word vectors; a language "
            "identification model such as 'lid.176.ftz' is needed"
        )
    return model, {label: _canonical(label) for label in labels}


def _canonical(label: str) -> str:
    try:
        return parse_label(label)[0]
    except UserError:
        # A model may know languages that our table does not; their pages must not be lost.
        return re.split(r"[-_]", label.removeprefix("__label__"), maxsplit=1)[0].lower()
