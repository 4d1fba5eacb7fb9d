"""Tile sizes and splits of the tiled kernel from facts of the call and of the device; nothing is timed.

A configuration depends on the bucket of M alone (buckets.py). What was timed comes before it: tuned.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from qmm.backends.triton_gpu import BACKEND
from qmm.backends.triton_gpu.buckets import representative
from qmm.call import MatmulCall
from qmm.devices import described_device, device_info
from qmm.weight.spec import WeightSpec


@dataclass(frozen=True)
class DeviceFacts:
    """What the choice asks of a device.

    Attributes:
        processors: multiprocessors (compute units).
        shared_bytes: shared memory that one program may use.
        emulated: whether kernels are interpreted.
    """

    processors: int
    shared_bytes: int
    emulated: bool = False


@dataclass(frozen=True)
class TiledConfig:
    """Configuration of the tiled kernel.

    Attributes:
        block_m, block_n, block_k: the tile; powers of two, block_m and block_n at least 16, block_k at least 32.
        split_k: parts of K that are summed apart and added in order.
        num_warps, num_stages: Triton's own.
        dot: dtype of the dot product's operands, ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    dot: str

    def __post_init__(self) -> None:
        for name, low in (("block_m", 16), ("block_n", 16), ("block_k", 32), ("num_warps", 1)):
            value = getattr(self, name)
            if value < low or value & (value - 1):
                raise ValueError(f"{name}: must be a power of two of at least {low}; got {value}")
        if self.split_k < 1 or self.num_stages < 1:
            raise ValueError(
                f"split_k and num_stages: must be positive; got {self.split_k}, {self.num_stages}"
            )


@dataclass(frozen=True)
class Tile:
    """A tile and how Triton compiles it; see :class:`TiledConfig`."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By rows of A: the last tile of a table is for any M. Each was compiled for sm_80 and sm_90 and spills no register.
_TILES_16BIT = (
    Tile(16, 64, 128, 4, 4),
    Tile(32, 64, 64, 4, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(128, 128, 64, 8, 3),
)
# Codes that straddle words and factors of single rows are loaded element by element: many registers, much memory.
_TILES_16BIT_LOOKUP = (Tile(16, 64, 64, 4, 2), Tile(32, 64, 64, 4, 2), Tile(64, 64, 64, 8, 2))
# A float32 product is plain arithmetic in registers, where larger tiles spill.
_TILES_FLOAT32 = (Tile(16, 32, 32, 4, 2), Tile(32, 32, 32, 4, 2), Tile(64, 64, 32, 8, 2))
_TILES_FLOAT32_LOOKUP = _TILES_FLOAT32[:2]
_TILES_EMULATED = (Tile(16, 32, 64, 1, 1), Tile(64, 32, 64, 1, 1))
# deterministic="batch" has one tile for every M: a compromise that wastes rows at M = 1 and reads W often at large M.
_BATCH_TILE = 1

_PROGRAMS_PER_PROCESSOR = 4  # programs in flight that hide the latency of memory when M is small
_MIN_TILES_PER_SPLIT = 2
MAX_SPLIT = 16
SPLIT_M = 64  # more rows fill the device by themselves, and the partial sums would outweigh the weight


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of ``device``; of the interpreter where kernels are interpreted."""
    return _here(device) if described_device() is None else _facts(device)


@functools.cache
def _here(device: torch.device) -> DeviceFacts:
    return _facts(device)  # asked at every launch


def _facts(device: torch.device) -> DeviceFacts:
    if BACKEND.emulated:
        return DeviceFacts(processors=1, shared_bytes=1 << 20, emulated=True)
    info = device_info(device)
    return DeviceFacts(info.processors, info.shared_bytes)


def choose(call: MatmulCall, device: DeviceFacts) -> TiledConfig:
    """The configuration for ``call``, by its bucket of M; with ``deterministic="batch"`` it does not depend on M."""
    dot = dot_dtype(call)
    batch = call.deterministic == "batch"
    m = representative(call.m)
    tile = _tile(call, m, device, dot, batch)
    split = 1 if batch or m > SPLIT_M else _split(call, m, tile, device)
    stages = stages_that_fit(tile, call.weight, dot, device)
    return TiledConfig(tile.block_m, tile.block_n, tile.block_k, split, tile.num_warps, stages, dot)


def dot_dtype(call: MatmulCall) -> str:
    """Dtype of the product's operands: float16 only where every weight fits."""
    if call.a_dtype == torch.bfloat16:
        return "bfloat16"
    return "float16" if call.a_dtype == torch.float16 and call.fits_float16 else "float32"


def _tile(call: MatmulCall, m: int, device: DeviceFacts, dot: str, batch: bool) -> Tile:
    tiles: tuple[Tile, ...] = _TILES_16BIT
    lookup: tuple[Tile, ...] = _TILES_16BIT_LOOKUP
    if device.emulated:
        tiles = lookup = _TILES_EMULATED
    elif dot == "float32":
        tiles, lookup = _TILES_FLOAT32, _TILES_FLOAT32_LOOKUP
    tile = _pick(tiles, m, batch)
    spec = call.weight
    by_element = 32 % spec.bits != 0 or spec.codebook_dtype is not None
    return _pick(lookup, m, batch) if by_element or not groups_per_tile(spec, tile.block_k) else tile


def _pick(tiles: tuple[Tile, ...], m: int, batch: bool) -> Tile:
    return tiles[_BATCH_TILE] if batch else next((t for t in tiles if m <= t.block_m), tiles[-1])


def _split(call: MatmulCall, m: int, tile: Tile, device: DeviceFacts) -> int:
    """Parts of K so that every processor has work; each part has at least two tiles, and none is empty."""
    programs = -(-m // tile.block_m) * -(-call.n // tile.block_n)
    k_tiles = -(-call.k // tile.block_k)
    wanted = device.processors * _PROGRAMS_PER_PROCESSOR // programs
    split = max(1, min(wanted, k_tiles // _MIN_TILES_PER_SPLIT, MAX_SPLIT))
    return without_empty(k_tiles, split)


def without_empty(k_tiles: int, split: int) -> int:
    """The splits that have a tile of K, where each takes as many tiles as ``split`` of them would."""
    return -(-k_tiles // -(-k_tiles // split))


def stages_that_fit(tile: Tile, spec: WeightSpec, dot: str, device: DeviceFacts) -> int:
    """As many stages as shared memory holds, by a bound on what Triton keeps there.

    That is all loads of the loop once for each stage but one, and W on its way into the product, twice.
    """
    size = 4 if dot == "float32" else 2
    element_words = 4 if 32 % spec.bits == 0 else 8  # a code that may straddle words takes two loads
    per_code = spec.bits / 8 if 32 % spec.bits == 0 else element_words
    if groups_per_tile(spec, tile.block_k) != 1:
        per_code += 4 + (0 if spec.zero_dtype is None else element_words)
    area = tile.block_k * tile.block_n
    stage = tile.block_m * tile.block_k * size + int(area * per_code)
    return max(1, min(tile.num_stages, 1 + (device.shared_bytes - 2 * area * size) // stage))


def groups_per_tile(spec: WeightSpec, block_k: int) -> int:
    """Whole groups in a tile of ``block_k`` rows, 1 also for a tile inside one group; 0: look up every row."""
    if spec.act_order:
        return 0
    if spec.group_size >= spec.in_features or spec.group_size % block_k == 0:
        return 1
    return block_k // spec.group_size if block_k % spec.group_size == 0 else 0
