"""Saving, copying, moving, slicing and joining: nothing changes a bit of the weight's meaning."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

import qmm
from qmm import QuantizedWeight, WeightFormatError, ZeroKind
from qmm.testing import Case, make_weight

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
CASES = {
    "symmetric": Case(zero_kind=ZeroKind.NONE),
    "int zeros": Case(bits=3, group_size=16),
    "float zeros": Case(bits=5, zero_kind=ZeroKind.FLOAT, scale_dtype=BF16),
    "bias, two levels": Case(
        k=100, group_size=16, zero_kind=ZeroKind.BIAS, scale_dtype=torch.int8, two_level="rows"
    ),
    "4-bit factors": Case(
        k=180, group_size=16, zero_kind=ZeroKind.BIAS, scale_dtype=torch.uint4, two_level="rows"
    ),
    "e4m3, one factor": Case(zero_kind=ZeroKind.NONE, scale_dtype=torch.float8_e4m3fn, two_level="one"),
    "e4m3, divided by rows": Case(
        zero_kind=ZeroKind.NONE, scale_dtype=torch.float8_e4m3fn, two_level="rows", divides=True
    ),
    "codebook": Case(codebook=FLOAT, zero_kind=ZeroKind.NONE),
    "act-order": Case(act_order=True, k=64, group_size=16),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def made(case: Case, seed: int = 0) -> QuantizedWeight:
    return make_weight(case, np.random.default_rng(case.seed + seed))


def assert_same(x: QuantizedWeight, y: QuantizedWeight) -> None:
    """Facts and every stored bit."""
    assert x.spec == y.spec
    mine, theirs = x.tensors.present(), y.tensors.present()
    assert mine.keys() == theirs.keys()
    for name, t in mine.items():
        assert t.dtype == theirs[name].dtype and torch.equal(
            t.view(torch.uint8), theirs[name].view(torch.uint8)
        ), name
    assert x.fits_float16 == y.fits_float16


def apart(x: QuantizedWeight, y: QuantizedWeight) -> bool:
    ours = {t.untyped_storage().data_ptr() for t in x.tensors.present().values()}
    return ours.isdisjoint(t.untyped_storage().data_ptr() for t in y.tensors.present().values())


def torch_save(w: QuantizedWeight) -> QuantizedWeight:
    buffer = io.BytesIO()
    torch.save(w, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)  # type: ignore[no-any-return]


def safetensors_round_trip(w: QuantizedWeight) -> QuantizedWeight:
    safetensors = pytest.importorskip("safetensors.torch")
    return QuantizedWeight.from_state_dict(
        safetensors.load(safetensors.save(w.state_dict("layer."))), "layer."
    )


COPIES: dict[str, Callable[[QuantizedWeight], QuantizedWeight]] = {
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "deepcopy": copy.deepcopy,
    "torch.save": torch_save,
    "safetensors": safetensors_round_trip,
    "state_dict": lambda w: QuantizedWeight.from_state_dict(
        {k: t.clone() for k, t in w.state_dict("a.b.").items()}, "a.b."
    ),
    "clone": QuantizedWeight.clone,
    "to copy": lambda w: w.to("cpu", copy=True),
    "copy_": lambda w: made_like(w).copy_(w),
    "whole slice": lambda w: w[:, :],
    "halves of N": lambda w: QuantizedWeight.cat([w[:, :7], w[:, 7:]], dim=1),
}


def made_like(w: QuantizedWeight) -> QuantizedWeight:
    """The same facts with other values."""
    other = w.clone()
    for t in other.tensors.present().values():
        if t.dtype.is_floating_point and t.element_size() > 1:
            t.fill_(0)
    return other


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
@each_case
def test_round_trip(case: Case, way: Callable[[QuantizedWeight], QuantizedWeight]) -> None:
    w = made(case)
    before = w.clone()
    other = way(w)
    assert_same(other, w)
    assert_same(w, before)
    assert apart(other, w), "the copy shares storage"
    a = torch.randn(2, case.k)
    assert torch.equal(qmm.matmul(a, other, backend="torch"), qmm.matmul(a, w, backend="torch"))


@each_case
def test_state_dict_is_plain(case: Case) -> None:
    """Contiguous, no shared storage, self-describing; ``facts`` stays on the CPU."""
    state = made(case).state_dict("x.")
    assert {"x.qweight", "x.scales", "x.facts"} <= state.keys()
    assert all(type(t) is torch.Tensor and t.is_contiguous() and not t.requires_grad for t in state.values())
    assert len({t.untyped_storage().data_ptr() for t in state.values()}) == len(state)


@each_case
def test_load_state_dict_writes_in_place(case: Case) -> None:
    w, other = made(case), made(case, seed=1)
    if case.act_order:
        assert not torch.equal(w.g_idx, other.g_idx)  # type: ignore[arg-type]
    addresses = {name: t.data_ptr() for name, t in w.tensors.present().items()}
    w.load_state_dict(other.state_dict("p."), "p.")
    assert_same(w, other)
    assert {name: t.data_ptr() for name, t in w.tensors.present().items()} == addresses


def test_a_view_is_pickled_without_its_buffer() -> None:
    """torch pickles whole storages: a weight cut from a file's buffer must not take the file along."""
    buffer = torch.zeros(1000, 8, dtype=torch.int32)
    w = QuantizedWeight(buffer[4:8], torch.ones(1, 8), bits=4, group_size=32, in_features=32)
    assert len(pickle.dumps(w)) < 6000


