"""Poison: operands carved out of larger buffers of NaN or 0x7FFFFFFF, and canaries that must stay as they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qmm.weight import QuantizedWeight
from qmm.weight.tensors import WeightTensors

GUARD = 64  # elements of poison before and behind


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor that is nothing but poison."""
    if dtype.is_floating_point and torch.empty(0, dtype=dtype).element_size() > 1:
        return torch.full(shape, math.nan, dtype=dtype, device=device)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.full((*shape[:-1], shape[-1] * size), 0x7F, dtype=torch.uint8, device=device)
    if dtype == torch.int32:
        return torch.full(shape, 0x7FFFFFFF, dtype=dtype, device=device)
    return raw.view(dtype)


def carve(t: Tensor) -> Tensor:
    """A contiguous copy of ``t`` in the middle of poison (16-byte alignment of the start is kept).

    Example:
        >>> import torch
        >>> from qmm.testing import carve
        >>> torch.equal(carve(torch.arange(6).view(2, 3)), torch.arange(6).view(2, 3))
        True
    """
    buffer = poisoned((t.numel() + 2 * GUARD,), t.dtype, t.device)
    middle = buffer[GUARD : GUARD + t.numel()].view(t.shape)
    middle.copy_(t)
    return middle


def carve_rows(t: Tensor, pad: int = 5) -> Tensor:
    """A copy of ``[M, C]`` whose rows lie inside wider rows of poison, with poisoned rows around.

    Example:
        >>> import torch
        >>> from qmm.testing import carve_rows
        >>> carve_rows(torch.zeros(2, 3), pad=5).stride()
        (13, 1)
    """
    m, c = t.shape
    buffer = poisoned((m + 2, c + 2 * pad), t.dtype, t.device)
    middle = buffer[1 : m + 1, pad : pad + c]
    middle.copy_(t)
    return middle


def carve_weight(w: QuantizedWeight) -> QuantizedWeight:
    """The same weight with each tensor carved out of poison.

    Example:
        >>> from qmm.testing import Case, carve_weight, make_inputs
        >>> w = make_inputs(Case(n=8, k=64)).w
        >>> carve_weight(w).spec == w.spec
        True
    """
    tensors = WeightTensors(**{name: carve(t) for name, t in w.tensors.present().items()})
    other = w._same_meaning(tensors)
    assert other.qweight.data_ptr() == tensors.qweight.data_ptr()
    return other


class Canary:
    """An output ``[M, N]`` filled with NaN inside a buffer whose rest must not change.

    Example:
        >>> import torch
        >>> from qmm.testing import Canary
        >>> canary = Canary(2, 3, torch.float32, torch.device("cpu"))
        >>> canary.out.shape
        torch.Size([2, 3])
        >>> canary.check()
    """

    def __init__(self, m: int, n: int, dtype: torch.dtype, device: torch.device, pad: int = 3) -> None:
        self._buffer = torch.full((m + 2, n + 2 * pad), -1.5, dtype=dtype, device=device)
        self.out = self._buffer[1 : m + 1, pad : pad + n]
        self.out.fill_(math.nan)

    def check(self) -> None:
        """Raise AssertionError where something outside ``out`` was written."""
        rest = self._buffer.clone()
        m, n = self.out.shape
        pad = (rest.shape[1] - n) // 2
        rest[1 : m + 1, pad : pad + n] = -1.5
        if not bool((rest == -1.5).all()):
            raise AssertionError(f"{int((rest != -1.5).sum())} elements outside the output were written")
