"""MXFP4 in gpt-oss's and ModelOpt's form: the peers' own exactly, any shape there and back, damaged ones refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qmm
from qmm import WeightFormatError
from qmm.formats import compressed_tensors, minifloat, mx

safetensors = pytest.importorskip("safetensors.torch", reason="the vectors are safetensors files")

DATA = Path(__file__).parent.parent / "data" / "vectors"
LAYER = "model.layers.0.mlp.experts.down_proj"
BLOCKS, SCALES = torch.zeros(3, 6, 2, 16, dtype=torch.uint8), torch.zeros(3, 6, 2, dtype=torch.uint8)


def load(name: str, prefix: str) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors by suffix, and the expected weight."""
    tensors = safetensors.load_file(DATA / f"{name}.safetensors")
    layer = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    return layer, tensors["expected.weight"]


def codes_of(packed: Tensor) -> np.ndarray:
    """Codes ``[K, N]`` of bytes ``[N, K/2]``."""
    raw = packed.flatten(1).numpy()
    return np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1).T


def test_gpt_oss_vector() -> None:
    """Every expert bit for bit, and the same bytes again."""
    layer, expected = load("mxfp4-gptoss-gate_up_proj-E2-K128-N64", "layer.experts.gate_up_proj_")
    stack = {k: layer[k] for k in ("blocks", "scales")}
    weights = mx.from_experts(stack, name=LAYER)
    assert len(weights) == 2
    for i, w in enumerate(weights):
        assert torch.equal(w.dequantize().t(), expected[i])
        assert np.array_equal(w.unpack().numpy(), codes_of(stack["blocks"][i]))
        assert torch.equal(mx.from_tensors(stack, expert=i).dequantize(), w.dequantize())
    back = mx.to_tensors(weights)
    assert back.keys() == stack.keys() and all(torch.equal(back[k], t) for k, t in stack.items())
    assert sum(w.nbytes for w in weights) <= 1.1 * sum(t.nbytes for t in stack.values())


def test_modelopt_vector() -> None:
    layer, expected = load("mxfp4-modelopt-g32-bfloat16-K128-N64", "layer.")
    w = mx.from_tensors(layer)
    assert torch.equal(w.dequantize().t(), expected)
    assert np.array_equal(w.unpack().numpy(), codes_of(layer["weight"]))
    back = mx.to_tensors(w, modelopt=True)
    assert back.keys() == layer.keys() and all(torch.equal(back[k], t) for k, t in layer.items())


@settings(max_examples=40, deadline=None)
@given(
    experts=st.integers(0, 3), n=st.integers(1, 12), groups=st.integers(1, 4), seed=st.integers(0, 2**32 - 1)
)
def test_any_stack(experts: int, n: int, groups: int, seed: int) -> None:
    """Every byte of codes and exponents, 255 (NaN) among them; no axis of experts where there are none."""
    rng = np.random.default_rng(seed)
    shape = (n, groups) if experts == 0 else (experts, n, groups)
    scales = rng.integers(0, 256, shape, dtype=np.uint8)
    scales.reshape(-1)[0] = rng.choice([0, 255])
    stack = {
        "blocks": torch.from_numpy(rng.integers(0, 256, (*shape, 16), dtype=np.uint8)),
        "scales": torch.from_numpy(scales),
    }
    weights = mx.from_experts(stack)
    values = np.array(minifloat.E2M1_VALUES)
    for w, blocks, exponents in zip(
        weights, stack["blocks"].reshape(-1, n, groups, 16), scales.reshape(-1, n, groups), strict=True
    ):
        factor = (
            np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents.astype(int) - 127)).repeat(32, 1).T
        )
        with np.errstate(over="ignore"):
            expected = (values[codes_of(blocks)] * factor).astype(np.float32)
        assert np.array_equal(w.dequantize().numpy(), expected, equal_nan=True)
    back = mx.to_tensors(weights if experts else weights[0])
    assert all(torch.equal(back[k], t) for k, t in stack.items())


def test_one_format_for_all() -> None:
    """compressed-tensors' mxfp4 has the same bytes."""
    blocks = torch.arange(96, dtype=torch.uint8).view(2, 3, 16)
    w = mx.from_tensors({"blocks": blocks, "scales": blocks[..., 0]})
    other = compressed_tensors.to_tensors(w)
    assert torch.equal(other["weight_packed"], mx.to_tensors(w)["blocks"].flatten(1))
    assert torch.equal(compressed_tensors.from_tensors(other, format="mxfp4").dequantize(), w.dequantize())


