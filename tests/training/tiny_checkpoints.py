"""Tiny exported models and labelled tasks on which the tests of evaluation run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers.models import Unigram

from models.albert import build_albert
from models.decoder import build_decoder
from models.tokenizer import SPACE, SPECIAL_TOKENS, UNK_ID, save_tokenizer, train_tokenizer

# One letter each, so that a word is one token.
PLAIN = list("abcdefghijkl")
PEOPLE = list("MNOP")
PLACES = list("QRST")


def save_checkpoint(folder: Path, *, family: str = "albert") -> Path:
    """An exported model with random weights, and its tokenizer."""
    words = [*PLAIN, *PEOPLE, *PLACES]
    tokenizer = train_tokenizer([" ".join(words)], vocab_size=90, at_most=True)
    pieces = [*SPECIAL_TOKENS, *(SPACE + word for word in words)]
    tokenizer.model = Unigram([(piece, 0.0) for piece in pieces], unk_id=UNK_ID)
    size = tokenizer.get_vocab_size()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network: Any = (
            build_albert("tiny", size, max_length=64)
            if family == "albert"
            else build_decoder("tiny", size, max_length=64)
        )
        network.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, {})
    return folder


def write_sentences(path: Path, count: int, seed: int, tags: Sequence[str] | None = None) -> Path:
    """Sentences whose people and places are entities of two words; `tags` replaces all tags."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        words: list[tuple[str, str]] = []
        for _ in range(draw.randint(3, 6)):
            kind = draw.random()
            if kind < 0.2:
                words += [(draw.choice(PEOPLE[:2]), "B-PER"), (draw.choice(PEOPLE[2:]), "I-PER")]
            elif kind < 0.4:
                words.append((draw.choice(PLACES), "B-LOC"))
            else:
                words.append((draw.choice(PLAIN), "O"))
        lines += [f"{word}\t{tag if tags is None else draw.choice(tags)}" for word, tag in words]
        lines.append("")
    path.write_text("\n".join(lines))
    return path


def write_table(path: Path, count: int, seed: int, *, shuffled: bool = False) -> Path:
    """Texts that name a person or a place, which is their label; shuffled: any label."""
    draw = random.Random(seed)
    lines = ["id\ttext\tlabel"]
    for number in range(count):
        label = draw.choice(["person", "place"])
        name = draw.choice(PEOPLE if label == "person" else PLACES)
        words = [*draw.choices(PLAIN, k=5), name]
        draw.shuffle(words)
        given = draw.choice(["person", "place"]) if shuffled else label
        lines.append(f"{number}\t{' '.join(words)}\t{given}")
    path.write_text("\n".join(lines) + "\n")
    return path
