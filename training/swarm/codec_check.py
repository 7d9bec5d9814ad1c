"""Does a codec work on this machine? A known vector through encode, decode and a weighted mean.

hivemind 1.1.12 with numpy 2.4 breaks every 8-bit codec in silence: rounds end, nothing is
averaged. So a peer tries its codec before it joins.
"""

from __future__ import annotations

import functools
import math

import torch
from hivemind.compression import CompressionInfo, deserialize_torch_tensor

from models.errors import UserError
from training.swarm.codecs import LONG_VALUES, Codec, codec
from training.swarm.reduction import weighted_mean

_WEIGHTS = (1.0, 3.0)


@functools.cache
def self_test(name: str) -> None:
    """Raises UserError, in one line, when the codec `name` is unknown or gives wrong numbers."""
    tested = codec(name)
    try:
        fault = _fault(tested)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}".splitlines()[0]
    if fault is not None:
        others = "'none'" if name != "none" else "a clean install of hivemind, torch and numpy"
        raise UserError(
            f"swarm.codec = '{name}' does not work here ({fault}): use {others}, or the versions "
            "of constraints.txt"
        )


def known_vector(values: int = LONG_VALUES) -> torch.Tensor:
    """The quantiles of N(0, 1), in a fixed shuffled order: no random numbers of any version."""
    ranks = (torch.arange(values, dtype=torch.float64) * 7919 % values + 0.5) / values
    quantiles: torch.Tensor = torch.special.ndtri(ranks)
    return quantiles.float()


def _fault(codec: Codec) -> str | None:
    for values in (LONG_VALUES, 100, 1):  # 8-bit codecs take another way for short tensors
        vector = known_vector(values)
        parts = [
            (_passed(codec, scale * vector), w) for scale, w in zip((1, -1), _WEIGHTS, strict=True)
        ]
        decoded = parts[0][0]
        if decoded.shape != vector.shape or decoded.dtype != vector.dtype:
            return f"{tuple(vector.shape)} came back as {tuple(decoded.shape)} {decoded.dtype}"
        allowed = max(codec.relative_error, 1e-7) * math.sqrt(float(vector.square().mean()) or 1.0)
        expected = vector * (_WEIGHTS[0] - _WEIGHTS[1]) / sum(_WEIGHTS)
        mean = _passed(codec, weighted_mean(parts))
        for what, got, wanted in (("a vector", decoded, vector), ("a mean", mean, expected)):
            error = float((got - wanted).square().mean().sqrt())
            if not error <= 2 * allowed:
                return (
                    f"{what} of {values} values comes back {error:.2g} off, {allowed:.2g} allowed"
                )
    return None


def _passed(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    info = CompressionInfo.from_tensor(tensor)
    message = codec.compression.compress(tensor, info)
    if message.compression not in codec.wire_types:
        raise ValueError(f"it writes the type {message.compression}")
    received = type(message).FromString(message.SerializeToString())
    decoded: torch.Tensor = deserialize_torch_tensor(received)
    return decoded
