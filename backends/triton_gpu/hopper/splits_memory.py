"""Splits of K through memory: partial sums in a workspace, added in the order of the splits by whoever comes last.

For splits that no cluster has (splits.py), or more clusters than the machine holds at once.
"""

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
def join(acc, ws_ptr, count_ptr, slot, split, BM: gl.constexpr, SPLIT: gl.constexpr, mma: gl.constexpr):
    """Sum over the splits of a tile, in their order, by whoever comes last. Returns (sum, whether last).

    Each takes a number on arrival. All but the last leave their partial sums in the workspace and say so; the last
    keeps its own in registers, waits for the others' word (they have arrived: it cannot be long) and adds up.
    """
    SIZE: gl.constexpr = 64 * BM
    at = gl.arange(0, SIZE, gl.BlockedLayout([4], [32], [4], [0]))
    base = ws_ptr + slot.to(gl.int64) * (SPLIT * SIZE) + at
    arrived_ptr = count_ptr + slot * 2
    ready_ptr = arrived_ptr + 1
    last = gl.atomic_add(arrived_ptr, 1, sem="relaxed", scope="gpu") == SPLIT - 1
    if last:
        while gl.atomic_add(ready_ptr, 0, sem="acquire", scope="gpu") < SPLIT - 1:
            pass
        barrier()
        own = to_flat(acc, BM)
        there = gl.load(base, mask=(at >= 0) & (split != 0), other=0.0, cache_modifier=".cg")
        total = gl.where(split == 0, own, there)
        if SPLIT * BM <= 128:  # all loads at once
            for i in gl.static_range(1, SPLIT):
                there = gl.load(
                    base + i * SIZE, mask=(at >= 0) & (split != i), other=0.0, cache_modifier=".cg"
                )
                total = total + gl.where(split == i, own, there)
        else:  # one after the other: registers for more would be spilled
            for i in range(1, SPLIT):
                there = gl.load(
                    base + i * SIZE, mask=(at >= 0) & (split != i), other=0.0, cache_modifier=".cg"
                )
                total = total + gl.where(split == i, own, there)
        acc = from_flat(total, BM, mma)
        gl.store(arrived_ptr, 0)  # ready for the next launch
        gl.store(ready_ptr, 0)
    else:
        gl.store(base + split * SIZE, to_flat(acc, BM), cache_modifier=".cg")
        barrier()
        gl.atomic_add(ready_ptr, 1, sem="release", scope="gpu")
    return acc, last
