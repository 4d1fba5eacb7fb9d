"""s[g, n] = float32(scales[g, n]) * scale2, or divided by it: group factors of every stored dtype, in float32.

float8 tensors come in as uint8 and are decoded by their bits, which works on every GPU and in the interpreter::

    e4m3  | s | eeee | mmm |   2**(e-7) * 1.mmm, e=0: 2**-9 * mmm, no Inf, NaN where all of e and m are set
    e8m0  | eeeeeeee |         2**(e-127), NaN where all bits are set

4-bit integers stand in int32 words, packed down G as 4-bit codes are down K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qmm.backends.triton_gpu.unpack import codes_at


@triton.jit
def decode_e4m3(raw):
    """uint8 bits of float8_e4m3fn -> float32."""
    bits = raw.to(tl.int32)
    magnitude = bits & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    subnormal = magnitude.to(tl.float32) * 0.001953125
    value = tl.where(magnitude < 8, subnormal, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(bits >= 0x80, -value, value)


@triton.jit
def decode_e8m0(raw):
    """uint8 bits of float8_e8m0fnu -> float32. 2**-127 is a subnormal number of float32."""
    bits = raw.to(tl.int32)
    encoded = tl.where(bits == 0, 1 << 22, bits << 23)
    return tl.where(bits == 0xFF, float("nan"), encoded.to(tl.float32, bitcast=True))


@triton.jit
def load_factor(
    ptr, second_ptr, ratio, g, n, n_mask, N,
    DTYPE: tl.constexpr, ONE_SECOND: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """Factors of groups ``g`` (all below G) as float32 ``[groups, BLOCK_N]``, times (or by) their second level.

    Args:
        ptr: ``[G, N]`` float, int8, or uint8 bits where DTYPE is "e4m3" or "e8m0"; words where it is "uint4".
        second_ptr: None, or float32 ``[1]`` (ONE_SECOND) or ``[ceil(G/ratio), N]``.
    """
    mask = n_mask[None, :]
    if DTYPE == "uint4":
        raw = codes_at(ptr, 0, g, mask, n, N, 4)
    else:
        raw = tl.load(ptr + g.to(tl.int64)[:, None] * N + n[None, :], mask=mask, other=0)
    if DTYPE == "e4m3":
        value = decode_e4m3(raw)
    elif DTYPE == "e8m0":
        value = decode_e8m0(raw)
    else:
        value = raw.to(tl.float32)
    if second_ptr is not None:
        if ONE_SECOND:
            second = tl.load(second_ptr)
        else:
            rows = (g // ratio).to(tl.int64)
            second = tl.load(second_ptr + rows[:, None] * N + n[None, :], mask=mask, other=1)
        if DIVIDE:
            value = tl.div_rn(value, tl.zeros_like(value) + second)  # rounded as IEEE has it, unlike "/"
        else:
            value *= second
    return value
