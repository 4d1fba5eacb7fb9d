"""torch.set_default_device and set_default_dtype, which model loaders set, change nothing in any format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qmm
from qmm import QuantizedWeight, formats
from qmm.formats.gguf_blocks import BLOCK_TYPES

K, N, GROUP = 128, 64, 64


def quantized(bits: int = 4, **options: Any) -> QuantizedWeight:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(bits))
    return qmm.quantize(weight, bits=bits, **{"group_size": GROUP, **options})


def drawn(*shape: int, top: int = 16) -> Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(1))


def table(values: tuple[float, ...], scales: Tensor, group: int) -> QuantizedWeight:
    book = torch.tensor(values, dtype=torch.float32)
    return QuantizedWeight.from_codes(drawn(K, N), scales, bits=4, group_size=group, codebook=book)


def fp4() -> QuantizedWeight:
    from qmm.formats.minifloat import E2M1_VALUES, E8M0

    if E8M0 is None:
        pytest.skip("this torch has no float8_e8m0fnu")
    scales = drawn(K // 32, N, top=5).to(torch.uint8).add(125).view(E8M0)
    return table(E2M1_VALUES, scales, 32)


def nf4() -> QuantizedWeight:
    return table(formats.bitsandbytes.CODEBOOKS["nf4"], drawn(2, N).float() + 0.1, GROUP)


def int8() -> QuantizedWeight:
    factor = torch.tensor([1 / 127], dtype=torch.float32)
    return QuantizedWeight.from_codes(
        drawn(K, N, top=256), torch.ones(1, N), bits=8, group_size=-1, scale2=factor
    )


def float_zeros() -> QuantizedWeight:
    return QuantizedWeight.from_codes(
        drawn(K, N), torch.ones(2, N).half(), torch.full((2, N), 7.37).half(), bits=4, group_size=GROUP
    )


PACKED = {"bits": 4, "group_size": GROUP}
WAYS: dict[str, tuple[Callable[[], QuantizedWeight], dict[str, Any], dict[str, Any]]] = {
    "gptq": (lambda: quantized(symmetric=False), {}, {**PACKED, "checkpoint_format": "gptq_v2"}),
    "awq": (lambda: quantized(symmetric=False), {}, {**PACKED, "version": "gemm"}),
    "hqq": (float_zeros, {}, {}),
    "seed": (lambda: quantized(symmetric=False), {}, {"w_bit": 4, "group_size": GROUP}),
    "compressed_tensors": (quantized, {}, {"format": "pack-quantized", **PACKED}),
    "mx": (fp4, {}, {}),
    "bitsandbytes nf4": (nf4, {}, {}),
    "bitsandbytes int8": (int8, {}, {}),
}


@pytest.fixture
def elsewhere() -> Any:
    """As a loader leaves it: tensors are made on meta, in bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert list(one) == list(two)
    for name, t in one.items():
        other = two[name]
        assert (other.dtype, other.device, other.shape) == (t.dtype, t.device, t.shape), name
        assert np.array_equal(as_bytes(other), as_bytes(t)), name


def as_bytes(t: Tensor) -> np.ndarray:
    return t.contiguous().view(-1).view(torch.uint8).numpy()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Any:
    """Asked for before ``elsewhere``: what is right is made in ordinary circumstances."""
    make, writing, reading = WAYS[request.param]
    module = getattr(formats, request.param.split()[0])
    w = make()
    tensors = module.to_tensors(w, **writing)
    return module, writing, reading, w, tensors, module.from_tensors(tensors, **reading).state_dict()


def test_written_and_read_as_ever(way: Any, elsewhere: Any) -> None:
    module, writing, reading, w, tensors, state = way
    same(module.to_tensors(w, **writing), tensors)
    same(module.from_tensors(tensors, **reading).state_dict(), state)


@pytest.fixture(params=BLOCK_TYPES)
def blocks(request: pytest.FixtureRequest) -> Any:
    nbytes = BLOCK_TYPES[request.param].nbytes
    raw = torch.from_numpy(np.random.default_rng(2).integers(0, 60, (3, 2 * nbytes), np.uint8))
    return request.param, raw, formats.gguf.from_blocks(raw, request.param).state_dict()


def test_gguf_blocks(blocks: Any, elsewhere: Any) -> None:
    name, raw, state = blocks
    w = formats.gguf.from_blocks(raw, name)
    same(w.state_dict(), state)
    assert np.array_equal(as_bytes(formats.gguf.to_blocks(w, name)), as_bytes(raw))
