"""Canonical weight -> real numbers, in float32 from the stored dtypes, one block of columns at a time.

``W = (q - z) * s``, ``W = s * q + b`` (bias zeros) or ``W = codebook[q] * s``, with ``s = float32(scales) * scale2``
(or divided by it).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qmm.weight.bitstream import unpack
from qmm.weight.spec import FACTOR_BITS, WeightSpec, ZeroKind
from qmm.weight.tensors import WeightTensors

# Temporaries of one block per code: int32 while unpacking, uint8 codes, the float32 result, and the scale and zero
# of each row where groups are irregular; with a codebook an int64 index instead.
BYTES_PER_CODE = 20
_BOUND_FACTORS = 1 << 17  # scales that magnitude_bound looks at together


def dequantize_columns(t: WeightTensors, spec: WeightSpec, start: int, stop: int) -> Tensor:
    """Columns ``[start, stop)`` of the weight as float32 ``[K, stop - start]``.

    Extra memory is at most ``BYTES_PER_CODE`` bytes for each of the ``K * (stop - start)`` codes.
    """
    q = unpack(t.qweight[:, start:stop], spec.bits, spec.in_features)
    scale = effective_scales(t, spec, start, stop)
    if t.codebook is not None:
        w = t.codebook.float()[q.long()]
        return per_group(w, scale, spec, t.g_idx, torch.Tensor.mul_)
    w = q.float()
    if spec.zero_kind is ZeroKind.NONE:
        w.sub_(spec.midpoint)
    elif spec.zero_kind is not ZeroKind.BIAS:
        assert t.zeros is not None
        zero = t.zeros[:, start:stop]
        zero = (
            unpack(zero, spec.bits, spec.groups).float() if spec.zero_kind is ZeroKind.INT else zero.float()
        )
        w = per_group(w, zero, spec, t.g_idx, torch.Tensor.sub_)
    w = per_group(w, scale, spec, t.g_idx, torch.Tensor.mul_)
    if spec.zero_kind is ZeroKind.BIAS:
        assert t.zeros is not None
        bias = effective(t.zeros[:, start:stop], columns(t.zero2, start, stop), spec.zero2_ratio, spec.groups)
        w = per_group(w, bias, spec, t.g_idx, torch.Tensor.add_)
    return w


def effective_scales(t: WeightTensors, spec: WeightSpec, start: int, stop: int) -> Tensor:
    """The scales used in columns ``[start, stop)``, both levels as one: float32 ``[G, stop - start]``."""
    second = columns(t.scale2, start, stop)
    return effective(
        t.scales[:, start:stop], second, spec.scale2_ratio, spec.groups, divide=spec.scale2_divides
    )


def effective(
    first: Tensor, second: Tensor | None, ratio: int | None, groups: int, *, divide: bool = False
) -> Tensor:
    """First-level factors as stored, times (or divided by) the second level: float32 ``[G, N]``."""
    value = unpack_factors(first, groups).float()
    if second is None or ratio is None:
        return value
    if ratio != 0:
        second = second[torch.arange(value.shape[0], device=value.device) // ratio]
    return value / second if divide else value * second


def unpack_factors(first: Tensor, groups: int) -> Tensor:
    """First-level factors ``[G, N]``: 4-bit ones out of their words as uint8, others as they are."""
    return unpack(first, FACTOR_BITS, groups) if first.dtype == torch.int32 else first


def columns(second: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Columns of a second-level factor; one factor for the whole weight stays as it is."""
    return second if second is None or second.dim() == 1 else second[:, start:stop]


def per_group(w: Tensor, value: Tensor, spec: WeightSpec, g_idx: Tensor | None, op) -> Tensor:  # type: ignore[no-untyped-def]
    """Apply the in-place ``op`` with each row's group value; returns ``w``."""
    whole = spec.in_features // spec.group_size * spec.group_size
    if g_idx is not None:
        op(w, value[g_idx])
        return w
    if whole:
        op(w[:whole].view(-1, spec.group_size, w.shape[1]), value[: whole // spec.group_size, None])
    if whole < spec.in_features:  # the short last group
        op(w[whole:], value[-1])
    return w


def magnitude_bound(t: WeightTensors, spec: WeightSpec) -> float:
    """An upper bound on ``|W|`` (NaN where a scale is NaN). Reads the group factors, not the codes; synchronises.

    Some columns at a time, so that the peak of loading a weight is the weight.
    """
    if t.scales.numel() == 0:
        return 0.0
    step = max(1, _BOUND_FACTORS // spec.groups)
    starts = range(0, spec.out_features, step)
    bounds = torch.empty(len(starts), device=t.scales.device, dtype=torch.float32)
    for i, start in enumerate(starts):
        bounds[i] = _bound_of_columns(t, spec, start, start + step)
    return float(bounds.max())


def _bound_of_columns(t: WeightTensors, spec: WeightSpec, start: int, stop: int) -> Tensor:
    scale = effective_scales(t, spec, start, stop).abs()
    top = (1 << spec.bits) - 1
    if t.codebook is not None:
        values = t.codebook.float().abs()
        bound = scale * values.masked_fill(values.isnan(), 0).max()  # e4m3 has NaN, which no dtype lacks
    elif spec.zero_kind is ZeroKind.NONE:
        bound = scale * spec.midpoint
    elif spec.zero_kind is ZeroKind.INT:
        bound = scale * top
    else:
        assert t.zeros is not None
        stored = t.zeros[:, start:stop]
        if spec.zero_kind is ZeroKind.FLOAT:
            zero = stored.float()
            bound = scale * torch.maximum(zero.abs(), (top - zero).abs())
        else:
            second = columns(t.zero2, start, stop)
            bound = scale * top + effective(stored, second, spec.zero2_ratio, spec.groups).abs()
    return bound.max()
