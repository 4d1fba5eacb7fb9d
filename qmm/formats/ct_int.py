"""compressed-tensors integers: ``pack-quantized`` (1 to 8 bits in int32 words) and ``int-quantized`` (a byte a code).

pack-quantized, N rows of K codes, stored plus ``2**(bits-1)``, so without sign::

    weight_packed      int32 [N, W], packed along K
    weight_scale       floating, see ct_scales
    weight_zero_point  int32 [W', G], packed along N by the same rule; only asymmetric
    weight_g_idx       int32 [K], the group of each element of K; only with actorder "group"
    weight_shape       int64 [2] = (N, K)

    dense (from 0.18.0)   one little-endian stream, W = ceil(K*bits/32):
        bits=3   word 0:  | k=10 (2 low bits) | k=9 | ... | k=0 |         (bit 31 ... bit 0)
                 word 1:  | ... | k=11 | k=10 (1 high bit) |
    padded (older)        floor(32/bits) codes a word, W = ceil(K / floor(32/bits)):
        bits=3   word 0:  | 2 unused bits, 0 | k=9 | ... | k=0 |
                 word 1:  | 2 unused bits, 0 | k=19 | ... | k=10 |

The two are one for bits 1, 2, 4 and 8. Otherwise the width of ``weight_packed`` tells them apart; where both have the
same width, the config's version does. Zero points follow the codes. Zero points that an old or foreign writer left
unpacked (int8 or floating, in the shape of the scales, with sign) are taken too.

int-quantized and naive-quantized: ``weight`` int8 ``[N, K]`` with sign, ``weight_scale``, and ``weight_zero_point``
int8 in the shape of the scales.

Exactness: ``(q - z) * s`` in float32 as compressed-tensors computes it, bit for bit.

Source: compressed_tensors.compressors (pack_quantized, naive_quantized) 0.10.2, 0.12.2, 0.20.1, by their files.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.formats.ct_scales import default_strategy, file_values, group_values
from qmm.formats.ct_scheme import INT_PACKED, Scheme
from qmm.formats.layer import Layer
from qmm.formats.rows import rows_from_words, turned, words_from_rows
from qmm.weight import QuantizedWeight, ZeroKind, bitstream
from qmm.weight.facts import has_values
from qmm.weight.spec import WORD_BITS, words_for
from qmm.weight.validate import require

SCALES = (torch.float16, torch.bfloat16, torch.float32)
_WHOLE = (torch.int32, torch.int64)
_CHUNK_CODES = 1 << 18  # codes unpacked at a time


def read(layer: Layer, scheme: Scheme) -> QuantizedWeight:
    """A layer of integers as a weight.

    Raises:
        WeightFormatError: a rule above does not hold.
    """
    if scheme.format == INT_PACKED:
        qweight, (n, k), packing = _packed_codes(layer, scheme)
    else:
        (qweight, (n, k)), packing = _byte_codes(layer, scheme.bits), "dense"
    scales_in_file = layer.take("weight_scale", SCALES)
    scales, group_size = group_values(layer, "weight_scale", scales_in_file, scheme, (n, k))
    zeros = _zeros(layer, scheme, packing, scales_in_file, (n, k))
    return layer.build(
        qweight,
        scales,
        bits=scheme.bits,
        group_size=group_size,
        in_features=k,
        zeros=zeros,
        zero_kind=ZeroKind.NONE if zeros is None else ZeroKind.INT,
        g_idx=_g_idx(layer, scheme, k, group_size, scales.shape[0]),
    )


def width(count: int, bits: int, packing: str) -> int:
    """Words that hold ``count`` codes."""
    return words_for(count, bits) if packing == "dense" else -(-count // (WORD_BITS // bits))


def _packed_codes(layer: Layer, scheme: Scheme) -> tuple[Tensor, tuple[int, int], str]:
    stored = layer.take("weight_shape", _WHOLE)
    layer.shape("weight_shape", stored, (2,), "[2]")
    layer.require(has_values(stored), "weight_shape", "must hold values", stored.device)
    n, k = (int(v) for v in stored.tolist())
    layer.require(0 < n < 2**31 and 0 < k < 2**31, "weight_shape", "must be two sizes N, K", [n, k])
    words, bits = layer.take("weight_packed", (torch.int32,), 2), scheme.bits
    layer.require(
        words.shape[0] == n, "weight_packed", f"must have N = {n} rows (weight_shape)", list(words.shape)
    )
    packing = _packing(layer, scheme, words, k)
    if packing == "dense":
        qweight = turned(words)
    else:
        qweight = _in_pieces(
            words, k, bits, lambda part: _padded_codes(layer, "weight_packed", part, bits, k)
        )
    if has_values(qweight):
        ok = bitstream.padding_is_zero(qweight, bits, k)
        layer.require(
            ok, "weight_packed", f"bits past code {k - 1} must be 0", "set bits in the last word of a row"
        )
    return qweight, (n, k), packing


def _packing(layer: Layer, scheme: Scheme, words: Tensor, k: int) -> str:
    """``"dense"`` or ``"legacy"``, by width, then by what the caller or the config's version says."""
    bits = scheme.bits
    widths = {p: width(k, bits, p) for p in ("dense", "legacy")}
    fitting = [p for p, w in widths.items() if w == words.shape[1]]
    rule = f"must have {widths['dense']} words a row (dense) or {widths['legacy']} (padded) for K={k}, bits={bits}"
    layer.require(bool(fitting), "weight_packed", rule, words.shape[1])
    if scheme.packing is not None and scheme.packing not in fitting:
        layer.require(False, "weight_packed", f"must have {widths[scheme.packing]} words a row to be "
                      f"{scheme.packing}", words.shape[1])  # fmt: skip
    if scheme.packing is not None or len(fitting) == 1:
        return scheme.packing or fitting[0]
    per_word = WORD_BITS // bits
    if WORD_BITS % bits == 0 or k <= per_word:  # one and the same; what remains is what the zero points do
        return "legacy" if scheme.dense_version is False else "dense"
    if scheme.dense_version is not None:
        return "dense" if scheme.dense_version else "legacy"
    if has_values(words) and bool((words >> per_word * bits).any()):
        return "dense"  # padded words leave these bits 0
    raise WeightFormatError(
        f"{layer.field('weight_packed')}: {words.shape[1]} words of K={k}, bits={bits} may be dense or padded: the "
        "config must have a version, or packing= say which; got neither"
    )


