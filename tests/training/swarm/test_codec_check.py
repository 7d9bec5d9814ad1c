"""Codecs: what they lose, what they refuse, and that a broken one is noticed before joining."""

from __future__ import annotations

import pytest
import torch
from hivemind.compression import CompressionInfo, Uniform8BitQuantization, deserialize_torch_tensor
from hivemind.proto import runtime_pb2

from models.errors import UserError
from training.swarm import codec_check
from training.swarm.codecs import CODECS, LONG_VALUES, codec, fault


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_works_here(name: str) -> None:
    codec_check.self_test.cache_clear()
    codec_check.self_test(name)


def test_the_known_vector_is_normal() -> None:
    vector = codec_check.known_vector()
    assert vector.numel() == LONG_VALUES == len(vector.unique())
    assert vector.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert vector.std().item() == pytest.approx(1.0, abs=1e-3)
    assert codec_check.known_vector(4).tolist() == pytest.approx(
        [-1.1503494, 1.1503494, 0.3186394, -0.3186394]
    )


def test_numpy_that_breaks_the_8_bit_codecs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def extract(self: object, message: object) -> None:
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    monkeypatch.setattr(Uniform8BitQuantization, "extract", extract)
    codec_check.self_test.cache_clear()
    with pytest.raises(
        UserError, match=r"^swarm.codec = 'uniform8' does not work here \(TypeError: "
    ):
        codec_check.self_test("uniform8")


def test_a_codec_with_wrong_numbers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Uniform8BitQuantization.extract

    def extract(self: Uniform8BitQuantization, message: runtime_pb2.Tensor) -> torch.Tensor:
        return original(self, message) * 1.1

    monkeypatch.setattr(Uniform8BitQuantization, "extract", extract)
    codec_check.self_test.cache_clear()
    with pytest.raises(UserError, match=r"a vector of 65536 values comes back 0\.1 off"):
        codec_check.self_test("uniform8")
    codec_check.self_test.cache_clear()


def test_an_unknown_codec_is_told_with_the_known() -> None:
    with pytest.raises(UserError, match=r"'zip' is unknown: use one of none, float16, scaled-"):
        codec("zip")


@pytest.mark.parametrize("name", ["uniform8", "quantile8"])
@pytest.mark.parametrize("values", [1, 2, LONG_VALUES])
def test_8_bit_codecs_take_constant_and_tiny_parts(name: str, values: int) -> None:
    part = torch.full((values,), 0.25)
    message = codec(name).compression.compress(part, CompressionInfo.from_tensor(part))
    assert message.compression == runtime_pb2.FLOAT16
    assert torch.equal(deserialize_torch_tensor(message), part)


@pytest.mark.parametrize(
    ("values", "name", "reason"),
    [
        ([0.0, 1.0], "float16", None),
        ([0.0, float("nan")], "none", "tensor 1 holds a value that is not finite"),
        ([float("-inf")], "scaled-float16", "tensor 1 holds a value that is not finite"),
        ([-70000.0], "float16", "tensor 1 holds 70000, more than codec 'float16' can write"),
        ([-70000.0], "scaled-float16", None),
    ],
)
def test_what_must_not_be_sent(values: list[float], name: str, reason: str | None) -> None:
    found = fault(codec(name), [torch.ones(2), torch.tensor(values)])
    assert (found or "").startswith(reason or "") and (found is None) == (reason is None)
