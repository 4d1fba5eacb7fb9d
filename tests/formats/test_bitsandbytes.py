"""bitsandbytes layers: the peer's own exactly, any shape there and back, damaged ones refused."""

from __future__ import annotations

import json
import re
from math import gcd
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
from qmm.formats import bitsandbytes as bnb

safetensors = pytest.importorskip("safetensors.torch", reason="the vectors are safetensors files")

DATA = Path(__file__).parent.parent / "data" / "vectors"
NAMES = sorted(p.stem for p in DATA.glob("bnb-*.json"))
LAYER = "model.layers.0.q_proj"
NF4, FP4 = ("weight.quant_state.bitsandbytes__" + kind for kind in ("nf4", "fp4"))


class Vector:
    """One layer of the peer."""

    def __init__(self, name: str) -> None:
        about = json.loads((DATA / f"{name}.json").read_text())
        self.config: dict[str, Any] = about["quantization_config"]
        self.index: dict[str, Any] = about["index"]
        tensors = safetensors.load_file(DATA / f"{name}.safetensors")
        self.layer = {k.removeprefix("layer."): t for k, t in tensors.items() if k.startswith("layer.")}
        self.weight = tensors["expected.weight"].t().contiguous()

    def read(self) -> qmm.QuantizedWeight:
        return bnb.from_checkpoint(self.layer, self.config, name=LAYER)


def flat_codes(packed: Tensor, n: int, k: int) -> np.ndarray:
    """Codes ``[K, N]``: element 2j in the high nibble of byte j of the flat weight."""
    raw = packed.reshape(-1).view(torch.uint8).numpy()
    return np.stack([raw >> 4, raw & 15], -1).reshape(-1)[: n * k].reshape(n, k).T


def state_of(values: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


def same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        (t.dtype, t.shape) == (b[k].dtype, b[k].shape)
        and torch.equal(t.reshape(-1).view(torch.uint8), b[k].reshape(-1).view(torch.uint8))
        for k, t in a.items()
    )


@pytest.mark.parametrize("name", NAMES)
def test_vector(name: str) -> None:
    """Codes and values bit for bit (int8: 1 ulp); plain absmax and int8 come back as the same bytes."""
    v = Vector(name)
    n, k = v.index["shape"]
    w = v.read()
    int8, nested = v.index["format"] == "bnb-int8", v.index.get("nested", False)
    codes = (
        v.layer["weight"].numpy().T.astype(np.int64) + 128 if int8 else flat_codes(v.layer["weight"], n, k)
    )
    assert np.array_equal(w.unpack().numpy(), codes)
    distance = w.dequantize().view(torch.int32).long() - v.weight.view(torch.int32).long()
    assert int(distance.abs().max()) <= (1 if int8 else 0)
    back = bnb.to_tensors(
        w,
        dtype=getattr(torch, v.index.get("weight_dtype", "float16")),
        storage=getattr(torch, v.index.get("quant_storage", "uint8")),
    )
    if nested:  # written plain
        assert same_bytes({"weight": back["weight"]}, {"weight": v.layer["weight"]})
        assert torch.equal(bnb.from_tensors(back).dequantize(), w.dequantize())
    else:
        assert same_bytes(back, v.layer)
    if int8 or k % v.index["group_size"] == 0:  # else blocks cross rows: a scale for each gcd
        assert w.nbytes <= 1.1 * sum(t.nbytes for t in v.layer.values())


def test_all_vectors_are_here() -> None:
    assert len(NAMES) == 10


