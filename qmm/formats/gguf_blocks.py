"""GGUF block types as one table: fields of a block, bit planes of its codes, and how its scales are stored.

A row of a tensor (one column of W, K elements) is a run of blocks. ``Plane(field, width, bits, shift)`` says where
``bits`` bits of each code stand: the field is cut into runs of ``width`` bytes; the lowest ``bits`` bits of a run's bytes
belong to ``width`` consecutive elements, the next ``bits`` bits to the next ``width`` elements, and so on::

    Plane("qs", 16, 4)   byte j of 16:   | element 16+j | element j |                 (bit 7 ... bit 0)
    Plane("qs", 32, 2)   byte j of 32:   | 96+j | 64+j | 32+j | j |
    Plane("qh", 1, 1)    byte i:         element 8i+7 ... element 8i, one bit each

A new type is one line in ``BLOCK_TYPES`` (and, for a new way to store scales, one ``Levels`` in ``gguf_levels``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qmm.formats import gguf_levels as levels
from qmm.formats.gguf_levels import Factors, Levels
from qmm.weight.spec import ZeroKind

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


@dataclass(frozen=True)
class Plane:
    """Where some bits of every code of a block stand; see the module's picture."""

    field: str
    width: int
    bits: int
    shift: int = 0


@dataclass(frozen=True)
class BlockType:
    """One GGUF block type.

    Attributes:
        name: as in ggml, e.g. ``"Q4_K"``.
        size: elements of a block.
        group: elements that share a (first-level) scale.
        bits: bits of a code.
        fields: (name, bytes) in the order of the block.
        planes: where the codes stand.
        levels: how the scales are stored.
        zero_kind: bias where a minimum is added, else none.
        flip: exclusive-or that brings stored codes to canonical ones (two's complement to plus 128).
        codebook: value of each code, or None.
    """

    name: str
    size: int
    group: int
    bits: int
    fields: tuple[tuple[str, int], ...]
    planes: tuple[Plane, ...]
    levels: Levels
    zero_kind: ZeroKind = ZeroKind.NONE
    flip: int = 0
    codebook: tuple[float, ...] | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return sum(count for _, count in self.fields)

    @property
    def two_level(self) -> bool:
        """Whether the scales are small integers times a factor of the whole block."""
        return self.levels.scale_range is not None

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return self.size // self.group

    def decode(self, raw: Tensor) -> tuple[Tensor, Factors]:
        """Bytes uint8 ``[N, B*nbytes]`` -> codes uint8 ``[N, B*size]`` and factors ``[N, B, g]`` / ``[N, B]``."""
        blocks = raw.view(raw.shape[0], -1, self.nbytes)
        fields = dict(zip((n for n, _ in self.fields), blocks.split([c for _, c in self.fields], -1), strict=True))
        codes: Tensor | None = None
        for p in self.planes:
            shifts = torch.arange(0, 8, p.bits, dtype=torch.uint8)[:, None]
            runs = fields[p.field].unflatten(-1, (-1, 1, p.width))
            part = (runs >> shifts & (1 << p.bits) - 1 if p.bits < 8 else runs).flatten(2) << p.shift
            codes = part if codes is None else codes | part
        assert codes is not None
        return (codes ^ self.flip if self.flip else codes).reshape(raw.shape[0], -1), self.levels.decode(fields)

    def encode(self, codes: Tensor, factors: Factors) -> Tensor:
        """The inverse of :meth:`decode`; factors must be in the range of ``levels``."""
        blocks = (codes ^ self.flip).view(codes.shape[0], -1, self.size)
        fields = dict(self.levels.encode(factors))
        for p in self.planes:
            per_byte = 8 // p.bits
            runs = (blocks >> p.shift & (1 << p.bits) - 1).unflatten(-1, (-1, per_byte, p.width))
            merged = runs[..., 0, :]
            for i in range(1, per_byte):
                merged = merged | runs[..., i, :] << i * p.bits
            fields[p.field] = merged.flatten(2)
        return torch.cat([fields[name] for name, _ in self.fields], -1).flatten(1)