def test_facts_do_not_follow_the_default_device() -> None:
    """CASES 113: under ``torch.device("meta")`` the facts must hold numbers."""
    w = made(CASES["int zeros"])
    with torch.device("meta"):
        state = w.state_dict()
        again = QuantizedWeight.from_state_dict(state)
    assert_same(again, w)


@each_case
def test_meta_and_back(case: Case) -> None:
    w = made(case)
    shell = w.to("meta")
    assert shell.spec == w.spec and shell.device.type == "meta" and shell.nbytes == w.nbytes
    assert shell.to("meta") is shell and not shell.fits_float16
    with pytest.raises(NotImplementedError, match="meta"):
        shell.to("cpu")
    with pytest.raises(WeightFormatError, match="other: must hold values; got a weight on meta"):
        w.copy_(shell)
    QuantizedWeight.from_state_dict(shell.state_dict())


def test_to() -> None:
    w = made(CASES["int zeros"])
    assert w.to("cpu") is w and w.cpu() is w and w.to(torch.device("cpu")) is w
    for bad in (torch.float16, None):
        with pytest.raises(TypeError, match=r"device: must be a device; got"):
            w.to(bad)  # type: ignore[arg-type]


def test_copy_refuses_other_facts_and_writes_nothing() -> None:
    w, other = made(Case(bits=4)), made(Case(bits=8))
    before = w.clone()
    with pytest.raises(
        WeightFormatError, match=r"other: must have the facts of this weight; got bits 4 here and 8 there"
    ):
        w.copy_(other)
    with pytest.raises(TypeError, match=r"other: must be a qmm.QuantizedWeight; got Tensor"):
        w.copy_(torch.zeros(1))  # type: ignore[arg-type]
    assert_same(w, before)


def test_copy_updates_whether_it_fits_float16() -> None:
    codes = torch.zeros(32, 2, dtype=torch.int64)
    small, large = (
        QuantizedWeight.from_codes(codes, torch.full((1, 2), s), bits=4, group_size=32) for s in (1.0, 1e6)
    )
    assert small.fits_float16 and not small.copy_(large).fits_float16


def test_weights_hash_by_identity() -> None:
    w = made(Case())
    assert {w: 1}[w] == 1 and w != w.clone() and hash(w.spec) == hash(w.clone().spec)


# slices


@each_case
def test_slices_are_blocks_of_the_dequantised_weight(case: Case) -> None:
    w = made(case)
    step = 1 if case.act_order else w.group_size
    edges = [*range(0, w.in_features, step * (7 if case.act_order else 1)), w.in_features]
    value = w.dequantize()
    for start in edges[:-1]:
        for stop in (e for e in edges if e > start):
            part = w[start:stop, 3:11]
            assert torch.equal(part.dequantize(), value[start:stop, 3:11]), (start, stop)
            assert apart(part, w)
    assert torch.equal(
        w[-step if case.act_order else 0 :].dequantize(), value[-step if case.act_order else 0 :]
    )


