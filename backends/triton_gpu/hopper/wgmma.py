"""C = activation(A @ W + bias) for many rows: warpgroup products (wgmma) whose register operand is the weight.

The kernel computes ``C^T = W^T A^T``: the dequantised weight, 64 columns a warpgroup, never touches shared memory as
numbers. One warp fetches (TMA) packed weights and A into a ring of stages; two or three warpgroups (WIDE), each with
its own 64 columns, dequantise and multiply (wgmma_walk.py).
Programs are persistent; items are (tile of C, split of K). With SPLIT > 1 the partial sums are added in the order of
the splits, so that the bits never change: inside a cluster of programs, one tile each (splits_cluster.py), or through
memory by the last to arrive (splits_memory.py).

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
)

from qmm.backends.triton_gpu.hopper import splits_cluster, splits_memory
from qmm.backends.triton_gpu.hopper.compat import async_load, async_store, barrier
from qmm.backends.triton_gpu.hopper.epilogue import activated
from qmm.backends.triton_gpu.hopper.turns import let_go, wait_at
from qmm.backends.triton_gpu.hopper.wgmma_walk import first_factors, walk_halves, walk_whole


@gluon.jit
def locate(item, tiles_m, tiles_n, steps, BAND: gl.constexpr, SPLIT: gl.constexpr, WHOLE: gl.constexpr):
    """Item -> (tile, split, row tile, column tile, first step, end step); BAND row tiles share their weights in L2.

    WHOLE: an even number of steps; what is past the end of K is zeros of A.
    """
    GRAIN: gl.constexpr = 2 if WHOLE else 1
    grains = gl.cdiv(steps, GRAIN)
    split = item % SPLIT
    tile = item // SPLIT
    per_band = BAND * tiles_n
    first = (tile // per_band) * BAND
    height = min(tiles_m - first, BAND)
    rest = tile % per_band
    begin = grains * split // SPLIT * GRAIN
    end = grains * (split + 1) // SPLIT * GRAIN
    return tile, split, first + rest % height, rest // height, begin, end


@gluon.jit
def fetch(
    a_desc, w_desc, a_s, w_s, full, empty, tiles_m, tiles_n, tiles_k, steps,
    BITS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    BAND: gl.constexpr, SPLIT: gl.constexpr, WHOLE: gl.constexpr, CLUSTER: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """What one warp does by TMA: a stage is HALVES times 64 rows of K. Tiles past the end come as zeros of A."""
    BYTES: gl.constexpr = HALVES * (BM * 128 + WIDE * BITS * 512)
    if CLUSTER:
        splits_cluster.arrive()
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), tiles_m * tiles_n * SPLIT, gl.num_programs(0)):
        _, _, at_m, at_n, begin, end = locate(item, tiles_m, tiles_n, steps, BAND, SPLIT, WHOLE)
        for i in range(begin * (2 // HALVES), end * (2 // HALVES)):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            for column in gl.static_range(WIDE):
                row = ((at_n * WIDE + column) * tiles_k + i * HALVES * (BITS // 4)) * 4
                async_load(w_desc, [row, 0], full.index(stage), w_s.index(stage * WIDE + column))
            for half in gl.static_range(HALVES):
                async_load(
                    a_desc, [at_m * BM, (i * HALVES + half) * 64], full.index(stage), a_s.index(stage * HALVES + half)
                )
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1
    if CLUSTER:
        splits_cluster.pass_by()


@gluon.jit
def compute(
    memory, c_desc, c_ptr, s_ptr, z_ptr, bias_ptr, ws_ptr, count_ptr,
    tiles_m, tiles_n, steps, group_count, M, N, c_stride_m, c_stride_n, zero,
    BITS: gl.constexpr, ZERO: gl.constexpr, NARROW: gl.constexpr, TILES_PER_GROUP: gl.constexpr,
    PARTS: gl.constexpr, ACTIVATION: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    BAND: gl.constexpr, SPLIT: gl.constexpr, CLUSTER: gl.constexpr, WHOLE: gl.constexpr,
    TURNS: gl.constexpr, WIDE: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """Warpgroup WG: 64 columns of every item."""
    a_s, w_s, c_s, full, empty = memory
    dtype: gl.constexpr = a_s.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    rows: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, mma, 2))
    ROWS: gl.constexpr = BM // SPLIT if CLUSTER else BM
    padded_n = gl.cdiv(N, 64) * 64
    n = gl.arange(0, 64, rows)
    place = WG * 64 + n % 8 * 8 + n // 16 * 2 + n // 8 % 2  # of column n among a tile's scales
    if CLUSTER:
        splits_cluster.arrive()
    if TURNS and WG == 1:
        let_go(10)
    stage = 0
    phase = 0
    total = tiles_m * tiles_n * SPLIT
    tile, split, at_m, at_n, begin, end = locate(gl.program_id(0), tiles_m, tiles_n, steps, BAND, SPLIT, WHOLE)
    factors = first_factors(
        s_ptr, z_ptr, begin, group_count, padded_n, at_n * (WIDE * 64) + place, ZERO, TILES_PER_GROUP, PARTS, WHOLE
    )
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        position = at_n * (WIDE * 64) + place
        acc = gl.zeros([64, BM], gl.float32, mma)
        if WHOLE:
            acc, stage, phase = walk_whole(
                acc, a_s, w_s, full, empty, stage, phase, begin, end, factors, s_ptr, z_ptr, group_count, padded_n,
                position, zero, BITS, ZERO, NARROW, TILES_PER_GROUP, PARTS, STAGES, WIDE, WG,
            )  # fmt: skip
        else:
            acc, stage, phase = walk_halves(
                acc, a_s, w_s, full, empty, stage, phase, begin, end, factors, s_ptr, z_ptr, group_count, padded_n,
                position, zero, BITS, ZERO, NARROW, TILES_PER_GROUP, PARTS, STAGES, HALVES, TURNS, WIDE, WG,
            )  # fmt: skip
        mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1)
        done_m = at_m * BM
        done_n = at_n * (WIDE * 64) + WG * 64
        last = True
        if CLUSTER:  # one item for each program
            acc = splits_cluster.join(acc, BM, SPLIT)
            done_m += split * ROWS
        else:
            slot = tile * WIDE + WG
            own = split
            following_item = min(item + gl.num_programs(0), total - 1)
            tile, split, at_m, at_n, begin, end = locate(following_item, tiles_m, tiles_n, steps, BAND, SPLIT, WHOLE)
            factors = first_factors(
                s_ptr, z_ptr, begin, group_count, padded_n, at_n * (WIDE * 64) + place, ZERO, TILES_PER_GROUP, PARTS,
                WHOLE,
            )  # fmt: skip
            if SPLIT > 1:
                acc, last = splits_memory.join(acc, ws_ptr, count_ptr, slot, own, BM, SPLIT, mma)
        if last:
            out_layout: gl.constexpr = acc.type.layout
            column = done_n + gl.arange(0, 64, gl.SliceLayout(1, out_layout))
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
                async_store(c_desc, [done_m, done_n], c_s.index(WG))
            else:
                row = done_m + gl.arange(0, ROWS, gl.SliceLayout(0, out_layout))
                c_at = column[:, None].to(gl.int64) * c_stride_n + row[None, :].to(gl.int64) * c_stride_m
                gl.store(c_ptr + c_at, result, mask=(column[:, None] < N) & (row[None, :] < M))
    if c_desc is not None:
        tma.store_wait(0)
    if TURNS and WG == 0:
        wait_at(zero[0], 10)


@gluon.jit(do_not_specialize=["M", "group_count", "c_stride_m", "c_stride_n"])
def wgmma_kernel(
    a_desc, w_desc, c_desc, c_ptr, s_ptr, z_ptr, bias_ptr, ws_ptr, count_ptr,
    M, N, K, group_count, c_stride_m, c_stride_n,
    BITS: gl.constexpr, ZERO: gl.constexpr, NARROW: gl.constexpr, TILES_PER_GROUP: gl.constexpr,
    PARTS: gl.constexpr, ACTIVATION: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    BAND: gl.constexpr, SPLIT: gl.constexpr, CLUSTER: gl.constexpr, WHOLE: gl.constexpr,
    TURNS: gl.constexpr, WIDE: gl.constexpr, REGISTERS: gl.constexpr, FETCHING: gl.constexpr,
):  # fmt: skip
    """Tiles of ``64 WIDE`` columns by BM rows. A group is TILES_PER_GROUP times 64 rows of K (0: all), or 64 rows are
    PARTS groups.

    TURNS: two warpgroups take turns at issuing products, so that one dequantises while the other multiplies.
    WHOLE: they walk K by whole steps. CLUSTER: launched in clusters of SPLIT programs.
    """
    dtype: gl.constexpr = a_desc.dtype
    a_s = gl.allocate_shared_memory(dtype, [STAGES * HALVES, BM, 64], a_desc.layout)
    w_s = gl.allocate_shared_memory(gl.int16, [STAGES * WIDE, HALVES * BITS, 256], w_desc.layout)
    c_s = w_s
    if c_desc is not None:
        c_s = gl.allocate_shared_memory(dtype, [WIDE, BM // SPLIT if CLUSTER else BM, 64], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WIDE)
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, WIDE * 64)
    steps = gl.cdiv(K, 128)
    tiles_k = gl.cdiv(K, 256 // BITS)
    # 0 each, which the compiler cannot know; two, since what one test has shown it would not test again
    zero = (gl.program_id(2), gl.program_id(1))
    fence_async_shared()
    memory = (a_s, w_s, c_s, full, empty)
    if WIDE == 2:
        gl.warp_specialize(
            [
                (compute, (
                    memory, c_desc, c_ptr, s_ptr, z_ptr, bias_ptr, ws_ptr, count_ptr, tiles_m, tiles_n, steps,
                    group_count, M, N, c_stride_m, c_stride_n, zero, BITS, ZERO, NARROW, TILES_PER_GROUP, PARTS,
                    ACTIVATION, BM, STAGES, HALVES, BAND, SPLIT, CLUSTER, WHOLE, TURNS, WIDE, 0,
                )),
                (compute, (
                    memory, c_desc, c_ptr, s_ptr, z_ptr, bias_ptr, ws_ptr, count_ptr, tiles_m, tiles_n, steps,
                    group_count, M, N, c_stride_m, c_stride_n, zero, BITS, ZERO, NARROW, TILES_PER_GROUP, PARTS,
                    ACTIVATION, BM, STAGES, HALVES, BAND, SPLIT, CLUSTER, WHOLE, TURNS, WIDE, 1,
                )),
                (fetch, (
                    a_desc, w_desc, a_s, w_s, full, empty, tiles_m, tiles_n, tiles_k, steps,
                    BITS, BM, STAGES, HALVES, BAND, SPLIT, WHOLE, CLUSTER, WIDE,
                )),
            ],
            [4, 4 if CLUSTER else 1], [REGISTERS, FETCHING],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (compute, (
                    memory, c_desc, c_ptr, s_ptr, z_ptr, bias_ptr, ws_ptr, count_ptr, tiles_m, tiles_n, steps,
                    group_count, M, N, c_stride_m, c_stride_n, zero, BITS, ZERO, NARROW, TILES_PER_GROUP, PARTS,
                    ACTIVATION, BM, STAGES, HALVES, BAND, SPLIT, CLUSTER, WHOLE, TURNS, WIDE, 0,
                )),
                (compute, (
                    memory, c_desc, c_ptr, s_ptr, z_ptr, bias_ptr, ws_ptr, count_ptr, tiles_m, tiles_n, steps,
                    group_count, M, N, c_stride_m, c_stride_n, zero, BITS, ZERO, NARROW, TILES_PER_GROUP, PARTS,
                    ACTIVATION, BM, STAGES, HALVES, BAND, SPLIT, CLUSTER, WHOLE, TURNS, WIDE, 1,
                )),
                (compute, (
                    memory, c_desc, c_ptr, s_ptr, z_ptr, bias_ptr, ws_ptr, count_ptr, tiles_m, tiles_n, steps,
                    group_count, M, N, c_stride_m, c_stride_n, zero, BITS, ZERO, NARROW, TILES_PER_GROUP, PARTS,
                    ACTIVATION, BM, STAGES, HALVES, BAND, SPLIT, CLUSTER, WHOLE, TURNS, WIDE, 2,
                )),
                (fetch, (
                    a_desc, w_desc, a_s, w_s, full, empty, tiles_m, tiles_n, tiles_k, steps,
                    BITS, BM, STAGES, HALVES, BAND, SPLIT, WHOLE, CLUSTER, WIDE,
                )),
            ],
            [4, 4, 4 if CLUSTER else 1], [REGISTERS, REGISTERS, FETCHING],
        )  # fmt: skip
