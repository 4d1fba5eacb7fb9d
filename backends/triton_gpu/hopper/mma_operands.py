"""Operands of mma.m16n8k16 from words as they lie in memory, in registers: no data moves between threads."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def group_layout(warps, values):
    """``[warps, 8, values]``: lane ``g * 4 + quad`` of warp b holds all values of ``(b, g)``, whatever its quad."""
    registers = [[0, 0, 1 << i] for i in range(values.bit_length() - 1)]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warp_bases = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warp_bases, [], [warps, 8, values])


@gluon.jit
def doubled(x):
    """Rows ``[B, R, BM]`` twice over, ``[B, 2R, BM]``; in registers."""
    x = gl.permute(gl.join(x, x), (0, 3, 1, 2))
    return gl.reshape(x, (x.shape[0], 2 * x.shape[2], x.shape[3]))


@gluon.jit
def over_strips(x, STRIPS: gl.constexpr, acc_layout: gl.constexpr):
    """Sixteen equal rows, once for every strip; no data moves."""
    if STRIPS >= 2:
        x = doubled(x)
    if STRIPS >= 4:
        x = doubled(x)
    if STRIPS >= 8:
        x = doubled(x)
    return gl.convert_layout(x, acc_layout, assert_trivial=True)


@gluon.jit
def by_column(x, B: gl.constexpr, STRIPS: gl.constexpr, dtype: gl.constexpr, layout: gl.constexpr):
    """Group values ``[B, g, (strip, r8)]`` -> float32 ``[B, n]`` beside the accumulator's rows; no data moves."""
    if x.dtype == gl.int32:  # words: of (r8 = 0, r8 = 1), or float32
        if dtype.primitive_bitwidth == 16:
            low, high = halves(x, dtype)
            x = gl.join(low, high)
        else:
            x = x.to(gl.float32, bitcast=True)
    x = gl.permute(gl.reshape(x.to(gl.float32), (B, 8, STRIPS, 2)), (0, 2, 3, 1))
    return gl.convert_layout(gl.reshape(x, (B, STRIPS * 16)), layout, assert_trivial=True)


@gluon.constexpr_function
def pair_layout(warps, pairs, rows):
    """``[warps, pairs of k, rows]``: where ``mma.m16n8k16`` wants pairs (k = 2p, 2p + 1) of its 8-column operand.

    Bits 0 and 1 of p are quad, bit 2 is k8, the rest count products; bits 0 to 2 of the row are g.
    """
    registers = [[0, 1 << i, 0] for i in range(2, pairs.bit_length() - 1)]
    registers += [[0, 0, 1 << i] for i in range(3, rows.bit_length() - 1)]
    lanes = [[0, 1, 0], [0, 2, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    warp_bases = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warp_bases, [], [warps, pairs, rows])


@gluon.jit
def halves(x, dtype: gl.constexpr):
    """Words -> their low and their high half. Loops carry words: 16-bit values would be split and joined each turn."""
    if dtype == gl.float16:
        return gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    elif dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )


@gluon.jit
def activation_operand(x, dtype: gl.constexpr, dot_a: gl.constexpr):
    """Words ``[B, pairs, BM]`` -> ``[B, k, BM]`` as mma's operand; no data moves."""
    low, high = halves(x, dtype)
    x = gl.permute(gl.join(low, high), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(x, (x.shape[0], 2 * x.shape[1], x.shape[3])), dot_a, assert_trivial=True)


@gluon.jit
def operand(
    codes, part: gl.constexpr, B: gl.constexpr, STRIPS: gl.constexpr, PRODUCTS: gl.constexpr, dot_w: gl.constexpr
):
    """Products ``part * PRODUCTS ...`` as one operand ``[B, n, PRODUCTS * 16]``; no data moves."""
    if PRODUCTS == 1:
        x = gl.expand_dims(codes[part], 3)
    elif PRODUCTS == 2:
        x = gl.join(codes[part * 2], codes[part * 2 + 1])
    else:
        x = gl.join(gl.join(codes[0], codes[2]), gl.join(codes[1], codes[3]))
    # batch, strip, g, quad, k8, r8, k0, j (the inner join's pair comes first: j = 2 * second + first)
    x = gl.reshape(x, (B, STRIPS, 8, 4, 2, 2, 2, PRODUCTS))
    x = gl.permute(x, (0, 1, 5, 2, 7, 4, 3, 6))
    return gl.convert_layout(gl.reshape(x, (B, STRIPS * 16, PRODUCTS * 16)), dot_w, assert_trivial=True)
