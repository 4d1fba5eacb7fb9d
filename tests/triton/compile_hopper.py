"""Not a test: compiles the Gluon kernels by their real launch, with no GPU, and prints a JSON line a kernel.

Everything from ``launch.run`` on is real: the arguments, the descriptors, Triton's own specialisation. Only the last
step is left out: a driver stands in that names the target, and what would be launched is compiled and kept. Run in a
process of its own, without TRITON_INTERPRET: ``python compile_hopper.py core`` (the others: ``decode``, ``wgmma``).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from qmm.backends.triton_gpu.heuristics import DeviceFacts
from qmm.backends.triton_gpu.hopper import launch
from qmm.backends.triton_gpu.hopper.choose import choose_decode
from qmm.backends.triton_gpu.hopper.choose_wgmma import Tiling, choose_wgmma, wgmma_config
from qmm.backends.triton_gpu.hopper.layout import FragmentLayout
from qmm.call import MatmulCall, make_call
from qmm.testing import Case, make_inputs
from qmm.weight import ZeroKind

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
NONE, INT, FLOATING, BIAS = ZeroKind.NONE, ZeroKind.INT, ZeroKind.FLOAT, ZeroKind.BIAS
PROCESSORS = 132
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227}


@dataclass(frozen=True)
class Compilation:
    """A case, the target, the kernel and what of its configuration is forced; ``core``: compiled in every run."""

    case: Case
    kernel: str = "decode"
    target: int = 90
    config: tuple[tuple[str, Any], ...] = ()
    core: bool = False
    tiling: Tiling | None = None


def plain(m: int, **facts: Any) -> Case:
    """A case whose rows are aligned."""
    return Case(m=m, **{"n": 256, "k": 1024, "group_size": 128, "dtype": HALF, "zero_kind": NONE} | facts)


def bf16(m: int, **facts: Any) -> Case:
    return plain(m, **{"dtype": BF16, "scale_dtype": BF16} | facts)


W = "wgmma"
COMPILATIONS = {
    # decode, operands straight into registers
    "d-fp16": Compilation(plain(1), core=True),
    "d-fp16-80": Compilation(plain(1), target=80, core=True),
    "d-fp16-86": Compilation(plain(1), target=86),
    "d-bf16-int-89": Compilation(bf16(4, zero_kind=INT), target=89),
    "d-bf16-8-tail": Compilation(
        bf16(3, bits=8, k=1000, zero_kind=BIAS, bias=FLOAT, activation="gelu"), core=True
    ),
    "d-fp32-scales-80": Compilation(bf16(4, scale_dtype=FLOAT, zero_kind=FLOATING), target=80),
    "d-halves-int": Compilation(plain(4, group_size=32, zero_kind=INT, activation="silu")),
    "d-whole-K-16-warps": Compilation(plain(1, k=8192, group_size=8192), config=(("num_warps", 16),)),
    "d-act-order": Compilation(plain(1, k=1000, act_order="even"), core=True),
    "d-dependent": Compilation(plain(1), config=(("dependent", True),)),
    "s-128-columns": Compilation(
        plain(16, n=448, zero_kind=INT), config=(("block_n", 128), ("num_warps", 4))
    ),
    "d-32-columns": Compilation(plain(2, zero_kind=FLOATING), config=(("block_n", 32), ("num_warps", 4))),
    # decode, through shared memory
    "s-fp16": Compilation(plain(8), config=(("block_n", 64),), core=True),
    "s-int-80": Compilation(plain(16, zero_kind=INT), target=80, config=(("block_n", 32),)),
    "s-bf16-8-tail-86": Compilation(bf16(16, bits=8, k=1000, zero_kind=BIAS), target=86),
    "s-halves-fp32-scales": Compilation(
        bf16(9, group_size=32, scale_dtype=FLOAT, zero_kind=FLOATING, bias=HALF, activation="gelu_tanh"),
    ),
    "s-dependent": Compilation(plain(8), config=(("dependent", True),)),
    # wgmma
    "w-16": Compilation(plain(17), W, tiling=Tiling(16)),
    "w-64-bf16-int": Compilation(bf16(64, zero_kind=INT), W, tiling=Tiling(64)),
    "w-128-float": Compilation(plain(128, zero_kind=FLOATING), W, tiling=Tiling(128)),
    "w-128-bf16-8-bias": Compilation(
        bf16(128, bits=8, zero_kind=BIAS, bias=FLOAT, activation="gelu_tanh"), W, tiling=Tiling(128)
    ),
    "w-128-8-whole-K": Compilation(plain(128, bits=8, group_size=1024), W, tiling=Tiling(128)),
    "w-32-parts": Compilation(plain(32, group_size=32, zero_kind=INT), W, tiling=Tiling(32)),
    "w-64-split-3": Compilation(plain(64, zero_kind=INT), W, tiling=Tiling(64, split_k=3), core=True),
    "w-128-split-2": Compilation(bf16(128), W, tiling=Tiling(128, split_k=2)),
    "w-16-cluster": Compilation(plain(16), W, tiling=Tiling(16, split_k=2, cluster=True)),
    "w-64-cluster": Compilation(
        plain(64, zero_kind=INT), W, tiling=Tiling(64, split_k=2, cluster=True), core=True
    ),
    "w-128-cluster-bf16-bias": Compilation(
        bf16(128, zero_kind=BIAS, bias=FLOAT), W, tiling=Tiling(128, split_k=2, cluster=True)
    ),
    "w-64-cluster-4": Compilation(plain(64), W, tiling=Tiling(64, 192, 4, cluster=True), core=True),
    "w-32-cluster-4-parts": Compilation(
        bf16(32, group_size=32, zero_kind=INT), W, tiling=Tiling(32, 192, 4, cluster=True)
    ),
    "w-cluster-pointers": Compilation(
        plain(40, n=250, k=1001, group_size=64, bias=HALF), W, tiling=Tiling(64, split_k=2, cluster=True)
    ),
    "w-256": Compilation(plain(512, k=4096), W, tiling=Tiling(256), core=True),
    "w-256-bf16-float": Compilation(bf16(512, k=4096, zero_kind=FLOATING), W, tiling=Tiling(256)),
    "w-pointers": Compilation(plain(40, n=250, k=1001, group_size=64, bias=HALF, activation="relu"), W),
    "w-two": Compilation(plain(64), W, tiling=Tiling(64, per_processor=2)),
    "w-two-split": Compilation(
        plain(32, zero_kind=INT), W, tiling=Tiling(32, split_k=2, per_processor=2), core=True
    ),
}


class Target:
    """Stands for a GPU driver: names the target and launches nothing. The device's number is the target's."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def configuration(wanted: Compilation, call: MatmulCall) -> Any:
    """The choice of the model, with what is forced."""
    shared = SHARED_KIB[wanted.target] << 10
    if wanted.kernel == "decode":
        return replace(choose_decode(call, PROCESSORS, shared), **dict(wanted.config))
    if wanted.tiling is None:
        return choose_wgmma(call, PROCESSORS, shared)
    return wgmma_config(call, wanted.tiling, shared)


