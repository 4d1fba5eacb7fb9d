"""One call, run and checked: float64 oracle and numerics bound, poison, canaries, equal bits again."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_call import Call, Variant
from fuzz_config import with_forced
from fuzz_layout import Result, carve_off, lay_out
from torch import Tensor

import qmm
from qmm.call import make_call
from qmm.dispatch import select
from qmm.matmul import execute
from qmm.testing import make_weight, oracle
from qmm.testing.numerics import (
    RMS_FACTOR,
    RMS_OUTPUTS,
    Reference,
    _rms,
    emulate,
    reference_from,
    worst_ratio,
)
from qmm.weight import QuantizedWeight

_EMULATE_AT_MOST = 1 << 24  # products that one emulation in slow motion may take


@dataclass
class Outcome:
    """What a call showed: refused, or the worst error / bound, the rms error / emulation's where it was taken, and
    how many times it was repeated for equal bits."""

    refused: bool = False
    ratio: float = 0.0
    rms: float = 0.0
    repeats: int = 0


@dataclass
class Weight:
    """A weight in poison, and the numbers that it stands for."""

    w: QuantizedWeight
    value: oracle.Array
    size: oracle.Array


@functools.lru_cache(maxsize=64)
def weight_of(variant: Variant, n: int, k: int, seed: int, exact: bool) -> Weight:
    """The weight of a call; the oracle reads it once."""
    case = Call(variant, 1, n, k, "normal", 0, 0).case()
    w = make_weight(case, np.random.default_rng([seed, case.seed]), exact=exact)
    value, size = oracle.dequantize(w)
    return Weight(carve_off(w.to(variant.device), variant.offset), value, size)


def activations(call: Call) -> Tensor:
    """A ``[M, K]`` on the CPU, of A's dtype."""
    dtype = getattr(torch, call.variant.dtype)
    rng = np.random.default_rng(call.a_seed)
    a = rng.standard_normal((call.m, call.k))
    if call.data == "exact":
        a = rng.integers(-2, 3, a.shape).astype(np.float64)
    elif call.data == "one-hot":
        a = np.zeros(a.shape)
        a[np.arange(call.m), rng.integers(0, call.k, call.m)] = 1
    elif call.data == "zero":
        a *= 0
    elif call.data == "huge":  # some results are near or past the edge of float16
        a *= 2.0**13 if dtype == torch.float16 else 2.0**60
    elif call.data == "tiny":  # subnormal numbers of float16
        a *= 2.0**-20
    return torch.from_numpy(a).to(dtype)


def exact_sums(call: Call) -> bool:
    """Whether the data makes every sum exact: the result then has the reference's bits."""
    v = call.variant
    wide = v.zero_kind == "bias" and v.dtype == "bfloat16"  # s*q + b may take more than 8 bits
    return call.data == "exact" and v.bias is None and v.activation is None and not wide


