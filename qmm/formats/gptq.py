"""GPTQ: layers as auto-gptq and gptqmodel write them, versions 1 and 2 and the planar one, read and written exactly.

K = in_features, N = out_features, G = ceil(K / group_size) groups (the last may be short)::

    tensor   dtype      shape                    holds
    qweight  int32      [ceil(K*bits/32), N]     codes, a little-endian bit stream down K
    qzeros   int32      [G, ceil(N*bits/32)]     zero points, a little-endian bit stream along N
    scales   fp16 ...   [G, N]
    g_idx    int32      [K]                      group of each row; k // group_size without act-order (may be absent)
    bias     fp16       [N]                      not part of the weight

    W[k, n] = (q[k, n] - z[g_idx[k], n]) * scales[g_idx[k], n]

    bits=4, word i of a column of qweight:  | k=8i+7 | ... | k=8i+1 | k=8i |       (bit 31 ... bit 0)
    bits=4, word i of a row of qzeros:      | n=8i+7 | ... | n=8i+1 | n=8i |
    bits=3, words 0 and 1:                  | k=10, 2 low bits | k=9 | ... | k=0 |, | ... | k=11 | k=10, high bit |

    checkpoint_format  bits            zero points          streams
    gptq (v1)          2, 3, 4, 8      stored minus one     dense, as drawn
    gptq_v2            2, 3, 4, 8      stored as they are   dense
    gptq, gptq_v2      5, 6, 7         as above             planar: drawn in ``gptq_planar``
    gptq_p             2 to 8          stored as they are   planar

The codes of dense streams are the canonical form and are not copied. A v1 field that is all ones has three readings in
the wild: see ``gptq_zeros``, and ``zero_reading=``.

Exactness: every code, zero point and scale is kept, so tensors -> weight -> tensors gives identical bytes (but for a
g_idx that the file left out, and bits past the last field of a row of qzeros, which are written as 0; gptqmodel's v1
has ones there); ``dequantize()`` equals the libraries' float32 arithmetic bit for bit.

Source: auto-gptq 0.7.1 and gptqmodel 7.7.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qmm.formats import gptq_dynamic, gptq_planar, gptq_zeros
from qmm.formats.gptq_zeros import Layout
from qmm.formats.packed import (
    block_rows,
    check_config,
    check_factors,
    check_method,
    check_shape,
    check_symmetric,
    check_words,
    checked_keys,
    flag,
    group_rows,
    named,
    plain_scales,
    report_loss,
    required_setting,
    setting,
    turn_along,
    warn,
)
from qmm.weight import QuantizedWeight, bitstream
from qmm.weight.build import narrow_g_idx
from qmm.weight.facts import has_values
from qmm.weight.spec import WORD_BITS, words_for
from qmm.weight.validate import require, whole_number

KEY = "qweight"
SUFFIXES = frozenset({"qweight", "qzeros", "scales", "g_idx"})
FORMATS = ("gptq", "gptq_v2", "gptq_p")
_SAME = {"v1": "gptq", "v2": "gptq_v2"}
_STRADDLING = (5, 6, 7)  # gptqmodel has these in planes only, whatever the version


def from_checkpoint(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    name: str = "",
    zero_reading: str | None = None,
    in_features: int | None = None,
) -> QuantizedWeight:
    """One layer of a GPTQ checkpoint.

    Args:
        tensors: ``qweight``, ``qzeros``, ``scales``, ``g_idx``, as drawn above (``bias`` is left alone).
        config: the quantisation config as it stands in ``config.json`` or ``quantize_config.json``: ``bits``,
            ``group_size``, ``checkpoint_format`` (or ``format``, ``version``; absent means v1), ``sym``,
            ``desc_act``, ``meta``, ``dynamic`` (by ``name``).
        name: the layer, for errors and warnings.
        zero_reading: how to read an all-ones zero field of v1: "masked", "unmasked" or "word" (``gptq_zeros``). None
            takes the reading of the library that the config names as its writer, or else "masked" with a warning.
        in_features: K, where neither ``g_idx`` nor full words tell it.

    Returns:
        A weight with zero points of kind int, or float where "unmasked" reads ``2**bits``.

    Raises:
        WeightFormatError: a tensor is missing, damaged or contradicts another or the config; names the tensor, the
            rule and the value.

    Warns:
        FormatWarning: readers disagree on a zero point; or the config contradicts the tensors in a way that has one
            likely meaning (the text says which was taken).
    """
    with named(name):
        config = gptq_dynamic.settings_of(check_config(config), name)
        found = checked_keys(tensors, SUFFIXES - {"g_idx"}, {"g_idx"})
        return _read(found, config, name, zero_reading, in_features)


def from_tensors(
    tensors: Mapping[str, Tensor],
    *,
    zero_reading: str | None = None,
    in_features: int | None = None,
    name: str = "",
    **config: Any,
) -> QuantizedWeight:
    """:func:`from_checkpoint` with the config's entries as keywords: ``bits=4, group_size=128, checkpoint_format=...``.

    Raises:
        WeightFormatError: as :func:`from_checkpoint`.

    Example:
        >>> import torch, qmm
        >>> from qmm.formats import gptq
        >>> w = qmm.quantize(torch.randn(32, 64), bits=4, group_size=32, symmetric=False)
        >>> gptq.from_tensors(gptq.to_tensors(w), bits=4, group_size=32, checkpoint_format="gptq_v2").shape
        (64, 32)
    """
    return from_checkpoint(tensors, config, name=name, zero_reading=zero_reading, in_features=in_features)


def to_tensors(
    w: QuantizedWeight,
    *,
    version: str = "gptq_v2",
    zero_reading: str | None = None,
    lossy: bool = False,
) -> dict[str, Tensor]:
    """The inverse of :func:`from_tensors`; tensors that do not change are the weight's own.

    Args:
        w: the weight.
        version: "gptq" (or "v1"), "gptq_v2" (or "v2") or "gptq_p".
        zero_reading: by whom a v1 file will be read. None: written for "unmasked" where a zero point is ``2**bits``,
            else for "masked".
        lossy: round zero points that are not whole numbers; a warning tells the loss.

    Raises:
        WeightFormatError: the format cannot hold this weight; says which field and why.

    Warns:
        FormatWarning: the loss; or zero points of v1 that readers disagree on, where ``zero_reading`` is not given.

    Example:
        >>> import torch, qmm
        >>> from qmm.formats import gptq
        >>> w = qmm.quantize(torch.randn(32, 64), bits=4, group_size=32, symmetric=False)
        >>> sorted(gptq.to_tensors(w))
        ['g_idx', 'qweight', 'qzeros', 'scales']
    """
    layout = _layout(w.bits, w.out_features, _format(version, "version"))
    reading = gptq_zeros.check_reading(zero_reading, w.bits)
    groups = -(-w.in_features // w.group_size)
    rule = f"must be ceil(K/group_size) = {groups} for GPTQ"
    require(w.spec.groups == groups, "groups", rule, w.spec.groups)
    zeros = gptq_zeros.write(w, layout, reading, lossy)
    qweight = w.qweight
    if layout.planar:
        gptq_planar.check_count(w.in_features, "in_features")
        qweight = turn_along(qweight, w.bits, w.in_features, lambda q: gptq_planar.pack(q, w.bits))
    g_idx = w.g_idx
    if g_idx is None:
        g_idx = torch.arange(w.in_features, dtype=torch.int32, device=w.device) // w.group_size
    tensors = {"qweight": qweight, "qzeros": zeros.qzeros, "scales": plain_scales(w), "g_idx": g_idx}
    if zeros.columns:
        text = f"GPTQ v1 stores the zero points of {zeros.columns} columns as all ones, which readers disagree on"
        warn("", f"qzeros: {text}")
    if zeros.rounded:
        facts: dict[str, Any] = {"bits": w.bits, "group_size": w.group_size, "version": version}
        written = from_tensors(tensors, zero_reading=zeros.reading, in_features=w.in_features, **facts)
        report_loss(w, written)
    return tensors


def _read(
    found: dict[str, Tensor],
    config: Mapping[str, Any],
    name: str,
    zero_reading: str | None,
    in_features: int | None,
) -> QuantizedWeight:
    check_method(config, "gptq")
    require(
        not flag(config, "is_marlin_format"), "is_marlin_format", "repacked files are not GPTQ's layout", True
    )
    fmt = _format(setting(config, "checkpoint_format", "format", "version"), "checkpoint_format")
    bits = whole_number(required_setting(config, "bits"), "bits", 1, 8)
    qweight, qzeros = check_words(found["qweight"], "qweight"), check_words(found["qzeros"], "qzeros")
    scales, n = check_factors(found["scales"], "scales"), qweight.shape[1]
    layout = _layout(bits, n, fmt)
    k = _in_features(qweight, found.get("g_idx"), bits, in_features)
    if layout.planar:
        gptq_planar.check_count(k, "in_features")
    group_size = group_rows(required_setting(config, "group_size"), k)
    groups = -(-k // group_size)
    check_shape(
        qweight, "qweight", (words_for(k, bits), n), f"[ceil(K*bits/32), N] for K={k} and bits={bits}"
    )
    check_shape(
        scales, "scales", (groups, n), f"[ceil(K/group_size), N] for K={k} and group_size={group_size}"
    )
    width = words_for(n, bits)
    check_shape(qzeros, "qzeros", (groups, width), f"[G, ceil(N*bits/32)] for N={n} and bits={bits}")
    reading = gptq_zeros.check_reading(zero_reading, bits) or gptq_zeros.reading_of_writer(config, bits)
    zeros, kind, columns = gptq_zeros.read(qzeros, layout, reading or "masked")
    if columns and reading is None:
        warn(
            name,
            f"qzeros: {columns} of {n} columns have a zero point stored as all ones, which readers of GPTQ v1 disagree "
            "on; read as 0 (zero_reading='unmasked' reads as auto-gptq does, 'word' as gptqmodel does)",
        )
    if flag(config, "sym") and not check_symmetric(zeros, kind, bits, groups, "sym is true"):
        warn(
            name,
            f"qzeros: all one off the midpoint although sym is true; taken as checkpoint_format {fmt!r} says (the file "
            "may be of the other version: pass checkpoint_format to override)",
        )
    if layout.planar:
        qweight = _planar_down(qweight, bits, n)
    return QuantizedWeight(
        qweight,
        scales,
        bits=bits,
        group_size=group_size,
        in_features=k,
        zeros=zeros,
        zero_kind=kind,
        g_idx=_act_order(found.get("g_idx"), config, k, group_size, name),
    )


def _planar_down(words: Tensor, bits: int, n: int) -> Tensor:
    """Planar codes down K -> the canonical stream, which fills as many words."""
    block = block_rows(n) // WORD_BITS * bits
    out = torch.empty_like(words)
    for start in range(0, words.shape[0], block):
        part = gptq_planar.unpack(words[start : start + block].contiguous(), bits)
        out[start : start + block] = bitstream.pack(part, bits)
    return out


def _format(value: object, field: str) -> str:
    """The checkpoint format by its name in a config; none means v1, as before the key existed."""
    name = "gptq" if value is None else _SAME.get(str(value), value)
    require(name in FORMATS, field, f"must be one of {', '.join(FORMATS)}", repr(value))
    return str(name)


def _layout(bits: int, n: int, fmt: str) -> Layout:
    require(bits in gptq_planar.PLANES, "bits", "must be 2 to 8 for GPTQ", bits)
    layout = Layout(bits, n, minus_one=fmt == "gptq", planar=fmt == "gptq_p" or bits in _STRADDLING)
    if layout.planar:
        gptq_planar.check_count(n, "out_features")
    return layout


def _in_features(qweight: Tensor, g_idx: Tensor | None, bits: int, given: int | None) -> int:
    if given is not None:
        return whole_number(given, "in_features", 1)
    if g_idx is not None:
        require(g_idx.dim() == 1 and g_idx.numel() > 0, "g_idx", "shape must be [K]", list(g_idx.shape))
        return g_idx.numel()
    stream = qweight.shape[0] * WORD_BITS
    rule = f"must be given where {bits}-bit codes do not fill the rows of qweight and there is no g_idx"
    require(stream % bits == 0, "in_features", rule, None)
    require(stream > 0, "qweight", "must have at least one row", 0)
    return stream // bits


def _act_order(
    g_idx: Tensor | None, config: Mapping[str, Any], k: int, group_size: int, name: str
) -> Tensor | None:
    """``g_idx`` where it says more than ``k // group_size``."""
    desc_act = flag(config, "desc_act")
    if g_idx is None:
        require(not desc_act, "g_idx", "must be among the layer's tensors where desc_act is true", "no g_idx")
        return None
    g_idx = narrow_g_idx(g_idx)
    check_shape(g_idx, "g_idx", (k,), "[K]")
    if not has_values(g_idx):
        return g_idx
    plain = torch.arange(k, dtype=torch.int32, device=g_idx.device) // group_size
    if torch.equal(g_idx, plain):
        return None
    if desc_act is False and not bool(g_idx.any()):
        # written by exporters that never filled it; exllama and vLLM take it as no act-order too
        warn(name, "g_idx: all 0 although desc_act is false; taken as k // group_size")
        return None
    if desc_act is False:
        warn(name, "g_idx: not k // group_size although desc_act is false; g_idx is followed")
    return g_idx