def _padded_codes(layer: Layer, suffix: str, words: Tensor, bits: int, count: int) -> Tensor:
    """Codes uint8 ``[count, R]`` of padded words ``[R, W]``."""
    if words.is_meta:
        return torch.empty(count, len(words), dtype=torch.uint8, device="meta")
    per_word = WORD_BITS // bits
    shifts = torch.arange(per_word, dtype=torch.int32, device=words.device) * bits
    codes = (words[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)
    if has_values(words):
        spare = WORD_BITS % bits > 0 and bool((words >> per_word * bits).any())
        ok = not spare and not bool(codes[:, count:].any())
        layer.require(ok, suffix, f"bits that hold no code must be 0 ({per_word} codes a word)", "set bits")
    return codes[:, :count].t()


def _byte_codes(layer: Layer, bits: int) -> tuple[Tensor, tuple[int, int]]:
    weight = layer.take("weight", (torch.int8,), 2)
    n, k = weight.shape
    half = 1 << bits - 1
    if has_values(weight) and bits < 8:
        low, high = (int(v) for v in torch.aminmax(weight))
        layer.require(
            -half <= low and high < half, "weight", f"must be in [{-half}, {half - 1}]", [low, high]
        )
    rows = weight.contiguous().view(torch.uint8)
    if bits == 8:  # plus 128 flips the top bit
        return words_from_rows(rows, lambda part: part ^ 128), (n, k)
    return _in_pieces(weight, k, bits, lambda part: part.t() if part.is_meta else (part + half).t()), (n, k)


def _in_pieces(rows: Tensor, k: int, bits: int, codes: Callable[[Tensor], Tensor]) -> Tensor:
    """``qweight`` of N rows; ``codes`` gives those of some rows, integers ``[K, n]``."""
    qweight = torch.empty(words_for(k, bits), len(rows), dtype=torch.int32, device=rows.device)
    step = max(1, _CHUNK_CODES // k)
    for start in range(0, len(rows), step):
        qweight[:, start : start + step] = bitstream.pack(codes(rows[start : start + step]), bits)
    return qweight


def _zeros(
    layer: Layer, scheme: Scheme, packing: str, scales: Tensor, shape: tuple[int, int]
) -> Tensor | None:
    """Zero points packed down G, or None. A symmetric layer's, if there are any, must say nothing."""
    suffix, (n, k), bits = "weight_zero_point", shape, scheme.bits
    stored = layer.get(suffix)
    if stored is None:
        ok = scheme.symmetric is not False
        layer.require(ok, suffix, "must be there where symmetric is false", ", ".join(sorted(layer.tensors)))
        return None
    stored = layer.take(suffix, (torch.int32, torch.int8, *SCALES))
    half = 1 << bits - 1
    if stored.dtype == torch.int32:
        layer.require(scheme.format == INT_PACKED, suffix, "dtype must be int8", "int32")
        groups = 1 if scheme.group_size is None else -(-k // scheme.group_size)
        rows = width(n, bits, packing)
        layer.shape(suffix, stored, (rows, groups), f"[{rows} words of N={n} zero points ({packing}), G]")
        codes = _unpack_rows(layer, suffix, turned(stored), bits, n, packing).t()  # [G, N]
    else:
        layer.require(stored.shape == scales.shape, suffix, "must have the shape of weight_scale unless packed",
                      f"{list(stored.shape)} beside {list(scales.shape)}")  # fmt: skip
        values, _ = group_values(layer, suffix, stored, scheme, shape)
        codes = _without_sign(layer, suffix, values, half)
    if scheme.symmetric:
        if has_values(codes):
            same = bool((codes == half).all())
            layer.require(same, suffix, "must be 0 throughout where symmetric is true", "another zero point")
        return None
    return bitstream.pack(codes, bits)


def _without_sign(layer: Layer, suffix: str, values: Tensor, half: int) -> Tensor:
    """Whole numbers of any dtype in ``[-half, half)`` as uint8, plus half."""
    if values.is_meta:
        return torch.empty(values.shape, dtype=torch.uint8, device="meta")
    values = values.float()
    whole = bool((values.isfinite() & (values == values.round())).all())
    layer.require(whole, suffix, "must be whole numbers", "fractions, infinity or NaN")
    low, high = (int(v) for v in torch.aminmax(values))
    layer.require(-half <= low and high < half, suffix, f"must be in [{-half}, {half - 1}]", [low, high])
    return (values + half).to(torch.uint8)


def _unpack_rows(layer: Layer, suffix: str, words: Tensor, bits: int, count: int, packing: str) -> Tensor:
    """Codes uint8 ``[count, R]`` of rows of words ``[R, W]``."""
    if packing == "legacy":
        return _padded_codes(layer, suffix, words, bits, count)
    stream = turned(words)
    if has_values(stream):
        ok = bitstream.padding_is_zero(stream, bits, count)
        layer.require(ok, suffix, f"bits past zero point {count - 1} must be 0", "set bits in the last row")
    return bitstream.unpack(stream, bits, count)


def _g_idx(layer: Layer, scheme: Scheme, k: int, group_size: int, groups: int) -> Tensor | None:
    suffix = "weight_g_idx"
    stored = layer.get(suffix)
    if stored is None:
        layer.require(not scheme.act_order, suffix, "must be there for actorder group", sorted(layer.tensors))
        return None
    stored = layer.take(suffix, _WHOLE)
    layer.shape(suffix, stored, (k,), "[K]")
    if not has_values(stored):
        return stored.to(torch.int32)
    low, high = (int(v) for v in torch.aminmax(stored))
    if low == high == -1:  # never filled in: no act-order
        return None
    layer.require(low >= 0 and high < groups, suffix, f"must be in [0, G) with G={groups}", [low, high])
    plain = torch.arange(k, device=stored.device) // group_size
    return None if torch.equal(stored.long(), plain) else stored.to(torch.int32)


def write(
    w: QuantizedWeight, *, packed: bool, packing: str = "dense", strategy: str | None = None
) -> dict[str, Tensor]:
    """Weight -> tensors by suffix, the inverse of :func:`read`.

    Args:
        w: of integer codes, with no or integer zero points.
        packed: pack-quantized rather than int-quantized.
        packing: ``"dense"`` or ``"legacy"``.
        strategy: None means channel or group.

    Raises:
        WeightFormatError: the format cannot hold this weight; says which field and why.
    """
    require(packing in ("dense", "legacy"), "packing", "must be 'dense' or 'legacy'", repr(packing))
    require(w.codebook is None, "codebook", "must be absent for integer formats", "a codebook")
    ok = w.zero_kind in (ZeroKind.NONE, ZeroKind.INT)
    require(ok, "zeros", "must be integers for compressed-tensors", f"zero kind {w.zero_kind}")
    require(w.scale2 is None, "scale2", "must be absent for integer formats", "a second level")
    require(w.scales.dtype in SCALES, "scales", "must be float16, bfloat16 or float32", w.scales.dtype)
    k, n = w.shape
    strategy = strategy or default_strategy(w.group_size, k)
    fits = strategy in ("tensor", "channel", "group")
    require(fits, "strategy", "must be tensor, channel or group", repr(strategy))
    whole = strategy == "group" or w.spec.groups == 1
    require(whole, "group_size", f"must be K={k} for strategy {strategy}", w.group_size)
    bits, half = w.bits, 1 << w.bits - 1
    tensors = {"weight_scale": file_values(w.scales, strategy, None)}
    zeros = w.unpack_zeros()
    if packed:
        words = turned(w.qweight) if packing == "dense" else _pad(w.unpack(), bits)
        tensors |= {"weight_packed": words, "weight_shape": torch.tensor([n, k], device="cpu")}
    elif bits == 8:
        tensors["weight"] = (rows_from_words(w.qweight, k) ^ 128).view(torch.int8)
    else:
        tensors["weight"] = turned(w.unpack().to(torch.int8) - half)
    if zeros is not None and packed and strategy != "tensor":
        down = turned(zeros)  # [N, G]
        packed_zeros = bitstream.pack(down, bits) if packing == "dense" else turned(_pad(down, bits))
        tensors["weight_zero_point"] = packed_zeros
    elif zeros is not None:
        signed = (zeros ^ 128).view(torch.int8) if bits == 8 else zeros.to(torch.int8) - half
        tensors["weight_zero_point"] = file_values(signed, strategy, None)
    if w.g_idx is not None:
        require(strategy == "group", "g_idx", "needs strategy group", strategy)
        tensors["weight_g_idx"] = w.g_idx.clone()
    return tensors


def _pad(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[count, R]`` as padded words ``[R, W]``."""
    per_word = WORD_BITS // bits
    short = -codes.shape[0] % per_word
    lanes = torch.nn.functional.pad(codes.t(), (0, short)).view(codes.shape[1], -1, per_word).to(torch.int64)
    words = (lanes << torch.arange(per_word, device=codes.device) * bits).sum(-1)
    return words.to(torch.int32)
