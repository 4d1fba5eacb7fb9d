"""Cases: small dataclasses that name one combination of features, and the random inputs that go with them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qmm.backend import ACTIVATIONS
from qmm.weight import QuantizedWeight, ZeroKind, bitstream
from qmm.weight.spec import FACTOR_BITS, SCALE_DTYPES, UINT4, dtype_name

_INTEGERS = (torch.int8, UINT4)  # scales that need a second level
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """One combination of facts; ``str()`` is its test id.

    Example:
        >>> from qmm.testing import Case
        >>> print(Case(m=1, n=577, k=859, group_size=128))
        int4-g128-m1-k859-n577-fp16-int
    """

    m: int = 3
    n: int = 21
    k: int = 70
    bits: int = 4
    group_size: int = 32
    dtype: torch.dtype = HALF
    zero_kind: ZeroKind = ZeroKind.INT
    scale_dtype: torch.dtype = HALF
    two_level: str | None = None  # "one" factor, or "rows" of factors
    divides: bool = False  # the second level of the scales divides
    codebook: torch.dtype | None = None
    act_order: bool | str = False  # "even": each group has group_size rows, but for a short last one
    bias: torch.dtype | None = None
    activation: str | None = None

    def __str__(self) -> str:
        kind = (
            "cb" if self.codebook else {"none": "sym", "int": "int"}.get(self.zero_kind, str(self.zero_kind))
        )
        parts = [f"int{self.bits}", f"g{self.group_size}", f"m{self.m}", f"k{self.k}", f"n{self.n}"]
        parts += [_SHORT[self.dtype], kind]
        if self.scale_dtype != HALF:
            parts.append("s" + dtype_name(self.scale_dtype))
        if self.two_level:
            parts.append(("div" if self.divides else "two") + self.two_level)
        if self.act_order:
            parts.append("act" if self.act_order is True else f"act{self.act_order}")
        if self.bias:
            parts.append("b" + dtype_name(self.bias))
        if self.activation:
            parts.append(self.activation)
        return "-".join(parts)

    @property
    def seed(self) -> int:
        """The same numbers for the same case, on every machine."""
        return zlib.crc32(str(self).encode())


@dataclass
class Inputs:
    """Operands of one case.

    Example:
        >>> from qmm.testing import Case, make_inputs
        >>> x = make_inputs(Case(m=2, n=8, k=64))
        >>> x.a.shape, x.w.shape, x.bias
        (torch.Size([2, 64]), (64, 8), None)
    """

    a: Tensor
    w: QuantizedWeight
    bias: Tensor | None


def make_inputs(case: Case, device: torch.device | str = "cpu", *, exact: bool = False) -> Inputs:
    """Random operands of ``case``: zero-mean A; with ``exact`` integers and powers of two whose sums are all exact.

    Example:
        >>> from qmm.testing import Case, make_inputs
        >>> make_inputs(Case(m=2, n=8, k=64), exact=True).a.unique().tolist()
        [-2.0, -1.0, 0.0, 1.0, 2.0]
    """
    rng = np.random.default_rng(case.seed)
    w = make_weight(case, rng, exact=exact)
    if exact:
        a = rng.integers(-2, 3, (case.m, case.k)).astype(np.float64)
    else:
        a = rng.standard_normal((case.m, case.k))
    bias = None if case.bias is None else torch.from_numpy(rng.standard_normal(case.n)).to(device, case.bias)
    return Inputs(torch.from_numpy(a).to(device, case.dtype), w.to(device), bias)


def make_weight(case: Case, rng: np.random.Generator, *, exact: bool = False) -> QuantizedWeight:
    """The weight of ``case`` on the CPU.

    Example:
        >>> import numpy as np
        >>> from qmm.testing import Case, make_weight
        >>> print(make_weight(Case(n=8, k=64), np.random.default_rng(0)).spec)
        K=64, N=8, int4, group 32, scales float16, zeros int
    """
    k, n, top = case.k, case.n, (1 << case.bits) - 1
    group = k if case.group_size == -1 else case.group_size
    groups = -(-k // group)
    codes = torch.from_numpy(rng.integers(0, top + 1, (k, n)))
    extra: dict[str, Any] = {}
    if case.act_order:
        rows = rng.permutation(k)
        extra["g_idx"] = torch.from_numpy(rows // group if case.act_order == "even" else rows % groups)
    if case.codebook is not None:
        values = rng.integers(-2, 3, top + 1) if exact else np.sort(rng.uniform(-1, 1, top + 1))
        extra["codebook"] = torch.from_numpy(np.asarray(values, np.float64)).to(case.codebook)
    scales, extra["scale2"], extra["scale2_ratio"] = _factors(case, rng, groups, exact, case.scale_dtype)
    extra["scale2_divides"] = case.divides
    zeros = None
    if case.zero_kind is ZeroKind.INT:
        zeros = torch.from_numpy(rng.integers(0, top + 1, (groups, n)))
    elif case.zero_kind is ZeroKind.FLOAT:
        values = rng.integers(0, top + 1, (groups, n)) if exact else rng.uniform(0, top, (groups, n))
        zeros = torch.from_numpy(np.asarray(values, np.float64)).to(HALF)
    elif case.zero_kind is ZeroKind.BIAS:
        dtype = case.scale_dtype if case.scale_dtype in _INTEGERS else HALF
        zeros, extra["zero2"], extra["zero2_ratio"] = _factors(case, rng, groups, exact, dtype)
        zeros = -zeros if dtype == HALF else zeros
    kind = None if case.codebook is not None else case.zero_kind
    return QuantizedWeight.from_codes(
        codes, scales, zeros, bits=case.bits, group_size=case.group_size, zero_kind=kind, **extra
    )


def _factors(
    case: Case, rng: np.random.Generator, groups: int, exact: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, int | None]:
    shape = (groups, case.n)
    powers = 2.0 ** rng.integers(-1, 2, shape)
    if dtype == torch.int8:
        first = torch.from_numpy(powers * 2 if exact else rng.integers(1, 64, shape)).to(dtype)
    elif dtype == UINT4:  # eight in a word
        first = bitstream.pack(
            torch.from_numpy(powers * 2 if exact else rng.integers(0, 16, shape)), FACTOR_BITS
        )
    elif exact or dtype_name(dtype) == "float8_e8m0fnu":
        first = torch.from_numpy(powers).to(dtype)
    else:
        first = torch.from_numpy(rng.uniform(0.005, 0.02, shape)).to(dtype)
    if case.two_level is None:
        return first, None, None
    if case.two_level == "one":
        return first, torch.tensor([0.5 if exact else 0.37]), 0
    ratio = 2
    rows = (-(-groups // ratio), case.n)
    second = 2.0 ** rng.integers(-1, 1, rows) if exact else rng.uniform(0.01, 0.9, rows)
    return first, torch.from_numpy(np.asarray(second)).to(FLOAT), ratio


def _features() -> list[Case]:
    found: list[Case] = []
    for bits in range(1, 9):  # every width with every kind of zero, dtypes and group sizes rotating
        for i, kind in enumerate(ZeroKind):
            dtype = (HALF, BF16, FLOAT)[(bits + i) % 3]
            group = (32, 16, 64, -1, 8, 24)[(bits + 2 * i) % 6]
            found.append(Case(bits=bits, zero_kind=kind, dtype=dtype, group_size=group))
        found.append(Case(bits=bits, act_order=True, zero_kind=tuple(ZeroKind)[bits % 4], m=2, group_size=16))
        found.append(
            Case(
                bits=bits,
                codebook=(FLOAT, HALF, BF16)[bits % 3],
                zero_kind=ZeroKind.NONE,
                act_order=bits % 2 == 0,
            )
        )
    for m, k, bits, group, kind in (
        (2, 100, 4, 32, ZeroKind.INT), (17, 130, 8, 64, ZeroKind.FLOAT), (3, 96, 4, -1, ZeroKind.NONE)
    ):  # fmt: skip
        found.append(Case(m=m, k=k, bits=bits, group_size=group, zero_kind=kind, act_order="even"))
    for i, scale in enumerate(SCALE_DTYPES):  # every scale dtype with every dtype of A
        two = "one" if scale in _INTEGERS else None
        for dtype in (HALF, BF16, FLOAT):
            kind = tuple(ZeroKind)[i % 4]
            found.append(Case(scale_dtype=scale, dtype=dtype, two_level=two, m=2, n=9, k=40, zero_kind=kind))
    for two in ("one", "rows"):
        for scale in (HALF, torch.float8_e4m3fn, torch.int8, UINT4):
            found.append(
                Case(two_level=two, scale_dtype=scale, k=100, group_size=16, m=2, zero_kind=ZeroKind.BIAS)
            )
        found.append(Case(two_level=two, k=72, group_size=16, zero_kind=ZeroKind.NONE, bits=6))
        for dtype in (HALF, BF16, FLOAT):  # NVFP4 of compressed-tensors divides
            e4m3 = Case(two_level=two, divides=True, scale_dtype=torch.float8_e4m3fn, k=72, group_size=16)
            found.append(replace(e4m3, dtype=dtype, codebook=FLOAT, zero_kind=ZeroKind.NONE))
    for i, activation in enumerate((None, *ACTIVATIONS)):
        for j, dtype in enumerate((HALF, BF16, FLOAT)):
            bias = (HALF, BF16, FLOAT, torch.float64)[(i + j) % 4]
            found.append(Case(activation=activation, bias=bias, dtype=dtype, m=2, n=17, k=33))
    found.append(Case(activation="silu"))
    return found


def _shapes() -> list[Case]:
    found = [Case(m=0), Case(m=0, dtype=BF16, n=1, k=1)]
    for m, n, k, group in (
        (1, 1, 1, 1),
        (1, 8, 16, 8),
        (1, 64, 96, 32),  # splits past the end of K
        (1, 40, 160, 32),  # a last K step that is not full
        (2, 48, 96, 32),
        (3, 24, 72, -1),
        (5, 40, 72, 7),
        (17, 16, 16, 16),
        (2, 33, 31, 128),  # a group longer than K
        (4, 64, 128, 1),
        (13, 7, 59, 3),
        (6, 19, 101, 25),  # a short last group
    ):
        found.append(Case(m=m, n=n, k=k, group_size=group))
    return [*found, Case(m=1, n=37, k=59, bits=3, group_size=20), Case(m=1, n=19, k=257, bits=8, dtype=BF16)]


def _aligned() -> list[Case]:
    """Larger shapes, for machines with a GPU."""
    found = []
    for m in (1, 2, 8, 16, 17, 33, 64, 100, 256, 512):
        dtype = BF16 if m in (2, 33, 256) else HALF
        found.append(Case(m=m, n=512, k=1024, group_size=128, dtype=dtype, zero_kind=ZeroKind.NONE))
    for bits in range(1, 9):
        found.append(Case(m=5, n=577, k=859, bits=bits, group_size=128))
        found.append(
            Case(m=130, n=256, k=512, bits=bits, group_size=64, dtype=BF16, zero_kind=ZeroKind.FLOAT)
        )
    found.append(Case(m=1, n=4096, k=4096, group_size=128, zero_kind=ZeroKind.NONE))
    found.append(Case(m=64, n=1024, k=2880, group_size=32, act_order=True))
    for m in (1, 4, 12, 40, 300):  # rows sorted by group, A gathered
        for bits, k, group in ((4, 1024, 128), (4, 1000, 32), (8, 859, 64)):
            dtype = BF16 if k == 1000 else HALF
            found.append(Case(m=m, n=200, k=k, bits=bits, group_size=group, dtype=dtype, act_order="even"))
    found.append(Case(m=300, n=128, k=384, group_size=32, dtype=FLOAT, bias=FLOAT, activation="gelu"))
    return found


CASES: tuple[Case, ...] = tuple(dict.fromkeys([*_shapes(), *_features()]))
LARGE_CASES: tuple[Case, ...] = tuple(_aligned())


def _exact() -> tuple[Case, ...]:
    found = []
    for i, (bits, k, group) in enumerate(
        [
            (4, 96, 32),
            (8, 40, 8),
            (2, 130, -1),
            (3, 65, 16),
            (5, 33, 64),
            (6, 50, 20),
            (7, 47, 16),
            (1, 64, 32),
        ]
    ):
        for j, dtype in enumerate((HALF, BF16, FLOAT)):
            kind = tuple(ZeroKind)[(i + j) % 4]
            if kind is ZeroKind.BIAS and dtype == BF16 and bits > 6:
                kind = ZeroKind.FLOAT  # s*q + b would take more than bf16's 8 bits
            found.append(
                Case(
                    m=4,
                    n=18,
                    k=k,
                    bits=bits,
                    group_size=group,
                    dtype=dtype,
                    zero_kind=kind,
                    act_order=j == i % 3,
                )
            )
    return tuple(found)


EXACT_CASES: tuple[Case, ...] = _exact()
