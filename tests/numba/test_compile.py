"""The kernels compile for real GPUs, on a machine without one: numba -> NVVM -> PTX (-> ptxas where there is one)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_ptx.py")


@pytest.mark.slow
def test_kernels_compile_for_real_gpus(tmp_path: Path) -> None:
    """Every decoder, zero kind, activation and rounding, for compute capability 8.0 or 9.0."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not here")
    env = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    if "missing" in compiled:
        pytest.skip(f"NVIDIA's compiler is not here: {compiled['missing']}")
    assert len(compiled) >= 8
    found = {name: faults(ptx) + assembly_faults(ptx, tmp_path / name) for name, ptx in compiled.items()}
    assert not any(found.values()), found


def faults(ptx: str) -> list[str]:
    """What a kernel's code must not have, and has, and what it lacks."""
    rules = {
        "float64 (a Python float, or integers meeting a float32)": r"\.f64\b",
        "local memory (sums that left their registers)": r"\b(?:ld|st)\.local\b",
        "subnormals flushed to zero (fastmath)": r"\b(?:add|mul|fma)\.(?:rn\.)?ftz\b",
        "approximate division (fastmath)": r"\bdiv\.(?:approx|full)\b",
    }
    found = [rule for rule, pattern in rules.items() if re.search(pattern, ptx)]
    if ".shared" in ptx:
        found += [] if "fma.rn.f32" in ptx else ["no fused multiply-add in the matmul"]
        found += [] if len(re.findall(r"\.shared \.align", ptx)) == 2 else ["not two tiles in shared memory"]
    return found


def assembly_faults(ptx: str, path: Path) -> list[str]:
    """What ptxas says, where it is here and not older than the PTX: refusal, or registers spilled."""
    ptxas, target = shutil.which("ptxas"), re.search(r"\.target (sm_\d+)", ptx)
    assert target is not None
    if ptxas is None:
        return []
    path.write_text(ptx)
    command = [ptxas, f"-arch={target.group(1)}", "-v", str(path), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Unsupported .version" in done.stderr:
        return []
    fine = done.returncode == 0 and " 0 bytes spill stores" in done.stderr
    return [] if fine else [done.stderr]


def test_a_fault_is_seen() -> None:
    """The rules find what they are for."""
    good = ".shared .align 4\n.shared .align 4\nfma.rn.f32 %f1, %f2;"
    assert faults(good) == []
    for bad in (
        "mul.f64 %fd1;",
        "st.local.f32 [%r1];",
        "fma.rn.ftz.f32 %f1;",
        "div.approx.f32 %f1;",
        ".shared .align 4",
    ):
        assert len(faults(good + bad)) == 1
    assert len(faults(good.replace("fma.rn", "add"))) == 1