@each_case
def test_joining_along_k(case: Case) -> None:
    w = made(case)
    cut = w.group_size * (w.in_features // w.group_size // 2) or w.in_features
    parts = [w[:cut], w[cut:]] if cut < w.in_features else [w]
    joined = QuantizedWeight.cat(parts, dim=0)
    assert torch.equal(joined.dequantize(), w.dequantize())


@pytest.mark.parametrize(("one", "two"), [(0.5, 0.5), (0.5, 2.0)], ids=["equal factors", "different factors"])
@pytest.mark.parametrize("dim", [0, 1])
def test_joining_weights_with_a_factor_each(dim: int, one: float, two: float) -> None:
    codes = torch.arange(64).remainder(16).view(32, 2)
    parts = [
        QuantizedWeight.from_codes(codes, torch.ones(2, 2), bits=4, group_size=16, scale2=torch.tensor([f]))
        for f in (one, two)
    ]
    expected = torch.cat([p.dequantize() for p in parts], dim)
    assert torch.equal(QuantizedWeight.cat(parts, dim=dim).dequantize(), expected)


def test_slice_of_an_empty_range_or_an_element() -> None:
    w = made(Case(k=64, group_size=16))
    for index in ((slice(0, 0),), (slice(None), slice(30, 40))):
        with pytest.raises(WeightFormatError, match=r"index: must keep at least one row and one column"):
            w[index]
    for index in (3, (0, 0), slice(0, 8, 2), ..., (slice(None), slice(None), slice(None))):
        with pytest.raises(TypeError, match=r"index: must be one or two slices of step 1"):
            w[index]
    with pytest.raises(
        WeightFormatError, match=r"index: K must be cut at group edges .*group_size=16\); got 8"
    ):
        w[8:32]


def test_slices_of_tensor_parallel_act_order() -> None:
    """CASES 47: halves of K keep all scales; sliced scales are refused."""
    w = made(CASES["act-order"])
    a = torch.randn(3, 64, dtype=torch.float64)
    halves = sum(qmm.matmul(a[:, part], w[part], backend="torch") for part in (slice(0, 32), slice(32, 64)))
    torch.testing.assert_close(halves, qmm.matmul(a, w, backend="torch"))
    half = w[:32]
    with pytest.raises(WeightFormatError, match=r"g_idx: must be in \[0, G\) with G=2 rows of scales; got"):
        QuantizedWeight.from_codes(
            half.unpack(),
            half.scales[:2],
            half.unpack_zeros()[:2],
            bits=4,
            group_size=16,
            g_idx=half.g_idx,  # type: ignore[index]
        )


@pytest.mark.parametrize(
    ("other", "dim", "text"),
    [
        (Case(bits=3), 1, r"weights\[1\]: must have the bits of weights\[0\], 4; got 3"),
        (Case(k=64), 1, r"weights\[1\]: must have the in_features of weights\[0\], 70; got 64"),
        (Case(n=5), 0, r"weights\[1\]: must have the out_features of weights\[0\], 21; got 5"),
        (Case(), 0, r"weights\[0\]: K must be a multiple of group_size=32 to be joined along K; got 70"),
        (Case(scale_dtype=BF16), 1, r"weights\[1\]: must have the scale_dtype of weights\[0\]"),
    ],
    ids=["bits", "K", "N", "short group inside", "scales"],
)
def test_joins_that_cannot_be(other: Case, dim: int, text: str) -> None:
    with pytest.raises(WeightFormatError, match=text):
        QuantizedWeight.cat([made(Case()), made(other)], dim=dim)


# size and repr


def test_nbytes() -> None:
    w = made(Case(n=16, k=64, bits=4, group_size=32))
    assert w.nbytes == 8 * 16 * 4 + 2 * 16 * 2 + 1 * 16 * 4


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (
            CASES["symmetric"],
            ["K=70, N=21", "int4", "group 32", "scales float16", "symmetric", "cpu", "canonical"],
        ),
        (CASES["int zeros"], ["int3", "zeros int", "group 16"]),
        (CASES["codebook"], ["4-bit codebook"]),
        (CASES["bias, two levels"], ["scales int8 x float32", "zeros bias"]),
        (CASES["act-order"], ["act-order"]),
    ],
    ids=["symmetric", "int", "codebook", "two levels", "act-order"],
)
def test_repr(case: Case, parts: list[str]) -> None:
    text = repr(made(case))
    assert text.startswith("QuantizedWeight(") and all(p in text for p in parts), text
    assert "\n" not in text
