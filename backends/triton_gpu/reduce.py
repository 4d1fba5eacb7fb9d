"""C[m, n] = activation(sum_s partial[s, m, n] + bias[n]), summed in the order of s.

partial float32 ``[splits, M, N]`` contiguous; bias ``[N]`` or None; out ``[M, N]`` any strides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qmm.backends.triton_gpu.epilogue import finish, rounded


@triton.jit(do_not_specialize=["M", "splits"])
def reduce_kernel(
    partial_ptr, bias_ptr, c_ptr, M, N, splits, c_stride_m, c_stride_n,
    ACTIVATION: tl.constexpr, EMULATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of C a program, on grid axis x."""
    pid = tl.program_id(0)
    n_tiles = tl.cdiv(N, BLOCK_N)
    m = (pid // n_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (pid % n_tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (m < M)[:, None] & (n < N)[None, :]
    tile = partial_ptr + m[:, None] * N + n[None, :]
    step = tl.full((), 1, tl.int64) * M * N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for s in range(0, splits):
        acc += tl.load(tile + s * step, mask=mask, other=0)
    acc = finish(acc, bias_ptr, n, n < N, ACTIVATION)
    c = rounded(acc, c_ptr.dtype.element_ty, EMULATED)
    tl.store(c_ptr + m[:, None] * c_stride_m + n[None, :] * c_stride_n, c, mask=mask)
