"""Which Hopper kernel takes a call, and its tile, split and stages: a small model of the machine, nothing timed."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from qmm.call import MatmulCall
from qmm.weight.spec import WeightSpec

# The wgmma kernel's model, in microseconds, fitted to an H200 (docs/performance-log.md). A step is 128 rows of K by 128
# columns; its time alone on a multiprocessor, and that of two such steps of two programs that share one.
_STEP = {16: 0.56, 32: 0.58, 64: 0.62, 128: 0.82, 256: 1.38}
_STEP_SHARED = {16: 0.91, 32: 0.93, 64: 1.04}
_LAUNCH = 1.5
_ITEM = 1.0  # filling and emptying the pipeline
_SPLIT = 4.0  # leaving partial sums, and the last program's adding up
_SPLIT_ROW = 0.0011  # the same, for each row of the tile and the splits squared
_BYTES = 3.9e6  # bytes of memory in a microsecond, for all multiprocessors

REGISTER_ROWS = (
    4  # up to here A's operand is fetched word by word (decode.py), above through shared memory (stream.py)
)
DECODE_ROWS = 16


@dataclass(frozen=True)
class DecodeConfig:
    """Configuration of the decode kernel.

    Attributes:
        block_m, block_n: rows and columns of a program; block_n is 16, 32 or 64.
        shared: whether operands come through shared memory (stream.py), or straight into registers (decode.py).
        depth: tiles of K that a warp has in registers, or stages in shared memory.
        num_warps: warps, which share out K.
        dependent: whether the kernel is launched while the one before may still run (QMM_DEPENDENT_LAUNCH).
        copies_a: whether A is copied to aligned rows first.
    """

    block_m: int
    block_n: int
    shared: bool
    depth: int
    num_warps: int
    dependent: bool
    copies_a: bool


@dataclass(frozen=True)
class WgmmaConfig:
    """Configuration of the wgmma kernel; columns are 128.

    Attributes:
        block_m: rows of a tile.
        split_k: parts of K that are summed apart and added in order.
        stages: stages of the ring in shared memory.
        halves: times 64 rows of K in a stage.
        turns: whether the warpgroups take turns.
        per_processor: programs that share a multiprocessor, 1 or 2.
        copies_a: whether A is copied to aligned rows first.
        tma_store: whether C is stored by TMA.
    """

    block_m: int
    split_k: int
    stages: int
    halves: int
    turns: bool
    per_processor: int
    copies_a: bool
    tma_store: bool


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


def stores_by_tma(call: MatmulCall) -> bool:
    """Whether rows of C begin at multiples of 16 bytes: a new result, or no ``out`` at all."""
    return call.out_strides is None and call.n % 8 == 0


def choose_decode(call: MatmulCall, processors: int, shared_bytes: int) -> DecodeConfig:
    """Few columns a program while that fills the machine; more warps where K is long and programs are few.

    With ``deterministic="batch"`` nothing depends on M.
    """
    shared = call.m > REGISTER_ROWS and call.deterministic != "batch"
    block_m = 16 if shared and call.m > 8 else 8
    widest = 4 if shared else 2
    strips = next((s for s in (4, 2) if s <= widest and 16 * s * processors <= call.n * 1.06), 1)
    programs = -(-call.n // (16 * strips))
    warps = 4 if programs > (2 if shared else 4) * processors else 8
    if not shared and 4 * programs <= 5 * processors and call.k >= 8192:
        warps = 16
    depth = 4 if shared else 2
    tiles = -(-call.k * call.weight.bits // 256)
    while warps > 4 and warps * 2 > tiles:
        warps //= 2
    if shared:
        stage = warps * (strips * 512 + block_m * 512 // call.weight.bits + strips * 128)
        depth = max(2, min(depth, (shared_bytes - 1024) // stage))
    dependent = rows_are_aligned(call) and dependent_launch(call.device)
    return DecodeConfig(block_m, strips * 16, shared, depth, warps, dependent, not rows_are_aligned(call))


def choose_wgmma(call: MatmulCall, processors: int, shared_bytes: int) -> WgmmaConfig:
    """The tile and split that the model finds fastest."""
    best: tuple[float, int, int, int] | None = None
    steps = -(-call.k // 128)
    for block_m in _STEP:
        if block_m > 16 and block_m >= 2 * call.m:
            continue
        for split in (1, 2, 3, 4, 6, 8):
            if split > 1 and (split * 2 > steps or block_m == 256 or call.m > 1024):
                continue
            for per_processor in (1, 2) if block_m in _STEP_SHARED else (1,):
                cost = estimate(call, block_m, split, per_processor, processors)
                if best is None or cost < best[0]:
                    best = (cost, block_m, split, per_processor)
    assert best is not None
    return wgmma_config(call, *best[1:], shared_bytes)


def estimate(call: MatmulCall, block_m: int, split: int, per_processor: int, processors: int) -> float:
    """Microseconds that the model expects."""
    whole = -(-call.k // 128)
    steps = -(-whole // split)
    items = -(-call.m // block_m) * -(-call.n // 128) * split
    waves = -(-items // (processors * per_processor))
    alone = per_processor == 1 or items <= processors
    step = _STEP[block_m] if alone else _STEP_SHARED[block_m]
    adding = _SPLIT + _SPLIT_ROW * block_m * split**2 if split > 1 else 0.0
    time = _LAUNCH + waves * (_ITEM + steps * step + adding)
    moved = call.k * call.n * call.weight.bits / 8 + 2 * call.m * (call.k + call.n)
    moved += call.m * call.n * 8 * split if split > 1 else 0
    return max(time, moved / _BYTES + _LAUNCH + _ITEM)


def wgmma_config(
    call: MatmulCall, block_m: int, split: int, per_processor: int, shared_bytes: int
) -> WgmmaConfig:
    """The rest of a configuration follows from its tile: as many stages as shared memory holds."""
    steps = -(-call.k // 128)
    if split > steps:  # a split without work would wait for it for ever
        raise ValueError(f"split_k: must be at most {steps} for K={call.k}; got {split}")
    halves = 1 if block_m == 256 else 2
    tma_store = stores_by_tma(call)
    stage = halves * (block_m * 128 + call.weight.bits * 1024)
    room = shared_bytes // per_processor - 2048 - (block_m * 256 if tma_store else 0)
    stages = max(2, min(10, room // stage))
    return WgmmaConfig(
        block_m,
        split,
        stages,
        halves,
        block_m >= 128 and split == 1,
        per_processor,
        not rows_are_aligned(call),
        tma_store,
    )


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
