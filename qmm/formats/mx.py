"""MXFP4 (OCP Microscaling): the ``*_blocks``/``*_scales`` form of gpt-oss, and ModelOpt's.

::

    gpt-oss    blocks   uint8 [E, N, K/32, 16]   byte j of a block   | element 2j+1 | element 2j |    (bit 7 ... bit 0)
               scales   uint8 [E, N, K/32]       w = e2m1 * 2**(scale - 127); 255 is NaN
               names    experts.gate_up_proj_blocks, experts.gate_up_proj_scales, experts.gate_up_proj_bias
    ModelOpt   weight   uint8 [N, K/2]           the same bytes without the axis of blocks
               weight_scale  uint8 [N, K/32]

A weight is one matrix: each of the E experts is a weight of its own (``expert=``, or :func:`from_experts` for all).
``[N, K/32, 16]`` without experts is taken, too. e2m1 is drawn in ``minifloat``; compressed-tensors' mxfp4 is read by
``compressed_tensors``.

Canonical form: 4 bits, codebook e2m1, group 32, scales e8m0: the bytes of the file. Bit-equal to transformers' and
ModelOpt's float32 values (a zero may differ in sign).

Source: OCP MX 1.0; transformers 5.24 (integrations.mxfp4), ModelOpt 0.47, by their files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.formats import fp4
from qmm.formats.layer import Layer
from qmm.weight import QuantizedWeight
from qmm.weight.validate import require, whole_number

KEY = ("blocks", "weight")
SUFFIXES = frozenset({"blocks", "scales", "weight", "weight_scale"})
_BLOCK_BYTES = fp4.MX_GROUP // 2


def from_checkpoint(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    expert: int | None = None,
) -> QuantizedWeight:
    """One matrix of a checkpoint.

    Args:
        tensors: by suffix: ``blocks`` and ``scales``, or ``weight`` and ``weight_scale``.
        config: the ``quantization_config``; nothing in it is needed.
        name: the layer's name, for errors.
        expert: which of E; None where there are no experts.

    Raises:
        WeightFormatError: names layer, tensor, rule and value.
    """
    layer = Layer(tensors, name)
    if layer.get("blocks") is None:
        layer.require(expert is None, "weight", "has no experts", f"expert={expert}")
        return fp4.read_mx(layer, "weight", "weight_scale")
    blocks, scales = _stack(layer)
    if expert is None:
        count = "must be one matrix, or expert= say which of the experts (from_experts reads all)"
        layer.require(blocks.shape[0] == 1, "blocks", count, f"shape {list(blocks.shape)}")
        expert = 0
    index = whole_number(expert, "expert", 0, blocks.shape[0] - 1)
    return _matrix(blocks[index], scales[index], name)


def from_tensors(
    tensors: Mapping[str, Tensor], *, expert: int | None = None, **config: Any
) -> QuantizedWeight:
    """:func:`from_checkpoint`, the config's keys as keywords.

    Raises:
        WeightFormatError: as :func:`from_checkpoint`.

    Example:
        >>> import torch
        >>> from qmm.formats import mx
        >>> blocks, scales = torch.zeros(8, 2, 16, dtype=torch.uint8), torch.full((8, 2), 127, dtype=torch.uint8)
        >>> print(mx.from_tensors({"blocks": blocks, "scales": scales}).spec)
        K=64, N=8, 4-bit codebook, group 32, scales float8_e8m0fnu, zeros none
    """
    return from_checkpoint(tensors, config, expert=expert)


def from_experts(tensors: Mapping[str, Tensor], *, name: str = "") -> list[QuantizedWeight]:
    """Every expert of ``blocks`` ``[E, N, K/32, 16]`` and ``scales`` ``[E, N, K/32]``.

    Raises:
        WeightFormatError: names layer, tensor, rule and value.
    """
    blocks, scales = _stack(Layer(tensors, name))
    return [_matrix(b, s, f"{name}[{i}]") for i, (b, s) in enumerate(zip(blocks, scales, strict=True))]


def _stack(layer: Layer) -> tuple[Tensor, Tensor]:
    """``blocks`` and ``scales`` with the axis of experts, which may be of size 1."""
    blocks, scales = layer.take("blocks", (torch.uint8,)), layer.take("scales", fp4.EXPONENTS)
    rule = f"shape must be [E, N, K/32, {_BLOCK_BYTES}] or [N, K/32, {_BLOCK_BYTES}]"
    ok = blocks.dim() in (3, 4) and blocks.shape[-1] == _BLOCK_BYTES
    layer.require(ok, "blocks", rule, list(blocks.shape))
    layer.shape("scales", scales, tuple(blocks.shape[:-1]), "that of blocks without its last axis")
    return (blocks, scales) if blocks.dim() == 4 else (blocks[None], scales[None])


def _matrix(blocks: Tensor, scales: Tensor, name: str) -> QuantizedWeight:
    """``[N, K/32, 16]`` and ``[N, K/32]`` as a weight."""
    layer = Layer({"blocks": blocks.flatten(1), "scales": scales}, name)
    return fp4.read_mx(layer, "blocks", "scales")


def to_tensors(
    w: QuantizedWeight | Sequence[QuantizedWeight], *, modelopt: bool = False
) -> dict[str, Tensor]:
    """Weight -> ``blocks`` ``[N, K/32, 16]`` and ``scales`` ``[N, K/32]``, identical bytes on a round trip.

    Args:
        w: a weight, or one an expert, which gives the axis E.
        modelopt: ``weight`` ``[N, K/2]`` and ``weight_scale`` instead; one weight only.

    Raises:
        WeightFormatError: MXFP4 cannot hold this weight; says which field and why.

    Example:
        >>> import torch
        >>> from qmm.formats import mx
        >>> blocks, scales = torch.zeros(8, 2, 16, dtype=torch.uint8), torch.full((8, 2), 127, dtype=torch.uint8)
        >>> w = mx.from_tensors({"blocks": blocks, "scales": scales})
        >>> torch.equal(mx.to_tensors(w)["blocks"], blocks)
        True
    """
    if isinstance(w, QuantizedWeight):
        codes, scales = fp4.write_mx(w)
        if modelopt:
            return {"weight": codes, "weight_scale": scales}
        return {"blocks": codes.view(*scales.shape, _BLOCK_BYTES), "scales": scales}
    require(not modelopt, "modelopt", "needs one weight", f"{len(w)} experts")
    require(len(w) > 0, "experts", "must be at least one", 0)
    parts = [to_tensors(one) for one in w]
    shapes = {tuple(one.shape) for one in w}
    if len(shapes) > 1:
        raise WeightFormatError(
            f"experts: must have one shape (K, N); got {', '.join(map(str, sorted(shapes)))}"
        )
    return {key: torch.stack([part[key] for part in parts]) for key in ("blocks", "scales")}
