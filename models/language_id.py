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
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from models.errors import UserError
from models.fasttext_classifier import FastTextClassifier, why_not
from models.fasttext_model import DamagedModel, UnknownFormat, read_fasttext_model
from models.languages import UNDETERMINED, find_label

Profile = Literal["ccnet", "default"]
Engine = Literal["auto", "fasttext"]

_LETTER = re.compile(r"[^\W\d_]")
# fastText takes this word for the end of the line and would not see the rest of the page.
_END_OF_LINE_WORD = "</s>"
_END_OF_LINE = re.compile(r"(?<![^ \t\v\f\r\0])</s>(?![^ \t\v\f\r\0])")


@dataclass(frozen=True, slots=True)
class LanguageIdentifier:
    """Identifies languages with the fastText model at `path` (a local file).

    `max_chars`: only so many first characters of a page are looked at; None means all of it.
    `engine`: "auto" computes fastText's answer with `models.fasttext_classifier` where it can,
    several times faster, and otherwise has fastText do it; "fasttext" always has fastText do it.
    The model is loaded at first use, once in a process; the object itself is small and can be
    sent to workers. Raises UserError, at first use, when the file is not a fastText model.
    """

    path: str | os.PathLike[str]
    profile: Profile = "default"
    max_chars: int | None = None
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        if self.engine not in ("auto", "fasttext"):
            raise UserError(
                f"unknown language identification engine '{self.engine}'; valid: 'auto', 'fasttext'"
            )
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
        model, codes = _load(os.fspath(self.path), self.engine)
        lines = [self._line(text) for text in texts]
        known = [index for index, line in enumerate(lines) if line is not None]
        languages = [UNDETERMINED] * len(texts)
        scores = np.zeros(len(texts), dtype=np.float64)
        labels, scores[known] = _best(model, [line for line in lines if line is not None])
        for index, label in zip(known, labels.tolist(), strict=True):
            languages[index] = codes[label] if label >= 0 else UNDETERMINED
        if self.profile == "ccnet":
            # NumPy's rounding, as CCNet's: 0.495 gives 0.5, where Python's gives 0.49.
            return languages, np.round(scores, 2)
        # fastText adds 1e-5 before its logarithm, so that a score may come out above 1.
        return languages, np.minimum(scores, 1.0)

    def languages(self) -> frozenset[str]:
        """Every code that `identify` can give, without `und`."""
        return frozenset(_load(os.fspath(self.path), self.engine)[1]) - {UNDETERMINED}

    def _line(self, text: str) -> str | None:
        """What fastText reads, or None when there is nothing to identify."""
        if self.profile == "ccnet":
            line = text.replace("\n", "")
            if not line:
                return None
            line = line[: self.max_chars]
            # Here fastText, and so CCNet, stops reading.
            return _END_OF_LINE.split(line, 1)[0] if _END_OF_LINE_WORD in line else line
        line = text[: self.max_chars]
        if _LETTER.search(line) is None:
            return None
        line = " ".join(line.splitlines())
        return line.replace(_END_OF_LINE_WORD, " ") if _END_OF_LINE_WORD in line else line


def passes(scores: npt.ArrayLike, threshold: float) -> npt.NDArray[np.bool_]:
    """Which scores reach `threshold` (0 to 1); they are compared as they are, unrounded."""
    return np.asarray(scores, dtype=np.float64) >= threshold


def _best(model: _Model, lines: list[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    try:
        return model.best(lines)
    except UnicodeEncodeError:  # a surrogate, which no UTF-8 text has
        return model.best([line.encode("utf-8", "replace").decode() for line in lines])


class _Model(Protocol):
    def best(self, lines: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Index and score of the best label of each line; -1 and 0 where there is none."""


class _FastText:
    """fastText itself."""

    def __init__(self, path: str, labels: list[str]) -> None:
        import fasttext  # noqa: PLC0415  (only where our own code does not do)

        self.f = fasttext.load_model(path).f
        self._index = {label: index for index, label in enumerate(labels)}

    def best(self, lines: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        labels = np.full(len(lines), -1, np.int64)
        scores = np.zeros(len(lines))
        for index, line in enumerate(lines):
            # The raw binding: under NumPy 1 and 2 alike, and nothing copied into arrays.
            for score, label in self.f.predict((line + "\n").encode(), 1, 0.0, "strict"):
                labels[index], scores[index] = self._index[label], score
        return labels, scores


@functools.lru_cache(maxsize=4)
def _load(path: str, engine: Engine) -> tuple[_Model, list[str]]:
    """The model at `path` and the canonical code of each of its labels."""
    if not Path(path).is_file():
        raise UserError(
            f"there is no language identification model at '{path}'; fetch it with: "
            "gristmill models fetch"
        )
    try:
        read = read_fasttext_model(path)
        labels = [label.decode() for label in read.labels]
        if not labels or not labels[0].startswith("__label__"):
            raise UserError(
                f"the fastText model '{path}' has no labels: it holds word vectors; a language "
                "identification model such as 'lid.176.ftz' is needed"
            )
        ours = engine == "auto" and why_not(read) is None
        model: _Model = FastTextClassifier(read) if ours else _FastText(path, labels)
    except OSError as error:
        raise UserError(
            f"the language identification model '{path}' cannot be read ({error.strerror}); "
            "check the rights to the file"
        ) from error
    except (UnknownFormat, DamagedModel, ValueError, RuntimeError, MemoryError) as error:
        raise UserError(
            f"'{path}' is not a fastText model ({error}); fetch it again with: "
            "gristmill models fetch"
        ) from error
    return model, [_canonical(label) for label in labels]


def _canonical(label: str) -> str:
    found = find_label(label)
    if found is not None:
        return found[0]
    # A model may know languages that our table does not; their pages must not be lost.
    return re.split(r"[-_]", label.removeprefix("__label__"), maxsplit=1)[0].lower()
