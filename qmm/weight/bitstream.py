"""Codes as a dense little-endian bit stream down the rows, one stream a column.

Element ``k`` of a column is bits ``[k*bits, (k+1)*bits)`` of that column's concatenated 32-bit words::

    bits=4   word i:  | k=8i+7 | ... | k=8i+1 | k=8i |          (bit 31 ... bit 0)
    bits=3   word 0:  | k=10 (2 low bits) | k=9 | ... | k=0 |
             word 1:  | ... | k=11 | k=10 (1 high bit) |

32 codes always fill exactly ``bits`` words, so every width is handled in blocks of 32 rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qmm.weight.spec import WORD_BITS, words_for


def pack(codes: Tensor, bits: int) -> Tensor:
    """Integer codes ``[R, N]`` in ``[0, 2**bits)`` as int32 words ``[ceil(R*bits/32), N]``; trailing bits are 0."""
    rows, columns = codes.shape
    if codes.is_meta:  # torch loads a thousand modules for the first arithmetic there
        return torch.empty(words_for(rows, bits), columns, dtype=torch.int32, device="meta")
    blocks = -(-rows // WORD_BITS)
    padded = torch.zeros(blocks * WORD_BITS, columns, dtype=torch.int32, device=codes.device)
    padded[:rows] = codes
    lanes = padded.view(blocks, WORD_BITS, columns)
    words = torch.zeros(blocks, bits, columns, dtype=torch.int32, device=codes.device)
    for lane in range(WORD_BITS):
        word, shift = divmod(lane * bits, WORD_BITS)
        code = lanes[:, lane]
        words[:, word] |= code << shift
        if shift + bits > WORD_BITS:
            words[:, word + 1] |= code >> (WORD_BITS - shift)
    return words.view(blocks * bits, columns)[: words_for(rows, bits)].clone()


def unpack(words: Tensor, bits: int, rows: int) -> Tensor:
    """The first ``rows`` codes of int32 words ``[W, N]`` as uint8 ``[rows, N]``."""
    mask = (1 << bits) - 1
    columns = words.shape[1]
    if words.is_meta:  # as in pack
        return torch.empty(rows, columns, dtype=torch.uint8, device="meta")
    if WORD_BITS % bits == 0:
        per_word = WORD_BITS // bits
        shifts = torch.arange(per_word, dtype=torch.int32, device=words.device) * bits
        codes = (words[:, None] >> shifts[:, None]) & mask  # arithmetic shift: the mask comes after it
        return codes.to(torch.uint8).reshape(-1, columns)[:rows]
    blocks = -(-rows // WORD_BITS)
    if words.shape[0] < blocks * bits:
        words = torch.cat([words, words.new_zeros(blocks * bits - words.shape[0], columns)])
    grouped = words.view(blocks, bits, columns)
    codes = torch.empty(blocks, WORD_BITS, columns, dtype=torch.uint8, device=words.device)
    for lane in range(WORD_BITS):
        word, shift = divmod(lane * bits, WORD_BITS)
        code = grouped[:, word] >> shift
        if shift + bits > WORD_BITS:
            low = WORD_BITS - shift
            code = (code & ((1 << low) - 1)) | (grouped[:, word + 1] << low)
        codes[:, lane] = (code & mask).to(torch.uint8)
    return codes.view(-1, columns)[:rows]


def padding_is_zero(words: Tensor, bits: int, rows: int) -> bool:
    """Whether the bits past the last of ``rows`` codes are 0 (reads the last row of words)."""
    used = rows * bits % WORD_BITS
    if used == 0 or words.shape[1] == 0:
        return True
    return not bool((words[-1] >> used).any())
