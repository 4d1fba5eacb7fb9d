"""compressed-tensors, fp8 and fp4 layers: the peers' own exactly, any shape there and back, damaged ones refused."""

from __future__ import annotations

import json
import re
from dataclasses import astuple, dataclass
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
from qmm.formats import compressed_tensors as ct
from qmm.formats import ct_int, rows

safetensors = pytest.importorskip("safetensors.torch", reason="the vectors are safetensors files")

DATA = Path(__file__).parent.parent / "data" / "vectors"
NAMES = sorted(
    p.stem for p in DATA.glob("*.json") if p.stem.startswith(("ct", "fp8")) or "-modelopt-" in p.stem
)
LAYER = "model.layers.0.q_proj"


class Vector:
    """One layer of a peer."""

    def __init__(self, name: str) -> None:
        about = json.loads((DATA / f"{name}.json").read_text())
        self.config: dict[str, Any] = about["quantization_config"]
        self.index: dict[str, Any] = about["index"]
        tensors = safetensors.load_file(DATA / f"{name}.safetensors")
        self.layer = {k.removeprefix("layer."): t for k, t in tensors.items() if k.startswith("layer.")}
        self.weight = tensors["expected.weight"].t().contiguous()
        self.modelopt = self.index.get("style") == "modelopt"

    def read(self) -> qmm.QuantizedWeight:
        return ct.from_checkpoint(self.layer, self.config, name=LAYER)

    @property
    def weights(self) -> dict[str, Any]:
        """The config's settings of weights."""
        groups = self.config.get("config_groups", {})
        return next((g["weights"] for g in groups.values()), {})


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance in units in the last place; +0 turns -0 into 0."""
    return int((((a + 0).view(torch.int32).long()) - (b + 0).view(torch.int32).long()).abs().max())


def same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """The same names, shapes, dtypes and bytes."""
    return a.keys() == b.keys() and all(
        (t.dtype, t.shape) == (b[k].dtype, b[k].shape)
        and torch.equal(t.reshape(-1).view(torch.uint8), b[k].reshape(-1).view(torch.uint8))
        for k, t in a.items()
    )


def fields(words: np.ndarray, bits: int, count: int, dense: bool) -> np.ndarray:
    """Codes ``[R, count]`` of int32 words ``[R, W]``, one bit at a time."""
    stream = (words.astype(np.int64)[..., None] >> np.arange(32) & 1).reshape(len(words), -1)
    step = bits if dense else 32 // (32 // bits)
    found = np.zeros((len(words), count), np.int64)
    for i in range(count):
        start = i * step if dense else i // (32 // bits) * 32 + i % (32 // bits) * bits
        found[:, i] = stream[:, start : start + bits] @ (1 << np.arange(bits))
    return found


def codes_of(v: Vector) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes ``[K, N]`` and zero points ``[G, N]``, read from the file independently."""
    n, k = v.index["shape"]
    if "weight_shape" in v.layer:
        dense = v.index["packing"] == "dense"
        zeros = v.layer.get("weight_zero_point")
        zero = None if zeros is None else fields(zeros.numpy().T, v.index["bits"], n, dense)
        return fields(v.layer["weight_packed"].numpy(), v.index["bits"], k, dense).T, zero
    stored = v.layer.get("weight_packed", v.layer.get("weight"))
    assert stored is not None
    raw = stored.view(torch.uint8).numpy()
    if stored.dtype == torch.int8:
        return (raw.view(np.int8).astype(np.int64) + 128).T, None
    if stored.shape[1] == k:
        return raw.T, None
    return np.stack([raw & 15, raw >> 4], -1).reshape(n, k).T, None


def there_and_back(v: Vector) -> dict[str, Any]:
    """Options of ``to_tensors`` for the form that the file has."""
    if "weight_scale_inv" in v.layer:
        return {"block": (128, 128), "scale_name": "weight_scale_inv"}
    options: dict[str, Any] = {"modelopt": v.modelopt}
    if "weight_shape" in v.layer:
        options["packing"] = v.index["packing"]
    if v.index.get("packing") == "int8":
        options["format"] = "int-quantized"
    if v.index.get("strategy") == "block":
        options["block"] = tuple(v.index["block"])
    elif v.index.get("strategy"):
        options["strategy"] = v.index["strategy"]
    return options


