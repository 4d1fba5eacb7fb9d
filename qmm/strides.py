"""Stride arithmetic: seeing ``[..., K]`` as rows, and whether two strided tensors share an element."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def merges_to_rows(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether all dimensions but the last can be seen as one dimension without a copy."""
    lead = [(n, s) for n, s in zip(shape[:-1], strides[:-1], strict=True) if n != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in zip(lead, lead[1:], strict=False))


def as_rows(t: Tensor) -> Tensor:
    """``[..., C]`` as ``[rows, C]``: a view where the strides allow it, else a copy."""
    return t if t.dim() == 2 else t.reshape(-1, t.shape[-1])


def overlaps_itself(t: Tensor) -> bool:
    """Whether two indices of ``t`` may reach one element (conservative for exotic strides)."""
    dims = sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def may_overlap(x: Tensor, y: Tensor) -> bool:
    """Whether ``x`` and ``y`` may share a byte.

    Exact where one of them is dense, and where both are column ranges of rows with one common stride (two halves of
    one buffer); otherwise intersecting address ranges count as sharing.
    """
    if x.numel() == 0 or y.numel() == 0 or x.device != y.device:
        return False
    x0, x1 = _byte_range(x)
    y0, y1 = _byte_range(y)
    if x1 <= y0 or y1 <= x0:
        return False
    xr, yr = _row_span(x), _row_span(y)
    if xr is None or yr is None or xr[0] != yr[0]:
        return True
    pitch = xr[0]
    shift = (y0 - x0) % pitch  # y's row begins so many bytes after a row of x
    return shift < xr[1] or shift + yr[1] > pitch


def _byte_range(t: Tensor) -> tuple[int, int]:
    size = t.element_size()
    low = t.data_ptr()
    extent = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return low, low + (extent + 1) * size


def _row_span(t: Tensor) -> tuple[int, int] | None:
    """(row pitch, bytes a row reaches over) of a tensor that is rows of columns, else None."""
    if t.dim() < 2 or not merges_to_rows(t.shape, t.stride()):
        return None
    lead = [s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
    if not lead or lead[-1] <= 0:
        return None
    size = t.element_size()
    return lead[-1] * size, ((t.shape[-1] - 1) * t.stride(-1) + 1) * size
