"""HQQ: layers as the hqq library writes them, 8, 6, 5, 4, 3, 2 and 1 bits, with float zero points, read exactly.

The weight ``[N, K]`` is cut into groups over its flat, row-major numbers; codes stand as a matrix ``[R, C]`` in the
same flat order::

    axis  [R, C]                                   scale, zero  group of flat number e
    1     [N*K / group_size, group_size]           [R, 1]       e // group_size
    0     [group_size, N*K / group_size]           [1, C]       e % C

    W[n, k] = (q - zero) * scale,  e = n*K + k

    W_q, P rows [P, C]: field j of a row p holds row j*P + p of the codes; the first field is the highest one

    bits   dtype   fields, bit 7 (31) ... bit 0                              P
    8      uint8   | p |                                                     R
    6, 5   uint8   | 0 | p |  one code a byte                                R
    4      uint8   | p | P+p |                                               R/2
    3      int32   | 0 0 | p | P+p | 2P+p | ... | 9P+p |                     ceil(R/10), missing rows are 0
    2      uint8   | p | P+p | 2P+p | 3P+p |                                 R/4
    1      uint8   | p | P+p | ... | 7P+p |                                  R/8

With ``view_as_float`` W_q is the same bytes viewed as the compute dtype. The layer's own facts (``nbits``, ``axis``,
``group_size``, ``shape``, ``packing`` ...) are tensors beside it; strings are uint8 bytes.

Canonical form: group_size rows a group where it divides K (axis 1). Where it does not, groups cross the ends of rows,
and gcd(K, group_size) expresses them exactly. With axis 0 neighbours in K never share a group: a scale and a zero point
for each weight express it exactly, which takes several times the file's memory (a warning says so).

Exactness: codes, scales and zero points are kept, and ``dequantize()`` equals hqq's own arithmetic carried out in
float32 bit for bit. (hqq in half precision rounds ``q - zero`` and the product, two roundings; qmm rounds once.)
Written back, ``W_q``, ``scale`` and ``zero`` are the identical bytes for axis 1 where group_size divides K.

Source: hqq 0.2.8.post1.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor

from qmm.formats.hqq_facts import FACTS, PACKINGS, Facts, facts_of, facts_to_tensors
from qmm.formats.packed import (
    BLOCK_CODES,
    check_config,
    check_factors,
    check_method,
    check_shape,
    checked_keys,
    named,
    plain_scales,
    warn,
)
from qmm.weight import QuantizedWeight, ZeroKind, bitstream
from qmm.weight.facts import has_values
from qmm.weight.spec import dtype_name, words_for
from qmm.weight.validate import require

KEY = "W_q"
SUFFIXES = frozenset({"W_q", "scale", "zero"}) | FACTS


def from_checkpoint(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, name: str = ""
) -> QuantizedWeight:
    """One layer of an HQQ checkpoint.

    Args:
        tensors: ``W_q``, ``scale``, ``zero`` and the layer's facts, as drawn above (``bias`` is left alone).
        config: the quantisation config as it stands in ``config.json``; what it says must agree with the layer's
            facts, and stands in for those that are missing. ``nbits``, ``axis``, ``group_size``, ``view_as_float`` and
            ``shape`` may also stand in it directly.
        name: the layer, for errors and warnings.

    Returns:
        A weight with zero points of kind float.

    Raises:
        WeightFormatError: a tensor is missing, damaged or contradicts another or the config, or scales are quantised
            themselves; names the tensor, the rule and the value.

    Warns:
        FormatWarning: axis 0, whose canonical form takes more memory than the file.
    """
    with named(name):
        found = checked_keys(tensors, ("W_q", "scale", "zero"), FACTS)
        config = check_config(config)
        check_method(config, "hqq")
        return _read(found, facts_of(found, config, name), name)


def from_tensors(tensors: Mapping[str, Tensor], *, name: str = "", **config: Any) -> QuantizedWeight:
    """:func:`from_checkpoint` with the config's entries as keywords: ``nbits=4, group_size=64, axis=1, shape=(N, K)``.

    Raises:
        WeightFormatError: as :func:`from_checkpoint`.

    Example:
        >>> import torch, qmm
        >>> from qmm.formats import hqq
        >>> w = qmm.quantize(torch.randn(32, 64), bits=4, group_size=32, symmetric=False)
        >>> hqq.from_tensors(hqq.to_tensors(w)).shape
        (64, 32)
    """
    return from_checkpoint(tensors, config, name=name)


def to_tensors(w: QuantizedWeight, *, view_as_float: bool = False) -> dict[str, Tensor]:
    """The inverse of :func:`from_tensors`, with axis 1: ``W_q``, ``scale``, ``zero`` and the facts hqq reads.

    Args:
        w: the weight.
        view_as_float: view ``W_q`` as the scales' dtype.

    Raises:
        WeightFormatError: the format cannot hold this weight; says which field and why.

    Example:
        >>> import torch, qmm
        >>> from qmm.formats import hqq
        >>> w = qmm.quantize(torch.randn(32, 64), bits=4, group_size=32, symmetric=False)
        >>> hqq.to_tensors(w)["W_q"].dtype
        torch.uint8
    """
    require(w.bits in PACKINGS, "bits", f"must be one of {', '.join(map(str, PACKINGS))} for HQQ", w.bits)
    require(w.g_idx is None, "g_idx", "cannot be held by HQQ (no act-order)", "a weight with g_idx")
    require(w.codebook is None, "codebook", "cannot be held by HQQ", "a weight with a codebook")
    kind = w.zero_kind
    rule = "must be of kind none, int or float for HQQ, whose weight is (q - z) * s"
    require(kind is not ZeroKind.BIAS, "zeros", rule, f"kind {kind}")
    k, n = w.shape
    group_size = min(w.group_size, k)
    require(k % group_size == 0, "group_size", f"must divide K={k} for HQQ", group_size)
    facts = Facts(w.bits, 1, group_size, n, k, view_as_float)
    scales = plain_scales(w)
    zeros = w.unpack_zeros()
    if zeros is None:
        zeros = torch.full_like(scales, w.spec.midpoint)
    elif kind is ZeroKind.INT:
        zeros = zeros.to(scales.dtype)  # at most 255, which every floating dtype here holds
    codes = _pack(w.unpack().t().reshape(facts.rows, facts.columns), facts)
    if view_as_float:
        size = scales.element_size()
        whole = codes.shape[1] * codes.element_size() % size == 0
        require(whole, "group_size", f"must fill whole {dtype_name(scales.dtype)} numbers", group_size)
        codes = codes.view(scales.dtype)
    factors = {name: t.t().reshape(-1, 1) for name, t in (("scale", scales), ("zero", zeros))}
    return {"W_q": codes, **factors, **facts_to_tensors(facts, dtype_name(scales.dtype))}


def _read(found: dict[str, Tensor], facts: Facts, name: str) -> QuantizedWeight:
    codes = _codes(found["W_q"], facts)
    shape = (facts.rows, 1) if facts.axis == 1 else (1, facts.columns)
    about = f"for a weight of {facts.n} by {facts.k}, group_size={facts.group_size}, axis={facts.axis}"
    factors = {}
    for key in ("scale", "zero"):
        t = check_factors(found[key], key)
        check_shape(t, key, shape, f"one a group {about}")
        factors[key] = _spread(t.reshape(-1), facts)
    w = QuantizedWeight(
        _turn(codes, facts),
        factors["scale"],
        bits=facts.bits,
        group_size=_canonical_group(facts),
        in_features=facts.k,
        zeros=factors["zero"],
        zero_kind=ZeroKind.FLOAT,
    )
    if facts.axis == 0:
        stored = sum(t.nbytes for t in (codes, found["scale"], found["zero"]))
        warn(
            name,
            f"axis: 0 takes a scale and a zero point for each weight: {w.nbytes} bytes, {stored} in the file (quantise "
            "with axis=1, or qmm.quantize(w.dequantize().t()))",
        )
    return w


def _codes(t: Tensor, facts: Facts) -> Tensor:
    """W_q as the integers it was packed in, ``[P, C]``."""
    require(t.dim() == 2, "W_q", "must have 2 dimensions", f"shape {list(t.shape)}")
    container = PACKINGS[facts.bits].dtype
    if facts.view_as_float:
        rule = "must have a floating dtype where view_as_float is true"
        require(t.is_floating_point(), "W_q", rule, dtype_name(t.dtype))
        whole = t.shape[1] * t.element_size() % container.itemsize == 0
        require(whole, "W_q", f"rows must be whole {dtype_name(container)} numbers", f"shape {list(t.shape)}")
        t = t.contiguous().view(container)
    rule = f"dtype must be {dtype_name(container)} for {facts.bits} bits"
    require(t.dtype == container, "W_q", rule, dtype_name(t.dtype))
    expected = (facts.packed_rows, facts.columns)
    about = f"for {facts.rows} rows of {facts.bits}-bit codes, {PACKINGS[facts.bits].fields} a number"
    check_shape(t, "W_q", expected, f"[P, C] {about}")
    return t


def _turn(packed: Tensor, facts: Facts) -> Tensor:
    """``[P, C]`` -> the canonical stream down K, in blocks of columns of the weight."""
    bits, k, c = facts.bits, facts.k, facts.columns
    out = torch.empty(words_for(k, bits), facts.n, dtype=torch.int32, device=packed.device)
    step = max(1, BLOCK_CODES // k)
    for n0 in range(0, facts.n, step):
        n1 = min(facts.n, n0 + step)
        first, last = n0 * k // c, -(-n1 * k // c)  # the rows of codes that hold these columns
        codes = _unpack_rows(packed, first, last, facts)
        if PACKINGS[bits].fields == 1 and has_values(codes):
            top = int(codes.max())
            require(top < 1 << bits, "W_q", f"codes must be in [0, {(1 << bits) - 1}] for nbits={bits}", top)
        flat = codes.reshape(-1)[n0 * k - first * c : n1 * k - first * c]
        out[:, n0:n1] = bitstream.pack(flat.view(n1 - n0, k).t().contiguous(), bits)
    return out


def _unpack_rows(packed: Tensor, first: int, last: int, facts: Facts) -> Tensor:
    """Rows ``[first, last)`` of the codes, uint8."""
    packing, p = PACKINGS[facts.bits], packed.shape[0]
    codes = torch.empty(last - first, packed.shape[1], dtype=torch.uint8, device=packed.device)
    at = first
    while at < last:  # one field after the other
        field, row = divmod(at, p)
        stop = min(last, (field + 1) * p)
        part = packed[row : row + stop - at]
        if packing.fields > 1:
            part = (part >> ((packing.fields - 1 - field) * facts.bits)) & ((1 << facts.bits) - 1)
        codes[at - first : stop - first] = part
        at = stop
    return codes


def _pack(codes: Tensor, facts: Facts) -> Tensor:
    """The inverse of :func:`_unpack_rows`: codes ``[R, C]`` -> ``[P, C]``."""
    packing = PACKINGS[facts.bits]
    p = facts.packed_rows
    padded = codes.new_zeros(p * packing.fields, codes.shape[1], dtype=packing.dtype)
    padded[: codes.shape[0]] = codes
    out = torch.zeros_like(padded[:p])
    for field in padded.view(packing.fields, p, -1):
        out = out << facts.bits | field if packing.fields > 1 else field
    return out.contiguous()


def _canonical_group(facts: Facts) -> int:
    return gcd(facts.k, facts.group_size) if facts.axis == 1 else 1


def _spread(flat: Tensor, facts: Facts) -> Tensor:
    """A factor of each group -> ``[G, N]`` of the canonical groups."""
    n, k = facts.n, facts.k
    if facts.axis == 0:
        return flat.expand(facts.group_size, facts.columns).reshape(n, k).t().contiguous()
    size = _canonical_group(facts)
    # where group_size divides K this is every group once, in order
    each = flat.repeat_interleave(facts.group_size // size)
    return each.view(n, k // size).t().contiguous()
