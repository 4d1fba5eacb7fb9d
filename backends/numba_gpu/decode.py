"""value = decode(bits): stored numbers -> float32, and code k of a dense bit stream -> uint32. Device functions.

float16, float32, int8: the GPU converts them. bfloat16 (uint16), e4m3 and e8m0 (uint8) are read as integers, so that
neither torch's array interface nor numba needs to know them:

    bfloat16  s eeeeeeee mmmmmmm            the upper half of a float32
    e4m3      s eeee mmm        bias 7      no infinity; NaN is s 1111 111
    e8m0      eeeeeeee          bias 127    2**(e - 127); NaN is 11111111

Numba widens 32-bit unsigned arithmetic to 64 bits; every result goes back through ``np.uint32``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from qmm.backends.numba_gpu.device import device_function

_E4M3_SCALE = np.float32(2.0**120)  # between the exponent biases 127 and 7
_NAN_BITS = np.uint32(0x7FC00000)
_LOW_5 = np.int64(31)


@device_function
def from_number(x):  # type: ignore[no-untyped-def]
    """float16, float32 or int8: a plain conversion."""
    return np.float32(x)


@device_function
def from_bfloat16(bits):  # type: ignore[no-untyped-def]
    """The upper half of a float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@device_function
def from_e4m3(bits):  # type: ignore[no-untyped-def]
    """Exponent and mantissa moved to their places in a float32; one exact product corrects the bias.

    Subnormals become float32 subnormals and come out right as well (no flush to zero: fastmath is off).
    """
    wide = np.uint32(bits)
    size = wide & np.uint32(0x7F)
    moved = np.uint32(((wide & np.uint32(0x80)) << np.uint32(24)) | (size << np.uint32(20)))
    if size == np.uint32(0x7F):
        moved = _NAN_BITS
    return moved.view(np.float32) * _E4M3_SCALE


@device_function
def from_e8m0(bits):  # type: ignore[no-untyped-def]
    """A float32 exponent; 2**-127 is subnormal there."""
    wide = np.uint32(bits)
    moved = np.uint32(wide << np.uint32(23))
    if wide == np.uint32(0):
        moved = np.uint32(0x00400000)
    if wide == np.uint32(0xFF):
        moved = _NAN_BITS
    return moved.view(np.float32)


def decoder(dtype: torch.dtype) -> Any:
    """The device function that makes float32 of one stored element of ``dtype``."""
    special = {
        torch.bfloat16: from_bfloat16,
        torch.float8_e4m3fn: from_e4m3,
        getattr(torch, "float8_e8m0fnu", None): from_e8m0,
    }
    return special.get(dtype, from_number)


@cache
def code_reader(bits: int) -> Any:
    """``code_at(words, columns, column, row)``: bits ``[row*bits, (row+1)*bits)`` of a column's stream of words."""
    mask = np.uint32((1 << bits) - 1)
    straddles = 32 % bits != 0

    @device_function
    def code_at(words, columns, column, row):  # type: ignore[no-untyped-def]
        start = np.int64(row) * bits
        at = (start >> 5) * columns + column
        shift = np.uint32(start & _LOW_5)
        code = np.uint32(np.uint32(words[at]) >> shift)
        if straddles and shift + np.uint32(bits) > np.uint32(32):
            code = np.uint32(code | np.uint32(np.uint32(words[at + columns]) << (np.uint32(32) - shift)))
        return np.uint32(code & mask)  # the mask comes after the shift

    return code_at
