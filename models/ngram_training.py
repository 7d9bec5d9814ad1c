"""Training of n-gram language models (KenLM) over SentencePiece pieces.

Paragraphs are normalised and deduplicated (`models/sentencepiece_lm.py`), written as pieces to a
temporary file, counted by `lmplz` (modified Kneser-Ney, Heafield et al. 2013) and made into a
mappable file by `build_binary`. Beside `xx.arpa.bin` stands `xx.lm.json`, which says how the
model was made.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from models import kenlm_tools
from models.errors import Fault, UserError
from models.files import atomic_path, sha256_file, size_bytes, write_atomic
from models.lm_text import LmProfile
from models.ngram import MODEL_SUFFIX, SIDECAR_SUFFIX
from models.sentencepiece_lm import (
    MIN_PARAGRAPH_CHARS,
    NORMALIZATION_RULES,
    TrainingParagraphs,
    load_sentencepiece,
)

# KENLM_MAX_ORDER of the build, of the programs and of the Python package alike.
MAX_ORDER = 6

_log = logging.getLogger(__name__)


def train_ngram(
    lines: Iterable[str],
    tokenizer_path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    order: int = 5,
    profile: LmProfile = "unicode",
    min_chars: int = MIN_PARAGRAPH_CHARS,
    memory: str = "1G",
    structure: Literal["probing", "trie"] = "probing",
    discount_fallback: bool | None = None,
    temporary_dir: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Train an n-gram model on `lines` into the file `output` (`xx.arpa.bin`) and its sidecar.

    `memory` is what `lmplz` sorts in ("1G", "500M"); what does not fit goes to `temporary_dir`,
    which also holds the corpus as pieces and the ARPA file: 36 times the text in the one case
    measured (order 5, 15 MB of English).
    `structure`: "probing" is fastest, "trie" about half as large. `discount_fallback`: None uses
    KenLM's fallback only when it says that it must (small or artificial text); True and False
    decide. The same lines with the same settings give the same bytes.
    Returns the content of the sidecar. Raises UserError for unusable settings or too little
    text, Fault when a KenLM program fails otherwise.
    """
    _check_settings(output, order, profile, memory, structure)
    lmplz = kenlm_tools.tool_path("lmplz")
    build_binary = kenlm_tools.tool_path("build_binary")
    tokenizer = load_sentencepiece(tokenizer_path)
    paragraphs = TrainingParagraphs(lines, profile, min_chars)
    with tempfile.TemporaryDirectory(prefix="gristmill-lm-", dir=temporary_dir) as scratch:
        pieces, arpa = Path(scratch) / "pieces.txt", Path(scratch) / "model.arpa"
        tokens = _write_pieces(paragraphs, tokenizer, pieces)
        counts = paragraphs.counts
        if not tokens:
            raise UserError(
                f"no text to train the model '{os.fspath(output)}' on: of {counts['read']} "
                f"paragraphs {counts['too_short']} have fewer than {min_chars} characters after "
                "normalisation; give more text or a lower min_chars"
            )
        _log.info("n-grams of %d paragraphs, %d tokens", counts["kept"], tokens)
        command = [str(lmplz), "-o", str(order), "-S", memory, "-T", f"{scratch}/"]
        command += ["--vocab_estimate", str(tokenizer.get_piece_size())]
        # An unknown stretch of text may read "<s>"; lmplz would stop there.
        command += ["--skip_symbols", "--text", str(pieces), "--arpa", str(arpa)]
        fell_back = _run_lmplz(command, discount_fallback)
        _log.info("binary model '%s'", os.fspath(output))
        with atomic_path(output) as temporary:
            convert = [str(build_binary), "-T", f"{scratch}/", "-S", memory, structure]
            _run([*convert, str(arpa), str(temporary)])
        ngrams = _ngram_counts(arpa)
    report = {
        "kind": "kenlm",
        "profile": profile,
        "order": order,
        "structure": structure,
        "discount_fallback": fell_back,
        "min_chars": min_chars,
        "paragraphs": dict(counts),
        "chars": paragraphs.chars,
        "tokens": tokens,
        "ngrams": ngrams,
        "vocab_size": tokenizer.get_piece_size(),
        "tokenizer_sha256": sha256_file(tokenizer_path),
        "model_sha256": sha256_file(output),
        "model_bytes": size_bytes(output),
        "versions": {
            "kenlm": kenlm_tools.KENLM_VERSION,
            "sentencepiece": version("sentencepiece"),
        },
    }
    stem = os.fspath(output).removesuffix(MODEL_SUFFIX)
    write_atomic(stem + SIDECAR_SUFFIX, json.dumps(report, indent=2, sort_keys=True) + "\n")
    return report


def _check_settings(
    output: str | os.PathLike[str], order: int, profile: str, memory: str, structure: str
) -> None:
    if not os.fspath(output).endswith(MODEL_SUFFIX):
        raise UserError(
            f"the model's name '{os.fspath(output)}' must end in '{MODEL_SUFFIX}', for instance "
            f"'bn{MODEL_SUFFIX}'"
        )
    if not 2 <= order <= MAX_ORDER:
        raise UserError(f"order is '{order}'; it must be 2 to {MAX_ORDER}")
    if profile not in NORMALIZATION_RULES:
        raise UserError(f"unknown LM profile '{profile}'; valid: 'unicode', 'ccnet'")
    if structure not in ("probing", "trie"):
        raise UserError(f"unknown model structure '{structure}'; valid: 'probing', 'trie'")
    if not re.fullmatch(r"\d+[KMGT]|\d+%", memory):
        raise UserError(f"memory is '{memory}'; write a size such as '500M', '4G' or '50%'")


def _write_pieces(paragraphs: Iterable[str], tokenizer: Any, path: Path) -> int:
    """Write each paragraph as one line of pieces; return the number of pieces."""
    tokens = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for text in paragraphs:
            pieces = tokenizer.encode(text, out_type=str)
            tokens += len(pieces)
            file.write(" ".join(pieces) + "\n")
    return tokens


def _run_lmplz(command: list[str], discount_fallback: bool | None) -> bool:
    """Run `lmplz`; whether the discounts fell back. Raises UserError or Fault."""
    if discount_fallback:
        _run([*command, "--discount_fallback"])
        return True
    try:
        _run(command)
    except Fault as error:
        # lmplz names the option itself when the closed form of the discounts has no solution.
        if "--discount_fallback" not in str(error):
            raise
        if discount_fallback is False:
            raise UserError(
                "the text is too small or too artificial for Kneser-Ney discounts "
                "(discount_fallback is 'false'); give more text, or leave discount_fallback out"
            ) from error
        _log.info("the closed form of the discounts fails on this text: fallback discounts")
        _run([*command, "--discount_fallback"])
        return True
    return False


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        tail = " | ".join(done.stdout.strip().splitlines()[-8:])
        raise Fault(f"'{Path(command[0]).name}' failed with status {done.returncode}: {tail}")


def _ngram_counts(arpa: Path) -> list[int]:
    """How many n-grams of each order the head of the ARPA file declares."""
    counts: list[int] = []
    with arpa.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if match := re.fullmatch(r"ngram \d+=(\d+)\s*", line):
                counts.append(int(match[1]))
            elif line.startswith("\\1-grams"):
                break
    return counts
