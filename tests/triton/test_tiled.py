"""Forced configurations: every way of finding a row's group, splits past the end of K, offsets past 2**31."""

from __future__ import annotations

import pytest
import torch

from qmm.call import make_call
from qmm.testing import Case, assert_close, assert_exact, make_inputs
from qmm.testing.poison import Canary, carve_rows, carve_weight
from qmm.weight import QuantizedWeight, ZeroKind

triton = pytest.importorskip("triton", reason="triton is not installed")

from qmm.backends.triton_gpu import launch  # noqa: E402
from qmm.backends.triton_gpu.heuristics import TiledConfig  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def multiply(a: torch.Tensor, w: QuantizedWeight, config: TiledConfig) -> torch.Tensor:
    canary = Canary(a.shape[0], w.out_features, a.dtype, a.device)
    launch.run(make_call(a, w), config, a, w.tensors, None, canary.out)
    canary.check()
    return canary.out


@pytest.mark.parametrize("block_k", [32, 64, 128])
@pytest.mark.parametrize("group", [1, 8, 32, 64, 96, 128, 24, -1])
def test_group_size_against_tile(group: int, block_k: int) -> None:
    """Groups smaller and larger than a tile, and neither a multiple of the other: exact sums show each wrong row."""
    x = make_inputs(Case(m=4, n=20, k=192, group_size=group, dtype=torch.float32), DEVICE, exact=True)
    a, w = carve_rows(x.a), carve_weight(x.w)
    assert_exact(multiply(a, w, TiledConfig(16, 32, block_k, 1, 4, 2, "float32")), x.a, x.w)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(("k", "split"), [(96, 4), (64, 4), (257, 3), (1, 2), (160, 5)])
def test_splits_without_work_add_nothing(k: int, split: int, bits: int) -> None:
    x = make_inputs(Case(m=2, n=18, k=k, bits=bits, group_size=32, zero_kind=ZeroKind.INT), DEVICE)
    a, w = carve_rows(x.a), carve_weight(x.w)
    assert_close(multiply(a, w, TiledConfig(16, 32, 32, split, 4, 2, "float16")), x.a, x.w)


def test_infinite_scale_of_a_short_last_group() -> None:
    """Rows past K share the last group's scale and must not turn Inf into NaN."""
    codes = torch.full((40, 3), 9)
    scales = torch.ones(2, 3)
    scales[1, 1] = torch.inf
    w = QuantizedWeight.from_codes(codes, scales, bits=4, group_size=32).to(DEVICE)
    a = torch.ones(2, 40, device=DEVICE)
    got = multiply(a, w, TiledConfig(16, 32, 64, 1, 4, 2, "float32"))
    assert got.tolist() == [[40.0, torch.inf, 40.0]] * 2


def test_row_stride_past_2_to_the_31() -> None:
    """Three rows 2**30 elements apart: pages that nobody touches cost nothing."""
    x = make_inputs(Case(m=3, n=9, k=64), DEVICE)
    try:
        buffer = torch.empty(2 * 2**30 + 64, dtype=x.a.dtype, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no 4 GiB of address space: {error}")
    a = buffer.as_strided((3, 64), (2**30, 1))
    a.copy_(x.a)
    config = TiledConfig(16, 32, 64, 1, 4, 2, "float16")
    assert torch.equal(multiply(a, x.w, config), multiply(x.a, x.w, config))


@pytest.mark.parametrize("scale", ["float8_e4m3fn", "float8_e8m0fnu"])
def test_every_float8_scale(scale: str) -> None:
    """All 256 bit patterns: subnormals, NaN, 2**-127."""
    dtype = getattr(torch, scale, None)
    if dtype is None:
        pytest.skip(f"this torch has no {scale}")
    scales = torch.arange(256, dtype=torch.uint8)[None].view(dtype)
    w = QuantizedWeight.from_codes(torch.full((16, 256), 9), scales, bits=4, group_size=16).to(DEVICE)
    a = torch.zeros(1, 16, device=DEVICE)
    a[0, 3] = 1
    got = multiply(a, w, TiledConfig(16, 64, 32, 1, 4, 2, "float32"))
    expected = scales.float()
    bad = expected.isnan()
    assert torch.equal(got.cpu()[~bad], expected[~bad]) and bool(got.cpu()[bad].isnan().all())
