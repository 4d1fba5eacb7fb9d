"""qmm.quantize: error bounds, exact cases, and how near the true optimum it comes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qmm
from qmm.testing import oracle

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
kinds = pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
methods = pytest.mark.parametrize("method", ["minmax", "mse"])


def widths(symmetric: bool) -> range:
    return range(2 if symmetric else 1, 9)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows(w: qmm.QuantizedWeight, t: Tensor) -> np.ndarray:
    """``[G, N]`` -> ``[N, K]``: each weight's own factor."""
    index = [k // w.group_size for k in range(w.in_features)]
    return oracle.to_float64(t)[index].T


def errors(weight: Tensor, w: qmm.QuantizedWeight) -> np.ndarray:
    """|weight - W| as ``[N, K]`` float64, by the independent oracle."""
    return np.abs(oracle.to_float64(weight) - oracle.dequantize(w)[0].T)


# the bound


@kinds
@dtypes
@pytest.mark.parametrize("group", [1, 8, 32, 128, -1])
def test_minmax_error_is_at_most_half_a_step(dtype: torch.dtype, symmetric: bool, group: int) -> None:
    weight = normal(7, 100, seed=group + 1, dtype=dtype) * 0.3
    for bits in widths(symmetric):
        w = qmm.quantize(weight, bits=bits, group_size=group, symmetric=symmetric)
        step = rows(w, w.scales)
        assert (errors(weight, w) <= step / 2 * (1 + 2.0**-20)).all(), f"bits={bits}"


@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(
        st.floats(-6e4, 6e4, width=16) | st.sampled_from([0.0, 1e-7, -6e-8, 3e-5]), min_size=1, max_size=40
    ),
    bits=st.integers(1, 8),
    group=st.integers(1, 45),
    symmetric=st.booleans(),
    scale=st.sampled_from(list(DTYPES.values())),
    dtype=st.sampled_from(list(DTYPES.values())),
    method=st.sampled_from(["minmax", "mse"]),
)
def test_any_numbers(data, bits, group, symmetric, scale, dtype, method) -> None:  # type: ignore[no-untyped-def]
    """Scales finite and positive, the bound holds at every size of number, mse is never worse, runs are equal."""
    weight = torch.tensor([data], dtype=torch.float32).to(dtype)
    if bits == 1 and (symmetric or scale == torch.float16):
        bits = 2  # one bit: symmetric is refused, and a range of two float16 extremes has no float16 scale
    options = {"bits": bits, "group_size": group, "symmetric": symmetric, "scale_dtype": scale}
    if not bool(torch.isfinite(weight).all()):
        with pytest.raises(ValueError, match=r"weight_nk: must be finite"):
            qmm.quantize(weight, **options)
        return
    w = qmm.quantize(weight, **options)
    factors = oracle.to_float64(w.scales)
    assert np.isfinite(factors).all() and (factors > 0).all()
    step = rows(w, w.scales)
    base = errors(weight, w)
    assert (base <= step / 2 * (1 + 2.0**-20) + np.abs(oracle.to_float64(weight)) * 2.0**-22).all()
    if method == "mse":
        better = qmm.quantize(weight, method="mse", **options)
        for g in range(w.spec.groups):
            part = slice(g * w.group_size, (g + 1) * w.group_size)
            ours, theirs = (errors(weight, better)[0, part] ** 2).sum(), (base[0, part] ** 2).sum()
            assert ours <= theirs * (1 + 1e-5) + (np.abs(weight.double().numpy()[0, part]).max() * 1e-6) ** 2


@kinds
def test_codes_are_taken_against_the_scale_as_stored(symmetric: bool) -> None:
    """bfloat16 keeps 8 bits of a scale: codes chosen against the exact scale would be off by a step far out."""
    weight = normal(16, 64, seed=3)
    w = qmm.quantize(weight, bits=8, group_size=64, symmetric=symmetric, scale_dtype=torch.bfloat16)
    nearest = np.full((16, 64), np.inf)
    zero = rows(w, w.unpack_zeros()) if not symmetric else np.full((16, 64), 128.0)
    for code in range(256):
        nearest = np.minimum(nearest, np.abs((code - zero) * rows(w, w.scales) - oracle.to_float64(weight)))
    np.testing.assert_allclose(errors(weight, w), nearest, atol=1e-6)


# exact cases


