"""GGUF blocks against the gguf package, bit for bit: every type, awkward scales, both directions."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch

import qmm
from qmm import QuantizedWeight, WeightFormatError, ZeroKind
from qmm.cli.smollm2 import INSTALL, find_model
from qmm.formats import gguf as fmt
from qmm.formats.gguf_blocks import BLOCK_TYPES
from qmm.formats.gguf_header import PLAIN_BYTES, TYPE_NAMES

gguf = pytest.importorskip("gguf", reason="the reference is the gguf package: pip install 'qmm[gguf]'")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

ALL = tuple(BLOCK_TYPES)
# float16 patterns: zeros, subnormals, one, the largest, of both signs
HALVES = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x2E66)


def random_blocks(name: str, n: int, count: int, seed: int, halves: tuple[int, ...] = ()) -> np.ndarray:
    """Any bytes ``[n, count * nbytes]`` whose float16 fields are finite, drawn from ``halves`` where given."""
    kind, rng = BLOCK_TYPES[name], np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, count, kind.nbytes), dtype=np.uint8)
    at = 0
    for field, size in kind.fields:
        if field in ("d", "m", "dmin"):
            drawn = rng.choice(halves, (n, count)) if halves else rng.integers(0, 1 << 16, (n, count))
            finite = np.where(drawn & 0x7C00 == 0x7C00, drawn & 0xBFFF, drawn).astype(np.uint16)
            raw[:, :, at : at + 2] = finite[..., None].view(np.uint8)
        if field == "e":  # 255 is NaN here and a number in ggml: tested by itself
            raw[:, :, at] = np.minimum(raw[:, :, at], 254)
        at += size
    return raw.reshape(n, -1)


def peer(raw: np.ndarray, name: str) -> np.ndarray:
    """The gguf package's float32 ``[N, K]``."""
    with np.errstate(over="ignore", invalid="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])


def bits(values: np.ndarray) -> np.ndarray:
    """float32 as its bit patterns."""
    return np.ascontiguousarray(values).view(np.uint32)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 5),
    count=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    halves=st.one_of(st.just(()), st.lists(st.sampled_from(HALVES), min_size=1, max_size=3).map(tuple)),
)
def test_any_blocks(name: str, n: int, count: int, seed: int, halves: tuple[int, ...]) -> None:
    """Values equal the peer's bit for bit (signs of zero included), and the bytes come back."""
    raw = random_blocks(name, n, count, seed, halves)
    w = fmt.from_blocks(raw, name, count * BLOCK_TYPES[name].size)
    assert np.array_equal(bits(w.dequantize().t().numpy()), bits(peer(raw, name)))
    assert np.array_equal(fmt.to_blocks(w, name).numpy(), raw)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_blocks_quantised_by_the_peer(name: str) -> None:
    """Real numbers quantised by the gguf package, an all-zero row among them."""
    values = np.random.default_rng(1).standard_normal((33, 96)).astype(np.float32)
    values[3] = 0
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    w = fmt.from_blocks(raw, gguf.GGMLQuantizationType[name])
    assert np.array_equal(bits(w.dequantize().t().numpy()), bits(peer(raw, name)))
    assert np.abs(w.dequantize().t().numpy() - values).max() < 1.2
    assert np.array_equal(fmt.to_blocks(w, name).numpy(), raw)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"])
def test_infinite_and_nan_scales(name: str) -> None:
    """One-level types keep every float16 pattern, NaN payloads too."""
    raw = random_blocks(name, 2, 2, 0)
    raw[0, :2] = np.array([0x7C01], np.uint16).view(np.uint8)
    raw[1, :2] = np.array([0xFC00], np.uint16).view(np.uint8)
    w = fmt.from_blocks(raw, name)
    assert np.array_equal(fmt.to_blocks(w, name).numpy(), raw)
    got, expected = w.dequantize().t().numpy(), peer(raw, name)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    assert np.isnan(got[0, :32]).all() and not np.isfinite(got[1, :32]).any()


