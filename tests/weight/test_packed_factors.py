"""4-bit scales and biases (GGUF's Q2_K): eight in a word, and still so after every cut, join, copy and file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qmm
from qmm import QuantizedWeight, WeightFormatError, ZeroKind
from qmm.formats import gptq
from qmm.testing import Case, make_weight, oracle
from qmm.weight import bitstream

PACKED = Case(k=180, group_size=16, zero_kind=ZeroKind.BIAS, scale_dtype=torch.uint4, two_level="rows")


def made(**changes: Any) -> QuantizedWeight:
    case = Case(**{**PACKED.__dict__, **changes})
    return make_weight(case, np.random.default_rng(case.seed))


def words(first: int, second: int = 0) -> torch.Tensor:
    """Eight factors of one column, and perhaps eight more."""
    signed = [v - (1 << 32) if v >> 31 else v for v in (first, second)]
    return torch.tensor([[signed[0]]] + ([[signed[1]]] if second else []), dtype=torch.int32)


def by_hand(**changes: Any) -> QuantizedWeight:
    """Three groups of one row: w = s * scale2 * q + b * zero2."""
    fields: dict[str, Any] = {
        "scales": words(0xF21),
        "scale2": torch.tensor([0.5]),
        "zeros": words(0x803),
        "zero2": torch.tensor([-1.0]),
        "zero_kind": "bias",
        "bits": 4,
        "group_size": 1,
        **changes,
    }
    return QuantizedWeight.from_codes(torch.tensor([[5], [6], [7]]), **fields)


def test_hand_computed_values() -> None:
    w = by_hand()
    assert w.dequantize().flatten().tolist() == [1 * 0.5 * 5 - 3, 2 * 0.5 * 6 - 0, 15 * 0.5 * 7 - 8]
    assert (w.spec.scale_dtype, w.spec.zero_dtype, w.spec.groups) == (torch.uint4, torch.uint4, 3)
    assert w.nbytes == 3 * 4 + 2 * 4  # one word each of codes, scales, biases; two second levels
    assert "scales uint4 x float32, zeros bias" in repr(w)


def test_highest_factor_is_unsigned() -> None:
    """The sign bit of a full word is a bit of its eighth factor."""
    scales = words(0x80000000, 0x1)
    w = QuantizedWeight.from_codes(
        torch.full((9, 1), 1), scales, bits=1, group_size=1, scale2=torch.ones(1), zeros=torch.zeros(9, 1)
    )
    assert w.dequantize().flatten().tolist() == [0.0] * 7 + [8.0, 1.0]


def test_either_level_alone() -> None:
    """Scales may be packed where the biases are not, and the reverse; integer zero points keep their own packing."""
    int8 = torch.tensor([[3], [0], [8]], dtype=torch.int8)
    expected = by_hand().dequantize()
    assert torch.equal(by_hand(zeros=int8).dequantize(), expected)
    floating = by_hand(zeros=-int8.float(), zero2=None)
    assert torch.equal(floating.dequantize(), expected) and floating.spec.zero_dtype == torch.float32
    mixed = by_hand(scales=torch.tensor([[1], [2], [15]], dtype=torch.int8))
    assert torch.equal(mixed.dequantize(), expected) and mixed.spec.zero_dtype == torch.uint4
    whole = by_hand(zeros=torch.tensor([[1], [2], [3]]), zero2=None, zero_kind=None)
    assert whole.dequantize().flatten().tolist() == [2.0, 4.0, 30.0]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"scale2": None}, r"scales: of int32 words \(4-bit scales\) need scale2; got no scale2"),
        ({"zero2": None}, r"zeros: of kind bias must have dtype float16, bfloat16, float32; got int32"),
        ({"scales": words(0xF21, 1)}, r"scales: must have ceil\(G\*4/32\) = 1 rows for K=3 and group_size=1; got 2"),
        ({"zeros": words(0x803, 1)}, r"zeros: shape must be \[ceil\(G\*4/32\), N\] = \[1, 1\]; got \[2, 1\]"),
        ({"scales": words(0x1F21)}, r"scales: bits past scale 2 must be 0"),
        ({"zeros": words(0x80000803)}, r"zeros: bits past bias 2 must be 0"),
        ({"g_idx": torch.tensor([2, 0, 1])}, r"scales: of 4 bits do not go with g_idx"),
        ({"zeros": torch.ones(2, 1).int(), "zero2": None, "zero_kind": "int"}, r"zeros: shape .* = \[3, 1\]"),
    ],
)  # fmt: skip
def test_bad_fields(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(WeightFormatError, match=rule):
        by_hand(**changes)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), k=st.integers(1, 180), group=st.sampled_from([1, 7, 16]))
def test_cut_at_any_group_edge(data: st.DataObject, k: int, group: int) -> None:
    """Odd counts, odd starts: the values of the block, still packed, and the whole again when joined."""
    w = made(k=k, group_size=group, n=5)
    groups = w.spec.groups
    g0 = data.draw(st.integers(0, groups - 1))
    g1 = data.draw(st.integers(g0 + 1, groups))
    part = w[g0 * group : g1 * group, 1:4]
    assert torch.equal(part.dequantize(), w.dequantize()[g0 * group : g1 * group, 1:4])
    assert part.spec.scale_dtype == torch.uint4 == part.spec.zero_dtype
    assert part.scales.shape[0] == -(-(g1 - g0) // 8)
    pieces = [w[a * group : b * group] for a, b in ((0, g0), (g0, g1), (g1, groups)) if a < b]
    joined = QuantizedWeight.cat(pieces, dim=0)
    assert torch.equal(joined.dequantize(), w.dequantize())
    assert torch.equal(joined.scales, w.scales) and torch.equal(joined.tensors.zeros, w.tensors.zeros)  # type: ignore[arg-type]


def test_joined_along_n() -> None:
    x, y = made(), made(m=4)
    both = QuantizedWeight.cat([x, y], dim=1)
    assert torch.equal(both.dequantize(), torch.cat([x.dequantize(), y.dequantize()], 1))
    int8 = make_weight(Case(**{**PACKED.__dict__, "scale_dtype": torch.int8}), np.random.default_rng(0))
    with pytest.raises(
        WeightFormatError, match=r"scale_dtype of weights\[0\], torch\.uint4; got torch\.int8"
    ):
        QuantizedWeight.cat([x, int8], dim=1)


def test_saved_and_loaded(tmp_path: Path) -> None:
    """qmm's own format; GPTQ only where asked to round."""
    w = made()
    qmm.save(tmp_path / "w.safetensors", {"up": w})
    again = qmm.load(tmp_path / "w.safetensors")["up"]
    assert again.spec == w.spec and again.nbytes == w.nbytes
    assert all(torch.equal(t, w.tensors.present()[name]) for name, t in again.tensors.present().items())
    with pytest.raises(WeightFormatError, match="zeros: of kind bias"):
        gptq.to_tensors(w)
    with pytest.warns(qmm.FormatWarning, match="lossy"):
        gptq.to_tensors(w, lossy=True)


