"""The header of a GGUF file: metadata and the table of tensors, every length checked before it is used.

Little-endian throughout (versions 2 and 3)::

    "GGUF" | version u32 | tensors u64 | entries u64
    entries x  { key string | type u32 | value }                      string = length u64 | UTF-8 bytes
    tensors x  { name string | dims u32 | size u64 x dims | type u32 | offset u64 }
    padding to ``general.alignment`` (32), then the data; offsets count from there

The ``gguf`` package's own reader makes several numpy objects for each of the vocabulary's strings (seconds for a small
model) and trusts lengths; this one steps over arrays. Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from qmm.errors import WeightFormatError
from qmm.formats.gguf_blocks import BLOCK_TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
_MAX_COUNT = 2**63  # without the zeros: [0, 2**62, 4] has no byte, and strides that overflow

# ggml_type numbers
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I8": 1, "I16": 2, "I32": 4, "I64": 8}
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # struct's codes
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorEntry:
    """One line of the table of tensors.

    Attributes:
        name: as in the file.
        qtype: name of the ggml type, or ``"type <number>"``.
        shape: sizes, outermost first (``[N, K]`` of a matrix; the file has them the other way round).
        start: first byte of the data in the file.
        nbytes: bytes of the data, or None for a type whose size is not known here.
    """

    name: str
    qtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int | None


@dataclass(frozen=True)
class Header:
    """What a file says of itself: scalar and string metadata (arrays are stepped over), and its tensors."""

    metadata: dict[str, object]
    tensors: tuple[TensorEntry, ...]


def read_header(data: bytes | mmap.mmap, where: str) -> Header:
    """Parse and check the header.

    Args:
        data: the whole file.
        where: names the file in messages.

    Raises:
        WeightFormatError: not a GGUF file, truncated, or contradictory.
    """
    cursor = _Cursor(data, where)
    magic = cursor.take(4, "the magic number") if len(data) >= 4 else bytes(data[:])
    if magic != MAGIC:
        raise WeightFormatError(f"{where}: must be a GGUF file, which begins with {MAGIC!r}; got {magic!r}")
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        hint = " (a big-endian file)" if version >> 16 and not version & 0xFFFF else ""
        raise WeightFormatError(f"{where}: GGUF version must be 2 or 3, little-endian; got {version}{hint}")
    tensor_count = cursor.number("Q", "the tensor count")
    entry_count = cursor.number("Q", "the metadata count")
    metadata: dict[str, object] = {}
    for _ in range(entry_count):
        key = cursor.string("a metadata key")
        value = cursor.value(cursor.number("I", f"the type of {key!r}"), key)
        if value is not None:
            metadata[key] = value
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise WeightFormatError(f"{where}: general.alignment must be a power of two; got {alignment!r}")
    drafts = [_tensor(cursor) for _ in range(tensor_count)]
    base = -(-cursor.at // alignment) * alignment
    tensors = tuple(_placed(draft, base, alignment, len(data), where) for draft in drafts)
    _check_table(tensors, where)
    return Header(metadata, tensors)


class _Cursor:
    """A place in the file; nothing is read before its end has been checked."""

    def __init__(self, data: bytes | mmap.mmap, where: str) -> None:
        self._data, self.where, self.at = data, where, 0

    def skip(self, count: int, what: str) -> int:
        """Step over ``count`` bytes; returns where they began."""
        start, left = self.at, len(self._data) - self.at
        if count > left:
            raise WeightFormatError(
                f"{self.where}: truncated at byte {start}: {what} needs {count} bytes; got {left}"
            )
        self.at += count
        return start

    def take(self, count: int, what: str) -> bytes:
        start = self.skip(count, what)
        return self._data[start : start + count]

    def number(self, code: str, what: str) -> int:
        found = self.scalar(code, what)
        assert isinstance(found, int)
        return found

    def scalar(self, code: str, what: str) -> object:
        layout = struct.Struct("<" + code)
        found: tuple[object, ...] = layout.unpack_from(self._data, self.skip(layout.size, what))
        return found[0]

    def string(self, what: str) -> str:
        raw = self.take(self.number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise WeightFormatError(f"{self.where}: {what} must be UTF-8; got {raw[:40]!r}") from error

    def value(self, kind: int, key: str, depth: int = 0) -> object:
        """A scalar or string; None for an array, which is stepped over."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], repr(key))
        if kind == _STRING:
            return self.string(repr(key))
        if kind != _ARRAY or depth >= _MAX_ARRAY_DEPTH:
            raise WeightFormatError(f"{self.where}: metadata {key!r}: type must be from 0 to 12; got {kind}")
        inner, count = self.number("I", repr(key)), self.number("Q", repr(key))
        if inner in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[inner]), f"array {key!r}")
        elif inner == _STRING:
            self._skip_strings(count, f"array {key!r}")
        else:
            for _ in range(count):
                self.value(inner, key, depth + 1)
        return None

    def _skip_strings(self, count: int, what: str) -> None:
        """A vocabulary has 100,000 of these: one look at each length, and no objects."""
        data, last = self._data, len(self._data) - 8
        at, length = self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                break
            at += 8 + length(data, at)[0]
        else:
            self.skip(at - self.at, what)
            return
        self.at = min(at, len(data))
        self.skip(8, what)  # does not fit: raises


