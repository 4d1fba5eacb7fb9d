"""Safetensors files, read by own code: every size and range of the header is checked before it is used.

Little-endian::

    n u64 | JSON of n bytes (padded with spaces) | data
    {"name": {"dtype": "F16", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {"key": "text"}}

Offsets count from the first byte of the data. Together the tensors cover the data exactly: no gap, no overlap, nothing
behind the last (as the format asks, so that a file can hide nothing).

Opening maps the file and reads the header. :meth:`SafetensorsFile.tensor` copies one tensor out of the map and lets
the map's pages go again, so that memory holds what was asked for and no more.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qmm.checkpoint.json_text import MAX_BYTES, parse_object
from qmm.errors import WeightFormatError

# dtype in the file -> bits of an element, torch's name (older torch lacks some)
DTYPES = {
    "BOOL": (8, "bool"), "U8": (8, "uint8"), "I8": (8, "int8"), "U16": (16, "uint16"), "I16": (16, "int16"),
    "U32": (32, "uint32"), "I32": (32, "int32"), "U64": (64, "uint64"), "I64": (64, "int64"),
    "F16": (16, "float16"), "BF16": (16, "bfloat16"), "F32": (32, "float32"), "F64": (64, "float64"),
    "C64": (64, "complex64"), "F8_E4M3": (8, "float8_e4m3fn"), "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"), "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"), "F4": (4, ""), "F6_E2M3": (6, ""), "F6_E3M2": (6, ""),
}  # fmt: skip
MAX_DIMS = 16
_MAX_COUNT = (
    2**63
)  # sizes are multiplied without their zeros: [0, 2**62, 2**62] has no byte and overflows strides
_COPY_BYTES = 16 << 20  # copied at a time, so that the map's pages never add up to a second tensor


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        dtype: as in the file, e.g. ``"BF16"``.
        shape: sizes.
        start: first byte in the file.
        nbytes: bytes of the data.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Torch's dtype, or None where this torch has none."""
        found = getattr(torch, DTYPES[self.dtype][1], None)
        return found if isinstance(found, torch.dtype) else None

    def at(self, index: int) -> Entry:
        """What stands at ``index`` of the first axis (of whole bytes)."""
        nbytes = self.nbytes // self.shape[0]
        return Entry(self.dtype, self.shape[1:], self.start + index * nbytes, nbytes)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class SafetensorsFile:
    """An open safetensors file.

    Attributes:
        path: the file.
        metadata: the header's strings.
        entries: ``{name: Entry}``, in the header's order.

    Raises:
        OSError: the file cannot be opened.
        WeightFormatError: not a safetensors file, truncated, or damaged; names the file, the tensor and the rule.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0  # such a file cannot be mapped
            self._data: bytes | mmap.mmap = (
                b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            )
        self.metadata, self.entries = read_header(self._data, str(self.path))

    def tensor(self, name: str, index: int | None = None) -> Tensor:
        """A tensor, copied out of the file; with ``index``, ``tensor[index]`` alone.

        Raises:
            KeyError: no such tensor.
            WeightFormatError: torch has no such dtype, or the file has shrunk since it was opened.
        """
        entry = self.entries[name] if index is None else self.entries[name].at(index)
        dtype = entry.torch_dtype
        if dtype is None:
            raise WeightFormatError(
                f"{self.path}: tensor {name!r}: dtype must be one of torch {torch.__version__}'s; got {entry.dtype}"
            )
        size = self._data.size() if isinstance(self._data, mmap.mmap) else 0
        if size < len(self._data):  # reading a mapped page past the file's end would kill the process
            raise WeightFormatError(
                f"{self.path}: tensor {name!r}: the file must not shrink while it is open; "
                f"got {size} bytes, had {len(self._data)}"
            )
        if not entry.nbytes:  # no bytes to view
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        raw = np.empty(entry.nbytes, np.uint8)
        for done in range(0, entry.nbytes, _COPY_BYTES):
            count = min(_COPY_BYTES, entry.nbytes - done)
            raw[done : done + count] = np.frombuffer(self._data, np.uint8, count, entry.start + done)
            self._let_go(entry.start + done, count)
        return torch.from_numpy(raw).view(dtype).reshape(entry.shape)

    def _let_go(self, start: int, count: int) -> None:
        if isinstance(self._data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._data.madvise(mmap.MADV_DONTNEED, page, start + count - page)


def read_header(data: bytes | mmap.mmap, where: str) -> tuple[dict[str, str], dict[str, Entry]]:
    """Metadata and entries.

    Args:
        data: the whole file.
        where: names the file in messages.

    Raises:
        WeightFormatError: a rule of the format does not hold.
    """
    if len(data) < 8:
        raise WeightFormatError(f"{where}: a safetensors file must have at least 8 bytes; got {len(data)}")
    (length,) = struct.unpack("<Q", data[:8])
    if length > MAX_BYTES:
        raise WeightFormatError(
            f"{where}: the header must have at most {MAX_BYTES} bytes (is this a safetensors file?); got {length}"
        )
    if 8 + length > len(data):
        raise WeightFormatError(
            f"{where}: truncated: the header needs {length} bytes from byte 8 on; got a file of {len(data)} bytes"
        )
    header = parse_object(bytes(data[8 : 8 + length]), f"{where}: header")
    metadata = _metadata(header.pop("__metadata__", {}), where)
    start, end = 8 + length, len(data)
    entries = {name: _entry(value, start, end, f"{where}: tensor {name!r}") for name, value in header.items()}
    _check_cover(entries, start, end, where)
    return metadata, entries


def _metadata(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise WeightFormatError(f"{where}: __metadata__ must map names to strings; got {str(value)[:100]}")
    return value


def _entry(value: Any, start: int, end: int, what: str) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise WeightFormatError(f"{what}: must have dtype, shape and data_offsets; got {str(value)[:100]}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise WeightFormatError(f"{what}: dtype must be one of {', '.join(DTYPES)}; got {str(dtype)[:100]!r}")
    if not _naturals(shape) or len(shape) > MAX_DIMS or prod(d for d in shape if d) >= _MAX_COUNT:
        raise WeightFormatError(
            f"{what}: shape must be at most {MAX_DIMS} sizes from 0 on, their product less than 2**63; "
            f"got {str(shape)[:100]}"
        )
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightFormatError(
            f"{what}: data_offsets must be [begin, end], 0 <= begin <= end; got {str(offsets)[:100]}"
        )
    begin, stop = offsets
    if start + stop > end:
        raise WeightFormatError(
            f"{what}: truncated: its data ends at byte {start + stop}; got a file of {end} bytes"
        )
    bits = prod(shape) * DTYPES[dtype][0]
    if bits != 8 * (stop - begin):
        raise WeightFormatError(
            f"{what}: {dtype} {shape} needs {-(-bits // 8)} bytes; data_offsets {offsets} have {stop - begin}"
        )
    return Entry(dtype, tuple(shape), start + begin, stop - begin)


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_cover(entries: Mapping[str, Entry], start: int, end: int, where: str) -> None:
    placed = sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes))
    for (before, a), (after, b) in pairwise(placed):
        if a.start + a.nbytes > b.start:
            raise WeightFormatError(f"{where}: tensors must not overlap; got {before!r} and {after!r}")
        if a.start + a.nbytes < b.start:
            gap = b.start - a.start - a.nbytes
            raise WeightFormatError(
                f"{where}: tensor {after!r}: must follow {before!r} at once; got {gap} bytes between"
            )
    first = placed[0][1].start if placed else start
    if first != start:
        raise WeightFormatError(
            f"{where}: tensor {placed[0][0]!r}: must begin where the header ends, at byte {start}; got byte {first}"
        )
    last = placed[-1][1].start + placed[-1][1].nbytes if placed else start
    if last != end:
        raise WeightFormatError(
            f"{where}: the last tensor must end where the file does; got {end - last} bytes more"
        )
