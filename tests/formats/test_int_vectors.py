"""GPTQ, AWQ and HQQ layers packed by the peers' own code: read exactly, written back as the same bytes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qmm
from qmm.formats import awq, gptq, hqq

safetensors = pytest.importorskip("safetensors.torch", reason="the vectors are safetensors files")

DATA = Path(__file__).parent.parent / "data" / "vectors"
MODULES = {"gptq": gptq, "gptq_v2": gptq, "gptq_p": gptq, "awq": awq, "hqq": hqq}
NAMES = sorted(p.stem for p in DATA.glob("*.json") if p.stem.split("-")[0] in MODULES)


class Vector:
    """One layer of a peer."""

    def __init__(self, name: str) -> None:
        self.format = name.split("-")[0]
        self.module: ModuleType = MODULES[self.format]
        self.config: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())["quantization_config"]
        tensors = safetensors.load_file(DATA / f"{name}.safetensors")
        self.layer = {k.removeprefix("layer."): t for k, t in tensors.items() if k.startswith("layer.")}
        self.expected = {
            k.removeprefix("expected."): t for k, t in tensors.items() if k.startswith("expected.")
        }

    def read(self, **options: Any) -> qmm.QuantizedWeight:
        return self.module.from_checkpoint(self.layer, self.config, name="model.layers.0.q_proj", **options)

    @property
    def stored(self) -> dict[str, Tensor]:
        return {k: t for k, t in self.layer.items() if k != "bias"}


def bits_of(words: np.ndarray, axis: int) -> np.ndarray:
    """The bits of int32 words along an axis, lowest first."""
    at = np.moveaxis(words.astype(np.int64) & 0xFFFFFFFF, axis, -1)
    return np.moveaxis((at[..., None] >> np.arange(32) & 1).reshape(*at.shape[:-1], -1), -1, axis)


def numbers(bits: np.ndarray, width: int) -> np.ndarray:
    """Rows of bits -> rows of numbers of ``width`` bits."""
    whole = bits[:, : bits.shape[1] // width * width]
    return (whole.reshape(len(bits), -1, width) << np.arange(width)).sum(-1)


def planes(bits: np.ndarray, width: int) -> np.ndarray:
    """The same of planar rows: each block of ``width`` words is 32 numbers, in planes of 4, 2 and 1 bits."""
    found = []
    for block in bits.reshape(len(bits), -1, width * 32).swapaxes(0, 1):
        at, value = 0, 0
        for plane in {3: (2, 1), 5: (4, 1), 6: (4, 2)}[width]:
            value = value + (numbers(block[:, at * 32 : (at + plane) * 32], plane) << at)
            at += plane
        found.append(value)
    return np.concatenate(found, 1)


def fields_of(v: Vector) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes ``[K, N]`` and zero points ``[G, N]``, read bit by bit from the file (zeros: None for HQQ, floats)."""
    if v.format == "hqq":
        return hqq_codes(v), None
    qweight, qzeros = v.layer["qweight"].numpy(), v.layer["qzeros"].numpy()
    n, width = v.layer["scales"].shape[1], v.config["bits"]
    if v.format == "awq":
        codes, zeros = numbers(bits_of(qweight, 1), width), numbers(bits_of(qzeros, 1), width)
        if width == 4:
            order = np.arange(n) // 8 * 8 + np.array([0, 4, 1, 5, 2, 6, 3, 7])[np.arange(n) % 8]
            codes, zeros = codes[:, order], zeros[:, order]
        return codes, zeros
    take = planes if v.format == "gptq_p" else numbers
    codes, zeros = take(bits_of(qweight, 0).T, width).T, take(bits_of(qzeros, 1), width)[:, :n]
    if v.format == "gptq":
        zeros = (zeros + 1) % (1 << width)
    return codes, zeros


