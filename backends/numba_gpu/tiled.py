"""C = finish(A @ dequantize(W)): the textbook tiled matmul, with the tile of W unpacked into shared memory.

    for each tile of C, by one block of threads, all sums float32 in registers:
        for each tile of K:
            shared a_tile = A[m0:, k0:] as float32        shared w_tile = dequantize(W[k0:, n0:]) as float32
            sums += a_tile @ w_tile
        C = finish(sums)

Operands, all flat memory that is indexed with 64-bit offsets:

    a        [M, K] with strides    float16, float32, or bfloat16 bits as uint16
    qweight  [ceil(K*bits/32), N]   uint32; code k of a column is bits [k*bits, (k+1)*bits) of its words
    scales   [G, N]                 stored as they came; scale2 float32, one factor or [ceil(G/ratio), N],
                                    multiplies or divides
             [ceil(G*4/32), N]      uint32, 4-bit integers packed down G like codes
    zeros    [ceil(G*bits/32), N]   uint32, packed down G like codes; or like scales (zero2 like scale2)
    codebook [2**bits]              w = codebook[q] * s
    g_idx    [K]                    int32, the group of each row
    bias     [N]
    c        [M, N] with strides, or float32 partial sums [splits, M, N]

A block of threads is flat: thread t works on columns ``t % threads_n + j * threads_n`` (neighbouring threads on
neighbouring columns) and on a run of rows. Grid x counts the tiles of C, M fastest; grid y the splits of K.
"""

# numba makes its names at run time:
# mypy: disable-error-code="attr-defined"
from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from qmm.backends.numba_gpu.decode import code_reader, decoder
from qmm.backends.numba_gpu.device import device_function
from qmm.backends.numba_gpu.epilogue import make_finish
from qmm.backends.numba_gpu.facts import TiledFacts
from qmm.weight.spec import FACTOR_BITS, UINT4, WORD_BITS, ZeroKind

_ZERO = np.float32(0)


def make_first(dtype: Any) -> Any:
    """``first_level(first, g, n, n_size)``: float32 of ``first[g, n]``, or of integer g of column n of its words."""
    if dtype == UINT4:
        code_at = code_reader(FACTOR_BITS)

        @device_function
        def packed(first, g, n, n_size):  # type: ignore[no-untyped-def]
            return np.float32(code_at(first, n_size, n, g))

        return packed
    decode = decoder(dtype)

    @device_function
    def first_level(first, g, n, n_size):  # type: ignore[no-untyped-def]
        return decode(first[g * n_size + n])

    return first_level


def make_factor(dtype: Any, ratio_kind: str | None, divides: bool = False) -> Any:
    """``factor(first, second, ratio, g, n, n_size)``: float32 of ``first[g, n]`` times (or by) the second level."""
    first_level = make_first(dtype)
    has_second = ratio_kind is not None
    by_rows = ratio_kind == "rows"

    @device_function
    def factor(first, second, ratio, g, n, n_size):  # type: ignore[no-untyped-def]
        value = first_level(first, g, n, n_size)
        if has_second:
            at = g // ratio * n_size + n if by_rows else 0
            value = value / second[at] if divides else value * second[at]
        return value

    return factor


def make_zero(facts: TiledFacts) -> Any:
    """``zero(zeros, zero2, ratio, g, n, n_size)``: the float32 zero point (or bias) of group g, column n."""
    midpoint = np.float32(1 << (facts.bits - 1))
    if facts.zero_kind is ZeroKind.NONE:

        @device_function
        def zero(zeros, zero2, ratio, g, n, n_size):  # type: ignore[no-untyped-def]
            return midpoint

        return zero
    if facts.zero_kind is ZeroKind.INT:
        code_at = code_reader(facts.bits)

        @device_function
        def packed_zero(zeros, zero2, ratio, g, n, n_size):  # type: ignore[no-untyped-def]
            return np.float32(code_at(zeros, n_size, n, g))

        return packed_zero
    return make_factor(facts.zero_dtype, facts.zero2)


def make_weight(facts: TiledFacts) -> Any:
    """``weight(q, scale, zero, codebook)``: the float32 weight of code q."""
    if facts.codebook_dtype is not None:
        decode = decoder(facts.codebook_dtype)

        @device_function
        def looked_up(q, scale, zero, codebook):  # type: ignore[no-untyped-def]
            return decode(codebook[q]) * scale

        return looked_up
    if facts.zero_kind is ZeroKind.BIAS:

        @device_function
        def affine(q, scale, zero, codebook):  # type: ignore[no-untyped-def]
            return scale * np.float32(q) + zero

        return affine

    @device_function
    def shifted(q, scale, zero, codebook):  # type: ignore[no-untyped-def]
        return (np.float32(q) - zero) * scale

    return shifted


