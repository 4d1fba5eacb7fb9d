"""The oracle: numpy, float64, one bit at a time. Slow and dull on purpose; shares no code with any backend."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qmm.weight import QuantizedWeight, ZeroKind

Array = npt.NDArray[np.float64]


def to_float64(t: Tensor) -> Array:
    """The numbers of a tensor of any dtype that a weight may hold, decoded from its bytes."""
    t = t.detach().cpu().contiguous()
    if t.dtype == torch.bfloat16:
        words = t.view(torch.int16).numpy().astype(np.uint16).astype(np.uint32) << 16
        return words.view(np.float32).astype(np.float64)
    if t.dtype == torch.float8_e4m3fn:
        table = np.array([_e4m3(b) for b in range(256)])
        return np.asarray(table[t.view(torch.uint8).numpy()])
    if str(t.dtype) == "torch.float8_e8m0fnu":
        table = np.array([math.nan if b == 255 else 2.0 ** (b - 127) for b in range(256)])
        return np.asarray(table[t.view(torch.uint8).numpy()])
    return t.numpy().astype(np.float64)


def _e4m3(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def codes(words: Tensor, bits: int, rows: int) -> Array:
    """Codes ``[rows, N]`` of a little-endian bit stream down the rows of int32 words."""
    stream = words.detach().cpu().numpy().astype(np.int64) & 0xFFFFFFFF
    found = np.zeros((rows, stream.shape[1]))
    for row in range(rows):
        for bit in range(bits):
            position = row * bits + bit
            found[row] += (stream[position // 32] >> (position % 32) & 1) * 2.0**bit
    return found


def nibbles(words: Tensor, rows: int) -> Array:
    """4-bit integers ``[rows, N]``: value g of a column is the half byte g of its words' bytes, the low half first."""
    raw = words.detach().cpu().t().contiguous().numpy().astype("<i4").view(np.uint8)  # [N, bytes]
    return np.array([raw[:, g // 2] >> 4 * (g % 2) & 15 for g in range(rows)], np.float64)


def factors(
    first: Tensor, second: Tensor | None, ratio: int | None, groups: int, divide: bool = False
) -> Array:
    """Two-level factors ``[G, N]``; the second level multiplies or divides."""
    value = nibbles(first, groups) if first.dtype == torch.int32 else to_float64(first)
    if second is None:
        return value
    level = to_float64(second)
    each = level if ratio == 0 else np.array([level[g // (ratio or 1)] for g in range(value.shape[0])])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return value / each if divide else value * each


def dequantize(w: QuantizedWeight) -> tuple[Array, Array]:
    """W and Wbar, ``[K, N]`` each: the weight, and the size of the terms it is made of (docs/numerics.md)."""
    t, s = w.tensors, w.spec
    q = codes(t.qweight, s.bits, s.in_features)
    group = [k // s.group_size for k in range(s.in_features)] if t.g_idx is None else t.g_idx.cpu().tolist()
    scale = factors(t.scales, t.scale2, s.scale2_ratio, s.groups, s.scale2_divides)[group]
    with np.errstate(invalid="ignore", over="ignore"):
        if t.codebook is not None:
            value = to_float64(t.codebook)[q.astype(np.int64)] * scale
            return value, np.abs(value)
        if s.zero_kind is ZeroKind.BIAS:
            assert t.zeros is not None
            bias = factors(t.zeros, t.zero2, s.zero2_ratio, s.groups)[group]
            return scale * q + bias, np.abs(scale * q) + np.abs(bias)
        if s.zero_kind is ZeroKind.NONE:
            zero = np.full_like(scale, 2.0 ** (s.bits - 1))
        else:
            assert t.zeros is not None
            is_int = s.zero_kind is ZeroKind.INT
            zero = (codes(t.zeros, s.bits, s.groups) if is_int else to_float64(t.zeros))[group]
        return (q - zero) * scale, np.abs(scale) * (np.abs(q) + np.abs(zero))


def activate(x: Array, activation: str | None) -> Array:
    """The activation in float64; ``erf`` one element at a time."""
    found = x
    if activation == "relu":
        found = np.where(np.isnan(x), x, np.maximum(x, 0))
    elif activation == "silu":
        found = x * np.array([_sigmoid(v) for v in x.ravel()]).reshape(x.shape)
    elif activation == "gelu":
        found = 0.5 * x * (1 + np.array([math.erf(v / math.sqrt(2)) for v in x.ravel()]).reshape(x.shape))
    elif activation == "gelu_tanh":
        found = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    else:
        assert activation is None, activation
    return found


def _sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v)) if v > -700 else 0.0
