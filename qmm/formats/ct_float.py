"""fp8 weights: 8-bit codes with the values of e4m3 as codebook. Scales per tensor, channel, group or block.

::

    weight            float8_e4m3fn [N, K]; the byte is the code: | s | eeee | mmm |   (see minifloat)
    weight_scale      floating, see ct_scales; or weight_scale_inv, which in spite of its name multiplies too
                      (transformers, DeepSeek); uint8 or e8m0: 2**(byte - 127) where the config says ue8m0

ModelOpt's per-tensor fp8 is the same with ``weight_scale`` ``[]``. Scales of activations (``input_scale``) are not
part of the weight.

Exactness: ``e4m3 * s`` in float32 is one multiplication, bit-equal to every peer's. A code of NaN (127, 255) stays NaN.

Source: compressed_tensors 0.20.1, transformers 5.24 (finegrained_fp8), ModelOpt 0.47, by their files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qmm.formats.ct_int import SCALES
from qmm.formats.ct_scales import default_strategy, file_values, group_values
from qmm.formats.ct_scheme import Scheme
from qmm.formats.layer import Layer
from qmm.formats.minifloat import E8M0, as_e8m0, e4m3_codebook, e8m0_bytes, is_codebook
from qmm.formats.rows import rows_from_words, words_from_rows
from qmm.weight import QuantizedWeight
from qmm.weight.spec import dtype_name
from qmm.weight.validate import require

_NAMES = ("weight_scale", "weight_scale_inv")
_E8M0 = () if E8M0 is None else (E8M0,)


def read(layer: Layer, scheme: Scheme) -> QuantizedWeight:
    """A layer of fp8 as a weight.

    Raises:
        WeightFormatError: a rule above does not hold.
    """
    weight = layer.take("weight", (torch.float8_e4m3fn,), 2)
    n, k = weight.shape
    present = [name for name in _NAMES if layer.get(name) is not None]
    layer.require(len(present) < 2, "weight_scale", "must not stand beside weight_scale_inv", "both")
    suffix = present[0] if present else _NAMES[0]
    bytes_allowed = (torch.uint8,) if scheme.e8m0_scales else ()
    stored = layer.take(suffix, (*SCALES, *_E8M0, *bytes_allowed))
    if stored.dtype in (torch.uint8, *_E8M0):
        stored = as_e8m0(stored)
    zero = layer.get("weight_zero_point")
    layer.require(zero is None, "weight_zero_point", "must be absent for fp8", "a tensor")
    scales, group_size = group_values(layer, suffix, stored, scheme, (n, k))
    return layer.build(
        words_from_rows(weight.contiguous().view(torch.uint8)),
        scales,
        bits=8,
        group_size=group_size,
        in_features=k,
        codebook=e4m3_codebook(weight.device),
    )


def write(
    w: QuantizedWeight,
    *,
    strategy: str | None = None,
    block: tuple[int, int] | None = None,
    scale_name: str = "weight_scale",
    scale_dtype: torch.dtype | None = None,
    one: tuple[int, ...] = (1,),
) -> dict[str, Tensor]:
    """Weight -> tensors by suffix, the inverse of :func:`read`.

    Args:
        w: of 8 bits with e4m3's codebook.
        strategy: ``"tensor"``, ``"channel"``, ``"group"`` or ``"block"``; None means channel or group.
        block: ``(N, K)`` of a block.
        scale_name: ``"weight_scale"`` or ``"weight_scale_inv"``.
        scale_dtype: ``torch.uint8`` writes e8m0 scales as bytes; None keeps the dtype.
        one: shape of the scale of strategy tensor.

    Raises:
        WeightFormatError: the format cannot hold this weight; says which field and why.
    """
    fits = w.bits == 8 and is_codebook(w.codebook, e4m3_codebook(torch.device("cpu")))
    require(fits, "codebook", "must be e4m3's 256 values for fp8", f"bits={w.bits}, another codebook or none")
    require(w.g_idx is None, "g_idx", "must be absent for fp8", "act-order")
    require(w.scale2 is None, "scale2", "must be absent for fp8", "a second level")
    allowed = (*SCALES, *_E8M0)
    require(
        w.scales.dtype in allowed, "scales", f"must be {', '.join(map(dtype_name, allowed))}", w.scales.dtype
    )
    require(scale_name in _NAMES, "scale_name", f"must be one of {', '.join(_NAMES)}", repr(scale_name))
    k = w.in_features
    strategy = strategy or ("block" if block else default_strategy(w.group_size, k))
    names = ("tensor", "channel", "group", "block")
    require(strategy in names, "strategy", f"must be one of {', '.join(names)}", repr(strategy))
    if strategy == "block":
        sizes = block is not None and block[0] >= 1 and block[1] == w.group_size
        require(sizes, "block", f"must be (N, {w.group_size}), the group size of the weight", block)
    elif strategy != "group":
        require(w.spec.groups == 1, "group_size", f"must be K={k} for strategy {strategy}", w.group_size)
    scales = w.scales
    if scale_dtype is not None:
        exponents = e8m0_bytes(scales) if scale_dtype == torch.uint8 else None
        require(
            exponents is not None,
            "scale_dtype",
            "must be uint8, for scales that are powers of two",
            scale_dtype,
        )
        assert exponents is not None
        scales = exponents
    weight = rows_from_words(w.qweight, k).view(torch.float8_e4m3fn)
    return {"weight": weight, scale_name: file_values(scales, strategy, block, one)}
