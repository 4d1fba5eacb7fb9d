"""HQQ: any layer of any width is read as it was packed and written back as the same bytes; damage is named."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qmm
from qmm import FormatWarning, QuantizedWeight, WeightFormatError, ZeroKind
from qmm.formats import hqq

HALF = torch.float16
EACH = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}  # codes of a byte (of a word for 3 bits)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes ``[R, C]`` -> ``W_q``, one row at a time: the first field of a number is its highest."""
    each = EACH[bits]
    rows = -(-len(codes) // each)
    out = np.zeros((rows, codes.shape[1]), np.int64)
    for row, values in enumerate(codes):
        out[row % rows] |= values << (bits * (each - 1 - row // rows))
    return out.astype(np.int32 if bits == 3 else np.uint8)


def made(
    bits: int, n: int, k: int, group: int, axis: int = 1, seed: int = 0, dtype: torch.dtype = HALF
) -> tuple[dict[str, Tensor], np.ndarray]:
    """A layer's tensors without its facts, and its weight ``[N, K]`` by hqq's own steps in float32."""
    rng = np.random.default_rng(seed)
    shape = (n * k // group, group) if axis == 1 else (group, n * k // group)
    codes = rng.integers(0, 1 << bits, shape)
    factors = (shape[0], 1) if axis == 1 else (1, shape[1])
    scale = torch.from_numpy(rng.uniform(0.01, 0.1, factors)).to(dtype)
    zero = torch.from_numpy(rng.uniform(0, 1 << bits, factors)).to(dtype)
    weight = (codes.astype(np.float32) - zero.float().numpy()) * scale.float().numpy()
    return {"W_q": torch.from_numpy(packed(codes, bits)), "scale": scale, "zero": zero}, weight.reshape(n, k)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(list(EACH)),
    n=st.integers(1, 6),
    groups=st.integers(1, 4),
    group=st.integers(1, 20).map(lambda g: 2 * g),
    dtype=st.sampled_from([HALF, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_layer(bits: int, n: int, groups: int, group: int, dtype: torch.dtype, seed: int) -> None:
    n = n if bits in (3, 5, 6, 8) else n * 8  # whole bytes
    tensors, weight = made(bits, n, groups * group, group, seed=seed, dtype=dtype)
    w = hqq.from_tensors(tensors, nbits=bits, group_size=group, axis=1, shape=(n, groups * group))
    assert w.zero_kind is ZeroKind.FLOAT and w.group_size == group and w.bits == bits
    assert np.array_equal(w.dequantize().t().numpy(), weight)
    again = hqq.to_tensors(w)
    for key, stored in tensors.items():
        assert again[key].dtype == stored.dtype and torch.equal(again[key], stored), key
    # what was written describes itself
    assert torch.equal(hqq.from_checkpoint(again, {}).dequantize(), w.dequantize())


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([4, 8, 3]),
    n=st.integers(1, 6).map(lambda n: 4 * n),
    k=st.integers(1, 40),
    divisor=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_groups_that_cross_the_ends_of_rows(bits: int, n: int, k: int, divisor: int, seed: int) -> None:
    """Groups run over the flat weight: the common divisor with K expresses them exactly, longer ones than K too."""
    total = n * k
    group = total // next(d for d in range(min(divisor, total), 0, -1) if total % d == 0)
    rows = total // group
    if bits == 4 and rows % 2:
        group, rows = (group // 2, rows * 2) if group % 2 == 0 else (1, total)
    tensors, weight = made(bits, n, k, group, seed=seed)
    w = hqq.from_tensors(tensors, nbits=bits, group_size=group, axis=1, shape=(n, k))
    assert w.group_size == np.gcd(k, group)
    assert np.array_equal(w.dequantize().t().numpy(), weight)


@pytest.mark.parametrize("bits", EACH)
def test_axis_0_is_exact_and_says_what_it_takes(bits: int) -> None:
    """Groups down the flat weight's columns: a scale for each weight expresses them."""
    tensors, weight = made(bits, 12, 40, 16, axis=0)
    with pytest.warns(
        FormatWarning, match=r"^q\.axis: 0 takes a scale and a zero point for each weight: \d+ bytes"
    ):
        w = hqq.from_tensors(tensors, nbits=bits, group_size=16, axis=0, shape=(12, 40), name="q")
    assert w.group_size == 1 and np.array_equal(w.dequantize().t().numpy(), weight)


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [4, 3])
def test_view_as_float(bits: int, dtype: torch.dtype) -> None:
    tensors, weight = made(bits, 8, 64, 32, dtype=dtype)
    viewed = tensors | {"W_q": tensors["W_q"].view(dtype)}
    options = {"nbits": bits, "group_size": 32, "axis": 1, "shape": (8, 64)}
    w = hqq.from_tensors(viewed, view_as_float=True, **options)
    assert np.array_equal(w.dequantize().t().numpy(), weight)
    again = hqq.to_tensors(w, view_as_float=True)
    assert again["W_q"].dtype == dtype
    assert torch.equal(again["W_q"].view(torch.uint8), viewed["W_q"].view(torch.uint8))
    assert torch.equal(hqq.from_checkpoint(again, {}).dequantize(), w.dequantize())


def test_a_large_layer_is_turned_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmm.formats.hqq.BLOCK_CODES", 50)
    for axis, group in ((1, 16), (1, 32), (0, 8)):
        tensors, weight = made(4, 16, 24, group, axis=axis)
        with pytest.warns(FormatWarning) if axis == 0 else nullcontext():
            w = hqq.from_tensors(tensors, nbits=4, group_size=group, axis=axis, shape=(16, 24))
        assert np.array_equal(w.dequantize().t().numpy(), weight)


def test_float_zeros_are_not_rounded() -> None:
    """CASES 36: z = 7.37."""
    tensors = {"W_q": torch.arange(16, dtype=torch.uint8).view(1, 16), "scale": torch.tensor([[0.05]] * 2)}
    tensors["zero"] = torch.tensor([[7.37]] * 2)
    w = hqq.from_tensors(tensors, nbits=4, group_size=16, axis=1, shape=(2, 16))
    np.testing.assert_allclose(w.dequantize()[:, 1].numpy(), (np.arange(16) - 7.37) * 0.05, rtol=1e-5)


# the config


@pytest.mark.parametrize(
    "config",
    [
        {
            "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 1}},
            "quant_method": "hqq",
        },
        {
            "quant_config": {
                "self_attn.q_proj": {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 1}}
            }
        },
        {"quant_config": {"q_proj": {"nbits": 4, "group_size": 32, "axis": 1}, "k_proj": {"nbits": 8}}},
        {"nbits": 4, "group_size": 32, "axis": 1},
    ],
    ids=str,
)
def test_what_the_layer_does_not_say_comes_from_the_config(config: dict[str, Any]) -> None:
    tensors, weight = made(4, 8, 64, 32)
    tensors["shape"] = torch.tensor([8, 64])
    w = hqq.from_checkpoint(tensors, config, name="model.layers.0.self_attn.q_proj")
    assert np.array_equal(w.dequantize().t().numpy(), weight)


@pytest.mark.parametrize(("axis", "group"), [(1, 64), (0, 8)])
def test_no_group_size_means_a_whole_row_or_column(axis: int, group: int) -> None:
    tensors, weight = made(8, 8, 64, group, axis=axis)
    with pytest.warns(FormatWarning) if axis == 0 else nullcontext():
        w = hqq.from_tensors(tensors, nbits=8, group_size=None, axis=axis, shape=(8, 64))
    assert np.array_equal(w.dequantize().t().numpy(), weight)


# writing


@pytest.mark.parametrize("symmetric", [True, False])
def test_integer_zero_points_become_floats(symmetric: bool) -> None:
    w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32, symmetric=symmetric)
    again = hqq.from_checkpoint(hqq.to_tensors(w), {})
    assert torch.equal(again.dequantize(), w.dequantize())


def weight(**options: Any) -> QuantizedWeight:
    return QuantizedWeight.from_codes(
        torch.ones(32, 8).int(), torch.ones(2, 8), bits=4, group_size=16, **options
    )


CANNOT = {
    "7 bits": (
        lambda: qmm.quantize(torch.randn(8, 64), bits=7, group_size=32),
        {},
        "bits: must be one of 8, 6, 5",
    ),
    "act-order": (lambda: weight(g_idx=torch.arange(32) % 2), {}, "g_idx: cannot be held"),
    "codebook": (lambda: weight(codebook=torch.ones(16)), {}, "codebook: cannot be held"),
    "bias": (
        lambda: weight(zeros=torch.ones(2, 8), zero_kind="bias"),
        {},
        "zeros: must be of kind none, int or float",
    ),
    "short group": (
        lambda: qmm.quantize(torch.randn(8, 40), bits=4, group_size=32),
        {},
        "group_size: must divide K=40",
    ),
    "no whole bytes": (
        lambda: qmm.quantize(torch.randn(3, 32), bits=4, group_size=32),
        {},
        "W_q: rows of codes must be",
    ),
    "no whole floats": (
        lambda: qmm.quantize(torch.randn(2, 9), bits=4, group_size=9),
        {"view_as_float": True},
        "group_size: must fill whole",
    ),
}


@pytest.mark.parametrize("what", CANNOT)
def test_weights_that_hqq_cannot_hold(what: str) -> None:
    made_, options, text = CANNOT[what]
    with pytest.raises(WeightFormatError, match=text):
        hqq.to_tensors(made_(), **options)


# damage


def layer() -> dict[str, Tensor]:
    """K=64, N=8, 4 bits, groups of 32: W_q [8, 32]."""
    return hqq.to_tensors(qmm.quantize(torch.randn(8, 64), bits=4, group_size=32, symmetric=False))


def declared(**settings: Any) -> dict[str, Any]:
    params = {"nbits": 4, "group_size": 32, "axis": 1, "view_as_float": False}
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": params | settings}}


def number(value: float, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def text_of(value: str) -> Tensor:
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


U8 = torch.uint8
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no W_q": ({"W_q": None}, {}, r"W_q: must be among"),
    "no scale": ({"scale": None}, {}, r"scale: must be among"),
    "no zero": ({"zero": None}, {}, r"zero: must be among"),
    "no shape": ({"shape": None}, {}, r"shape: must be in the layer or the config"),
    "quantised scale": ({"quant_scale": number(1, U8)}, {}, r"quant_scale: must be false"),
    "unknown tensor": ({"meta_scale": number(1)}, {}, r"tensors: must be among"),
    "W_q int32": (
        {"W_q": torch.zeros(8, 32, dtype=torch.int32)},
        {},
        r"W_q: dtype must be uint8 for 4 bits; got int32",
    ),
    "W_q float": (
        {"W_q": torch.zeros(8, 16, dtype=HALF)},
        {},
        r"W_q: dtype must be uint8 for 4 bits; got float16",
    ),
    "W_q truncated": (
        {"W_q": torch.zeros(7, 32, dtype=U8)},
        {},
        r"W_q: shape must be .* = \[8, 32\]; got \[7, 32\]",
    ),
    "W_q flat": ({"W_q": torch.zeros(256, dtype=U8)}, {}, r"W_q: must have 2 dimensions"),
    "scale truncated": (
        {"scale": torch.zeros(15, 1)},
        {},
        r"scale: shape must be .* = \[16, 1\]; got \[15, 1\]",
    ),
    "zero flat": ({"zero": torch.zeros(16)}, {}, r"zero: must have 2 dimensions"),
    "zero packed": ({"zero": torch.zeros(16, 1, dtype=U8)}, {}, r"zero: dtype must be one of"),
    "nbits 7": ({"nbits": number(7)}, {}, r"nbits: must agree with the config's 4; got 7"),
    "nbits 1.58": ({"nbits": number(1.58, torch.float32)}, {}, r"nbits: must be one integer"),
    "nbits two": ({"nbits": torch.tensor([4, 4])}, {}, r"nbits: must be one integer"),
    "config nbits": ({}, {"nbits": 8}, r"nbits: must agree with the config's 8; got 4"),
    "config axis": ({}, {"axis": 0}, r"axis: must agree with the config's 0; got 1"),
    "config group size": ({}, {"group_size": 64}, r"group_size: must agree with the config's 64; got 32"),
    "config view": (
        {},
        {"view_as_float": True},
        r"view_as_float: must agree with the config's True; got False",
    ),
    "axis 2": ({"axis": number(2)}, {"axis": 2}, r"axis: must be from 0 to 1; got 2"),
    "group size of no whole groups": (
        {"group_size": number(7)},
        {"group_size": 7},
        r"group_size: must divide",
    ),
    "group size 64": ({"group_size": number(64)}, {"group_size": 64}, r"W_q: shape must be .* = \[4, 64\]"),
    "shape of experts": ({"shape": torch.tensor([2, 8, 64])}, {}, r"shape: must be \[N, K\]"),
    "shape float": ({"shape": torch.tensor([8.0, 64.0])}, {}, r"shape: must be a few integers"),
    "shape huge": ({"shape": torch.tensor([2**31, 64])}, {}, r"shape: must be from 1 to"),
    "shape negative": ({"shape": torch.tensor([-8, 64])}, {}, r"shape: must be from 1 to"),
    "shape of another weight": ({"shape": torch.tensor([16, 64])}, {}, r"W_q: shape must be .* = \[16, 32\]"),
    "packing": ({"packing": text_of("4bit_32")}, {}, r"packing: must be '4bit_u8' for 4 bits; got '4bit_32'"),
    "packing not ASCII": ({"packing": torch.tensor([200], dtype=U8)}, {}, r"packing: must be ASCII"),
    "packing endless": ({"packing": torch.zeros(1000, dtype=U8)}, {}, r"packing: must be a string"),
    "flag 2": ({"view_as_float": number(2, U8)}, {}, r"view_as_float: must be 0 or 1"),
    "view of integers": (
        {"view_as_float": number(1, U8)},
        {"view_as_float": True},
        r"W_q: must have a floating dtype",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_damage_is_named(what: str) -> None:
    changes, settings_, text = BAD[what]
    tensors = {key: t for key, t in {**layer(), **changes}.items() if t is not None}
    with pytest.raises(WeightFormatError, match=r"^layers\.0\.q\." + text):
        hqq.from_checkpoint(tensors, declared(**settings_), name="layers.0.q")


@pytest.mark.parametrize("bits", [5, 6])
def test_codes_of_one_a_byte_are_checked(bits: int) -> None:
    tensors, _ = made(bits, 4, 32, 16)
    tensors["W_q"][3, 5] = 1 << bits
    with pytest.raises(
        WeightFormatError, match=rf"W_q: codes must be in \[0, {(1 << bits) - 1}\] .*; got {1 << bits}"
    ):
        hqq.from_tensors(tensors, nbits=bits, group_size=16, axis=1, shape=(4, 32))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "gptq"}, "quant_method: must be hqq"),
        ({"quant_config": [1]}, "quant_config: must be a mapping"),
        ({"quant_config": {"q": 4}}, "quant_config: must map tags to settings"),
        ({"quant_config": {"weight_quant_params": 4}}, "weight_quant_params: must be a mapping"),
    ],
    ids=str,
)
def test_damaged_configs(config: dict[str, Any], text: str) -> None:
    with pytest.raises(WeightFormatError, match=text):
        hqq.from_checkpoint(layer(), config, name="layers.0.q")
