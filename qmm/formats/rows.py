"""Rows of bytes as they stand in files -> the canonical bit stream down K, and back.

Files store a row of N after the other, ``[N, bytes]``, little-endian; the canonical form stores a column of K after
the other. A row's bytes, four at a time, **are** the words of that column's stream, so that a transpose of words is all
there is to do::

    row n:   | byte 0 | byte 1 | byte 2 | byte 3 | byte 4 ...        word i of column n = bytes 4i+3 ... 4i
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 20  # temporaries are a few of these, whatever the layer


def words_from_rows(rows: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Bytes uint8 ``[N, B]`` as int32 words ``[ceil(B/4), N]``; the last word is filled up with zeros.

    Args:
        rows: a row's codes, dense, little-endian.
        change: applied to some rows at a time, uint8 ``[n, B] -> [n, B]``, with a few megabytes of temporaries.
    """
    n, width = rows.shape
    step = max(1, _CHUNK_BYTES // max(1, width))
    out: Tensor | None = None
    for start in range(0, max(n, 1), step):
        part = rows[start : start + step]
        # on the meta device torch loads a thousand modules for the first arithmetic, and there is nothing to change
        part = part if change is None or rows.is_meta else change(part)
        short = -part.shape[1] % 4
        part = torch.nn.functional.pad(part, (0, short)) if short else part.contiguous()
        # flat first: a size of 1 may have any stride in a contiguous tensor, which a view of another size refuses
        words = part.reshape(-1).view(torch.int32).view(part.shape[0], part.shape[1] // 4)
        if out is None:
            out = torch.empty(words.shape[1], n, dtype=torch.int32, device=rows.device)
        out[:, start : start + step] = words.t()
    assert out is not None
    return out


def rows_from_words(words: Tensor, nbytes: int) -> Tensor:
    """The inverse of :func:`words_from_rows`: uint8 ``[N, nbytes]``."""
    turned = words.t().contiguous()
    return turned.reshape(-1).view(torch.uint8).view(words.shape[1], -1)[:, :nbytes].contiguous()


def turned(t: Tensor) -> Tensor:
    """``[R, C] -> [C, R]``: a contiguous copy, of any dtype (torch cannot copy every 8-bit float with strides)."""
    if t.is_floating_point() and t.element_size() == 1:
        return turned(t.contiguous().view(torch.uint8)).view(t.dtype)
    return t.t().clone(memory_format=torch.contiguous_format)
