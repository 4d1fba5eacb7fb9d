"""q[k, n] = (stream of column n >> k*bits) & (2**bits - 1): codes out of 32-bit words, in registers.

Words are int32 ``[ceil(rows*bits/32), N]`` row-major; row k of a column is bits ``[k*bits, (k+1)*bits)`` of that
column's words, lowest bit first. 32 rows fill exactly ``bits`` words, so that tiles that begin at a multiple of 32
begin at a word.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_codes(
    w_ptr, k0, k_left, n, n_mask, N, BITS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Codes of rows ``[k0, k0 + BLOCK_K)`` as int32 ``[BLOCK_K, BLOCK_N]``; rows from ``k_left`` on read 0 or codes.

    ``k0`` is a multiple of BLOCK_K, which is a multiple of 32. Widths that divide 32 load each word once.
    """
    if 32 % BITS == 0:
        PACK: tl.constexpr = 32 // BITS
        row = tl.arange(0, BLOCK_K // PACK)
        offset = (k0 // PACK + row).to(tl.int64)[:, None] * N + n[None, :]
        mask = (row * PACK < k_left)[:, None] & n_mask[None, :]
        words = tl.load(w_ptr + offset, mask=mask, other=0)
        shift = tl.arange(0, PACK) * BITS
        # the mask comes after the shift, which smears the sign
        codes = (words[:, None, :] >> shift[None, :, None]) & ((1 << BITS) - 1)
        return tl.reshape(codes, [BLOCK_K, BLOCK_N])
    else:
        row = tl.arange(0, BLOCK_K)
        return codes_at(w_ptr, k0 // 32, row, (row < k_left)[:, None] & n_mask[None, :], n, N, BITS)


@triton.jit
def codes_at(w_ptr, block, row, mask, n, N, BITS: tl.constexpr):
    """Codes of any rows ``32 * block + row`` as int32 ``[rows, BLOCK_N]``; one load a code, two where it straddles.

    The bit address stays below 32 bits for every row below 2**31.
    """
    word = (block + row // 32) * BITS + ((row % 32) * BITS) // 32
    shift = ((row % 32) * BITS % 32)[:, None]
    offset = word.to(tl.int64)[:, None] * N + n[None, :]
    low = tl.load(w_ptr + offset, mask=mask, other=0).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
    if 32 % BITS != 0:
        straddles = shift + BITS > 32
        high = tl.load(w_ptr + offset + N, mask=mask & straddles, other=0).to(tl.uint32, bitcast=True)
        # a shift by 32 or more is undefined, so codes that do not straddle shift by 0 and are dropped
        up = tl.where(straddles, 32 - shift, 0).to(tl.uint32)
        low = low | tl.where(straddles, high << up, 0)
    return (low & ((1 << BITS) - 1)).to(tl.int32)