@pytest.mark.parametrize("name", NAMES)
def test_vector(name: str) -> None:
    """Codes and zero points bit for bit, values bit for bit, the file's bytes again."""
    v = Vector(name)
    w = v.read()
    codes, zeros = codes_of(v)
    assert np.array_equal(w.unpack().numpy(), codes)
    got = w.unpack_zeros()
    assert (got is None) == (zeros is None)
    assert got is None or np.array_equal(got.numpy(), zeros)
    assert ulps(w.dequantize(), v.weight) == 0
    assert w.spec.scale2_divides == (v.index.get("global_scale") == "divide")
    stored = {k: t for k, t in v.layer.items() if k != "input_scale"}
    assert same_bytes(ct.to_tensors(w, **there_and_back(v)), stored)
    book = (
        0 if w.codebook is None else w.codebook.nbytes
    )  # a constant, which tells in layers as tiny as these
    assert w.nbytes - book <= 1.1 * sum(t.nbytes for t in v.layer.values())


def test_all_vectors_are_here() -> None:
    assert len(NAMES) == 36


@pytest.mark.parametrize("name", NAMES)
def test_facts_without_values(name: str) -> None:
    """What `inspect` needs: meta tensors (and the shape) give the same facts."""
    v = Vector(name)
    known = {k: t if k == "weight_shape" else t.to("meta") for k, t in v.layer.items()}
    spec = ct.from_checkpoint(known, v.config).spec
    whole = v.read().spec
    assert (spec.bits, spec.group_size, spec.out_features, spec.zero_kind) == (
        *(whole.bits, whole.group_size, whole.out_features, whole.zero_kind),
    )


# -- any layer there and back ---------------------------------------------------------------------------------------


