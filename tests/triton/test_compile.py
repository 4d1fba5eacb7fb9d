"""The real kernels compile for every target, with no GPU: tensor cores are used, nothing spills, memory suffices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

# a process for each half: starting one takes longer than compiling for a target
TARGETS = [("cuda-80", "cuda-86", "cuda-89"), ("cuda-90", "cuda-100", "hip-gfx942")]


@pytest.mark.parametrize("targets", TARGETS, ids=" ".join)
def test_kernels_compile(targets: tuple[str, ...], tmp_path: Path) -> None:
    """In a process of its own: kernels defined under TRITON_INTERPRET cannot be compiled any more."""
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "NUMBA_ENABLE_CUDASIM")}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_for_target.py")
    done = subprocess.run(
        [sys.executable, str(script), *targets], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {r["target"] for r in results} == set(targets)
    for result in results:
        assert result["shared"] <= result["shared_limit"], result
        found = result["matrix_instructions"]
        if result["dot"] in ("float16", "bfloat16"):
            assert found, result
        else:  # AMD has matrix instructions that multiply float32 as float32
            assert not any("f32" not in name or "tf32" in name or "xf32" in name for name in found), result
            assert not found or result["target"].startswith("hip"), result
        if result["target"] in ("cuda-80", "cuda-90"):
            assert result["spilled"] == 0, result
