"""The script for compute-sanitizer: its calls are right, and it reads findings. The run itself wants a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import run_sanitizer
import sanitizer_calls

from qmm.testing import targets

INVALID = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at tiled_kernel+0x1f0
=========     by thread (3,0,0) in block (1,0,0)
=========     Address 0x7f00 is out of bounds
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::elementwise_kernel<128, 4>(int)+0x10
========= ERROR SUMMARY: 2 errors
"""


def test_findings_are_read() -> None:
    found = run_sanitizer.read(INVALID)
    assert (found["ours"], found["others"]) == (1, 1)
    assert "tiled_kernel" in found["first"][0]
    assert found["summary"] == "========= ERROR SUMMARY: 2 errors"
    assert not run_sanitizer.clean({**found, "ended": True, "note": ""})
    assert run_sanitizer.clean({**run_sanitizer.read("worst error / bound 0.1"), "ended": True, "note": ""})
    assert not run_sanitizer.clean({"ended": False})


@pytest.mark.parametrize(
    "target", [t for t in targets() if t.device == "cpu" or torch.cuda.is_available()], ids=str
)
def test_calls_are_right(target: object) -> None:
    backend, device = str(target).split(":")
    assert 0 < sanitizer_calls.run_kernel(backend, device) <= 1
