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

pytest.importorskip("numba_cuda", reason="needs numba-cuda")

SCRIPT = Path(__file__).with_name("compile_ptx.py")
NAMES = [
    "low-partial",
    "middle",
    "high",
    "int3-bf16-bias",
    "int5-e4m3-float-zero",
    "codebook-e8m0",
    "int8-symmetric",
    "reduce-bf16",
    "reduce-fp16",
]


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    """PTX by name, from one process that has never heard of the simulator."""
    env = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    if "missing" in found:
        pytest.skip(f"NVIDIA's compiler is not here: {found['missing']}")
    assert list(found) == NAMES
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_float64(compiled: dict[str, str], name: str) -> None:
    """A Python float or an int32 sum in the wrong place would make numba compute in float64."""
    assert not re.findall(r"\.f64\b", compiled[name])


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("reduce")])
def test_sums_stay_in_registers(compiled: dict[str, str], name: str) -> None:
    """No local memory, a fused multiply-add in the loop, and two tiles in shared memory."""
    ptx = compiled[name]
    assert not re.findall(r"\b(?:ld|st)\.local\b", ptx)
    assert "fma.rn.f32" in ptx
    assert len(re.findall(r"\.shared \.align", ptx)) == 2


@pytest.mark.parametrize("name", NAMES)
def test_rounding_and_denormals(compiled: dict[str, str], name: str) -> None:
    """fastmath is off in what matters: subnormals are kept and divisions are not approximated."""
    assert not re.findall(r"\b(?:add|mul|fma)\.(?:rn\.)?ftz\b", compiled[name])
    assert not re.findall(r"\bdiv\.(?:approx|full)\b", compiled[name])


@pytest.mark.parametrize("name", NAMES)
def test_ptxas_takes_it(compiled: dict[str, str], name: str, tmp_path: Path) -> None:
    """The assembler agrees, and finds registers for everything."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("ptxas is not here")
    source = tmp_path / "kernel.ptx"
    source.write_text(compiled[name])
    arch = re.search(r"\.target (sm_\d+)", compiled[name])
    assert arch is not None
    command = [ptxas, f"-arch={arch.group(1)}", "-v", str(source), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Unsupported .version" in done.stderr:
        pytest.skip("ptxas is older than NVVM here")
    assert done.returncode == 0, done.stderr
    assert " 0 bytes spill stores" in done.stderr
