"""How numbers travel between peers: names of codecs, and hivemind's classes behind them.

The 8-bit codecs are only for long tensors whose values differ: hivemind's divide by zero on a
part of one value and on a constant one. Such parts travel as float16, which every reader sees
from the message itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    Uniform8BitQuantization,
)
from hivemind.proto import runtime_pb2

from models.errors import UserError

LONG_VALUES = 1 << 16
"""Tensors shorter than this are never sent in 8 bits: biases and norms are few bytes."""

FLOAT16_MAX = float(torch.finfo(torch.float16).max)


class EightBit(CompressionBase):  # type: ignore[misc]
    """`quantised` for long parts that vary, float16 for all others."""

    def __init__(self, quantised: CompressionBase) -> None:
        self.compression_type = quantised.compression_type
        self._quantised = quantised
        self._float16 = Float16Compression()

    def compress(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        long = info.descriptor.numel() >= LONG_VALUES and tensor.numel() > 1
        codec = self._quantised if long and bool(tensor.std() > 0) else self._float16
        return codec.compress(tensor, info, allow_inplace)

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        is_float16 = serialized_tensor.compression == runtime_pb2.FLOAT16
        codec = self._float16 if is_float16 else self._quantised
        extracted: torch.Tensor = codec.extract(serialized_tensor)
        return extracted

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        long = info.descriptor.numel() >= LONG_VALUES
        return float((self._quantised if long else self._float16).estimate_compression_ratio(info))


@dataclass(frozen=True)
class Codec:
    """One way to write floats. `relative_error`: RMS of one pass over N(0, 1), an upper bound."""

    name: str
    compression: CompressionBase
    wire_types: frozenset[int]
    """What a message of a peer with this codec may be written in."""
    relative_error: float
    largest: float
    """Larger values would be clipped in silence."""


def _codec(
    name: str, compression: CompressionBase, error: float, largest: float = float("inf")
) -> Codec:
    types = {compression.compression_type}
    if isinstance(compression, EightBit):
        types.add(Float16Compression.compression_type)
    return Codec(name, compression, frozenset(types), error, largest)


CODECS = {
    codec.name: codec
    for codec in (
        _codec("none", NoCompression(), 0.0),
        _codec("float16", Float16Compression(), 5e-4, FLOAT16_MAX),
        _codec("scaled-float16", ScaledFloat16Compression(), 5e-4),
        _codec("uniform8", EightBit(Uniform8BitQuantization()), 3e-2, FLOAT16_MAX),
        _codec("quantile8", EightBit(Quantile8BitQuantization()), 5e-2, FLOAT16_MAX),
    )
}


def codec(name: str) -> Codec:
    """The codec `name`. Raises UserError for an unknown one."""
    if name not in CODECS:
        raise UserError(f"swarm.codec = '{name}' is unknown: use one of {', '.join(CODECS)}")
    return CODECS[name]


def fault(codec: Codec, tensors: Sequence[torch.Tensor]) -> str | None:
    """Why `tensors` must not be sent with `codec`; None where they may be."""
    for number, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        largest = float(tensor.detach().abs().max())
        if not largest < float("inf"):  # NaN too
            return f"tensor {number} holds a value that is not finite"
        if largest > codec.largest:
            return (
                f"tensor {number} holds {largest:g}, more than codec '{codec.name}' can write "
                f"({codec.largest:g}): use 'scaled-float16'"
            )
    return None
