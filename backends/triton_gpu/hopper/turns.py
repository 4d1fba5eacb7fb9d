"""Warpgroups take turns at the tensor cores: named barriers, with a fence that ptxas respects."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _wait(barrier: int, threads: int) -> gl.constexpr:
    loop = f"again: bar.sync {barrier}, {threads}; setp.ne.s32 p, $1, 0; @p bra.uni again;"
    return gl.constexpr(f"{{ .reg .pred p; {loop} mov.b32 $0, $1; }}")


def _arrive(barrier: int) -> gl.constexpr:
    return gl.constexpr(f"bar.arrive {barrier}, 256; mov.b32 $0, $1;")


# 10 and 11: one warpgroup and the other's arrival. 12 to 14: a warpgroup alone.
WAIT_10, WAIT_11 = _wait(10, 256), _wait(11, 256)
WAIT_12, WAIT_13, WAIT_14 = _wait(12, 128), _wait(13, 128), _wait(14, 128)
ARRIVE_10, ARRIVE_11 = _arrive(10), _arrive(11)


@gluon.jit
def wait_at(zero, ID: gl.constexpr):
    """Wait at a named barrier: 10 and 11 are for one warpgroup and the other's arrival, 12 to 14 for one alone.

    The loop around it never repeats (zero is 0), but keeps ptxas from moving the dequantisation behind the wait.
    """
    z = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])) + zero
    if ID == 10:
        asm: gl.constexpr = WAIT_10
    elif ID == 11:
        asm: gl.constexpr = WAIT_11
    elif ID == 12:
        asm: gl.constexpr = WAIT_12
    elif ID == 13:
        asm: gl.constexpr = WAIT_13
    else:
        asm: gl.constexpr = WAIT_14
    gl.inline_asm_elementwise(asm, "=r,r", [z], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_go(ID: gl.constexpr):
    """Arrive at the other warpgroup's barrier without waiting."""
    z = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    if ID == 10:
        asm: gl.constexpr = ARRIVE_10
    else:
        asm: gl.constexpr = ARRIVE_11
    gl.inline_asm_elementwise(asm, "=r,r", [z], dtype=gl.int32, is_pure=False, pack=1)
