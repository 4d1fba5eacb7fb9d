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

from qmm.backends.triton_gpu.hopper.compat import barrier
from qmm.backends.triton_gpu.hopper.dequantise import centred
from qmm.backends.triton_gpu.hopper.epilogue import activated

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
        tile, split, at_m, at_n, begin, end = locate(item, tiles_m, tiles_n, steps, BAND, SPLIT)
        for i in range(begin * (2 // HALVES), end * (2 // HALVES)):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            for column in gl.static_range(2):
                row = ((at_n * 2 + column) * tiles_k + i * HALVES * (BITS // 4)) * 4
                tma.async_copy_global_to_shared(w_desc, [row, 0], full.index(stage), w_s.index(stage * 2 + column))
            for half in gl.static_range(HALVES):
                tma.async_copy_global_to_shared(
                    a_desc, [at_m * BM, (i * HALVES + half) * 64], full.index(stage), a_s.index(stage * HALVES + half)
                )
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1


@gluon.jit
def wait_at(zero, ID: gl.constexpr):
    """Wait at a named barrier: 10 and 11 are for one warpgroup and the other's arrival, 12 and 13 for one alone.

    The loop around it never repeats (zero is 0), but keeps ptxas from moving the dequantisation behind the wait.
    """
    z = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])) + zero
    if ID == 10:
        gl.inline_asm_elementwise("{ .reg .pred p; again: bar.sync 10, 256; setp.ne.s32 p, $1, 0; @p bra.uni again; mov.b32 $0, $1; }", "=r,r", [z], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip  # noqa: E501
    elif ID == 11:
        gl.inline_asm_elementwise("{ .reg .pred p; again: bar.sync 11, 256; setp.ne.s32 p, $1, 0; @p bra.uni again; mov.b32 $0, $1; }", "=r,r", [z], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip  # noqa: E501
    elif ID == 12:
        gl.inline_asm_elementwise("{ .reg .pred p; again: bar.sync 12, 128; setp.ne.s32 p, $1, 0; @p bra.uni again; mov.b32 $0, $1; }", "=r,r", [z], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip  # noqa: E501
    else:
        gl.inline_asm_elementwise("{ .reg .pred p; again: bar.sync 13, 128; setp.ne.s32 p, $1, 0; @p bra.uni again; mov.b32 $0, $1; }", "=r,r", [z], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip  # noqa: E501


@gluon.jit
def let_go(ID: gl.constexpr):
    """Arrive at the other warpgroup's barrier without waiting."""
    z = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    if ID == 10:
        gl.inline_asm_elementwise("bar.arrive 10, 256; mov.b32 $0, $1;", "=r,r", [z], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip  # noqa: E501
    else:
        gl.inline_asm_elementwise("bar.arrive 11, 256; mov.b32 $0, $1;", "=r,r", [z], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip  # noqa: E501


@gluon.jit
def group_values(
    ptr, t, group_count, padded_n, position, TILES_PER_GROUP: gl.constexpr, PARTS: gl.constexpr, part: gl.constexpr
):
    """Scales (or zeros) of the 64 rows of K from ``64 t`` on, part ``part``: one value a column."""
    if TILES_PER_GROUP == 0:
        group = t * 0
    else:
        group = gl.minimum(t // TILES_PER_GROUP * PARTS + part, group_count - 1)
    return gl.load(ptr + group.to(gl.int64) * padded_n + position, mask=position < padded_n, other=0.0)


@gluon.jit
def both_values(ptr, t, group_count, padded_n, position, TILES_PER_GROUP: gl.constexpr, PARTS: gl.constexpr):
    """The values of every part."""
    if PARTS == 1:
        return (group_values(ptr, t, group_count, padded_n, position, TILES_PER_GROUP, PARTS, 0),)
    else:
        return (
            group_values(ptr, t, group_count, padded_n, position, TILES_PER_GROUP, PARTS, 0),
            group_values(ptr, t, group_count, padded_n, position, TILES_PER_GROUP, PARTS, 1),
        )


@gluon.jit
def paired(x, y, OP: gl.constexpr):
    """Two 16-bit numbers a lane at once; OP add or mul. Volatile, so that it stays before the wait for a turn."""
    if x.dtype == gl.float16:
        if OP == "add":
            return gl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.float16, is_pure=False, pack=2)  # fmt: skip  # noqa: E501
        else:
            return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.float16, is_pure=False, pack=2)  # fmt: skip  # noqa: E501
    else:
        if OP == "add":
            return gl.inline_asm_elementwise("{ .reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, $1, one, $2; }", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=False, pack=2)  # fmt: skip  # noqa: E501
        else:
            return gl.inline_asm_elementwise("{ .reg .b32 none; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, $2, none; }", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=False, pack=2)  # fmt: skip  # noqa: E501


@gluon.jit
def fused(x, y, z):
    """``x y + z`` with one rounding, two 16-bit numbers a lane at once."""
    if x.dtype == gl.float16:
        return gl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z], dtype=gl.float16, is_pure=False, pack=2)  # fmt: skip  # noqa: E501
    else:
        return gl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z], dtype=gl.bfloat16, is_pure=False, pack=2)  # fmt: skip  # noqa: E501


@gluon.jit
def scaled(c, s, z, BITS: gl.constexpr, ZERO: gl.constexpr, NARROW: gl.constexpr):
    """``c = q - mid`` ``[64, k]`` -> W rounded once; s and z one value a row."""
    MID: gl.constexpr = 1 << (BITS - 1)
    s = gl.expand_dims(s, 1)
    z = gl.expand_dims(z, 1)
    if NARROW:
        c, s = gl.broadcast(c, s)
        if ZERO == "int":  # mid - z and q - z are whole numbers that 16 bits hold
            dz = (MID - z.to(gl.float32)).to(c.dtype)
            c, dz = gl.broadcast(c, dz)
            return paired(paired(c, dz, "add"), s, "mul")
        elif ZERO == "bias":
            c, z = gl.broadcast(c, z)
            mid = gl.full(c.shape, MID, c.dtype, c.type.layout)
            return fused(paired(c, mid, "add"), s, z)
        else:
            return paired(c, s, "mul")
    else:
        x = c.to(gl.float32)
        s = s.to(gl.float32)
        z = z.to(gl.float32)
        if ZERO == "bias":
            x = gl.fma(x + MID, s, z)
        elif ZERO == "none":
            x = x * s
        else:
            x = (x + (MID - z)) * s
        return x.to(c.dtype)


@gluon.jit
def weights(
    units, s, z, dtype: gl.constexpr, mma: gl.constexpr,
    BITS: gl.constexpr, ZERO: gl.constexpr, NARROW: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Units ``[BITS, 256]`` of 64 columns by 64 rows of K -> W ``[64, 64]`` as wgmma's register operand; in registers."""
    dot_w: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    codes = centred(units, BITS, dtype)
    # block of 32 (8 bits), strip, g, quad, k8, r8, k0, then j
    if BITS == 4:
        c = gl.join(gl.join(codes[0], codes[2]), gl.join(codes[1], codes[3]))
        c = gl.permute(gl.reshape(c, (4, 8, 4, 2, 2, 2, 4)), (0, 4, 1, 6, 3, 2, 5))
    else:
        c = gl.permute(gl.reshape(gl.join(codes[0], codes[1]), (2, 4, 8, 4, 2, 2, 2, 2)), (1, 5, 2, 0, 7, 4, 3, 6))
    c = gl.convert_layout(gl.reshape(c, (64, 64)), dot_w, assert_trivial=True)
    if PARTS == 1:
        return scaled(c, s[0], z[0], BITS, ZERO, NARROW)
    else:
        c = gl.permute(gl.reshape(c, (64, 2, 32)), (0, 2, 1))
        first, second = gl.split(c)
        first = scaled(gl.convert_layout(first, dot_w, assert_trivial=True), s[0], z[0], BITS, ZERO, NARROW)
        second = scaled(gl.convert_layout(second, dot_w, assert_trivial=True), s[1], z[1], BITS, ZERO, NARROW)
        c = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), (64, 64))
        return gl.convert_layout(c, dot_w, assert_trivial=True)


@gluon.jit
def to_flat(acc, BM: gl.constexpr):
    """Accumulator ``[64, BM]`` -> flat, each thread four neighbours; no data moves."""
    x = gl.permute(gl.reshape(acc, (1, 4, 2, 8, BM // 8, 4, 2)), (0, 4, 1, 3, 5, 2, 6))
    return gl.convert_layout(
        gl.reshape(x, (64 * BM,)), gl.BlockedLayout([4], [32], [4], [0]), assert_trivial=True
    )


@gluon.jit
def from_flat(x, BM: gl.constexpr, mma: gl.constexpr):
    """The inverse of :func:`to_flat`."""
    x = gl.permute(gl.reshape(x, (1, BM // 8, 4, 8, 4, 2, 2)), (0, 2, 5, 3, 1, 4, 6))
    return gl.convert_layout(gl.reshape(x, (64, BM)), mma, assert_trivial=True)


@gluon.jit
def join_splits(acc, ws_ptr, count_ptr, slot, split, BM: gl.constexpr, SPLIT: gl.constexpr, mma: gl.constexpr):
    """Leave ``acc`` in the workspace; the last to come sums all splits in order. Returns (sum, whether last)."""
    SIZE: gl.constexpr = 64 * BM
    at = gl.arange(0, SIZE, gl.BlockedLayout([4], [32], [4], [0]))
    base = ws_ptr + slot.to(gl.int64) * (SPLIT * SIZE) + at
    gl.store(base + split * SIZE, to_flat(acc, BM), cache_modifier=".cg")
    barrier()
    last = gl.atomic_add(count_ptr + slot, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        total = gl.load(base, cache_modifier=".cg")
        for i in gl.static_range(1, SPLIT):
            total = total + gl.load(base + i * SIZE, cache_modifier=".cg")
        acc = from_flat(total, BM, mma)
        gl.store(count_ptr + slot, 0)  # ready for the next launch
    return acc, last


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
        w0 = weights(w_s.index(stage * 2 + WG).slice(0, BITS, dim=0).load(units), s, z, dtype, mma, BITS, ZERO, NARROW, PARTS)
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
                tma.async_copy_shared_to_global(c_desc, [done_m * BM, done_n * 128 + WG * 64], c_s.index(WG))
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
    BAND: gl.constexpr, SPLIT: gl.constexpr, TURNS: gl.constexpr,
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
        [4, 1], [240, 24],
    )  # fmt: skip
