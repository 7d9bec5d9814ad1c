"""A tokenizer of some hundred pieces over many scripts, and text for it, made in a moment."""

from __future__ import annotations

import functools
import random

from tokenizers import Tokenizer

from models.tokenizer import train_tokenizer

_TEXT = """
the mill grinds grain slowly every morning beside old river bridges and waterwheels turning
আমি ভাত খাই তুমি নদী পাহাড় মানুষ সকাল यह घर है वह नदी के पास रहता था और किताब
هذا بيت كبير جدا في المدينة القديمة дом стоит на берегу большой реки
"""
WORDS = _TEXT.split()
THAI = "ไทยไม่มีจุดจบประโยคและเขียนติดกันไปเรื่อยๆ"
CHINESE = "磨坊每天早上慢慢地磨谷物河边的老桥"


def made_up_text(seed: int, sentence_count: int, words: tuple[int, int] = (2, 25)) -> str:
    """Sentences of random words, some with commas and numbers, two or three a line."""
    draw = random.Random(seed)
    text = ""
    for _ in range(sentence_count):
        chosen = draw.choices(WORDS, k=draw.randint(*words))
        chosen[draw.randrange(len(chosen))] += draw.choice([",", " 12", " (x)", ""])
        text += " ".join(chosen).capitalize() + draw.choice([". ", "! ", "।", ".\n"])
    return text


@functools.cache
def small_tokenizer() -> Tokenizer:
    """Trained anew in each process; the same each time."""
    texts = [made_up_text(seed, 20) for seed in range(40)] + [THAI, CHINESE]
    return train_tokenizer(texts, vocab_size=600, at_most=True)
