"""c = round(activation(sum + bias[n])): float32 sum -> one stored element of the output. Device functions.

Everything is float32, and there is one rounding, to nearest even: NaN stays NaN, what is past the range becomes Inf.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from qmm.backends.numba_gpu.decode import decoder
from qmm.backends.numba_gpu.device import device_function

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_SQRT_HALF = np.float32(math.sqrt(0.5))
_SQRT_2_OVER_PI = np.float32(math.sqrt(2 / math.pi))
_CUBIC = np.float32(0.044715)


@device_function
def identity(x):  # type: ignore[no-untyped-def]
    """Return x."""
    return x


@device_function
def relu(x):  # type: ignore[no-untyped-def]
    """max(x, 0), and NaN for NaN."""
    return _ZERO if x < _ZERO else x


@device_function
def gelu(x):  # type: ignore[no-untyped-def]
    """x/2 (1 + erf(x / sqrt 2))."""
    return _HALF * x * (_ONE + np.float32(math.erf(x * _SQRT_HALF)))


@device_function
def gelu_tanh(x):  # type: ignore[no-untyped-def]
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x**3)))."""
    inner = _SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)
    return _HALF * x * (_ONE + np.float32(math.tanh(inner)))


@device_function
def silu(x):  # type: ignore[no-untyped-def]
    """x / (1 + exp(-x)), with an exponential that cannot overflow."""
    small = np.float32(math.exp(-abs(x)))
    weight = small if x < _ZERO else _ONE
    return x * (weight / (_ONE + small))


_ACTIVATIONS = {None: identity, "relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}


@device_function
def to_float16(x):  # type: ignore[no-untyped-def]
    """The GPU rounds to nearest even."""
    return np.float16(x)


@device_function
def to_bfloat16(x):  # type: ignore[no-untyped-def]
    """The upper half of the float32 bits, rounded to nearest even; the carry may reach Inf, as it should."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    if x != x:
        bits = np.uint32(0x7FC00000)  # rounding up could carry a NaN into the sign
    else:
        bits = np.uint32(bits + np.uint32(0x7FFF) + np.uint32(odd))
    return np.uint16(bits >> np.uint32(16))


_ROUNDINGS = {torch.float16: to_float16, torch.bfloat16: to_bfloat16, torch.float32: identity}


def make_finish(out_dtype: torch.dtype, bias_dtype: torch.dtype | None, activation: str | None) -> Any:
    """``finish(total, bias, n)``, the stored element of column n."""
    decode_bias = decoder(torch.float32 if bias_dtype is None else bias_dtype)
    activate = _ACTIVATIONS[activation]
    rounded = _ROUNDINGS[out_dtype]
    has_bias = bias_dtype is not None

    @device_function
    def finish(total, bias, n):  # type: ignore[no-untyped-def]
        if has_bias:
            total = total + decode_bias(bias[n])
        return rounded(activate(total))

    return finish