def test_nested_absmax_take_a_tenth_more() -> None:
    """A layer large enough that the tables do not count."""
    n, k = 64, 4096
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [n, k]}
    layer = {
        "weight": torch.zeros(n * k // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.zeros(n * k // 64, dtype=torch.uint8),
        "weight.quant_map": torch.tensor(bnb.CODEBOOKS["nf4"]),
        "weight.nested_absmax": torch.ones(n * k // 64 // 256),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        NF4: state_of({**state, "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}),
    }
    assert bnb.from_tensors(layer).nbytes <= 1.1 * sum(t.nbytes for t in layer.values())


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 12),
    k=st.integers(1, 140),
    block=st.sampled_from([32, 64, 128]),
    kind=st.sampled_from(["nf4", "fp4"]),
    nested=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_four_bits(n: int, k: int, block: int, kind: str, nested: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = np.array(bnb.CODEBOOKS[kind], np.float32)
    codes = rng.integers(0, 16, n * k)
    odd = np.append(codes, [int(np.flatnonzero(table == 0)[0])] * (n * k % 2)).astype(np.uint8)
    state = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": [n, k]}
    blocks = -(-n * k // block)
    absmax = rng.random(blocks, np.float32)
    layer = {
        "weight": torch.from_numpy(odd[::2] << 4 | odd[1::2])[:, None],
        "weight.absmax": torch.from_numpy(absmax),
        "weight.quant_map": torch.from_numpy(table),
    }
    if nested:
        stored = rng.integers(0, 256, blocks, dtype=np.uint8)
        second, outer = rng.random(-(-blocks // 4), np.float32), rng.random(256, np.float32)
        absmax = outer[stored] * np.repeat(second, 4)[:blocks] + np.float32(0.3)
        layer |= {
            "weight.absmax": torch.from_numpy(stored),
            "weight.nested_absmax": torch.from_numpy(second),
            "weight.nested_quant_map": torch.from_numpy(outer),
        }
        state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.3}
    layer[f"weight.quant_state.bitsandbytes__{kind}"] = state_of(state)
    w = bnb.from_tensors(layer)
    assert w.group_size == gcd(k, block)
    expected = (table[codes] * np.repeat(absmax, block)[: n * k]).reshape(n, k)
    assert np.array_equal(w.dequantize().t().numpy(), expected)
    back = bnb.to_tensors(w, blocksize=block)
    assert torch.equal(bnb.from_tensors(back).dequantize(), w.dequantize())
    if not nested:
        assert same_bytes(back, layer)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 12), k=st.integers(1, 70), seed=st.integers(0, 2**32 - 1))
def test_any_int8(n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes, largest = rng.integers(-128, 128, (n, k)), rng.random(n).astype(np.float16).astype(np.float32)
    layer = {
        "weight": torch.from_numpy(codes.astype(np.int8)),
        "SCB": torch.from_numpy(largest),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    w = bnb.from_tensors(layer)
    expected = codes.astype(np.float32) * largest[:, None] * np.float32(7.874015718698502e-3)
    distance = w.dequantize().t().contiguous().numpy().view(np.int32).astype(np.int64) - expected.view(
        np.int32
    )
    assert np.abs(np.where(expected == 0, 0, distance)).max() <= 1
    assert same_bytes(bnb.to_tensors(w), layer)


def test_facts_without_values() -> None:
    """What `inspect` needs: all but the quant_state on the meta device."""
    for v in map(Vector, NAMES):
        known = {k: t if "quant_state" in k else t.to("meta") for k, t in v.layer.items()}
        assert bnb.from_checkpoint(known, v.config).spec == v.read().spec


def test_what_bitsandbytes_cannot_hold() -> None:
    w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
    nf4 = Vector("bnb-nf4-bs64-float16-K256-N96").read()
    two = qmm.QuantizedWeight(
        nf4.qweight,
        nf4.scales,
        bits=4,
        group_size=64,
        in_features=256,
        codebook=nf4.codebook,
        scale2=torch.ones(1),
    )
    other = qmm.QuantizedWeight(
        nf4.qweight, nf4.scales, bits=4, group_size=64, in_features=256, codebook=torch.linspace(-1, 1, 16)
    )
    cases: list[tuple[qmm.QuantizedWeight, dict[str, Any], str]] = [
        (w, {}, "codebook: must be nf4's or fp4's"),
        (qmm.quantize(torch.randn(8, 64), bits=8, group_size=-1), {}, "scales: dtype must be float32"),
        (qmm.quantize(torch.randn(8, 64), bits=8, group_size=32), {}, "group_size: must be K=64"),
        (nf4, {"blocksize": 128}, "blocksize: must be one of 128"),
        (nf4, {"dtype": torch.float64}, "dtype: must be one of float16"),
        (nf4, {"storage": torch.int64}, "storage: must be one of uint8"),
        (two, {}, "scale2: must be absent for 4 bits"),
        (other, {}, "codebook: must be nf4's or fp4's"),
    ]  # fmt: skip
    for weight, options, text in cases:
        with pytest.raises(WeightFormatError, match=re.escape(text)):
            bnb.to_tensors(weight, **options)


# -- damaged or contradictory ----------------------------------------------------------------------------------------

STATE = {"quant_type": "nf4", "blocksize": 32, "dtype": "float16", "shape": [6, 64]}
NESTED = {**STATE, "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}


def plain(state: Any = STATE, **changes: Any) -> dict[str, Any]:
    """N = 6, K = 64, blocks of 32; dots of names as ``__``."""
    layer: dict[str, Any] = {
        "weight": torch.zeros(192, 1, dtype=torch.uint8),
        "weight.absmax": torch.ones(12),
        "weight.quant_map": torch.tensor(bnb.CODEBOOKS["nf4"]),
        NF4: state if isinstance(state, Tensor) else state_of(state),
    } | {k.replace("__", "."): t for k, t in changes.items()}
    return {k: t for k, t in layer.items() if t is not None}


def nested(**changes: Any) -> dict[str, Any]:
    good = {
        "weight__absmax": torch.zeros(12, dtype=torch.uint8),
        "weight__nested_absmax": torch.ones(1),
        "weight__nested_quant_map": torch.zeros(256),
    }
    state = {k: changes.pop(k, v) for k, v in NESTED.items()}
    return plain(state, **(good | changes))


def int8(**changes: Any) -> dict[str, Any]:
    layer = {"weight": torch.zeros(6, 64, dtype=torch.int8), "SCB": torch.ones(6)} | changes
    return {k: t for k, t in layer.items() if t is not None}


BYTES = torch.zeros(12, dtype=torch.uint8)
DAMAGED = [
    ({}, "weight: must have weight.quant_state.bitsandbytes__nf4 or"),
    (plain(weight=None), "weight: must be there"),
    (plain(weight=torch.zeros(191, dtype=torch.uint8)), "weight: must hold ceil(N*K/2) = 192 bytes for shape [6, 64]"),
    (plain(weight=torch.zeros(192, dtype=torch.int64)), "weight: dtype must be one of uint8"),
    (plain(weight__absmax=None), "weight.absmax: must be there"),
    (plain(weight__absmax=torch.ones(11)), "weight.absmax: shape must be [ceil(N*K/blocksize)] = [12]; got [11]"),
    (plain(weight__absmax=BYTES), "weight.absmax: dtype must be one of float32; got uint8"),
    (plain(weight__quant_map=torch.zeros(16)), "weight.quant_map: must hold nf4's values; got others"),
    (plain(weight__quant_map=torch.full((16,), torch.nan)), "weight.quant_map: must hold nf4's values; got others"),
    (plain(weight__quant_map=torch.zeros(8)), "weight.quant_map: shape must be [16] = [16]; got [8]"),
    (plain({**STATE, "quant_type": "fp4"}), f"{NF4}: quant_type must be nf4; got 'fp4'"),
    (plain({**STATE, "shape": [384]}), f"{NF4}: shape must be two sizes [N, K]; got [384]"),
    (plain({**STATE, "shape": [6, -64]}), f"{NF4}: shape: must be from 1"),
    (plain({**STATE, "shape": [6, 2**62]}), f"{NF4}: shape: must be from 1"),
    (plain({**STATE, "shape": [6, 64.5]}), f"{NF4}: shape: must be an integer; got 64.5"),
    (plain({**STATE, "shape": [7, 64]}), "weight: must hold ceil(N*K/2) = 224 bytes"),
    (plain({**STATE, "blocksize": 0}), f"{NF4}: blocksize: must be from 1"),
    (plain({k: v for k, v in STATE.items() if k != "blocksize"}), f"{NF4}: blocksize: must be an integer; got None"),
    (plain(torch.tensor(list(b"{"), dtype=torch.uint8)), f"{NF4}: must be JSON"),
    (plain(torch.tensor([255], dtype=torch.uint8)), f"{NF4}: must be UTF-8"),
    (plain(torch.zeros(3)), f"{NF4}: dtype must be one of uint8; got float32"),
    (plain() | {FP4: state_of(STATE)}, f"{NF4}: must be the only quant_state"),
    (plain(SCB=torch.ones(6)), "SCB: must not stand beside a quant_state"),
    (nested(weight__absmax=torch.ones(12)), "weight.absmax: dtype must be one of uint8; got float32"),
    (nested(weight__nested_absmax=torch.ones(2)), "weight.nested_absmax: shape must be [ceil(blocks/nested_"),
    (nested(weight__nested_absmax=None), "weight.nested_absmax: must be there"),
    (nested(weight__nested_quant_map=torch.ones(16)), "weight.nested_quant_map: shape must be [256]"),
    (nested(nested_offset="0.1"), f"{NF4}: nested_offset must be a number; got '0.1'"),
    (nested(nested_blocksize=-1), f"{NF4}: nested_blocksize: must be from 1"),
    (int8(SCB=torch.ones(5)), "SCB: shape must be [N] = [6]; got [5]"),
    (int8(SCB=torch.ones(6).half()), "SCB: dtype must be one of float32; got float16"),
    (int8(weight=torch.zeros(6, 64)), "weight: dtype must be one of int8; got float32"),
    (int8(weight=None), "weight: must be there"),
    (int8(weight_format=torch.tensor(2, dtype=torch.uint8)), "weight_format: must be 0 (row-major); got 2"),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "text"), DAMAGED, ids=[text for _, text in DAMAGED])
def test_damaged(layer: dict[str, Any], text: str) -> None:
    with pytest.raises(WeightFormatError, match=re.escape(f"{LAYER}.{text}")):
        bnb.from_checkpoint(layer, name=LAYER)


def test_undamaged() -> None:
    assert all(bnb.from_tensors(layer).shape == (64, 6) for layer in (plain(), nested(), int8()))
