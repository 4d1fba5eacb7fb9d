"""Compiles kernels to PTX without a GPU and without the simulator; run as a script by test_compile.py.

Prints a JSON object ``{name: PTX}`` on the last line, or ``{"missing": reason}`` where NVIDIA's compiler is not here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

from qmm.backends.numba_gpu.facts import ReduceFacts, TiledFacts
from qmm.weight.spec import ZeroKind

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
E8M0 = getattr(torch, "float8_e8m0fnu", torch.float8_e4m3fn)  # torch 2.7 and later

BASE = TiledFacts(
    a_dtype=HALF,
    out_dtype=HALF,
    bias_dtype=None,
    activation=None,
    bits=4,
    zero_kind=ZeroKind.INT,
    scale_dtype=HALF,
    zero_dtype=torch.int32,
    scale2=None,
    zero2=None,
    divides=False,
    codebook_dtype=None,
    act_order=False,
    block_m=16,
    block_n=64,
    block_k=32,
    threads_m=16,
    threads_n=16,
)
LOW = replace(BASE, block_m=4, threads_m=4, threads_n=64, out_dtype=FLOAT)

# Together they touch every decoder, zero kind, activation and rounding; the numbers are compute capabilities.
FACTS: dict[str, tuple[TiledFacts | ReduceFacts, tuple[int, int]]] = {
    "low-partial": (LOW, (8, 0)),
    "high": (replace(BASE, block_m=64), (9, 0)),
    "int3-bf16-bias": (
        replace(BASE, bits=3, a_dtype=BF16, out_dtype=BF16, zero_kind=ZeroKind.BIAS, zero_dtype=torch.int8,
                scale_dtype=torch.int8, scale2="rows", zero2="rows", act_order=True, bias_dtype=BF16,
                activation="silu"),
        (9, 0),
    ),
    "int5-e4m3-float-zero": (
        replace(BASE, bits=5, a_dtype=FLOAT, out_dtype=FLOAT, zero_kind=ZeroKind.FLOAT, zero_dtype=HALF,
                scale_dtype=torch.float8_e4m3fn, scale2="one", bias_dtype=FLOAT, activation="gelu"),
        (8, 0),
    ),
    "codebook-e8m0": (
        replace(BASE, zero_kind=ZeroKind.NONE, zero_dtype=None, scale_dtype=E8M0, codebook_dtype=BF16,
                bias_dtype=HALF, activation="gelu_tanh"),
        (9, 0),
    ),
    "int2-packed-factors": (
        replace(BASE, bits=2, zero_kind=ZeroKind.BIAS, zero_dtype=torch.uint4, scale_dtype=torch.uint4,
                scale2="rows", zero2="rows"),
        (9, 0),
    ),
    "nvfp4-divided": (
        replace(BASE, zero_kind=ZeroKind.NONE, zero_dtype=None, scale_dtype=torch.float8_e4m3fn, scale2="one",
                divides=True, codebook_dtype=FLOAT),
        (9, 0),
    ),
    "int8-symmetric": (
        replace(BASE, bits=8, zero_kind=ZeroKind.NONE, zero_dtype=None, activation="relu"),
        (8, 0),
    ),
    "reduce-bf16": (ReduceFacts(BF16, BF16, "gelu"), (9, 0)),
    "reduce-fp16": (ReduceFacts(HALF, FLOAT, "silu"), (8, 0)),
}  # fmt: skip


def main() -> None:
    """Compile all of ``FACTS``."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        for library in ("nvvm", "nvrtc"):  # nvrtc says which architectures there are
            load_nvidia_dynamic_lib(library)
    except DynamicLibNotFoundError as error:
        print(json.dumps({"missing": str(error).splitlines()[0]}))
        return
    print(json.dumps({name: compile_one(*what) for name, what in FACTS.items()}))


def compile_one(facts: TiledFacts | ReduceFacts, capability: tuple[int, int]) -> str:
    """PTX of one kernel."""
    import numba.cuda.dispatcher as dispatcher
    from numba import cuda

    from qmm.backends.numba_gpu.kernels import make_kernel, signature

    # device functions ask the current GPU for what the kernel is compiled for
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    kernel = make_kernel(facts)
    ptx, _ = cuda.compile_ptx(kernel, signature(facts, kernel).args, cc=capability)
    return str(ptx)


if __name__ == "__main__":
    sys.exit(main())