def test_scales_on_an_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a dtype of e8m0 scales are float32, and come back as the same bytes."""
    exponents = torch.arange(256, dtype=torch.uint8)[None]
    new = minifloat.as_e8m0(exponents).float()
    monkeypatch.setattr(minifloat, "E8M0", None)
    old = minifloat.as_e8m0(exponents)
    assert old.dtype == torch.float32
    assert torch.equal(old.nan_to_num(nan=3.0), new.nan_to_num(nan=3.0))
    back = minifloat.e8m0_bytes(old)
    assert back is not None
    assert torch.equal(back, exponents)
    assert minifloat.e8m0_bytes(torch.tensor([3.0])) is None
    assert minifloat.e8m0_bytes(torch.tensor([-1.0])) is None


def test_what_mxfp4_cannot_hold() -> None:
    w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
    good, wide = (
        mx.from_tensors({"blocks": BLOCKS[0, :, :groups], "scales": SCALES[0, :, :groups]})
        for groups in (1, 2)
    )
    odd = qmm.QuantizedWeight(
        good.qweight,
        torch.full((1, 6), 3.0),
        bits=4,
        group_size=32,
        in_features=32,
        codebook=good.codebook,
    )
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (w, {}, "codebook: must be e2m1's 16 values"),
        (odd, {}, "scales: must be powers of two"),
        ([good, wide], {}, "experts: must have one shape (K, N); got (32, 6), (64, 6)"),
        ([], {}, "experts: must be at least one"),
        ([good], {"modelopt": True}, "modelopt: needs one weight"),
    ]
    for weight, options, text in cases:
        with pytest.raises(WeightFormatError, match=re.escape(text)):
            mx.to_tensors(weight, **options)


@pytest.mark.parametrize(
    ("layer", "options", "text"),
    [
        ({}, {}, "weight: must be there; got nothing"),
        ({"scales": SCALES}, {}, "weight: must be there; got scales"),
        ({"blocks": BLOCKS}, {"expert": 0}, "scales: must be there; got blocks"),
        ({"blocks": BLOCKS, "scales": SCALES}, {}, "blocks: must be one matrix, or expert= say which"),
        ({"blocks": BLOCKS.float(), "scales": SCALES}, {"expert": 0}, "blocks: dtype must be one of uint8"),
        ({"blocks": BLOCKS[..., :8], "scales": SCALES}, {"expert": 0}, "blocks: shape must be [E, N, K/32, 16]"),
        ({"blocks": BLOCKS[0, 0], "scales": SCALES}, {"expert": 0}, "blocks: shape must be [E, N, K/32, 16]"),
        ({"blocks": BLOCKS[:0], "scales": SCALES}, {"expert": 0}, "blocks: must not be empty"),
        ({"blocks": BLOCKS, "scales": SCALES[:2]}, {"expert": 0}, "scales: shape must be that of blocks"),
        ({"blocks": BLOCKS, "scales": SCALES.half()}, {"expert": 0}, "scales: dtype must be one of uint8"),
        ({"weight": BLOCKS[0, 0], "weight_scale": SCALES[0]}, {}, "weight_scale: shape must be [N, K/32] = [2, 1]"),
        ({"weight": BLOCKS[0, 0, :, :8], "weight_scale": SCALES[0]}, {}, "weight: must hold whole groups of 32"),
        ({"weight": BLOCKS[0, 0], "weight_scale": SCALES[0]}, {"expert": 1}, "weight: has no experts; got expert=1"),
    ],
)  # fmt: skip
def test_damaged(layer: dict[str, Tensor], options: dict[str, Any], text: str) -> None:
    with pytest.raises(WeightFormatError, match=re.escape(f"{LAYER}.{text}")):
        mx.from_checkpoint(layer, name=LAYER, **options)


def test_no_such_expert() -> None:
    with pytest.raises(WeightFormatError, match="expert: must be from 0 to 2; got 3"):
        mx.from_tensors({"blocks": BLOCKS, "scales": SCALES}, expert=3)