def make_tiled(facts: TiledFacts) -> Any:
    """The kernel for ``facts`` as a Python function: every fact is a constant of its closure."""
    block_m, block_n, block_k = facts.block_m, facts.block_n, facts.block_k
    threads_n, threads = facts.threads_n, facts.threads_m * facts.threads_n
    rows, columns = block_m // facts.threads_m, block_n // threads_n
    padded_m = block_m + 1  # the tile lies along M and is filled along K: an odd pitch avoids bank conflicts

    bits, act_order = facts.bits, facts.act_order
    mask = np.uint32((1 << bits) - 1)
    whole_words = WORD_BITS % bits == 0
    codes = WORD_BITS // bits if whole_words else 1  # codes that one thread expands from one load
    items = block_k // codes * block_n

    a_value = decoder(facts.a_dtype)
    code_at = code_reader(bits)
    scale_of = make_factor(facts.scale_dtype, facts.scale2, facts.divides)
    zero_of = make_zero(facts)
    weight = make_weight(facts)
    finish = make_finish(facts.out_dtype, facts.bias_dtype, facts.activation)

    def tiled(  # type: ignore[no-untyped-def]
        a, qweight, scales, scale2, zeros, zero2, codebook, g_idx, bias, c,
        m_size, n_size, k_size, group_size, scale2_ratio, zero2_ratio,
        a_stride_m, a_stride_k, c_stride_split, c_stride_m, c_stride_n, split_k,
    ):  # fmt: skip
        a_tile = cuda.shared.array((block_k, padded_m), np.float32)
        w_tile = cuda.shared.array((block_k, block_n), np.float32)
        sums = cuda.local.array((rows, columns), np.float32)
        for i in range(rows):
            for j in range(columns):
                sums[i, j] = _ZERO

        thread = np.int64(cuda.threadIdx.x)
        tiles_m = (m_size + block_m - 1) // block_m
        tile_n = np.int64(cuda.blockIdx.x) // tiles_m
        m0 = (cuda.blockIdx.x - tile_n * tiles_m) * block_m
        n0 = tile_n * block_n
        row0 = thread // threads_n * rows
        column0 = thread % threads_n
        split = np.int64(cuda.blockIdx.y)
        k_end = min(k_size, (split + 1) * split_k)

        for k0 in range(split * split_k, k_end, block_k):
            for item in range(thread, block_m * block_k, threads):
                m, k = item // block_k, item % block_k
                value = _ZERO
                if m0 + m < m_size and k0 + k < k_size:
                    value = a_value(a[(m0 + m) * a_stride_m + (k0 + k) * a_stride_k])
                a_tile[k, m] = value

            for item in range(thread, items, threads):
                column, first = item % block_n, item // block_n * codes
                n = n0 + column
                inside = n < n_size and k0 + first < k_size
                word = np.uint32(0)
                if whole_words and inside:
                    word = np.uint32(qweight[(k0 + first) // codes * n_size + n])
                found = np.int64(0) if act_order else (k0 + first) // group_size
                edge = (found + 1) * group_size
                group = np.int64(-1)
                scale = zero = _ZERO
                for j in range(codes):
                    k = k0 + first + j
                    value = _ZERO  # padding: a scale or an A of NaN must not meet it
                    if inside and k < k_size:
                        if act_order:
                            found = np.int64(g_idx[k])
                        elif k == edge:
                            found += 1
                            edge += group_size
                        if found != group:
                            group = found
                            scale = scale_of(scales, scale2, scale2_ratio, group, n, n_size)
                            zero = zero_of(zeros, zero2, zero2_ratio, group, n, n_size)
                        if whole_words:
                            q = np.uint32((word >> np.uint32(j * bits)) & mask)  # the mask after the shift
                        else:
                            q = code_at(qweight, n_size, n, k)
                        value = weight(q, scale, zero, codebook)
                    w_tile[first + j, column] = value
            cuda.syncthreads()

            for k in range(block_k):
                for j in range(columns):
                    w_value = w_tile[k, column0 + j * threads_n]
                    for i in range(rows):
                        sums[i, j] += a_tile[k, row0 + i] * w_value
            cuda.syncthreads()

        for i in range(rows):
            m = m0 + row0 + i
            for j in range(columns):
                n = n0 + column0 + j * threads_n
                if m < m_size and n < n_size:
                    at = split * c_stride_split + m * c_stride_m + n * c_stride_n
                    c[at] = finish(sums[i, j], bias, n)

    return tiled
