"""Weights of e2m1 codes: MXFP4 (e8m0 scales, groups of 32) and NVFP4 (e4m3 scales, groups of 16, a global scale).

::

    packed    uint8 [N, K/2]: byte j of a row   | element 2j+1 | element 2j |       (bit 7 ... bit 0), each s ee m
    MXFP4     scale uint8 (e8m0) [N, K/32]      w = e2m1 * 2**(scale - 127)
    NVFP4     scale e4m3 [N, K/16], global scale float32 [1] or []
              compressed-tensors   w = e2m1 * (scale / weight_global_scale)
              ModelOpt             w = e2m1 * (scale * weight_scale_2)

NVFP4 stays two-level: ``scales`` e4m3, ``scale2`` float32, and ``scale2_divides`` where the global scale does.

Exactness: bit-equal to the peers in float32 (a zero may differ in sign).

Source: OCP MX 1.0; compressed_tensors 0.20.1, ModelOpt 0.47, by their files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qmm.formats.layer import Layer
from qmm.formats.minifloat import E8M0, as_e8m0, e2m1_codebook, e8m0_bytes, is_codebook
from qmm.formats.rows import rows_from_words, turned, words_from_rows
from qmm.weight import QuantizedWeight
from qmm.weight.facts import has_values
from qmm.weight.validate import require

MX_GROUP, NV_GROUP = 32, 16
EXPONENTS = (torch.uint8,) if E8M0 is None else (torch.uint8, E8M0)


def read_mx(layer: Layer, packed: str, scale: str) -> QuantizedWeight:
    """MXFP4.

    Args:
        layer: the tensors.
        packed: suffix of the codes, uint8 ``[N, K/2]``.
        scale: suffix of the scales, uint8 or e8m0 ``[N, K/32]``.

    Raises:
        WeightFormatError: missing, or another shape or dtype.
    """
    qweight, n, k = _codes(layer, packed, MX_GROUP)
    stored = layer.take(scale, EXPONENTS)
    layer.shape(scale, stored, (n, k // MX_GROUP), f"[N, K/{MX_GROUP}]")
    return layer.build(
        qweight,
        turned(as_e8m0(stored)),
        bits=4,
        group_size=MX_GROUP,
        in_features=k,
        codebook=e2m1_codebook(qweight.device),
    )


def read_nv(layer: Layer, packed: str, scale: str, second: str, divide: bool) -> QuantizedWeight:
    """NVFP4.

    Args:
        layer: the tensors.
        packed: suffix of the codes, uint8 ``[N, K/2]``.
        scale: suffix of the scales, e4m3 ``[N, K/16]``.
        second: suffix of the global scale, float32 ``[1]`` or ``[]``.
        divide: the global scale divides (compressed-tensors) rather than multiplies (ModelOpt).

    Raises:
        WeightFormatError: missing, another shape or dtype, or a divisor that is 0, infinite or NaN.
    """
    qweight, n, k = _codes(layer, packed, NV_GROUP)
    stored = layer.take(scale, (torch.float8_e4m3fn,))
    layer.shape(scale, stored, (n, k // NV_GROUP), f"[N, K/{NV_GROUP}]")
    factor = layer.take(second, (torch.float32,))
    layer.require(factor.numel() == 1, second, "must be one number", f"shape {list(factor.shape)}")
    scale2 = factor.reshape(1).clone()
    if divide and has_values(scale2):
        ok = bool(scale2.isfinite() & (scale2 != 0))
        layer.require(ok, second, "must be a finite number other than 0, as it divides", float(scale2))
    return layer.build(
        qweight,
        turned(stored),
        bits=4,
        group_size=NV_GROUP,
        in_features=k,
        codebook=e2m1_codebook(qweight.device),
        scale2=scale2,
        scale2_divides=divide,
    )


def _codes(layer: Layer, packed: str, group: int) -> tuple[Tensor, int, int]:
    rows = layer.take(packed, (torch.uint8,), 2)
    n, k = rows.shape[0], 2 * rows.shape[1]
    layer.require(k % group == 0, packed, f"must hold whole groups of {group} codes a row", f"K={k}")
    return words_from_rows(rows), n, k


def is_mx(w: QuantizedWeight) -> bool:
    """Whether the weight is of the kind that :func:`read_mx` makes (values of the scales not looked at)."""
    return w.scale2 is None and w.group_size == MX_GROUP and _is_e2m1(w)


def is_nv(w: QuantizedWeight) -> bool:
    """Whether the weight is of the kind that :func:`read_nv` makes."""
    return w.scale2 is not None and w.group_size == NV_GROUP and _is_e2m1(w)


def _is_e2m1(w: QuantizedWeight) -> bool:
    return w.bits == 4 and w.g_idx is None and is_codebook(w.codebook, e2m1_codebook(torch.device("cpu")))


def write_mx(w: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Codes uint8 ``[N, K/2]`` and scales uint8 ``[N, K/32]``.

    Raises:
        WeightFormatError: no MXFP4 weight; says which field and why.
    """
    _check(w, MX_GROUP)
    require(w.scale2 is None, "scale2", "must be absent for MXFP4", "a second level")
    exponents = e8m0_bytes(w.scales)
    require(
        exponents is not None,
        "scales",
        "must be powers of two from 2**-127 to 2**127 for MXFP4",
        w.scales.dtype,
    )
    assert exponents is not None
    return rows_from_words(w.qweight, w.in_features // 2), turned(exponents)


def write_nv(w: QuantizedWeight, divide: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 ``[N, K/2]``, scales e4m3 ``[N, K/16]`` and the global scale, float32 ``[1]``.

    Raises:
        WeightFormatError: no NVFP4 weight; says which field and why.
    """
    _check(w, NV_GROUP)
    require(
        w.scales.dtype == torch.float8_e4m3fn,
        "scales",
        "dtype must be float8_e4m3fn for NVFP4",
        w.scales.dtype,
    )
    second = w.scale2
    require(second is not None, "scale2", "must be there for NVFP4", None)
    assert second is not None
    require(
        second.dim() == 1, "scale2", "must be one number for NVFP4", f"several, shape {list(second.shape)}"
    )
    owner, verb = ("compressed-tensors", "divide") if divide else ("ModelOpt", "multiply")
    same = w.spec.scale2_divides == divide
    require(
        same, "scale2_divides", f"must be {divide}: the global scale of {owner} has to {verb}", not divide
    )
    return rows_from_words(w.qweight, w.in_features // 2), turned(w.scales), second.clone()


def _check(w: QuantizedWeight, group: int) -> None:
    fits = w.bits == 4 and is_codebook(w.codebook, e2m1_codebook(torch.device("cpu")))
    require(fits, "codebook", "must be e2m1's 16 values for fp4", f"bits={w.bits}, another codebook or none")
    require(w.g_idx is None, "g_idx", "must be absent for fp4", "act-order")
    require(w.group_size == group, "group_size", f"must be {group}", w.group_size)
    k = w.in_features
    require(k % group == 0, "in_features", f"must be a multiple of {group}", k)
