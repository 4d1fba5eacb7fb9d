"""One call -> one launch of ``tiled``, or two where K is split: partial sums into a workspace, then their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from qmm.backends.numba_gpu.facts import reduce_facts, tiled_facts
from qmm.backends.numba_gpu.heuristics import NumbaConfig, cdiv
from qmm.call import MatmulCall
from qmm.weight import QuantizedWeight

_REDUCE_THREADS = 256
_REDUCE_THREADS_SIMULATED = 8


def run(
    call: MatmulCall,
    config: NumbaConfig,
    a: Tensor,
    w: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    emulated: bool,
) -> None:
    """Write the product into ``out``; allocates the workspace ``[splits, M, N]`` float32 where K is split."""
    if emulated:
        from qmm.backends.numba_gpu.simulated import launch
    else:
        from qmm.backends.numba_gpu.native import launch
    m, n, device = call.m, call.n, call.device
    if bias is not None and bias.dtype == torch.float64:
        bias = bias.float()
    whole = config.splits == 1
    target = out if whole else torch.empty(config.splits, m, n, dtype=torch.float32, device=device)
    target_strides = (0, *out.stride()) if whole else tuple(target.stride())
    t = w.tensors
    weight = (t.qweight, t.scales, t.scale2, t.zeros, t.zero2, t.codebook, t.g_idx)
    spec = call.weight
    sizes = (m, n, call.k, spec.group_size, spec.scale2_ratio or 1, spec.zero2_ratio or 1)
    launch(
        tiled_facts(call, config),
        config.grid(m, n),
        config.threads,
        (a, *weight, bias if whole else None, target),
        (*sizes, *a.stride(), *target_strides, config.split_k),
        device,
    )
    if whole:
        return
    threads = _REDUCE_THREADS_SIMULATED if emulated else _REDUCE_THREADS
    launch(
        reduce_facts(call),
        (cdiv(m * n, threads), 1),
        threads,
        (target, bias, out),
        (config.splits, m, n, *out.stride()),
        device,
    )
