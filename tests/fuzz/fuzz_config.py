"""Forced configurations, a bounded set for each kernel: tiles, splits (more than there is work for, too), stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from qmm.call import MatmulCall
from qmm.dispatch import Choice
from qmm.testing import Target

Forced = tuple[tuple[str, Any], ...]
_TILES = (  # block_m, block_n, block_k, num_warps, num_stages
    *((16, 32, 32, 4, 2), (32, 64, 64, 4, 2), (16, 64, 128, 4, 2), (64, 64, 32, 8, 2)),
    *((16, 16, 32, 2, 1), (64, 32, 64, 4, 3), (16, 128, 32, 4, 2)),
)
_TILES_EMULATED = ((16, 16, 32, 1, 1), (16, 32, 64, 1, 1), (32, 16, 32, 1, 1))
_NUMBA = ((4, 64, 32, 4, 64), (16, 64, 32, 16, 16), (64, 64, 32, 16, 16), (8, 32, 64, 4, 16))
_NUMBA_EMULATED = ((2, 8, 32, 1, 2), (4, 8, 32, 2, 2), (2, 4, 64, 1, 2))
_DECODE = (
    *(
        {"shared": False, "block_m": 8, "block_n": n, "num_warps": w, "depth": 2}
        for n in (16, 32)
        for w in (4, 8)
    ),
    *(
        {"shared": True, "block_m": m, "block_n": n, "num_warps": 4, "depth": d}
        for m in (8, 16)
        for n, d in ((32, 2), (64, 3), (128, 2))
    ),
)
_TILINGS = (  # block_m, columns, split_k, cluster, per_processor
    *((16, 128, 1, False, 1), (32, 128, 1, False, 1), (64, 128, 1, False, 1), (128, 128, 1, False, 1)),
    *((256, 128, 1, False, 1), (16, 128, 1, False, 2), (64, 128, 1, False, 2), (32, 128, 2, False, 2)),
    *((16, 128, 2, False, 1), (64, 128, 3, False, 1), (128, 128, 2, False, 1), (64, 128, 4, False, 1)),
    *((16, 128, 2, True, 1), (64, 128, 2, True, 1), (128, 128, 2, True, 1), (64, 128, 4, True, 1)),
    *((32, 192, 4, True, 1), (64, 192, 4, True, 1)),
)


def forced(pick: Callable[[Sequence[Any]], Any], target: Target) -> Forced | None:
    """What is forced, or None; none for a kernel that nobody taught this module."""
    emulated = target.device == "cpu"
    name = f"{target.backend}.{target.kernel}"
    if name == "triton.tiled":
        tile = pick((None, *(_TILES_EMULATED if emulated else _TILES)))
        names = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
        return (
            None if tile is None else (*zip(names, tile, strict=True), ("split_k", pick((1, 2, 3, 4, 5, 16))))
        )
    if name == "numba.tiled":
        tile = pick((None, *(_NUMBA_EMULATED if emulated else _NUMBA)))
        names = ("block_m", "block_n", "block_k", "threads_m", "threads_n")
        return (
            None if tile is None else (*zip(names, tile, strict=True), ("splits", pick((1, 2, 3, 4, 5, 16))))
        )
    if name == "triton.decode":
        config = pick((None, None, None, *_DECODE))
        return None if config is None else tuple(config.items())
    if name == "triton.wgmma":
        tiling = pick((None, None, None, *_TILINGS))
        names = ("block_m", "columns", "split_k", "cluster", "per_processor")
        return None if tiling is None else tuple(zip(names, tiling, strict=True))
    if name == "torch.blocks":
        return pick((None, (("block_n", 5), ("block_m", 3)), (("block_n", 32), ("block_m", 1))))
    return None


def with_forced(choice: Choice, call: MatmulCall, config: Forced | None) -> Choice:
    """The choice with the forced configuration; what the call cannot have (a split without work) is left as chosen."""
    if config is None:
        return choice
    wanted = dict(config)
    name = f"{choice.backend.name}.{choice.kernel.name}"
    if name == "triton.tiled":
        from qmm.backends.triton_gpu.heuristics import Tile, device_facts, stages_that_fit

        tile = Tile(*(wanted[n] for n in ("block_m", "block_n", "block_k", "num_warps", "num_stages")))
        wanted["num_stages"] = stages_that_fit(
            tile, call.weight, choice.config.dot, device_facts(call.device)
        )
    elif name == "numba.tiled":
        tiles = -(-call.k // wanted["block_k"])
        wanted["split_k"] = -(-tiles // wanted["splits"]) * wanted["block_k"]
    elif name == "triton.wgmma":
        from qmm.backends.triton_gpu.heuristics import device_facts
        from qmm.backends.triton_gpu.hopper.choose_wgmma import Tiling, wgmma_config

        try:
            made = wgmma_config(call, Tiling(**wanted), device_facts(call.device).shared_bytes)
        except ValueError:
            return choice
        return replace(choice, config=made)
    return replace(choice, config=replace(choice.config, **wanted))
