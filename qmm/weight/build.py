"""What the named constructors do: other ways to hold codes, brought to the arguments of ``QuantizedWeight``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.weight import bitstream
from qmm.weight.facts import has_values
from qmm.weight.spec import WORD_BITS, ZeroKind, dtype_name, words_for
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
    zero_kind: ZeroKind | str | None,
    g_idx: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Packed codes, zeros (packed where they are integers) and int32 g_idx."""
    bits = whole_number(bits, "bits", 1, 8)
    codes = check_codes(codes, "codes_kn", bits)
    if isinstance(zeros, Tensor) and not zeros.dtype.is_floating_point:
        kind = ZeroKind.INT if zero_kind is None else parse_zero_kind(zero_kind)
        if kind is not ZeroKind.BIAS:  # an int8 bias with zero2 stays as it is
            ok = kind is not ZeroKind.FLOAT
            require(ok, "zeros", f"of kind {kind} must have a floating dtype", dtype_name(zeros.dtype))
            zeros = check_codes(zeros, "zeros", bits)
            # once packed, a missing row would read as zero points of 0
            expected, got = [_rows(scales), codes.shape[1]], list(zeros.shape)
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


def gptq_arguments(
    qweight: Tensor,
    qzeros: Tensor | None,
    scales: Tensor,
    g_idx: Tensor | None,
    bits: int,
    group_size: int,
    version: str,
    in_features: int | None,
) -> dict[str, Any]:
    """GPTQ: codes down K as here, zero points along N, minus one in version v1."""
    bits = whole_number(bits, "bits", 1, 8)
    require(bits in (2, 3, 4, 8), "bits", "must be 2, 3, 4 or 8 for GPTQ", bits)
    require(
        version in ("v1", "v2"), "version", "must be 'v1' (zeros stored minus one) or 'v2'", repr(version)
    )
    _words_2d(qweight, "qweight")
    if in_features is None:
        stream = qweight.shape[0] * WORD_BITS
        fits = stream % bits == 0
        require(
            fits,
            "in_features",
            f"must be given where {bits}-bit codes do not fill the rows of qweight",
            "None",
        )
        k = stream // bits
    else:
        k = whole_number(in_features, "in_features", 1)
    group_size = k if is_minus_one(group_size) else whole_number(group_size, "group_size", 1)
    zeros = None
    if qzeros is not None:
        _words_2d(qzeros, "qzeros")
        groups, n = _rows(scales), qweight.shape[1]
        expected, got = [groups, words_for(n, bits)], list(qzeros.shape)
        require(got == expected, "qzeros", f"shape must be [G, N*bits/32] = {expected}", got)
        # packed along N: the transpose is a stream down the rows
        zeros = bitstream.unpack(as_words(qzeros).t().contiguous(), bits, n).t()
        if version == "v1":
            zeros = (zeros + 1) & ((1 << bits) - 1)
        zeros = bitstream.pack(zeros, bits)
    return {
        "qweight": qweight,
        "scales": scales,
        "zeros": zeros,
        "zero_kind": ZeroKind.NONE if zeros is None else ZeroKind.INT,
        "bits": bits,
        "group_size": group_size,
        "in_features": k,
        "g_idx": _drop_identity(narrow_g_idx(g_idx), k, group_size),
    }


def _drop_identity(g_idx: Any, k: int, group_size: int) -> Any:
    """GPTQ files carry ``g_idx = k // group_size`` where there is no act-order."""
    if not isinstance(g_idx, Tensor) or tuple(g_idx.shape) != (k,) or not has_values(g_idx):
        return g_idx
    plain = torch.arange(k, device=g_idx.device, dtype=torch.int32) // group_size
    return None if torch.equal(g_idx, plain) else g_idx


def _rows(scales: Any) -> int:
    require(isinstance(scales, Tensor), "scales", "must be a torch.Tensor", type(scales).__name__)
    require(scales.dim() == 2, "scales", "must have 2 dimensions [G, N]", f"shape {list(scales.shape)}")
    return int(scales.shape[0])


def _words_2d(t: Any, field: str) -> None:
    require(isinstance(t, Tensor), field, "must be a torch.Tensor", type(t).__name__)
    require(t.dtype in (torch.int32, torch.uint32), field, "dtype must be int32", dtype_name(t.dtype))
    if t.dim() != 2:
        raise WeightFormatError(
            f"{field}: must have 2 dimensions (stacks of experts are not supported yet); got shape {list(t.shape)}"
        )
