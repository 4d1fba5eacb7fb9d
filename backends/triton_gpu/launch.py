"""Host side of the tiled kernel: a call and its configuration as kernel arguments, on axis x of the grid alone.

No synchronisation and no reference kept: safe under CUDA graph capture (the workspace comes from the graph's pool).
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from qmm.backends.triton_gpu import BACKEND
from qmm.backends.triton_gpu.device import on
from qmm.backends.triton_gpu.heuristics import TiledConfig, groups_per_tile
from qmm.backends.triton_gpu.reduce import reduce_kernel
from qmm.backends.triton_gpu.tiled import tiled_kernel
from qmm.call import MatmulCall
from qmm.weight.spec import dtype_name
from qmm.weight.tensors import WeightTensors

BAND = 8  # rows of tiles whose programs run side by side
REDUCE_BLOCK_M, REDUCE_BLOCK_N = 1, 512

EMULATED = BACKEND.emulated is not None
_FLOAT8 = {"float8_e4m3fn": "e4m3", "float8_e8m0fnu": "e8m0"}
_DECODED = _FLOAT8 | {"uint4": "uint4"}  # the rest is converted as it is


def run(
    call: MatmulCall, config: TiledConfig, a: Tensor, w: WeightTensors, bias: Tensor | None, out: Tensor
) -> None:
    """Write the product into ``out``; operands as ``Backend.run`` says."""
    with on(call.device):
        splits = config.split_k
        if splits == 1:
            _multiply(call, config, a, w, bias, out)
            return
        partial = torch.empty(splits, call.m, call.n, dtype=torch.float32, device=call.device)
        _multiply(call, config, a, w, None, partial)
        grid = (_tiles(call.m, REDUCE_BLOCK_M) * _tiles(call.n, REDUCE_BLOCK_N),)
        reduce_kernel[grid](
            partial, bias, out, call.m, call.n, _loop_bound(splits), out.stride(0), out.stride(1),
            **reduce_constants(call),
        )  # fmt: skip


def _multiply(
    call: MatmulCall, config: TiledConfig, a: Tensor, w: WeightTensors, bias: Tensor | None, c: Tensor
) -> None:
    grid = (_tiles(call.m, config.block_m) * _tiles(call.n, config.block_n) * config.split_k,)
    tiled_kernel[grid](
        *arguments(call, config, a, w, bias, c),
        **constants(call, config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def arguments(
    call: MatmulCall, config: TiledConfig, a: Tensor, w: WeightTensors, bias: Tensor | None, c: Tensor
) -> tuple[Any, ...]:
    """The tiled kernel's run-time arguments, in its order."""
    spec = call.weight
    return (
        a, w.qweight, _readable(w.scales), w.scale2, w.zeros, w.zero2, w.codebook, w.g_idx, bias, c,
        call.m, call.n, call.k, spec.groups, spec.group_size, spec.scale2_ratio, spec.zero2_ratio,
        _loop_bound(tiles_per_split(call, config)), a.stride(0), a.stride(1), c.stride(-2), c.stride(-1),
    )  # fmt: skip


def constants(call: MatmulCall, config: TiledConfig) -> dict[str, Any]:
    """The tiled kernel's compile-time arguments."""
    spec = call.weight
    return {
        "BITS": spec.bits,
        "ZERO": spec.zero_kind.value,
        "S_DTYPE": _DECODED.get(dtype_name(spec.scale_dtype), "plain"),
        "Z_DTYPE": _DECODED.get(dtype_name(spec.zero_dtype), "plain"),
        "ONE_S2": spec.scale2_ratio == 0,
        "DIVIDE_S2": spec.scale2_divides,
        "ONE_Z2": spec.zero2_ratio == 0,
        "ACTIVATION": call.activation,
        "GROUPS": groups_per_tile(spec, config.block_k),
        "EVEN_K": call.k == tiles_per_split(call, config) * config.split_k * config.block_k,
        "SPLIT": config.split_k > 1,
        "ROUND_W": config.dot == dtype_name(call.a_dtype),
        # the interpreter's bf16 product is wrong; with float32 operands it computes what the GPU does
        "FLOAT32_DOT": config.dot == "float32" or EMULATED,
        "EMULATED": EMULATED,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "BAND": BAND,
    }


def reduce_constants(call: MatmulCall) -> dict[str, Any]:
    """The reduction's compile-time arguments."""
    return {
        "ACTIVATION": call.activation,
        "EMULATED": EMULATED,
        "BLOCK_M": REDUCE_BLOCK_M,
        "BLOCK_N": REDUCE_BLOCK_N,
    }


def tiles_per_split(call: MatmulCall, config: TiledConfig) -> int:
    """Tiles of K that each split works through; the last splits may reach past the end of K."""
    return _tiles(_tiles(call.k, config.block_k), config.split_k)


def _loop_bound(count: int) -> Any:
    """The interpreter cannot count up to one of its own tensors (numpy 2.4 and later), but to a constexpr."""
    return tl.constexpr(count) if EMULATED else count


def _readable(scales: Tensor) -> Tensor:
    """float8 as its bits."""
    return scales.view(torch.uint8) if dtype_name(scales.dtype) in _FLOAT8 else scales


def _tiles(size: int, block: int) -> int:
    return -(-size // block)
