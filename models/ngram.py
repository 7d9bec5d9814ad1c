"""N-gram language models (KenLM over SentencePiece pieces): the perplexity of pages.

Perplexity = 10^(-log10 probability / tokens), where each scored line counts its end mark as a
token. Profiles:

- `ccnet`: the page is ONE line (line breaks deleted), rounded to one place, byte for byte as
  `CCNET.md` §5 says;
- `unicode`: paragraph by paragraph, sum of scores over sum of lengths (CCNet paper, §3.2),
  unrounded. A page below the minimum length is not scored: the perplexity of a few characters
  is noise in the hundreds of thousands.

A page must be normalised by the same profile as the training text of its model, or its
perplexity means nothing: `xx.lm.json` beside the model says which. Models are trained by
`models/ngram_training.py`.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import UserError
from models.files import is_local, local_path, sha256_file
from models.languages import parse_label
from models.lm_text import LmProfile, normalise_page_for_lm
from models.sentencepiece_lm import NORMALIZATION_RULES, load_sentencepiece

MODEL_SUFFIX = ".arpa.bin"
TOKENIZER_SUFFIX = ".sp.model"
SIDECAR_SUFFIX = ".lm.json"
_BINARY_MAGIC = b"mmap lm http://kheafield.com/code"
DEFAULT_MIN_CHARS: dict[str, int] = {"ccnet": 0, "unicode": 100}
# Pieces are Python strings, some 20 bytes for each character: so many characters at a time.
_BATCH_CHARS = 1 << 19


class PageScorer:
    """Scores pages with one language's pair of files.

    `min_chars`: a page with fewer characters after normalisation is not scored; by default 100
    (`unicode`) or 0 (`ccnet`). The files are opened at first use, once in a process and mapped
    into memory; the object itself is small and can be sent to workers. Raises UserError, at first
    use, when a file is missing or is not what its name says.
    """

    def __init__(
        self,
        tokenizer_path: str | os.PathLike[str],
        lm_path: str | os.PathLike[str],
        profile: LmProfile,
        *,
        min_chars: int | None = None,
    ) -> None:
        if profile not in NORMALIZATION_RULES:
            raise UserError(f"unknown LM profile '{profile}'; valid: 'unicode', 'ccnet'")
        self._tokenizer_path = os.fspath(tokenizer_path)
        self._lm_path = os.fspath(lm_path)
        self._profile: LmProfile = profile
        self._min_chars = DEFAULT_MIN_CHARS[profile] if min_chars is None else min_chars

    def score(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        """The perplexity of each page, float64; NaN means not scored (empty or too short)."""
        tokenizer, model = _load(self._tokenizer_path, self._lm_path)
        pages = np.zeros(len(texts), dtype=np.float64)  # sum of log10 probabilities
        tokens = np.zeros(len(texts), dtype=np.int64)
        for owners, lines in self._batches(texts):
            scores, counts = _score_lines(tokenizer, model, lines)
            np.add.at(pages, owners, scores)
            np.add.at(tokens, owners, counts)
        perplexities = np.full(len(texts), np.nan)
        for index in np.flatnonzero(tokens):
            # Python's power and round: NumPy's depend on the processor in the last bits.
            value = 10.0 ** (-float(pages[index]) / int(tokens[index]))
            perplexities[index] = round(value, 1) if self._profile == "ccnet" else value
        return perplexities

    def _batches(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
        """The lines to score, normalised, each with the index of its page."""
        owners: list[int] = []
        lines: list[str] = []
        chars = 0
        for index, text in enumerate(texts):
            page = normalise_page_for_lm(text, self._profile)
            found = [line for line in page.split("\n") if line]
            page_chars = sum(map(len, found))
            if page_chars < self._min_chars:
                continue
            owners += [index] * len(found)
            lines += found
            chars += page_chars
            if chars >= _BATCH_CHARS:
                yield owners, lines
                owners, lines, chars = [], [], 0
        if lines:
            yield owners, lines


def _score_lines(
    tokenizer: Any, model: Any, lines: list[str]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Log10 probability and tokens of each line; 0 and 0 for a line without pieces."""
    # As bytes, pieces need not become Python strings and bytes again: 15 to 25 % less time.
    encoded = tokenizer.encode(lines, return_type=bytes, num_threads=1)
    score = model.score
    scores = [score(b" ".join(pieces)) if pieces else 0.0 for pieces in encoded]
    counts = [len(pieces) + 1 if pieces else 0 for pieces in encoded]
    return np.array(scores, np.float64), np.array(counts, np.int64)


@dataclass(frozen=True, slots=True)
class LanguageModelFiles:
    """The files of one language's model; `sidecar` is None for CCNet's own models."""

    language: str
    tokenizer: Path
    model: Path
    sidecar: Path | None


