"""What the formats of packed integers share: keys and config values checked, streams turned, zero points brought in.

Everything large is done in blocks, so that reading or writing a layer needs little memory beside the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qmm.errors import FormatWarning, WeightFormatError
from qmm.weight import QuantizedWeight, ZeroKind, bitstream
from qmm.weight.build import as_words
from qmm.weight.dequantize import effective, effective_scales
from qmm.weight.facts import has_values
from qmm.weight.spec import WORD_BITS, dtype_name, words_for
from qmm.weight.validate import FLOAT_DTYPES, is_minus_one, require, whole_number

BLOCK_CODES = 1 << 18  # codes turned at a time; temporaries are about 10 bytes each
NOT_THE_WEIGHT = frozenset({"bias"})  # may stand in the same layer, and is no business of a QuantizedWeight


@contextmanager
def named(layer: str) -> Iterator[None]:
    """Errors from within name the layer: ``model.layers.0.q_proj.qweight: ...``."""
    try:
        yield
    except WeightFormatError as error:
        if not layer:
            raise
        raise WeightFormatError(f"{layer}.{error}") from None


def warn(layer: str, text: str) -> None:
    """A :class:`qmm.FormatWarning` that names the layer."""
    warnings.warn(f"{layer}.{text}" if layer else text, FormatWarning, stacklevel=4)


def checked_keys(tensors: object, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Tensor]:
    """The tensors by key, without what is no part of the weight.

    Raises:
        WeightFormatError: a key is missing or unknown, or a value is no tensor.
    """
    require(isinstance(tensors, Mapping), "tensors", "must be a mapping", type(tensors).__name__)
    assert isinstance(tensors, Mapping)
    needed, known = sorted(required), {*required, *optional}
    have = ", ".join(sorted(map(str, tensors))[:20]) or "none"
    for key in needed:
        require(key in tensors, key, f"must be among the layer's tensors ({', '.join(needed)})", have)
    unknown = sorted(map(str, set(tensors) - known - NOT_THE_WEIGHT))
    require(not unknown, "tensors", f"must be among {', '.join(sorted(known))}", f"also {unknown[:20]}")
    for key, value in tensors.items():
        require(isinstance(value, Tensor), str(key), "must be a torch.Tensor", type(value).__name__)
        require(value.layout is torch.strided, str(key), "must be a dense strided tensor", value.layout)
    return {key: value for key, value in tensors.items() if key in known}


def check_config(config: object) -> Mapping[str, Any]:
    """The quantisation config as a mapping.

    Raises:
        WeightFormatError: it is none.
    """
    require(isinstance(config, Mapping), "config", "must be a mapping", type(config).__name__)
    assert isinstance(config, Mapping)
    return config


def setting(config: Mapping[str, Any], *keys: str) -> Any:
    """The value under any of ``keys`` (other names of one thing), or None; null is no value.

    Raises:
        WeightFormatError: two of them contradict each other.
    """
    found = {key: config[key] for key in keys if config.get(key) is not None}
    values = list(found.values())
    require(all(v == values[0] for v in values), " and ".join(found), "must agree", values)
    return values[0] if values else None


def required_setting(config: Mapping[str, Any], *keys: str) -> Any:
    """:func:`setting`, which must be there.

    Raises:
        WeightFormatError: it is not.
    """
    value = setting(config, *keys)
    require(value is not None, keys[0], "must be given in the quantisation config", "nothing")
    return value


def flag(config: Mapping[str, Any], key: str) -> bool | None:
    """A boolean of the config, or None where it is not given.

    Raises:
        WeightFormatError: neither true nor false.
    """
    value = config.get(key)
    require(value is None or isinstance(value, bool), key, "must be true or false", repr(value))
    return None if value is None else bool(value)


def check_method(config: Mapping[str, Any], *names: str) -> None:
    """The config's ``quant_method``, where given, must be one of ``names``."""
    method = config.get("quant_method")
    require(method is None or method in names, "quant_method", f"must be {' or '.join(names)}", repr(method))


def group_rows(value: object, k: int) -> int:
    """A group size as a number of rows; -1 is K."""
    return k if is_minus_one(value) else whole_number(value, "group_size", 1)


def check_words(t: Tensor, field: str) -> Tensor:
    """int32 words ``[R, C]`` (uint32 is viewed).

    Raises:
        WeightFormatError: another dtype (unpacked float zero points, say) or number of dimensions.
    """
    t = as_words(t)
    require(t.dtype == torch.int32, field, "dtype must be int32 (packed words)", dtype_name(t.dtype))
    rule = "must have 2 dimensions (stacks of experts are not supported yet)"
    require(t.dim() == 2 and t.numel() > 0, field, rule + " and not be empty", f"shape {list(t.shape)}")
    return t


def check_factors(t: Tensor, field: str) -> Tensor:
    """Floating ``[R, C]`` as the files hold scales.

    Raises:
        WeightFormatError: another dtype or number of dimensions.
    """
    allowed = ", ".join(dtype_name(d) for d in FLOAT_DTYPES)
    require(t.dtype in FLOAT_DTYPES, field, f"dtype must be one of {allowed}", dtype_name(t.dtype))
    require(t.dim() == 2, field, "must have 2 dimensions", f"shape {list(t.shape)}")
    return t


def check_shape(t: Tensor, field: str, expected: tuple[int, ...], meaning: str) -> None:
    """The shape must be ``expected``."""
    require(tuple(t.shape) == expected, field, f"shape must be {meaning} = {list(expected)}", list(t.shape))


# Streams: along the rows of a file, down the columns of a weight.


