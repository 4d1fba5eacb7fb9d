"""Packing against Python's own big integers: a column is one number, code k stands at bit k * bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qmm.testing import oracle
from qmm.weight import bitstream
from qmm.weight.spec import words_for

all_bits = pytest.mark.parametrize("bits", range(1, 9))


def pack_by_integers(codes: list[int], bits: int) -> list[int]:
    """One column: little-endian words of ``sum(code << (k * bits))``, as signed int32."""
    number = sum(code << (k * bits) for k, code in enumerate(codes))
    size = -(-len(codes) * bits // 32)
    return np.frombuffer(number.to_bytes(size * 4, "little"), "<i4").tolist()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_pack_and_unpack(bits: int, columns: int, rows: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns))
    words = bitstream.pack(torch.from_numpy(codes), bits)
    assert words.dtype == torch.int32 and tuple(words.shape) == (words_for(rows, bits), columns)
    assert words.t().tolist() == [pack_by_integers(column.tolist(), bits) for column in codes.T]
    assert np.array_equal(bitstream.unpack(words, bits, rows).numpy(), codes)
    assert np.array_equal(oracle.codes(words, bits, rows), codes)  # the kit's own reader agrees
    assert bitstream.padding_is_zero(words, bits, rows)


@all_bits
def test_all_ones(bits: int) -> None:
    """Every bit set: a sign that spreads would show."""
    rows = 45
    codes = torch.full((rows, 2), (1 << bits) - 1)
    words = bitstream.pack(codes, bits)
    assert torch.equal(bitstream.unpack(words, bits, rows).long(), codes)
    full = rows * bits // 32
    assert bool((words[:full] == -1).all())


@all_bits
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_dtypes_of_codes(bits: int, dtype: torch.dtype) -> None:
    top = min((1 << bits) - 1, torch.iinfo(dtype).max)
    codes = torch.arange(40).remainder(top + 1)[:, None]
    assert torch.equal(bitstream.pack(codes.to(dtype), bits), bitstream.pack(codes, bits))


@all_bits
def test_strided_words_and_codes(bits: int) -> None:
    codes = torch.arange(70 * 6).remainder(1 << bits).view(70, 6)
    words = bitstream.pack(codes, bits)
    assert torch.equal(bitstream.pack(codes[:, ::2], bits), words[:, ::2])
    assert torch.equal(bitstream.unpack(words[:, 1::2], bits, 70).long(), codes[:, 1::2])
    assert torch.equal(bitstream.unpack(words.t().contiguous().t(), bits, 70).long(), codes)


@all_bits
def test_padding(bits: int) -> None:
    rows = 33
    words = bitstream.pack(torch.zeros(rows, 2, dtype=torch.int64), bits)
    used = rows * bits % 32
    if used == 0:
        assert bitstream.padding_is_zero(words - 1, bits, rows)
        return
    last_code = words.clone()
    last_code[-1, 1] = 1 << (used - 1)
    assert bitstream.padding_is_zero(last_code, bits, rows)
    for bit in {used, 31}:
        beyond = words.clone()
        beyond[-1, 1] = -(2**31) if bit == 31 else 1 << bit
        assert not bitstream.padding_is_zero(beyond, bits, rows)


@pytest.mark.parametrize(
    ("count", "bits", "words"),
    [(128, 3, 12), (32, 4, 4), (1, 1, 1), (33, 8, 9), (0, 4, 0), (11, 3, 2), (2880, 4, 360)],
)
def test_word_counts(count: int, bits: int, words: int) -> None:
    """``ceil(K * bits / 32)``, not ``ceil(K / (32 // bits))`` (CASES 44)."""
    assert words_for(count, bits) == words


def test_codes_that_straddle_words() -> None:
    """3 bits: lanes 10 and 21 stand in two words each (CASES 42)."""
    codes = torch.zeros(32, 1, dtype=torch.int64)
    codes[10], codes[21] = 7, 7
    assert bitstream.pack(codes, 3)[:, 0].tolist() == [-(2**30), 1 | -(2**31), 3]
