"""How the wgmma kernel is launched: the tile and the split that a model of the machine finds fastest; nothing is timed.

The constants were fitted to times on an H200 (docs/performance-log.md). A step is 128 rows of K by the columns of a
tile; all times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qmm.backends.triton_gpu.hopper.choose import before, stores_by_tma
from qmm.call import MatmulCall

# Time of a step by rows of the tile: while few multiprocessors work, and while all do and share L2's bandwidth.
_STEP = {16: (0.46, 0.50), 32: (0.48, 0.52), 64: (0.54, 0.64), 128: (0.73, 0.80), 256: (1.19, 1.34)}
_STEP_192 = {32: (0.62, 0.80), 64: (0.68, 0.90)}  # tiles of 192 columns
_STEP_SHARED = {16: 0.80, 32: 0.89, 64: 1.02}  # two steps, of two programs on one multiprocessor
_LAUNCH = 2.9
_ITEM = 1.0  # filling and emptying the pipeline
_CLUSTER = {2: 1.1, 4: 1.5}  # joining splits inside a cluster
_MEMORY = 4.0  # leaving partial sums in memory, and the last program's adding up
_MEMORY_ROW = 0.0011  # the same, for each row of the tile and the splits squared
_BYTES = 3.9e6  # bytes of memory in a microsecond, for all multiprocessors

_OWN_SHARED_LIMIT = 48 * 1024  # of a kernel's own (not the launch's) shared memory


@dataclass(frozen=True)
class Tiling:
    """What the model chooses.

    Attributes:
        block_m, columns: rows and columns of a tile of C; a warpgroup has 64 columns of it.
        split_k: parts of K that are summed apart and added in order.
        cluster: whether they are added inside a cluster of programs, and not through memory.
        per_processor: programs that share a multiprocessor, 1 or 2.
    """

    block_m: int
    columns: int = 128
    split_k: int = 1
    cluster: bool = False
    per_processor: int = 1


@dataclass(frozen=True)
class WgmmaConfig(Tiling):
    """Configuration of the wgmma kernel.

    Attributes:
        whole: whether a warpgroup takes K 128 rows at a time, and not 64.
        stages: stages of the ring in shared memory.
        halves: times 64 rows of K in a stage.
        turns: whether the warpgroups take turns at the tensor cores.
        before: what a kernel does to A before this one: ``"gather"``, ``"copy"`` (see choose.py) or None.
        tma_store: whether C is stored by TMA.
    """

    whole: bool = False
    stages: int = 2
    halves: int = 2
    turns: bool = False
    before: str | None = None
    tma_store: bool = True


def choose_wgmma(call: MatmulCall, processors: int, shared_bytes: int) -> WgmmaConfig:
    """The configuration that the model finds fastest."""
    best = min(tilings(call), key=lambda tiling: estimate(call, tiling, processors))
    return wgmma_config(call, best, shared_bytes)


def tilings(call: MatmulCall) -> Iterator[Tiling]:
    """Every tiling that is worth an estimate."""
    steps = -(-call.k // 128)
    for block_m in _STEP:
        if block_m > 16 and block_m >= 2 * call.m:
            continue
        yield Tiling(block_m)
        if block_m in _STEP_SHARED:
            yield Tiling(block_m, per_processor=2)
        if block_m == 256 or call.m > 1024:
            continue
        if steps >= 8:
            yield Tiling(block_m, split_k=2, cluster=True)
            if block_m in _STEP_192:
                yield Tiling(block_m, 192, 4, cluster=True)
        for split in (2, 3, 4, 6, 8):
            if split * 4 <= steps:
                yield Tiling(block_m, split_k=split)
                if block_m in _STEP_SHARED:
                    yield Tiling(block_m, split_k=split, per_processor=2)


def estimate(call: MatmulCall, tiling: Tiling, processors: int) -> float:
    """Microseconds that the model expects."""
    split, block_m = tiling.split_k, tiling.block_m
    whole = -(-call.k // 128)
    steps = -(-whole // split)
    tiles = -(-call.m // block_m) * -(-call.n // tiling.columns)
    items = tiles * split
    if tiling.cluster:
        waves = -(-tiles // clusters_at_once(split, processors))
    else:
        waves = -(-items // (processors * tiling.per_processor))
    if tiling.per_processor == 2 and items > processors:
        step = _STEP_SHARED[block_m]
    else:
        alone, full = (_STEP_192 if tiling.columns == 192 else _STEP)[block_m]
        step = alone + (full - alone) * min(1.0, items / processors)
    adding = 0.0
    if split > 1:
        adding = _CLUSTER[split] if tiling.cluster else _MEMORY + _MEMORY_ROW * block_m * split**2
    time = _LAUNCH + waves * (_ITEM + steps * step + adding)
    moved = call.k * call.n * call.weight.bits / 8 + 2 * call.m * (call.k + call.n)
    return max(time, moved / _BYTES + _LAUNCH + _ITEM)


def clusters_at_once(size: int, processors: int) -> int:
    """Clusters that run side by side; those of 4 do not fit evenly into an H200's parts: 30, of 132 multiprocessors."""
    return processors // 2 if size == 2 else max(1, processors * 3 // 13)


def exchanged_bytes(tiling: Tiling) -> int:
    """Shared memory into which the others of a cluster send their float32 sums of the rows that a program adds up."""
    if not tiling.cluster:
        return 0
    return tiling.block_m // tiling.split_k * tiling.columns * 4 * (tiling.split_k - 1)


def wgmma_config(call: MatmulCall, tiling: Tiling, shared_bytes: int) -> WgmmaConfig:
    """The rest of a configuration follows from its tiling: as many stages as shared memory holds.

    Raises:
        ValueError: the call has no such split, or no cluster can hold it.
    """
    block_m, split = tiling.block_m, tiling.split_k
    whole = block_m <= 128 and tiling.per_processor == 1 and tiling.columns == 128
    steps = -(-call.k // (256 if whole else 128))
    if split > steps:  # a split without work would wait for it for ever
        raise ValueError(f"split_k: must be at most {steps} for K={call.k}; got {split}")
    own = exchanged_bytes(tiling)
    if tiling.cluster and (split not in (2, 4, 8) or block_m // split < 8 or own > _OWN_SHARED_LIMIT):
        raise ValueError(
            f"cluster: wants split_k 2, 4 or 8, 8 rows for each, and little to send; got {tiling}"
        )
    halves = 1 if block_m == 256 else 2
    tma_store = stores_by_tma(call)
    stage = halves * (block_m * 128 + tiling.columns * call.weight.bits * 8)
    stored = block_m // (split if tiling.cluster else 1) * tiling.columns * 2 if tma_store else 0
    room = shared_bytes // tiling.per_processor - 2048 - own - stored
    return WgmmaConfig(
        block_m,
        tiling.columns,
        split,
        tiling.cluster,
        tiling.per_processor,
        whole=whole,
        stages=max(2, min(10, room // stage)),
        halves=halves,
        turns=block_m == 256,
        before=before(call),
        tma_store=tma_store,
    )
