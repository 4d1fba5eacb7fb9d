"""The fragment layout: one prepared form of a weight that every tensor-core kernel here streams as it lies.

A tile is 64 columns (n) by one block of k: 64 rows of 4-bit codes or 32 rows of 8-bit codes, 2048 bytes. Tiles lie
``[N/64][K/block]``, so that a kernel walking K reads one stream. Inside a tile::

    strip (4)  lane = g*4 + quad (32)  16 bytes a lane:  k8 (2)  r8 (2)  k0 (2)  nibble j (4) or byte j (2)

    n = strip*16 + r8*8 + g            k = j*16 + k8*8 + quad*2 + k0

which is the operand order of ``mma.m16n8k16`` and of ``wgmma`` with the weight as its 16-row (64-row) operand: lane
``g*4 + quad`` of warp ``strip`` finds its own fragments, for ``block/16`` products, in 16 bytes of its own. Four bits:
the 16-bit unit (k8, r8, k0) holds the codes of j = 0..3 from bit 0 up, so two units side by side in a register give a
pair (k0 = 0, 1) for every j by one mask. Eight bits: units are 16 bits wide too, j = 0, 1 from bit 0 up.

Scales and zero points are ``[G, N]`` with the 64 columns of a tile in the order ``g, strip, r8``: a lane's values for
one group are neighbours. N is padded up to 64 and K up to the block, with code 2**(bits-1), scale 0 and zero 0.

Act-order: rows of K lie sorted by group, equal ones in their old order, so that the groups are consecutive rows again;
``order[i]`` is the old place of row i, and A's columns are gathered by it (gather.py). Each group must have group_size
rows (but for a short last one): then ``g_idx[order[i]] = i // group_size``, and nothing else is kept of ``g_idx``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qmm.backend import PreparedLayout
from qmm.weight import ZeroKind
from qmm.weight.bitstream import pack, unpack
from qmm.weight.spec import words_for

if TYPE_CHECKING:
    from qmm.weight import QuantizedWeight, WeightSpec

TILE_N = 64
_CODES_AT_ONCE = 1 << 26


def block_k(bits: int) -> int:
    """Rows of K in a tile."""
    return 256 // bits


def _pack_block(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 ``[K, N]`` as int16 units ``[N/64, K/block, 4, 32, 8]``, padded with code 2**(bits-1)."""
    k, n = codes.shape
    block, per_unit = block_k(bits), 16 // bits
    tiles_k, tiles_n = -(-k // block), -(-n // TILE_N)
    padded = codes.new_full((tiles_k * block, tiles_n * TILE_N), 1 << (bits - 1))
    padded[:k, :n] = codes
    #                   kb       j        k8 quad k0 nb      strip r8 g
    x = padded.view(tiles_k, per_unit, 2, 4, 2, tiles_n, 4, 2, 8)
    x = x.permute(5, 0, 6, 8, 3, 2, 7, 4, 1)  # nb kb strip g quad k8 r8 k0 j
    if bits == 8:
        return x.contiguous().view(torch.int16).view(tiles_n, tiles_k, 4, 32, 8)
    pairs = x.contiguous().view(tiles_n, tiles_k, 4, 32, 8, 2, 2)
    nibbles = pairs[..., 0] | pairs[..., 1] << 4
    return nibbles.contiguous().view(torch.int16).view(tiles_n, tiles_k, 4, 32, 8)


def _unpack_block(units: Tensor, bits: int, k: int, n: int) -> Tensor:
    """The exact inverse of :func:`_pack_block`: uint8 ``[K, N]``."""
    tiles_n, tiles_k = units.shape[:2]
    per_unit = 16 // bits
    raw = units.view(torch.uint8)
    x = raw if bits == 8 else torch.stack([raw & 15, raw >> 4], -1)
    x = x.reshape(tiles_n, tiles_k, 4, 8, 4, 2, 2, 2, per_unit)  # nb kb strip g quad k8 r8 k0 j
    x = x.permute(1, 8, 5, 4, 7, 0, 2, 6, 3)  # kb j k8 quad k0 nb strip r8 g
    return x.reshape(tiles_k * block_k(bits), tiles_n * TILE_N)[:k, :n].contiguous()


def pack_fragments(qweight: Tensor, bits: int, k: int, order: Tensor | None = None) -> Tensor:
    """Canonical words ``[ceil(K*bits/32), N]`` in fragment order, some columns at a time to save memory.

    ``order``: the row of K that each row of the result is, or None for the same.
    """
    n = qweight.shape[1]
    shape = (-(-n // TILE_N), -(-k // block_k(bits)), 4, 32, 8)
    packed = torch.empty(shape, dtype=torch.int16, device=qweight.device)
    step = _columns_at_once(k)
    for start in range(0, n, step):
        codes = unpack(qweight[:, start : start + step], bits, k)
        if order is not None:
            codes = codes.index_select(0, order)
        packed[start // TILE_N : -(-min(n, start + step) // TILE_N)] = _pack_block(codes, bits)
    return packed


def unpack_fragments(packed: Tensor, bits: int, k: int, n: int, order: Tensor | None = None) -> Tensor:
    """The exact inverse of :func:`pack_fragments`."""
    qweight = torch.empty(words_for(k, bits), n, dtype=torch.int32, device=packed.device)
    step = _columns_at_once(k)
    for start in range(0, n, step):
        stop = min(n, start + step)
        codes = _unpack_block(packed[start // TILE_N : -(-stop // TILE_N)], bits, k, stop - start)
        if order is not None:
            codes = torch.empty_like(codes).index_copy_(0, order.long(), codes)
        qweight[:, start:stop] = pack(codes, bits)
    return qweight


def _columns_at_once(k: int) -> int:
    return max(1, _CODES_AT_ONCE // (k * TILE_N)) * TILE_N


def permute_columns(values: Tensor) -> Tensor:
    """``[G, N]`` padded to 64 columns with zeros, each 64 in the order ``g, strip, r8``."""
    rows, n = values.shape
    tiles_n = -(-n // TILE_N)
    padded = values.new_zeros(rows, tiles_n * TILE_N)
    padded[:, :n] = values
    return padded.view(rows, tiles_n, 4, 2, 8).permute(0, 1, 4, 2, 3).reshape(rows, -1)


def restore_columns(values: Tensor, n: int) -> Tensor:
    """The exact inverse of :func:`permute_columns`."""
    rows = values.shape[0]
    return values.view(rows, -1, 8, 4, 2).permute(0, 1, 3, 4, 2).reshape(rows, -1)[:, :n].contiguous()


class FragmentLayout(PreparedLayout):
    """A weight in fragment order.

    Attributes:
        spec: facts of the weight.
        words: int16 ``[N/64, K/block, 4, 32, 8]``.
        scales: as stored, ``[G, ceil64(N)]``, columns permuted.
        zeros: ``[G, ceil64(N)]``, columns permuted; int kind: float16, which holds them exactly; float and bias
            kind: as stored; or None.
        order: int32 ``[K]`` with act-order, or None.
    """

    layout = "fragments"

    def __init__(self, w: QuantizedWeight) -> None:
        t = w.tensors
        self._hold(w.spec, *self._fill(w.spec, t.qweight, t.scales, t.zeros, t.g_idx))

    @classmethod
    def of(cls, spec: WeightSpec, tensors: Mapping[str, Tensor]) -> FragmentLayout:
        """The layout whose tensors these are."""
        made = object.__new__(cls)
        made._hold(spec, tensors["words"], tensors["scales"], tensors.get("zeros"), tensors.get("order"))
        return made

    def _hold(
        self, spec: WeightSpec, words: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None
    ) -> None:
        self.spec, self.words, self.scales, self.zeros, self.order = spec, words, scales, zeros, order
        # what launch.py remembers for this weight, no values of it: compiled kernels, and calls that were made before
        self.launches: dict[Any, Any] = {}
        self.again: dict[int, Any] = {}

    @staticmethod
    def _fill(
        s: WeightSpec, qweight: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        order = None if g_idx is None else torch.argsort(g_idx, stable=True).to(torch.int32)
        words = pack_fragments(qweight, s.bits, s.in_features, order)
        if zeros is not None:
            if s.zero_kind is ZeroKind.INT:
                zeros = unpack(zeros, s.bits, s.groups).to(torch.float16)
            zeros = permute_columns(zeros)
        return words, permute_columns(scales), zeros, order

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        found = {"words": self.words, "scales": self.scales, "zeros": self.zeros, "order": self.order}
        return {name: t for name, t in found.items() if t is not None}

    def restore(self) -> Mapping[str, Tensor | None]:
        s = self.spec
        zeros = self.zeros
        if zeros is not None:
            zeros = restore_columns(zeros, s.out_features)
            if s.zero_kind is ZeroKind.INT:
                zeros = pack(zeros.to(torch.uint8), s.bits)
        found = {
            "qweight": unpack_fragments(self.words, s.bits, s.in_features, s.out_features, self.order),
            "scales": restore_columns(self.scales, s.out_features),
            "zeros": zeros,
        }
        if self.order is not None:
            groups = torch.arange(s.in_features, dtype=torch.int32, device=self.order.device) // s.group_size
            found["g_idx"] = torch.empty_like(groups).index_copy_(0, self.order.long(), groups)
        return found

    def refill(self, canonical: Mapping[str, Tensor | None]) -> None:
        qweight, scales = canonical["qweight"], canonical["scales"]
        assert qweight is not None and scales is not None
        filled = self._fill(self.spec, qweight, scales, canonical["zeros"], canonical.get("g_idx"))
        for mine, new in zip((self.words, self.scales, self.zeros, self.order), filled, strict=True):
            if mine is not None and new is not None:
                mine.copy_(new)
