"""GPTQ: any layer of any version is read as it was packed and written back as the same bytes; damage is named."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qmm import FormatWarning, QuantizedWeight, WeightFormatError, ZeroKind
from qmm.formats import gptq


def along(values: np.ndarray, bits: int) -> np.ndarray:
    """Rows of numbers as little-endian streams of int32 words, by numpy's packbits."""
    fields = (values[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(values), -1)
    padded = np.pad(fields, ((0, 0), (0, -fields.shape[1] % 32)))
    return np.ascontiguousarray(np.packbits(padded, axis=1, bitorder="little")).view("<i4")


def planar(values: np.ndarray, bits: int) -> np.ndarray:
    """The same in planes: blocks of 32 numbers, low four (or two) bits first."""
    blocks, at = [], 0
    widths = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}[bits]
    for block in np.split(values, values.shape[1] // 32, 1):
        at = 0
        for width in widths:
            blocks.append(along(block >> at & ((1 << width) - 1), width))
            at += width
    return np.concatenate(blocks, 1)


def made(
    bits: int = 4,
    k: int = 64,
    n: int = 32,
    group: int = 32,
    fmt: str = "gptq_v2",
    act: bool = False,
    seed: int = 0,
) -> tuple[dict[str, Tensor], np.ndarray, np.ndarray]:
    """A layer's tensors, its codes ``[K, N]`` and its zero points ``[G, N]``, with 0 and 2**bits - 1 among them."""
    rng = np.random.default_rng(seed)
    top, groups = (1 << bits) - 1, -(-k // group)
    codes = rng.integers(0, top + 1, (k, n))
    zeros = rng.integers(0, top + 1, (groups, n))
    zeros.flat[:2] = 0, top
    stored = (zeros - 1) & top if fmt == "gptq" else zeros
    pack = planar if fmt == "gptq_p" or bits in (5, 6, 7) else along
    g_idx = np.arange(k) // group
    tensors = {
        "qweight": torch.from_numpy(pack(codes.T, bits).T.copy()),
        "qzeros": torch.from_numpy(pack(stored, bits).copy()),
        "scales": torch.from_numpy(rng.uniform(-2, 2, (groups, n))).half(),
        "g_idx": torch.from_numpy(rng.permutation(g_idx) if act else g_idx).int(),
    }
    return tensors, codes, zeros


def zeros_of(w: QuantizedWeight) -> list[list[float]]:
    found = w.unpack_zeros()
    assert found is not None
    return found.tolist()


def distinct_zeros(w: QuantizedWeight) -> set[float]:
    return {z for row in zeros_of(w) for z in row}


SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 80))


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    shape=SHAPES,
    fmt=st.sampled_from(["gptq", "gptq_v2"]),
    act=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_dense_layer(bits: int, shape: tuple[int, int, int], fmt: str, act: bool, seed: int) -> None:
    """Short last groups, groups longer than K, rows of zero points that fill no whole word."""
    k, n, group = shape[0] * 32, shape[1] * 7, shape[2]
    check(bits, k, n, group, fmt, act, seed)


