"""C[:, n0:n1] = activation(A @ dequantize(W[:, n0:n1]) + bias[n0:n1]), one block of columns after the other.

Operands: a ``[M, K]`` any strides; w canonical (qweight int32 ``[ceil(K*bits/32), N]``, ...); out ``[M, N]``,
any strides.

Extra memory is bounded whatever N is, and never holds the whole W: at most

    block_n * K * (BYTES_PER_CODE + 8)  +  block_m * (8 * K + 24 * block_n)   bytes,

with ``block_n * K <= BLOCK_CODES`` (or one column, where K alone is larger) and ``block_m * K <= BLOCK_CODES`` alike.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qmm.backends.torch_ref import BlocksConfig
from qmm.call import MatmulCall
from qmm.weight import QuantizedWeight
from qmm.weight.dequantize import BYTES_PER_CODE, dequantize_columns

# Codes of W in work at a time. The CPU likes its cache, a GPU wants enough columns to fill itself.
BLOCK_CODES = {"cpu": 1 << 20, "cuda": 1 << 23}
_DEFAULT_BLOCK_CODES = 1 << 22

# torch.mm(..., out_dtype=float32) keeps float32 sums out of 16-bit operands (CUDA, torch 2.8 and later). Without it
# cuBLAS may add its split-K partial sums in 16 bits, so that both operands are widened instead.
_HAS_OUT_DTYPE = any("dtype" in str(s) for s in torch._C._jit_get_schemas_for_operator("aten::mm"))


def memory_bound(call: MatmulCall, config: BlocksConfig) -> int:
    """Bytes that :func:`run` allocates at most at any moment."""
    per_column = call.k * (BYTES_PER_CODE + 8)
    return config.block_n * per_column + config.block_m * (8 * call.k + 24 * config.block_n)


def choose(call: MatmulCall) -> BlocksConfig:
    """Block sizes from the device and K; operands as narrow as the numerics contract allows."""
    codes = BLOCK_CODES.get(call.device.type, _DEFAULT_BLOCK_CODES)
    per_block = max(1, codes // call.k)
    # A matrix-vector product for each row: the library picks its kernel by M, and with it the order of the sum.
    block_m = 1 if call.deterministic == "batch" else min(call.m, max(16, per_block))
    return BlocksConfig(min(call.n, per_block), block_m, _operands(call))


def _operands(call: MatmulCall) -> torch.dtype:
    if call.a_dtype == torch.float64:
        return torch.float64
    narrow = call.a_dtype == torch.bfloat16 or (call.a_dtype == torch.float16 and call.fits_float16)
    if narrow and call.device.type == "cuda" and _HAS_OUT_DTYPE:
        return call.a_dtype
    return torch.float32


def _exact(operands: torch.dtype, device_type: str) -> torch.dtype:
    """float64 instead of float32 where the user lets torch run float32 matmuls as TF32 or bf16 passes.

    Asked at every run and not kept in the configuration: the setting is global and may change between calls.
    """
    if operands != torch.float32:
        return operands
    library = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}.get(device_type)
    # torch 2.9 and later; there the older call may raise
    precision = getattr(getattr(library, "matmul", None), "fp32_precision", None)
    if precision is None:
        precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return torch.float32 if precision in ("ieee", "none") else torch.float64


def run(
    call: MatmulCall, config: BlocksConfig, a: Tensor, w: QuantizedWeight, bias: Tensor | None, out: Tensor
) -> None:
    """Write the product into ``out``; see the module's docstring."""
    tensors = w.tensors
    operands = _exact(config.operands, a.device.type)
    for n0 in range(0, call.n, config.block_n):
        n1 = min(call.n, n0 + config.block_n)
        block = dequantize_columns(tensors, call.weight, n0, n1).to(operands)
        part = None if bias is None else bias[n0:n1]
        for m0 in range(0, call.m, config.block_m):
            m1 = min(call.m, m0 + config.block_m)
            # A fresh buffer: library kernels may sum in another order by the alignment of their operands.
            rows = torch.empty(m1 - m0, call.k, dtype=operands, device=a.device).copy_(a[m0:m1])
            out[m0:m1, n0:n1] = _finish(_product(rows, block), part, call.activation)


def _product(rows: Tensor, block: Tensor) -> Tensor:
    if torch.is_autocast_enabled(rows.device.type):  # it would round the operands and the sums to 16 bits
        with torch.autocast(rows.device.type, enabled=False):
            return _product(rows, block)
    if rows.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(rows, block, out_dtype=torch.float32)
    return torch.mm(rows, block)


def _finish(acc: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Bias and activation in the dtype of the sum (float32, or float64)."""
    if bias is not None:
        acc = acc + bias.to(acc.dtype)
    if activation == "relu":
        return torch.relu(acc)
    if activation == "gelu":  # F.gelu(inf) is NaN on the CPU in some releases of torch
        return acc * 0.5 * (1 + torch.erf(acc * 0.5**0.5))
    if activation == "gelu_tanh":
        return F.gelu(acc, approximate="tanh")
    if activation == "silu":
        return F.silu(acc)
    return acc