def test_mxfp4_exponent_255_is_nan() -> None:
    """As OCP MX says; it comes back as 255."""
    raw = random_blocks("MXFP4", 1, 1, 0)
    raw[0, 0] = 255
    w = fmt.from_blocks(raw, "MXFP4")
    assert bool(w.dequantize().isnan().all())
    assert np.array_equal(fmt.to_blocks(w, "MXFP4").numpy(), raw)


def test_sizes_and_numbers_are_ggmls() -> None:
    """Block sizes and type numbers, against the gguf package's tables."""
    for name, kind in BLOCK_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.size, kind.nbytes)
    for name, size in PLAIN_BYTES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (1, size)
    known = {int(t): t.name for t in gguf.GGMLQuantizationType}
    assert {number: TYPE_NAMES.get(number, name) for number, name in known.items()} == known


@pytest.mark.parametrize(
    ("name", "bits", "group", "kind", "two_level", "codebook"),
    [
        ("Q4_0", 4, 32, ZeroKind.NONE, False, False),
        ("Q4_1", 4, 32, ZeroKind.BIAS, False, False),
        ("Q5_0", 5, 32, ZeroKind.NONE, False, False),
        ("Q5_1", 5, 32, ZeroKind.BIAS, False, False),
        ("Q8_0", 8, 32, ZeroKind.NONE, False, False),
        ("Q2_K", 2, 16, ZeroKind.BIAS, True, False),
        ("Q3_K", 3, 16, ZeroKind.NONE, True, False),
        ("Q4_K", 4, 32, ZeroKind.BIAS, True, False),
        ("Q5_K", 5, 32, ZeroKind.BIAS, True, False),
        ("Q6_K", 6, 16, ZeroKind.NONE, True, False),
        ("IQ4_NL", 4, 32, ZeroKind.NONE, False, True),
        ("IQ4_XS", 4, 32, ZeroKind.NONE, True, True),
        ("MXFP4", 4, 32, ZeroKind.NONE, False, True),
    ],
)
def test_canonical_form(
    name: str, bits: int, group: int, kind: ZeroKind, two_level: bool, codebook: bool
) -> None:
    """What the docstring's table says; two-level scales stay two-level, so that memory is near the file's."""
    raw = random_blocks(name, 64, 2, 0)
    w = fmt.from_blocks(raw, name)
    assert (w.bits, w.group_size, w.zero_kind) == (bits, group, kind)
    assert (w.scale2 is not None, w.codebook is not None) == (two_level, codebook)
    if two_level:
        assert w.spec.scale_dtype == (torch.uint4 if name == "Q2_K" else torch.int8)
        assert w.spec.scale2_ratio == BLOCK_TYPES[name].size // group
    wide = w.scales.dtype == torch.float32  # MXFP4 before torch 2.7
    assert w.nbytes <= (1.25 if wide else 1.1) * raw.nbytes


