"""GGUF blocks made by ggml: the codes bit for bit, read here once more from ggml's drawings of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qmm.formats import gguf

DATA = Path(__file__).parent.parent / "data" / "vectors"
FILES = sorted(DATA.glob("*.gguf"))
Blocks = np.ndarray  # uint8 [blocks, bytes of a block]


def halves(raw: Blocks) -> np.ndarray:
    """The low half bytes of 16 bytes, then their high ones."""
    return np.concatenate([raw & 15, raw >> 4], -1)


def fifth(raw: Blocks) -> np.ndarray:
    """Bit i of four bytes' little-endian number."""
    return (raw.copy().view("<u4") >> np.arange(32, dtype=np.uint32) & 1).astype(np.uint8)


def quarters(raw: Blocks) -> np.ndarray:
    """Two bits of each of 32 bytes, the lowest first, then the next 32 bytes."""
    return np.concatenate(
        [part >> s & 3 for part in np.split(raw, raw.shape[1] // 32, 1) for s in (0, 2, 4, 6)], 1
    )


def nibbles(raw: Blocks, step: int) -> np.ndarray:
    return np.concatenate([halves(part) for part in np.split(raw, raw.shape[1] // step, 1)], 1)


def planes(raw: Blocks) -> np.ndarray:
    """Bit i of 32 bytes for elements 32i to 32i+31."""
    return np.concatenate([raw >> i & 1 for i in range(8)], 1)


CODES: dict[str, Callable[[Blocks], np.ndarray]] = {
    "Q4_0": lambda b: halves(b[:, 2:18]),
    "Q4_1": lambda b: halves(b[:, 4:20]),
    "Q5_0": lambda b: halves(b[:, 6:22]) | fifth(b[:, 2:6]) << 4,
    "Q5_1": lambda b: halves(b[:, 8:24]) | fifth(b[:, 4:8]) << 4,
    "Q8_0": lambda b: b[:, 2:34] ^ 128,
    "Q2_K": lambda b: quarters(b[:, 16:80]),
    "Q3_K": lambda b: quarters(b[:, 32:96]) | planes(b[:, :32]) << 2,
    "Q4_K": lambda b: nibbles(b[:, 16:144], 32),
    "Q5_K": lambda b: nibbles(b[:, 48:176], 32) | planes(b[:, 16:48]) << 4,
    "Q6_K": lambda b: nibbles(b[:, :128], 64) | quarters(b[:, 128:192]) << 4,
    "IQ4_NL": lambda b: halves(b[:, 2:18]),
    "IQ4_XS": lambda b: nibbles(b[:, 8:136], 16),
    "MXFP4": lambda b: halves(b[:, 1:17]),
}
SIZES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18, "MXFP4": 17}
SIZES |= {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_XS": 136}


def read(raw: Blocks, kind: str) -> np.ndarray:
    """Codes ``[N, K]`` of rows of blocks."""
    return CODES[kind](raw.reshape(-1, SIZES[kind])).reshape(len(raw), -1)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_codes_of_the_peer(path: Path) -> None:
    reader = pytest.importorskip("gguf", reason="needs the gguf package: pip install qmm[gguf]")
    (tensor,) = reader.GGUFReader(path).tensors
    w = gguf.read(path)[tensor.name]
    assert np.array_equal(w.unpack().t().numpy(), read(np.array(tensor.data), tensor.tensor_type.name))


@pytest.mark.parametrize("kind", SIZES)
def test_codes_of_random_blocks(kind: str) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (3, 2 * SIZES[kind]), dtype=np.uint8)
    assert np.array_equal(gguf.from_blocks(raw, kind).unpack().t().numpy(), read(raw, kind))


def test_all_are_here() -> None:
    assert len(FILES) == 15 and set(CODES) == set(gguf.SUPPORTED) == set(SIZES)
