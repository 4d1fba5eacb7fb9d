"""Weights written as GPTQ: what a version can hold exactly, what only with loss, and what not at all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import qmm
from qmm import FormatWarning, QuantizedWeight, WeightFormatError, ZeroKind
from qmm.formats import gptq

HALF = torch.float16


def test_a_symmetric_weight_is_written_with_its_midpoint() -> None:
    w = qmm.quantize(torch.randn(32, 64), bits=4, group_size=32)
    assert w.zero_kind is ZeroKind.NONE
    for version, word in (("v1", 0x77777777), ("v2", -0x77777778)):
        tensors = gptq.to_tensors(w, version=version)
        assert set(tensors["qzeros"].unique().tolist()) == {word}
        again = gptq.from_tensors(tensors, bits=4, group_size=32, version=version, sym=True)
        assert torch.equal(again.dequantize(), w.dequantize())


def test_two_level_scales_are_written_as_the_values_used() -> None:
    scales = torch.randint(-100, 100, (2, 32), dtype=torch.int8)
    codes = torch.randint(0, 16, (64, 32))
    for level, dtype in ((torch.full((1,), 0.5), HALF), (torch.full((1,), 1 / 3), torch.float32)):
        w = QuantizedWeight.from_codes(codes, scales, bits=4, group_size=32, scale2=level)
        tensors = gptq.to_tensors(w)
        assert tensors["scales"].dtype == dtype
        again = gptq.from_tensors(tensors, bits=4, group_size=32, version="v2")
        assert torch.equal(again.dequantize(), w.dequantize())


def test_a_zero_point_that_v1_readers_disagree_on_is_said() -> None:
    codes, zeros = torch.randint(0, 16, (64, 32)), torch.zeros(2, 32, dtype=torch.int32)
    zeros[0, 3:] = 5
    w = QuantizedWeight.from_codes(codes, torch.ones(2, 32), zeros + 1, bits=4, group_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gptq.to_tensors(w, version="v1")
    w = QuantizedWeight.from_codes(codes, torch.ones(2, 32), zeros, bits=4, group_size=32)
    with pytest.warns(FormatWarning, match=r"stores the zero points of 32 columns as all ones"):
        gptq.to_tensors(w, version="v1")


def floats(zeros: Tensor, **options: Any) -> QuantizedWeight:
    codes = torch.randint(0, 16, (64, 32))
    return QuantizedWeight.from_codes(
        codes, torch.full((2, 32), 0.5), zeros, bits=4, group_size=32, **options
    )


def test_lossy_only_when_asked_and_the_loss_is_told() -> None:
    w = floats(torch.full((2, 32), 7.375))
    with pytest.raises(
        WeightFormatError, match=r"zeros: must be whole .*; got 64 of 64 that are not, first 7\.375"
    ):
        gptq.to_tensors(w)
    with pytest.warns(
        FormatWarning, match=r"lossy: zero points were rounded; weights moved by up to 0\.188, rms 0\.188"
    ):
        tensors = gptq.to_tensors(w, lossy=True)
    again = gptq.from_tensors(tensors, bits=4, group_size=32, version="v2")
    found = again.unpack_zeros()
    assert found is not None and found.unique().tolist() == [7]


def test_the_loss_told_is_that_of_the_reading_written_for() -> None:
    zeros = torch.full((2, 32), 16.0)
    zeros[0, 0] = 15.75
    with pytest.warns(FormatWarning) as seen:
        gptq.to_tensors(floats(zeros), version="v1", lossy=True)
    assert [str(s.message)[:60] for s in seen if "lossy" in str(s.message)] and "up to 0.125" in str(
        seen[-1].message
    )


def test_bias_zeros_are_rounded_only_when_asked() -> None:
    w = floats(torch.full((2, 32), -3.6), zero_kind="bias")
    with pytest.raises(WeightFormatError, match="zeros: of kind bias"):
        gptq.to_tensors(w)
    with pytest.warns(FormatWarning, match="lossy"):
        tensors = gptq.to_tensors(w, lossy=True)
    assert set(tensors["qzeros"].unique().tolist()) == {0x77777777}


CANNOT = {
    "five straddling bits of odd N": (
        lambda: qmm.quantize(torch.randn(30, 64), bits=5, group_size=32),
        {},
        "out_features: .* 32",
    ),
    "planar K": (
        lambda: qmm.quantize(torch.randn(32, 40), bits=4, group_size=8),
        {"version": "gptq_p"},
        "in_features: .* 32",
    ),
    "one bit": (
        lambda: qmm.quantize(torch.randn(32, 64), bits=1, group_size=32, symmetric=False),
        {},
        "bits: must be 2 to 8",
    ),
    "version": (
        lambda: floats(torch.ones(2, 32)),
        {"version": "v3"},
        "version: must be one of gptq, gptq_v2, gptq_p; got 'v3'",
    ),
    "reading": (lambda: floats(torch.ones(2, 32)), {"zero_reading": "both"}, "zero_reading: must be one of"),
    "z = 16 in v2": (lambda: floats(torch.full((2, 32), 16.0)), {}, "from 0 to 15"),
    "z = 16 as masked": (
        lambda: floats(torch.full((2, 32), 16.0)),
        {"version": "v1", "zero_reading": "masked"},
        "from 0 to 15",
    ),
    "z = 0 as unmasked": (
        lambda: floats(torch.zeros(2, 32)),
        {"version": "v1", "zero_reading": "unmasked"},
        "from 1 to 16",
    ),
    "z = 0 and 16": (
        lambda: floats(torch.tensor([[0.0], [16.0]]).expand(2, 32)),
        {"version": "v1"},
        "0 and 16 are one field",
    ),
    "codebook": (
        lambda: QuantizedWeight.from_codes(
            torch.ones(32, 32).int(), torch.ones(1, 32), bits=4, group_size=32, codebook=torch.ones(16)
        ),
        {},
        "codebook",
    ),
    "spare groups": (
        lambda: QuantizedWeight.from_codes(
            torch.ones(32, 32).int(), torch.ones(3, 32), bits=4, group_size=32, g_idx=torch.arange(32) % 3
        ),
        {},
        "groups: must be ceil",
    ),
}


@pytest.mark.parametrize("what", CANNOT)
def test_weights_that_gptq_cannot_hold(what: str) -> None:
    weight, options, text = CANNOT[what]
    with pytest.raises(WeightFormatError, match=text):
        gptq.to_tensors(weight(), **options)
