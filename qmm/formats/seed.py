"""The seed layout: what the seed kernel takes, which is the canonical weight for widths that divide 32.

K = in_features, N = out_features, G = K // group_size, pack_num = 32 // w_bit::

    tensor  dtype     shape                  holds
    qw      int32     [K // pack_num, N]     codes down K
    scales  fp16 ...  [G, N]
    qzeros  int32     [G // pack_num, N]     zero points down G; absent: 2**(w_bit-1) everywhere

    W[k, n] = (q[k, n] - z[k // group_size, n]) * scales[k // group_size, n]

    w_bit=4, word i of a column:  | k=8i+7 | ... | k=8i+1 | k=8i |       (bit 31 ... bit 0), the same along G
    unpacked by ``(word >> shift) & (2**w_bit - 1)``: the shift is arithmetic, the mask comes after it

A number of groups that fills no whole word has a last word with zeros behind it. Nothing is copied or changed either
way, so the bytes of a round trip are identical.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qmm.formats.packed import (
    check_config,
    check_factors,
    check_shape,
    check_words,
    checked_keys,
    named,
    plain_scales,
    required_setting,
)
from qmm.weight import QuantizedWeight, ZeroKind
from qmm.weight.spec import WORD_BITS, words_for
from qmm.weight.validate import require, whole_number

KEY = "qw"
SUFFIXES = frozenset({"qw", "scales", "qzeros"})


def from_checkpoint(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, name: str = ""
) -> QuantizedWeight:
    """One layer in the seed layout.

    Args:
        tensors: ``qw``, ``scales`` and, unless symmetric, ``qzeros``, as drawn above.
        config: ``w_bit`` (or ``bits``): 1, 2, 4 or 8; ``group_size``: -1 means K.
        name: the layer, for errors.

    Raises:
        WeightFormatError: a tensor is missing, damaged or contradicts another or the config; names the tensor, the
            rule and the value.
    """
    with named(name):
        found = checked_keys(tensors, SUFFIXES - {"qzeros"}, {"qzeros"})
        config = check_config(config)
        bits = whole_number(required_setting(config, "w_bit", "bits"), "w_bit", 1, 8)
        qw, scales = check_words(found["qw"], "qw"), check_factors(found["scales"], "scales")
        zeros = found.get("qzeros")
        if zeros is not None:
            zeros = check_words(zeros, "qzeros")
            shape = (words_for(scales.shape[0], bits), qw.shape[1])
            check_shape(zeros, "qzeros", shape, f"[G*w_bit/32, N] for G={scales.shape[0]} and w_bit={bits}")
        group_size = required_setting(config, "group_size")
        return QuantizedWeight.from_seed(qw, scales, zeros, w_bit=bits, group_size=group_size)


def from_tensors(tensors: Mapping[str, Tensor], *, name: str = "", **config: Any) -> QuantizedWeight:
    """:func:`from_checkpoint` with the config's entries as keywords: ``w_bit=4, group_size=128``.

    Raises:
        WeightFormatError: as :func:`from_checkpoint`.

    Example:
        >>> import torch, qmm
        >>> from qmm.formats import seed
        >>> w = qmm.quantize(torch.randn(32, 64), bits=4, group_size=32, symmetric=False)
        >>> seed.from_tensors(seed.to_tensors(w), w_bit=4, group_size=32).shape
        (64, 32)
    """
    return from_checkpoint(tensors, config, name=name)


def to_tensors(w: QuantizedWeight) -> dict[str, Tensor]:
    """The inverse of :func:`from_tensors`; the tensors are the weight's own where they are stored as drawn above.

    Raises:
        WeightFormatError: the layout cannot hold this weight; says which field and why.

    Example:
        >>> import torch, qmm
        >>> from qmm.formats import seed
        >>> w = qmm.quantize(torch.randn(32, 64), bits=4, group_size=32, symmetric=False)
        >>> sorted(seed.to_tensors(w))
        ['qw', 'qzeros', 'scales']
    """
    require(WORD_BITS % w.bits == 0, "bits", "must be 1, 2, 4 or 8 for the seed layout", w.bits)
    require(w.g_idx is None, "g_idx", "cannot be held by the seed layout", "a weight with g_idx")
    require(w.codebook is None, "codebook", "cannot be held by the seed layout", "a weight with a codebook")
    whole = w.zero_kind in (ZeroKind.NONE, ZeroKind.INT)
    require(whole, "zeros", "must be of kind none or int for the seed layout", f"kind {w.zero_kind}")
    per_word, k = WORD_BITS // w.bits, w.in_features
    full = k % per_word == 0
    require(full, "in_features", f"must be a multiple of {per_word} for {w.bits} bits in the seed layout", k)
    tensors = {"qw": w.qweight, "scales": plain_scales(w)}
    return tensors if w.zeros is None else tensors | {"qzeros": w.zeros}