def pack_rows(codes: np.ndarray, bits: int, dense: bool) -> np.ndarray:
    """Codes ``[R, count]`` as words ``[R, W]``, with Python's integers."""
    per_word, packed = 32 // bits, []
    for row in codes.tolist():
        if dense:
            whole = sum(c << i * bits for i, c in enumerate(row))
            packed.append([whole >> 32 * i & 0xFFFFFFFF for i in range(-(-len(row) * bits // 32))])
        else:
            parts = [row[i : i + per_word] for i in range(0, len(row), per_word)]
            packed.append([sum(c << i * bits for i, c in enumerate(part)) for part in parts])
    return np.array(packed, np.uint32).view(np.int32)


def random_codes(rng: np.random.Generator, shape: tuple[int, int], bits: int) -> np.ndarray:
    """Codes, the smallest and the largest among them."""
    top = (1 << bits) - 1
    drawn = rng.integers(0, top + 1, shape)
    return np.where(rng.random(shape) < 0.2, rng.choice([0, top], shape), drawn)


@dataclass(frozen=True)
class Shape:
    """A packed layer; ``group`` -1 is a channel."""

    n: int
    k: int
    bits: int
    group: int


SHAPES = st.builds(
    Shape, st.integers(1, 40), st.integers(1, 100), st.integers(1, 8), st.sampled_from([-1, 1, 7, 16, 32])
)
SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=50, deadline=None)
@given(shape=SHAPES, asymmetric=st.booleans(), act_order=st.booleans(), dense=st.booleans(), seed=SEEDS)
def test_any_packed(shape: Shape, asymmetric: bool, act_order: bool, dense: bool, seed: int) -> None:
    n, k, bits, group = astuple(shape)
    rng = np.random.default_rng(seed)
    groups = 1 if group == -1 else -(-k // group)
    codes, zeros = random_codes(rng, (n, k), bits), random_codes(rng, (groups, n), bits)
    scales = torch.from_numpy(rng.standard_normal((n, groups)).astype(np.float32))
    tensors = {
        "weight_packed": torch.from_numpy(pack_rows(codes, bits, dense)),
        "weight_scale": scales,
        "weight_shape": torch.tensor([n, k]),
    }
    of_row = np.arange(k) // (k if group == -1 else group)
    if asymmetric:
        tensors["weight_zero_point"] = torch.from_numpy(pack_rows(zeros, bits, dense).T.copy())
    if act_order and groups > 1:
        of_row = rng.permutation(of_row)
        of_row = of_row if (np.diff(of_row) < 0).any() else of_row[::-1]
        tensors["weight_g_idx"] = torch.from_numpy(of_row.astype(np.int32))
    config = {"format": "pack-quantized", "num_bits": bits, "group_size": group, "symmetric": not asymmetric}
    packing = "dense" if dense else "legacy"
    w = ct.from_tensors(tensors, **config, packing=packing)
    assert np.array_equal(w.unpack().numpy(), codes.T)
    zero = zeros[of_row] if asymmetric else 1 << bits - 1
    expected = (codes.T - zero).astype(np.float32) * scales.numpy().T[of_row]
    assert np.array_equal(w.dequantize().numpy(), expected)
    back = ct.to_tensors(w, packing=packing, strategy="channel" if group == -1 else "group")
    assert same_bytes(back, {key: t.contiguous() for key, t in tensors.items()})


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 20),
    k=st.integers(1, 70),
    bits=st.integers(1, 8),
    strategy=st.sampled_from(["tensor", "channel", "group"]),
    asymmetric=st.booleans(),
    seed=SEEDS,
)
def test_any_bytes(n: int, k: int, bits: int, strategy: str, asymmetric: bool, seed: int) -> None:
    """int-quantized."""
    rng = np.random.default_rng(seed)
    half = 1 << bits - 1
    shape = {"tensor": (1,), "channel": (n, 1), "group": (n, -(-k // 16))}[strategy]
    codes = random_codes(rng, (n, k), bits) - half
    tensors = {
        "weight": torch.from_numpy(codes.astype(np.int8)),
        "weight_scale": torch.from_numpy(rng.standard_normal(shape).astype(np.float16)),
    }
    zero = np.zeros(shape, np.int64)
    if asymmetric:
        zero = random_codes(rng, (1, int(np.prod(shape))), bits).reshape(shape) - half
        tensors["weight_zero_point"] = torch.from_numpy(zero.astype(np.int8))
    size = 16 if strategy == "group" else None
    w = ct.from_tensors(
        tensors, format="int-quantized", bits=bits, strategy=strategy, group_size=size, symmetric=None
    )

    def per_code(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, 16, 1)[:, :k] if size else values

    expected = (codes - per_code(zero)).astype(np.float32) * per_code(tensors["weight_scale"].float().numpy())
    assert np.array_equal(w.dequantize().t().numpy(), expected)
    assert same_bytes(ct.to_tensors(w, format="int-quantized", strategy=strategy), tensors)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 20),
    k=st.integers(1, 40),
    block=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    strategy=st.sampled_from(["tensor", "channel", "group", "block"]),
    e8m0=st.booleans(),
    seed=SEEDS,
)
def test_any_fp8(n: int, k: int, block: tuple[int, int], strategy: str, e8m0: bool, seed: int) -> None:
    """Every byte, NaN among them; edges of blocks anywhere."""
    rng = np.random.default_rng(seed)
    shapes = {"tensor": (1,), "channel": (n, 1), "group": (n, -(-k // 16))}
    shape = shapes.get(strategy, (-(-n // block[0]), -(-k // block[1])))
    raw = torch.from_numpy(rng.integers(0, 256, (n, k), dtype=np.uint8)).view(torch.float8_e4m3fn)
    scale = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).bfloat16()
    factor = scale.float()
    if e8m0:
        scale = torch.from_numpy(rng.integers(1, 255, shape, dtype=np.uint8))
        factor = torch.exp2(scale.float() - 127)
    tensors = {"weight": raw, "weight_scale": scale}
    config = {
        "strategy": strategy,
        "block_structure": list(block),
        "group_size": 16 if strategy == "group" else None,
    }
    w = ct.from_tensors(tensors, format="mxfp8-quantized" if e8m0 else "float-quantized", **config)
    if strategy == "block":
        factor = factor.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    elif strategy == "group":
        factor = factor.repeat_interleave(16, 1)[:, :k]
    got, expected = w.dequantize().t(), raw.float() * factor
    assert torch.equal(got.nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))
    options = {"block": block if strategy == "block" else None, "scale_dtype": torch.uint8 if e8m0 else None}
    assert same_bytes(ct.to_tensors(w, strategy=strategy, **options), tensors)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 12),
    groups=st.integers(1, 5),
    form=st.sampled_from(["mxfp4", "nvfp4"]),
    modelopt=st.booleans(),
    exponent=st.integers(-100, 100),
    seed=SEEDS,
)
def test_any_fp4(n: int, groups: int, form: str, modelopt: bool, exponent: int, seed: int) -> None:
    """Every byte of codes and scales and any global scale comes back; values bit for bit."""
    rng = np.random.default_rng(seed)
    size = 32 if form == "mxfp4" else 16
    packed = "weight" if modelopt else "weight_packed"
    tensors = {packed: torch.from_numpy(rng.integers(0, 256, (n, groups * size // 2), dtype=np.uint8))}
    scale = torch.from_numpy(rng.integers(0, 255 if form == "mxfp4" else 127, (n, groups), dtype=np.uint8))
    tensors["weight_scale"] = scale if form == "mxfp4" else scale.view(torch.float8_e4m3fn)
    if form == "mxfp4":
        factor = torch.exp2(scale.double() - 127).float()
    else:
        second = torch.tensor([1 + rng.random()], dtype=torch.float32) * 2.0**exponent
        factor = (
            tensors["weight_scale"].float() * second if modelopt else tensors["weight_scale"].float() / second
        )
        name, shape = ("weight_scale_2", ()) if modelopt else ("weight_global_scale", (1,))
        tensors[name] = second.reshape(shape)
    w = ct.from_tensors(tensors, format=form, modelopt=modelopt)
    raw = tensors[packed].numpy()
    codes = np.stack([raw & 15, raw >> 4], -1).reshape(n, -1)
    value = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[torch.from_numpy(codes & 7).long()]
    expected = value * torch.from_numpy(1.0 - (codes >> 3) * 2.0).float() * factor.repeat_interleave(size, 1)
    assert ulps(w.dequantize().t().contiguous(), expected) == 0
    assert same_bytes(ct.to_tensors(w, format=form, modelopt=modelopt), tensors)


def test_layers_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large layers are turned some rows at a time."""
    vectors = [Vector(name) for name in ("ctpack-ct0.12.2-b3-g32-sym-bfloat16-K128-N64", NAMES[0])]
    whole = [v.read().qweight for v in vectors]
    monkeypatch.setattr(rows, "_CHUNK_BYTES", 700)
    monkeypatch.setattr(ct_int, "_CHUNK_CODES", 700)
    assert all(torch.equal(v.read().qweight, q) for v, q in zip(vectors, whole, strict=True))


def test_fp8_stays_inside_float16_where_it_does() -> None:
    """e4m3's NaN is no magnitude."""
    tensors = {"weight": torch.ones(2, 4).to(torch.float8_e4m3fn), "weight_scale": torch.tensor([1.0])}
    assert ct.from_tensors(tensors, format="float-quantized").fits_float16
    tensors["weight_scale"] = torch.tensor([1000.0])
    assert not ct.from_tensors(tensors, format="float-quantized").fits_float16


def test_what_a_format_cannot_hold() -> None:
    w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
    for options, text in (
        ({"format": "nvfp4"}, "codebook: must be e2m1's"),
        ({"format": "float-quantized"}, "codebook: must be e4m3's"),
        ({"format": "gptq"}, "format: must be one of"),
        ({"strategy": "channel"}, "group_size: must be K=64"),
        ({"packing": "tight"}, "packing: must be"),
    ):
        with pytest.raises(WeightFormatError, match=re.escape(text)):
            ct.to_tensors(w, **options)
    bias = qmm.QuantizedWeight.from_codes(
        w.unpack(), w.scales, w.scales * 2, bits=4, group_size=32, zero_kind="bias"
    )
    with pytest.raises(WeightFormatError, match="zeros: must be integers"):
        ct.to_tensors(bias)
    nv = Vector("nvfp4-modelopt-g16-float16-K208-N40").read()
    other = ct.to_tensors(nv, modelopt=True) | {"weight_scale_2": torch.tensor(2.0)}
    two = qmm.QuantizedWeight.cat([nv, ct.from_tensors(other, format="nvfp4", modelopt=True)])
    with pytest.raises(WeightFormatError, match="scale2: must be one number"):
        ct.to_tensors(two, modelopt=True)
    with pytest.raises(
        WeightFormatError,
        match="scale2_divides: must be True: the global scale of compressed-tensors has to divide",
    ):
        ct.to_tensors(nv, format="nvfp4")
    divided = Vector("ctnvfp4-ct0.20.1-g16-float16-K208-N40").read()
    with pytest.raises(
        WeightFormatError, match="scale2_divides: must be False: the global scale of ModelOpt has to multiply"
    ):
        ct.to_tensors(divided, format="nvfp4", modelopt=True)