def find_language_models(
    directory: str | os.PathLike[str], profile: LmProfile | None = None
) -> dict[str, LanguageModelFiles]:
    """The models in the local folder `directory`, by canonical language code, sorted by it.

    A model is `{language}.arpa.bin` with `{language}.sp.model`, and `{language}.lm.json` when
    Gristmill trained it. `profile`: the one that pages will be normalised by, checked against the
    sidecars; a model without a sidecar (CCNet's, or the user's own) is taken to fit.
    Raises UserError when one of a pair is missing, when a name is no language, and when a sidecar
    names another profile, another tokenizer or a model of another size.
    """
    if not is_local(directory) or not local_path(directory).is_dir():
        raise UserError(
            f"'{os.fspath(directory)}' is not a local folder of language models; KenLM maps its "
            "files into memory, so fetch them first: gristmill models fetch"
        )
    folder = local_path(directory)
    stems = {
        path.name.removesuffix(suffix)
        for suffix in (MODEL_SUFFIX, TOKENIZER_SUFFIX)
        for path in folder.glob(f"[!.]*{suffix}")
    }
    found: dict[str, LanguageModelFiles] = {}
    for stem in sorted(stems):
        language = _language_of(folder, stem)
        if language in found:
            raise UserError(
                f"'{stem}{MODEL_SUFFIX}' and '{found[language].model.name}' in '{folder}' are "
                f"both models of '{language}'; leave one"
            )
        tokenizer, model = folder / f"{stem}{TOKENIZER_SUFFIX}", folder / f"{stem}{MODEL_SUFFIX}"
        for present, missing in ((tokenizer, model), (model, tokenizer)):
            if not missing.is_file():
                raise UserError(
                    f"'{missing.name}' is missing beside '{present}'; a language model is both: "
                    f"fetch or train it, or take '{present.name}' away"
                )
        sidecar = folder / f"{stem}{SIDECAR_SUFFIX}"
        if sidecar.is_file():
            _check_sidecar(sidecar, tokenizer, model, profile)
        found[language] = LanguageModelFiles(
            language, tokenizer, model, sidecar if sidecar.is_file() else None
        )
    return dict(sorted(found.items()))


def check_model(path: str | os.PathLike[str]) -> None:
    """Raise UserError unless the file at `path` begins as KenLM's binary models do."""
    with local_path(path).open("rb") as file:
        if file.read(len(_BINARY_MAGIC)) != _BINARY_MAGIC:
            raise UserError(
                f"'{os.fspath(path)}' is not a KenLM model in binary form; fetch or train it again"
            )


@functools.lru_cache(maxsize=64)
def _load(tokenizer_path: str, lm_path: str) -> tuple[Any, Any]:
    import kenlm  # noqa: PLC0415  (mining without a language model does not load it)

    tokenizer = load_sentencepiece(tokenizer_path)
    if not Path(lm_path).is_file():
        raise UserError(
            f"there is no language model at '{lm_path}'; get one with: gristmill models fetch, "
            "or train one: gristmill models train-ngram"
        )
    settings = kenlm.Config()
    settings.load_method = kenlm.LoadMethod.LAZY  # mapped, read page by page, shared by processes
    settings.show_progress = False
    try:
        return tokenizer, kenlm.Model(lm_path, settings)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"'{lm_path}' is not a KenLM model that can be read ({error}); fetch or train it again"
        ) from error


def _language_of(folder: Path, stem: str) -> str:
    try:
        return parse_label(stem)[0]
    except UserError as error:
        raise UserError(
            f"the files '{stem}.*' in '{folder}' are not named for a language: {error}"
        ) from error


def _check_sidecar(sidecar: Path, tokenizer: Path, model: Path, profile: str | None) -> None:
    try:
        made = json.loads(sidecar.read_text(encoding="utf-8"))
        trained_profile, digest = str(made["profile"]), str(made["tokenizer_sha256"])
        model_bytes = int(made["model_bytes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"'{sidecar}' is not the description of a language model ({error}); train the model "
            "again: gristmill models train-ngram"
        ) from error
    if profile is not None and trained_profile != profile:
        raise UserError(
            f"the model of '{sidecar}' was trained with profile '{trained_profile}', the recipe "
            f"asks for '{profile}'; set the recipe's profile to '{trained_profile}' or train "
            "another model: gristmill models train-ngram"
        )
    # Its size and not its SHA-256, which takes minutes for the gigabytes of a large model.
    if model.stat().st_size != model_bytes:
        raise UserError(
            f"'{model}' has {model.stat().st_size} bytes, but '{sidecar.name}' describes a model "
            f"of '{model_bytes}'; put that one back or train again: gristmill models train-ngram"
        )
    if sha256_file(tokenizer) != digest:
        raise UserError(
            f"'{tokenizer}' is not the tokenizer that '{sidecar.name}' was trained with; put that "
            "one back or train the model again: gristmill models train-ngram"
        )
