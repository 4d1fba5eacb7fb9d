"""What the named constructors do: other ways to hold codes, brought to the arguments of ``QuantizedWeight``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.weight import bitstream
from qmm.weight.facts import has_values
from qmm.weight.spec import WORD_BITS, ZeroKind, dtype_name
from qmm.weight.store import same_storage
from qmm.weight.tensors import WeightTensors
from qmm.weight.validate import is_minus_one, parse_zero_kind, require, whole_number

unpack = bitstream.unpack
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = {
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}  # torch lacks most ops


def as_words(t: Any) -> Any:
    """uint32 words viewed as int32 (torch has no shifts for uint32); anything else as it is."""
    return t.view(torch.int32) if isinstance(t, Tensor) and t.dtype == torch.uint32 else t


def own_storage(t: WeightTensors) -> WeightTensors:
    """Detached and contiguous tensors, no two in one storage, copied only where that does not hold already."""
    kept: list[Tensor] = []
    result: dict[str, Tensor] = {}
    for name, value in t.present().items():
        own = value.detach().resolve_neg().contiguous()
        if any(same_storage(own, other) for other in kept):
            own = own.clone()
        kept.append(own)
        result[name] = own
    return WeightTensors(**result)


def check_codes(codes: Any, field: str, bits: int) -> Tensor:
    """Integers ``[R, N]`` in ``[0, 2**bits)``, of a dtype that torch can work with.

    Raises:
        WeightFormatError: otherwise.
    """
    require(isinstance(codes, Tensor), field, "must be a torch.Tensor", type(codes).__name__)
    shape = f"shape {list(codes.shape)}"
    require(
        codes.dim() == 2, field, "must have 2 dimensions (stacks of experts are not supported yet)", shape
    )
    codes = widen(codes)
    require(codes.dtype in _INTEGERS, field, "must have an integer dtype", dtype_name(codes.dtype))
    if codes.numel() and has_values(codes):
        low, high = (int(v) for v in torch.aminmax(codes))
        top = (1 << bits) - 1
        require(low >= 0, field, f"must be in [0, {top}] for bits={bits}", low)
        require(high <= top, field, f"must be in [0, {top}] for bits={bits}", high)
    checked: Tensor = codes
    return checked


def widen(t: Tensor) -> Tensor:
    """Wide unsigned integers as signed ones (uint64 past int64 becomes negative, which no field may be)."""
    return t.to(_UNSIGNED[t.dtype]) if t.dtype in _UNSIGNED else t


def pack_codes(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group_size: int,
    zero_kind: ZeroKind | str | None,
    g_idx: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Packed codes, zeros (packed where they are integers) and int32 g_idx."""
    bits = whole_number(bits, "bits", 1, 8)
    codes = check_codes(codes, "codes_kn", bits)
    if isinstance(zeros, Tensor) and not zeros.dtype.is_floating_point:
        kind = ZeroKind.INT if zero_kind is None else parse_zero_kind(zero_kind)
        if kind is not ZeroKind.BIAS:  # integer biases with zero2 stay as they are
            ok = kind is not ZeroKind.FLOAT
            require(ok, "zeros", f"of kind {kind} must have a floating dtype", dtype_name(zeros.dtype))
            zeros = check_codes(zeros, "zeros", bits)
            # once packed, a missing row would read as zero points of 0
            expected = [_groups(scales, codes.shape[0], group_size), codes.shape[1]]
            got = list(zeros.shape)
            require(got == expected, "zeros", f"shape must be [G, N] = {expected}", got)
            zeros = bitstream.pack(zeros, bits)
    return bitstream.pack(codes, bits), zeros, narrow_g_idx(g_idx)


def narrow_g_idx(g_idx: Any) -> Any:
    """Integer g_idx as int32, range kept (a value past int32 is refused, not wrapped)."""
    if not isinstance(g_idx, Tensor) or g_idx.dtype == torch.int32:
        return g_idx
    g_idx = widen(g_idx)
    require(g_idx.dtype in _INTEGERS, "g_idx", "must have an integer dtype", dtype_name(g_idx.dtype))
    if g_idx.numel() and has_values(g_idx):
        low, high = (int(v) for v in torch.aminmax(g_idx))
        require(low >= -(2**31) and high < 2**31, "g_idx", "must fit int32", f"values from {low} to {high}")
    return g_idx.to(torch.int32)


def seed_arguments(
    qw: Tensor, scales: Tensor, qzeros: Tensor | None, w_bit: int, group_size: int
) -> dict[str, Any]:
    """Seed layout: the canonical one for widths that divide 32."""
    w_bit = whole_number(w_bit, "w_bit", 1, 8)
    require(WORD_BITS % w_bit == 0, "w_bit", "must be 1, 2, 4 or 8 (a whole number of codes a word)", w_bit)
    _words_2d(qw, "qw")
    return {
        "qweight": qw,
        "scales": scales,
        "zeros": qzeros,
        "zero_kind": ZeroKind.NONE if qzeros is None else ZeroKind.INT,
        "bits": w_bit,
        "group_size": group_size,
        "in_features": qw.shape[0] * (WORD_BITS // w_bit),
    }


def _groups(scales: Any, k: int, group_size: int) -> int:
    """G by the rows of scales; packed ones leave it to K."""
    require(isinstance(scales, Tensor), "scales", "must be a torch.Tensor", type(scales).__name__)
    require(scales.dim() == 2, "scales", "must have 2 dimensions [G, N]", f"shape {list(scales.shape)}")
    if scales.dtype != torch.int32:
        return int(scales.shape[0])
    return 1 if is_minus_one(group_size) else -(-k // whole_number(group_size, "group_size", 1))


def _words_2d(t: Any, field: str) -> None:
    require(isinstance(t, Tensor), field, "must be a torch.Tensor", type(t).__name__)
    require(t.dtype in (torch.int32, torch.uint32), field, "dtype must be int32", dtype_name(t.dtype))
    if t.dim() != 2:
        raise WeightFormatError(
            f"{field}: must have 2 dimensions (stacks of experts are not supported yet); got shape {list(t.shape)}"
        )
