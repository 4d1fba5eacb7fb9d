"""GGUF block types as one table: fields of a block, bit planes of its codes, and how its scales are stored.

A row of a tensor (one column of W, K elements) is a run of blocks. ``Plane(field, width, bits, shift)`` says where
``bits`` bits of each code stand: the field is cut into runs of ``width`` bytes; the lowest ``bits`` bits of a run's
bytes belong to ``width`` consecutive elements, the next ``bits`` bits to the next ``width`` elements, and so on::

    Plane("qs", 16, 4)   byte j of 16:   | element 16+j | element j |                 (bit 7 ... bit 0)
    Plane("qs", 32, 2)   byte j of 32:   | 96+j | 64+j | 32+j | j |
    Plane("qh", 1, 1)    byte i:         element 8i+7 ... element 8i, one bit each

The heavy parts are numpy on words of 8 bytes: one thread, so that a busy machine does not wait at torch's barriers.

A new type is one line in ``BLOCK_TYPES`` (and, for a new way to store scales, one ``Levels`` in ``gguf_levels``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
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
        fields, at = {}, 0
        for name, count in self.fields:
            fields[name] = blocks[..., at : at + count]
            at += count
        codes: Tensor | None = None
        for p in self.planes:
            part = _spread(fields[p.field], p)
            part = part << p.shift if p.shift else part
            codes = part if codes is None else codes | part
        assert codes is not None
        return (codes ^ self.flip if self.flip else codes).view(raw.shape[0], -1), self.levels.decode(fields)

    def encode(self, codes: Tensor, factors: Factors) -> Tensor:
        """The inverse of :meth:`decode`; factors must be in the range of ``levels``."""
        blocks = (codes ^ self.flip).view(codes.shape[0], -1, self.size)
        fields = dict(self.levels.encode(factors))
        for p in self.planes:
            per_byte = 8 // p.bits
            runs = (blocks >> p.shift & (1 << p.bits) - 1).view(*blocks.shape[:2], -1, per_byte, p.width)
            merged = runs[..., 0, :]
            for i in range(1, per_byte):
                merged = merged | runs[..., i, :] << i * p.bits
            fields[p.field] = merged.flatten(2)
        return torch.cat([fields[name] for name, _ in self.fields], -1).flatten(1)


_BIAS = ZeroKind.BIAS
_NIBBLES, _K_NIBBLES = Plane("qs", 16, 4), Plane("qs", 32, 4)
_FIFTH = Plane("qh", 1, 1, 4)

_D, _DM, _D_DMIN = (("d", 2),), (("d", 2), ("m", 2)), (("d", 2), ("dmin", 2))
_QS16, _QH4 = ("qs", 16), ("qh", 4)

_TYPES = (
    BlockType("Q4_0", 32, 32, 4, (*_D, _QS16), (_NIBBLES,), levels.ONE),
    BlockType("Q4_1", 32, 32, 4, (*_DM, _QS16), (_NIBBLES,), levels.ONE_BIAS, _BIAS),
    BlockType("Q5_0", 32, 32, 5, (*_D, _QH4, _QS16), (_NIBBLES, _FIFTH), levels.ONE),
    BlockType("Q5_1", 32, 32, 5, (*_DM, _QH4, _QS16), (_NIBBLES, _FIFTH), levels.ONE_BIAS, _BIAS),
    BlockType("Q8_0", 32, 32, 8, (*_D, ("qs", 32)), (Plane("qs", 32, 8),), levels.ONE, flip=0x80),
    BlockType(
        "Q2_K", 256, 16, 2, (("scales", 16), ("qs", 64), *_D_DMIN), (Plane("qs", 32, 2),), levels.NIBBLE_PAIRS, _BIAS
    ),
    BlockType(
        "Q3_K", 256, 16, 3, (("hmask", 32), ("qs", 64), ("scales", 12), *_D),
        (Plane("qs", 32, 2), Plane("hmask", 32, 1, 2)), levels.SIX_BITS,
    ),
    BlockType(
        "Q4_K", 256, 32, 4, (*_D_DMIN, ("scales", 12), ("qs", 128)), (_K_NIBBLES,), levels.SIX_BIT_PAIRS, _BIAS
    ),
    BlockType(
        "Q5_K", 256, 32, 5, (*_D_DMIN, ("scales", 12), ("qh", 32), ("qs", 128)),
        (_K_NIBBLES, Plane("qh", 32, 1, 4)), levels.SIX_BIT_PAIRS, _BIAS,
    ),
    BlockType(
        "Q6_K", 256, 16, 6, (("ql", 128), ("qh", 64), ("scales", 16), *_D),
        (Plane("ql", 64, 4), Plane("qh", 32, 2, 4)), levels.INT8,
    ),
    BlockType("IQ4_NL", 32, 32, 4, (*_D, _QS16), (_NIBBLES,), levels.ONE, codebook=IQ4_VALUES),
    BlockType(
        "IQ4_XS", 256, 32, 4, (*_D, ("scales_h", 2), ("scales_l", 4), ("qs", 128)), (_NIBBLES,), levels.IQ4_XS,
        codebook=IQ4_VALUES,
    ),
    BlockType("MXFP4", 32, 32, 4, (("e", 1), _QS16), (_NIBBLES,), levels.E8M0_SCALE, codebook=E2M1_VALUES),
)  # fmt: skip
BLOCK_TYPES: dict[str, BlockType] = {t.name: t for t in _TYPES}


def _spread(field: Tensor, p: Plane) -> Tensor:
    """The bits of one plane, one byte an element: uint8 ``[N, B, bytes]`` -> uint8 ``[N, B, size]``."""
    if p.bits == 8:
        return field
    lane = np.uint64 if p.width % 8 == 0 else np.uint8  # 8 bytes at a time where runs allow it
    lanes = np.ascontiguousarray(field.numpy()).view(lane)
    rows, blocks = lanes.shape[:2]
    per_run = p.width // lanes.itemsize
    runs = lanes.reshape(rows, blocks, -1, 1, per_run)
    out = np.empty((rows, blocks, runs.shape[2], 8 // p.bits, per_run), lane)
    mask = lane(sum((1 << p.bits) - 1 << 8 * byte for byte in range(lanes.itemsize)))
    for i in range(8 // p.bits):
        np.bitwise_and(runs[..., 0, :] >> lane(i * p.bits), mask, out=out[..., i, :])
    return torch.from_numpy(out.view(np.uint8).reshape(rows, blocks, -1))


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 ``[N, K]`` (K a multiple of 32) as int32 words ``[K*bits/32, N]``, the canonical bit stream.

    Works along rows, where GGUF's codes are contiguous: 8 codes in an int64 are pushed together pair by pair, until
    they fill its lowest ``bits`` bytes.
    """
    packed = np.ascontiguousarray(codes.numpy())
    if bits < 8:
        lanes = packed.view(np.uint64)
        for width, ones in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF)):
            mask = np.uint64(ones)
            upper = lanes >> np.uint64(width)
            upper &= mask
            upper <<= np.uint64(bits * width // 8)
            upper |= lanes & mask
            lanes = upper
        packed = lanes.view(np.uint8).reshape(len(codes), -1, 8)[..., :bits].reshape(len(codes), -1)
    return torch.from_numpy(np.ascontiguousarray(packed.view(np.int32).T))
