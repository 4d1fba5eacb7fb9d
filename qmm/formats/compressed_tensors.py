"""compressed-tensors checkpoints, and the fp8 and fp4 ones of transformers and ModelOpt, which lie alike.

======================  ==========================================  ================================  ============
format                  tensors                                     canonical form                    drawn in
======================  ==========================================  ================================  ============
pack-quantized          weight_packed, weight_scale, weight_shape,  int 1..8 bits, zeros none or int  ``ct_int``
                        weight_zero_point, weight_g_idx
int-, naive-quantized   weight, weight_scale, weight_zero_point     int 1..8 bits, zeros none or int  ``ct_int``
float-, naive-, fp8     weight, weight_scale or weight_scale_inv    8 bits, codebook e4m3             ``ct_float``
mxfp4-pack-quantized    weight_packed (ModelOpt: weight),           4 bits, codebook e2m1, scales     ``fp4``
                        weight_scale                                e8m0, group 32
nvfp4-pack-quantized    weight_packed (ModelOpt: weight),           4 bits, codebook e2m1, scales     ``fp4``
                        weight_scale, weight_global_scale           e4m3, group 16, scale2
                        (ModelOpt: weight_scale_2)
======================  ==========================================  ================================  ============

Each module draws its bits and says how exact it is. Every format goes there and back with identical bytes. Scales of
activations (``input_scale`` and the like) are not read: qmm quantises weights only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.formats import ct_float, ct_int, fp4
from qmm.formats.ct_scheme import FP8, INT, INT_PACKED, MXFP4, NVFP4, scheme_of
from qmm.formats.layer import Layer
from qmm.formats.minifloat import e4m3_codebook, is_codebook
from qmm.weight import QuantizedWeight
from qmm.weight.spec import dtype_name

KEY = ("weight_packed", "weight")
SUFFIXES = frozenset(
    {
        *("weight", "weight_packed", "weight_shape", "weight_g_idx", "weight_zero_point"),
        *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
        *("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"),
    }
)
_NAMES = {
    "pack-quantized": INT_PACKED,
    "int-quantized": INT,
    "naive-quantized": INT,
    "float-quantized": FP8,
    "fp8": FP8,
    "mxfp4-pack-quantized": MXFP4,
    "mxfp4": MXFP4,
    "nvfp4-pack-quantized": NVFP4,
    "nvfp4": NVFP4,
}


def from_checkpoint(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, name: str = ""
) -> QuantizedWeight:
    """One layer of a checkpoint.

    Args:
        tensors: by suffix (``SUFFIXES``).
        config: the ``quantization_config`` of config.json, of quant_method compressed-tensors, fp8 or modelopt.
        name: the layer's name; picks among several ``config_groups``, and stands in errors.

    Returns:
        A weight on the device of the tensors, with values as each format's module says.

    Raises:
        WeightFormatError: names layer, tensor (or key of the config), rule and value.
    """
    layer, scheme = Layer(tensors, name), scheme_of(config, name)
    if scheme.format in (INT_PACKED, INT):
        return ct_int.read(layer, scheme)
    if scheme.format == FP8:
        return ct_float.read(layer, scheme)
    packed = "weight" if scheme.modelopt else "weight_packed"
    if scheme.format == MXFP4:
        return fp4.read_mx(layer, packed, "weight_scale")
    second = "weight_scale_2" if scheme.modelopt else "weight_global_scale"
    return fp4.read_nv(layer, packed, "weight_scale", second, divide=not scheme.modelopt)


def from_tensors(tensors: Mapping[str, Tensor], **options: Any) -> QuantizedWeight:
    """:func:`from_checkpoint` with a config's keys, or flat options, as keywords.

    Args:
        tensors: by suffix.
        options: a whole ``quantization_config``, or ``format`` and, where the format needs them, ``bits``, ``type``,
            ``symmetric`` (None: by whether there are zero points), ``strategy``, ``group_size`` (-1: a channel),
            ``block_structure``, ``actorder``, ``version``, ``packing`` (``"dense"`` or ``"legacy"``), ``modelopt``.

    Raises:
        WeightFormatError: as :func:`from_checkpoint`.

    Example:
        >>> import torch
        >>> from qmm.formats import compressed_tensors
        >>> tensors = {
        ...     "weight_packed": torch.zeros(8, 4, dtype=torch.int32),
        ...     "weight_scale": torch.ones(8, 1),
        ...     "weight_shape": torch.tensor([8, 32]),
        ... }
        >>> compressed_tensors.from_tensors(tensors, format="pack-quantized", bits=4, group_size=-1).shape
        (32, 8)
    """
    return from_checkpoint(tensors, options)


def to_tensors(
    w: QuantizedWeight,
    *,
    format: str | None = None,
    strategy: str | None = None,
    block: tuple[int, int] | None = None,
    packing: str = "dense",
    modelopt: bool = False,
    scale_name: str = "weight_scale",
    scale_dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Weight -> tensors by suffix, with no loss.

    Args:
        w: the weight.
        format: a name from the table; None takes what the weight is (integers: pack-quantized).
        strategy: ``"tensor"``, ``"channel"``, ``"group"`` or ``"block"`` (integers and fp8); None: channel or group.
        block: ``(N, K)`` of a block (fp8).
        packing: ``"dense"`` (0.18.0 and later) or ``"legacy"`` (pack-quantized).
        modelopt: ModelOpt's names and global scale (fp8, mxfp4, nvfp4).
        scale_name: ``"weight_scale_inv"`` for transformers' fp8.
        scale_dtype: ``torch.uint8`` writes fp8's e8m0 scales as bytes.

    Raises:
        WeightFormatError: the format cannot hold this weight; says which field and why.

    Example:
        >>> import torch, qmm
        >>> from qmm.formats import compressed_tensors
        >>> w = qmm.quantize(torch.randn(32, 64), bits=4, group_size=32)
        >>> sorted(compressed_tensors.to_tensors(w))
        ['weight_packed', 'weight_scale', 'weight_shape']
    """
    kind = _format_of(w) if format is None else _NAMES.get(format)
    if kind is None:
        raise WeightFormatError(f"format: must be one of {', '.join(_NAMES)}; got {format!r}")
    if kind in (INT_PACKED, INT):
        return ct_int.write(w, packed=kind == INT_PACKED, packing=packing, strategy=strategy)
    if kind == FP8:
        return ct_float.write(
            w,
            strategy=strategy,
            block=block,
            scale_name=scale_name,
            scale_dtype=scale_dtype,
            one=() if modelopt else (1,),
        )
    packed = "weight" if modelopt else "weight_packed"
    if kind == MXFP4:
        codes, scales = fp4.write_mx(w)
        return {packed: codes, "weight_scale": scales}
    codes, scales, second = fp4.write_nv(w, divide=not modelopt)
    last = {"weight_scale_2": second.reshape(())} if modelopt else {"weight_global_scale": second}
    return {packed: codes, "weight_scale": scales, **last}


def _format_of(w: QuantizedWeight) -> str:
    if w.codebook is None:
        return INT_PACKED
    if fp4.is_mx(w):
        return MXFP4
    if fp4.is_nv(w):
        return NVFP4
    if w.bits == 8 and is_codebook(w.codebook, e4m3_codebook(torch.device("cpu"))):
        return FP8
    raise WeightFormatError(
        "codebook: must be e4m3's (8 bits) or e2m1's (4 bits; groups of 32, or of 16 with scale2) for "
        f"compressed-tensors; got {w.bits} bits, group {w.group_size}, scales {dtype_name(w.scales.dtype)}"
    )
