"""Every rule of the canonical weight, checked once at construction. Each error names field, rule and value."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.weight.bitstream import padding_is_zero
from qmm.weight.spec import FACTOR_BITS, SCALE_DTYPES, UINT4, WeightSpec, ZeroKind, dtype_name, words_for
from qmm.weight.tensors import WeightTensors

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NEED_SECOND = (torch.int8, UINT4)  # integer factors: small steps of a second level
MAX_FEATURES = 2**31 - 1  # codes of one column are indexed in 32 bits


def require(ok: bool, field: str, rule: str, got: object) -> None:
    """Raise ``WeightFormatError`` naming field, rule and value unless ``ok``."""
    if not ok:
        raise WeightFormatError(f"{field}: {rule}; got {got}")


def whole_number(value: object, field: str, low: int, high: int = MAX_FEATURES) -> int:
    """``value`` as an int in ``[low, high]`` (bool is no number here)."""
    try:
        number = value.__index__()  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        number = None
    if isinstance(value, bool) or number is None:
        raise WeightFormatError(f"{field}: must be an integer; got {value!r}")
    require(low <= number <= high, field, f"must be from {low} to {high}", number)
    return int(number)


def is_minus_one(value: object) -> bool:
    """Whether ``value`` is the integer -1 (a float is no number of rows)."""
    return isinstance(value, Integral) and value == -1


def make_spec(
    t: WeightTensors,
    *,
    bits: int,
    group_size: int,
    in_features: int,
    zero_kind: ZeroKind | str | None,
    scale2_ratio: int | None,
    zero2_ratio: int | None,
    scale2_divides: bool,
) -> WeightSpec:
    """Check types, shapes, dtypes and devices (never values) and return the facts.

    Raises:
        WeightFormatError: a rule does not hold.
    """
    for name, value in t._asdict().items():
        if value is None and name not in ("qweight", "scales"):
            continue
        require(isinstance(value, Tensor), name, "must be a torch.Tensor", type(value).__name__)
        require(value.layout is torch.strided, name, "must be a dense strided tensor", value.layout)
        require(
            value.device == t.qweight.device,
            name,
            f"must be on qweight's device {t.qweight.device}",
            value.device,
        )
    bits = whole_number(bits, "bits", 1, 8)
    k = whole_number(in_features, "in_features", 1)
    require(
        t.qweight.dim() == 2,
        "qweight",
        "must have 2 dimensions [words, N] (stacks of experts are not supported yet: build one weight an expert)",
        f"shape {tuple(t.qweight.shape)}",
    )
    require(t.qweight.dtype == torch.int32, "qweight", "dtype must be int32", dtype_name(t.qweight.dtype))
    words, n = t.qweight.shape
    expected = words_for(k, bits)
    require(
        words == expected,
        "qweight",
        f"must have ceil(K*bits/32) = {expected} rows for K={k} and bits={bits}",
        words,
    )
    require(n >= 1, "qweight", "must have at least one column", n)
    group_size = k if is_minus_one(group_size) else whole_number(group_size, "group_size", 1)
    require(t.scales.dim() == 2, "scales", "must have 2 dimensions [G, N]", f"shape {tuple(t.scales.shape)}")
    scale_dtype = factor_dtype(t.scales)
    _dtype(scale_dtype, "scales", SCALE_DTYPES)
    if scale_dtype in _NEED_SECOND:
        what = "int32 words (4-bit scales)" if scale_dtype == UINT4 else "dtype int8"
        require(t.scale2 is not None, "scales", f"of {what} need scale2", "no scale2")
    rows = t.scales.shape[0]
    _shape(t.scales, "scales", (rows, n), "[G, N]")
    if t.g_idx is None:
        groups = -(-k // group_size)
        packed = scale_dtype == UINT4
        wanted, formula = (words_for(groups, FACTOR_BITS), "ceil(G*4/32)") if packed else (groups, "")
        rule = f"must have {formula or 'ceil(K/group_size)'} = {wanted} rows for K={k} and group_size={group_size}"
        require(rows == wanted, "scales", rule, rows)
    else:
        rule = "of 4 bits do not go with g_idx (their words do not tell G)"
        require(scale_dtype != UINT4, "scales", rule, "both")
        require(rows >= 1, "scales", "must have at least one row", rows)
        require(t.g_idx.dtype == torch.int32, "g_idx", "dtype must be int32", dtype_name(t.g_idx.dtype))
        _shape(t.g_idx, "g_idx", (k,), "[K]")
        groups = rows
    require(isinstance(scale2_divides, bool), "scale2_divides", "must be True or False", repr(scale2_divides))
    require(not scale2_divides or t.scale2 is not None, "scale2_divides", "needs scale2", scale2_divides)
    kind = _zero_kind(t, zero_kind)
    _check_zeros(t, kind, bits, groups, n)
    if t.codebook is not None:
        _dtype(t.codebook.dtype, "codebook", FLOAT_DTYPES)
        _shape(t.codebook, "codebook", (1 << bits,), "[2**bits]")
        require(
            kind is ZeroKind.NONE, "zeros", "must be absent when there is a codebook", f"zero kind {kind}"
        )
    return WeightSpec(
        bits=bits,
        group_size=group_size,
        in_features=k,
        out_features=n,
        groups=groups,
        zero_kind=kind,
        scale_dtype=scale_dtype,
        zero_dtype=_zero_dtype(t.zeros, kind),
        scale2_ratio=_second_level(t.scale2, "scale2", scale2_ratio, groups, n),
        zero2_ratio=_second_level(t.zero2, "zero2", zero2_ratio, groups, n),
        codebook_dtype=None if t.codebook is None else t.codebook.dtype,
        act_order=t.g_idx is not None,
        scale2_divides=scale2_divides,
    )


def factor_dtype(stored: Tensor) -> torch.dtype:
    """dtype of first-level factors: int32 words hold eight of 4 bits each."""
    return UINT4 if stored.dtype == torch.int32 else stored.dtype


def _zero_dtype(zeros: Tensor | None, kind: ZeroKind) -> torch.dtype | None:
    if zeros is None:
        return None
    return factor_dtype(zeros) if kind is ZeroKind.BIAS else zeros.dtype


def check_values(t: WeightTensors, spec: WeightSpec) -> None:
    """The rules about values; not to be called on meta or fake tensors. Synchronises.

    Raises:
        WeightFormatError: a rule does not hold.
    """
    require(
        padding_is_zero(t.qweight, spec.bits, spec.in_features),
        "qweight",
        f"bits past code {spec.in_features - 1} must be 0",
        "set bits in the last row of words",
    )
    packed: list[tuple[str, Tensor | None, int, str]] = []
    if spec.scale_dtype == UINT4:
        packed.append(("scales", t.scales, FACTOR_BITS, "scale"))
    if spec.zero_kind is ZeroKind.INT:
        packed.append(("zeros", t.zeros, spec.bits, "zero point"))
    elif spec.zero_dtype == UINT4:
        packed.append(("zeros", t.zeros, FACTOR_BITS, "bias"))
    for name, words, bits, what in packed:
        assert words is not None
        rule = f"bits past {what} {spec.groups - 1} must be 0"
        require(padding_is_zero(words, bits, spec.groups), name, rule, "set bits in the last row of words")
    if t.g_idx is not None:
        low, high = (int(v) for v in torch.aminmax(t.g_idx))
        require(low >= 0, "g_idx", f"must be in [0, G) with G={spec.groups} rows of scales", low)
        require(high < spec.groups, "g_idx", f"must be in [0, G) with G={spec.groups} rows of scales", high)


def has_even_groups(g_idx: Tensor | None, spec: WeightSpec) -> bool:
    """Whether group g has the rows that it has without act-order: ``group_size``, or what is left for the last.

    ``g_idx`` is None where there is none, or no values of it are known. Synchronises.
    """
    if g_idx is None:
        return not spec.act_order
    rows = torch.bincount(g_idx, minlength=spec.groups)
    first = torch.arange(rows.numel(), device=rows.device) * spec.group_size
    return bool(torch.equal(rows, (spec.in_features - first).clamp(0, spec.group_size)))


def parse_zero_kind(given: object) -> ZeroKind:
    """``given`` as a :class:`ZeroKind`."""
    try:
        return ZeroKind(given)
    except ValueError:
        raise WeightFormatError(
            f"zero_kind: must be one of {', '.join(k.value for k in ZeroKind)}; got {given!r}"
        ) from None


def _zero_kind(t: WeightTensors, given: ZeroKind | str | None) -> ZeroKind:
    if given is not None:
        kind = parse_zero_kind(given)
    elif t.zeros is None:
        kind = ZeroKind.NONE
    else:
        kind = ZeroKind.FLOAT if t.zeros.dtype.is_floating_point else ZeroKind.INT
    present = t.zeros is not None
    require(
        present == (kind is not ZeroKind.NONE),
        "zeros",
        f"must be {'absent' if present else 'given'} for zero kind {kind}",
        "a tensor" if present else "None",
    )
    return kind


def _check_zeros(t: WeightTensors, kind: ZeroKind, bits: int, groups: int, n: int) -> None:
    require(
        t.zero2 is None or kind is ZeroKind.BIAS, "zero2", "needs zeros of kind bias", f"zero kind {kind}"
    )
    if t.zeros is None:
        return
    dtype = t.zeros.dtype
    if kind is ZeroKind.INT:
        require(dtype == torch.int32, "zeros", "of kind int must be packed int32 words", dtype_name(dtype))
        _shape(t.zeros, "zeros", (words_for(groups, bits), n), "[ceil(G*bits/32), N]")
        return
    allowed: tuple[torch.dtype, ...] = FLOAT_DTYPES
    if kind is ZeroKind.BIAS and t.zero2 is not None:
        allowed, dtype = (*FLOAT_DTYPES, *_NEED_SECOND), factor_dtype(t.zeros)
    require(dtype in allowed, "zeros", f"of kind {kind} must have dtype {_names(allowed)}", dtype_name(dtype))
    if dtype == UINT4:
        _shape(t.zeros, "zeros", (words_for(groups, FACTOR_BITS), n), "[ceil(G*4/32), N]")
    else:
        _shape(t.zeros, "zeros", (groups, n), "[G, N]")


def _second_level(second: Tensor | None, field: str, ratio: int | None, groups: int, n: int) -> int | None:
    if second is None:
        require(ratio is None, f"{field}_ratio", f"needs {field}", ratio)
        return None
    require(second.dtype == torch.float32, field, "dtype must be float32", dtype_name(second.dtype))
    if tuple(second.shape) == (1,):
        require(ratio in (None, 0), f"{field}_ratio", f"must be 0 or None for {field} of shape [1]", ratio)
        return 0
    require(second.dim() == 2, field, "must have shape [1] or [ceil(G/r), N]", f"shape {tuple(second.shape)}")
    rows = second.shape[0]
    if ratio is None:
        require(
            rows > 0 and groups % rows == 0,
            f"{field}_ratio",
            f"must be given where the rows of {field} do not divide G={groups}",
            f"{rows} rows",
        )
        ratio = groups // rows
    ratio = whole_number(ratio, f"{field}_ratio", 1)
    _shape(second, field, (-(-groups // ratio), n), f"[ceil(G/{ratio}), N]")
    return ratio


def _shape(t: Tensor, field: str, expected: tuple[int, ...], meaning: str) -> None:
    require(tuple(t.shape) == expected, field, f"shape must be {meaning} = {list(expected)}", list(t.shape))


def _dtype(got: torch.dtype, field: str, allowed: tuple[torch.dtype, ...]) -> None:
    require(got in allowed, field, f"dtype must be one of {_names(allowed)}", dtype_name(got))


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(dtype_name(d) for d in dtypes)
