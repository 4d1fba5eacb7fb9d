"""Every pattern of every stored dtype, decoded and rounded by the device functions, against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qmm

if qmm.backends()["numba"].environment():
    pytest.skip(f"numba cannot run here: {qmm.backends()['numba'].environment()[0]}", allow_module_level=True)

from numba import cuda

from qmm.backends.numba_gpu.decode import code_reader, decoder
from qmm.backends.numba_gpu.environment import is_simulated
from qmm.backends.numba_gpu.epilogue import to_bfloat16, to_float16
from qmm.backends.numba_gpu.kernels import ELEMENTS
from qmm.weight.bitstream import pack
from qmm.weight.spec import SCALE_DTYPES, UINT4

DECODED = [dtype for dtype in SCALE_DTYPES if dtype != UINT4]  # those are read as codes of a stream
BLOCKS, THREADS = (1, 1) if is_simulated() else (64, 128)


def apply(function: Any, values: np.ndarray[Any, Any], result: str) -> np.ndarray[Any, Any]:
    """``function`` of each value, by a kernel."""

    def each(x, y):  # type: ignore[no-untyped-def]
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            y[i] = function(x[i])

    out = np.zeros(values.size, result)
    with np.errstate(all="ignore"):
        cuda.jit(each)[BLOCKS, THREADS](values, out)
    return out


def assert_same(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Equal values, equal signs, NaN where NaN."""
    np.testing.assert_array_equal(got, expected)
    real = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[real]), np.signbit(expected[real]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", DECODED, ids=lambda d: str(d).removeprefix("torch."))
def test_every_pattern_is_decoded(dtype: torch.dtype) -> None:
    """All 256 or 65536 patterns; float32 on as many with every exponent."""
    size = dtype.itemsize
    if size == 1:
        stored = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    elif size == 2:
        stored = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        stored = (torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16 | 0x2345).view(dtype)
    integers = stored.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])
    values = integers.numpy().view(ELEMENTS[dtype])
    assert_same(apply(decoder(dtype), values, "float32"), stored.float().numpy())


def near_ties(upper: torch.Tensor) -> np.ndarray[Any, Any]:
    """float32 patterns with these upper halves, on, just beside and far from the ties of shorter formats."""
    lower = torch.tensor([0x0000, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001])
    return (upper[:, None] << 16 | lower.to(torch.int32)).flatten().view(torch.float32).numpy()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bfloat16_is_rounded_to_nearest_even() -> None:
    """Also NaN, Inf, what overflows into Inf, and subnormals."""
    values = near_ties(torch.arange(-(1 << 15), 1 << 15, 7, dtype=torch.int32))
    got = torch.from_numpy(apply(to_bfloat16, values, "uint16").view(np.int16)).view(torch.bfloat16)
    assert_same(got.float().numpy(), torch.from_numpy(values).to(torch.bfloat16).float().numpy())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_float16_is_rounded_to_nearest_even() -> None:
    """The same, around float16's range."""
    values = near_ties(torch.arange(-(1 << 15), 1 << 15, 7, dtype=torch.int32))
    assert_same(apply(to_float16, values, "float16"), torch.from_numpy(values).half().numpy())


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_a_stream(bits: int) -> None:
    """Every position of a stream of 67 rows, those that straddle words included."""
    codes = torch.randint(0, 1 << bits, (67, 3), generator=torch.Generator().manual_seed(bits))
    codes[:8] = (1 << bits) - 1
    words = pack(codes, bits).numpy().view(np.uint32).ravel()
    code_at = code_reader(bits)

    def read(stream, out):  # type: ignore[no-untyped-def]
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = code_at(stream, 3, i % 3, i // 3)

    got = np.zeros(67 * 3, np.int64)
    cuda.jit(read)[BLOCKS, THREADS](words, got)
    np.testing.assert_array_equal(got.reshape(67, 3), codes.numpy())
