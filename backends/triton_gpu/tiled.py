"""C = activation(A @ W + bias), W dequantised tile by tile in registers; or float32 partial sums of a split of K.

Operands:
    a ``[M, K]`` fp16, bf16 or fp32, any strides.
    w int32 ``[ceil(K*bits/32), N]``: codes as a little-endian bit stream down K; rows of N words, contiguous.
    s ``[G, N]`` or int32 words of 4-bit integers packed down G, s2 None or float32 ``[1]`` or
    ``[ceil(G/s2_ratio), N]``, which multiplies s or (DIVIDE_S2) divides it;
    z by kind: None, int32 words packed down G, or like s with z2 like s2, which multiplies;
    codebook None or ``[2**bits]``; g_idx None or int32 ``[K]``.
    bias ``[N]`` or None; c ``[M, N]`` any strides, or float32 ``[splits, M, N]`` contiguous where SPLIT.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qmm.backends.triton_gpu.dequantize import load_weight
from qmm.backends.triton_gpu.epilogue import finish, rounded


@triton.jit
def tile_of(pid, m_tiles, n_tiles, BAND: tl.constexpr):
    """Tile (m, n) of a program: down bands of BAND rows of tiles, so that neighbours share A and W in the cache."""
    per_band = BAND * n_tiles
    first = pid // per_band * BAND
    height = tl.minimum(m_tiles - first, BAND)
    return first + pid % per_band % height, pid % per_band // height


@triton.jit(do_not_specialize=["M", "tiles_per_split"])
def tiled_kernel(
    a_ptr, w_ptr, s_ptr, s2_ptr, z_ptr, z2_ptr, codebook_ptr, g_idx_ptr, bias_ptr, c_ptr,
    M, N, K, G, group_size, s2_ratio, z2_ratio, tiles_per_split,
    a_stride_m, a_stride_k, c_stride_m, c_stride_n,
    BITS: tl.constexpr, ZERO: tl.constexpr, S_DTYPE: tl.constexpr, Z_DTYPE: tl.constexpr,
    ONE_S2: tl.constexpr, DIVIDE_S2: tl.constexpr, ONE_Z2: tl.constexpr, ACTIVATION: tl.constexpr,
    GROUPS: tl.constexpr, EVEN_K: tl.constexpr, SPLIT: tl.constexpr,
    ROUND_W: tl.constexpr, FLOAT32_DOT: tl.constexpr, EMULATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """One tile of C, over one split of K, a program; all on grid axis x, splits outermost.

    ROUND_W rounds W to A's dtype; FLOAT32_DOT multiplies in float32 (always where W is not rounded). EVEN_K says that
    the tiles of all splits fill K exactly; otherwise rows and whole tiles past the end add 0.
    """
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    split = pid // (m_tiles * n_tiles)
    tile_m, tile_n = tile_of(pid % (m_tiles * n_tiles), m_tiles, n_tiles, BAND)

    # 64-bit indices before any product with a stride: offsets past 2**31 elements are legal
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_row = tl.arange(0, BLOCK_K)
    m_mask = m < M
    n_mask = n < N
    a_tile = m[:, None] * a_stride_m + k_row.to(tl.int64)[None, :] * a_stride_k

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in range(0, tiles_per_split):
        k0 = (split * tiles_per_split + i) * BLOCK_K
        k_left = K - k0  # rows are compared with what is left (nothing in a tile past the end)
        a_mask = m_mask[:, None] if EVEN_K else m_mask[:, None] & (k_row < k_left)[None, :]
        a = tl.load(a_ptr + k0.to(tl.int64) * a_stride_k + a_tile, mask=a_mask, other=0)
        w = load_weight(
            w_ptr, s_ptr, s2_ptr, z_ptr, z2_ptr, codebook_ptr, g_idx_ptr,
            k0, k_left, n, n_mask, N, G, group_size, s2_ratio, z2_ratio,
            BITS, ZERO, S_DTYPE, Z_DTYPE, ONE_S2, DIVIDE_S2, ONE_Z2, GROUPS, BLOCK_K, BLOCK_N,
        )  # fmt: skip
        if not EVEN_K:
            w = tl.where((k_row < k_left)[:, None], w, 0.0)  # 0 of A times an Inf or NaN scale would be NaN
        if ROUND_W:
            w = rounded(w, a_ptr.dtype.element_ty, EMULATED)
        if FLOAT32_DOT:
            a = a.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(a, w, acc, input_precision="ieee")

    mask = m_mask[:, None] & n_mask[None, :]
    if SPLIT:
        tl.store(c_ptr + (split.to(tl.int64) * M + m)[:, None] * N + n[None, :], acc, mask=mask)
    else:
        acc = finish(acc, bias_ptr, n, n_mask, ACTIVATION)
        c = rounded(acc, c_ptr.dtype.element_ty, EMULATED)
        tl.store(c_ptr + m[:, None] * c_stride_m + n[None, :] * c_stride_n, c, mask=mask)
