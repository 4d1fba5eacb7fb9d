"""Every way to make a weight gives the same numbers as the independent oracle, or as the peers' own readers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

import qmm
from qmm import QuantizedWeight, ZeroKind
from qmm.testing import CASES, Case, make_weight, oracle

HALF = torch.float16
WEIGHTS = list(dict.fromkeys(str(c) for c in CASES))
BY_ID = {str(c): c for c in CASES}


def made(case: Case) -> QuantizedWeight:
    return make_weight(case, np.random.default_rng(case.seed))


# dequantize


@pytest.mark.parametrize("ident", WEIGHTS)
def test_dequantize_is_what_the_oracle_says(ident: str) -> None:
    w = made(BY_ID[ident])
    value, size = oracle.dequantize(w)
    got = w.dequantize()
    assert got.dtype == torch.float32 and tuple(got.shape) == value.shape == w.shape
    assert (np.abs(got.double().numpy() - value) <= size * 2.0**-22).all()


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, torch.float64], ids=str)
def test_dequantize_rounds_once(dtype: torch.dtype) -> None:
    w = made(Case(k=70, n=9))
    assert torch.equal(w.dequantize(dtype), w.dequantize().to(dtype))


def test_dequantize_in_blocks_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    w = made(Case(k=70, n=23))
    whole = w.dequantize()
    monkeypatch.setattr("qmm.weight.quantized_weight._BLOCK_CODES", 70 * 4)
    assert torch.equal(w.dequantize(), whole)


@pytest.mark.parametrize("bad", [torch.int8, "float16", None], ids=str)
def test_dequantize_to_no_float(bad: object) -> None:
    with pytest.raises(TypeError, match=r"dtype: must be a floating torch\.dtype; got"):
        made(Case()).dequantize(bad)  # type: ignore[arg-type]


def test_hand_computed_values() -> None:
    """Each kind of zero, by hand: codes 1 and 14, s = 0.5."""
    codes, scales = torch.tensor([[1], [14]]), torch.tensor([[0.5]], dtype=HALF)

    def values(zeros: Tensor | None = None, **options: object) -> list[float]:
        w = QuantizedWeight.from_codes(codes, scales, zeros, bits=4, group_size=2, **options)  # type: ignore[arg-type]
        return w.dequantize()[:, 0].tolist()

    assert values() == [-3.5, 3.0]
    assert values(torch.tensor([[3]])) == [-1.0, 5.5]
    assert values(torch.tensor([[2.5]], dtype=HALF)) == [-0.75, 5.75]
    assert values(torch.tensor([[2.5]], dtype=HALF), zero_kind="bias") == [3.0, 9.5]
    assert values(codebook=torch.arange(16.0) ** 2) == [0.5, 98.0]
    assert values(scale2=torch.tensor([4.0])) == [-14.0, 12.0]


def test_float_zero_is_not_rounded() -> None:
    """HQQ: z = 7.37, s = 0.05; rounding z would cost 0.37 of a step (CASES 36)."""
    zeros = torch.tensor([[7.37]])
    w = QuantizedWeight.from_codes(
        torch.arange(16)[:, None], torch.tensor([[0.05]]), zeros, bits=4, group_size=16
    )
    assert w.zero_kind is ZeroKind.FLOAT
    np.testing.assert_allclose(w.dequantize()[:, 0].numpy(), (np.arange(16) - 7.37) * 0.05, rtol=1e-5)


# from_codes


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 70])
def test_from_codes_keeps_codes_and_zeros(bits: int, rows: int) -> None:
    rng = np.random.default_rng(bits)
    codes = torch.from_numpy(rng.integers(0, 1 << bits, (rows, 5)))
    groups = -(-rows // 4)
    zeros = torch.from_numpy(rng.integers(0, 1 << bits, (groups, 5)))
    w = QuantizedWeight.from_codes(codes, torch.ones(groups, 5, dtype=HALF), zeros, bits=bits, group_size=4)
    assert torch.equal(w.unpack().long(), codes) and torch.equal(w.unpack_zeros().long(), zeros)  # type: ignore[union-attr]
    assert w.spec.groups == groups and w.zero_kind is ZeroKind.INT and w.zeros.shape[0] == w.spec.zero_words  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int16, torch.int64, torch.uint16, torch.uint32, torch.uint64],
    ids=str,
)
def test_any_integer_dtype(dtype: torch.dtype) -> None:
    codes = torch.arange(64).remainder(16).view(32, 2)
    scales, zeros = torch.ones(2, 2, dtype=HALF), torch.tensor([[1, 2], [3, 4]])
    g_idx = torch.arange(32).remainder(2)
    plain = QuantizedWeight.from_codes(codes, scales, zeros, bits=4, group_size=16, g_idx=g_idx)
    other = QuantizedWeight.from_codes(
        codes.to(dtype), scales, zeros.to(dtype), bits=4, group_size=16, g_idx=g_idx.to(dtype)
    )
    assert torch.equal(plain.dequantize(), other.dequantize())


def test_group_size_minus_one_is_k() -> None:
    w = QuantizedWeight.from_codes(
        torch.ones(40, 3, dtype=torch.int64), torch.ones(1, 3), bits=4, group_size=-1
    )
    assert w.group_size == 40 and w.spec.groups == 1


def test_group_larger_than_k() -> None:
    w = QuantizedWeight.from_codes(
        torch.ones(40, 3, dtype=torch.int64), torch.ones(1, 3), bits=4, group_size=64
    )
    assert w.group_size == 64 and w.spec.groups == 1


def test_act_order_reads_the_group_of_each_row() -> None:
    codes = torch.full((4, 1), 9)
    scales = torch.tensor([[1.0], [10.0], [100.0]])
    w = QuantizedWeight.from_codes(codes, scales, bits=4, group_size=2, g_idx=torch.tensor([2, 0, 1, 0]))
    assert w.dequantize()[:, 0].tolist() == [100.0, 1.0, 10.0, 1.0]
    assert w.spec.groups == 3 and w.spec.act_order


def test_numpy_integers_are_integers() -> None:
    codes = torch.ones(32, 2, dtype=torch.int64)
    w = QuantizedWeight.from_codes(codes, torch.ones(1, 2), bits=np.int64(4), group_size=np.int32(-1))  # type: ignore[arg-type]
    assert type(w.bits) is int and w.group_size == 32


# from_seed


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_from_seed(bits: int) -> None:
    """The seed kernel's own unpacking, ``(word >> shift) & mask``, one element at a time."""
    rng = np.random.default_rng(bits)
    per_word = 32 // bits
    k, n, group = per_word * 8, 3, 8
    groups = k // group
    qw = rng.integers(-(2**31), 2**31, (k // per_word, n), dtype=np.int32)
    qz = rng.integers(-(2**31), 2**31, (groups // per_word, n), dtype=np.int32)
    scales = torch.from_numpy(rng.uniform(0.5, 2, (groups, n))).half()
    w = QuantizedWeight.from_seed(
        torch.from_numpy(qw), scales, torch.from_numpy(qz), w_bit=bits, group_size=group
    )
    mask = (1 << bits) - 1
    for row in range(k):
        for column in range(n):
            g = row // group
            code = int(qw[row // per_word, column]) >> (row % per_word * bits) & mask
            zero = int(qz[g // per_word, column]) >> (g % per_word * bits) & mask
            assert w.dequantize()[row, column] == (code - zero) * float(scales[g, column])
    assert w.qweight.data_ptr() != 0 and torch.equal(w.qweight, torch.from_numpy(qw))


def test_from_seed_symmetric() -> None:
    qw = torch.tensor([[0x7FFFFFFF]], dtype=torch.int32)
    w = QuantizedWeight.from_seed(qw, torch.ones(1, 1, dtype=HALF), None, w_bit=4, group_size=-1)
    assert w.dequantize()[:, 0].tolist() == [7.0] * 7 + [-1.0]


# what the constructor keeps


def test_tensors_are_kept_where_they_can_be() -> None:
    qweight, scales = torch.zeros(4, 8, dtype=torch.int32), torch.ones(1, 8)
    w = QuantizedWeight(qweight, scales, bits=4, group_size=32, in_features=32)
    assert w.qweight.data_ptr() == qweight.data_ptr() and w.scales.data_ptr() == scales.data_ptr()


def test_expanded_and_strided_tensors_become_contiguous() -> None:
    qweight = torch.arange(64, dtype=torch.int32).view(8, 8).t()[:, ::2]
    scales = torch.tensor([[2.0]]).expand(2, 4)
    w = QuantizedWeight(qweight, scales, bits=4, group_size=32, in_features=64)
    assert (
        w.qweight.is_contiguous() and w.scales.is_contiguous() and w.scales.untyped_storage().nbytes() == 32
    )
    assert torch.equal(w.qweight, qweight) and torch.equal(w.scales, scales)


def test_tensors_that_share_storage_are_parted() -> None:
    buffer = torch.zeros(6, 8, dtype=torch.int32)
    w = QuantizedWeight(
        buffer[:4], torch.ones(2, 8), bits=4, group_size=16, in_features=32, zeros=buffer[4:5]
    )
    assert w.qweight.untyped_storage().data_ptr() != w.zeros.untyped_storage().data_ptr()  # type: ignore[union-attr]


def test_uint32_words_are_viewed() -> None:
    """CASES 39: torch has no shifts for uint32."""
    words = torch.tensor([[0xFFFFFFFF], [0x90000000]], dtype=torch.uint32)
    w = QuantizedWeight(words, torch.ones(1, 1), bits=4, group_size=16, in_features=16)
    assert w.qweight.dtype == torch.int32 and w.unpack()[:, 0].tolist() == [15] * 8 + [0] * 7 + [9]


def test_lazily_negated_scales_are_made_plain() -> None:
    scales = torch.view_as_complex(torch.full((1, 4, 2), 2.0)).conj().imag
    assert scales.is_neg()
    w = QuantizedWeight(torch.zeros(4, 4, dtype=torch.int32), scales, bits=4, group_size=32, in_features=32)
    assert not w.scales.is_neg() and w.scales.tolist() == [[-2.0] * 4]


def test_a_gradient_is_left_behind() -> None:
    scales = torch.ones(1, 8, requires_grad=True)
    w = QuantizedWeight(torch.zeros(4, 8, dtype=torch.int32), scales, bits=4, group_size=32, in_features=32)
    assert not w.scales.requires_grad


def test_no_values_are_looked_at_on_meta() -> None:
    """g_idx out of range cannot be seen there, and nothing fails."""
    w = QuantizedWeight(
        torch.empty(4, 8, dtype=torch.int32, device="meta"),
        torch.empty(1, 8, device="meta"),
        bits=4,
        group_size=32,
        in_features=32,
        g_idx=torch.empty(32, dtype=torch.int32, device="meta"),
    )
    assert w.device.type == "meta" and w.dequantize().shape == (32, 8) and not w.fits_float16


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        w = QuantizedWeight(
            torch.empty(4, 8, dtype=torch.int32), torch.empty(1, 8), bits=4, group_size=32, in_features=32
        )
        assert tuple(w.dequantize().shape) == (32, 8)
        assert "int4" in repr(w)
        out = torch.empty(3, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where the address of a fake tensor is asked for
            assert qmm.matmul(torch.empty(3, 32), w, out=out) is out
            assert tuple(qmm.matmul(torch.empty(2, 3, 32), w, activation="gelu").shape) == (2, 3, 8)


@pytest.mark.parametrize(
    ("scale", "fits"),
    [(1.0, True), (8188.0, True), (8190.0, False), (float("nan"), False), (float("inf"), False)],
)
def test_fits_float16(scale: float, fits: bool) -> None:
    """8 * 8188 = 65504, the largest float16."""
    w = QuantizedWeight.from_codes(
        torch.zeros(32, 1, dtype=torch.int64), torch.tensor([[scale]]), bits=4, group_size=32
    )
    assert w.fits_float16 is fits


@pytest.mark.parametrize("ident", WEIGHTS[::5])
def test_fits_float16_never_lies(ident: str) -> None:
    w = made(BY_ID[ident])
    assert w.fits_float16 == (w._bound <= 65504)
    assert np.abs(oracle.dequantize(w)[0]).max() <= w._bound * (1 + 1e-6)
