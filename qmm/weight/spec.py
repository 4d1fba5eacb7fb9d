"""WeightSpec: the facts of a quantised weight, without its tensors. Hashable, so that plans can be keyed by it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

WORD_BITS = 32
UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined, unused-ignore]  # the stubs lack it
FACTOR_BITS = 4  # bits of a packed first-level factor: UINT4 is its dtype, and int32 words hold eight
SCALE_DTYPES: tuple[torch.dtype, ...] = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    *((torch.float8_e8m0fnu,) if hasattr(torch, "float8_e8m0fnu") else ()),  # torch 2.7 and later
    torch.int8,
    UINT4,
)


class ZeroKind(str, enum.Enum):
    """How a zero point enters the weight; ``q`` is a code, ``s`` its scale.

    ========  =======================================  ==================================
    kind      stored ``zeros``                         weight
    ========  =======================================  ==================================
    ``none``  nothing                                  ``(q - 2**(bits-1)) * s``
    ``int``   int32 words, packed like codes, down G   ``(q - z) * s``
    ``float`` floating ``[G, N]``                      ``(q - z) * s``
    ``bias``  like scales: floating, int8 or uint4     ``s * q + b``
    ========  =======================================  ==================================

    With a codebook the kind is ``none`` and the weight is ``codebook[q] * s``: nothing is subtracted.

    Example:
        >>> from qmm import ZeroKind
        >>> print(*ZeroKind)
        none int float bias
    """

    NONE = "none"
    INT = "int"
    FLOAT = "float"
    BIAS = "bias"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class WeightSpec:
    """Facts of a :class:`~qmm.QuantizedWeight`.

    Attributes:
        bits: bits of a code, 1 to 8.
        group_size: rows of K that share a scale (never -1 here).
        in_features: K.
        out_features: N.
        groups: G, rows of ``scales``.
        zero_kind: see :class:`ZeroKind`.
        scale_dtype: dtype of a scale as stored; ``torch.uint4`` where int32 words hold eight of them.
        zero_dtype: dtype of ``zeros``, or None; for kind bias as ``scale_dtype``.
        scale2_ratio: None without a second level; 0 for one factor for the whole weight (``scale2`` is ``[1]``);
            otherwise the number of consecutive groups that share a row of ``scale2``.
        zero2_ratio: the same for ``zero2``.
        codebook_dtype: dtype of the codebook, or None.
        act_order: whether ``g_idx`` names each row's group.
        scale2_divides: the scale is ``scales / scale2`` and not their product (NVFP4 of compressed-tensors).

    Example:
        >>> import torch, qmm
        >>> print(qmm.quantize(torch.randn(8, 64), bits=4, group_size=32).spec)
        K=64, N=8, int4, group 32, scales float16, symmetric
    """

    bits: int
    group_size: int
    in_features: int
    out_features: int
    groups: int
    zero_kind: ZeroKind
    scale_dtype: torch.dtype
    zero_dtype: torch.dtype | None = None
    scale2_ratio: int | None = None
    zero2_ratio: int | None = None
    codebook_dtype: torch.dtype | None = None
    act_order: bool = False
    scale2_divides: bool = False

    def __str__(self) -> str:
        """``K=1024, N=512, int4, group 128, scales float16, symmetric``."""
        parts = [
            f"K={self.in_features}, N={self.out_features}",
            f"int{self.bits}" if self.codebook_dtype is None else f"{self.bits}-bit codebook",
            f"group {self.group_size}",
            f"scales {dtype_name(self.scale_dtype)}"
            + ("" if self.scale2_ratio is None else " / float32" if self.scale2_divides else " x float32"),
            "symmetric"
            if self.zero_kind is ZeroKind.NONE and self.codebook_dtype is None
            else f"zeros {self.zero_kind}",
        ]
        return ", ".join([*parts, "act-order"] if self.act_order else parts)

    @property
    def zero_words(self) -> int:
        """Rows of packed ``zeros``: ``ceil(G * bits / 32)``."""
        return words_for(self.groups, self.bits)

    @property
    def factor_words(self) -> int:
        """Rows of packed ``scales`` (or biases) of 4 bits: ``ceil(G * 4 / 32)``."""
        return words_for(self.groups, FACTOR_BITS)

    @property
    def midpoint(self) -> int:
        """The implied zero point of kind ``none``."""
        return 1 << (self.bits - 1)


def words_for(count: int, bits: int) -> int:
    """Number of 32-bit words that hold ``count`` codes of ``bits`` bits as one dense stream."""
    return -(-count * bits // WORD_BITS)


def dtype_name(dtype: torch.dtype | None) -> str:
    """``float16`` for ``torch.float16``; ``-`` for None."""
    return "-" if dtype is None else str(dtype).removeprefix("torch.")
