"""Not a test: compiles the real kernels for targets with no GPU and prints what came out, a JSON line a kernel.

Run in a process of its own, without TRITON_INTERPRET: ``python compile_for_target.py cuda-90 hip-gfx942``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qmm.backends.triton_gpu import launch
from qmm.backends.triton_gpu.heuristics import DeviceFacts, choose
from qmm.backends.triton_gpu.reduce import reduce_kernel
from qmm.backends.triton_gpu.tiled import tiled_kernel
from qmm.call import make_call
from qmm.testing import Case, make_inputs
from qmm.weight import ZeroKind

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
SHARED_KIB = {"80": 163, "86": 99, "89": 99, "90": 227, "100": 227}
TYPES = {
    HALF: "fp16", BF16: "bf16", FLOAT: "fp32", torch.float64: "fp64",
    torch.int32: "i32", torch.uint8: "u8", torch.int8: "i8",
}  # fmt: skip
NONE, INT, FLOATING, BIAS = ZeroKind.NONE, ZeroKind.INT, ZeroKind.FLOAT, ZeroKind.BIAS
CASES = {
    "decode-int4-sym-fp16": Case(m=1, n=256, k=1024, group_size=128, zero_kind=NONE),
    "prefill-int4-zeros-bf16": Case(m=512, n=256, k=1024, group_size=32, dtype=BF16, zero_kind=INT),
    "int3-act-order-fp32": Case(
        m=40, n=256, k=256, bits=3, group_size=32, dtype=FLOAT, zero_kind=INT, act_order=True
    ),
    "int8-codebook-fp16": Case(m=24, n=256, k=1024, bits=8, group_size=64, zero_kind=NONE, codebook=HALF),
    "int2-packed-factors-fp16": Case(
        m=16, n=256, k=1024, bits=2, group_size=16, zero_kind=BIAS, scale_dtype=torch.uint4, two_level="rows"
    ),
    "nvfp4-divided-bf16": Case(
        m=16, n=256, k=1024, group_size=16, dtype=BF16, zero_kind=NONE, codebook=FLOAT,
        scale_dtype=torch.float8_e4m3fn, two_level="one", divides=True,
    ),
    "ragged-e4m3-bf16": Case(
        m=60, n=37, k=1001, group_size=24, dtype=BF16, scale_dtype=torch.float8_e4m3fn, two_level="one",
        zero_kind=FLOATING, bias=torch.float64, activation="gelu",
    ),
}  # fmt: skip


def source(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> ASTSource:
    """What ``kernel[grid](*arguments, **constants)`` would compile: Triton's own rules of specialisation."""
    signature, values, attributes = {}, {}, {}
    plain = {kernel.params[i].name for i in range(len(kernel.params)) if kernel.params[i].do_not_specialize}
    for i, name in enumerate(kernel.arg_names):
        value = constants[name] if name in constants else arguments[i]
        is_one = isinstance(value, int) and value == 1 and name not in plain
        if name in constants or value is None or is_one:
            signature[name], values[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if value % 16 == 0 and name not in plain:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, values, attributes)


# Every kernel for the targets that differ most; elsewhere those that take most registers and shared memory.
WHOLE = ("cuda-80", "cuda-90", "hip-gfx942")
BRIEF = ("prefill-int4-zeros-bf16", "int3-act-order-fp32")


def sources(
    names: tuple[str, ...], device: DeviceFacts
) -> Iterator[tuple[str, ASTSource, dict[str, int], str]]:
    """Name, source, options and dot dtype of every kernel to compile."""
    for name in names:
        case = CASES[name]
        x = make_inputs(case)
        call = make_call(x.a, x.w, bias=x.bias, activation=case.activation)
        config = choose(call, device)
        c = torch.empty(config.split_k, call.m, call.n, dtype=FLOAT if config.split_k > 1 else case.dtype)
        arguments = launch.arguments(
            call, config, x.a, x.w.tensors, x.bias if config.split_k == 1 else None, c
        )
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        yield name, source(tiled_kernel, arguments, launch.constants(call, config)), options, config.dot
        if name.startswith("decode"):
            assert config.split_k > 1
            out, bias = torch.empty(call.m, call.n, dtype=HALF), torch.empty(call.n)
            arguments = (c, bias, out, call.m, call.n, config.split_k, out.stride(0), out.stride(1))
            constants = launch.reduce_constants(replace(call, activation="silu"))
            yield "reduce", source(reduce_kernel, arguments, constants), {}, "none"


def spilled_bytes(cubin: bytes) -> int:
    """Bytes of stack and local memory a thread, from the machine code's own header."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"(?:STACK|LOCAL):(\d+)", text)
    assert found, text
    return sum(int(size) for size in found)


def compile_all(target_name: str) -> None:
    """Compile everything for one target."""
    backend, arch = target_name.split("-")
    cuda = backend == "cuda"
    names = tuple(CASES) if target_name in WHOLE else BRIEF
    target = GPUTarget(backend, int(arch) if cuda else arch, 32 if cuda else 64)
    shared = (SHARED_KIB[arch] if cuda else 64) << 10
    for name, ast, options, dot in sources(names, DeviceFacts(processors=132, shared_bytes=shared)):
        compiled = triton.compile(ast, target=target, options=options)
        assembly = compiled.asm["ptx" if cuda else "amdgcn"]
        units = r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[.\w:]*" if cuda else r"\bv_mfma_\w+"
        instructions = set(re.findall(units, assembly))
        result = {
            "target": target_name,
            "name": name,
            "dot": dot,
            "matrix_instructions": sorted(instructions),
            "shared": compiled.metadata.shared,
            "shared_limit": shared,
            "spilled": spilled_bytes(compiled.asm["cubin"]) if cuda else None,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        compile_all(wanted)
