"""The conformance suite: what every backend must do, as one pytest class. No backend's name stands in a test.

Subclass it in a test module; every test then runs once for each target::

    class TestMine(ConformanceSuite):
        TARGETS = targets(("mine",))

A call that the kernel refuses is not skipped: the refusal itself is asserted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import qmm
from qmm.backend import ACTIVATIONS
from qmm.testing.cases import BF16, CASES, EXACT_CASES, FLOAT, HALF, LARGE_CASES, Case, Inputs, make_inputs
from qmm.testing.numerics import ROUNDING, assert_close, assert_exact, assert_rms
from qmm.testing.poison import Canary, carve, carve_rows, carve_weight
from qmm.testing.running import run
from qmm.testing.suite_device import DeviceSuite
from qmm.testing.targets import Target, targets
from qmm.weight import QuantizedWeight, ZeroKind

DTYPES = (HALF, BF16, FLOAT)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32"])


def small(case: Case, target: Target, **options: Any) -> Inputs:
    """Inputs of ``case`` on the target's device."""
    return make_inputs(case, target.device, **options)


class ConformanceSuite(DeviceSuite):
    """Held against every backend. ``TARGETS`` may be narrowed in a subclass.

    Example:
        >>> from qmm.testing import ConformanceSuite
        >>> class TestMine(ConformanceSuite):
        ...     backends = ("mine",)
    """

    TARGETS: ClassVar[list[Target] | None] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """pytest's own hook, found on the class: each test once a target."""
        if "target" in metafunc.fixturenames:
            metafunc.parametrize("target", targets() if self.TARGETS is None else self.TARGETS, ids=str)

    # -- values ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_case(self, target: Target, case: Case, record_property: Any) -> None:
        """Rule (a) on poisoned operands, canaries intact, the same bits twice."""
        self._check(target, case, record_property)

    @pytest.mark.gpu
    @pytest.mark.parametrize("case", LARGE_CASES, ids=str)
    def test_large_case(self, target: Target, case: Case, record_property: Any) -> None:
        """The same on shapes that the interpreter and the simulator are too slow for."""
        if target.device == "cpu":
            pytest.skip("large shapes run on a GPU only")
        self._check(target, case, record_property)

    def _check(self, target: Target, case: Case, record_property: Any) -> None:
        x = small(case, target)
        a, w = carve_rows(x.a), carve_weight(x.w)
        bias = None if x.bias is None else carve(x.bias)
        canary = Canary(case.m, case.n, case.dtype, a.device)
        result = run(target, a, w, bias=bias, activation=case.activation, out=canary.out)
        assert result is canary.out
        canary.check()
        ratio = assert_close(result, x.a, x.w, bias=x.bias, activation=case.activation)
        again = run(target, a, w, bias=bias, activation=case.activation)
        assert torch.equal(result, again), "the same call gave other bits"
        record_property("ratio", ratio)
        record_property("target", str(target))
        record_property("dtype", str(case.dtype))

    @pytest.mark.parametrize("case", EXACT_CASES, ids=str)
    def test_exact_sums_are_exact(self, target: Target, case: Case) -> None:
        """Rule (c)."""
        x = small(case, target, exact=True)
        assert_exact(run(target, x.a, x.w), x.a, x.w)

    @dtypes
    def test_identity_gives_the_weight(self, target: Target, dtype: torch.dtype) -> None:
        """One-hot rows give W, rounded once."""
        x = small(Case(n=11, k=48, group_size=16, dtype=dtype, bits=8), target, exact=True)
        eye = torch.eye(48, dtype=dtype, device=target.device)
        assert torch.equal(run(target, eye, x.w), x.w.dequantize(dtype))

    @pytest.mark.parametrize("rows", [1, 3])
    def test_divided_scales_are_divided(self, target: Target, rows: int) -> None:
        """A quotient and not the product with a reciprocal: one-hot rows give the float32 W, bit for bit."""
        x = small(Case(n=11, k=48, group_size=16, dtype=FLOAT, zero_kind=ZeroKind.NONE), target)
        second = torch.linspace(1.1, 2900.7, rows * 11, device=target.device).view(rows, 11)
        w = QuantizedWeight.from_codes(
            x.w.unpack(), x.w.scales.float(), bits=4, group_size=16, scale2=second, scale2_divides=True
        )
        scale = x.w.scales.float() / second.repeat_interleave(3 // rows, 0)
        expected = (x.w.unpack().float() - 8) * scale.repeat_interleave(16, 0)
        assert torch.equal(w.dequantize(), expected)
        assert torch.equal(run(target, torch.eye(48, device=target.device), w), expected)

    @dtypes
    def test_error_is_small_on_average(self, target: Target, dtype: torch.dtype) -> None:
        """Rule (b)."""
        k = 512 if target.device == "cpu" else 4096
        x = small(Case(m=8, n=32, k=k, dtype=dtype, zero_kind=ZeroKind.NONE, group_size=64), target)
        assert_rms(run(target, x.a, x.w), x.a, x.w)

    def test_sums_are_float32(self, target: Target) -> None:
        """A 16-bit running sum would be infinite: 64 * 8 * 256 = 131072."""
        k = 512
        codes = torch.full((k, 8), 15)
        codes[k // 2 :] = 1
        scales = torch.ones(k // 32, 8, dtype=HALF) * (8 / 7)
        w = QuantizedWeight.from_codes(codes, scales, bits=4, group_size=32).to(target.device)
        a = torch.full((2, k), 64.0, dtype=HALF, device=target.device)
        assert torch.equal(run(target, a, w), torch.zeros(2, 8, dtype=HALF, device=target.device))

    def test_float32_is_no_tf32(self, target: Target) -> None:
        """1024.5 and ``1 + 2**-12`` do not survive TF32."""
        w = _identity_weight(32).to(target.device)
        a = torch.tensor([1024.5, 1 + 2.0**-12], device=target.device).repeat_interleave(32).view(2, 32)
        assert torch.equal(run(target, a, w), a)

    @dtypes
    def test_identity_weight_gives_a(self, target: Target, dtype: torch.dtype) -> None:
        """The result has A's dtype and bits."""
        x = small(Case(m=3, k=32, dtype=dtype), target)
        assert torch.equal(run(target, x.a, _identity_weight(32).to(target.device)), x.a)

    def test_scales_beyond_float16(self, target: Target) -> None:
        """fp16 A with weights past fp16's range and small A: the product fits, so it must come out."""
        x = small(Case(m=2, n=8, k=32, scale_dtype=FLOAT, zero_kind=ZeroKind.NONE), target)
        w = QuantizedWeight.from_codes(x.w.unpack(), x.w.scales * 1e7, bits=4, group_size=32)
        a = (x.a.float() * 1e-4).to(HALF)
        assert_close(run(target, a, w), a, w)

    def test_overflow_gives_inf(self, target: Target) -> None:
        """A result past the range is Inf of the right sign, in that element alone."""
        w = QuantizedWeight.from_codes(
            torch.tensor([[15, 1, 9]] * 16), torch.full((1, 3), 1000.0, dtype=HALF), bits=4, group_size=16
        ).to(target.device)
        result = run(target, torch.ones(1, 16, dtype=HALF, device=target.device), w)
        assert result.tolist() == [[math.inf, -math.inf, 16000.0]]

    @pytest.mark.parametrize("word", [0xFF807F00, 0x90000000, 0x80000001])
    @pytest.mark.parametrize("bits", [1, 2, 4, 8])
    def test_mask_comes_after_the_shift(self, target: Target, bits: int, word: int) -> None:
        """Words with the sign bit set: an arithmetic shift alone would smear it."""
        signed = word - (1 << 32) if word >> 31 else word
        k = 32 // bits
        qweight = torch.tensor([[signed] * 3], dtype=torch.int32)
        scales = torch.ones(1, 3, dtype=HALF)
        zeros = torch.zeros(1, 3, dtype=torch.int32)
        w = QuantizedWeight(qweight, scales, bits=bits, group_size=k, in_features=k, zeros=zeros).to(
            target.device
        )
        expected = torch.tensor([[word >> (i * bits) & (1 << bits) - 1] * 3 for i in range(k)], dtype=FLOAT)
        assert torch.equal(run(target, torch.eye(k, device=target.device), w).cpu(), expected)

    @pytest.mark.parametrize("zero", [0, 15])
    def test_extreme_zero_points(self, target: Target, zero: int) -> None:
        """Zero points 0 and ``2**bits - 1`` are numbers like others."""
        codes = torch.arange(32).remainder(16)[:, None].expand(32, 2)
        zeros = torch.full((2, 2), zero)
        w = QuantizedWeight.from_codes(codes, torch.ones(2, 2, dtype=HALF), zeros, bits=4, group_size=16)
        eye = torch.eye(32, dtype=HALF, device=target.device)
        assert torch.equal(run(target, eye, w.to(target.device)).cpu(), (codes - zero).to(HALF))

    def test_zero_scale(self, target: Target) -> None:
        """Scale 0 means weight 0, not NaN."""
        x = small(Case(n=4, k=32), target)
        scales = torch.zeros_like(x.w.scales)
        w = QuantizedWeight.from_codes(x.w.unpack(), scales, bits=4, group_size=32)
        assert torch.equal(run(target, x.a, w), torch.zeros(3, 4, dtype=HALF, device=target.device))

    # -- epilogue -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @dtypes
    def test_activation_far_out(self, target: Target, activation: str, dtype: torch.dtype) -> None:
        """Large arguments of both signs and infinities, as torch's own functions give."""
        values = torch.tensor(
            [-math.inf, -1e4, -60.0, -1.0, -0.0, 0.0, 1.0, 60.0, 1e4, math.inf, math.nan], dtype=dtype
        )
        n = values.numel()
        w = QuantizedWeight.from_codes(
            torch.full((16, n), 8), torch.ones(1, n, dtype=HALF), bits=4, group_size=16
        ).to(target.device)
        a = torch.ones(1, 16, dtype=dtype, device=target.device)
        result = run(target, a, w, bias=values.to(target.device), activation=activation)
        function = torch.nn.functional
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "relu": function.relu,
            "gelu": function.gelu,
            "gelu_tanh": lambda t: function.gelu(t, approximate="tanh"),
            "silu": function.silu,
        }
        expected = functions[activation](values.double()).to(dtype)
        tolerance = 4 * ROUNDING[dtype][0]
        torch.testing.assert_close(result[0].cpu(), expected, rtol=tolerance, atol=1e-6, equal_nan=True)

    def test_bias_is_added_in_float32(self, target: Target) -> None:
        """2048 + 1 - 2048 in fp16 steps would lose the 1: the bias joins the float32 sum."""
        w = _identity_weight(16).to(target.device)
        a = torch.full((1, 16), 2048.0, dtype=HALF, device=target.device)
        bias = torch.full((16,), -2047.0, dtype=FLOAT, device=target.device)
        assert torch.equal(run(target, a, w, bias=bias), torch.ones_like(a))

    # -- what must not leak -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_bad_row_stays_in_its_row(self, target: Target, bad: float) -> None:
        """NaN or Inf in one row of A touches that row only."""
        x = small(Case(m=5, k=40), target)
        clean = run(target, x.a, x.w)
        a = x.a.clone()
        a[2, 7] = bad
        result = run(target, a, x.w)
        keep = torch.tensor([0, 1, 3, 4], device=target.device)
        assert torch.equal(result[keep], clean[keep])
        assert not bool(torch.isfinite(result[2]).any() & (x.w.dequantize()[7] != 0).all())

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_bad_scale_stays_in_its_column(self, target: Target, bad: float) -> None:
        """NaN or Inf in a scale touches that column only."""
        x = small(Case(m=3, k=40, n=9), target)
        clean = run(target, x.a, x.w)
        scales = x.w.scales.clone()
        scales[1, 4] = bad
        w = QuantizedWeight.from_codes(x.w.unpack(), scales, x.w.unpack_zeros(), bits=4, group_size=32)
        result = run(target, x.a, w)
        keep = torch.tensor([c for c in range(9) if c != 4], device=target.device)
        torch.testing.assert_close(result[:, keep], clean[:, keep], rtol=2e-3, atol=2e-3)
        assert not bool(torch.isfinite(result[:, 4]).any())

    # -- shapes and strides -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "shape",
        [(64,), (0, 64), (2, 0, 64), (7, 64), (1, 7, 64), (7, 1, 64), (1, 1, 64), (2, 3, 2, 64)],
        ids=str,
    )
    def test_leading_shapes(self, target: Target, shape: tuple[int, ...]) -> None:
        """Any leading shape: the rows are those of the flat call."""
        x = small(Case(m=max(1, math.prod(shape[:-1])), k=64, n=9), target)
        a = x.a.flatten()[: math.prod(shape)].reshape(shape)
        result = run(target, a, x.w)
        assert result.shape == (*shape[:-1], 9) and result.dtype == a.dtype and result.device == a.device
        if a.numel():
            flat = run(target, a.reshape(-1, 64), x.w)
            assert torch.equal(result.reshape(-1, 9), flat)

    @pytest.mark.parametrize(
        "view",
        ["sliced", "every second row", "transposed", "every second column", "expanded", "split", "folded"],
    )
    def test_strides_of_a(self, target: Target, view: str) -> None:
        """Any strides give what the contiguous copy gives."""
        x = small(Case(m=6, k=40, n=9), target)
        big = small(Case(m=40, n=9, k=120), target).a
        a = {
            "sliced": big[:6, 33:73],
            "every second row": big[:12:2, :40],
            "transposed": big[:40, :6].t(),
            "every second column": big[:6, :80:2],
            "expanded": big[0, :40].expand(6, 40),
            "split": torch.split(big[:6], 40, dim=1)[1],
            "folded": big[:6, :80].reshape(3, 2, 2, 40).transpose(0, 2),
        }[view]
        assert torch.equal(run(target, a, x.w), run(target, a.contiguous(), x.w))

    @pytest.mark.parametrize("view", ["padded rows", "transposed", "every second column", "folded"])
    @pytest.mark.parametrize("m", [1, 8])
    def test_strided_out(self, target: Target, view: str, m: int) -> None:
        """A strided ``out`` is written, whole and nowhere else."""
        x = small(Case(m=m, k=40, n=10), target)
        buffer = torch.full((2 * m + 20, 2 * m + 20), -1.5, dtype=HALF, device=target.device)
        a = x.a
        out = {
            "padded rows": buffer[1 : m + 1, 3:13],
            "transposed": buffer[1:11, 2 : m + 2].t(),
            "every second column": buffer[:m, 0:20:2],
            "folded": buffer[:m, :20].unflatten(1, (2, 10)).transpose(0, 1),
        }[view]
        if view == "folded":
            a = a.expand(2, m, 40)
        expected = run(target, a, x.w)
        untouched = buffer.numel() - out.numel()
        assert run(target, a, x.w, out=out) is out
        assert torch.equal(out, expected)
        assert int((buffer == -1.5).sum()) >= untouched

    def test_two_halves_of_one_buffer(self, target: Target) -> None:
        """``a`` and ``out`` may be column ranges of one tensor."""
        x = small(Case(m=4, k=40, n=8), target)
        buffer = torch.zeros(4, 48, dtype=HALF, device=target.device)
        buffer[:, :40] = x.a
        run(target, buffer[:, :40], x.w, out=buffer[:, 40:])
        assert torch.equal(buffer[:, 40:], run(target, x.a, x.w))

    def test_strided_bias(self, target: Target) -> None:
        """A bias with a stride."""
        x = small(Case(n=8, k=32), target)
        wide = torch.randn(16, device=target.device)
        assert torch.equal(
            run(target, x.a, x.w, bias=wide[::2]), run(target, x.a, x.w, bias=wide[::2].clone())
        )

    # -- behaviour --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=["fp16", "fp32"])
    def test_batch_determinism(self, target: Target, dtype: torch.dtype) -> None:
        """With ``deterministic="batch"`` a row's bits do not depend on M."""
        sizes = (1, 2, 4, 16, 17) if target.device == "cpu" else (1, 2, 4, 16, 17, 64, 257)
        x = small(Case(m=max(sizes), k=160, n=24, dtype=dtype), target)
        results = [run(target, x.a[:m], x.w, deterministic="batch") for m in sizes]
        for result in results[:-1]:
            assert torch.equal(result, results[-1][: result.shape[0]])

    def test_not_deterministic_is_still_right(self, target: Target) -> None:
        """``deterministic=False`` keeps the numerics contract."""
        x = small(Case(m=1, k=256, n=16), target)
        assert_close(run(target, x.a, x.w, deterministic=False), x.a, x.w)

    def test_parameters_under_no_grad(self, target: Target) -> None:
        """A Parameter as input, under no_grad and detached."""
        x = small(Case(), target)
        expected = run(target, x.a, x.w)
        a = torch.nn.Parameter(x.a)
        with torch.no_grad():
            assert torch.equal(run(target, a, x.w), expected)
        with torch.inference_mode():
            assert torch.equal(run(target, a, x.w), expected)
        assert torch.equal(run(target, a.detach(), x.w), expected)

    @pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=["fp16", "fp32"])
    def test_autocast_changes_nothing(self, target: Target, dtype: torch.dtype) -> None:
        """Under autocast, which would round a library's products to 16 bits, the same bits."""
        x = small(Case(m=3, k=96, n=24, dtype=dtype), target)
        expected = run(target, x.a, x.w)
        with torch.autocast(target.device, dtype=BF16):
            assert torch.equal(run(target, x.a, x.w), expected)

    def test_state_of_earlier_calls(self, target: Target) -> None:
        """A short call, a long one and the short one again: nothing stays behind."""
        x = small(Case(m=65, n=9, k=48, act_order=True, group_size=16), target)
        first = run(target, x.a[:8], x.w)
        run(target, x.a, x.w)
        assert torch.equal(run(target, x.a[:8], x.w), first)

    def test_updates_are_seen(self, target: Target) -> None:
        """``copy_`` changes the result of the next call, and back."""
        x, y = small(Case(), target), small(Case(bias=HALF), target)
        before, other = run(target, x.a, x.w), run(target, x.a, y.w)
        original = x.w.clone()
        assert torch.equal(run(target, x.a, x.w.copy_(y.w)), other)
        assert torch.equal(run(target, x.a, x.w.copy_(original)), before)

    def test_updates_past_float16_are_seen(self, target: Target) -> None:
        """A call seen before, then ``copy_`` of values that W may not be rounded to float16 for."""
        codes = torch.full((32, 8), 15, device=target.device)
        small, large = (
            QuantizedWeight.from_codes(
                codes, torch.full((1, 8), s, device=codes.device), bits=4, group_size=32
            )
            for s in (1.0, 2.0**14)
        )
        a = torch.full((2, 32), 2.0**-10, dtype=HALF, device=target.device)
        for _ in range(3):
            assert bool((run(target, a, small) == 7 / 32).all())
        small.copy_(large)
        for _ in range(2):
            assert bool((run(target, a, small) == 7 * 2.0**9).all())

    def test_slices_sum_to_the_whole(self, target: Target) -> None:
        """Halves along K of an act-order weight sum to the whole; halves along N are its columns."""
        x = small(Case(k=64, act_order=True, group_size=16, dtype=FLOAT), target, exact=True)
        whole = run(target, x.a, x.w)
        halves = run(target, x.a[:, :32], x.w[:32]) + run(target, x.a[:, 32:], x.w[32:])
        assert torch.equal(halves, whole)
        assert torch.equal(run(target, x.a, x.w[:, 3:9]), whole[:, 3:9])

    def test_float64(self, target: Target) -> None:
        """float64 runs to float64's accuracy of the float32 weight, or is refused with the reason."""
        x = small(Case(k=64), target)
        a = x.a.double()
        result = run(target, a, x.w)
        torch.testing.assert_close(result, a @ x.w.dequantize().double(), rtol=1e-12, atol=1e-12)

    def test_explain_names_what_runs(self, target: Target) -> None:
        """``explain`` with the same arguments names this kernel."""
        x = small(Case(), target)
        found = qmm.explain(x.a, x.w, backend=target.backend, kernel=target.kernel)
        run(target, x.a, x.w)
        assert (found.backend, found.kernel) == (target.backend, target.kernel)
        assert found.reasons[target.backend] == []
        assert f"{target.backend}.{target.kernel}" in str(found)


def _identity_weight(k: int) -> QuantizedWeight:
    """W = eye(K), exactly."""
    codes = torch.full((k, k), 8)
    codes.fill_diagonal_(9)
    return QuantizedWeight.from_codes(codes, torch.ones(-(-k // 16), k, dtype=HALF), bits=4, group_size=16)
