"""Tiles and splits: pure Python, no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qmm.backends.numba_gpu.facts import tiled_facts
from qmm.backends.numba_gpu.heuristics import NumbaConfig, choose
from qmm.call import MatmulCall
from qmm.weight import ZeroKind
from qmm.weight.spec import WeightSpec

SIZES = (1, 2, 3, 31, 32, 33, 64, 65, 1000, 4096, 28672)


def call(m: int, n: int = 4096, k: int = 4096, deterministic: bool | str = True) -> MatmulCall:
    """Facts of an ordinary call."""
    spec = WeightSpec(4, 128, k, n, -(-k // 128), ZeroKind.NONE, torch.float16)
    device = torch.device("cuda", 0)
    return MatmulCall(
        m, n, k, (m, k), (k, 1), torch.float16, True, device, spec, True, deterministic=deterministic
    )


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("k", SIZES)
def test_splits_cover_k_once(k: int, emulated: bool) -> None:
    """Whole tiles in every split, none empty, none past the end."""
    for m in (0, 1, 17, 64, 1 << 20):
        for n in SIZES:
            config = choose(call(m, n, k), emulated)
            assert config.split_k % config.block_k == 0
            assert (config.splits - 1) * config.split_k < k <= config.splits * config.split_k
            assert config.splits <= 65535


def test_few_kernels_for_small_m() -> None:
    """M = 1..64 on one weight compiles at most four kernels."""
    for n, k in ((4096, 4096), (28672, 8192), (48, 96), (1024, 8192)):
        assert len({tiled_facts(call(m, n, k), choose(call(m, n, k), False)) for m in range(1, 65)}) <= 4


def test_batch_mode_does_not_look_at_m() -> None:
    """One configuration whatever M is."""
    assert len({choose(call(m, deterministic="batch"), False) for m in (1, 2, 16, 17, 64, 257, 100_000)}) == 1


def test_small_m_fills_the_gpu() -> None:
    """One row against a square weight is split over K; the workspace stays small."""
    config = choose(call(1), False)
    assert config.splits > 1
    blocks, splits = config.grid(1, 4096)
    assert blocks * splits >= 256
    for m in (1, 16, 64, 1000, 4096):
        config = choose(call(m, 2048, 16384), False)
        assert config.splits == 1 or config.splits * m * 2048 <= 1 << 22


def test_the_long_side_is_on_grid_x() -> None:
    """Grid y ends at 65535; M and N may not."""
    for m, n in ((1 << 21, 8), (1, 1 << 21), (1 << 20, 1 << 12)):
        blocks, splits = choose(call(m, n, 32), False).grid(m, n)
        assert blocks < 2**31 and splits <= 65535


@pytest.mark.parametrize("change", [{"block_m": 10}, {"block_n": 65}, {"block_k": 48}, {"split_k": 33}])
def test_a_setting_that_cannot_hold_raises(change: dict[str, int]) -> None:
    """Tiles that are no whole number of threads or words."""
    good = NumbaConfig(16, 64, 32, 16, 16, 1, 64)
    with pytest.raises(ValueError, match="whole numbers"):
        replace(good, **change)
