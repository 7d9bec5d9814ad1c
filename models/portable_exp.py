"""The exponential function with the same bits on every processor.

NumPy's exp, and that of the C library under Python's, have variants for AVX-512 and FMA whose
last bits differ, so that two workers would write two scores for one page. Here only operations
take part whose result IEEE 754 fixes: sums, products, rounding to whole numbers, and a table.
"""

from __future__ import annotations

import functools
from decimal import Context
from typing import Final

import numpy as np
from numpy.typing import NDArray

LIMIT: Final = 40.0
_PARTS: Final = 64
_LN2: Final = 0.6931471805599453
_STEP: Final = _LN2 / _PARTS
_LARGEST_POWER: Final = 58  # of 2, rounded up: e**40 is 2**57.7


def portable_exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """e**x to 13 digits; x below -LIMIT or above LIMIT is taken as that. `x` holds no nan."""
    rest = np.clip(x, -LIMIT, LIMIT)
    steps = np.rint(rest / _STEP)
    rest -= steps * _STEP  # at most half a step, 0.0054: five terms of the series are enough
    series = rest * (1 / 24)
    for term in (1 / 6, 1 / 2, 1.0):
        series += term
        series *= rest
    series += 1.0
    series *= np.take(_powers(), steps.astype(np.intp) + _LARGEST_POWER * _PARTS)
    return series


@functools.cache
def _powers() -> NDArray[np.float64]:
    """2**(i / _PARTS), for i from -_LARGEST_POWER * _PARTS."""
    exact = Context(prec=30)  # decimal arithmetic is the same everywhere
    parts = [float(exact.power(2, exact.divide(part, _PARTS))) for part in range(_PARTS)]
    whole = np.arange(-_LARGEST_POWER, _LARGEST_POWER + 1)
    powers: NDArray[np.float64] = np.ldexp(np.array(parts), whole[:, None]).ravel()
    return powers