@settings(max_examples=40, deadline=None)
@given(
    bits=st.integers(2, 8),
    shape=SHAPES,
    fmt=st.sampled_from(["gptq", "gptq_v2", "gptq_p"]),
    act=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_layer_of_whole_blocks(
    bits: int, shape: tuple[int, int, int], fmt: str, act: bool, seed: int
) -> None:
    check(bits, shape[0] * 32, shape[1] * 32, shape[2], fmt, act, seed)


def check(bits: int, k: int, n: int, group: int, fmt: str, act: bool, seed: int) -> None:
    tensors, codes, zeros = made(bits, k, n, group, fmt, act, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w = gptq.from_tensors(
            tensors, bits=bits, group_size=group, checkpoint_format=fmt, desc_act=act, zero_reading="masked"
        )
        again = gptq.to_tensors(w, version=fmt, zero_reading="masked")
    assert w.shape == (k, n) and w.group_size == group and w.zero_kind is ZeroKind.INT
    assert np.array_equal(w.unpack().numpy(), codes) and zeros_of(w) == zeros.tolist()
    assert set(again) == set(tensors)
    for key, stored in tensors.items():
        assert again[key].dtype == stored.dtype and torch.equal(again[key], stored), key
    g, s = tensors["g_idx"].numpy(), tensors["scales"].double().numpy()
    expected = (codes - zeros[g]) * s[g]
    np.testing.assert_allclose(w.dequantize().double().numpy(), expected, rtol=2.0**-23)


# the three readings


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from([2, 4, 8]), n=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_word_reading_adds_to_whole_words(bits: int, n: int, seed: int) -> None:
    """Against Python's integers, mod 2**32; the inverse gives the stored words back."""
    rng = np.random.default_rng(seed)
    tensors, _, _ = made(bits, 64, n, 32, "gptq")
    fields = np.where(rng.random((2, n)) < 0.5, (1 << bits) - 1, rng.integers(0, 1 << bits, (2, n)))
    words = along(fields, bits)
    tensors["qzeros"] = torch.from_numpy(words)
    ones = sum(1 << at for at in range(0, 32, bits))
    added = [[(int(word) + ones) % 2**32 for word in row] for row in words]
    expected = [
        [row[i * bits // 32] >> (i * bits % 32) & ((1 << bits) - 1) for i in range(n)] for row in added
    ]
    w = gptq.from_tensors(tensors, bits=bits, group_size=32, zero_reading="word")
    assert zeros_of(w) == expected
    again = gptq.to_tensors(w, version="v1", zero_reading="word")["qzeros"]
    assert (
        zeros_of(
            gptq.from_tensors(tensors | {"qzeros": again}, bits=bits, group_size=32, zero_reading="word")
        )
        == expected
    )
    if n * bits % 32 == 0:  # past the last field any bits may stand, which are not kept
        assert torch.equal(again, tensors["qzeros"])


@settings(max_examples=30, deadline=None)
@given(bits=st.integers(2, 8), n=st.sampled_from([32, 64]), seed=st.integers(0, 2**32 - 1))
def test_unmasked_reading_reaches_past_the_codes(bits: int, n: int, seed: int) -> None:
    """A zero point of 2**bits needs the float kind, which holds it exactly; it is written back as all ones."""
    tensors, codes, zeros = made(bits, 64, n, 16, "gptq", seed=seed)
    unmasked = np.where(zeros == 0, 1 << bits, zeros)
    w = gptq.from_tensors(tensors, bits=bits, group_size=16, zero_reading="unmasked")
    assert w.zero_kind is ZeroKind.FLOAT and zeros_of(w) == unmasked.tolist()
    scales = tensors["scales"].double().numpy().repeat(16, 0)
    expected = (codes - unmasked.repeat(16, 0)) * scales
    np.testing.assert_allclose(w.dequantize().double().numpy(), expected, rtol=2.0**-23)
    again = gptq.to_tensors(w, version="v1", zero_reading="unmasked")
    assert all(torch.equal(again[key], stored) for key, stored in tensors.items())


def test_unmasked_without_an_all_ones_field_stays_int() -> None:
    tensors, _, _ = made(fmt="gptq")
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], 0x77777777)
    w = gptq.from_tensors(tensors, bits=4, group_size=32, zero_reading="unmasked")
    assert w.zero_kind is ZeroKind.INT and distinct_zeros(w) == {8}


def with_one_wrapped_zero() -> dict[str, Tensor]:
    """Fields 15 and 7 at the beginning of the first row, 7 elsewhere."""
    tensors, _, _ = made(fmt="gptq")
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], 0x77777777)
    tensors["qzeros"][0, 0] = 0x7777777F
    return tensors


