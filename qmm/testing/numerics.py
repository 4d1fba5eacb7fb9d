"""The numerics contract (docs/numerics.md) in one place: worst case, on average, exact. A backend may not widen it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qmm.testing import oracle
from qmm.testing.oracle import Array
from qmm.weight import QuantizedWeight

# dtype: (unit roundoff u, half the smallest subnormal eta)
ROUNDING = {
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float64: (2.0**-53, 2.0**-1075),
}
ACTIVATION_GROWTH = 1.13  # the largest slope of gelu
RMS_FACTOR = 1.5
RMS_OUTPUTS = 256


@dataclass(frozen=True)
class Reference:
    """What a call should give: the exact result and how far off a kernel may be, both ``[..., N]`` float64.

    Example:
        >>> from qmm.testing import Case, make_inputs, reference
        >>> x = make_inputs(Case(m=2, n=8, k=64))
        >>> reference(x.a, x.w).exact.shape
        (2, 8)
    """

    exact: Array
    bound: Array


def reference(
    a: Tensor, w: QuantizedWeight, bias: Tensor | None = None, activation: str | None = None
) -> Reference:
    """The float64 result and the elementwise worst-case bound (a) for ``matmul(a, w, bias, activation)``.

    ``E = 2 u (|A| @ |W|) + (K + 8) 2**-24 (|A| @ Wbar) + eta sum|a|``, then
    ``|C - C64| <= E + u (|C64| + E) + eta``; with an activation E counts 1.13-fold. With float64 the products are
    float64 too, but W is still made in float32.

    Example:
        >>> import qmm
        >>> from qmm.testing import Case, make_inputs, reference, worst_ratio
        >>> x = make_inputs(Case(m=2, n=8, k=64))
        >>> worst_ratio(qmm.matmul(x.a, x.w), reference(x.a, x.w)) <= 1
        True
    """
    return reference_from(a, *oracle.dequantize(w), bias, activation)


def reference_from(
    a: Tensor,
    value: Array,
    size: Array | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Reference:
    """:func:`reference` for a weight given as numbers, for example by the peer that wrote the file.

    Args:
        value: W, float64 ``[K, N]``.
        size: Wbar, float64 ``[K, N]``; None takes ``|W|``, the least it can be.
    """
    u, eta = ROUNDING[a.dtype]
    k, n = value.shape
    x = oracle.to_float64(a).reshape(-1, k)
    size = np.abs(value) if size is None else size
    with np.errstate(invalid="ignore", over="ignore"):
        exact = x @ value
        slack = 2 * u * (np.abs(x) @ np.abs(value))
        slack += (k + 8) * 2.0**-24 * (np.abs(x) @ size)
        slack += eta * np.abs(x).sum(1, keepdims=True)
        if bias is not None:
            b = oracle.to_float64(bias)
            exact = exact + b
            # the sum with the bias is one more float32 addition
            slack += 2.0**-23 * (np.abs(exact) + np.abs(b))
        if activation is not None:
            slack *= ACTIVATION_GROWTH
            slack += 2.0**-20 * np.abs(exact)  # exp, tanh and erf in float32
            exact = oracle.activate(exact, activation)
        bound = slack + u * (np.abs(exact) + slack) + eta
    shape = (*a.shape[:-1], n)
    return Reference(exact.reshape(shape), bound.reshape(shape))


def worst_ratio(result: Tensor, ref: Reference) -> float:
    """The largest ``|C - C64| / bound``; 1 is the limit. Infinite where finiteness or sign of an Inf differs.

    An exact value past the dtype's range may come out as Inf or as the largest finite number within the bound.

    Example:
        >>> import qmm
        >>> from qmm.testing import Case, make_inputs, reference, worst_ratio
        >>> x = make_inputs(Case(m=2, n=8, k=64))
        >>> worst_ratio(qmm.matmul(x.a, x.w) + 1, reference(x.a, x.w)) > 1
        True
    """
    got = oracle.to_float64(result)
    if got.shape != ref.exact.shape:
        raise AssertionError(f"shape {got.shape} where {ref.exact.shape} was expected")
    if got.size == 0:
        return 0.0
    top = float(torch.finfo(result.dtype).max)
    edge = top * (1 + ROUNDING[result.dtype][0])
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(got - ref.exact) / ref.bound
        past = np.abs(ref.exact) + ref.bound >= edge  # Inf is right or tolerable here
        inf_ok = np.isinf(got) & past & (np.sign(got) == np.sign(ref.exact))
        unbounded = np.isnan(ref.exact) | np.isnan(ref.bound) | np.isinf(ref.exact)
    error = np.where(inf_ok, 0.0, error)
    same = np.where(np.isnan(ref.exact), np.isnan(got), np.isinf(got) & (np.sign(got) == np.sign(ref.exact)))
    error = np.where(unbounded, np.where(same, 0.0, np.inf), error)
    return float(np.where(np.isnan(error), np.inf, error).max())


def assert_close(
    result: Tensor,
    a: Tensor,
    w: QuantizedWeight,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> float:
    """Rule (a): every element within the worst-case bound. Returns the worst error / bound.

    Raises:
        AssertionError: naming the worst ratio and the dtype.

    Example:
        >>> import qmm
        >>> from qmm.testing import Case, assert_close, make_inputs
        >>> x = make_inputs(Case(m=2, n=8, k=64))
        >>> assert_close(qmm.matmul(x.a, x.w), x.a, x.w) <= 1
        True
    """
    if result.dtype != a.dtype:
        raise AssertionError(f"result has dtype {result.dtype} where a has {a.dtype}")
    ratio = worst_ratio(result, reference(a, w, bias, activation))
    if not ratio <= 1:
        raise AssertionError(f"worst error is {ratio:.3g} of the numerics bound ({a.dtype}, {w!r})")
    return ratio


def assert_rms(result: Tensor, a: Tensor, w: QuantizedWeight) -> float:
    """Rule (b): on average no worse than 1.5x a correct emulation. Returns rms error / emulation's.

    The emulation rounds W to A's dtype once, adds float32 products one after the other, and rounds once.
    For zero-mean data with at least 256 outputs.

    Example:
        >>> import qmm
        >>> from qmm.testing import Case, assert_rms, make_inputs
        >>> x = make_inputs(Case(m=16, n=32, k=64))
        >>> assert_rms(qmm.matmul(x.a, x.w), x.a, x.w) <= 1.5
        True
    """
    exact = reference(a, w).exact
    assert exact.size >= RMS_OUTPUTS, "rule (b) needs at least 256 outputs"
    emulated = _rms(emulate(a, w), exact)
    got = _rms(result, exact)
    if not got <= RMS_FACTOR * emulated:
        raise AssertionError(f"rms error {got:.3g} is {got / emulated:.3g} times that of a correct emulation")
    return got / emulated


def emulate(a: Tensor, w: QuantizedWeight) -> Tensor:
    """A correct kernel in slow motion, in A's dtype ``[M, N]``."""
    value = torch.from_numpy(oracle.dequantize(w)[0]).to(a.dtype).float().numpy()
    x = a.detach().cpu().float().reshape(-1, w.in_features).numpy()
    acc = np.zeros((x.shape[0], w.out_features), np.float32)
    for k in range(w.in_features):
        acc += x[:, k, None] * value[k]
    return torch.from_numpy(acc).to(a.dtype)


def _rms(result: Tensor, exact: Array) -> float:
    error = oracle.to_float64(result).reshape(exact.shape) - exact
    return float(np.sqrt((error**2).mean() / (exact**2).mean()))


def assert_exact(result: Tensor, a: Tensor, w: QuantizedWeight) -> None:
    """Rule (c): data whose partial sums are all exact: the result is exact too, bit for bit.

    Example:
        >>> import qmm
        >>> from qmm.testing import Case, assert_exact, make_inputs
        >>> x = make_inputs(Case(m=2, n=8, k=64), exact=True)
        >>> assert_exact(qmm.matmul(x.a, x.w), x.a, x.w)
    """
    exact = oracle.to_float64(a).reshape(-1, w.in_features) @ oracle.dequantize(w)[0]
    expected = torch.from_numpy(exact).to(a.dtype).reshape(*a.shape[:-1], w.out_features)
    got = result.detach().cpu()
    if not torch.equal(got, expected):
        wrong = int((got != expected).sum())
        raise AssertionError(
            f"{wrong} of {got.numel()} elements differ where every sum is exact ({a.dtype}, {w!r})"
        )