@kinds
@methods
def test_a_weight_on_a_grid_comes_out_bit_for_bit(symmetric: bool, method: str) -> None:
    rng = np.random.default_rng(5)
    for bits in widths(symmetric):
        top = (1 << bits) - 1
        codes = rng.integers(0, top + 1, (48, 6))
        codes[0::16], codes[1::16] = 0, top  # both ends are in use in every group
        scales = torch.from_numpy(rng.uniform(1e-3, 1e-1, (3, 6))).half()
        zeros = None if symmetric else torch.from_numpy(rng.integers(0, top + 1, (3, 6)))
        made = qmm.QuantizedWeight.from_codes(
            torch.from_numpy(codes), scales, zeros, bits=bits, group_size=16
        )
        weight = made.dequantize().t()
        again = qmm.quantize(weight, bits=bits, group_size=16, symmetric=symmetric, method=method)
        assert torch.equal(again.dequantize(), made.dequantize()), f"bits={bits}"
        if method == "minmax":
            assert torch.equal(again.scales, scales) and torch.equal(again.unpack(), made.unpack())


def test_hand_computed_symmetric() -> None:
    """s = max(8/8, 3.5/7) = 1; halves round to even."""
    weight = torch.tensor([[-8.0, 3.5, 2.5, 0.0, -0.5, 1.2]])
    w = qmm.quantize(weight, bits=4, group_size=-1)
    assert w.scales.tolist() == [[1.0]] and w.scales.dtype == torch.float16 and w.zeros is None
    assert w.unpack()[:, 0].tolist() == [0, 12, 10, 8, 8, 9]


def test_hand_computed_asymmetric() -> None:
    """s = (4 - -2) / 3 = 2, z = 1."""
    weight = torch.tensor([[-2.0, 4.0, 1.9, 0.0]])
    w = qmm.quantize(weight, bits=2, group_size=-1, symmetric=False)
    assert w.scales.tolist() == [[2.0]]
    assert w.zero_kind is qmm.ZeroKind.INT and w.unpack_zeros().tolist() == [[1]]
    assert w.dequantize()[:, 0].tolist() == [-2.0, 4.0, 2.0, 0.0]


@pytest.mark.parametrize("values", [[1.0, 2.0, 5.0], [-1.0, -2.0, -5.0]], ids=["positive", "negative"])
def test_asymmetric_range_holds_zero(values: list[float]) -> None:
    weight = torch.tensor([[*values, 0.0]])
    w = qmm.quantize(weight, bits=3, group_size=-1, symmetric=False)
    assert w.dequantize()[3, 0] == 0
    assert w.unpack_zeros().item() == (0 if values[0] > 0 else 7)


# shapes


@kinds
@methods
def test_short_last_group_uses_its_own_values(symmetric: bool, method: str) -> None:
    """K=100 in groups of 64: the last group is the 36 values, whatever stands before them (CASES 15)."""
    weight = normal(8, 100, seed=1)
    weight[:, :64] *= 100
    w = qmm.quantize(weight, group_size=64, symmetric=symmetric, method=method)
    alone = qmm.quantize(weight[:, 64:], group_size=64, symmetric=symmetric, method=method)
    assert w.spec.groups == 2 and torch.equal(w.scales[1:], alone.scales)
    assert torch.equal(w.dequantize()[64:], alone.dequantize())


@pytest.mark.parametrize("group", [-1, 100, 128, 10**6])
def test_one_group_for_the_row(group: int) -> None:
    weight = normal(4, 100)
    w = qmm.quantize(weight, group_size=group)
    assert w.spec.groups == 1 and w.group_size == (100 if group == -1 else group)
    assert torch.equal(w.dequantize(), qmm.quantize(weight, group_size=100).dequantize())


@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (5, 1), (3, 7)], ids=str)
def test_small_shapes(shape: tuple[int, int]) -> None:
    weight = normal(*shape)
    w = qmm.quantize(weight, bits=8)
    assert w.shape == (shape[1], shape[0])
    torch.testing.assert_close(w.dequantize().t(), weight, atol=0.02, rtol=0)


