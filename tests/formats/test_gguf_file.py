"""GGUF files: what a reader finds in a good one, and one clear error for each kind of damage."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qmm import WeightFormatError
from qmm.formats import gguf as fmt
from qmm.formats.gguf_header import read_header

NUMBERS = {"F32": 0, "Q4_0": 2, "Q4_1": 3, "IQ1_S": 19}


def string(text: str | bytes) -> bytes:
    """A GGUF string."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    """A metadata entry."""
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, kind: int, dims: Sequence[int], offset: int) -> bytes:
    """A line of the table of tensors; dims as in the file, K first."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def image(
    tensors: Sequence[bytes],
    data: bytes = b"",
    entries: Sequence[bytes] = (),
    *,
    version: int = 3,
    **counts: int,
) -> bytes:
    """A whole file, aligned to 32."""
    head = b"GGUF" + struct.pack(
        "<IQQ", version, counts.get("tensor_count", len(tensors)), counts.get("entry_count", len(entries))
    )
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


VOCABULARY = entry("tokens", 9, struct.pack("<IQ", 8, 3) + string("a") + string("") + string("ccc"))
NUMBER_ARRAY = entry("scores", 9, struct.pack("<IQ", 6, 2) + struct.pack("<2f", 1, 2))
NESTED = entry("nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 1) + struct.pack("<I", 7))
ENTRIES = (
    entry("name", 8, string("tiny")),
    VOCABULARY,
    NUMBER_ARRAY,
    NESTED,
    entry("n", 4, struct.pack("<I", 9)),
)
GOOD = image([tensor("w", 3, (64, 2), 0), tensor("norm", 0, (3,), 96)], bytes(range(80)) + bytes(28), ENTRIES)


def write(path: Path, data: bytes) -> Path:
    """``data`` in a file."""
    path.write_bytes(data)
    return path


def test_good_file(tmp_path: Path) -> None:
    """Weights, what is not used and why, metadata with arrays stepped over."""
    file = fmt.read(write(tmp_path / "a.gguf", GOOD))
    assert list(file) == ["w"] and len(file) == 1 and "w" in file and "norm" not in file
    assert file.info["w"] == fmt.TensorInfo("Q4_1", 64, 2, 80)
    assert file["w"].shape == (64, 2)
    assert file.blocks("w").tobytes() == bytes(range(80))
    assert file.unused == {"norm": "not quantised: F32 [3]"}
    assert file.metadata == {"name": "tiny", "n": 9}
    assert "1 weights, 1 other" in repr(file)


def test_is_lazy(tmp_path: Path) -> None:
    """Blocks are views of the mapped file; each look decodes anew."""
    file = fmt.read(write(tmp_path / "a.gguf", GOOD))
    assert not file.blocks("w").flags.owndata and not file.blocks("w").flags.writeable
    assert file["w"] is not file["w"]


def test_against_the_peer(tmp_path: Path) -> None:
    """A file that the gguf package wrote, and its own reader's view of it."""
    gguf = pytest.importorskip("gguf", reason="needs the gguf package: pip install 'qmm[gguf]'")
    rng, path = np.random.default_rng(0), tmp_path / "peer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "ä", ""] * 50)
    writer.add_custom_alignment(64)
    for name in ("Q4_0", "Q4_1", "Q5_1", "Q8_0"):
        values = rng.standard_normal((6, 96)).astype(np.float32)
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    ternary = gguf.quants.quantize(
        rng.standard_normal((4, 256)).astype(np.float32), gguf.GGMLQuantizationType.TQ2_0
    )
    writer.add_tensor("ternary", ternary, raw_dtype=gguf.GGMLQuantizationType.TQ2_0)
    experts = gguf.quants.quantize(
        rng.standard_normal((2, 4, 32)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("experts", experts, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    vector = gguf.quants.quantize(rng.standard_normal(64).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("vector", vector, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("half", rng.standard_normal((2, 2)).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = fmt.read(path)
    for peer in gguf.GGUFReader(path).tensors:
        if peer.name in file:
            assert np.array_equal(file.blocks(peer.name), peer.data)
            expected = gguf.quants.dequantize(np.array(peer.data), peer.tensor_type)
            assert np.array_equal(file[peer.name].dequantize().t().numpy(), expected)
    assert list(file) == ["Q4_0.weight", "Q4_1.weight", "Q5_1.weight", "Q8_0.weight"]
    assert list(file.unused) == ["ternary", "experts", "vector", "half"]
    assert file.metadata["general.alignment"] == 64
    for name, words in {
        "ternary": ["ternary", "TQ2_0", "supported: Q4_0", "Q6_K"],
        "experts": ["experts", "2 dimensions", "not supported yet", "[2, 4, 32]"],
        "vector": ["vector", "2 dimensions", "[64]"],
        "half": ["half", "not quantised", "F16"],
    }.items():
        with pytest.raises(WeightFormatError) as caught:
            file[name]
        assert all(word in str(caught.value) for word in [*words, "peer.gguf"]), caught.value
    with pytest.raises(KeyError):
        file["no such tensor"]


Q4_1 = NUMBERS["Q4_1"]
DATA = bytes(128)


DAMAGED: list[tuple[bytes, list[str]]] = [
    (b"", ["GGUF file", "b''"]),
    (b"GG", ["GGUF file"]),
    (b"PK\x03\x04" + bytes(60), ["GGUF file", "PK"]),
    (b"GGUF", ["truncated", "version"]),
    (b"GGUF" + struct.pack("<I", 3), ["truncated", "tensor count"]),
    (image([], version=1), ["version", "2 or 3", "1"]),
    (b"GGUF" + struct.pack(">I", 3) + bytes(16), ["version", "big-endian"]),
    (image([], tensor_count=1 << 60), ["truncated", "tensor ''"]),
    (image([], entry_count=1 << 60), ["truncated"]),
    (image([], entries=[string("k" * 99)[:-4]]), ["truncated", "metadata key"]),
    (image([], entries=[entry("k", 8, struct.pack("<Q", 1 << 63))]), ["truncated", "'k'"]),
    (image([], entries=[entry("k", 8, string(b"\xff\xfe"))]), ["UTF-8", "'k'"]),
    (image([], entries=[entry("k", 13, b"")]), ["'k'", "type", "13"]),
    (image([], entries=[entry("k", 9, struct.pack("<IQ", 13, 1))]), ["'k'", "type", "13"]),
    (image([], entries=[entry("k", 9, struct.pack("<IQ", 12, 1 << 62))]), ["truncated", "'k'"]),
    (image([], entries=[entry("k", 9, struct.pack("<IQ", 8, 1 << 62))]), ["truncated", "'k'"]),
    (image([], entries=[entry("k", 9, struct.pack("<IQQ", 8, 2, 1 << 62))]), ["truncated", "'k'"]),
    (image([], entries=[entry("k", 9, struct.pack("<IQ", 9, 1) * 9)]), ["'k'", "type"]),
    (image([], entries=[entry("general.alignment", 4, struct.pack("<I", 24))]), ["alignment", "24"]),
    (image([], entries=[entry("general.alignment", 4, struct.pack("<I", 0))]), ["alignment", "0"]),
    (image([], entries=[entry("general.alignment", 8, string("32"))]), ["alignment", "'32'"]),
    (image([tensor("w", Q4_1, (32,) * 5, 0)], DATA), ["'w'", "4 dimensions", "5"]),
    (image([tensor("w", Q4_1, (48, 2), 0)], DATA), ["'w'", "block of 32", "48"]),
    (image([tensor("w", Q4_1, (), 0)], DATA), ["'w'", "block of 32", "1"]),
    (image([tensor("w", Q4_1, (32, 2), 8)], DATA), ["'w'", "offset", "32", "8"]),
    (image([tensor("w", Q4_1, (32, 7), 0)], DATA), ["'w'", "truncated", "Q4_1 [7, 32]"]),
    (image([tensor("w", Q4_1, (32, 1 << 60), 0)], DATA), ["'w'", "truncated"]),
    (image([tensor("w", Q4_1, (32, 2), 1 << 40)], DATA), ["'w'", "truncated"]),
    (image([tensor("n", 0, (33,), 0)], DATA), ["'n'", "truncated", "F32 [33]"]),
    (image([tensor("w", Q4_1, (32, 2), 0), tensor("w", Q4_1, (32, 2), 64)], DATA), ["names", "'w'"]),
    (image([tensor("v", Q4_1, (32, 2), 0), tensor("w", Q4_1, (32, 2), 32)], DATA), ["overlap", "'v'", "'w'"]),
    (image([tensor("v", Q4_1, (32, 2), 0)[:-3]]), ["truncated", "'v'"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "words"), DAMAGED, ids=[f"{i}-{'-'.join(words)}" for i, (_, words) in enumerate(DAMAGED)]
)
def test_damaged(tmp_path: Path, data: bytes, words: list[str]) -> None:
    """One error that names the file, what is wrong and the value."""
    path = write(tmp_path / "bad.gguf", data)
    with pytest.raises(WeightFormatError) as caught:
        fmt.read(path)
    assert all(word in str(caught.value) for word in [*words, "bad.gguf"]), caught.value


def test_no_such_file(tmp_path: Path) -> None:
    """The operating system's own error."""
    with pytest.raises(FileNotFoundError):
        fmt.read(tmp_path / "none.gguf")


@pytest.mark.parametrize("kind", [NUMBERS["IQ1_S"], 9999])
def test_unsupported_type_is_no_error_until_asked(tmp_path: Path, kind: int) -> None:
    """The other weights can be read; the reason names the type and those that are supported."""
    tensors = [tensor("v", kind, (256, 1), 0), tensor("w", Q4_1, (32, 2), 64)]
    file = fmt.read(write(tmp_path / "a.gguf", image(tensors, DATA)))
    assert list(file) == ["w"]
    with pytest.raises(WeightFormatError, match=r"a\.gguf.*'v'.*unsupported block type.*supported: Q4_0"):
        file["v"]


def test_empty_matrix(tmp_path: Path) -> None:
    """A matrix without columns is left out, with the reason."""
    file = fmt.read(write(tmp_path / "a.gguf", image([tensor("w", Q4_1, (32, 0), 0)], DATA)))
    assert file.unused == {"w": "empty: Q4_1 [0, 32]"}


def test_every_truncation() -> None:
    """Cut anywhere, the file gives the one error, or opens where only padding is missing."""
    end = len(GOOD)
    for length in range(end):
        with pytest.raises(WeightFormatError):
            read_header(GOOD[:length], "cut")


def test_any_damage() -> None:
    """Random bytes in the header: the one error or a header, never anything else."""
    hypothesis: Any = pytest.importorskip("hypothesis", reason="needs hypothesis: pip install 'qmm[test]'")
    st = hypothesis.strategies
    place = st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255))

    @hypothesis.settings(max_examples=400, deadline=None)
    @hypothesis.given(st.lists(place, min_size=1, max_size=6))
    def check(places: list[tuple[int, int]]) -> None:
        damaged = bytearray(GOOD)
        for at, value in places:
            damaged[at] = value
        try:
            header = read_header(bytes(damaged), "damaged")
        except WeightFormatError:
            return
        assert len(header.tensors) <= 2

    check()