def unpack_along(words: Tensor, bits: int, n: int, order: Sequence[int] | None = None) -> Tensor:
    """Words ``[R, ceil(n*bits/32)]``, a little-endian bit stream along each row -> codes uint8 ``[R, n]``.

    ``order`` is the place in the row of each field of a word, lowest bits first, for widths that divide 32; None is
    natural order.
    """
    if WORD_BITS % bits:
        return bitstream.unpack(words.t().contiguous(), bits, n).t()
    rows, width = words.shape
    places = order or range(WORD_BITS // bits)
    codes = torch.empty(rows, width, len(places), dtype=torch.uint8, device=words.device)
    for field, place in enumerate(places):
        codes[:, :, place] = (words >> (field * bits)) & ((1 << bits) - 1)
    return codes.view(rows, -1)[:, :n]


def pack_along(codes: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`unpack_along` in natural order; bits past the last code are 0."""
    return bitstream.pack(codes.t().contiguous(), bits).t()


def turn_down(words: Tensor, bits: int, n: int, decode: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows of a file -> canonical int32 stream down R.

    Args:
        words: ``[R, ...]``.
        bits: of a code.
        n: codes of a row.
        decode: rows of words -> codes ``[rows, n]``.
    """
    rows = words.shape[0]
    out = torch.empty(words_for(rows, bits), n, dtype=torch.int32, device=words.device)
    for start in range(0, rows, block_rows(n)):
        codes = decode(words[start : start + block_rows(n)])
        packed = bitstream.pack(codes.contiguous(), bits)
        at = start * bits // WORD_BITS
        out[at : at + packed.shape[0]] = packed
    return out


def turn_along(stream: Tensor, bits: int, rows: int, encode: Callable[[Tensor], Tensor]) -> Tensor:
    """The inverse of :func:`turn_down`: canonical stream of ``rows`` codes down -> rows of a file."""
    parts = []
    step = block_rows(stream.shape[1])
    for start in range(0, rows, step):
        count = min(step, rows - start)
        at = start * bits // WORD_BITS
        codes = bitstream.unpack(stream[at : at + words_for(count, bits)], bits, count)
        parts.append(encode(codes).contiguous())
    return torch.cat(parts)


def block_rows(n: int) -> int:
    """Rows of a block of ``n`` columns: a multiple of 32, so that blocks begin at whole words."""
    return WORD_BITS * max(1, BLOCK_CODES // (WORD_BITS * max(1, n)))


# A weight's factors, as files hold them.


def plain_scales(w: QuantizedWeight) -> Tensor:
    """Scales as one floating tensor ``[G, N]``, exactly the values used; float16 where every one is a float16."""
    t = w.tensors
    if t.scale2 is None and t.scales.dtype in FLOAT_DTYPES:
        return t.scales
    scale = effective_scales(t, w.spec, 0, w.out_features)
    half = scale.half()
    return half if torch.equal(half.float(), scale) else scale


def whole_zeros(w: QuantizedWeight, low: int, high: int, lossy: bool) -> tuple[Tensor, bool]:
    """Zero points as integers int32 ``[G, N]`` in ``[low, high]``, and whether they were rounded.

    Raises:
        WeightFormatError: they are not all such integers, and ``lossy`` is off; or there is a codebook.
    """
    require(w.codebook is None, "codebook", "cannot be held by the format", "a weight with a codebook")
    t = w.tensors
    if w.zero_kind is ZeroKind.NONE:
        shape = (w.spec.groups, w.out_features)
        return torch.full(shape, w.spec.midpoint, dtype=torch.int32, device=w.device), False
    stored = w.unpack_zeros()
    assert stored is not None
    if w.zero_kind is ZeroKind.BIAS:
        rule = "of kind bias cannot be held as whole zero points (lossy=True rounds)"
        require(lossy, "zeros", rule, "kind bias")
        scale = effective_scales(t, w.spec, 0, w.out_features)
        zero = -effective(stored, t.zero2, w.spec.zero2_ratio, w.spec.groups) / scale
    else:
        zero = stored.float()
    fits = (zero == zero.round()) & (zero >= low) & (zero <= high)
    wrong = int((~fits).sum())
    if wrong and not lossy:
        first = float(zero[~fits][0])
        rule = f"must be whole numbers from {low} to {high} (lossy=True rounds them)"
        raise WeightFormatError(f"zeros: {rule}; got {wrong} of {zero.numel()} that are not, first {first:g}")
    rounded = bool(wrong) or w.zero_kind is ZeroKind.BIAS
    return zero.nan_to_num(nan=low).round().clamp(low, high).to(torch.int32), rounded


def report_loss(before: QuantizedWeight, after: QuantizedWeight) -> None:
    """Warn with what rounding did to the weights."""
    change = (after.dequantize() - before.dequantize()).double()
    largest, rms = float(change.abs().max()), float(change.pow(2).mean().sqrt())
    warn("", f"zeros: lossy: zero points were rounded; weights moved by up to {largest:.3g}, rms {rms:.3g}")


def check_symmetric(zeros: Tensor, zero_kind: ZeroKind, bits: int, groups: int, declared: str) -> bool:
    """Zero points of a layer that its config calls symmetric: False where they are all one off the midpoint.

    Raises:
        WeightFormatError: neither the midpoint nor all one off it (the sign of the other version of the format).
    """
    if not has_values(zeros):
        return True
    middle = 1 << (bits - 1)

    def all_are(z: int) -> bool:
        column = torch.full((groups, 1), z, dtype=torch.int32, device=zeros.device)
        return bool((zeros == bitstream.pack(column, bits)).all())

    whole = zero_kind is ZeroKind.INT
    if whole and all_are(middle):
        return True
    if whole and any(all_are(z) for z in (middle - 1, middle + 1) if z < 1 << bits):
        return False
    rule = f"must be the midpoint {middle} everywhere where {declared}"
    raise WeightFormatError(f"qzeros: {rule}; got other zero points")
