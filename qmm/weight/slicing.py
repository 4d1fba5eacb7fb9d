"""Blocks of a weight and joins of weights, exact: codes, scales and zero points are moved, never recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.weight import bitstream
from qmm.weight.dequantize import columns, unpack_factors
from qmm.weight.spec import FACTOR_BITS, WORD_BITS, WeightSpec, ZeroKind
from qmm.weight.tensors import WeightTensors
from qmm.weight.validate import require

if TYPE_CHECKING:
    from qmm.weight.quantized_weight import QuantizedWeight


def take(w: QuantizedWeight, index: Any) -> QuantizedWeight:
    """See ``QuantizedWeight.__getitem__``."""
    index = index if isinstance(index, tuple) else (index,)
    if len(index) == 2 and isinstance(index[1], (Tensor, list)):
        return _pick(take(w, index[0]) if index[0] != slice(None) else w, index[1])
    if len(index) > 2 or not all(isinstance(i, slice) and i.step in (None, 1) for i in index):
        raise TypeError(f"index: must be one or two slices of step 1, w[k0:k1, n0:n1]; got {index!r}")
    k0, k1, _ = index[0].indices(w.in_features)
    n0, n1, _ = (index[1] if len(index) == 2 else slice(None)).indices(w.out_features)
    require(k0 < k1 and n0 < n1, "index", "must keep at least one row and one column", index)
    s, t = w.spec, w.tensors
    whole_k = (k0, k1) == (0, s.in_features)
    g0, g1 = (0, s.groups) if whole_k or s.act_order else _groups(s, k0, k1)
    fields_: dict[str, Any] = {
        "qweight": _cut_stream(t.qweight[:, n0:n1], s.bits, s.in_features, k0, k1),
        "scales": _cut_factors(t.scales[:, n0:n1], s.groups, g0, g1),
        "zeros": None if t.zeros is None else t.zeros[:, n0:n1],
        "codebook": t.codebook,
        "g_idx": None if t.g_idx is None else t.g_idx[k0:k1],
    }
    if t.zeros is not None:
        cut = fields_["zeros"]
        if s.zero_kind is ZeroKind.INT:
            fields_["zeros"] = _cut_stream(cut, s.bits, s.groups, g0, g1)
        else:
            fields_["zeros"] = _cut_factors(cut, s.groups, g0, g1)
    for name, second, ratio in (("scale2", t.scale2, s.scale2_ratio), ("zero2", t.zero2, s.zero2_ratio)):
        part, new_ratio = _cut_second(columns(second, n0, n1), ratio, g0, g1)
        fields_[name], fields_[name + "_ratio"] = part, new_ratio
    copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in fields_.items()}
    return _make(w, copied, s.group_size, k1 - k0)


def _pick(w: QuantizedWeight, index: Tensor | list[int]) -> QuantizedWeight:
    """Columns by number, in that order, exact."""
    if isinstance(index, Tensor) and (index.dtype not in (torch.int32, torch.int64) or index.dim() != 1):
        raise TypeError(
            f"index: columns must be a 1-D tensor of int32 or int64; got {index.dtype} {list(index.shape)}"
        )
    columns_ = torch.as_tensor(index, dtype=torch.int64, device=w.device)
    require(columns_.numel() > 0, "index", "must keep at least one column", "none")
    low, high = (int(v) for v in torch.aminmax(columns_))
    require(low >= 0 and high < w.out_features, "index", f"must be in [0, {w.out_features})", (low, high))
    picked = select_columns(w.tensors, columns_)
    ratios = {"scale2_ratio": w.spec.scale2_ratio, "zero2_ratio": w.spec.zero2_ratio}
    return _make(w, picked._asdict() | ratios, w.group_size, w.in_features)


def select_columns(t: WeightTensors, index: Tensor) -> WeightTensors:
    """The canonical tensors of columns ``index`` (1-D, in range), in that order; copies, no look at any value."""

    def pick(x: Tensor | None) -> Tensor | None:
        if x is None or x.dim() == 1:  # one factor for the whole weight
            return x
        if x.element_size() == 1:  # 8-bit floats cannot be indexed: their bytes can
            return x.view(torch.uint8).index_select(1, index).view(x.dtype)
        return x.index_select(1, index)

    own = {name: pick(getattr(t, name)) for name in ("qweight", "scales", "scale2", "zeros", "zero2")}
    return WeightTensors(**(t._asdict() | own))


def cat(weights: Sequence[QuantizedWeight], dim: int) -> QuantizedWeight:
    """See ``QuantizedWeight.cat``."""
    if not isinstance(weights, Sequence):
        raise TypeError(
            f"weights: must be a list or tuple of qmm.QuantizedWeight; got {type(weights).__name__}"
        )
    require(len(weights) > 0, "weights", "must have at least one weight", "an empty list")
    require(dim in (0, 1), "dim", "must be 0 (K) or 1 (N)", dim)
    for i, w in enumerate(weights):
        if not hasattr(w, "spec"):
            raise TypeError(f"weights[{i}]: must be a qmm.QuantizedWeight; got {type(w).__name__}")
    first = weights[0]
    same = {"bits", "group_size", "zero_kind", "scale_dtype", "zero_dtype", "codebook_dtype", "act_order"}
    same |= {"scale2_divides"}
    same |= {"in_features", "groups"} if dim == 1 else {"out_features"}
    for i, w in enumerate(weights[1:], 1):
        for name in (f.name for f in fields(WeightSpec) if f.name in same):
            a, b = getattr(first.spec, name), getattr(w.spec, name)
            require(a == b, f"weights[{i}]", f"must have the {name} of weights[0], {a}", b)
        require(w.device == first.device, f"weights[{i}]", f"must be on {first.device}", w.device)
        if first.codebook is not None:
            assert w.codebook is not None
            equal = torch.equal(first.codebook, w.codebook)
            require(equal, f"weights[{i}]", "must have the codebook of weights[0]", "another")
    if dim == 1:
        return _make(first, _cat_n(weights), first.group_size, first.in_features)
    return _make(first, _cat_k(weights), first.group_size, sum(w.in_features for w in weights))


def _make(like: QuantizedWeight, tensors: dict[str, Any], group_size: int, k: int) -> QuantizedWeight:
    return type(like)(
        **tensors,
        bits=like.bits,
        group_size=group_size,
        in_features=k,
        zero_kind=like.zero_kind,
        scale2_divides=like.spec.scale2_divides,
    )


def _groups(s: WeightSpec, k0: int, k1: int) -> tuple[int, int]:
    for edge in (k0, k1):
        if edge % s.group_size and edge != s.in_features:
            raise WeightFormatError(
                f"index: K must be cut at group edges (multiples of group_size={s.group_size}); got {edge}"
            )
    return k0 // s.group_size, -(-k1 // s.group_size)


def _cut_stream(words: Tensor, bits: int, count: int, start: int, stop: int) -> Tensor:
    """Codes ``[start, stop)`` of a stream of ``count`` codes."""
    if (start, stop) == (0, count):
        return words
    if start * bits % WORD_BITS == 0 and (stop * bits % WORD_BITS == 0 or stop == count):
        return words[start * bits // WORD_BITS : -(-stop * bits // WORD_BITS)]
    return bitstream.pack(bitstream.unpack(words, bits, count)[start:stop], bits)


def _cut_factors(first: Tensor, groups: int, g0: int, g1: int) -> Tensor:
    """Factors of groups ``[g0, g1)``, as stored."""
    return _cut_stream(first, FACTOR_BITS, groups, g0, g1) if first.dtype == torch.int32 else first[g0:g1]


def _join_factors(weights: Sequence[QuantizedWeight], name: str) -> Tensor:
    """First-level factors joined along G, as stored."""
    parts = [getattr(w.tensors, name) for w in weights]
    if parts[0].dtype != torch.int32:
        return _cat(parts, 0)
    whole = torch.cat([unpack_factors(p, w.spec.groups) for p, w in zip(parts, weights, strict=True)])
    return bitstream.pack(whole, FACTOR_BITS)


def _cut_second(
    second: Tensor | None, ratio: int | None, g0: int, g1: int
) -> tuple[Tensor | None, int | None]:
    if second is None or not ratio:
        return second, ratio
    if g0 % ratio == 0:
        return second[g0 // ratio : -(-g1 // ratio)], ratio
    return second[torch.arange(g0, g1, device=second.device) // ratio], 1


def _second_rows(w: QuantizedWeight, name: str, ratio: int) -> Tensor | None:
    """The second level of ``w`` as rows ``[ceil(G/ratio), N]``; one factor for all is repeated."""
    second: Tensor | None = getattr(w, name)
    own: int | None = getattr(w.spec, name + "_ratio")
    if second is None or own == ratio:
        return second
    groups, n = w.spec.groups, w.out_features
    if own == 0:
        return second.expand(-(-groups // ratio), n)
    assert own is not None and ratio == 1
    return second[torch.arange(groups, device=second.device) // own]


def _join_second(weights: Sequence[QuantizedWeight], name: str, dim: int) -> dict[str, Any]:
    ratios = {getattr(w.spec, name + "_ratio") for w in weights}
    if ratios == {None}:
        return {name: None, name + "_ratio": None}
    require(None not in ratios, name, "must be in all weights or in none", "in some")
    seconds = [getattr(w, name) for w in weights]
    if ratios == {0} and all(torch.equal(seconds[0], s) for s in seconds):
        return {name: seconds[0], name + "_ratio": 0}
    if dim == 1:
        rows = ratios - {0} or {weights[0].spec.groups}
        ratio = rows.pop() if len(rows) == 1 else 1
    else:
        one = ratios.pop() if len(ratios) == 1 else 0
        ratio = one if one and all(w.spec.groups % one == 0 for w in weights[:-1]) else 1
    parts = [_second_rows(w, name, ratio) for w in weights]
    return {name: torch.cat([p for p in parts if p is not None], dim), name + "_ratio": ratio}


def _cat_n(weights: Sequence[QuantizedWeight]) -> dict[str, Any]:
    first = weights[0]
    for i, w in enumerate(weights[1:], 1):
        if first.g_idx is not None:
            assert w.g_idx is not None
            require(
                torch.equal(first.g_idx, w.g_idx),
                f"weights[{i}]",
                "must have the g_idx of weights[0]",
                "another",
            )
    return {
        "qweight": torch.cat([w.qweight for w in weights], 1),
        "scales": _cat([w.scales for w in weights], 1),
        "zeros": None if first.zeros is None else torch.cat([w.tensors.zeros for w in weights], 1),  # type: ignore[misc]
        "codebook": first.codebook,
        "g_idx": first.g_idx,
        **_join_second(weights, "scale2", 1),
        **_join_second(weights, "zero2", 1),
    }


def _cat_k(weights: Sequence[QuantizedWeight]) -> dict[str, Any]:
    first = weights[0]
    size = first.group_size
    for i, w in enumerate(weights[:-1]):
        ragged = not w.spec.act_order and w.in_features % size
        rule = f"K must be a multiple of group_size={size} to be joined along K"
        require(not ragged, f"weights[{i}]", rule, w.in_features)
    offsets = [sum(w.spec.groups for w in weights[:i]) for i in range(len(weights))]
    zeros = None
    if first.zero_kind is ZeroKind.INT:
        parts = [w.unpack_zeros() for w in weights]
        zeros = bitstream.pack(torch.cat([p for p in parts if p is not None]), first.bits)
    elif first.zeros is not None:
        zeros = _join_factors(weights, "zeros")
    g_idx = None
    if first.g_idx is not None:
        indices = [w.tensors.g_idx for w in weights]
        g_idx = torch.cat([t.add(off) for t, off in zip(indices, offsets, strict=True) if t is not None])
    return {
        "qweight": bitstream.pack(torch.cat([w.unpack() for w in weights]), first.bits),
        "scales": _join_factors(weights, "scales"),
        "zeros": zeros,
        "codebook": first.codebook,
        "g_idx": g_idx,
        **_join_second(weights, "scale2", 0),
        **_join_second(weights, "zero2", 0),
    }


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    if parts[0].element_size() == 1:  # torch.cat lacks some 8-bit float dtypes: join their bytes
        return torch.cat([p.view(torch.uint8) for p in parts], dim).view(parts[0].dtype)
    return torch.cat(parts, dim)
