"""What a compiled kernel depends on, and nothing else: the keys of the kernel caches. Imports no numba.

Sizes, strides, group size and ratios are arguments of the kernels, so new shapes compile nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qmm.backends.numba_gpu.heuristics import NumbaConfig
from qmm.call import MatmulCall
from qmm.weight.spec import ZeroKind


@dataclass(frozen=True)
class ReduceFacts:
    """Facts of the kernel that adds the splits."""

    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    activation: str | None

    @property
    def pointers(self) -> tuple[torch.dtype | None, ...]:
        """Stored dtypes of the kernel's pointers, in order; None for one that is not read."""
        return torch.float32, self.bias_dtype, self.out_dtype


@dataclass(frozen=True)
class TiledFacts:
    """Facts of the matmul kernel; ``scale2`` and ``zero2`` are None, ``"one"`` or ``"rows"``.

    ``divides``: ``scale2`` divides the scales.
    """

    a_dtype: torch.dtype
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    activation: str | None
    bits: int
    zero_kind: ZeroKind
    scale_dtype: torch.dtype
    zero_dtype: torch.dtype | None
    scale2: str | None
    zero2: str | None
    divides: bool
    codebook_dtype: torch.dtype | None
    act_order: bool
    block_m: int
    block_n: int
    block_k: int
    threads_m: int
    threads_n: int

    @property
    def pointers(self) -> tuple[torch.dtype | None, ...]:
        """Stored dtypes of the kernel's pointers, in order; None for one that is not read."""
        return (
            self.a_dtype,
            torch.int32,
            self.scale_dtype,
            torch.float32,
            self.zero_dtype,
            torch.float32,
            self.codebook_dtype,
            torch.int32,
            self.bias_dtype,
            self.out_dtype,
        )


def reduce_facts(call: MatmulCall) -> ReduceFacts:
    """For the sum over the splits of ``call``."""
    return ReduceFacts(call.a_dtype, _bias_dtype(call), call.activation)


def tiled_facts(call: MatmulCall, config: NumbaConfig) -> TiledFacts:
    """For the matmul of ``call``; with splits it stores plain float32 sums and the reduction finishes them."""
    w = call.weight
    whole = config.splits == 1
    return TiledFacts(
        a_dtype=call.a_dtype,
        out_dtype=call.a_dtype if whole else torch.float32,
        bias_dtype=_bias_dtype(call) if whole else None,
        activation=call.activation if whole else None,
        bits=w.bits,
        zero_kind=w.zero_kind,
        scale_dtype=w.scale_dtype,
        zero_dtype=w.zero_dtype,
        scale2=_level(w.scale2_ratio),
        zero2=_level(w.zero2_ratio),
        divides=w.scale2_divides,
        codebook_dtype=w.codebook_dtype,
        act_order=w.act_order,
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        threads_m=config.threads_m,
        threads_n=config.threads_n,
    )


def _level(ratio: int | None) -> str | None:
    if ratio is None:
        return None
    return "rows" if ratio else "one"


def _bias_dtype(call: MatmulCall) -> torch.dtype | None:
    """The launcher converts a float64 bias, so that kernels have no float64 in them."""
    return torch.float32 if call.bias_dtype == torch.float64 else call.bias_dtype
