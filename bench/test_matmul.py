"""qmm.matmul on every kernel that is usable here, beside the dense matmul and other libraries.

    python -m pytest bench --benchmark-group-by=group          side by side: one group a shape and M
    python -m pytest bench -k "m16 and 8192"

The cases come from the builder of the tests; each call is checked before it is timed. ``extra_info`` has microseconds
a call, GB/s, TFLOP/s, the share of the roof (least time for the bytes and operations / time taken), and how many times
faster than the dense matmul it was, sampled in turn with it. On a GPU the weights are cold: a ring of copies larger
than three times L2, one CUDA graph. Without a GPU the shapes are tiny and say nothing about speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import qmm
from bench.peers import PEERS
from qmm.call import make_call
from qmm.testing import Case, Target, assert_close, make_inputs, targets
from qmm.timing import Contestant, Dense, Problem, Roof, Taken, ring_size
from qmm.timing.contest import CHECKED_ROWS, relative_error
from qmm.weight import ZeroKind

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPES = [(4096, 4096), (8192, 8192), (4096, 28672), (14336, 4096)] if GPU else [(128, 64)]
ROWS = [1, 16, 64, 256, 1024, 4096] if GPU else [1, 16]
HALF = torch.float16


def plain_cases() -> list[Case]:
    """int4, group 128, symmetric, fp16: what everybody measures."""
    return [
        Case(m=m, n=n, k=k, group_size=128, zero_kind=ZeroKind.NONE, dtype=HALF)
        for k, n in SHAPES
        for m in ROWS
    ]


def other_cases() -> Iterator[Case]:
    """One of each other sort."""
    k, n = SHAPES[0]
    for m in (ROWS[0], ROWS[1]):
        yield Case(m=m, n=n, k=k, bits=8, group_size=128, zero_kind=ZeroKind.NONE)
        yield Case(m=m, n=n, k=k, bits=3, group_size=64, dtype=torch.bfloat16)
        yield Case(m=m, n=n, k=k, group_size=32, zero_kind=ZeroKind.BIAS)
        yield Case(m=m, n=n, k=k, group_size=128, act_order=True)


PLAIN = plain_cases()
CASES = [*PLAIN, *other_cases()]
TARGETS = [t for t in targets() if t.device == DEVICE]


def group(case: Case) -> str:
    """Shape and M; other sorts than the plain one apart."""
    return f"K x N = {case.k}x{case.n} M = {case.m}" + ("" if case in PLAIN else f" ({case})")


def problem(case: Case) -> Problem:
    """A plain case for those that are no kernels of qmm."""
    return Problem(case.k, case.n, case.bits, case.group_size, dtype=case.dtype, device=DEVICE)


def dense_calls(case: Case, a: torch.Tensor) -> list[Callable[[], Any]]:
    """The dense matmul of the same shape on a ring of its own."""
    weight = torch.randn(case.k, case.n, device=DEVICE).to(case.dtype)
    ring = [weight, *(weight.clone() for _ in range(ring_size(weight.nbytes, DEVICE) - 1))]
    return [partial(torch.mm, a, w) for w in ring]


def record(
    benchmark: Any, taken: Taken, dense: Taken | None, roof: Roof, case: Case, weight_bytes: int
) -> None:
    """Figures of one point; bytes are those of W, A and C, each moved once."""
    moved = weight_bytes + case.dtype.itemsize * (case.m * case.k + case.m * case.n)
    flops = 2 * case.m * case.n * case.k
    benchmark.extra_info.update(
        us=round(taken.seconds * 1e6, 2),
        spread=round(taken.spread, 3),
        gb_s=round(moved / taken.seconds / 1e9, 1),
        tflop_s=round(flops / taken.seconds / 1e12, 3),
        roof_share=round(roof.seconds(moved, flops) / taken.seconds, 3),
        cold_l2=GPU,
        device=torch.cuda.get_device_name() if GPU else "cpu",
    )
    if dense is not None:
        benchmark.extra_info["dense_us"] = round(dense.seconds * 1e6, 2)
        benchmark.extra_info["times_faster_than_dense"] = round(dense.seconds / taken.seconds, 3)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matmul(case: Case, target: Target, benchmark: Any, timed: Callable[..., Any], roof: Roof) -> None:
    backend = qmm.backends()[target.backend]
    x = make_inputs(case, DEVICE)
    kernel = next(k for k in backend.kernels if k.name == target.kernel)
    reasons = backend.why_not(make_call(x.a, x.w), kernel)
    if reasons:
        pytest.skip(f"refused: {reasons[0]}")
    options = {"backend": target.backend, "kernel": target.kernel}
    rows = x.a[:CHECKED_ROWS]
    assert_close(qmm.matmul(x.a, x.w, **options)[:CHECKED_ROWS], rows, x.w)
    ring = [x.w, *(x.w.clone() for _ in range(ring_size(x.w.nbytes, DEVICE) - 1))]
    benchmark.group = group(case)
    calls = [partial(qmm.matmul, x.a, w, **options) for w in ring]
    emulated = backend.emulated
    taken, dense = timed(calls, () if emulated else dense_calls(case, x.a), once=emulated is not None)
    if emulated:  # its time says nothing: no rates
        benchmark.extra_info["emulated"] = emulated
    else:
        record(benchmark, taken, dense, roof, case, x.w.nbytes)


@pytest.mark.parametrize("name", ["torch.mm", *PEERS])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_other(case: Case, name: str, benchmark: Any, timed: Callable[..., Any], roof: Roof) -> None:
    """The dense matmul, which a quantised one has to beat, and other libraries."""
    one: Contestant = Dense() if name == "torch.mm" else PEERS[name]()
    mine = one.problem(problem(case))
    if reason := one.why_not(mine):
        pytest.skip(f"{name}: {reason}")
    w, a = mine.weight(), mine.rows(case.m)
    if reason := one.why_not_rows(mine, w, a):
        pytest.skip(f"{name}: {reason}")
    ring = one.copies(mine, w, ring_size(one.bytes_each(mine), DEVICE))
    exact = a[:CHECKED_ROWS].float() @ w.dequantize(torch.float32)
    error = relative_error(ring[0](a)[:CHECKED_ROWS], exact)
    assert error < one.bound * torch.finfo(mine.dtype).eps / 2
    benchmark.group = group(case)
    benchmark.extra_info["dtype"] = str(mine.dtype)
    itself = name == "torch.mm"
    beside = () if itself else dense_calls(case, problem(case).rows(case.m))  # in the case's own dtype
    taken, dense = timed([partial(run, a) for run in ring], beside)
    record(benchmark, taken, dense, roof, case, one.bytes_each(mine))