def test_symmetric_ones_are_written_as_the_values_used() -> None:
    w = made(zero_kind=ZeroKind.NONE)
    tensors = gptq.to_tensors(w)
    again = gptq.from_tensors(tensors, bits=4, group_size=16, version="v2")
    assert torch.equal(again.dequantize(), w.dequantize())


def test_facts_without_values() -> None:
    w = made()
    shell = w.to("meta")
    assert shell.spec == w.spec and shell[16:48].spec.groups == 2


def test_the_oracle_reads_half_bytes() -> None:
    """Its own unpacking, against numbers known here."""
    numbers = np.random.default_rng(0).integers(0, 16, (13, 4))
    assert np.array_equal(oracle.nibbles(bitstream.pack(torch.from_numpy(numbers), 4), 13), numbers)
    assert oracle.nibbles(words(0xFEDCBA98), 8).flatten().tolist() == [8, 9, 10, 11, 12, 13, 14, 15]


def test_which_kernels_take_them_is_class_data() -> None:
    """And what does not take them says so."""
    takes = {
        f"{b.name}.{k.name}": torch.uint4 in k.limits.scale_dtypes
        for b in qmm.backends().values()
        for k in b.kernels
    }
    assert takes["torch.blocks"] and takes["triton.tiled"] and takes["numba.tiled"]
    assert not takes["triton.decode"] and not takes["triton.wgmma"]
    limits = [r.limit for r in qmm.explain(torch.randn(1, 180), made()).reasons["triton"]]
    assert any(limit.startswith("scales.dtype in") for limit in limits)
