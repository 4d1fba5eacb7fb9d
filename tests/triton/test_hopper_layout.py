"""The fragment layout: where every code lies, by formulas that share nothing with the module; and back, bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qmm import Backend, QuantizedWeight, WeightFormatError
from qmm.backends.triton_gpu.hopper import layout
from qmm.backends.triton_gpu.hopper.layout import (
    FragmentLayout,
    block_k,
    pack_fragments,
    permute_columns,
    restore_columns,
    unpack_fragments,
)
from qmm.testing import Case, make_weight
from qmm.weight import ZeroKind
from qmm.weight.bitstream import pack

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
TILE_BYTES = 2048
both_widths = pytest.mark.parametrize("bits", [4, 8])
SHAPES = [(64, 64), (1, 1), (31, 65), (128, 64), (70, 130)]


def random_codes(k: int, n: int, bits: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (k, n), generator=generator, dtype=torch.uint8)


def bytes_of(packed: Tensor) -> np.ndarray:
    return packed.contiguous().view(-1).numpy().view(np.uint8)


def place(k: int, n: int, bits: int, tiles_k: int) -> tuple[int, int]:
    """(byte, bit in it) of code (k, n), from the words of the module's docstring."""
    block = 256 // bits
    nb, kb = n // 64, k // block
    strip, r8, g = n % 64 // 16, n % 16 // 8, n % 8
    j, k8, quad, k0 = k % block // 16, k % 16 // 8, k % 8 // 2, k % 2
    lane = g * 4 + quad
    unit = k8 * 4 + r8 * 2 + k0
    bit = j * bits
    return (nb * tiles_k + kb) * TILE_BYTES + strip * 512 + lane * 16 + unit * 2 + bit // 8, bit % 8


