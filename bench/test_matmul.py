"""qmm.matmul on every kernel that is usable here, beside torch's dense matmul of the same shape.

The cases come from the builder of the tests; each call is checked before it is timed. ``extra_info`` has microseconds
a call, GB/s, TFLOP/s and the share of the roof (least time for the bytes and operations / time taken). On a GPU the
weights are cold: a ring of copies larger than three times L2, one CUDA graph. Without a GPU the shapes are tiny and
say nothing about speed; interpreted and simulated kernels say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import qmm
from qmm.call import make_call
from qmm.testing import Case, Target, assert_close, make_inputs, targets
from qmm.weight import ZeroKind

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CHECKED_ROWS = 64
SHAPES = [(4096, 4096), (8192, 8192), (4096, 28672), (14336, 4096)] if GPU else [(128, 64)]
ROWS = [1, 16, 64, 256, 1024, 4096] if GPU else [1, 16]
HALF = torch.float16


def cases() -> Iterator[Case]:
    """int4, group 128, symmetric, fp16: the shapes that everybody measures; then one of each other sort."""
    for k, n in SHAPES:
        for m in ROWS:
            yield Case(m=m, n=n, k=k, group_size=128, zero_kind=ZeroKind.NONE, dtype=HALF)
    k, n = SHAPES[0]
    for m in (ROWS[0], ROWS[1]):
        yield Case(m=m, n=n, k=k, bits=8, group_size=128, zero_kind=ZeroKind.NONE)
        yield Case(m=m, n=n, k=k, bits=3, group_size=64, dtype=torch.bfloat16)
        yield Case(m=m, n=n, k=k, group_size=32, zero_kind=ZeroKind.BIAS)
        yield Case(m=m, n=n, k=k, group_size=128, act_order=True)


CASES = list(cases())
TARGETS = [t for t in targets() if t.device == DEVICE]


def record(benchmark: Any, timing: Any, roof: Any, case: Case, weight_bytes: int) -> None:
    """Figures of one point; bytes are those of W, A and C, each moved once."""
    size = torch.empty(0, dtype=case.dtype).element_size()
    moved = weight_bytes + size * (case.m * case.k + case.m * case.n)
    flops = 2 * case.m * case.n * case.k
    benchmark.extra_info.update(
        us=round(timing.seconds * 1e6, 2),
        gb_s=round(moved / timing.seconds / 1e9, 1),
        tflop_s=round(flops / timing.seconds / 1e12, 3),
        roof_share=round(roof.seconds(moved, flops) / timing.seconds, 3),
        cold_l2=timing.cold,
        ring=timing.ring,
        device=torch.cuda.get_device_name() if GPU else "cpu",
    )


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matmul(
    case: Case,
    target: Target,
    benchmark: Any,
    timed: Callable[..., Any],
    roof: Any,
    ring: Callable[[int], int],
) -> None:
    backend = qmm.backends()[target.backend]
    x = make_inputs(case, DEVICE)
    kernel = next(k for k in backend.kernels if k.name == target.kernel)
    reasons = backend.why_not(make_call(x.a, x.w), kernel)
    if reasons:
        pytest.skip(f"refused: {reasons[0]}")
    options = {"backend": target.backend, "kernel": target.kernel}
    rows = x.a[:CHECKED_ROWS]
    assert_close(qmm.matmul(x.a, x.w, **options)[:CHECKED_ROWS], rows, x.w)
    out = torch.empty(case.m, case.n, dtype=case.dtype, device=DEVICE)
    weights = [x.w, *(x.w.clone() for _ in range(ring(x.w.nbytes) - 1))]
    benchmark.group = str(case)
    calls = [lambda w=w: qmm.matmul(x.a, w, out=out, **options) for w in weights]
    timing = timed(calls, once=backend.emulated is not None)
    if backend.emulated:  # its time says nothing: no rates
        benchmark.extra_info["emulated"] = backend.emulated
    else:
        record(benchmark, timing, roof, case, x.w.nbytes)


@pytest.mark.parametrize("case", [c for c in CASES if c.bits == 4 and c.zero_kind is ZeroKind.NONE], ids=str)
def test_dense(
    case: Case, benchmark: Any, timed: Callable[..., Any], roof: Any, ring: Callable[[int], int]
) -> None:
    """torch.mm with the dense weight: what a quantised matmul has to beat."""
    a = torch.randn(case.m, case.k, device=DEVICE).to(case.dtype)
    weight = torch.randn(case.k, case.n, device=DEVICE).to(case.dtype)
    out = torch.empty(case.m, case.n, dtype=case.dtype, device=DEVICE)
    weights = [weight, *(weight.clone() for _ in range(ring(weight.nbytes) - 1))]
    benchmark.group = str(case)
    timing = timed([lambda w=w: torch.mm(a, w, out=out) for w in weights])
    record(benchmark, timing, roof, case, weight.nbytes)
