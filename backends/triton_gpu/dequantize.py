"""W[k, n] = (q - z) * s, s * q + b, or codebook[q] * s: one tile of the weight in float32.

Codes become floats without a conversion instruction: the bits of a code under those of 2**23 are the float
``2**23 + q``, and differences of such floats are exact. The offset leaves here, before any product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qmm.backends.triton_gpu.decode import load_factor
from qmm.backends.triton_gpu.unpack import codes_at, load_codes


@triton.jit
def lifted(codes):
    """``2**23 + codes`` as float32, exactly."""
    return (codes | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def spread(value, GROUPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """A factor of each group of a tile to its rows; one group, or one factor a row, broadcasts as it is."""
    if GROUPS > 1:
        wide = tl.broadcast_to(value[:, None, :], [GROUPS, BLOCK_K // GROUPS, BLOCK_N])
        value = tl.reshape(wide, [BLOCK_K, BLOCK_N])
    return value


@triton.jit
def group_rows(g_idx_ptr, k0, k_left, G, group_size, GROUPS: tl.constexpr, BLOCK_K: tl.constexpr):
    """The groups of a tile, int32 ``[max(GROUPS, 1)]``, or ``[BLOCK_K]`` a row where GROUPS is 0.

    Rows past K and groups past G repeat the last one (``k_left`` may be negative): nothing is read out of bounds.
    """
    if GROUPS > 0:
        return tl.minimum(k0 // group_size + tl.arange(0, GROUPS), G - 1)
    else:
        k = k0 + tl.minimum(tl.arange(0, BLOCK_K), k_left - 1)
        if g_idx_ptr is not None:
            return tl.load(g_idx_ptr + k)
        else:
            return k // group_size


@triton.jit
def load_weight(
    w_ptr, s_ptr, s2_ptr, z_ptr, z2_ptr, codebook_ptr, g_idx_ptr,
    k0, k_left, n, n_mask, N, G, group_size, s2_ratio, z2_ratio,
    BITS: tl.constexpr, ZERO: tl.constexpr, S_DTYPE: tl.constexpr, Z_DTYPE: tl.constexpr,
    ONE_S2: tl.constexpr, DIVIDE_S2: tl.constexpr, ONE_Z2: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows ``[k0, k0 + BLOCK_K)`` of W in float32 ``[BLOCK_K, BLOCK_N]``; rows from ``k_left`` on are arbitrary.

    GROUPS is the number of whole groups in a tile, 1 also where a tile lies inside one group, 0 where a tile's rows
    have to be looked up one by one.
    """
    q = load_codes(w_ptr, k0, k_left, n, n_mask, N, BITS, BLOCK_K, BLOCK_N)
    g = group_rows(g_idx_ptr, k0, k_left, G, group_size, GROUPS, BLOCK_K)
    s = load_factor(s_ptr, s2_ptr, s2_ratio, g, n, n_mask, N, S_DTYPE, ONE_S2, DIVIDE_S2)
    s = spread(s, GROUPS, BLOCK_K, BLOCK_N)
    if codebook_ptr is not None:
        return tl.load(codebook_ptr + q).to(tl.float32) * s
    elif ZERO == "none":
        return (lifted(q) - (8388608.0 + (1 << (BITS - 1)))) * s
    elif ZERO == "int":
        z = lifted(codes_at(z_ptr, 0, g, n_mask[None, :], n, N, BITS))
        return (lifted(q) - spread(z, GROUPS, BLOCK_K, BLOCK_N)) * s
    else:
        z = load_factor(z_ptr, z2_ptr, z2_ratio, g, n, n_mask, N, Z_DTYPE, ONE_Z2, False)
        z = spread(z, GROUPS, BLOCK_K, BLOCK_N)
        q_float = lifted(q) - 8388608.0
        if ZERO == "float":
            return (q_float - z) * s
        else:
            return q_float * s + z
