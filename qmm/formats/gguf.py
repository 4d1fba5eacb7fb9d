"""GGUF: quantised blocks, as llama.cpp writes them, read into and written from the canonical weight, exactly.

A tensor of N rows and K columns in a GGUF file is W transposed: row n of the file is column n of W. A row is a run of
blocks of ``size`` elements; d, m, dmin are float16, everything is little-endian, fields stand in the order drawn::

    type    size  block, from its first byte                       weight                     canonical form
    Q4_0     32   d | qs 16                                        d*(q - 8)                  4 bits, group 32, none
    Q4_1     32   d | m | qs 16                                    d*q + m                    4 bits, group 32, bias
    Q5_0     32   d | qh 4 | qs 16                                 d*(q - 16)                 5 bits, group 32, none
    Q5_1     32   d | m | qh 4 | qs 16                             d*q + m                    5 bits, group 32, bias
    Q8_0     32   d | qs 32 (int8)                                 d*q, code q + 128          8 bits, group 32, none
    Q2_K    256   scales 16 | qs 64 | d | dmin                     d*sc*q - dmin*mn           2 bits, group 16, bias
    Q3_K    256   hmask 32 | qs 64 | scales 12 | d                 d*sc*(q - 4)               3 bits, group 16, none
    Q4_K    256   d | dmin | scales 12 | qs 128                    d*sc*q - dmin*mn           4 bits, group 32, bias
    Q5_K    256   d | dmin | scales 12 | qh 32 | qs 128            d*sc*q - dmin*mn           5 bits, group 32, bias
    Q6_K    256   ql 128 | qh 64 | scales 16 (int8) | d            d*sc*(q - 32)              6 bits, group 16, none
    IQ4_NL   32   d | qs 16                                        d*book[q]                  4-bit codebook, group 32
    IQ4_XS  256   d | scales_h 2 | scales_l 4 | qs 128             d*sc*book[q]               4-bit codebook, group 32
    MXFP4    32   e | qs 16                                        2**(e-127)*book[q]         4-bit codebook, group 32

    Q4_0, Q4_1, Q5_*, IQ4_*, MXFP4   qs byte j of 16 bytes:   | element 16+j | element j |           (bit 7 ... bit 0)
    Q5_0, Q5_1                       qh byte i:               bit 4 of elements 8i+7 ... 8i
    Q4_K, Q5_K                       qs byte j of 32 bytes:   | element 32+j | element j |
    Q5_K                             qh byte j, bit i:        bit 4 of element 32i+j
    Q2_K, Q3_K                       qs byte j of 32 bytes:   | 96+j | 64+j | 32+j | j |, two bits each
    Q3_K                             hmask byte j, bit i:     bit 2 of element 32i+j
    Q6_K                             ql byte j of 64 bytes:   | element 64+j | element j |, low four bits
                                     qh byte j of 32 bytes:   | 96+j | 64+j | 32+j | j |, bits 4 and 5

The packing of ``scales`` is drawn in ``gguf_levels``. Types with ``sc`` stay two-level: int8 ``scales``
(and ``zeros``; Q2_K's of 4 bits stay packed), float32 ``scale2`` = d (and ``zero2`` = -dmin).

Exactness: every field is kept as stored, so blocks -> weight -> blocks gives identical bytes, and ``dequantize()``
equals ``gguf.quants.dequantize`` bit for bit in float32: ``d*sc`` and ``dmin*mn`` are exact there (11 + 8 bits), the
rest is the same operations in the same order. One exception: an MXFP4 exponent of 255 is NaN here (as OCP MX says)
and 2**128 * book[q] in ggml.

A NaN in d or dmin of a two-level type stays NaN, but its payload bits may change.

Source: ggml-common.h and ggml-quants.c of llama.cpp; the ``gguf`` package.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.formats.gguf_blocks import BLOCK_TYPES, BlockType, pack_rows
from qmm.formats.gguf_header import PLAIN_BYTES, TensorEntry, read_header
from qmm.formats.gguf_write import factors_of
from qmm.weight import QuantizedWeight, bitstream
from qmm.weight.spec import FACTOR_BITS
from qmm.weight.validate import require, whole_number

if TYPE_CHECKING:
    import numpy.typing as npt

SUPPORTED = tuple(BLOCK_TYPES)
PLAIN_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


def block_type(qtype: object) -> BlockType:
    """The table's entry for a name or a ``gguf.GGMLQuantizationType``.

    Raises:
        WeightFormatError: not supported; names the types that are.
    """
    name = getattr(qtype, "name", qtype)
    found = BLOCK_TYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise WeightFormatError(f"qtype: must be one of {', '.join(SUPPORTED)}; got {name!r}")
    return found


def from_blocks(
    raw: Tensor | npt.NDArray[np.uint8], qtype: object, in_features: int | None = None
) -> QuantizedWeight:
    """Blocks of bytes -> weight, exactly.

    Args:
        raw: uint8 ``[N, row_bytes]``, as in the file (on the CPU).
        qtype: name of the block type, or a ``gguf.GGMLQuantizationType``.
        in_features: K, checked against ``row_bytes``; None takes what the row holds.

    Returns:
        A weight on the CPU with K rows and N columns.

    Raises:
        WeightFormatError: an unsupported type, or a shape that does not hold whole blocks.

    Example:
        >>> import torch
        >>> from qmm.formats import gguf
        >>> gguf.from_blocks(torch.zeros(8, 2 * 20, dtype=torch.uint8), "Q4_1").shape
        (64, 8)
    """
    kind = block_type(qtype)
    blocks = _as_bytes(raw)
    row_bytes = blocks.shape[1]
    require(
        row_bytes > 0 and row_bytes % kind.nbytes == 0,
        "raw",
        f"rows must be whole {kind.name} blocks of {kind.nbytes} bytes",
        f"{row_bytes} bytes",
    )
    k = row_bytes // kind.nbytes * kind.size
    if in_features is not None:
        given = whole_number(in_features, "in_features", 1)
        rule = f"must be a multiple of {kind.name}'s block of {kind.size}"
        require(given % kind.size == 0, "in_features", rule, given)
        require(given == k, "in_features", f"must be {k} for rows of {row_bytes} bytes of {kind.name}", given)
    codes, factors = kind.decode(blocks)
    return QuantizedWeight(
        pack_rows(codes, kind.bits),
        _first_level(factors.scale, kind),
        bits=kind.bits,
        group_size=kind.group,
        in_features=k,
        zeros=None if factors.zero is None else _first_level(factors.zero, kind),
        zero_kind=kind.zero_kind,
        scale2=None if factors.scale2 is None else _down(factors.scale2),
        scale2_ratio=None if factors.scale2 is None else kind.groups,
        zero2=None if factors.zero2 is None else _down(factors.zero2),
        zero2_ratio=None if factors.zero2 is None else kind.groups,
        codebook=None
        if kind.codebook is None
        else torch.tensor(kind.codebook, dtype=torch.float32, device="cpu"),
    )


def _first_level(rows: Tensor, kind: BlockType) -> Tensor:
    """Factors ``[N, B, g]`` as the weight keeps them: ``[G, N]``, or words of 4-bit ones."""
    if not kind.levels.packed:
        return _down(rows)
    return bitstream.pack(_down(rows), FACTOR_BITS)


def _down(rows: Tensor) -> Tensor:
    """``[N, ...]`` along rows of the file -> ``[G, N]`` down the weight."""
    if rows.element_size() == 1:  # torch cannot copy every 8-bit float dtype with strides
        return rows.view(torch.uint8).flatten(1).t().contiguous().view(rows.dtype)
    return rows.flatten(1).t().contiguous()


def _as_bytes(raw: object) -> Tensor:
    if isinstance(raw, np.ndarray):
        require(raw.dtype == np.uint8, "raw", "dtype must be uint8", raw.dtype)
        raw = torch.from_numpy(np.array(raw))  # a copy: the file's map is read-only
    require(isinstance(raw, Tensor), "raw", "must be a torch.Tensor or numpy array", type(raw).__name__)
    assert isinstance(raw, Tensor)
    require(raw.dtype == torch.uint8, "raw", "dtype must be uint8", raw.dtype)
    require(raw.dim() == 2, "raw", "must have 2 dimensions [N, row_bytes]", f"shape {list(raw.shape)}")
    require(raw.shape[0] >= 1, "raw", "must have at least one row", raw.shape[0])
    return raw.detach().cpu().contiguous()


def from_tensors(
    tensors: Mapping[str, Tensor | npt.NDArray[np.uint8]], *, qtype: object, in_features: int | None = None
) -> QuantizedWeight:
    """:func:`from_blocks` of ``tensors["blocks"]``, uint8 ``[N, row_bytes]``.

    Raises:
        WeightFormatError: no key ``blocks``, another key, or as :func:`from_blocks`.

    Example:
        >>> import torch, qmm
        >>> from qmm.formats import gguf
        >>> w = qmm.quantize(torch.randn(32, 64), bits=4, group_size=32)
        >>> gguf.from_tensors(gguf.to_tensors(w, qtype="Q4_0"), qtype="Q4_0").shape
        (64, 32)
    """
    require(set(tensors) == {"blocks"}, "tensors", "must have the one key 'blocks'", sorted(tensors))
    return from_blocks(tensors["blocks"], qtype, in_features)


def to_tensors(w: QuantizedWeight, *, qtype: object) -> dict[str, Tensor]:
    """The inverse of :func:`from_tensors`; see :func:`to_blocks`.

    Example:
        >>> import torch, qmm
        >>> from qmm.formats import gguf
        >>> w = qmm.quantize(torch.randn(32, 64), bits=4, group_size=32)
        >>> sorted(gguf.to_tensors(w, qtype="Q4_0"))
        ['blocks']
    """
    return {"blocks": to_blocks(w, qtype)}


def to_blocks(w: QuantizedWeight, qtype: object) -> Tensor:
    """Weight -> blocks of bytes uint8 ``[N, row_bytes]`` on the CPU, where the type expresses the weight exactly.

    A group that is a multiple of the block's and scales in another dtype are fine, as long as each scale is a float16.

    Raises:
        WeightFormatError: the block type cannot hold this weight; says which field and why.
    """
    kind = block_type(qtype)
    factors = factors_of(w, kind)
    return kind.encode(w.unpack().cpu().t().contiguous(), factors)


@dataclass(frozen=True)
class TensorInfo:
    """A quantised matrix of a file: block type, K, N, bytes in the file."""

    qtype: str
    in_features: int
    out_features: int
    nbytes: int


class GGUFFile(Mapping[str, QuantizedWeight]):
    """An open GGUF file: tensor name -> weight, decoded anew at each look, one tensor at a time, memory-mapped.

    Attributes:
        path: the file.
        metadata: its scalars and strings, such as ``general.architecture`` (arrays are left out).
        info: ``{name: TensorInfo}`` of every weight, in the file's order.
        unused: ``{name: reason}`` of every tensor that is not in the mapping.
        plain: those of them that are not quantised; :meth:`plain_tensor` reads them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        data = _map(self.path)
        header = read_header(data, str(self.path))
        self.metadata = header.metadata
        self.info: dict[str, TensorInfo] = {}
        self.unused: dict[str, str] = {}
        self.plain: dict[str, TensorEntry] = {}
        self._raw: dict[str, npt.NDArray[np.uint8]] = {}
        for entry in header.tensors:
            reason = _why_unused(entry)
            if reason is not None:
                self.unused[entry.name] = reason
                if entry.qtype in PLAIN_BYTES:
                    self.plain[entry.name] = entry
                    self._raw[entry.name] = np.frombuffer(data, np.uint8, entry.nbytes or 0, entry.start)
                continue
            (n, k), nbytes = entry.shape, entry.nbytes or 0
            self.info[entry.name] = TensorInfo(entry.qtype, k, n, nbytes)
            self._raw[entry.name] = np.frombuffer(data, np.uint8, nbytes, entry.start).reshape(n, -1)

    def __getitem__(self, name: str) -> QuantizedWeight:
        if name in self.unused:
            raise WeightFormatError(f"{self.path}: tensor {name!r}: {self.unused[name]}")
        return from_blocks(self._raw[name], self.info[name].qtype, self.info[name].in_features)

    def blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a weight as they stand in the file, uint8 ``[N, row_bytes]``, not copied."""
        return self._raw[name]

    def plain_tensor(self, name: str) -> Tensor:
        """A copy of one of ``plain``, sizes outermost first."""
        entry = self.plain[name]
        dtype = PLAIN_DTYPES[entry.qtype]
        if not entry.nbytes:  # no bytes to view
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        return torch.from_numpy(self._raw[name].copy()).view(dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.info)

    def __contains__(self, name: object) -> bool:
        return name in self.info

    def __len__(self) -> int:
        return len(self.info)

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}: {len(self.info)} weights, {len(self.unused)} other tensors)"


def _why_unused(entry: TensorEntry) -> str | None:
    what = f"{entry.qtype} {list(entry.shape)}"
    if entry.qtype in PLAIN_BYTES:
        return f"not quantised: {what}"
    if entry.qtype not in BLOCK_TYPES:
        return f"unsupported block type {what} (supported: {', '.join(SUPPORTED)})"
    if len(entry.shape) != 2:
        experts = " (stacks of experts are not supported yet)" if len(entry.shape) == 3 else ""
        return f"must have 2 dimensions{experts}; got {what}"
    return f"empty: {what}" if 0 in entry.shape else None


def _map(path: Path) -> bytes | mmap.mmap:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:  # nothing can be mapped
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def read(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file; reads its header only. Needs no other package.

    Raises:
        OSError: the file cannot be opened.
        WeightFormatError: not a GGUF file, truncated, or damaged. (A tensor of an unsupported type is no error: it
            stands in ``unused``, and asking for it raises.)

    Example::

        from qmm.formats import gguf

        weights = gguf.read("model.gguf")
        c = qmm.matmul(a, weights["blk.0.ffn_up.weight"])
    """
    return GGUFFile(path)