class NotLaunched:
    """Stands for the kernel where the launch asks for its launcher."""

    packed_metadata = (4, 1, 0)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: None


def compiled_by_launch(wanted: Compilation) -> tuple[Any, Any]:
    """Configuration and compiled kernel of one real launch."""
    x = make_inputs(wanted.case)
    call = make_call(x.a, x.w, bias=x.bias, activation=wanted.case.activation)
    config = configuration(wanted, call)
    driver.set_active(Target(wanted.target))
    kept = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept.append(run(self, *args, **kwargs | {"warmup": True}))
        # the launcher kept for later calls takes compile-time arguments by their place, behind the others
        given = [name for name in kwargs if name in self.arg_names]
        assert given == self.arg_names[len(args) :], given
        return NotLaunched()

    JITFunction.run = compile_only
    try:
        launch.run(call, config, x.a, FragmentLayout(x.w), x.bias, x.a.new_empty(call.m, call.n))
    finally:
        JITFunction.run = run
    *before, compiled = kept
    assert len(before) == (config.before == "gather")
    return config, compiled


def tool(name: str, *arguments: str) -> str:
    command = [str(Path(triton.__file__).parent / "backends/nvidia/bin" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loops(sass: str) -> Iterator[str]:
    """Bodies of the loops of a listing by nvdisasm: from a label to a later branch back to it, the inner ones too."""
    label_at = {m[1]: m.start() for m in re.finditer(r"^(\.L_x_\d+):", sass, re.M)}
    for branch in re.finditer(r"\bBRA[^;`]*`\((\.L_x_\d+)\)", sass):
        start = label_at.get(branch[1])
        if start is not None and start < branch.start():
            yield sass[start : branch.start()]


SPILLS = r"\b(?:STL|LDL)\b"
LOADS = r"\b(?:LDG|LDGSTS|UTMALDG)\.[.\w]*"


def facts(compiled: Any) -> dict[str, Any]:
    """What the machine code says about itself."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = tool("nvdisasm", file.name)
    ptx = compiled.asm["ptx"]
    local = re.findall(r"(?:STACK|LOCAL):(\d+)", usage)
    # the kernel's own, but for the KiB that the driver keeps
    own = max(0, max(map(int, re.findall(r"SHARED:(\d+)", usage)), default=0) - 1024)
    assert local, usage
    multiplying = max((body for body in loops(sass) if "MMA" in body), key=len, default="")
    return {
        "registers": max(map(int, re.findall(r"REG:(\d+)", usage))),
        "local_bytes": sum(map(int, local)),
        "spills": len(re.findall(SPILLS, sass)),
        "shared": compiled.metadata.shared + own,
        "products": sorted(set(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async)\b", ptx))),
        "loop_found": bool(multiplying),
        "loop_spills": len(re.findall(SPILLS, multiplying)),
        "loop_shuffles": len(re.findall(r"\bSHFL\b", multiplying)),
        "loop_loads": sorted(set(re.findall(LOADS, multiplying))),
        "loads": sorted(set(re.findall(LOADS, sass))),
    }


def main(which: str) -> None:
    # the launch asks for these facts of a GPU
    torch.cuda.current_device = lambda: None
    torch.cuda.is_current_stream_capturing = lambda: True
    launch.device_facts = lambda device: DeviceFacts(PROCESSORS, SHARED_KIB[90] << 10)
    for name, wanted in COMPILATIONS.items():
        if which in ("all", name, "core" if wanted.core else wanted.kernel):
            began = time.perf_counter()
            config, compiled = compiled_by_launch(wanted)
            result = {
                "triton": triton.__version__,
                "name": name,
                "kernel": wanted.kernel,
                "target": wanted.target,
                "config": str(config),
            }
            two = wanted.tiling is not None and wanted.tiling.per_processor == 2
            result["shared_limit"] = (SHARED_KIB[wanted.target] << 10) // (2 if two else 1)
            result |= facts(compiled) | {"seconds": round(time.perf_counter() - began, 1)}
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
