"""What is run under compute-sanitizer: ``python sanitizer_calls.py triton.tiled``: one kernel on small, ragged shapes.

Operands are plain allocations (no poison around them, which would hide a read past the end), and every result is held
to the numerics bound, so that a run in which nothing was computed cannot pass for a clean one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fuzz"))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")

from fuzz_config import Forced, with_forced

from qmm.call import make_call
from qmm.dispatch import select
from qmm.matmul import execute
from qmm.testing import Case, assert_close, make_inputs
from qmm.weight import ZeroKind

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
Calls = list[tuple[Case, Forced | None]]

_SPLIT = (
    ("block_m", 16),
    ("block_n", 32),
    ("block_k", 32),
    ("num_warps", 4),
    ("num_stages", 2),
    ("split_k", 4),
)
_NUMBA_SPLIT = (
    ("block_m", 4),
    ("block_n", 64),
    ("block_k", 32),
    ("threads_m", 4),
    ("threads_n", 64),
    ("splits", 3),
)
PORTABLE: Calls = [
    (Case(m=3, n=40, k=160), None),  # the last words are the very end of their allocation
    (Case(m=5, n=37, k=70, bits=3, dtype=BF16, bias=FLOAT, activation="gelu"), None),
    (Case(m=17, n=21, k=96, act_order=True, bits=8, group_size=16, dtype=FLOAT), None),
    (Case(m=2, n=24, k=72, codebook=HALF, zero_kind=ZeroKind.NONE), None),
    (Case(m=2, n=19, k=100, group_size=16, two_level="rows", zero_kind=ZeroKind.BIAS), None),
]


def _tiling(
    block_m: int, columns: int = 128, split_k: int = 1, cluster: bool = False, per_processor: int = 1
) -> Forced:
    names = ("block_m", "columns", "split_k", "cluster", "per_processor")
    return tuple(zip(names, (block_m, columns, split_k, cluster, per_processor), strict=True))


def _decode(shared: bool, block_m: int, block_n: int) -> Forced:
    return (("shared", shared), ("block_m", block_m), ("block_n", block_n), ("num_warps", 4), ("depth", 2))


CALLS: dict[str, Calls] = {
    "triton.tiled": [*PORTABLE, (Case(m=1, n=64, k=96), _SPLIT)],
    "numba.tiled": [*PORTABLE, (Case(m=1, n=64, k=96), _NUMBA_SPLIT)],
    "torch.blocks": PORTABLE[:2],
    "triton.decode": [
        (Case(m=1, n=40, k=320, group_size=64), None),
        (Case(m=4, n=64, k=1000, group_size=-1, bits=8, dtype=BF16, bias=FLOAT), _decode(False, 8, 32)),
        (Case(m=13, n=72, k=328, group_size=32, zero_kind=ZeroKind.FLOAT), _decode(True, 16, 64)),
        (Case(m=7, n=21, k=70, group_size=64, zero_kind=ZeroKind.BIAS, dtype=BF16), _decode(True, 8, 32)),
    ],
    "triton.wgmma": [
        (Case(m=17, n=40, k=320, group_size=64), None),
        (Case(m=33, n=250, k=1001, group_size=64, bias=HALF, activation="silu"), _tiling(64, split_k=3)),
        (Case(m=40, n=200, k=1024, group_size=128, dtype=BF16), _tiling(64, split_k=2, cluster=True)),
        (Case(m=300, n=136, k=512, group_size=32, bits=8, zero_kind=ZeroKind.NONE), _tiling(256)),
    ],
}


def run_kernel(name: str, device: str) -> float:
    """Every call of one kernel (``"triton.tiled"``); the worst error / bound.

    Raises:
        AssertionError: a result is outside the bound.
        qmm.UnsupportedError: the kernel refuses here.
    """
    backend, kernel = name.split(".")
    worst = 0.0
    for case, forced in CALLS.get(name, PORTABLE):
        x = make_inputs(case, device)
        call = make_call(x.a, x.w, bias=x.bias, activation=case.activation)
        choice = select(call, backend, kernel)
        if not (forced and device == "cpu"):
            choice = with_forced(choice, call, forced)
        result = torch.empty(call.m, call.n, dtype=x.a.dtype, device=device)
        execute(choice, call, x.a, x.w, x.bias, result)
        worst = max(worst, assert_close(result, x.a, x.w, bias=x.bias, activation=case.activation))
    return worst


if __name__ == "__main__":
    print(f"worst error / bound {run_kernel(sys.argv[1], 'cuda'):.4f}")