@dataclass(frozen=True)
class _Draft:
    name: str
    qtype: str
    shape: tuple[int, ...]
    offset: int


def _tensor(cursor: _Cursor) -> _Draft:
    name = cursor.string("a tensor's name")
    what = f"tensor {name!r}"
    dims = cursor.number("I", what)
    if dims > MAX_DIMS:
        raise WeightFormatError(
            f"{cursor.where}: {what}: must have at most {MAX_DIMS} dimensions; got {dims}"
        )
    sizes = [cursor.number("Q", what) for _ in range(dims)]
    kind = cursor.number("I", what)
    return _Draft(
        name, TYPE_NAMES.get(kind, f"type {kind}"), tuple(reversed(sizes)), cursor.number("Q", what)
    )


def _placed(draft: _Draft, base: int, alignment: int, file_bytes: int, where: str) -> TensorEntry:
    what = f"{where}: tensor {draft.name!r} ({draft.qtype} {list(draft.shape)})"
    if draft.offset % alignment:
        raise WeightFormatError(f"{what}: offset must be a multiple of {alignment}; got {draft.offset}")
    if prod(size for size in draft.shape if size) >= _MAX_COUNT:
        raise WeightFormatError(f"{what}: the product of the sizes must be less than 2**63; got more")
    count, nbytes = prod(draft.shape), None
    block = BLOCK_TYPES.get(draft.qtype)
    if block is not None:
        row = draft.shape[-1] if draft.shape else 1
        if row % block.size:
            raise WeightFormatError(
                f"{what}: K must be a multiple of {draft.qtype}'s block of {block.size}; got {row}"
            )
        nbytes = count // block.size * block.nbytes
    elif draft.qtype in PLAIN_BYTES:
        nbytes = count * PLAIN_BYTES[draft.qtype]
    start = base + draft.offset
    if start + (nbytes or 0) > file_bytes:
        raise WeightFormatError(
            f"{what}: truncated: its data ends at byte {start + (nbytes or 0)}; got a file of {file_bytes} bytes"
        )
    return TensorEntry(draft.name, draft.qtype, draft.shape, start, nbytes)


def _check_table(tensors: tuple[TensorEntry, ...], where: str) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise WeightFormatError(f"{where}: tensor names must differ; got {tensor.name!r} twice")
        seen.add(tensor.name)
    placed = sorted((t for t in tensors if t.nbytes), key=lambda t: t.start)
    for before, after in pairwise(placed):
        if before.start + (before.nbytes or 0) > after.start:
            raise WeightFormatError(
                f"{where}: tensors must not overlap; got {before.name!r} and {after.name!r}"
            )