@pytest.mark.parametrize("view", ["transposed", "every second column", "expanded", "reversed rows"])
def test_any_strides(view: str) -> None:
    big = normal(64, 64)
    weight = {
        "transposed": big[:40].t(),
        "every second column": big[:, ::2],
        "expanded": big[:1].expand(9, 64),
        "reversed rows": big.flip(0)[3:50],
    }[view]
    assert torch.equal(qmm.quantize(weight).qweight, qmm.quantize(weight.contiguous()).qweight)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row blocks are an implementation matter: any size gives the same weight."""
    import sys

    module = sys.modules["qmm.quantize"]
    weight = normal(5, 70)
    whole = qmm.quantize(weight, group_size=32, symmetric=False, method="mse")
    for size in (1, 150):
        monkeypatch.setitem(module._BLOCK, "cpu", size)
        part = qmm.quantize(weight, group_size=32, symmetric=False, method="mse")
        for name, t in part.tensors.present().items():
            assert torch.equal(t, whole.tensors.present()[name]), name


def test_memory_is_bounded() -> None:
    """What is allocated at a time does not grow with N."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.most = max(
                    self.most, result.untyped_storage().nbytes()
                )  # 4 bytes for the input and its views
            return result

    weight = torch.zeros(1, 1).expand(12_000, 1024)  # 12 M weights without memory of their own
    with Largest() as seen:
        w = qmm.quantize(weight, bits=2)
    assert w.qweight.numel() * 4 == 12_000 * 1024 // 4
    assert seen.most <= 6 * 2**20


# dtypes and devices


@dtypes
def test_default_scale_dtype(dtype: torch.dtype) -> None:
    expected = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    assert qmm.quantize(normal(4, 32, dtype=dtype)).scales.dtype == expected


@pytest.mark.parametrize("scale", DTYPES.values(), ids=DTYPES)
@dtypes
def test_scale_dtype(dtype: torch.dtype, scale: torch.dtype) -> None:
    w = qmm.quantize(normal(4, 32, dtype=dtype), scale_dtype=scale)
    assert w.scales.dtype == scale


@kinds
def test_the_whole_range_of_bfloat16(symmetric: bool) -> None:
    """Differences of the largest numbers must not overflow on the way."""
    top = torch.finfo(torch.bfloat16).max
    weight = torch.tensor([[-top, top, 1.0, 0.0]], dtype=torch.bfloat16)
    w = qmm.quantize(weight, bits=4, symmetric=symmetric)
    assert bool(torch.isfinite(w.scales).all())
    step = float(w.scales[0, 0])
    assert (errors(weight, w) <= step / 2).all()


def test_too_large_for_float16_scales() -> None:
    weight = torch.tensor([[1.0, 2.0], [3e38, -3e38]])
    with pytest.raises(
        ValueError, match=r"scale_dtype: must hold every scale; got float16.*row 1, group 0.*float32"
    ):
        qmm.quantize(weight)
    assert bool(torch.isfinite(qmm.quantize(weight, scale_dtype=torch.float32).dequantize()).all())


@dtypes
@kinds
@methods
def test_tiny_weights_keep_a_scale(dtype: torch.dtype, symmetric: bool, method: str) -> None:
    """A scale that would underflow becomes the smallest one; the error stays within half of it."""
    weight = torch.full((2, 8), 6e-8 if dtype == torch.float16 else 1e-9).to(dtype)
    w = qmm.quantize(weight, symmetric=symmetric, method=method, scale_dtype=torch.float16)
    assert (oracle.to_float64(w.scales) == 2.0**-24).all()
    assert (errors(weight, w) <= 2.0**-25).all()


@kinds
@methods
@dtypes
def test_zero_group_gives_exact_zeros(dtype: torch.dtype, symmetric: bool, method: str) -> None:
    """CASES 58: one all-zero group beside others, and an all-zero matrix."""
    weight = normal(4, 96, dtype=dtype)
    weight[1, 32:64] = 0
    weight[2] = -0.0
    w = qmm.quantize(weight, group_size=32, symmetric=symmetric, method=method)
    value = w.dequantize().t()
    assert (
        bool(torch.isfinite(value).all())
        and bool((value[1, 32:64] == 0).all())
        and bool((value[2] == 0).all())
    )
    assert bool((w.scales[:, 2] == 1).all())


@pytest.mark.parametrize("value", [0.7, -0.7, 1e-3, 40.0])
@kinds
def test_constant_group(symmetric: bool, value: float) -> None:
    w = qmm.quantize(torch.full((2, 64), value), group_size=32, symmetric=symmetric)
    torch.testing.assert_close(w.dequantize(), torch.full((64, 2), value), rtol=2.0**-10, atol=0)


def test_parameter_and_grad() -> None:
    layer = torch.nn.Linear(64, 8)
    w = qmm.quantize(layer.weight, group_size=32)
    assert not w.scales.requires_grad and w.shape == (64, 8)
    with torch.inference_mode():
        assert torch.equal(qmm.quantize(layer.weight, group_size=32).qweight, w.qweight)