WRITERS = {
    "gptqmodel": ({"meta": {"quantizer": ["gptqmodel:7.7.0"]}}, [0, 9]),
    "gptqmodel, one string": ({"meta": {"quantizer": "gptqmodel:1.4.0"}}, [0, 9]),
    "optimum with gptqmodel": ({"meta": {"quantizer": ["optimum:1.23", "gptqmodel:1.4"]}}, [0, 9]),
    "gptqmodel by its keys": ({"pack_dtype": "int32", "meta": {"pack_impl": "auto"}}, [0, 9]),
    "auto-gptq": ({"meta": {"quantizer": "auto_gptq:0.7.1"}}, [16, 8]),
    "auto-gptq by its keys": ({"model_file_base_name": None, "static_groups": False}, [16, 8]),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_the_writers_own_reading(writer: str) -> None:
    config, expected = WRITERS[writer]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w = gptq.from_checkpoint(with_one_wrapped_zero(), {"bits": 4, "group_size": 32, **config})
    assert zeros_of(w)[0][:3] == [*expected, 8]


@pytest.mark.parametrize(
    "config", [{}, {"meta": {"quantizer": "other:1"}}, {"meta": None}, {"meta": "x"}], ids=str
)
def test_no_known_writer_warns_once(config: dict[str, Any]) -> None:
    with pytest.warns(
        FormatWarning, match=r"^q_proj\.qzeros: 1 of 32 columns have a zero point stored as"
    ) as seen:
        w = gptq.from_checkpoint(
            with_one_wrapped_zero(), {"bits": 4, "group_size": 32, **config}, name="q_proj"
        )
    assert len(seen) == 1 and zeros_of(w)[0][:3] == [0, 8, 8]


def test_three_bits_of_gptqmodel_are_read_field_by_field() -> None:
    tensors, _, zeros = made(3, fmt="gptq")
    w = gptq.from_checkpoint(tensors, {"bits": 3, "group_size": 32, "meta": {"quantizer": "gptqmodel:7"}})
    assert zeros_of(w) == zeros.tolist()


# what a config says


def test_a_config_of_other_layers() -> None:
    """``dynamic``: the first pattern that matches the beginning of the name."""
    tensors, codes, _ = made(8, group=16)
    dynamic = {
        r"+:.*\.1\..*": {"bits": 8, "group_size": 16},
        r".*\.2\.q$": {"bits": 8, "group_size": 16},
        r"+:layers\.(?:4|5)\.[a-z]+": {"bits": 8, "group_size": 16},
        "-:.*up": {},
    }
    config = {"bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2", "dynamic": dynamic}
    for name in ("layers.1.q", "layers.2.q", "layers.5.q"):
        assert np.array_equal(gptq.from_checkpoint(tensors, config, name=name).unpack().numpy(), codes)
    for name, text in (
        ("layers.2.qkv", "qweight"),
        ("layers.3.up", "dynamic: must not call a layer unquantised"),
    ):
        with pytest.raises(WeightFormatError, match=text):
            gptq.from_checkpoint(tensors, config, name=name)


def test_all_zero_g_idx_of_a_layer_without_act_order() -> None:
    """Some exporters never filled it; the libraries' fast kernels take it as plain groups."""
    tensors, _, _ = made()
    with pytest.warns(FormatWarning, match="g_idx: all 0 although desc_act is false"):
        w = gptq.from_tensors(
            tensors | {"g_idx": torch.zeros(64, dtype=torch.int32)},
            bits=4,
            group_size=32,
            checkpoint_format="gptq_v2",
            desc_act=False,
        )
    assert w.g_idx is None
    assert torch.equal(
        w.dequantize(), gptq.from_tensors(tensors, bits=4, group_size=32, version="v2").dequantize()
    )


def test_act_order_that_the_config_denies_is_followed() -> None:
    tensors, _, _ = made(act=True)
    with pytest.warns(FormatWarning, match="g_idx is followed"):
        w = gptq.from_tensors(tensors, bits=4, group_size=32, version="v2", desc_act=False)
    assert w.g_idx is not None and torch.equal(w.g_idx, tensors["g_idx"])


def test_g_idx_may_be_absent_and_64_bits_wide() -> None:
    tensors, codes, _ = made(act=True)
    wide = gptq.from_tensors(
        tensors | {"g_idx": tensors["g_idx"].long()}, bits=4, group_size=32, version="v2"
    )
    assert wide.g_idx is not None and wide.g_idx.dtype == torch.int32
    del tensors["g_idx"]
    plain = gptq.from_tensors(tensors, bits=4, group_size=32, version="v2")
    assert plain.g_idx is None and np.array_equal(plain.unpack().numpy(), codes)


@pytest.mark.parametrize(("declared", "field", "zero"), [("gptq", 8, 9), ("gptq_v2", 7, 7)])
def test_symmetric_data_of_the_other_version(declared: str, field: int, zero: int) -> None:
    """The declared format is honoured, with a warning; the caller can override it (CASES 27)."""
    tensors, _, _ = made()
    tensors["qzeros"] = torch.full_like(
        tensors["qzeros"], int(str(field) * 8, 16) - (1 << 32 if field > 7 else 0)
    )
    config = {"bits": 4, "group_size": 32, "sym": True, "checkpoint_format": declared}
    with pytest.warns(FormatWarning, match=r"q\.qzeros: all one off the midpoint although sym is true"):
        w = gptq.from_checkpoint(tensors, config, name="q")
    assert distinct_zeros(w) == {zero}
    other = "gptq_v2" if declared == "gptq" else "gptq"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w = gptq.from_checkpoint(tensors, config | {"checkpoint_format": other}, name="q")
    assert distinct_zeros(w) == {8}


def test_in_features_where_words_are_not_full() -> None:
    tensors, codes, _ = made(3, k=42, n=8, group=16)
    del tensors["g_idx"]
    w = gptq.from_tensors(tensors, bits=3, group_size=16, version="v2", in_features=42)
    assert np.array_equal(w.unpack().numpy(), codes)


def test_uint32_words() -> None:
    """CASES 39."""
    tensors, codes, zeros = made()
    tensors |= {key: tensors[key].view(torch.uint32) for key in ("qweight", "qzeros")}
    w = gptq.from_tensors(tensors, bits=4, group_size=32, version="v2")
    assert np.array_equal(w.unpack().numpy(), codes) and zeros_of(w) == zeros.tolist()


def test_a_large_layer_is_turned_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmm.formats.packed.BLOCK_CODES", 64)
    for fmt in ("gptq", "gptq_p"):
        check(3, 320, 32, 4, fmt, False, 0)


def test_meta_tensors() -> None:
    """Shapes are checked where there are no values to look at."""
    tensors = {key: t.to("meta") for key, t in made()[0].items()}
    w = gptq.from_tensors(tensors, bits=4, group_size=32, sym=True)
    assert w.device.type == "meta" and w.shape == (64, 32)