def hqq_codes(v: Vector) -> np.ndarray:
    width, (n, k) = int(v.layer["nbits"]), v.layer["shape"].tolist()
    packed = v.layer["W_q"]
    if packed.is_floating_point():
        packed = packed.view(torch.uint8)
    each = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}[width]
    words = packed.numpy()
    rows = np.concatenate([words >> (width * (each - 1 - j)) & ((1 << width) - 1) for j in range(each)])
    return rows.reshape(-1)[: n * k].reshape(n, k).T


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes (HQQ's codes viewed as floats may be NaN)."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def quiet(v: Vector, **options: Any) -> qmm.QuantizedWeight:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qmm.FormatWarning)  # axis 0
        return v.read(**options)


def test_all_are_here() -> None:
    counts = {f: sum(name.startswith(f + "-") for name in NAMES) for f in MODULES}
    assert counts == {"gptq": 16, "gptq_v2": 4, "gptq_p": 3, "awq": 7, "hqq": 12}


@pytest.mark.parametrize("name", NAMES)
def test_values_are_the_peers(name: str) -> None:
    """Bit for bit: the arithmetic is the same, in float32 from the stored scales."""
    v = Vector(name)
    w = quiet(v)
    assert torch.equal(w.dequantize().t(), v.expected["weight"])
    # with static groups the rows stay in order
    assert w.spec.act_order == ("-act-" in name and "-static-" not in name)


@pytest.mark.parametrize("name", [n for n in NAMES if "-z0-" not in n])
def test_codes_and_zeros_bit_for_bit(name: str) -> None:
    v = Vector(name)
    w = quiet(v)
    codes, zeros = fields_of(v)
    assert np.array_equal(w.unpack().numpy(), codes)
    if zeros is not None:
        found = w.unpack_zeros()
        assert found is not None and np.array_equal(found.numpy(), zeros)


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("hqq")])
def test_the_same_bytes_come_back(name: str) -> None:
    v = Vector(name)
    # a zero point of 0 or 16 in v1 is written for the readers of its own library
    library = name.split("-")[1]
    reading = {"zero_reading": {"autogptq": "unmasked"}.get(library, "word")} if "-z0-" in name else {}
    again = v.module.to_tensors(v.read(), version=v.format if v.module is gptq else "gemm", **reading)
    assert set(again) == set(v.stored)
    for key, stored in v.stored.items():
        assert same_bytes(again[key], stored), key


CROSSING = "hqq-b4-g64-axis1-float16-K208-N64"
AXIS0 = [n for n in NAMES if "-axis0-" in n]


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("hqq")])
def test_hqq_writes_what_it_read(name: str) -> None:
    """The same bytes where the canonical groups are the file's; where they are smaller, a file that reads the same."""
    v = Vector(name)
    w = quiet(v)
    again = hqq.to_tensors(w, view_as_float=bool(v.layer["view_as_float"]))
    assert set(again) == set(v.stored)
    if name in AXIS0 or name == CROSSING:
        assert torch.equal(hqq.from_checkpoint(again, {}).dequantize(), w.dequantize())
        return
    how_it_was_found = {"round_zero"}
    for key in set(v.stored) - how_it_was_found:
        stored = v.stored[key]
        assert same_bytes(again[key], stored), key


@pytest.mark.parametrize("name", [n for n in NAMES if n not in AXIS0 and n != CROSSING])
def test_memory_is_near_the_files(name: str) -> None:
    v = Vector(name)
    stored = sum(t.nbytes for k, t in v.stored.items() if k not in hqq.FACTS)
    assert v.read().nbytes <= 1.1 * stored


@pytest.mark.parametrize("name", NAMES)
def test_reading_leaves_the_files_tensors_alone(name: str) -> None:
    v = Vector(name)
    before = {k: t.clone() for k, t in v.layer.items()}
    quiet(v)
    assert all(same_bytes(before[k], v.layer[k]) for k in before)


@pytest.mark.parametrize(
    ("name", "reading", "expected"),
    [
        ("gptq-autogptq-b4-g32-asym-z0-K128-N64", None, "weight"),
        ("gptq-autogptq-b4-g32-asym-z0-K128-N64", "unmasked", "weight"),
        ("gptq-autogptq-b4-g32-asym-z0-K128-N64", "word", "weight_gptqmodel"),
        ("gptq-gptqmodel-b4-g32-asym-z0-K128-N64", None, "weight"),
        ("gptq-gptqmodel-b4-g32-asym-z0-K128-N64", "word", "weight"),
        ("gptq-gptqmodel-b4-g32-asym-z0-K128-N64", "unmasked", "weight_autogptq"),
    ],
)
def test_readings_of_an_all_ones_zero(name: str, reading: str | None, expected: str) -> None:
    """The config names the writer, and its reading is taken without a word; either can be asked for."""
    v = Vector(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w = v.read(zero_reading=reading)
    assert torch.equal(w.dequantize().t(), v.expected[expected])
    sixteen = expected == "weight_autogptq" or (name.startswith("gptq-autogptq") and expected == "weight")
    kind = qmm.ZeroKind.FLOAT if sixteen else qmm.ZeroKind.INT
    assert w.zero_kind is kind


@pytest.mark.parametrize("name", [n for n in NAMES if "-z0-" in n])
def test_an_unknown_writer_is_read_masked_with_one_warning(name: str) -> None:
    v = Vector(name)
    stored = numbers(bits_of(v.layer["qzeros"].numpy(), 1), 4)
    columns = int((stored == 15).any(0).sum())
    assert columns > 0
    with pytest.warns(qmm.FormatWarning) as seen:
        w = gptq.from_tensors(v.layer, bits=4, group_size=32, name="m.q_proj")
    assert len(seen) == 1 and f"m.q_proj.qzeros: {columns} of 64 columns" in str(seen[0].message)
    found = w.unpack_zeros()
    assert found is not None and np.array_equal(found.numpy(), (stored + 1) % 16)
