"""The exponential function: right, and the same bits everywhere."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from models.portable_exp import LIMIT, portable_exp


def test_right_to_13_digits() -> None:
    x = np.concatenate([np.linspace(-LIMIT, LIMIT, 20_001), [0.0, -0.0, 1e-300, 1.0, -1.0]])
    np.testing.assert_allclose(portable_exp(x), [math.exp(v) for v in x], rtol=1e-13)
    assert portable_exp(np.zeros(1)) == 1.0


def test_what_is_large_is_cut() -> None:
    ends = portable_exp(np.array([-LIMIT, LIMIT]))
    for large in (LIMIT + 1e-9, 1e300, math.inf):
        assert portable_exp(np.array([-large, large])).tolist() == ends.tolist()


def test_the_bits_are_these_on_every_machine() -> None:
    # Written on an AVX2 machine. np.exp gives other bits with AVX-512 than without.
    found = portable_exp(np.linspace(-41, 41, 10_001)).astype("<f8")
    assert (
        hashlib.sha256(found.tobytes()).hexdigest()
        == "f48c2a76622e17223fecf8c732785385f00480192d9aa06817ea4c035a17433a"
    )