def check(call: Call) -> Outcome:
    """Run ``call`` and check everything.

    Raises:
        AssertionError: what was wrong; the text begins with a word for the kind of fault.
    """
    v = call.variant
    weight = weight_of(v, call.n, call.k, call.w_seed, call.data == "exact")
    plain = activations(call)
    if v.a_view == "expanded" and call.m:
        plain = plain[:1].expand(call.m, call.k).contiguous()
    a = lay_out(plain.to(v.device), v.a_view, v.offset)
    bias = None
    if v.bias is not None:
        numbers = np.random.default_rng([call.a_seed, 1]).standard_normal(call.n)
        bias = lay_out(
            torch.from_numpy(numbers).to(getattr(torch, v.bias))[None].to(v.device), "one-d", v.offset
        )
    options: dict[str, Any] = {
        "bias": bias,
        "activation": v.activation,
        "deterministic": v.deterministic,
    }
    facts = make_call(a, weight.w, **options)
    backend = qmm.backends()[v.backend]
    kernel = next(k for k in backend.kernels if k.name == v.kernel)
    reasons = backend.why_not(facts, kernel)
    if reasons:
        _check_refusal(call, a, weight.w, options, reasons)
        return Outcome(refused=True)

    result = _run(call, a, weight.w, options)
    got = result.detach().cpu()
    value, size, ref_bias = weight.value, weight.size, None if bias is None else bias.cpu()
    expected = reference_from(plain, value, size, ref_bias, v.activation)
    ratio = _ratio(got.view(call.m, call.n), expected)
    assert ratio <= 1, f"bound: error is {ratio:.4g} of the numerics bound{_where(got, expected)}"
    if exact_sums(call):
        bits = torch.from_numpy(expected.exact).to(got.dtype)
        same = torch.equal(got.view(call.m, call.n), bits)
        assert same, (
            f"exact: {int((got.view(call.m, call.n) != bits).sum())} elements differ where sums are exact"
        )
    outcome = Outcome(ratio=ratio)
    if v.deterministic is not False:
        for _ in range(2):
            again = _run(call, a, weight.w, options).detach().cpu()
            assert torch.equal(got, again), f"repeat: {int((got != again).sum())} elements have other bits"
            outcome.repeats += 1
    if v.deterministic == "batch" and call.m > 1 and a.dim() == 2:
        rows = a[: call.m // 2]
        part = _run(call, rows, weight.w, options).detach().cpu()
        assert torch.equal(part, got[: call.m // 2]), "batch: a row's bits depend on the number of rows"
    if call.data == "bad row" and call.m:
        _check_bad_row(call, plain, got, weight.w, options)
    if _emulates(call):
        outcome.rms = _check_rms(call, got, plain, weight)
    return outcome


def _run(call: Call, a: Tensor, w: QuantizedWeight, options: dict[str, Any]) -> Tensor:
    """The call, with the configuration that is forced, into a poisoned result inside canaries."""
    v = call.variant
    leading = tuple(a.shape[:-1])
    made = Result(v.out, leading, call.n, a.dtype, a.device, v.offset)
    if v.config is None:
        result = qmm.matmul(a, w, backend=v.backend, kernel=v.kernel, out=made.out, **options)
    else:
        facts = make_call(a, w, out=made.out, **options)
        choice = with_forced(select(facts, v.backend, v.kernel), facts, v.config)
        result = (
            torch.empty(facts.out_shape, dtype=a.dtype, device=a.device) if made.out is None else made.out
        )
        if facts.m:
            execute(choice, facts, a, w, options["bias"], result)
    assert made.out is None or result is made.out, "out: the result is not what was given as out"
    assert result.shape == (*leading, call.n), f"shape: {tuple(result.shape)}"
    assert result.dtype == a.dtype, f"dtype: {result.dtype}"
    assert made.outside_is_untouched(), "canary: memory outside the result was written"
    return result


def _check_refusal(
    call: Call, a: Tensor, w: QuantizedWeight, options: dict[str, Any], reasons: list[qmm.Reason]
) -> None:
    v = call.variant
    with pytest.raises(qmm.UnsupportedError) as caught:
        qmm.matmul(a, w, backend=v.backend, kernel=v.kernel, **options)
    assert caught.value.reasons[v.backend] == reasons, "refusal: other reasons than why_not gives"


def _ratio(got: Tensor, expected: Reference) -> float:
    return worst_ratio(got, expected)


def _where(got: Tensor, expected: Reference) -> str:
    """The worst element and the numbers there."""
    numbers = oracle.to_float64(got).reshape(expected.exact.shape)
    with np.errstate(invalid="ignore"):
        error = np.abs(numbers - expected.exact) / expected.bound
    at = np.unravel_index(int(np.nanargmax(np.where(np.isnan(error), math.inf, error))), error.shape)
    count = int((~(error <= 1)).sum())
    place = tuple(int(i) for i in at)
    return f"; {count} elements, worst at {place}: {numbers[at]:.6g} where {expected.exact[at]:.6g} is right"


def _check_bad_row(
    call: Call, plain: Tensor, got: Tensor, w: QuantizedWeight, options: dict[str, Any]
) -> None:
    """NaN or Inf in one row changes nothing in the others."""
    v = call.variant
    if v.a_view == "expanded" or call.m < 2:
        return
    rng = np.random.default_rng([call.a_seed, 2])
    row = int(rng.integers(call.m))
    dirty = plain.clone()
    dirty[row, int(rng.integers(call.k))] = (math.nan, math.inf, -math.inf)[int(rng.integers(3))]
    laid = lay_out(dirty.to(v.device), v.a_view, v.offset)
    other = _run(call, laid, w, options).detach().cpu().view(call.m, call.n)
    keep = [i for i in range(call.m) if i != row]
    same = torch.equal(other[keep], got.view(call.m, call.n)[keep])
    assert same or v.deterministic is False, "leak: NaN or Inf in one row changed another"


def _emulates(call: Call) -> bool:
    """Rule (b) for one call in eight: the emulation is slow."""
    v = call.variant
    plain = call.data == "normal" and v.bias is None and v.activation is None and v.a_view != "expanded"
    products = call.m * call.n * call.k
    return (
        plain
        and call.a_seed % 8 == 0
        and call.k >= 64
        and call.m * call.n >= RMS_OUTPUTS
        and products <= _EMULATE_AT_MOST
    )


def _check_rms(call: Call, got: Tensor, plain: Tensor, weight: Weight) -> float:
    exact = oracle.to_float64(plain) @ weight.value
    emulated = _rms(emulate(plain, weight.w), exact)
    ratio = _rms(got, exact) / emulated if emulated else 0.0
    assert ratio <= RMS_FACTOR, f"rms: error is {ratio:.3g} times that of a correct emulation"
    return ratio
