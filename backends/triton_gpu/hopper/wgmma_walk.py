"""The two ways in which a warpgroup walks K in the wgmma kernel: by whole steps of 128 rows, or by halves of 64.

Both dequantise the next weights while the tensor cores work on the last ones. Whole steps wait half as often, which
counts while a step's products are short (few rows of A); halves hold half as many weights in registers, and let the
two warpgroups take turns at the tensor cores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from qmm.backends.triton_gpu.hopper.turns import let_go, wait_at
from qmm.backends.triton_gpu.hopper.wgmma_operand import both_values, weights


@gluon.jit
def step_factors(
    ptr, step, group_count, padded_n, position, TILES_PER_GROUP: gl.constexpr, PARTS: gl.constexpr
):
    """The scales (or zeros) of both halves of a step of 128 rows of K."""
    first = both_values(ptr, step * 2, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
    if TILES_PER_GROUP % 2 == 1:  # a step that straddles groups
        return first, both_values(ptr, step * 2 + 1, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
    else:
        return first, first


@gluon.jit
def first_factors(
    s_ptr, z_ptr, begin, group_count, padded_n, position, ZERO: gl.constexpr, TILES_PER_GROUP: gl.constexpr,
    PARTS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """What a walk from step ``begin`` on starts with; loaded before the work on the item before it has ended."""
    if WHOLE:
        s0 = step_factors(s_ptr, begin, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
        s1 = step_factors(s_ptr, begin + 1, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
        if ZERO == "none":
            return s0, s0, s1, s1
        else:
            z0 = step_factors(z_ptr, begin, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
            z1 = step_factors(z_ptr, begin + 1, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
            return s0, z0, s1, z1
    else:
        s = both_values(s_ptr, begin * 2, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
        if ZERO == "none":
            return s, s
        else:
            return s, both_values(z_ptr, begin * 2, group_count, padded_n, position, TILES_PER_GROUP, PARTS)


@gluon.jit
def step_weights(
    w_s, at, s, z, dtype: gl.constexpr, mma: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr,
    NARROW: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """W of both halves of a step."""
    units: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    here = w_s.index(at)
    low = here.slice(0, BITS, dim=0).load(units)
    high = here.slice(BITS, BITS, dim=0).load(units)
    return (
        weights(low, s[0], z[0], dtype, mma, BITS, ZERO, NARROW, PARTS),
        weights(high, s[1], z[1], dtype, mma, BITS, ZERO, NARROW, PARTS),
    )


@gluon.jit
def multiply_step(w, a_s, stage, acc):
    """``acc += W A^T`` for a step, started."""
    acc = warpgroup_mma(w[0], a_s.index(stage * 2).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma(w[1], a_s.index(stage * 2 + 1).permute((1, 0)), acc, is_async=True)


@gluon.jit
def walk_whole(
    acc, a_s, w_s, full, empty, stage, phase, begin, end, factors, s_ptr, z_ptr, group_count, padded_n, position, zero,
    BITS: gl.constexpr, ZERO: gl.constexpr, NARROW: gl.constexpr, TILES_PER_GROUP: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, WIDE: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """Steps ``begin`` to ``end``, an even number; returns the sum, and the stage that comes next."""
    dtype: gl.constexpr = a_s.dtype
    mma: gl.constexpr = acc.type.layout
    s0, z0, s1, z1 = factors
    mbarrier.wait(full.index(stage), phase)
    w0 = step_weights(w_s, stage * WIDE + WG, s0, z0, dtype, mma, BITS, ZERO, NARROW, PARTS)
    for step in range(begin, end, 2):
        acc = multiply_step(w0, a_s, stage, acc)
        # factors of the step after the next, loaded well before their use
        s0 = step_factors(s_ptr, step + 2, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
        z0 = s0
        if ZERO != "none":
            z0 = step_factors(z_ptr, step + 2, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
        mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1, pred=step > begin)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1
        mbarrier.wait(full.index(stage), phase)
        w1 = step_weights(w_s, stage * WIDE + WG, s1, z1, dtype, mma, BITS, ZERO, NARROW, PARTS)
        wait_at(zero[0], 12 + WG)
        acc, _, _ = warpgroup_mma_wait(0, deps=[acc, w0[0], w0[1]])
        acc = multiply_step(w1, a_s, stage, acc)
        s1 = step_factors(s_ptr, step + 3, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
        z1 = s1
        if ZERO != "none":
            z1 = step_factors(z_ptr, step + 3, group_count, padded_n, position, TILES_PER_GROUP, PARTS)
        mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1
        if step + 2 < end:
            mbarrier.wait(full.index(stage), phase)
        w0 = step_weights(w_s, stage * WIDE + WG, s0, z0, dtype, mma, BITS, ZERO, NARROW, PARTS)
        wait_at(zero[1], 12 + WG)
        acc, _, _ = warpgroup_mma_wait(0, deps=[acc, w1[0], w1[1]])
    return acc, stage, phase


@gluon.jit
def walk_halves(
    acc, a_s, w_s, full, empty, stage, phase, begin, end, factors, s_ptr, z_ptr, group_count, padded_n, position, zero,
    BITS: gl.constexpr, ZERO: gl.constexpr, NARROW: gl.constexpr, TILES_PER_GROUP: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, HALVES: gl.constexpr, TURNS: gl.constexpr, WIDE: gl.constexpr,
    WG: gl.constexpr,
):  # fmt: skip
    """Steps ``begin`` to ``end`` by 64 rows; returns as :func:`walk_whole`."""
    dtype: gl.constexpr = a_s.dtype
    mma: gl.constexpr = acc.type.layout
    s, z = factors
    units: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    mbarrier.wait(full.index(stage), phase)
    w0 = weights(
        w_s.index(stage * WIDE + WG).slice(0, BITS, dim=0).load(units),
        s,
        z,
        dtype,
        mma,
        BITS,
        ZERO,
        NARROW,
        PARTS,
    )
    if TURNS:
        wait_at(zero[0], 10 + WG)
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
            w_s.index(stage1 * WIDE + WG).slice((HALVES - 1) * BITS, BITS, dim=0).load(units),
            s1, z1, dtype, mma, BITS, ZERO, NARROW, PARTS,
        )  # fmt: skip
        if TURNS:
            wait_at(zero[0], 10 + WG)
        else:
            wait_at(zero[0], 12 + WG)
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
            w_s.index(stage * WIDE + WG).slice(0, BITS, dim=0).load(units),
            s,
            z,
            dtype,
            mma,
            BITS,
            ZERO,
            NARROW,
            PARTS,
        )
        if step + 1 < end:
            if TURNS:
                wait_at(zero[0], 10 + WG)
            else:
                wait_at(zero[0], 12 + WG)
        acc, w1 = warpgroup_mma_wait(0, deps=[acc, w1])
    return acc, stage, phase
