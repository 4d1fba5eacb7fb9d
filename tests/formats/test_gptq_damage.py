"""Damaged and contradictory GPTQ layers: each error names the layer, the tensor, the rule and the value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qmm
from qmm import WeightFormatError
from qmm.formats import gptq

HALF, I32 = torch.float16, torch.int32


def layer(bits: int = 4) -> dict[str, Tensor]:
    """K=64, N=32, two groups."""
    return gptq.to_tensors(qmm.quantize(torch.randn(32, 64), bits=bits, group_size=32, symmetric=False))


GOOD = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "checkpoint_format": "gptq_v2",
    "desc_act": False,
    "sym": False,
}


def zeros_like(*shape: int, dtype: torch.dtype = I32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


# tensors changed (None takes one away), config changed, what the error names
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no qweight": ({"qweight": None}, {}, r"qweight: must be among the layer's tensors"),
    "no qzeros": ({"qzeros": None}, {}, r"qzeros: must be among the layer's tensors"),
    "no scales": ({"scales": None}, {}, r"scales: must be among the layer's tensors"),
    "no g_idx with act-order": ({"g_idx": None}, {"desc_act": True}, r"g_idx: must be among"),
    "unknown tensor": ({"perm": zeros_like(64)}, {}, r"tensors: must be among .* also \['perm'\]"),
    "sparse": ({"qzeros": zeros_like(2, 4).to_sparse()}, {}, r"qzeros: must be a dense strided tensor"),
    "no tensor": ({"scales": [1.0]}, {}, r"scales: must be a torch\.Tensor; got list"),
    "qweight int64": ({"qweight": zeros_like(8, 32, dtype=torch.int64)}, {}, r"qweight: dtype must be int32 .*int64"),
    "qweight float": ({"qweight": zeros_like(8, 32, dtype=HALF)}, {}, r"qweight: dtype must be int32 .*float16"),
    "qweight truncated": ({"qweight": zeros_like(7, 32)}, {}, r"qweight: shape must be .* = \[8, 32\]; got \[7, 32\]"),
    "qweight of experts": ({"qweight": zeros_like(2, 8, 32)}, {}, r"qweight: must have 2 dim.*experts"),
    "qweight empty": ({"qweight": zeros_like(0, 32)}, {}, r"qweight: .* not be empty; got shape \[0, 32\]"),
    "qzeros unpacked": ({"qzeros": zeros_like(2, 32, dtype=HALF)}, {}, r"qzeros: dtype must be int32 .*float16"),
    "qzeros along G": ({"qzeros": zeros_like(4, 2)}, {}, r"qzeros: shape must be .* = \[2, 4\]; got \[4, 2\]"),
    "qzeros truncated": ({"qzeros": zeros_like(1, 4)}, {}, r"qzeros: shape must be .* = \[2, 4\]; got \[1, 4\]"),
    "scales of other groups": ({"scales": zeros_like(4, 32, dtype=HALF)}, {}, r"scales: .*group_size=32 .* got \[4"),
    "scales integer": ({"scales": zeros_like(2, 32)}, {}, r"scales: dtype must be one of float16.*int32"),
    "scales flat": ({"scales": zeros_like(64, dtype=HALF)}, {}, r"scales: must have 2 dimensions"),
    "g_idx too large": ({"g_idx": torch.full((64,), 2)}, {"desc_act": True}, r"g_idx: .*G=2.*2"),
    "g_idx negative": ({"g_idx": torch.full((64,), -1)}, {"desc_act": True}, r"g_idx: .*-1"),
    "g_idx of another K": ({"g_idx": zeros_like(72)}, {}, r"qweight: .*K=72"),
    "g_idx float": ({"g_idx": zeros_like(64, dtype=HALF)}, {}, r"g_idx: must have an integer dtype"),
    "g_idx square": ({"g_idx": zeros_like(8, 8)}, {}, r"g_idx: shape must be \[K\]"),
    "bits 3": ({}, {"bits": 3}, r"qweight: .* bits=3 = \[6, 32\]; got \[8, 32\]"),
    "bits 8": ({}, {"bits": 8}, r"qweight: .*bits=8"),
    "bits 9": ({}, {"bits": 9}, r"bits: must be from 1 to 8; got 9"),
    "bits 1": ({}, {"bits": 1}, r"bits: must be 2 to 8 for GPTQ; got 1"),
    "bits a word": ({}, {"bits": "4"}, r"bits: must be an integer; got '4'"),
    "no bits": ({}, {"bits": None}, r"bits: must be given"),
    "no group size": ({}, {"group_size": None}, r"group_size: must be given"),
    "group size 0": ({}, {"group_size": 0}, r"group_size: must be from 1"),
    "group size 64": ({}, {"group_size": 64}, r"scales: .*group_size=64 = \[1, 32\]; got \[2, 32\]"),
    "unknown version": ({}, {"checkpoint_format": "gptq_v3"}, r"checkpoint_format: must be one of .* got 'gptq_v3'"),
    "marlin": ({}, {"checkpoint_format": "marlin"}, r"checkpoint_format: must be one of"),
    "marlin flag": ({}, {"is_marlin_format": True}, r"is_marlin_format"),
    "two versions": ({}, {"format": "gptq"}, r"checkpoint_format and format: must agree"),
    "another method": ({}, {"quant_method": "awq"}, r"quant_method: must be gptq"),
    "desc_act a word": ({}, {"desc_act": "no"}, r"desc_act: must be true or false; got 'no'"),
    "symmetric with other zero points": ({}, {"sym": True}, r"qzeros: must be the midpoint 8 .* sym is true"),
    "dynamic a list": ({}, {"dynamic": [1]}, r"dynamic: must be a mapping"),
    "dynamic looking ahead": ({}, {"dynamic": {"(?=a)b": {}}}, r"dynamic: expression: must not have a group of"),
    "dynamic no expression": ({}, {"dynamic": {"+:[": {}}}, r"dynamic: expression: must not have a '\[' without"),
    "dynamic of no settings": ({}, {"dynamic": {"+:.*": 8}}, r"dynamic: must give a mapping"),
    "planar N": (
        {"qweight": zeros_like(8, 24), "qzeros": zeros_like(2, 3), "scales": zeros_like(2, 24, dtype=HALF)},
        {"checkpoint_format": "gptq_p"},
        r"out_features: must be a multiple of 32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_damage_is_named(what: str) -> None:
    changes, config, text = BAD[what]
    tensors = {key: t for key, t in {**layer(), **changes}.items() if t is not None}
    with pytest.raises(WeightFormatError, match=r"^layers\.0\.q\." + text):
        gptq.from_checkpoint(tensors, GOOD | config, name="layers.0.q")


def test_word_reading_of_three_bits_is_refused() -> None:
    with pytest.raises(WeightFormatError, match="zero_reading: must not be 'word' for bits=3"):
        gptq.from_tensors(layer(3), bits=3, group_size=32, zero_reading="word")


def test_k_that_nothing_tells() -> None:
    tensors = layer(3)
    tensors["qweight"] = zeros_like(4, 32)
    del tensors["g_idx"]
    with pytest.raises(WeightFormatError, match=r"^in_features: must be given where 3-bit codes do not fill"):
        gptq.from_tensors(tensors, bits=3, group_size=32, version="v2")


@pytest.mark.parametrize("tensors", [None, [1], "qweight"], ids=str)
def test_tensors_that_are_no_mapping(tensors: Any) -> None:
    with pytest.raises(WeightFormatError, match="tensors: must be a mapping"):
        gptq.from_tensors(tensors, bits=4, group_size=32)
