"""out[m, i] = a[m, order[i]]: A's columns in the order in which an act-order weight's rows lie.

a ``[M, K]`` of 16 bits, any strides; order int32 ``[K]``; out ``[M, ceil8(K)]`` contiguous, 0 from column K on, so that
its rows begin at multiples of 16 bytes. Plain Triton: it runs in the interpreter too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_K = 512
FEW_ROWS, BLOCK_M = 8, 8  # a row a program while rows are few, so that more programs share the work


@triton.jit(
    do_not_specialize=["M", "K", "a_stride_m", "a_stride_k", "out_stride_m8"],
    do_not_specialize_on_alignment=["a_ptr"],
)
def gather_kernel(
    a_ptr, order_ptr, out_ptr, M, K, a_stride_m, a_stride_k, out_stride_m8, BM: tl.constexpr, BK: tl.constexpr
):
    """BM rows by BK columns of the result a program, on grid axis x."""
    tiles_k = tl.cdiv(K, BK)
    k = tl.program_id(0) % tiles_k * BK + tl.arange(0, BK)
    m = (tl.program_id(0) // tiles_k).to(tl.int64) * BM + tl.arange(0, BM)
    source = tl.load(order_ptr + k, mask=k < K, other=0).to(tl.int64)
    rows = (m < M)[:, None]
    found = a_ptr + m[:, None] * a_stride_m + source[None, :] * a_stride_k
    x = tl.load(found, mask=rows & (k < K)[None, :], other=0)
    width = out_stride_m8 * 8  # which tells the compiler that 16 bytes may be stored at once
    tl.store(out_ptr + m[:, None] * width + k[None, :], x, mask=rows & (k < width)[None, :])


def gathering(a: Tensor, order: Tensor) -> tuple[Tensor, int, tuple[Any, ...], dict[str, int]]:
    """(Result, programs, arguments, compile-time arguments) of one launch; the result is ``[M, K]`` of wider rows."""
    m, k = a.shape
    padded = torch.empty(m, -(-k // 8) * 8, dtype=a.dtype, device=a.device)
    block_m = 1 if m <= FEW_ROWS else BLOCK_M
    programs = -(-k // BLOCK_K) * -(-m // block_m)
    args = (a, order, padded, m, k, a.stride(0), a.stride(1), padded.stride(0) // 8)
    return padded[:, :k], programs, args, {"BM": block_m, "BK": BLOCK_K}
