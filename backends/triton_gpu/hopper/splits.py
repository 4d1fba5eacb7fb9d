"""Splits of K: partial sums through memory, added in the order of the splits by whoever comes last."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qmm.backends.triton_gpu.hopper.compat import barrier


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
        KEPT: gl.constexpr = SIZE <= 8192  # registers enough to add the own part without reading it back
        if KEPT:
            own = to_flat(acc, BM)
            there = gl.load(base, mask=(at >= 0) & (split != 0), other=0.0, cache_modifier=".cg")
            total = gl.where(split == 0, own, there)
            for i in gl.static_range(1, SPLIT):
                there = gl.load(base + i * SIZE, mask=(at >= 0) & (split != i), other=0.0, cache_modifier=".cg")
                total = total + gl.where(split == i, own, there)
        else:
            total = gl.load(base, cache_modifier=".cg")
            for i in gl.static_range(1, SPLIT):
                total = total + gl.load(base + i * SIZE, cache_modifier=".cg")
        acc = from_flat(total, BM, mma)
        gl.store(count_ptr + slot, 0)  # ready for the next launch
    return acc, last
