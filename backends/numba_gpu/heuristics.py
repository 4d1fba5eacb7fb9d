"""How the tiled kernel is cut up for a call: (M, N, K) -> tile, threads and splits of K. The only place that decides.

Pure Python; imports neither numba nor a driver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qmm.call import MatmulCall

# 32 codes fill exactly `bits` words, so a K tile of 32 rows starts on a word whatever the width.
WORD_ROWS = 32


@dataclass(frozen=True)
class NumbaConfig:
    """Configuration of ``tiled``.

    Attributes:
        block_m: rows of A a block of threads works on.
        block_n: columns of W a block of threads works on.
        block_k: rows of W in shared memory at a time, a multiple of 32.
        threads_m: threads along M, each with ``block_m // threads_m`` rows.
        threads_n: threads along N, each with ``block_n // threads_n`` columns.
        splits: parts of K, each summed by its own block and then added in a fixed order.
        split_k: rows of W in a part, a multiple of ``block_k``.
    """

    block_m: int
    block_n: int
    block_k: int
    threads_m: int
    threads_n: int
    splits: int
    split_k: int

    def __post_init__(self) -> None:
        tiles = (self.block_m % self.threads_m, self.block_n % self.threads_n, self.block_k % WORD_ROWS)
        if any(tiles) or self.split_k % self.block_k:
            rule = f"tiles must be whole numbers of threads and of {WORD_ROWS} rows of K"
            raise ValueError(f"{rule}; got {self}")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.threads_m * self.threads_n

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Blocks: all tiles of the output along x, which has room for 2**31 of them, and the splits along y."""
        return cdiv(m, self.block_m) * cdiv(n, self.block_n), self.splits


@dataclass(frozen=True)
class _Tile:
    """A block of threads and its part of the output, for M up to ``up_to_m``."""

    up_to_m: float
    block_m: int
    block_n: int
    threads_m: int
    threads_n: int


@dataclass(frozen=True)
class _Machine:
    """What the choice depends on besides the shape.

    Attributes:
        tiles: by rising ``up_to_m``.
        batch_tile: the tile of ``deterministic="batch"``.
        block_k: see :class:`NumbaConfig`.
        target_blocks: K is split until about so many blocks of threads run.
        least_tiles: K tiles that a split must have to be worth its place in the workspace.
    """

    tiles: tuple[_Tile, ...]
    batch_tile: _Tile
    block_k: int
    target_blocks: int
    least_tiles: int


_LOW = _Tile(4, 4, 64, 4, 64)
# Up to two of them along M: W is read twice, but fewer rows of padding are multiplied.
_MIDDLE = _Tile(32, 16, 64, 16, 16)
_HIGH = _Tile(math.inf, 64, 64, 16, 16)
# Four blocks for each SM of a large GPU. A constant: with it the split, and so the last bit of a result, is the same
# on every GPU.
_GPU = _Machine((_LOW, _MIDDLE, _HIGH), _MIDDLE, block_k=32, target_blocks=512, least_tiles=8)
# A simulated thread is an operating system thread under one lock, so there are as few as still share tiles.
_FEW, _MORE = _Tile(2, 2, 8, 1, 2), _Tile(math.inf, 4, 8, 2, 2)
_SIMULATOR = _Machine((_FEW, _MORE), _MORE, block_k=32, target_blocks=4, least_tiles=1)


def choose(call: MatmulCall, emulated: bool) -> NumbaConfig:
    """Tile and split for ``call``.

    A few heights of tile, so that M = 1..64 compiles three kernels and not one for each M. With
    ``deterministic="batch"`` neither tile nor split depends on M: one tile for all and no split, which leaves most of
    a GPU idle at M = 1 and reads W more often than needed at large M.
    """
    machine = _SIMULATOR if emulated else _GPU
    batch = call.deterministic == "batch"
    tile = machine.batch_tile if batch else next(t for t in machine.tiles if call.m <= t.up_to_m)
    tiles_k = cdiv(call.k, machine.block_k)
    splits = 1
    if not batch:
        tiles = max(1, cdiv(call.m, tile.block_m)) * cdiv(call.n, tile.block_n)
        splits = max(1, min(machine.target_blocks // tiles, tiles_k // machine.least_tiles))
    split_tiles = cdiv(tiles_k, splits)
    return NumbaConfig(
        block_m=tile.block_m,
        block_n=tile.block_n,
        block_k=machine.block_k,
        threads_m=tile.threads_m,
        threads_n=tile.threads_n,
        splits=cdiv(tiles_k, split_tiles),  # no split is empty
        split_k=split_tiles * machine.block_k,
    )


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)
