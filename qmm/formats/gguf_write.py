"""Weight -> the factors of a GGUF block type, or an error that says which field the type cannot hold."""

from __future__ import annotations

import torch
from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.formats.gguf_blocks import BlockType
from qmm.formats.gguf_levels import E8M0, Factors
from qmm.weight import QuantizedWeight, ZeroKind
from qmm.weight.dequantize import unpack_factors


def factors_of(w: QuantizedWeight, kind: BlockType) -> Factors:
    """Factors ``[N, B, g]`` / ``[N, B]`` on the CPU, in the dtypes and ranges of ``kind``.

    Raises:
        WeightFormatError: the type cannot hold this weight exactly.
    """
    _check_facts(w, kind)
    t, n = w.tensors, w.out_features
    repeat = w.group_size // kind.group

    def rows(value: Tensor, field: str, bounds: tuple[int, int] | None) -> Tensor:
        value = value.cpu()
        if value.dtype == torch.int32:
            value = unpack_factors(value, w.spec.groups).view(torch.int8)
        stored = (
            _as_e8m0(value, kind) if "e" in dict(kind.fields) else _first_level(value, field, kind, bounds)
        )
        # 8-bit floats are repeated and transposed as bytes: torch has no such kernels for them
        plain = stored.view(torch.uint8) if stored.element_size() == 1 else stored
        # the last group of a long group size may be cut by K, never inside a block (K is whole blocks)
        wide = plain.repeat_interleave(repeat, 0)[: w.in_features // kind.group].t().contiguous()
        return wide.view(stored.dtype).view(n, -1, kind.groups)

    def second(value: Tensor | None, field: str) -> Tensor | None:
        return None if value is None else _as_half(value.cpu(), field, kind).float().t().contiguous()

    scale = rows(t.scales, "scales", kind.levels.scale_range)
    zero = None if t.zeros is None else rows(t.zeros, "zeros", kind.levels.zero_range)
    return Factors(scale, zero, second(t.scale2, "scale2"), second(t.zero2, "zero2"))


def _check_facts(w: QuantizedWeight, kind: BlockType) -> None:
    s = w.spec

    def need(ok: bool, field: str, rule: str, got: object) -> None:
        if not ok:
            raise WeightFormatError(f"{field}: must be {rule} to be written as {kind.name}; got {got}")

    need(s.bits == kind.bits, "bits", str(kind.bits), s.bits)
    need(s.in_features % kind.size == 0, "in_features", f"a multiple of {kind.size}", s.in_features)
    need(not s.act_order, "g_idx", "absent", "act-order")
    need(s.zero_kind is kind.zero_kind, "zeros", f"of kind {kind.zero_kind}", f"kind {s.zero_kind}")
    book = w.tensors.codebook
    if kind.codebook is None:
        need(book is None, "codebook", "absent", "a codebook")
    else:
        same = book is not None and book.float().cpu().tolist() == list(kind.codebook)
        need(
            same,
            "codebook",
            f"{kind.name}'s {list(kind.codebook)}",
            "none" if book is None else "another one",
        )
    if kind.two_level:
        need(s.group_size == kind.group, "group_size", str(kind.group), s.group_size)
        need(s.scale2_ratio == kind.groups, "scale2_ratio", str(kind.groups), s.scale2_ratio)
        need(not s.scale2_divides, "scale2_divides", "False", True)
        wanted = kind.groups if kind.zero_kind is ZeroKind.BIAS else None
        need(s.zero2_ratio == wanted, "zero2_ratio", str(wanted), s.zero2_ratio)
    else:
        need(s.group_size % kind.group == 0, "group_size", f"a multiple of {kind.group}", s.group_size)
        need(s.scale2_ratio is None, "scale2", "absent", "two-level scales")
        need(s.zero2_ratio is None, "zero2", "absent", "two-level zeros")


def _first_level(value: Tensor, field: str, kind: BlockType, bounds: tuple[int, int] | None) -> Tensor:
    if bounds is None:
        return _as_half(value, field, kind)
    if value.dtype != torch.int8:
        raise WeightFormatError(
            f"{field}: dtype must be int8 to be written as {kind.name}; got {value.dtype}"
        )
    (low, high), (least, most) = (int(v) for v in value.aminmax()), bounds
    if low < least or high > most:
        got = low if low < least else high
        raise WeightFormatError(
            f"{field}: must be from {least} to {most} to be written as {kind.name}; got {got}"
        )
    return value


def _as_half(value: Tensor, field: str, kind: BlockType) -> Tensor:
    wide = value.float()
    half = wide.half()
    differs = (half.float() != wide) & ~wide.isnan()
    if bool(differs.any()):
        first = float(wide[differs][0])
        raise WeightFormatError(
            f"{field}: each value must be a float16 to be written as {kind.name}; got {first!r}"
        )
    return value if value.dtype == torch.float16 else half


def _as_e8m0(value: Tensor, kind: BlockType) -> Tensor:
    if value.dtype == E8M0:
        return value
    wide = value.float()
    mantissa, exponent = torch.frexp(wide)
    wrong = ~wide.isnan() & ((mantissa != 0.5) | (exponent < -126))
    if bool(wrong.any()):
        got = float(wide[wrong][0])
        raise WeightFormatError(
            f"scales: each must be a power of two from 2**-127 on to be written as {kind.name}; got {got!r}"
        )
    return wide if E8M0 is None else wide.to(E8M0)