_BIAS = ZeroKind.BIAS
_NIBBLES, _K_NIBBLES = Plane("qs", 16, 4), Plane("qs", 32, 4)
_FIFTH = Plane("qh", 1, 1, 4)

_TYPES = (
    BlockType("Q4_0", 32, 32, 4, (("d", 2), ("qs", 16)), (_NIBBLES,), levels.ONE),
    BlockType("Q4_1", 32, 32, 4, (("d", 2), ("m", 2), ("qs", 16)), (_NIBBLES,), levels.ONE_BIAS, _BIAS),
    BlockType("Q5_0", 32, 32, 5, (("d", 2), ("qh", 4), ("qs", 16)), (_NIBBLES, _FIFTH), levels.ONE),
    BlockType("Q5_1", 32, 32, 5, (("d", 2), ("m", 2), ("qh", 4), ("qs", 16)), (_NIBBLES, _FIFTH), levels.ONE_BIAS, _BIAS),
    BlockType("Q8_0", 32, 32, 8, (("d", 2), ("qs", 32)), (Plane("qs", 32, 8),), levels.ONE, flip=0x80),
    BlockType(
        "Q2_K", 256, 16, 2, (("scales", 16), ("qs", 64), ("d", 2), ("dmin", 2)),
        (Plane("qs", 32, 2),), levels.NIBBLE_PAIRS, _BIAS,
    ),
    BlockType(
        "Q3_K", 256, 16, 3, (("hmask", 32), ("qs", 64), ("scales", 12), ("d", 2)),
        (Plane("qs", 32, 2), Plane("hmask", 32, 1, 2)), levels.SIX_BITS,
    ),
    BlockType(
        "Q4_K", 256, 32, 4, (("d", 2), ("dmin", 2), ("scales", 12), ("qs", 128)),
        (_K_NIBBLES,), levels.SIX_BIT_PAIRS, _BIAS,
    ),
    BlockType(
        "Q5_K", 256, 32, 5, (("d", 2), ("dmin", 2), ("scales", 12), ("qh", 32), ("qs", 128)),
        (_K_NIBBLES, Plane("qh", 32, 1, 4)), levels.SIX_BIT_PAIRS, _BIAS,
    ),
    BlockType(
        "Q6_K", 256, 16, 6, (("ql", 128), ("qh", 64), ("scales", 16), ("d", 2)),
        (Plane("ql", 64, 4), Plane("qh", 32, 2, 4)), levels.INT8,
    ),
    BlockType("IQ4_NL", 32, 32, 4, (("d", 2), ("qs", 16)), (_NIBBLES,), levels.ONE, codebook=IQ4_VALUES),
    BlockType(
        "IQ4_XS", 256, 32, 4, (("d", 2), ("scales_h", 2), ("scales_l", 4), ("qs", 128)),
        (_NIBBLES,), levels.IQ4_XS, codebook=IQ4_VALUES,
    ),
    BlockType("MXFP4", 32, 32, 4, (("e", 1), ("qs", 16)), (_NIBBLES,), levels.E8M0_SCALE, codebook=E2M1_VALUES),
)
BLOCK_TYPES: dict[str, BlockType] = {t.name: t for t in _TYPES}


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 ``[N, K]`` (K a multiple of 32) as int32 words ``[K*bits/32, N]``, the canonical bit stream.

    Works along rows, where GGUF's codes are contiguous: 8 codes fill ``bits`` whole bytes.
    """
    if bits == 8:
        packed = codes.contiguous()
    else:
        eights = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
        for i in range(8):
            eights |= codes[:, i::8].to(torch.int64) << i * bits
        packed = eights.view(torch.uint8).unflatten(-1, (-1, 8))[..., :bits].flatten(1)
    return packed.view(torch.int32).t().contiguous()
