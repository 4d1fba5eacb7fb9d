"""Host side of the Hopper kernels: operands as kernel arguments, launches remembered with the weight.

Nothing here reads memory of the device or waits for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from qmm.backends.triton_gpu.device import on
from qmm.backends.triton_gpu.heuristics import device_facts
from qmm.backends.triton_gpu.hopper.choose import DecodeConfig, narrow, tiles_per_group
from qmm.backends.triton_gpu.hopper.choose_wgmma import WgmmaConfig
from qmm.backends.triton_gpu.hopper.compat import in_clusters
from qmm.backends.triton_gpu.hopper.decode import decode_kernel
from qmm.backends.triton_gpu.hopper.gather import gather_kernel, gathering
from qmm.backends.triton_gpu.hopper.layout import FragmentLayout, block_k
from qmm.backends.triton_gpu.hopper.stream import stream_kernel
from qmm.backends.triton_gpu.hopper.wgmma import wgmma_kernel
from qmm.backends.triton_gpu.hopper.workspace import workspace
from qmm.call import MatmulCall

_MAX_AGAIN = 64  # calls remembered with a weight; then the memory starts anew
BAND = 8  # row tiles that are worked on side by side, so that they share weights in L2

_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_UNITS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
# By (computing warpgroups, programs that share a multiprocessor, whether in clusters): registers of a thread that
# computes, of one that fetches, and of all at launch. What they hold at launch must cover the others: else they wait
# for ever.
_REGISTERS = {
    (2, 1, False): (240, 24, None),
    (2, 2, False): (104, 24, 80),
    (2, 1, True): (232, 40, None),
    (3, 1, True): (152, 40, None),
}


def run(
    call: MatmulCall,
    config: DecodeConfig | WgmmaConfig,
    a: Tensor,
    layout: FragmentLayout,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """Write the product into ``out``; operands as ``Backend.run`` says."""
    again = layout.again.get(id(call))
    with on(call.device):
        if (
            again is not None
            and again[0] is call
            and again[1] is config
            and again[2] == _alignment(bias, out)
        ):
            again[3](a, layout.words, layout.scales, layout.zeros, bias, out, *again[4])
            return
        if config.before == "gather":
            a = _gathered(layout, a)
        elif config.before == "copy":
            a = aligned_copy(a)
        if isinstance(config, DecodeConfig):
            _decode(call, config, a, layout, bias, out)
        else:
            _wgmma(call, config, a, layout, bias, out)


def aligned_copy(a: Tensor) -> Tensor:
    """A with rows that begin at multiples of 16 bytes; the columns that fill up a row are 0."""
    m, k = a.shape
    padded = torch.empty(m, -(-k // 8) * 8, dtype=a.dtype, device=a.device)
    if k % 8:
        padded[:, k:] = 0
    padded[:, :k] = a
    return padded[:, :k]


def _gathered(layout: FragmentLayout, a: Tensor) -> Tensor:
    """A's columns in the order of the weight's rows, aligned."""
    assert layout.order is not None
    gathered, grid, args, constants = gathering(a, layout.order)
    key = ("gather", a.dtype, a.stride(0) >> 31, a.stride(1) >> 31, a.shape[0] >> 31, *constants.values())
    _launch(layout, key, gather_kernel, grid, args, **constants, num_warps=4, maxnreg=None, launch_pdl=False)
    return gathered


def _row_stride(call: MatmulCall, a: Tensor) -> int:
    """The stride of a single row is any number, and nobody's: a multiple of 8 stands for it."""
    return a.stride(0) if call.m > 1 else -(-call.k // 8) * 8


def _key(call: MatmulCall, config: Any, bias: Tensor | None, out: Tensor) -> Any:
    """All that Triton compiles for, beyond the weight: of integers only whether 32 bits hold them."""
    wide = out.stride(0) >> 31 or out.stride(1) >> 31
    return config, call.a_dtype, call.bias_dtype, call.activation, wide, call.m >> 31, _alignment(bias, out)


def _alignment(bias: Tensor | None, out: Tensor) -> tuple[bool, bool]:
    return out.data_ptr() % 16 == 0, bias is None or bias.data_ptr() % 16 == 0


def _launch(
    layout: FragmentLayout,
    key: Any,
    kernel: Any,
    grid: int,
    args: tuple[Any, ...],
    cluster: int = 1,
    **constants: Any,
) -> tuple[Any, tuple[Any, ...]]:
    """Launch ``grid`` clusters, by the compiled kernel's own launcher: Triton's look-up costs 40 us.

    Returns the compiled kernel and its compile-time arguments, which its launcher wants behind the others.
    """
    found = layout.launches.get(key)
    if found is None:
        options = {name: constants.pop(name) for name in ("num_warps", "maxnreg", "launch_pdl")}
        compiled = in_clusters(kernel.warmup(*args, grid=(grid,), **constants, **options), cluster)
        found = compiled, tuple(constants.values())
        layout.launches[key] = found
    found[0][(grid, 1, 1)](*args, *found[1])
    return found


def _decode(
    call: MatmulCall,
    config: DecodeConfig,
    a: Tensor,
    layout: FragmentLayout,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    spec = call.weight
    block = block_k(spec.bits)
    found = tiles_per_group(spec, block)
    assert found is not None
    per_group, parts = found
    grid = -(-call.n // config.block_n) * -(-call.m // config.block_m)
    key = _key(call, config, bias, out)
    args = (
        a, layout.words, layout.scales, layout.zeros, bias, out,
        call.m, call.n, call.k, _row_stride(call, a) // 8, out.stride(0), out.stride(1),
    )  # fmt: skip
    tail = call.k % block != 0
    own: dict[str, Any] = {"DEPTH": config.depth}
    if config.shared:
        own = {"STAGES": config.depth, "RAGGED": tail or (call.k // block) % config.num_warps != 0}
    compiled, constants = _launch(
        layout, key, stream_kernel if config.shared else decode_kernel, grid, args,
        BITS=spec.bits, ZERO=spec.zero_kind.value, TILES_PER_GROUP=per_group, PARTS=parts,
        ACTIVATION=call.activation, STRIPS=config.block_n // 16, BM=config.block_m, **own,
        K_TAIL=tail, DEPENDENT=config.dependent, num_warps=config.num_warps, maxnreg=None, launch_pdl=config.dependent,
    )  # fmt: skip
    if call.out_strides is None and config.before is None:  # nothing but addresses differs the next time
        if len(layout.again) >= _MAX_AGAIN:
            layout.again.clear()
        layout.again[id(call)] = (
            call,
            config,
            _alignment(bias, out),
            compiled[(grid, 1, 1)],
            (*args[6:], *constants),
        )


def _wgmma(
    call: MatmulCall, config: WgmmaConfig, a: Tensor, layout: FragmentLayout, bias: Tensor | None, out: Tensor
) -> None:
    spec = call.weight
    found = tiles_per_group(spec, 64)
    assert found is not None
    per_group, parts = found
    block_m = config.block_m
    rows = gl.NVMMASharedLayout.get_default_for([block_m, 64], _DTYPES[call.a_dtype])
    a_desc = TensorDescriptor(a, [call.m, call.k], [_row_stride(call, a), 1], [block_m, 64], rows)
    c_desc = None
    if config.tma_store:
        store = [block_m // config.split_k if config.cluster else block_m, 64]
        to = gl.NVMMASharedLayout.get_default_for(store, _DTYPES[call.a_dtype])
        c_desc = TensorDescriptor(out, [call.m, call.n], [call.n, 1], store, to)
    w_desc = _words(layout, config.halves)
    wide = config.columns // 64
    tiles = -(-call.m // block_m) * -(-call.n // config.columns)
    partial, counters = layout.scales, layout.scales
    if config.cluster:  # a cluster for each tile, an item for each of its programs
        grid = tiles
    else:
        grid = min(device_facts(call.device).processors * config.per_processor, tiles * config.split_k)
        if config.split_k > 1:
            size = tiles * config.split_k * config.columns * block_m
            partial, counters = workspace(call.device, size, tiles * wide * 2)
    computing, fetching, at_launch = _REGISTERS[wide, config.per_processor, config.cluster]
    key = _key(call, config, bias, out)
    args = (
        a_desc, w_desc, c_desc, out, layout.scales, layout.zeros, bias, partial, counters,
        call.m, call.n, call.k, spec.groups, out.stride(0), out.stride(1),
    )  # fmt: skip
    _launch(
        layout, key, wgmma_kernel, grid, args,
        BITS=spec.bits, ZERO=spec.zero_kind.value, NARROW=narrow(call), TILES_PER_GROUP=per_group, PARTS=parts,
        ACTIVATION=call.activation, BM=block_m, STAGES=config.stages, HALVES=config.halves, BAND=BAND,
        SPLIT=config.split_k, CLUSTER=config.cluster, WHOLE=config.whole, TURNS=config.turns, WIDE=wide,
        REGISTERS=computing, FETCHING=fetching, num_warps=4, maxnreg=at_launch, launch_pdl=False,
        cluster=config.split_k if config.cluster else 1,
    )  # fmt: skip


def _words(layout: FragmentLayout, halves: int) -> TensorDescriptor:
    """The weight's descriptor, built once."""
    key = ("words", halves)
    found = layout.launches.get(key)
    if found is None:
        block = [halves * layout.spec.bits, 256]
        found = TensorDescriptor.from_tensor(layout.words.view(-1, 256), block, _UNITS)
        layout.launches[key] = found
    return found
