"""Every configuration that can be forced on the Hopper kernels is correct, and gives the same bits each time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import qmm
from qmm.backends.triton_gpu.heuristics import device_facts
from qmm.backends.triton_gpu.hopper.choose import choose_decode
from qmm.backends.triton_gpu.hopper.choose_wgmma import Tiling, tilings, wgmma_config
from qmm.call import make_call
from qmm.testing import Case, assert_close, make_inputs
from qmm.weight import ZeroKind

pytestmark = pytest.mark.gpu

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
CASES = [
    Case(m=100, n=448, k=2048, group_size=128, dtype=HALF),
    Case(
        m=61, n=1000, k=1096, group_size=32, dtype=BF16, scale_dtype=BF16, zero_kind=ZeroKind.INT, bias=FLOAT
    ),
    Case(
        m=300, n=250, k=2056, group_size=64, bits=8, dtype=HALF, zero_kind=ZeroKind.FLOAT, activation="silu"
    ),
    Case(m=17, n=64, k=4099, group_size=4099, dtype=BF16, scale_dtype=FLOAT, zero_kind=ZeroKind.BIAS),
]


def usable(kernel: str) -> bool:
    if not torch.cuda.is_available():
        return False
    x = make_inputs(CASES[0], "cuda")
    explanation = qmm.explain(x.a[:8], x.w, backend="triton")
    return not any(reason.kernel == kernel for reason in explanation.reasons.get("triton", []))


def check(case: Case, x: Any, config: Any) -> None:
    from qmm.backends.triton_gpu.hopper import launch

    layout = x.w.prepare_for(qmm.backends()["triton"])
    call = make_call(x.a, x.w, bias=x.bias, activation=case.activation)
    results = []
    for _ in range(10):
        out = torch.full((call.m, call.n), torch.nan, dtype=x.a.dtype, device="cuda")
        launch.run(call, config, x.a, layout, x.bias, out)
        results.append(out)
    assert_close(results[0], x.a, x.w, bias=x.bias, activation=case.activation)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tiling_of_wgmma(case: Case) -> None:
    if not usable("wgmma"):
        pytest.skip("needs compute capability 9.0")
    x = make_inputs(case, "cuda")
    call = make_call(x.a, x.w, bias=x.bias, activation=case.activation)
    forced = [Tiling(64, split_k=4, cluster=True), Tiling(64, split_k=8, cluster=True), Tiling(256)]
    for tiling in dict.fromkeys([*tilings(replace(call, m=min(call.m, 1024))), *forced]):
        try:
            config = wgmma_config(call, tiling, device_facts(x.a.device).shared_bytes)
        except ValueError:  # more splits than steps
            continue
        check(case, x, config)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_decode_configuration(case: Case) -> None:
    if not usable("decode"):
        pytest.skip("needs compute capability 8.0 to 9.0")
    case = replace(case, m=min(case.m, 13))
    x = make_inputs(case, "cuda")
    facts = device_facts(x.a.device)
    call = make_call(x.a, x.w, bias=x.bias, activation=case.activation)
    chosen = choose_decode(call, facts.processors, facts.shared_bytes)
    for columns in (16, 32, 64):
        for warps in (4, 8):
            check(
                case, x, replace(chosen, shared=False, block_m=8, block_n=columns, num_warps=warps, depth=2)
            )
    for columns in (32, 64, 128):
        for rows in (8, 16):
            for depth in (2, 3):
                check(
                    case,
                    x,
                    replace(chosen, shared=True, block_m=rows, block_n=columns, num_warps=4, depth=depth),
                )
