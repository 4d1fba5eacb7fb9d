"""Packed weights -> W, rounded once to A's dtype, as wgmma's register operand.

NARROW: scales (and bias zeros) have A's dtype, so that one 16-bit multiplication of exact numbers, or one fused
multiply-add, is that rounding; otherwise the arithmetic is float32, and rounds at its end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qmm.backends.triton_gpu.hopper.dequantise import centred


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
    """Units ``[BITS, 256]`` of 64 columns by 64 rows of K -> W ``[64, 64]`` as wgmma's register operand."""
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
