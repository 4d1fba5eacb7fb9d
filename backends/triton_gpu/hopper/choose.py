"""What the Hopper kernels ask of a call, and how the decode kernels are launched; wgmma: choose_wgmma.py."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from qmm.call import MatmulCall
from qmm.weight.spec import WeightSpec

# Up to here A's operand is fetched word by word (decode.py), above through shared memory (stream.py).
REGISTER_ROWS = 4
DECODE_ROWS = 16


@dataclass(frozen=True)
class DecodeConfig:
    """Configuration of the decode kernel.

    Attributes:
        block_m, block_n: rows and columns of a program; block_n is 16, 32, 64 or 128.
        shared: whether operands come through shared memory (stream.py), or straight into registers (decode.py).
        depth: tiles of K that a warp has in registers, or stages in shared memory.
        num_warps: warps, which share out K.
        dependent: whether the kernel is launched while the one before may still run (QMM_DEPENDENT_LAUNCH).
        before: what a kernel does to A before this one, see :func:`before`; or None.
    """

    block_m: int
    block_n: int
    shared: bool
    depth: int
    num_warps: int
    dependent: bool
    before: str | None


def dependent_launch(device: torch.device) -> bool:
    """Whether ``QMM_DEPENDENT_LAUNCH`` asks for it: weights are then read before the kernel before has ended.

    Safe unless that kernel writes this weight and lets its dependents start early, which no kernel of torch does.
    Off by default; see docs/environment.md.
    """
    if os.environ.get("QMM_DEPENDENT_LAUNCH", "") != "1" or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def rows_are_aligned(call: MatmulCall) -> bool:
    """Whether A can be read as it lies: rows contiguous, at multiples of 16 bytes, of a whole number of them."""
    if call.k % 8:
        return False
    if call.copies_a:  # the copy is contiguous
        return True
    strides = [s for s, size in zip(call.a_strides[:-1], call.a_shape[:-1], strict=True) if size > 1]
    return call.a_aligned and call.a_strides[-1] == 1 and all(s % 8 == 0 for s in strides)


def before(call: MatmulCall) -> str | None:
    """``"gather"``: A's columns in the order of the groups (act-order); ``"copy"``: A to aligned rows; or None."""
    if call.weight.act_order:
        return "gather"
    return None if rows_are_aligned(call) else "copy"


def stores_by_tma(call: MatmulCall) -> bool:
    """Whether rows of C begin at multiples of 16 bytes: a new result, or no ``out`` at all."""
    return call.out_strides is None and call.n % 8 == 0


def choose_decode(call: MatmulCall, processors: int, shared_bytes: int) -> DecodeConfig:
    """Few columns a program while that fills the machine; more warps where K is long and programs are few.

    With ``deterministic="batch"`` nothing depends on M.
    """
    many = (
        call.n > 128 * processors
    )  # programs of 64 columns for two waves: then the ring in shared memory pays
    shared = (call.m > REGISTER_ROWS or many) and call.deterministic != "batch"
    block_m = 16 if shared and call.m > 8 else 8
    strips = _strips(call, processors, block_m, shared)
    programs = -(-call.n // (16 * strips))
    warps = 4 if programs > (2 if shared else 4) * processors or strips == 8 else 8
    if not shared and 4 * programs <= 5 * processors and call.k >= 8192:
        warps = 16
    depth = 4 if shared else 2
    tiles = -(-call.k * call.weight.bits // 256)
    while warps > 4 and warps * 2 > tiles:
        warps //= 2
    if shared:
        stage = warps * (strips * 512 + block_m * 512 // call.weight.bits + strips * 128)
        depth = max(2, min(depth, (shared_bytes - 1024) // stage))
    first = before(call)
    dependent = first is None and dependent_launch(call.device)
    return DecodeConfig(block_m, strips * 16, shared, depth, warps, dependent, first)


def _strips(call: MatmulCall, processors: int, block_m: int, shared: bool) -> int:
    """Columns of a program, in 16."""
    if shared and block_m == 16 and processors < -(-call.n // 128) <= 2 * processors:
        return 8  # one wave, and A, as dear as the weights from 16 rows on, is read half as often
    widest = 4 if shared else 2
    return next((s for s in (4, 2) if s <= widest and 16 * s * processors <= call.n * 1.06), 1)


def tiles_per_group(spec: WeightSpec, block: int) -> tuple[int, int] | None:
    """(blocks of K in a group, groups in a block); (0, 1) where one group spans K; None where neither is whole."""
    if spec.group_size >= spec.in_features:
        return 0, 1
    if spec.group_size % block == 0:
        return spec.group_size // block, 1
    return (1, 2) if spec.group_size * 2 == block else None


def narrow(call: MatmulCall) -> bool:
    """Whether scales (and bias zeros) have A's dtype, so that 16-bit arithmetic rounds once."""
    spec = call.weight
    if spec.scale_dtype != call.a_dtype or spec.zero_kind.value == "float":
        return False
    return spec.zero_kind.value != "bias" or spec.zero_dtype == call.a_dtype
