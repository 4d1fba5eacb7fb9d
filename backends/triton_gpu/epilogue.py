"""c = round(activation(acc + bias)): all in float32, one rounding.

acc float32 ``[BLOCK_M, BLOCK_N]``; bias ``[N]`` of any float dtype, or None.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, DTYPE: tl.constexpr, EMULATED: tl.constexpr):
    """float32 to DTYPE, to nearest even. The interpreter's own cast to bf16 cuts the low bits off."""
    if EMULATED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def finish(acc, bias_ptr, n, n_mask, ACTIVATION: tl.constexpr):
    """Bias and activation; the caller rounds. Infinities and NaN come out as from torch's functions."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n_mask, other=0).to(tl.float32)[None, :]
    if ACTIVATION == "relu":
        acc = tl.where(acc < 0, 0.0, acc)  # keeps NaN
    elif ACTIVATION == "gelu":
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2u): no cancellation, and no overflow past exp's Inf
        acc = acc / (1.0 + tl.exp(-1.5957691216057308 * (acc + 0.044715 * acc * acc * acc)))
    elif ACTIVATION == "silu":
        acc = acc / (1.0 + tl.exp(-acc))
    return acc