@both_widths
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_every_code_lies_where_the_docstring_says(k: int, n: int, bits: int) -> None:
    """All places are found, each once, and the rest of every tile is the code of weight 0."""
    codes = random_codes(k, n, bits)
    tiles_k, tiles_n = -(-k * bits // 256), -(-n // 64)
    expected = np.full(tiles_n * tiles_k * TILE_BYTES, 0x88 if bits == 4 else 0x80, np.uint8)
    mask = (1 << bits) - 1
    places = set()
    for row, column in np.ndindex(k, n):
        byte, bit = place(row, column, bits, tiles_k)
        places.add((byte, bit))
        expected[byte] = expected[byte] & ~np.uint8(mask << bit) | np.uint8(int(codes[row, column]) << bit)
    assert len(places) == k * n
    packed = pack_fragments(pack(codes, bits), bits, k)
    assert packed.dtype == torch.int16 and packed.shape == (tiles_n, tiles_k, 4, 32, 8)
    np.testing.assert_array_equal(bytes_of(packed), expected)


@both_widths
@pytest.mark.parametrize(("k", "n"), [*SHAPES, (859, 57), (4096, 192), (2049, 321)])
def test_round_trip(k: int, n: int, bits: int) -> None:
    words = pack(random_codes(k, n, bits), bits)
    packed = pack_fragments(words, bits, k)
    assert torch.equal(unpack_fragments(packed, bits, k, n), words)


def origins(bits: int) -> Iterator[tuple[tuple[int, int, int, int], tuple[int, int]]]:
    """((strip, lane, unit, j), (k, n)) of every field of one tile, read off packings of digits of k * 64 + n."""
    block = block_k(bits)
    number = torch.arange(block * 64).view(block, 64)
    found = np.zeros((4, 32, 8, 16 // bits), np.int64)
    for digit in range(0, 12, bits):
        codes = (number >> digit & (1 << bits) - 1).to(torch.uint8)
        units = pack_fragments(pack(codes, bits), bits, block)[0, 0].numpy().view(np.uint16)
        for j in range(16 // bits):
            found[..., j] |= (units >> (j * bits) & (1 << bits) - 1).astype(np.int64) << digit
    for at in np.ndindex(found.shape):
        yield at, divmod(int(found[at]), 64)  # type: ignore[misc]


# Lane 6 of strip 1, g = 1 and quad = 2, as it lies in memory: unit by unit, each from its highest field to bit 0.
DRAWN = {
    4: """
    k 52 36 20  4 of column 17    k 53 37 21  5 of column 17
    k 52 36 20  4 of column 25    k 53 37 21  5 of column 25
    k 60 44 28 12 of column 17    k 61 45 29 13 of column 17
    k 60 44 28 12 of column 25    k 61 45 29 13 of column 25
    """,
    8: """
    k 20  4 of column 17    k 21  5 of column 17
    k 20  4 of column 25    k 21  5 of column 25
    k 28 12 of column 17    k 29 13 of column 17
    k 28 12 of column 25    k 29 13 of column 25
    """,
}


@both_widths
def test_a_lane_drawn(bits: int) -> None:
    origin = dict(origins(bits))
    units = []
    for unit in range(8):
        fields = [origin[1, 6, unit, j] for j in reversed(range(16 // bits))]
        (column,) = {n for _, n in fields}
        units.append("k " + " ".join(f"{k:2d}" for k, _ in fields) + f" of column {column}")
    drawn = "\n".join(f"    {a}    {b}" for a, b in zip(units[::2], units[1::2], strict=True))
    assert drawn.strip("\n") == DRAWN[bits].strip("\n").rstrip()


@both_widths
def test_units_are_the_operand_of_mma_m16n8k16(bits: int) -> None:
    """The PTX manual's table: element i of lane holds row g (+ 8 for i in 2, 3, 6, 7), column 2 quad + i % 2 (+ 8)."""
    for (strip, lane, unit, j), (k, n) in origins(bits):
        row = lane // 4 + (8 if unit in (2, 3, 6, 7) else 0)
        column = lane % 4 * 2 + unit % 2 + (8 if unit >= 4 else 0)
        assert (n, k) == (strip * 16 + row, j * 16 + column)


@both_widths
@pytest.mark.parametrize("columns", [1, 64, 100, 128])
def test_packing_in_blocks_of_columns(columns: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    k, n = 130, 333
    words = pack(random_codes(k, n, bits), bits)
    at_once = pack_fragments(words, bits, k)
    monkeypatch.setattr(layout, "_CODES_AT_ONCE", k * columns)
    assert torch.equal(pack_fragments(words, bits, k), at_once)
    assert torch.equal(unpack_fragments(at_once, bits, k, n), words)


@pytest.mark.parametrize("n", [1, 8, 63, 64, 65, 200])
def test_columns_of_factors(n: int) -> None:
    """Column n of a tile stands at g * 8 + strip * 2 + r8; columns that are not there are 0."""
    values = torch.arange(1, 3 * n + 1, dtype=FLOAT).view(3, n)
    permuted = permute_columns(values)
    assert permuted.shape == (3, -(-n // 64) * 64) and permuted.is_contiguous()
    expected = torch.zeros_like(permuted)
    for column in range(n):
        tile, inside = divmod(column, 64)
        expected[:, tile * 64 + inside % 8 * 8 + inside // 16 * 2 + inside // 8 % 2] = values[:, column]
    assert torch.equal(permuted, expected)
    assert torch.equal(restore_columns(permuted, n), values)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def weight(case: Case, seed: int = 0) -> QuantizedWeight:
    w = make_weight(case, np.random.default_rng(seed))
    if seed:  # values that a conversion on the way would change
        w.tensors.scales[0, :3] = torch.tensor([float("nan"), float("-inf"), -0.0]).to(w.tensors.scales.dtype)
    return w


CASES = [
    Case(k=k, n=n, bits=bits, group_size=group, zero_kind=kind, scale_dtype=scale)
    for bits, k, n, group in [(4, 200, 130, 64), (8, 77, 9, 32), (4, 96, 64, -1)]
    for kind in ZeroKind
    for scale in (HALF, BF16, FLOAT)
]
CASES += [
    Case(k=k, n=n, bits=bits, group_size=group, act_order="even")
    for bits, k, n, group in [(4, 200, 130, 64), (8, 77, 9, 32), (4, 96, 64, -1)]
]
FIELDS = ("qweight", "scales", "zeros", "g_idx")
cases = pytest.mark.parametrize("case", CASES, ids=str)


@cases
def test_restore_is_bit_for_bit(case: Case) -> None:
    w = weight(case, seed=1)
    restored = FragmentLayout(w).restore()
    for name in FIELDS:
        assert same_bits(restored.get(name), getattr(w.tensors, name)), name


@cases
def test_refill_keeps_the_storage(case: Case) -> None:
    prepared, other = FragmentLayout(weight(case)), weight(case, seed=2)
    before = {name: t.data_ptr() for name, t in prepared.tensors.items()}
    prepared.refill({name: getattr(other.tensors, name) for name in FIELDS})
    assert {name: t.data_ptr() for name, t in prepared.tensors.items()} == before
    fresh = FragmentLayout(other).tensors
    assert all(same_bits(t, fresh[name]) for name, t in prepared.tensors.items())


@cases
def test_memory_is_codes_and_factors_only(case: Case) -> None:
    w = weight(case)
    prepared = FragmentLayout(w)
    groups, columns = w.spec.groups, -(-case.n // 64) * 64
    codes = columns * -(-case.k // block_k(case.bits)) * block_k(case.bits) * case.bits // 8
    factors = groups * columns * w.spec.scale_dtype.itemsize
    if case.zero_kind is not ZeroKind.NONE:
        factors += groups * columns * 2  # float16: as stored, or what holds the integers
    order = 4 * case.k if case.act_order else 0
    assert prepared.nbytes == codes + factors + order
    assert sum(t.untyped_storage().nbytes() for t in prepared.tensors.values()) == prepared.nbytes
    assert not any(isinstance(v, Tensor) for v in prepared.launches.values())


def test_integer_zeros_are_exact() -> None:
    """float16 holds every zero point of 8 bits."""
    codes, zeros = random_codes(32, 256, 8), torch.arange(256, dtype=torch.int32).view(1, 256)
    w = QuantizedWeight.from_codes(codes, torch.ones(1, 256, dtype=HALF), zeros, bits=8, group_size=32)
    prepared = FragmentLayout(w)
    assert prepared.zeros is not None and prepared.zeros.dtype == HALF
    assert torch.equal(restore_columns(prepared.zeros, 256), zeros.to(HALF))


@pytest.mark.parametrize(("k", "group"), [(200, 64), (77, 32), (96, 96)])
def test_act_order_sorts_rows_by_group(k: int, group: int) -> None:
    """Row i of the layout is row order[i] of the weight, of group i // group_size; equal groups keep their order."""
    w = weight(Case(k=k, n=70, group_size=group, act_order="even"))
    prepared, g_idx = FragmentLayout(w), w.g_idx
    assert g_idx is not None and prepared.order is not None and prepared.order.dtype == torch.int32
    order = sorted(range(k), key=lambda row: int(g_idx[row]))  # stable
    assert prepared.order.tolist() == order
    assert [int(g_idx[row]) for row in order] == [i // group for i in range(k)]
    sorted_codes = w.unpack()[order]
    assert torch.equal(prepared.words, pack_fragments(pack(sorted_codes, 4), 4, k))


class Fragments(Backend):
    """A backend that prepares this layout on any device."""

    name = "fragments"
    kernels = ()

    def environment(self) -> list[Any]:
        return []

    def prepare(self, w: QuantizedWeight) -> FragmentLayout | None:
        return FragmentLayout(w) if w.even_groups else None

    def run(self, *args: Any) -> None:
        raise NotImplementedError


def even(seed: int = 0) -> QuantizedWeight:
    return weight(Case(k=96, n=24, group_size=32, act_order="even"), seed)


def test_released_act_order_weight_comes_back() -> None:
    """state_dict, pickle, copies and slices see the canonical weight; ``copy_`` fills the released storage."""
    w, other = even(), even(2)
    expected = w.clone()
    w.prepare_for(Fragments(), release=True)
    assert w.state == "released: fragments" and w.even_groups
    state = w.state_dict()
    assert all(same_bits(state[name], t) for name, t in expected.state_dict().items())
    for copied in (pickle.loads(pickle.dumps(w)), copy.deepcopy(w), w.clone()):
        assert copied.even_groups and torch.equal(copied.dequantize(), expected.dequantize())
    assert torch.equal(w[:, 3:9].dequantize(), expected.dequantize()[:, 3:9])
    w.copy_(other)
    assert w.state == "released: fragments"
    assert all(same_bits(w.state_dict()[name], t) for name, t in other.state_dict().items())


def uneven() -> QuantizedWeight:
    w = even()
    g_idx = w.g_idx.clone()
    g_idx[int((g_idx == 0).nonzero()[0])] = 1  # 31, 33 and 32 rows
    return QuantizedWeight.from_codes(
        w.unpack(), w.scales, w.unpack_zeros(), bits=4, group_size=32, g_idx=g_idx
    )


def test_uneven_groups_are_refused_by_a_prepared_weight() -> None:
    w, backend = even(), Fragments()
    before = w.clone()
    w.prepare_for(backend)
    with pytest.raises(WeightFormatError, match="other: must have 32 rows in each group"):
        w.copy_(uneven())
    assert torch.equal(w.dequantize(), before.dequantize())
    assert not w.restore().copy_(uneven()).even_groups  # no layout left that relies on it
    assert w.prepare_for(backend) is None
    assert w.copy_(before).even_groups and w.prepare_for(backend) is not None  # asked anew


@pytest.mark.parametrize(
    ("k", "group", "groups", "g_idx", "expected"),
    [
        (4, 2, 2, [0, 1, 1, 0], True),
        (5, 2, 3, [0, 1, 2, 1, 0], True),  # a short last group
        (5, 2, 3, [0, 2, 2, 1, 0], False),  # a short one that is not the last
        (4, 2, 3, [0, 1, 1, 0], True),  # a row of scales that no row of K uses
        (4, 2, 3, [0, 2, 2, 0], False),
        (3, 8, 1, [0, 0, 0], True),
        (4, 2, 2, [1, 1, 1, 1], False),
    ],
)
def test_even_groups(k: int, group: int, groups: int, g_idx: list[int], expected: bool) -> None:
    scales = torch.ones(groups, 1, dtype=HALF)
    w = QuantizedWeight.from_codes(
        random_codes(k, 1, 4), scales, bits=4, group_size=group, g_idx=torch.tensor(g_idx)
    )
    assert w.even_groups is expected
    assert w.to("meta").even_groups is False and w.clone().even_groups is expected
    assert weight(Case()).to("meta").even_groups  # without act-order no value can break it
