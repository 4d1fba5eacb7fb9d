"""A weight to be timed: its shape and kind, random values, and the least bytes and operations that a call takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qmm.weight import QuantizedWeight
from qmm.weight.bitstream import pack

_WORD = 32


@dataclass(frozen=True)
class Problem:
    """``[K, N]`` codes of ``bits`` bits with one scale a group; ``zeros``: integer zero points too.

    ``dtype`` is that of A, of C and of the scales.
    """

    k: int
    n: int
    bits: int = 4
    group_size: int = 128
    zeros: bool = False
    dtype: torch.dtype = torch.float16
    device: str = "cpu"

    @property
    def shape(self) -> str:
        """``"4096x6144"``, K first."""
        return f"{self.k}x{self.n}"

    @property
    def groups(self) -> int:
        """Groups along K."""
        return math.ceil(self.k / self.group_size)

    def weight(self) -> QuantizedWeight:
        """Random codes, scales and zeros, the same for equal problems on one kind of device."""
        random = torch.Generator(self.device).manual_seed(self.k * 31 + self.n)
        where = {"device": self.device, "generator": random}
        shape = (self.groups, self.n)
        scales = (torch.rand(shape, **where) * 0.01 + 0.005).to(self.dtype)  # type: ignore[call-overload]
        zeros = None
        if self.zeros:
            codes = torch.randint(0, 1 << self.bits, shape, dtype=torch.int32, **where)  # type: ignore[call-overload]
            zeros = pack(codes, self.bits)
        if self.k * self.bits % _WORD == 0:  # any word is valid: no codes to hold in memory first
            rows = self.k * self.bits // _WORD
            words = torch.randint(-(2**31), 2**31, (rows, self.n), dtype=torch.int32, **where)  # type: ignore[call-overload]
        else:
            codes = torch.randint(0, 1 << self.bits, (self.k, self.n), dtype=torch.int32, **where)  # type: ignore[call-overload]
            words = pack(codes, self.bits)
        return QuantizedWeight(
            words, scales, bits=self.bits, group_size=self.group_size, in_features=self.k, zeros=zeros
        )

    def rows(self, m: int) -> Tensor:
        """A, ``[m, K]``, standard normal."""
        random = torch.Generator(self.device).manual_seed(m)
        return torch.randn(m, self.k, device=self.device, generator=random).to(self.dtype)

    def weight_bytes(self) -> int:
        """Codes, scales and zeros, with nothing rounded up."""
        per_group = self.dtype.itemsize * 8 + (self.bits if self.zeros else 0)
        return (self.k * self.n * self.bits + self.groups * self.n * per_group) // 8

    def dense_bytes(self) -> int:
        """The same weight in ``dtype``."""
        return self.k * self.n * self.dtype.itemsize

    def moved(self, m: int, weight_bytes: int | None = None) -> int:
        """Bytes of W (``weight_bytes``, or the least), A and C, each moved once."""
        held = self.weight_bytes() if weight_bytes is None else weight_bytes
        return held + (m * self.k + m * self.n) * self.dtype.itemsize

    def flops(self, m: int) -> int:
        """Multiplications and additions."""
        return 2 * m * self.k * self.n
