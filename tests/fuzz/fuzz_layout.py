"""How operands lie in memory: views of many strides inside poison, and results inside canaries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qmm.testing.poison import GUARD, poisoned
from qmm.weight import QuantizedWeight
from qmm.weight.tensors import WeightTensors

CANARY = -1.5


def _odd(size: int) -> int:
    return size | 1


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


def a_layout(view: str, m: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of A ``[..., K]`` with M rows."""
    plain = (m, k), (k, 1)
    halves = m % 2 == 0 and m > 0
    return {
        "plain": plain,
        "rows": ((m, k), (_odd(k + 5), 1)),
        "rows16": ((m, k), (_up(k, 16) + 16, 1)),
        "columns": ((m, k), (2 * k + 3, 2)),
        "transposed": ((m, k), (1, _odd(m + 4))),
        "expanded": ((m, k), (0, 1)),
        "one-d": ((k,), (1,)) if m == 1 else plain,
        "3-d": ((2, m // 2, k), (m // 2 * k, k, 1)) if halves else ((1, m, k), (m * k, k, 1)),
        "folded": ((2, m // 2, k), (k, 2 * k, 1)) if halves else plain,
    }[view]


def out_layout(kind: str, leading: tuple[int, ...], n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the result ``[..., N]``, without overlap."""
    m = math.prod(leading)
    pitch, column = {
        "rows": (_odd(n + 6), 1),
        "rows16": (_up(n, 16) + 16, 1),
        "columns": (2 * n + 1, 2),
        "transposed": (1, _odd(m + 4)),
    }[kind]
    strides = [pitch * math.prod(leading[i + 1 :]) for i in range(len(leading))]
    return (*leading, n), (*strides, column)


def strided(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, buffer_of: object
) -> tuple[Tensor, Tensor]:
    """A buffer made by ``buffer_of(size)`` and the view in it, ``GUARD + offset`` elements behind its beginning."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    buffer = buffer_of(max(1, extent) + 2 * GUARD + 8)  # type: ignore[operator]
    return buffer, buffer.as_strided(shape, strides, GUARD + offset)


def lay_out(a: Tensor, view: str, offset: int) -> Tensor:
    """``a`` ``[M, K]`` as a view inside NaN; ``"expanded"`` keeps its first row alone."""
    shape, strides = a_layout(view, *a.shape)
    _, laid = strided(shape, strides, offset, lambda size: poisoned((size,), a.dtype, a.device))
    if view == "expanded":
        if a.shape[0]:
            laid[0].copy_(a[0])
    else:
        laid.copy_(a.view(shape))
    return laid


def carve_off(w: QuantizedWeight, offset: int) -> QuantizedWeight:
    """The same weight, each tensor inside poison and ``offset`` elements off 16-byte alignment."""

    def carve(t: Tensor) -> Tensor:
        _, laid = strided(
            tuple(t.shape), tuple(t.stride()), offset, lambda size: poisoned((size,), t.dtype, t.device)
        )
        return laid.copy_(t)

    tensors = WeightTensors(**{name: carve(t.contiguous()) for name, t in w.tensors.present().items()})
    other = w._same_meaning(tensors)
    assert other.qweight.data_ptr() == tensors.qweight.data_ptr()
    return other


class Result:
    """An ``out`` filled with NaN inside canaries; for ``"new"`` none, but the memory that torch gives next is NaN."""

    def __init__(
        self,
        kind: str,
        leading: tuple[int, ...],
        n: int,
        dtype: torch.dtype,
        device: torch.device,
        offset: int,
    ) -> None:
        self.out: Tensor | None = None
        if kind == "new":
            torch.full(
                (*leading, n), math.nan, dtype=dtype, device=device
            )  # freed: likely the result's memory
            return
        shape, strides = out_layout(kind, leading, n)
        self._buffer, self.out = strided(
            shape, strides, offset, lambda size: torch.full((size,), CANARY, dtype=dtype, device=device)
        )
        self.out.fill_(math.nan)

    def outside_is_untouched(self) -> bool:
        """Whether nothing but ``out`` was written."""
        if self.out is None:
            return True
        rest = self._buffer.clone()
        rest.as_strided(self.out.shape, self.out.stride(), self.out.storage_offset()).fill_(CANARY)
        return bool((rest == CANARY).all())
