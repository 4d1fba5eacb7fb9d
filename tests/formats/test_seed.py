"""The seed layout: nothing is changed either way; damage is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qmm
from qmm import QuantizedWeight, WeightFormatError
from qmm.formats import seed

HALF = torch.float16


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([1, 2, 4, 8]),
    blocks=st.integers(1, 3),
    per_block=st.sampled_from([1, 2, 4]),
    n=st.integers(1, 9),
    symmetric=st.booleans(),
    number=st.integers(0, 2**32 - 1),
)
def test_any_layer(bits: int, blocks: int, per_block: int, n: int, symmetric: bool, number: int) -> None:
    """Any words are codes: the values are the seed kernel's, and the same bytes come back."""
    rng = np.random.default_rng(number)
    per_word, group = 32 // bits, 32 // per_block
    groups = blocks * per_block * per_word
    k = groups * group
    tensors = {
        "qw": torch.from_numpy(rng.integers(-(2**31), 2**31, (k // per_word, n)).astype(np.int32)),
        "scales": torch.from_numpy(rng.uniform(0.5, 2, (groups, n))).half(),
    }
    if not symmetric:
        words = rng.integers(-(2**31), 2**31, (groups // per_word, n)).astype(np.int32)
        tensors["qzeros"] = torch.from_numpy(words)
    w = seed.from_tensors(tensors, w_bit=bits, group_size=group)
    rows, mask = np.arange(k), (1 << bits) - 1
    code = tensors["qw"].numpy()[rows // per_word] >> (rows % per_word * bits)[:, None] & mask
    g = rows // group
    zero: Any = 1 << (bits - 1)
    if not symmetric:
        zero = tensors["qzeros"].numpy()[g // per_word] >> (g % per_word * bits)[:, None] & mask
    expected = (code - zero) * tensors["scales"].numpy()[g].astype(np.float32)
    assert np.array_equal(w.dequantize().numpy(), expected)
    again = seed.to_tensors(w)
    assert set(again) == set(tensors) and all(torch.equal(again[key], t) for key, t in tensors.items())


def test_nothing_is_copied() -> None:
    tensors = layer()
    again = seed.to_tensors(seed.from_tensors(tensors, bits=4, group_size=8))
    assert all(again[key].data_ptr() == t.data_ptr() for key, t in tensors.items())


CANNOT = {
    "3 bits": (lambda: qmm.quantize(torch.randn(4, 64), bits=3, group_size=32), "bits: must be 1, 2, 4 or 8"),
    "K of no whole words": (
        lambda: qmm.quantize(torch.randn(4, 60), bits=4, group_size=30),
        "in_features: must be a multiple of 8",
    ),
    "act-order": (lambda: made(g_idx=torch.arange(32) % 2), "g_idx: cannot be held"),
    "float zeros": (lambda: made(zeros=torch.ones(2, 4)), "zeros: must be of kind none or int"),
    "codebook": (lambda: made(codebook=torch.ones(16)), "codebook: cannot be held"),
}


def made(**options: Any) -> QuantizedWeight:
    return QuantizedWeight.from_codes(
        torch.ones(32, 4).int(), torch.ones(2, 4), bits=4, group_size=16, **options
    )


@pytest.mark.parametrize("what", CANNOT)
def test_weights_that_the_layout_cannot_hold(what: str) -> None:
    weight, text = CANNOT[what]
    with pytest.raises(WeightFormatError, match=text):
        seed.to_tensors(weight())


def layer() -> dict[str, Tensor]:
    """K=64, N=4, eight groups of eight."""
    return seed.to_tensors(qmm.quantize(torch.randn(4, 64), bits=4, group_size=8, symmetric=False))


def zeros_like(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no qw": ({"qw": None}, {}, r"qw: must be among"),
    "no scales": ({"scales": None}, {}, r"scales: must be among"),
    "unknown": ({"g_idx": zeros_like(64)}, {}, r"tensors: must be among .* also \['g_idx'\]"),
    "qw float": ({"qw": zeros_like(8, 4, dtype=HALF)}, {}, r"qw: dtype must be int32"),
    "qw truncated": ({"qw": zeros_like(7, 4)}, {}, r"scales: .*K=56"),
    "scales integer": ({"scales": zeros_like(8, 4)}, {}, r"scales: dtype must be one of"),
    "scales truncated": ({"scales": zeros_like(7, 4, dtype=HALF)}, {}, r"scales: must have .* 8 rows.*got 7"),
    "qzeros float": ({"qzeros": zeros_like(8, 4, dtype=HALF)}, {}, r"qzeros: dtype must be int32"),
    "qzeros unpacked": (
        {"qzeros": zeros_like(8, 4)},
        {},
        r"qzeros: shape must be .* = \[1, 4\]; got \[8, 4\]",
    ),
    "bits 3": ({}, {"w_bit": 3}, r"w_bit: must be 1, 2, 4 or 8"),
    "no bits": ({}, {"w_bit": None}, r"w_bit: must be given"),
    "two bits": ({}, {"bits": 8}, r"w_bit and bits: must agree"),
    "group size 16": ({}, {"group_size": 16}, r"scales: must have .* 4 rows.*got 8"),
    "no group size": ({}, {"group_size": None}, r"group_size: must be given"),
}


@pytest.mark.parametrize("what", BAD)
def test_damage_is_named(what: str) -> None:
    changes, config, text = BAD[what]
    tensors = {key: t for key, t in {**layer(), **changes}.items() if t is not None}
    with pytest.raises(WeightFormatError, match=r"^layers\.0\.q\." + text):
        seed.from_checkpoint(tensors, {"w_bit": 4, "group_size": 8} | config, name="layers.0.q")
