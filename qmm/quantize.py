"""Round-to-nearest quantisation: ``q = clamp(round(w / s) + z, 0, 2**bits - 1)`` with one ``s`` (and ``z``) a group.

``minmax`` takes the smallest scale that clips nothing. ``mse`` starts there and moves the scale (and the zero point),
mostly down, clipping the largest values, wherever that lowers the group's squared error. Codes are always taken
against the scale as stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qmm.weight import QuantizedWeight, bitstream
from qmm.weight.facts import has_values
from qmm.weight.spec import dtype_name, words_for
from qmm.weight.validate import FLOAT_DTYPES, is_minus_one, whole_number

METHODS = ("minmax", "mse")
_BLOCK = {"cpu": 1 << 20}  # weights in work at a time: about ten float32 temporaries of this size
_DEFAULT_BLOCK = 1 << 23
_FACTORS = tuple(f / 50 for f in range(56, 14, -1))  # mse tries minmax's scale times 1.12 down to 0.3
_REFITS = 2  # and then fits scale (and zero point) to the codes by least squares, so many times
# Smallest scale stored. Subnormals of bfloat16 and float32 are avoided, since GPU code may flush them to 0.
_SMALLEST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}


def quantize(
    weight_nk: Tensor,
    *,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = True,
    method: str = "minmax",
    scale_dtype: torch.dtype | None = None,
) -> QuantizedWeight:
    """Quantise a matrix by rounding to nearest, one scale for each ``group_size`` values of a row.

    Args:
        weight_nk: ``[N, K]`` = ``[out_features, in_features]``, as ``nn.Linear.weight``; float32, float16 or
            bfloat16, any device and strides. Parameters are taken detached.
        bits: bits of a code, 1 to 8 (2 to 8 where symmetric).
        group_size: values of K that share a scale; -1 means K. A short last group uses its own values only.
        symmetric: zero is code ``2**(bits-1)``, nothing else is stored (zero kind ``none``). False: an integer zero
            point for each group (kind ``int``); the range is widened to hold 0, which is then exact.
        method: ``"minmax"``, the smallest scale that clips nothing; ``"mse"``, the best found among 42 factors (1.12
            down to 0.3 in steps of 0.02, with the zero point and its two neighbours where asymmetric) and two
            least-squares fits: never a larger squared error than ``minmax`` in any group, for about 50 (asymmetric:
            130) times its work.
        scale_dtype: float16, bfloat16 or float32; None means bfloat16 for a bfloat16 weight, else float16.

    Returns:
        W ``[K, N]`` on the device of ``weight_nk``. With ``minmax``, ``|w - W| <= s / 2`` everywhere (to within
        float32 rounding), s the stored scale. Scales are positive and finite:

        - symmetric: ``s = max(-min / 2**(bits-1), max / (2**(bits-1) - 1))``, so that all codes are in use and a
          weight that lies on such a grid already comes out as it was;
        - asymmetric: ``s = (max(max, 0) - min(min, 0)) / (2**bits - 1)``, ``z = round(-min(min, 0) / s)``;
        - an all-zero group has scale 1 and gives exact zeros; a group too small for its scale dtype (a scale under
          ``2**-24`` in float16, ``2**-126`` otherwise) takes that smallest scale.

    Raises:
        TypeError: ``weight_nk`` is no dense tensor of an allowed dtype, or ``symmetric`` no bool.
        ValueError: a shape, option or value is out of range: not two-dimensional, empty, NaN or Inf, one symmetric
            bit, or a scale past the range of ``scale_dtype``.

    Memory beyond the result is bounded: rows are worked in blocks of about ``2**20`` weights (``2**23`` on a GPU).

    Example:
        >>> import torch, qmm
        >>> w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
        >>> w.in_features, w.out_features, w.bits, w.scales.dtype
        (64, 8, 4, torch.float16)
    """
    plan = _check(weight_nk, bits, group_size, symmetric, method, scale_dtype)
    source = weight_nk.detach()
    n, k = source.shape
    size = min(plan.group_size, k)
    groups = -(-k // size)
    qweight = torch.empty(words_for(k, plan.bits), n, dtype=torch.int32, device=source.device)
    scales = torch.empty(groups, n, dtype=plan.scale_dtype, device=source.device)
    zeros = None if symmetric else torch.empty(groups, n, dtype=torch.uint8, device=source.device)
    step = max(1, _BLOCK.get(source.device.type, _DEFAULT_BLOCK) // k)
    whole = k // size * size
    for n0 in range(0, n, step):
        n1 = min(n, n0 + step)
        block = source[n0:n1].float()
        _check_finite(block, n0)
        parts = [_groups(block[:, :whole].view(n1 - n0, -1, size), plan)]
        if whole < k:  # the short last group
            parts.append(_groups(block[:, None, whole:], plan))
        scales[:, n0:n1] = torch.cat([p.scale for p in parts], 1).t()
        if zeros is not None:
            zeros[:, n0:n1] = torch.cat([p.zero for p in parts], 1).t()
        codes = torch.cat([p.codes.to(torch.uint8).flatten(1) for p in parts], 1)
        qweight[:, n0:n1] = bitstream.pack(codes.t(), plan.bits)
    _check_scales(scales)
    return QuantizedWeight(
        qweight,
        scales,
        bits=plan.bits,
        group_size=plan.group_size,
        in_features=k,
        zeros=None if zeros is None else bitstream.pack(zeros, plan.bits),
    )


@dataclass(frozen=True)
class _Plan:
    """Checked options."""

    bits: int
    group_size: int
    symmetric: bool
    mse: bool
    scale_dtype: torch.dtype

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)


@dataclass
class _Fit:
    """Scales ``[R, G]`` as stored, zero points ``[R, G]`` and codes ``[R, G, size]``, both as float32."""

    scale: Tensor
    zero: Tensor
    codes: Tensor

    def values(self) -> Tensor:
        """``(codes - zero) * scale`` as every backend computes it."""
        return (self.codes - self.zero[..., None]) * self.scale.float()[..., None]


def _groups(w: Tensor, plan: _Plan) -> _Fit:
    """Quantise groups ``[R, G, size]`` of float32."""
    low, high = torch.aminmax(w, dim=2)
    low, high = low.clamp(max=0), high.clamp(min=0)
    if plan.symmetric:
        ideal = torch.maximum(-low / plan.middle, high / max(1, plan.middle - 1))
    else:  # halves, since the difference of two large numbers may be past float32
        ideal = (high * 0.5 - low * 0.5) / plan.top * 2
    ideal = torch.where((low == 0) & (high == 0), 1.0, ideal)
    scale = _stored(ideal, plan.scale_dtype)
    # A scale rounded down may clip by more than half a step: then the next larger number is the right one.
    zero = _zero(low, scale, plan)
    s = scale.float()
    clipped = (high / s > plan.top - zero + 0.5) | (-low / s > zero + 0.5)
    as_int = torch.int32 if scale.dtype == torch.float32 else torch.int16
    scale = (scale.view(as_int) + clipped.to(as_int)).view(scale.dtype)
    fit = _encode(w, scale, _zero(low, scale, plan), plan)
    return _search(w, low, ideal, fit, plan) if plan.mse else fit


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return scale.clamp(min=_SMALLEST[dtype]).to(dtype)


def _zero(low: Tensor, scale: Tensor, plan: _Plan) -> Tensor:
    if plan.symmetric:
        return torch.full_like(low, plan.middle)
    return (-low / scale.float()).round().clamp(0, plan.top)


def _encode(w: Tensor, scale: Tensor, zero: Tensor, plan: _Plan) -> _Fit:
    codes = (w / scale.float()[..., None]).round_().add_(zero[..., None]).clamp_(0, plan.top)
    return _Fit(scale, zero, codes)


def _search(w: Tensor, low: Tensor, ideal: Tensor, fit: _Fit, plan: _Plan) -> _Fit:
    """The best of ``fit``, of other scales and of least-squares fits, group by group."""
    unit = fit.scale.float()[..., None]  # errors are measured in steps, so that no square leaves float32

    def error(f: _Fit) -> Tensor:
        return ((w - f.values()) / unit).square_().sum(2)

    best, least = fit, error(fit)

    def offer(scale: Tensor, zero: Tensor) -> None:
        nonlocal best, least
        found = _encode(w, scale, zero, plan)
        new = error(found)
        better = new < least
        best = _Fit(
            torch.where(better, found.scale, best.scale),
            torch.where(better, found.zero, best.zero),
            torch.where(better[..., None], found.codes, best.codes),
        )
        least = torch.where(better, new, least)  # no minimum: a scale past its dtype has error NaN

    for factor in _FACTORS:
        scale = _stored(ideal * factor, plan.scale_dtype)
        zero = _zero(low * factor, scale, plan)
        for shift in (0,) if plan.symmetric else (0, -1, 1):
            offer(scale, (zero + shift).clamp(0, plan.top))
    for _ in range(_REFITS):
        scale, zero = _refit(w / unit, best, plan)
        offer(_stored(scale * unit[..., 0], plan.scale_dtype), zero)
    return best


def _refit(u: Tensor, fit: _Fit, plan: _Plan) -> tuple[Tensor, Tensor]:
    """Scale (in units of ``u``) and zero point that suit the codes best."""
    zero = fit.zero
    if not plan.symmetric:
        u_mean, q_mean = u.mean(2, keepdim=True), fit.codes.mean(2, keepdim=True)
        spread = (fit.codes - q_mean).square().sum(2)
        slope = ((u - u_mean) * (fit.codes - q_mean)).sum(2) / spread
        moved = (q_mean[..., 0] - u_mean[..., 0] / slope).round()
        zero = torch.where(slope > 0, moved, zero).clamp(0, plan.top)
    steps = fit.codes - zero[..., None]
    scale = (u * steps).sum(2) / steps.square().sum(2)
    return torch.where(scale > 0, scale, 1.0), zero


def _check(
    weight: Tensor, bits: int, group_size: int, symmetric: bool, method: str, scale_dtype: torch.dtype | None
) -> _Plan:
    allowed = ", ".join(dtype_name(d) for d in FLOAT_DTYPES)
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight_nk: must be a torch.Tensor; got {type(weight).__name__}")
    if weight.layout is not torch.strided or weight.is_nested:
        raise TypeError(f"weight_nk: must be a dense strided tensor; got layout {weight.layout}")
    if weight.dtype not in FLOAT_DTYPES:
        raise TypeError(f"weight_nk: dtype must be one of {allowed}; got {dtype_name(weight.dtype)}")
    if weight.dim() != 2:
        raise ValueError(f"weight_nk: must have 2 dimensions [N, K]; got shape {list(weight.shape)}")
    if weight.numel() == 0:
        raise ValueError(
            f"weight_nk: must have at least one row and one column; got shape {list(weight.shape)}"
        )
    if not isinstance(symmetric, bool):
        raise TypeError(f"symmetric: must be a bool; got {symmetric!r}")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method: must be one of {', '.join(METHODS)}; got {method!r}")
    if scale_dtype is None:
        scale_dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float16
    if scale_dtype not in FLOAT_DTYPES:
        got = dtype_name(scale_dtype) if isinstance(scale_dtype, torch.dtype) else repr(scale_dtype)
        raise ValueError(f"scale_dtype: must be one of {allowed}; got {got}")
    bits = whole_number(bits, "bits", 1, 8)
    if bits == 1 and symmetric:
        raise ValueError("bits: must be from 2 to 8 where symmetric (one bit could only say 0 and -s); got 1")
    k = weight.shape[1]
    group_size = k if is_minus_one(group_size) else whole_number(group_size, "group_size", 1)
    return _Plan(bits, group_size, symmetric, method == "mse", scale_dtype)


def _check_finite(block: Tensor, n0: int) -> None:
    if not has_values(block):
        return
    bad = ~torch.isfinite(block)
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"weight_nk: must be finite; got {float(block[row, column])} at [{n0 + row}, {column}] "
            f"({int(bad.sum())} such values in rows {n0} to {n0 + len(block) - 1})"
        )


def _check_scales(scales: Tensor) -> None:
    if has_values(scales) and not bool(torch.isfinite(scales).all()):
        group, row = (int(i) for i in (~torch.isfinite(scales)).nonzero()[0])
        raise ValueError(
            f"scale_dtype: must hold every scale; got {dtype_name(scales.dtype)}, whose largest number is "
            f"{torch.finfo(scales.dtype).max:g}, for weights of row {row}, group {group} past its range "
            "(pass scale_dtype=torch.float32, or scale the weight down)"
        )
