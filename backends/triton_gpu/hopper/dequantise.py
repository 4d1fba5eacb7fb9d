"""Codes in fragment order -> exact numbers ``q - 2**(bits-1)`` in the dtype of A, in registers, without a shuffle.

A 32-bit register holds two units (k0 = 0, 1); product j takes field j of both. A field is or-ed into the mantissa of
a power of two (1024 for float16, 128 for bfloat16), and that offset leaves again before any product is made:

    float16, 4 bits   0x6400 | q = 1024 + q, and 0x6400 | q << 4 = 1024 + 16 q (times 1/16)
    bfloat16, 4 bits  0x4300 | q = 128 + q
    float16, 8 bits   a byte permute puts q under 0x64: 1024 + q
    bfloat16, 8 bits  the nibbles of q apart: 16 (h - 8) + l; every step is exact in 8 bits of mantissa
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

F16_4 = gl.constexpr("""
{
.reg .b32 t, c1, c2, c3;
mov.b32 c1, 0x64086408;
mov.b32 c2, 0x2c002c00;
mov.b32 c3, 0xd480d480;
shr.u32 t, $4, 8;
lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $3, t, 0x00f000f0, 0x64006400, 0xea;
sub.f16x2 $0, $0, c1;
fma.rn.f16x2 $1, $1, c2, c3;
sub.f16x2 $2, $2, c1;
fma.rn.f16x2 $3, $3, c2, c3;
}
""")

BF16_4 = gl.constexpr("""
{
.reg .b32 t, u, v, one, c;
mov.b32 one, 0x3f803f80;
mov.b32 c, 0xc308c308;
shr.u32 t, $4, 4;
shr.u32 u, $4, 8;
shr.u32 v, $4, 12;
lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $2, u, 0x000f000f, 0x43004300, 0xea;
lop3.b32 $3, v, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, $0, one, c;
fma.rn.bf16x2 $1, $1, one, c;
fma.rn.bf16x2 $2, $2, one, c;
fma.rn.bf16x2 $3, $3, one, c;
}
""")

F16_8 = gl.constexpr("""
{
.reg .b32 m, c;
mov.b32 m, 0x64646464;
mov.b32 c, 0x64806480;
prmt.b32 $0, $2, m, 0x4240;
prmt.b32 $1, $2, m, 0x4341;
sub.f16x2 $0, $0, c;
sub.f16x2 $1, $1, c;
}
""")

BF16_8 = gl.constexpr("""
{
.reg .b32 t, u, v, l, h, one, sixteen, c128, c136;
mov.b32 one, 0x3f803f80;
mov.b32 sixteen, 0x41804180;
mov.b32 c128, 0xc300c300;
mov.b32 c136, 0xc308c308;
shr.u32 t, $2, 4;
shr.u32 u, $2, 8;
shr.u32 v, $2, 12;
lop3.b32 l, $2, 0x000f000f, 0x43004300, 0xea;
lop3.b32 h, t, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 l, l, one, c128;
fma.rn.bf16x2 h, h, one, c136;
fma.rn.bf16x2 $0, h, sixteen, l;
lop3.b32 l, u, 0x000f000f, 0x43004300, 0xea;
lop3.b32 h, v, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 l, l, one, c128;
fma.rn.bf16x2 h, h, one, c136;
fma.rn.bf16x2 $1, h, sixteen, l;
}
""")


@gluon.jit
def centred(units, BITS: gl.constexpr, dtype: gl.constexpr):
    """int16 units -> a tuple of ``16 // BITS`` tensors ``q - 2**(BITS-1)`` of their shape, one for each product j."""
    # the dtypes must be literals: a tuple of constexpr values does not reach the compiler
    if BITS == 4:
        if dtype == gl.float16:
            return gl.inline_asm_elementwise(
                F16_4, "=&r,=&r,=&r,=&r,r", [units],
                dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return gl.inline_asm_elementwise(
                BF16_4, "=&r,=&r,=&r,=&r,r", [units],
                dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        if dtype == gl.float16:
            return gl.inline_asm_elementwise(
                F16_8, "=&r,=&r,r", [units], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
            )
        else:
            return gl.inline_asm_elementwise(
                BF16_8, "=&r,=&r,r", [units], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
            )
