"""AWQ: layers as AutoAWQ and gptqmodel write them, versions gemm and gemv, read and written exactly.

K = in_features, N = out_features, G = K / group_size groups; zero points are stored as they are (no minus one)::

    W[k, n] = (q[k, n] - z[k // group_size, n]) * scales[k // group_size, n]

    version "gemm"
    qweight  int32     [K, ceil(N*bits/32)]    codes along N
    qzeros   int32     [G, ceil(N*bits/32)]    zero points along N, packed as the codes are
    scales   fp16 ...  [G, N]

        bits=4, word i of a row:  | n=8i+7 | 8i+5 | 8i+3 | 8i+1 | 8i+6 | 8i+4 | 8i+2 | 8i |   (bit 31 ... bit 0)
        that is, nibble j holds column 8i + (0, 2, 4, 6, 1, 3, 5, 7)[j]

        other bits (gptqmodel 7): a dense little-endian bit stream along N in natural order, with no such permutation

    version "gemv", 4 bits, group_size 32, 64 or from 128 on
    qweight  int32     [N, K/8]                codes along K, natural order: | k=8i+7 | ... | k=8i |
    qzeros   int32     [N, Z]                  zero points along G, natural order, then zeros
    scales   fp16 ...  [N, 8*Z]                along G, then zeros

        Z = ceil(G/8) for group_size >= 128, rounded up to a multiple of 2 for 64 and of 4 for 32

``bias`` ``[N]`` may stand beside them and is not part of the weight. The version has to be declared: the shapes of the
two can be the same. "gemv_fast" and "marlin" are other layouts, which are not read.

Exactness: every code, zero point and scale is kept, so tensors -> weight -> tensors gives identical bytes;
``dequantize()`` equals the libraries' float32 arithmetic bit for bit.

Source: AutoAWQ 0.2.9 and gptqmodel 7.7.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qmm.formats.packed import (
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
    pack_along,
    plain_scales,
    report_loss,
    required_setting,
    setting,
    turn_along,
    turn_down,
    unpack_along,
    warn,
    whole_zeros,
)
from qmm.weight import QuantizedWeight, ZeroKind, bitstream
from qmm.weight.spec import WORD_BITS, words_for
from qmm.weight.validate import require, whole_number

KEY = "qweight"
SUFFIXES = frozenset({"qweight", "qzeros", "scales"})
VERSIONS = ("gemm", "gemv")
LANES = (0, 2, 4, 6, 1, 3, 5, 7)  # column held by each nibble of a gemm word
_PER_WORD = 8


def from_checkpoint(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, name: str = ""
) -> QuantizedWeight:
    """One layer of an AWQ checkpoint.

    Args:
        tensors: ``qweight``, ``qzeros``, ``scales``, as drawn above (``bias`` is left alone).
        config: the quantisation config as it stands in ``config.json`` (or AutoAWQ's ``quant_config.json``): ``bits``
            (or ``w_bit``), ``group_size`` (or ``q_group_size``), ``version`` (or ``checkpoint_format``, ``format``),
            ``zero_point``.
        name: the layer, for errors and warnings.

    Returns:
        A weight with zero points of kind int.

    Raises:
        WeightFormatError: a tensor is missing, damaged or contradicts another or the config, or the version is
            unknown or not declared; names the tensor, the rule and the value.

    Warns:
        FormatWarning: the config calls the layer symmetric, and all zero points are one off the midpoint.
    """
    with named(name):
        found = checked_keys(tensors, SUFFIXES)
        return _read(found, check_config(config), name)


def from_tensors(tensors: Mapping[str, Tensor], *, name: str = "", **config: Any) -> QuantizedWeight:
    """:func:`from_checkpoint` with the config's entries as keywords: ``bits=4, group_size=128, version="gemm"``.

    Raises:
        WeightFormatError: as :func:`from_checkpoint`.

    Example:
        >>> import torch, qmm
        >>> from qmm.formats import awq
        >>> w = qmm.quantize(torch.randn(32, 64), bits=4, group_size=32, symmetric=False)
        >>> awq.from_tensors(awq.to_tensors(w), bits=4, group_size=32, version="gemm").shape
        (64, 32)
    """
    return from_checkpoint(tensors, config, name=name)


def to_tensors(w: QuantizedWeight, *, version: str = "gemm", lossy: bool = False) -> dict[str, Tensor]:
    """The inverse of :func:`from_tensors`.

    Args:
        w: the weight.
        version: "gemm" or "gemv".
        lossy: round zero points that are not whole numbers; a warning tells the loss.

    Raises:
        WeightFormatError: the version cannot hold this weight; says which field and why.

    Warns:
        FormatWarning: the loss.

    Example:
        >>> import torch, qmm
        >>> from qmm.formats import awq
        >>> w = qmm.quantize(torch.randn(32, 64), bits=4, group_size=32, symmetric=False)
        >>> sorted(awq.to_tensors(w))
        ['qweight', 'qzeros', 'scales']
    """
    version = _version(version)
    bits, k, n, groups = w.bits, w.in_features, w.out_features, w.spec.groups
    require(w.g_idx is None, "g_idx", "cannot be held by AWQ (no act-order)", "a weight with g_idx")
    _check_width(bits, k, n, version)
    zeros, rounded = whole_zeros(w, 0, (1 << bits) - 1, lossy)
    scales = plain_scales(w)
    if version == "gemm":
        qweight = turn_along(w.qweight, bits, k, lambda q: _encode(q, bits))
        tensors = {"qweight": qweight, "qzeros": _encode(zeros, bits).contiguous(), "scales": scales}
    else:
        width = _gemv_width(groups, w.group_size)
        qzeros = torch.zeros(n, width, dtype=torch.int32, device=w.device)
        qzeros[:, : words_for(groups, bits)] = bitstream.pack(zeros, bits).t()
        padded = torch.zeros(n, width * _PER_WORD, dtype=scales.dtype, device=w.device)
        padded[:, :groups] = scales.t()
        tensors = {"qweight": w.qweight.t().contiguous(), "qzeros": qzeros, "scales": padded}
    if rounded:
        report_loss(w, from_tensors(tensors, bits=bits, group_size=w.group_size, version=version))
    return tensors


def _read(found: dict[str, Tensor], config: Mapping[str, Any], name: str) -> QuantizedWeight:
    check_method(config, "awq")
    version = _version(setting(_lower(config), "version", "checkpoint_format", "format"))
    bits = whole_number(required_setting(config, "bits", "w_bit"), "bits", 1, 8)
    given_group = required_setting(config, "group_size", "q_group_size")
    qweight, qzeros = check_words(found["qweight"], "qweight"), check_words(found["qzeros"], "qzeros")
    scales = check_factors(found["scales"], "scales")
    read = _read_gemm if version == "gemm" else _read_gemv
    fields = read(qweight, qzeros, scales, bits, given_group)
    symmetric = flag(config, "zero_point") is False
    groups = fields["scales"].shape[0]
    if symmetric and not check_symmetric(fields["zeros"], ZeroKind.INT, bits, groups, "zero_point is false"):
        warn(name, "qzeros: all one off the midpoint although zero_point is false; taken as they are")
    return QuantizedWeight(**fields, bits=bits, zero_kind=ZeroKind.INT)


def _read_gemm(qweight: Tensor, qzeros: Tensor, scales: Tensor, bits: int, given: object) -> dict[str, Any]:
    k, n = qweight.shape[0], scales.shape[1]
    _check_width(bits, k, n, "gemm")
    group_size = group_rows(given, k)
    groups, width = -(-k // group_size), words_for(n, bits)
    check_shape(qweight, "qweight", (k, width), f"[K, ceil(N*bits/32)] for N={n} and bits={bits}")
    check_shape(
        scales, "scales", (groups, n), f"[ceil(K/group_size), N] for K={k} and group_size={group_size}"
    )
    check_shape(qzeros, "qzeros", (groups, width), f"[G, ceil(N*bits/32)] for N={n} and bits={bits}")
    return {
        "qweight": turn_down(qweight, bits, n, lambda t: _decode(t, bits, n)),
        "scales": scales,
        "zeros": turn_down(qzeros, bits, n, lambda t: _decode(t, bits, n)),
        "group_size": group_size,
        "in_features": k,
    }


def _read_gemv(qweight: Tensor, qzeros: Tensor, scales: Tensor, bits: int, given: object) -> dict[str, Any]:
    n, k = qweight.shape[0], qweight.shape[1] * _PER_WORD
    _check_width(bits, k, n, "gemv")
    group_size = group_rows(given, k)
    require(k % group_size == 0, "group_size", f"must divide K={k} in version gemv", group_size)
    groups = k // group_size
    width = _gemv_width(groups, group_size)
    about = f"for K={k} and group_size={group_size}"
    check_shape(qzeros, "qzeros", (n, width), f"[N, Z] {about}")
    check_shape(scales, "scales", (n, width * _PER_WORD), f"[N, 8*Z] {about}")
    zeros = qzeros[:, : words_for(groups, bits)].t().clone(memory_format=torch.contiguous_format)
    used = groups * bits % WORD_BITS
    if used:  # what stands in the padding means nothing
        zeros[-1] &= (1 << used) - 1
    return {
        "qweight": qweight.t().contiguous(),
        "scales": scales[:, :groups].t().contiguous(),
        "zeros": zeros,
        "group_size": group_size,
        "in_features": k,
    }


def _version(value: object) -> str:
    require(value is not None, "version", f"must be declared as {' or '.join(VERSIONS)}", "nothing")
    version = str(value).lower()
    require(version in VERSIONS, "version", f"must be one of {', '.join(VERSIONS)}", repr(value))
    return version


def _lower(config: Mapping[str, Any]) -> dict[str, Any]:
    """AutoAWQ writes both "GEMM" and "gemm"."""
    return {key: value.lower() if isinstance(value, str) else value for key, value in config.items()}


def _check_width(bits: int, k: int, n: int, version: str) -> None:
    if version == "gemv":
        require(bits == 4, "bits", "must be 4 for AWQ's version gemv", bits)
        require(k % _PER_WORD == 0, "in_features", "must be a multiple of 8 for AWQ's version gemv", k)
        return
    require(bits >= 2, "bits", "must be 2 to 8 for AWQ", bits)
    whole = bits != 4 or n % _PER_WORD == 0
    require(whole, "out_features", "must be a multiple of 8 for AWQ of 4 bits", n)


def _gemv_width(groups: int, group_size: int) -> int:
    """Z, words of zero points of a column."""
    multiple = {64: 2, 32: 4}.get(group_size, 1)
    known = group_size >= 128 or multiple > 1
    require(known, "group_size", "must be 32, 64 or at least 128 for AWQ's version gemv", group_size)
    return -(-groups // (_PER_WORD * multiple)) * multiple


def _decode(words: Tensor, bits: int, n: int) -> Tensor:
    """Rows of gemm words -> codes ``[rows, N]``."""
    return unpack_along(words, bits, n, LANES if bits == 4 else None)


def _encode(codes: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`_decode`."""
    if bits == 4:
        codes = codes.reshape(codes.shape[0], -1, _PER_WORD)[:, :, LANES].flatten(1)
    return pack_along(codes, bits)
