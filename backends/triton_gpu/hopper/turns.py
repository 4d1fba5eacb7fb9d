"""Two warpgroups take turns at the tensor cores: named barriers, with a fence that ptxas respects."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