def test_the_weight_given_is_left_alone() -> None:
    weight = normal(4, 64)
    before = weight.clone()
    qmm.quantize(weight, method="mse", symmetric=False)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_meta(symmetric: bool) -> None:
    w = qmm.quantize(torch.empty(8, 100, device="meta"), group_size=32, symmetric=symmetric)
    assert w.device.type == "meta" and w.shape == (100, 8) and w.spec.groups == 4


def test_default_device_is_not_used() -> None:
    weight = normal(4, 64)
    with torch.device("meta"):
        w = qmm.quantize(weight, symmetric=False)
    assert w.device.type == "cpu"


@methods
def test_same_bits_every_time(method: str) -> None:
    weight = normal(16, 96)
    first, second = (qmm.quantize(weight, method=method, symmetric=False) for _ in range(2))
    assert torch.equal(first.qweight, second.qweight) and torch.equal(first.scales, second.scales)


# against the true optimum


def optimum(weight: np.ndarray, bits: int, symmetric: bool) -> np.ndarray:
    """Least squared error of each row over all positive scales and all zero points.

    Between two neighbouring scales at which some code changes, codes are constant and the best scale is the
    least-squares one: so it is enough to try one scale in each such interval, and that one's least-squares scale.
    """
    top = (1 << bits) - 1
    best = (weight**2).sum(1)
    for i, row in enumerate(weight):
        edges = [abs(v) / (j + 0.5) for v in row for j in range(top + 1) if v != 0]
        edges = np.unique([*edges, max(edges, default=1.0) * 2])
        middles = np.concatenate([(edges[1:] + edges[:-1]) / 2, edges[:1] / 2])
        for zero in [1 << (bits - 1)] if symmetric else range(top + 1):
            steps = np.clip(np.rint(row / middles[:, None]), -zero, top - zero)
            size = (steps**2).sum(1)
            scale = np.divide(steps @ row, size, out=np.ones_like(size), where=size > 0)
            best[i] = min(best[i], ((steps * scale[:, None] - row) ** 2).sum(1).min())
    return best


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("bits", [2, 3, 4])
@kinds
def test_mse_is_near_the_optimum(bits: int, size: int, symmetric: bool) -> None:
    """Total squared error over 150 random groups, stated factors. minmax is 1.2 to 2.8 times the optimum here."""
    weight = normal(150, size, seed=bits * 10 + size)
    options = {"bits": bits, "group_size": -1, "symmetric": symmetric, "scale_dtype": torch.float32}
    best = optimum(weight.double().numpy(), bits, symmetric)
    found = (errors(weight, qmm.quantize(weight, method="mse", **options)) ** 2).sum(1)
    minmax = (errors(weight, qmm.quantize(weight, **options)) ** 2).sum(1)
    assert (best <= found + 1e-9).all(), "the oracle is no optimum"
    assert (found <= minmax * (1 + 1e-5) + 1e-12).all()
    factor = 1.15 if size == 8 else 1.25 if symmetric else 1.6
    assert found.sum() <= factor * best.sum()
    assert found.sum() < 0.95 * minmax.sum()


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_mse_goes_on_where_larger_scales_leave_float16(symmetric: bool) -> None:
    """The first factors give Inf where minmax's scale is near float16's largest number; the others still count."""
    weight = normal(16, 64, seed=3)
    steps = 7.5 if symmetric else 15.0
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    span = torch.maximum(-low, high) if symmetric else high - low
    weight = weight / span * steps * 60000
    half = qmm.quantize(weight, group_size=64, symmetric=symmetric, method="mse")
    full = qmm.quantize(weight, group_size=64, symmetric=symmetric, method="mse", scale_dtype=torch.float32)
    small, large = (((w.dequantize().t() - weight) / 60000).square().sum(1) for w in (full, half))
    assert bool((large <= small * 1.05).all())


def test_minmax_scale_is_the_smallest_that_clips_nothing() -> None:
    weight = normal(200, 8, seed=9)
    w = qmm.quantize(weight, bits=3, group_size=-1, scale_dtype=torch.float32)
    smallest = np.maximum(-weight.double().numpy().min(1) / 4, weight.double().numpy().max(1) / 3)
    np.testing.assert_allclose(oracle.to_float64(w.scales)[0], smallest, rtol=1e-6)


# refusals (the rest stand in test_bad_input.py)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@dtypes
def test_not_finite(dtype: torch.dtype, bad: float) -> None:
    weight = normal(4, 64, dtype=dtype)
    weight[2, 5] = bad
    with pytest.raises(ValueError, match=rf"weight_nk: must be finite; got {bad} at \[2, 5\] \(1 such"):
        qmm.quantize(weight)
