"""AWQ: any layer of either version is read as it was packed and written back as the same bytes; damage is named."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qmm
from qmm import FormatWarning, QuantizedWeight, WeightFormatError, ZeroKind
from qmm.formats import awq

HALF = torch.float16
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word


def along(values: np.ndarray, bits: int) -> np.ndarray:
    """Rows of numbers as little-endian streams of int32 words, by Python's integers."""
    rows = []
    for row in values.tolist():
        number = sum(v << (i * bits) for i, v in enumerate(row))
        rows.append(np.frombuffer(number.to_bytes(-(-len(row) * bits // 32) * 4, "little"), "<i4"))
    return np.stack(rows)


def gemm(values: np.ndarray, bits: int) -> Tensor:
    if bits == 4:
        values = np.stack([values[:, i // 8 * 8 + ORDER[i % 8]] for i in range(values.shape[1])], 1)
    return torch.from_numpy(along(values, bits).copy())


def drawn(bits: int, k: int, n: int, group: int, seed: int) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Codes ``[K, N]``, zero points ``[G, N]`` with 0 and 2**bits - 1 among them, scales."""
    rng = np.random.default_rng(seed)
    groups = -(-k // group)
    zeros = rng.integers(0, 1 << bits, (groups, n))
    zeros.flat[:2] = 0, (1 << bits) - 1
    scales = torch.from_numpy(rng.uniform(-2, 2, (groups, n))).half()
    return rng.integers(0, 1 << bits, (k, n)), zeros, scales


def check(
    tensors: dict[str, Tensor], codes: np.ndarray, zeros: np.ndarray, scales: Tensor, **config: Any
) -> None:
    w = awq.from_tensors(tensors, **config)
    found = w.unpack_zeros()
    assert found is not None and w.zero_kind is ZeroKind.INT
    assert np.array_equal(w.unpack().numpy(), codes) and np.array_equal(found.numpy(), zeros)
    assert torch.equal(w.scales, scales)
    again = awq.to_tensors(w, version=config["version"])
    assert set(again) == set(tensors)
    for key, stored in tensors.items():
        assert again[key].dtype == stored.dtype and torch.equal(again[key], stored), key


@settings(max_examples=50, deadline=None)
@given(
    bits=st.integers(2, 8),
    k=st.integers(1, 70),
    blocks=st.integers(1, 5),
    group=st.integers(1, 80),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_gemm_layer(bits: int, k: int, blocks: int, group: int, seed: int) -> None:
    n = blocks * 8 if bits == 4 else blocks * 5
    codes, zeros, scales = drawn(bits, k, n, group, seed)
    tensors = {"qweight": gemm(codes, bits), "qzeros": gemm(zeros, bits), "scales": scales}
    check(tensors, codes, zeros, scales, bits=bits, group_size=group, version="gemm")


@settings(max_examples=30, deadline=None)
@given(
    group=st.sampled_from([32, 64, 128, 256]),
    groups=st.integers(1, 20),
    n=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_gemv_layer(group: int, groups: int, n: int, seed: int) -> None:
    """Codes and zero points along K in natural order; rows of zero points are padded by group size."""
    codes, zeros, scales = drawn(4, group * groups, n, group, seed)
    multiple = {32: 4, 64: 2}.get(group, 1)
    width = -(-groups // (8 * multiple)) * multiple
    padded = np.zeros((n, width * 8), np.int64)
    padded[:, :groups] = zeros.T
    wide = torch.zeros(n, width * 8, dtype=HALF)
    wide[:, :groups] = scales.t()
    tensors = {
        "qweight": torch.from_numpy(along(codes.T, 4).copy()),
        "qzeros": torch.from_numpy(along(padded, 4).copy()),
        "scales": wide,
    }
    check(tensors, codes, zeros, scales, bits=4, group_size=group, version="gemv")


def test_one_word_by_hand() -> None:
    """0x76543210 in a gemm row: columns 0, 2, 4, 6 in its low nibbles, then 1, 3, 5, 7."""
    tensors = {
        "qweight": torch.tensor([[0x76543210]], dtype=torch.int32),
        "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=HALF),
    }
    w = awq.from_tensors(tensors, w_bit=4, q_group_size=-1, version="GEMM")
    assert w.dequantize()[0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_what_stands_in_gemvs_padding_means_nothing() -> None:
    w = qmm.quantize(torch.randn(3, 256), bits=4, group_size=128, symmetric=False)
    tensors = awq.to_tensors(w, version="gemv")
    tensors["qzeros"] |= torch.tensor(-256, dtype=torch.int32)
    tensors["scales"][:, 2:] = 7
    again = awq.from_tensors(tensors, bits=4, group_size=128, version="gemv")
    assert torch.equal(again.dequantize(), w.dequantize())


def test_a_large_layer_is_turned_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmm.formats.packed.BLOCK_CODES", 64)
    codes, zeros, scales = drawn(4, 200, 16, 2, 0)
    tensors = {"qweight": gemm(codes, 4), "qzeros": gemm(zeros, 4), "scales": scales}
    check(tensors, codes, zeros, scales, bits=4, group_size=2, version="gemm")


@pytest.mark.parametrize(("zero", "warned"), [(8, False), (7, True), (9, True)])
def test_a_symmetric_layer(zero: int, warned: bool) -> None:
    tensors = layer() | {"qzeros": gemm(np.full((2, 16), zero), 4)}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        w = awq.from_checkpoint(tensors, GOOD | {"zero_point": False}, name="q")
    found = w.unpack_zeros()
    assert found is not None and found.unique().tolist() == [zero]
    assert [str(s.message)[:40] for s in seen] == ["q.qzeros: all one off the midpoint althou"[:40]] * warned


# writing


def test_lossy_only_when_asked_and_the_loss_is_told() -> None:
    codes = torch.randint(0, 16, (64, 16))
    w = QuantizedWeight.from_codes(
        codes, torch.full((2, 16), 0.5), torch.full((2, 16), 7.25), bits=4, group_size=32
    )
    with pytest.raises(WeightFormatError, match="zeros: must be whole numbers from 0 to 15"):
        awq.to_tensors(w)
    with pytest.warns(FormatWarning, match=r"lossy: .* up to 0\.125, rms 0\.125"):
        tensors = awq.to_tensors(w, lossy=True)
    found = awq.from_tensors(tensors, bits=4, group_size=32, version="gemm").unpack_zeros()
    assert found is not None and found.unique().tolist() == [7]


def test_a_symmetric_weight_is_written_with_its_midpoint() -> None:
    w = qmm.quantize(torch.randn(16, 64), bits=4, group_size=32)
    again = awq.from_tensors(awq.to_tensors(w), bits=4, group_size=32, version="gemm", zero_point=False)
    assert torch.equal(again.dequantize(), w.dequantize())


def plain(n: int = 16, k: int = 64, bits: int = 4, group_size: int = 32) -> QuantizedWeight:
    return qmm.quantize(torch.randn(n, k), bits=bits, group_size=group_size, symmetric=False)


CANNOT = {
    "act-order": (
        lambda: QuantizedWeight.from_codes(
            *(torch.ones(32, 8).int(), torch.ones(2, 8)), bits=4, group_size=16, g_idx=torch.arange(32) % 2
        ),
        "gemm",
        "g_idx: cannot be held",
    ),
    "N of no whole words": (lambda: plain(n=12), "gemm", "out_features: must be a multiple of 8"),
    "one bit": (lambda: plain(bits=1), "gemm", "bits: must be 2 to 8"),
    "gemv of 8 bits": (lambda: plain(bits=8), "gemv", "bits: must be 4"),
    "gemv group size": (lambda: plain(group_size=16), "gemv", "group_size: must be 32, 64 or at least 128"),
    "gemv K": (lambda: plain(k=36), "gemv", "in_features: must be a multiple of 8"),
    "version": (lambda: plain(), "gemv_fast", "version: must be one of gemm, gemv; got 'gemv_fast'"),
}


@pytest.mark.parametrize("what", CANNOT)
def test_weights_that_awq_cannot_hold(what: str) -> None:
    weight, version, text = CANNOT[what]
    with pytest.raises(WeightFormatError, match=text):
        awq.to_tensors(weight(), version=version)


# damage

GOOD = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def layer() -> dict[str, Tensor]:
    """K=64, N=16, two groups."""
    return awq.to_tensors(plain())


def zeros_like(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no qweight": ({"qweight": None}, {}, r"qweight: must be among the layer's tensors"),
    "no qzeros": ({"qzeros": None}, {}, r"qzeros: must be among the layer's tensors"),
    "no scales": ({"scales": None}, {}, r"scales: must be among the layer's tensors"),
    "g_idx": ({"g_idx": zeros_like(64)}, {}, r"tensors: must be among .* also \['g_idx'\]"),
    "qweight int64": (
        {"qweight": zeros_like(64, 2, dtype=torch.int64)},
        {},
        r"qweight: dtype must be int32 .*int64",
    ),
    "qweight of GPTQ": (
        {"qweight": zeros_like(8, 16)},
        {},
        r"qweight: shape must be .* = \[8, 2\]; got \[8, 16\]",
    ),
    "qweight truncated": (
        {"qweight": zeros_like(31, 2)},
        {},
        r"scales: .*K=31 and group_size=32 = \[1, 16\]",
    ),
    "qweight of experts": ({"qweight": zeros_like(2, 64, 2)}, {}, r"qweight: must have 2 dimensions"),
    "qzeros unpacked": (
        {"qzeros": zeros_like(2, 16, dtype=HALF)},
        {},
        r"qzeros: dtype must be int32 .*float16",
    ),
    "qzeros truncated": (
        {"qzeros": zeros_like(1, 2)},
        {},
        r"qzeros: shape must be .* = \[2, 2\]; got \[1, 2\]",
    ),
    "scales truncated": (
        {"scales": zeros_like(1, 16, dtype=HALF)},
        {},
        r"scales: shape must be .* = \[2, 16\]",
    ),
    "scales narrow": ({"scales": zeros_like(2, 8, dtype=HALF)}, {}, r"qweight: .*N=8"),
    "scales of odd N": (
        {"scales": zeros_like(2, 15, dtype=HALF)},
        {},
        r"out_features: must be a multiple of 8",
    ),
    "scales integer": ({"scales": zeros_like(2, 16)}, {}, r"scales: dtype must be one of"),
    "bits 8": ({}, {"bits": 8}, r"qweight: .*bits=8 = \[64, 4\]; got \[64, 2\]"),
    "bits 16": ({}, {"bits": 16}, r"bits: must be from 1 to 8"),
    "no bits": ({}, {"bits": None}, r"bits: must be given"),
    "two bits": ({}, {"w_bit": 8}, r"bits and w_bit: must agree; got \[4, 8\]"),
    "group size 16": ({}, {"group_size": 16}, r"scales: .*group_size=16 = \[4, 16\]; got \[2, 16\]"),
    "group size a word": ({}, {"group_size": "32"}, r"group_size: must be an integer; got '32'"),
    "no group size": ({}, {"group_size": None}, r"group_size: must be given"),
    "no version": ({}, {"version": None}, r"version: must be declared as gemm or gemv"),
    "unknown version": ({}, {"version": "gemv_fast"}, r"version: must be one of gemm, gemv; got 'gemv_fast'"),
    "two versions": ({}, {"checkpoint_format": "gemv"}, r"version and checkpoint_format: must agree"),
    "version gemv": ({}, {"version": "gemv"}, r"group_size: must divide K=16"),
    "another method": ({}, {"quant_method": "gptq"}, r"quant_method: must be awq"),
    "symmetric with other zero points": (
        {},
        {"zero_point": False},
        r"qzeros: must be the midpoint 8 .*zero_point",
    ),
    "zero_point a number": ({}, {"zero_point": 1}, r"zero_point: must be true or false"),
}


@pytest.mark.parametrize("what", BAD)
def test_damage_is_named(what: str) -> None:
    changes, config, text = BAD[what]
    tensors = {key: t for key, t in {**layer(), **changes}.items() if t is not None}
    with pytest.raises(WeightFormatError, match=r"^layers\.0\.q\." + text):
        awq.from_checkpoint(tensors, GOOD | config, name="layers.0.q")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"qzeros": zeros_like(16, 1)}, r"qzeros: shape must be \[N, Z\] .* = \[16, 4\]; got \[16, 1\]"),
        ({"scales": zeros_like(16, 2, dtype=HALF)}, r"scales: shape must be \[N, 8\*Z\] .* = \[16, 32\]"),
        ({"qweight": zeros_like(16, 7)}, r"group_size: must divide K=56 in version gemv; got 32"),
    ],
    ids=str,
)
def test_damaged_gemv(changes: dict[str, Tensor], text: str) -> None:
    tensors = awq.to_tensors(plain(), version="gemv") | changes
    with pytest.raises(WeightFormatError, match=text):
        awq.from_tensors(tensors, bits=4, group_size=32, version="gemv")
