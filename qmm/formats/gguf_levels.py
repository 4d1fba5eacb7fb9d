"""The two ways in which GGUF blocks store their scales, as pairs of inverse functions on fields of bytes.

Shapes: a field is uint8 ``[N, B, bytes]`` for N rows (columns of W) of B blocks; first-level factors are
``[N, B, g]`` for the g groups of a block, second-level factors ``[N, B]``. Source: ggml-quants.c, gguf/quants.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Fields = Mapping[str, Tensor]
E8M0: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)  # torch 2.7 and later


class Factors(NamedTuple):
    """What multiplies and shifts the codes: ``w = q * scale * scale2 + zero * zero2`` (or a codebook's value)."""

    scale: Tensor
    zero: Tensor | None = None
    scale2: Tensor | None = None
    zero2: Tensor | None = None


@dataclass(frozen=True)
class Levels:
    """One way to store factors.

    Attributes:
        decode: fields -> factors, exact.
        encode: factors (in range) -> fields, the inverse.
        scale_range: values a first-level int8 scale may take; None with floating scales.
        zero_range: the same for first-level zeros.
        packed: they have 4 bits, and the weight keeps them so.
    """

    decode: Callable[[Fields], Factors]
    encode: Callable[[Factors], Fields]
    scale_range: tuple[int, int] | None = None
    zero_range: tuple[int, int] | None = None
    packed: bool = False


def _half(field: Tensor) -> Tensor:
    """2 bytes ``[N, B, 2]`` as float16 ``[N, B, 1]``."""
    return field.contiguous().view(-1).view(torch.float16).view(*field.shape[:2], 1)


def _bytes(value: Tensor) -> Tensor:
    """float16 ``[N, B, 1]`` or ``[N, B]`` as 2 bytes ``[N, B, 2]``."""
    # flat first: a size of 1 may have any stride in a contiguous tensor, which a view of another size refuses
    return value.to(torch.float16).contiguous().view(-1).view(torch.uint8).view(*value.shape[:2], 2)


def _wide(field: Tensor) -> Tensor:
    """2 bytes as a float32 second-level factor ``[N, B]``."""
    return _half(field)[..., 0].float()


# -- one level: float16 d, and m in the *_1 types -----------------------------------------------------------------

ONE = Levels(
    lambda f: Factors(_half(f["d"])),
    lambda v: {"d": _bytes(v.scale)},
)


def _encode_one_bias(v: Factors) -> Fields:
    assert v.zero is not None
    return {"d": _bytes(v.scale), "m": _bytes(v.zero)}


ONE_BIAS = Levels(lambda f: Factors(_half(f["d"]), _half(f["m"])), _encode_one_bias)


# -- one level: e8m0 e (MXFP4) ------------------------------------------------------------------------------------


def _decode_e8m0(f: Fields) -> Factors:
    if E8M0 is not None:
        return Factors(f["e"].contiguous().view(E8M0))
    exponent = f["e"].double() - 127
    return Factors(torch.where(f["e"] == 255, torch.nan, torch.exp2(exponent)).float())


def _encode_e8m0(v: Factors) -> Fields:
    if v.scale.dtype == E8M0:
        return {"e": v.scale.contiguous().view(torch.uint8)}
    exponent = torch.log2(v.scale.double()).round() + 127
    return {"e": torch.where(v.scale.isnan(), 255.0, exponent).to(torch.uint8)}


E8M0_SCALE = Levels(_decode_e8m0, _encode_e8m0)


# -- two levels: small integers times d, and times -dmin ----------------------------------------------------------


def _with_min(scale: Tensor, minimum: Tensor, f: Fields) -> Factors:
    """``w = d*sc*q - dmin*m``: the minus sign goes into the second level of the bias."""
    return Factors(scale.to(torch.int8), minimum.to(torch.int8), _wide(f["d"]), -_wide(f["dmin"]))


def _d_and_dmin(v: Factors) -> dict[str, Tensor]:
    assert v.scale2 is not None and v.zero2 is not None
    return {"d": _bytes(v.scale2), "dmin": _bytes(-v.zero2)}


def _d(v: Factors) -> dict[str, Tensor]:
    assert v.scale2 is not None
    return {"d": _bytes(v.scale2)}


def _decode_nibble_pairs(f: Fields) -> Factors:
    return _with_min(f["scales"] & 15, f["scales"] >> 4, f)


def _encode_nibble_pairs(v: Factors) -> Fields:
    assert v.zero is not None
    return _d_and_dmin(v) | {"scales": v.scale.view(torch.uint8) | v.zero.view(torch.uint8) << 4}


# Q2_K: byte j is mmmmssss, the scale and minimum of group j
NIBBLE_PAIRS = Levels(_decode_nibble_pairs, _encode_nibble_pairs, (0, 15), (0, 15), packed=True)


def _decode_six_bit_pairs(f: Fields) -> Factors:
    low, mid, high = f["scales"].chunk(3, -1)
    scale = torch.cat([low & 63, (high & 15) | (low >> 2 & 48)], -1)
    minimum = torch.cat([mid & 63, high >> 4 | (mid >> 2 & 48)], -1)
    return _with_min(scale, minimum, f)


def _encode_six_bit_pairs(v: Factors) -> Fields:
    assert v.zero is not None
    s0, s1 = v.scale.view(torch.uint8).chunk(2, -1)
    m0, m1 = v.zero.view(torch.uint8).chunk(2, -1)
    low, mid = s0 | s1 >> 4 << 6, m0 | m1 >> 4 << 6
    return _d_and_dmin(v) | {"scales": torch.cat([low, mid, s1 & 15 | m1 << 4], -1)}


# Q4_K, Q5_K: 8 scales s and 8 minima m of 6 bits in 12 bytes; bytes 0..3 | 4..7 | 8..11 of j = 0..3:
#   hhssssss (h: bits 4, 5 of s[4+j]; s[j])  |  hhmmmmmm (the same of m)  |  mmmmssss (low bits of m[4+j], s[4+j])
SIX_BIT_PAIRS = Levels(_decode_six_bit_pairs, _encode_six_bit_pairs, (0, 63), (0, 63))


def _planes(field: Tensor, bits: int) -> Tensor:
    """Value ``i`` of a byte string from byte ``i % width``, bit plane ``i // width``."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=field.device)[:, None]
    return (field[..., None, :] >> shifts & (1 << bits) - 1).flatten(-2)


def _decode_six_bits(f: Fields) -> Factors:
    value = _planes(f["scales"][..., :8], 4) | _planes(f["scales"][..., 8:], 2) << 4
    return Factors(value.to(torch.int8) - 32, scale2=_wide(f["d"]))


def _encode_six_bits(v: Factors) -> Fields:
    value = (v.scale + 32).view(torch.uint8)
    low0, low1 = value.chunk(2, -1)
    h0, h1, h2, h3 = (value >> 4).chunk(4, -1)
    return _d(v) | {"scales": torch.cat([low0 & 15 | low1 << 4, h0 | h1 << 2 | h2 << 4 | h3 << 6], -1)}


# Q3_K: 16 scales of 6 bits, stored plus 32: 8 bytes of low nibbles (j low, 8+j high), then 4 bytes of bit pairs
SIX_BITS = Levels(_decode_six_bits, _encode_six_bits, (-32, 31))

# Q6_K: 16 scales of int8
INT8 = Levels(
    lambda f: Factors(f["scales"].contiguous().view(torch.int8), scale2=_wide(f["d"])),
    lambda v: _d(v) | {"scales": v.scale.contiguous().view(torch.uint8)},
    (-128, 127),
)


def _decode_iq4_xs(f: Fields) -> Factors:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=f["d"].device)
    low = (f["scales_l"][..., None] >> shifts[::2] & 15).flatten(-2)
    high = (f["scales_h"][..., None] >> shifts & 3).flatten(-2)
    return Factors((low | high << 4).to(torch.int8) - 32, scale2=_wide(f["d"]))


def _encode_iq4_xs(v: Factors) -> Fields:
    value = (v.scale + 32).view(torch.uint8)
    low, high = value & 15, (value >> 4).reshape(*value.shape[:-1], 2, 4)
    packed = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6
    return _d(v) | {"scales_h": packed, "scales_l": low[..., 0::2] | low[..., 1::2] << 4}


# IQ4_XS: 8 scales of 6 bits, stored plus 32: scales_h has bits 4, 5 (bits 2j of a uint16), scales_l nibbles in order
IQ4_XS = Levels(_decode_iq4_xs, _encode_iq4_xs, (-32, 31))