def test_multiplies() -> None:
    """A weight that was read goes through matmul."""
    raw = random_blocks("Q4_1", 24, 3, 5, (0x2E66, 0x1234))
    w = fmt.from_tensors({"blocks": raw}, qtype="Q4_1", in_features=96)
    a = torch.randn(3, 96)
    expected = a.double() @ torch.from_numpy(peer(raw, "Q4_1").astype(np.float64)).t()
    torch.testing.assert_close(qmm.matmul(a, w, backend="torch").double(), expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(fmt.to_tensors(w, qtype="Q4_1")["blocks"].numpy(), raw)


# -- bad blocks -----------------------------------------------------------------------------------------------------

GOOD = np.zeros((2, 40), np.uint8)


@pytest.mark.parametrize(
    ("raw", "qtype", "in_features", "words"),
    [
        (GOOD, "Q4_2", None, ["qtype", "Q4_2", "Q4_1", "Q6_K"]),
        (GOOD, 3, None, ["qtype", "3"]),
        (GOOD, gguf.GGMLQuantizationType.IQ1_S, None, ["qtype", "IQ1_S"]),
        (GOOD[0], "Q4_1", None, ["raw", "2 dimensions", "[40]"]),
        (GOOD[None], "Q4_1", None, ["raw", "2 dimensions", "[1, 2, 40]"]),
        (GOOD.astype(np.int8), "Q4_1", None, ["raw", "uint8", "int8"]),
        (torch.zeros(2, 40), "Q4_1", None, ["raw", "uint8", "float32"]),
        (GOOD.tolist(), "Q4_1", None, ["raw", "list"]),
        (GOOD[:, :39], "Q4_1", None, ["raw", "whole Q4_1 blocks of 20 bytes", "39"]),
        (GOOD[:, :0], "Q4_1", None, ["raw", "whole Q4_1 blocks", "0 bytes"]),
        (GOOD[:0], "Q4_1", None, ["raw", "at least one row"]),
        (GOOD, "Q4_1", 63, ["in_features", "multiple of Q4_1's block of 32", "63"]),
        (GOOD, "Q4_1", 96, ["in_features", "64", "96"]),
        (GOOD, "Q4_1", 64.0, ["in_features", "integer"]),
        (GOOD, "Q4_1", 0, ["in_features", "0"]),
        (GOOD, "Q4_K", None, ["raw", "whole Q4_K blocks of 144 bytes"]),
    ],
)
def test_bad_blocks(raw: Any, qtype: Any, in_features: Any, words: list[str]) -> None:
    """The error names field, rule and value."""
    with pytest.raises(WeightFormatError) as caught:
        fmt.from_blocks(raw, qtype, in_features)
    assert all(word in str(caught.value) for word in words), caught.value


def test_bad_tensors() -> None:
    """``from_tensors`` wants its one key."""
    with pytest.raises(WeightFormatError, match=r"tensors.*'blocks'.*qweight"):
        fmt.from_tensors({"qweight": GOOD}, qtype="Q4_1")


# -- writing --------------------------------------------------------------------------------------------------------


def weight(**changes: Any) -> QuantizedWeight:
    """A weight that Q4_0 can hold, but for ``changes``."""
    generator = torch.Generator().manual_seed(0)
    bits, k = changes.pop("bits", 4), changes.pop("k", 64)
    arguments: dict[str, Any] = {"group_size": 32, "scales": torch.full((k // 32, 5), 0.25)} | changes
    codes = torch.randint(0, 1 << bits, (k, 5), generator=generator)
    return QuantizedWeight.from_codes(codes, bits=bits, **arguments)


def test_write_a_weight_of_another_origin() -> None:
    """Larger groups and wider scale dtypes are fine where every scale is a float16."""
    for w in (
        weight(),
        weight(scales=torch.full((1, 5), -0.375, dtype=torch.bfloat16), group_size=64),
        weight(scales=torch.full((1, 5), 2.0**-24), group_size=-1),
        weight(k=96, scales=torch.tensor([[1.0] * 5, [3.0] * 5]), group_size=64),
    ):
        raw = fmt.to_blocks(w, "Q4_0").numpy()
        assert np.array_equal(peer(raw, "Q4_0"), w.dequantize().t().numpy())


def two_level(name: str, **changes: Any) -> QuantizedWeight:
    """A weight of a K type with one argument changed."""
    w = fmt.from_blocks(random_blocks(name, 2, 1, 0), name)
    s = w.spec
    arguments: dict[str, Any] = {
        **w.tensors.present(),
        "bits": s.bits,
        "group_size": s.group_size,
        "in_features": s.in_features,
        "zero_kind": s.zero_kind,
        "scale2_ratio": s.scale2_ratio,
        "zero2_ratio": s.zero2_ratio,
    } | changes
    return QuantizedWeight(**arguments)


@pytest.mark.parametrize(
    ("make", "qtype", "words"),
    [
        (lambda: weight(), "Q9_9", ["qtype", "Q9_9"]),
        (lambda: weight(bits=3), "Q4_0", ["bits", "4", "3"]),
        (lambda: weight(k=48, group_size=48, scales=torch.ones(1, 5)), "Q4_0", ["in_features", "32", "48"]),
        (lambda: weight(group_size=16, scales=torch.ones(4, 5)), "Q4_0", ["group_size", "multiple of 32", "16"]),
        (lambda: weight(g_idx=torch.arange(64) % 2), "Q4_0", ["g_idx", "act-order"]),
        (lambda: weight(zeros=torch.ones(2, 5), zero_kind="bias"), "Q4_0", ["zeros", "none", "bias"]),
        (lambda: weight(zeros=torch.full((2, 5), 7)), "Q4_1", ["zeros", "bias", "int"]),
        (lambda: weight(), "Q4_1", ["zeros", "bias", "none"]),
        (lambda: weight(scales=torch.full((2, 5), 0.1)), "Q4_0", ["scales", "float16", "0.1"]),
        (lambda: weight(scales=torch.full((2, 5), 1e6)), "Q4_0", ["scales", "float16", "1000000.0"]),
        (lambda: weight(zeros=torch.full((2, 5), 0.1), zero_kind="bias"), "Q4_1", ["zeros", "float16", "0.1"]),
        (lambda: weight(scale2=torch.ones(1)), "Q4_0", ["scale2", "two-level"]),
        (lambda: weight(codebook=torch.arange(16.0)), "Q4_0", ["codebook", "absent"]),
        (lambda: weight(codebook=torch.arange(16.0)), "IQ4_NL", ["codebook", "-127", "another"]),
        (lambda: weight(), "IQ4_NL", ["codebook", "-127", "none"]),
        (lambda: weight(), "Q4_K", ["in_features", "256", "64"]),
        (lambda: two_level("Q3_K", scales=torch.full((16, 2), 32, dtype=torch.int8)), "Q3_K", ["scales", "31", "32"]),
        (lambda: two_level("Q4_K", zeros=torch.full((8, 2), -1, dtype=torch.int8)), "Q4_K", ["zeros", "63", "-1"]),
        (lambda: two_level("Q6_K", scales=torch.ones(16, 2)), "Q6_K", ["scales", "int8", "float32"]),
        (lambda: two_level("Q6_K", scale2=torch.full((1, 2), 0.1)), "Q6_K", ["scale2", "float16", "0.1"]),
        (lambda: two_level("Q6_K", scale2=torch.ones(1), scale2_ratio=None), "Q6_K", ["scale2_ratio", "16", "0"]),
        (
            lambda: weight(codebook=fmt.from_blocks(random_blocks("MXFP4", 1, 1, 0), "MXFP4").codebook,
                           scales=torch.full((2, 5), 3.0)),
            "MXFP4",
            ["scales", "power of two", "3.0"],
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_written(make: Any, qtype: str, words: list[str]) -> None:
    """The error says which field and why."""
    with pytest.raises(WeightFormatError) as caught:
        fmt.to_blocks(make(), qtype)
    assert all(word in str(caught.value) for word in words), caught.value


# -- the real model -------------------------------------------------------------------------------------------------

needs_model = pytest.mark.skipif(find_model() is None, reason=f"the model is not installed: {INSTALL}")


@needs_model
@pytest.mark.parametrize(
    ("name", "qtype"), [("blk.7.ffn_down.weight", "Q4_1"), ("token_embd.weight", "Q8_0")]
)
def test_real_model(name: str, qtype: str) -> None:
    """A slice of SmolLM2, bit for bit."""
    file = fmt.read(str(find_model()))
    assert (len(file.info), file.info[name].qtype) == (211, qtype)
    raw = np.array(file.blocks(name)[:512])
    w = file[name]
    assert w.shape == (file.info[name].in_features, file.info[name].out_features)
    part = w[:, :512]
    assert np.array_equal(bits(part.dequantize().t().numpy()), bits(peer(raw, qtype)))
    assert np.array_equal(fmt.to_blocks(part, qtype).numpy(), raw)


@needs_model
def test_real_model_loads_fast() -> None:
    """Opening steps over the vocabulary; all 211 weights take about a second of CPU time."""
    start = time.process_time()
    file = fmt.read(str(find_model()))
    assert time.process_time() - start < 1
    assert sum(file[name].out_features for name in file) > 100_000
    assert time.process_time() - start < 10
    assert file.metadata["general.architecture"] == "llama"


def test_reading_needs_no_other_package() -> None:
    """Neither ``import qmm`` nor decoding imports an optional package."""
    code = (
        "import sys, qmm, qmm.cli, qmm.formats.gguf as f; import numpy as np;"
        "f.from_blocks(np.zeros((1, 20), np.uint8), 'Q4_1');"
        "print([m for m in ('gguf', 'typer', 'rich', 'triton', 'numba') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "[]\n"
