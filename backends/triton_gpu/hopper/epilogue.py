"""c = round(activation(acc + bias)) inside Gluon kernels: all in float32, one rounding by the caller's store."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def activated(x, ACTIVATION: gl.constexpr):
    """The activation; infinities and NaN come out as from torch's functions."""
    if ACTIVATION == "relu":
        x = gl.where(x < 0, 0.0, x)  # keeps NaN
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2u): no cancellation, and no overflow past exp's Inf
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x
