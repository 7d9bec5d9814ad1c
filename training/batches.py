"""Examples put together to the tensors that a network takes.

Causal (`training.causal_examples`), b examples of t tokens:
    input_ids, document_ids (b, t); position_ids (b, t) unless tokens see other documents;
    labels (b, t): at each position the token that follows, `IGNORED` where it belongs to another
    document or is not in the sequence.
ALBERT (`training.albert_examples`), t tokens in the longest:
    input_ids, attention_mask, token_type_ids (b, t); labels (b, t): the token at this position
    where it is asked for; sentence_order_label (b,): 1 when the segments are swapped.
Both: domains (b,). Everything is int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from models.tokenizer import CLS_ID, PAD_ID, SEP_ID
from training.examples import IGNORED, Example

Batch = dict[str, torch.Tensor]
_PADDING = {"input_ids": PAD_ID, "labels": IGNORED, "document_ids": -1}


def collate(examples: Sequence[Example], length: int | None = None) -> Batch:
    """One batch of at least one example, all of one kind.

    Rows are as long as the longest example, or `length` tokens: then all batches have one shape.
    Raises ValueError for an example longer than that.
    """
    longest = max(len(example.arrays["input_ids"]) for example in examples)
    if length is not None and longest > length:
        raise ValueError(f"an example of {longest} tokens in a batch of {length}")
    length = longest if length is None else length
    arrays = {
        name: _rows([example.arrays[name] for example in examples], length, _PADDING.get(name, 0))
        for name, array in examples[0].arrays.items()
        if array.ndim
    }
    if "document_ids" in arrays:
        arrays["labels"] = _next_tokens(arrays["input_ids"], arrays["document_ids"])
    else:
        sizes = np.array([len(example.arrays["input_ids"]) for example in examples])
        arrays["attention_mask"] = (np.arange(length) < sizes[:, None]).astype(np.int64)
        arrays["sentence_order_label"] = np.array(
            [example.arrays["swapped"] for example in examples], np.int64
        )
    arrays["domains"] = np.array([example.domain for example in examples], np.int64)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def blank(family: str, length: int, *, positions: bool = False) -> Batch:
    """A batch of one example without a label, for a rank that has no other; its gradient is 0.

    positions: whether a causal one has `position_ids`, as packed documents do.
    """
    ids = np.array([CLS_ID, SEP_ID, SEP_ID], dtype=np.int32)
    if family == "albert":
        arrays = {
            "input_ids": ids,
            "token_type_ids": np.array([0, 0, 1], dtype=np.int32),
            "labels": np.full(3, IGNORED, dtype=np.int32),
            "swapped": np.array(0, dtype=np.int32),
        }
    else:
        tokens = np.resize(ids, length)
        arrays = {"input_ids": tokens, "document_ids": np.zeros_like(tokens)}
        if positions:
            arrays["position_ids"] = np.arange(length, dtype=np.int32)
    batch = collate([Example(0, 0, arrays)])
    for name in ("labels", "sentence_order_label"):
        if name in batch:
            batch[name] = torch.full_like(batch[name], IGNORED)
    return batch


def filled(
    batch: Batch, family: str, examples: int, length: int, *, positions: bool = False
) -> Batch:
    """`batch` in one shape: blank examples up to `examples`, padding up to `length` tokens.

    Neither adds to a loss or a gradient. positions: whether the causal batches of the run have
    `position_ids`: one that is only a blank example gets them too.
    """
    device, rows = batch["input_ids"].device, len(batch["input_ids"])
    more = blank(family, length, positions=positions or "position_ids" in batch)
    found = {}
    for name, row in more.items():
        blanks = [row.to(device)] * examples
        parts = [batch[name], *blanks[rows:]] if name in batch else blanks
        if row.ndim > 1:
            parts = [_wide(part, name, length) for part in parts]
        found[name] = torch.cat(parts)
    return found


def _wide(rows: torch.Tensor, name: str, length: int) -> torch.Tensor:
    """Rows padded on the right to `length` tokens."""
    return functional.pad(rows, (0, length - rows.shape[1]), value=_PADDING.get(name, 0))


def _rows(arrays: Sequence[np.ndarray], length: int, padding: int) -> np.ndarray:
    rows = np.full((len(arrays), length), padding, np.int64)
    for row, array in zip(rows, arrays, strict=True):
        row[: len(array)] = array
    return rows


def _next_tokens(input_ids: np.ndarray, document_ids: np.ndarray) -> np.ndarray:
    """Each position's next token, where the same document has one."""
    labels = np.full_like(input_ids, IGNORED)
    same = (document_ids[:, 1:] == document_ids[:, :-1]) & (document_ids[:, 1:] >= 0)
    labels[:, :-1][same] = input_ids[:, 1:][same]
    return labels
