"""Planar packing, as gptqmodel writes it: no code straddles a word.

A code is cut into planes whose widths divide 32; 32 codes fill ``bits`` words, plane after plane, low bits first::

    bits  planes       32 codes, word by word
    2     2            | 2 words of 2-bit fields |                             (as in the dense stream)
    3     2 + 1        | 2 words: bits 0-1 |  1 word: bit 2 |
    4     4            | 4 words of 4-bit fields |                             (as in the dense stream)
    5     4 + 1        | 4 words: bits 0-3 |  1 word: bit 4 |
    6     4 + 2        | 4 words: bits 0-3 |  2 words: bits 4-5 |
    7     4 + 2 + 1    | 4 words: bits 0-3 |  2 words: bits 4-5 |  1 word: bit 6 |
    8     8            | 8 words of 8-bit fields |                             (as in the dense stream)

Inside a plane of width p, word i holds codes ``i*32/p ... (i+1)*32/p - 1``, the first in its low bits. Found in
gptqmodel's checkpoints and read off its packer's documentation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qmm.weight import bitstream
from qmm.weight.spec import WORD_BITS
from qmm.weight.validate import require

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


def check_count(count: int, what: str) -> None:
    """Planar streams are whole blocks of 32 codes.

    Raises:
        WeightFormatError: ``count`` is no multiple of 32.
    """
    require(count % WORD_BITS == 0, what, "must be a multiple of 32 for planar packing", count)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Words ``[B*bits, N]`` -> codes uint8 ``[B*32, N]``."""
    columns = words.shape[1]
    blocks = words.shape[0] // bits
    grouped = words.view(blocks, bits, columns)
    codes = torch.zeros(blocks * WORD_BITS, columns, dtype=torch.uint8, device=words.device)
    at = 0
    for width in PLANES[bits]:
        plane = grouped[:, at : at + width].reshape(blocks * width, columns)
        # words before the plane in a block = bits before it in a code
        codes |= bitstream.unpack(plane, width, blocks * WORD_BITS) << at
        at += width
    return codes


def pack(codes: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`unpack`: codes ``[B*32, N]`` -> int32 words ``[B*bits, N]``."""
    rows, columns = codes.shape
    planes, at = [], 0
    for width in PLANES[bits]:
        plane = bitstream.pack((codes >> at) & ((1 << width) - 1), width)
        planes.append(plane.view(rows // WORD_BITS, width, columns))
        at += width
    return torch.cat(planes, 1).view(-1, columns)
