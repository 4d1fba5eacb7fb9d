"""C = activation(A @ W + bias) for many rows: warpgroup products (wgmma) whose register operand is the weight.

The kernel computes ``C^T = W^T A^T``: the dequantised weight, 64 columns a warpgroup, never touches shared memory as
numbers. One warp fetches (TMA) packed weights and A into a ring of stages; two warpgroups, each with its own 64
columns, dequantise and multiply, the next tile being dequantised while the tensor cores work on the last.
Programs are persistent; items are (tile of C, split of K). With SPLIT > 1 the partial sums, float32 in register order,
go to a workspace; the last program to arrive adds them in the order of the splits, so that the bits never change.

Operands: words int16 ``[N/64 * K/block * 4, 256]`` by TMA and scales, zeros ``[G, ceil64(N)]`` (hopper/layout.py);
a ``[M, K]`` by TMA, 64 columns at a time; c ``[M, N]`` by TMA, or by pointers where its rows are not 16-byte aligned;
bias ``[N]`` or None. K is walked in steps of 128: what lies past its end is zeros of A.

W is rounded once to A's dtype: ``round(s (q - z))``, ``round(s q + b)``. NARROW: s (and b) have A's dtype, so one
16-bit multiplication (or fused one) of exact numbers is that rounding; otherwise it goes through float32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qmm.backends.triton_gpu.hopper.compat import async_load, async_store, barrier
from qmm.backends.triton_gpu.hopper.epilogue import activated
from qmm.backends.triton_gpu.hopper.splits import join_splits
from qmm.backends.triton_gpu.hopper.turns import let_go, wait_at
from qmm.backends.triton_gpu.hopper.wgmma_operand import both_values, weights


@gluon.jit
def locate(item, tiles_m, tiles_n, steps, BAND: gl.constexpr, SPLIT: gl.constexpr):
    """Item -> (tile, split, row tile, column tile, first step, end step); BAND row tiles share their weights in L2."""
    split = item % SPLIT
    tile = item // SPLIT
    per_band = BAND * tiles_n
    first = (tile // per_band) * BAND
    height = min(tiles_m - first, BAND)
    rest = tile % per_band
    return tile, split, first + rest % height, rest // height, steps * split // SPLIT, steps * (split + 1) // SPLIT


@gluon.jit
def fetch(
    a_desc, w_desc, a_s, w_s, full, empty, tiles_m, tiles_n, tiles_k, steps,
    BITS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    BAND: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The TMA warp: a stage is HALVES times 64 rows of K. Tiles past the end come as zeros of A."""
    BYTES: gl.constexpr = HALVES * (BM * 128 + 2 * BITS * 512)
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), tiles_m * tiles_n * SPLIT, gl.num_programs(0)):
        _, _, at_m, at_n, begin, end = locate(item, tiles_m, tiles_n, steps, BAND, SPLIT)
        for i in range(begin * (2 // HALVES), end * (2 // HALVES)):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            for column in gl.static_range(2):
                row = ((at_n * 2 + column) * tiles_k + i * HALVES * (BITS // 4)) * 4
                async_load(w_desc, [row, 0], full.index(stage), w_s.index(stage * 2 + column))
            for half in gl.static_range(HALVES):
                async_load(
                    a_desc, [at_m * BM, (i * HALVES + half) * 64], full.index(stage), a_s.index(stage * HALVES + half)
                )
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1


@gluon.jit
def compute(
    a_s, w_s, c_s, full, empty, c_desc, c_ptr, s_ptr, z_ptr, bias_ptr, ws_ptr, count_ptr,
    tiles_m, tiles_n, steps, group_count, M, N, c_stride_m, c_stride_n, zero,
    BITS: gl.constexpr, ZERO: gl.constexpr, NARROW: gl.constexpr, TILES_PER_GROUP: gl.constexpr,
    PARTS: gl.constexpr, ACTIVATION: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    BAND: gl.constexpr, SPLIT: gl.constexpr, TURNS: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """One of two warpgroups: 64 columns of every item."""
    dtype: gl.constexpr = a_s.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    rows: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, mma, 2))
    units: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    padded_n = gl.cdiv(N, 64) * 64
    n = gl.arange(0, 64, rows)
    place = WG * 64 + n % 8 * 8 + n // 16 * 2 + n // 8 % 2  # of column n among a tile's scales
    if TURNS and WG == 1:
        let_go(10)
    stage = 0
    phase = 0
    total = tiles_m * tiles_n * SPLIT
    tile, split, at_m, at_n, begin, end = locate(gl.program_id(0), tiles_m, tiles_n, steps, BAND, SPLIT)
    s = both_values(s_ptr, begin * 2, group_count, padded_n, at_n * 128 + place, TILES_PER_GROUP, PARTS)
    z = s
    if ZERO != "none":
        z = both_values(z_ptr, begin * 2, group_count, padded_n, at_n * 128 + place, TILES_PER_GROUP, PARTS)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        position = at_n * 128 + place
        acc = gl.zeros([64, BM], gl.float32, mma)
        mbarrier.wait(full.index(stage), phase)
        w0 = weights(
            w_s.index(stage * 2 + WG).slice(0, BITS, dim=0).load(units), s, z, dtype, mma, BITS, ZERO, NARROW, PARTS
        )
        if TURNS:
            wait_at(zero, 10 + WG)
        for step in range(begin, end):
            # the factors of this step's second half and of the next step's first, loaded well before their use
            s1 = s
            z1 = z
            if TILES_PER_GROUP % 2 == 1:  # a step that straddles groups
                s1 = both_values(s_ptr, step * 2 + 1, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
                if ZERO != "none":
                    z1 = both_values(z_ptr, step * 2 + 1, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
            following = min(step + 1, end - 1) * 2
            s2 = both_values(s_ptr, following, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
            z2 = s2
            if ZERO != "none":
                z2 = both_values(z_ptr, following, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
            if HALVES == 2:
                stage1 = stage
                phase1 = phase
            else:
                stage1 = stage + 1
                phase1 = phase
                if stage1 == STAGES:
                    stage1 = 0
                    phase1 = phase ^ 1
            acc = warpgroup_mma(w0, a_s.index(stage * HALVES).permute((1, 0)), acc, is_async=True)
            if TURNS:
                let_go(11 - WG)
            mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1, pred=step > begin)
            if HALVES == 1:
                mbarrier.wait(full.index(stage1), phase1)
            w1 = weights(
                w_s.index(stage1 * 2 + WG).slice((HALVES - 1) * BITS, BITS, dim=0).load(units),
                s1, z1, dtype, mma, BITS, ZERO, NARROW, PARTS,
            )  # fmt: skip
            if TURNS:
                wait_at(zero, 10 + WG)
            else:
                wait_at(zero, 12 + WG)
            acc, w0 = warpgroup_mma_wait(0, deps=[acc, w0])
            acc = warpgroup_mma(w1, a_s.index(stage1 * HALVES + HALVES - 1).permute((1, 0)), acc, is_async=True)
            if TURNS:
                let_go(11 - WG)
            if HALVES == 1:
                mbarrier.arrive(empty.index(stage), count=1)
            stage = stage1 + 1
            phase = phase1
            if stage == STAGES:
                stage = 0
                phase = phase1 ^ 1
            s = s2
            z = z2
            if step + 1 < end:
                mbarrier.wait(full.index(stage), phase)
            w0 = weights(
                w_s.index(stage * 2 + WG).slice(0, BITS, dim=0).load(units), s, z, dtype, mma, BITS, ZERO, NARROW, PARTS
            )
            if step + 1 < end:
                if TURNS:
                    wait_at(zero, 10 + WG)
                else:
                    wait_at(zero, 12 + WG)
            acc, w1 = warpgroup_mma_wait(0, deps=[acc, w1])
        mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1)
        done_m = at_m
        done_n = at_n
        slot = tile * 2 + WG
        done_split = split
        following_item = min(item + gl.num_programs(0), total - 1)
        tile, split, at_m, at_n, begin, end = locate(following_item, tiles_m, tiles_n, steps, BAND, SPLIT)
        s = both_values(s_ptr, begin * 2, group_count, padded_n, at_n * 128 + place, TILES_PER_GROUP, PARTS)
        z = s
        if ZERO != "none":
            z = both_values(z_ptr, begin * 2, group_count, padded_n, at_n * 128 + place, TILES_PER_GROUP, PARTS)
        last = True
        if SPLIT > 1:
            acc, last = join_splits(acc, ws_ptr, count_ptr, slot, done_split, BM, SPLIT, mma)
        if last:
            column = done_n * 128 + WG * 64 + gl.arange(0, 64, gl.SliceLayout(1, mma))
            if bias_ptr is not None:
                bias = gl.load(bias_ptr + column, mask=column < N, other=0.0).to(gl.float32)
                acc = acc + gl.expand_dims(bias, 1)
            result = activated(acc, ACTIVATION).to(dtype)
            if c_desc is not None:
                tma.store_wait(0)
                barrier()
                c_s.index(WG).permute((1, 0)).store(result)
                fence_async_shared()
                barrier()
                async_store(c_desc, [done_m * BM, done_n * 128 + WG * 64], c_s.index(WG))
            else:
                row = done_m * BM + gl.arange(0, BM, gl.SliceLayout(0, mma))
                c_at = column[:, None].to(gl.int64) * c_stride_n + row[None, :].to(gl.int64) * c_stride_m
                gl.store(c_ptr + c_at, result, mask=(column[:, None] < N) & (row[None, :] < M))
    if c_desc is not None:
        tma.store_wait(0)
    if TURNS and WG == 0:
        wait_at(zero, 10)


@gluon.jit(do_not_specialize=["M", "group_count", "c_stride_m", "c_stride_n"])
def wgmma_kernel(
    a_desc, w_desc, c_desc, c_ptr, s_ptr, z_ptr, bias_ptr, ws_ptr, count_ptr,
    M, N, K, group_count, c_stride_m, c_stride_n,
    BITS: gl.constexpr, ZERO: gl.constexpr, NARROW: gl.constexpr, TILES_PER_GROUP: gl.constexpr,
    PARTS: gl.constexpr, ACTIVATION: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    BAND: gl.constexpr, SPLIT: gl.constexpr, TURNS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 columns by BM rows. A group is TILES_PER_GROUP times 64 rows of K (0: all), or 64 are PARTS groups.

    TURNS: the warpgroups take turns at issuing products, so that one dequantises while the other multiplies.
    """
    dtype: gl.constexpr = a_desc.dtype
    a_s = gl.allocate_shared_memory(dtype, [STAGES * HALVES, BM, 64], a_desc.layout)
    w_s = gl.allocate_shared_memory(gl.int16, [STAGES * 2, HALVES * BITS, 256], w_desc.layout)
    c_s = w_s
    if c_desc is not None:
        c_s = gl.allocate_shared_memory(dtype, [2, BM, 64], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, 128)
    steps = gl.cdiv(K, 128)
    tiles_k = gl.cdiv(K, 256 // BITS)
    zero = gl.program_id(2)  # 0, which the compiler cannot know
    gl.warp_specialize(
        [
            (compute, (
                a_s, w_s, c_s, full, empty, c_desc, c_ptr, s_ptr, z_ptr, bias_ptr, ws_ptr, count_ptr,
                tiles_m, tiles_n, steps, group_count, M, N, c_stride_m, c_stride_n, zero,
                BITS, ZERO, NARROW, TILES_PER_GROUP, PARTS, ACTIVATION, BM, STAGES, HALVES, BAND, SPLIT, TURNS, 0,
            )),
            (compute, (
                a_s, w_s, c_s, full, empty, c_desc, c_ptr, s_ptr, z_ptr, bias_ptr, ws_ptr, count_ptr,
                tiles_m, tiles_n, steps, group_count, M, N, c_stride_m, c_stride_n, zero,
                BITS, ZERO, NARROW, TILES_PER_GROUP, PARTS, ACTIVATION, BM, STAGES, HALVES, BAND, SPLIT, TURNS, 1,
            )),
            (fetch, (
                a_desc, w_desc, a_s, w_s, full, empty, tiles_m, tiles_n, tiles_k, steps,
                BITS, BM, STAGES, HALVES, BAND, SPLIT,
            )),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip
