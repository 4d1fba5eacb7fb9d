"""What the backend says about the machine, each in a process of its own: the answers are cached."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAY = "from qmm.backends.triton_gpu import BACKEND as b; print([(r.limit, r.got, r.fix) for r in b.environment()])"


def say(setup: str, **env: str) -> str:
    clean = (
        {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""} | env
    )
    code = f"import sys\n{setup}\n{SAY}; print(b.emulated)"
    return subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True
    ).stdout


def test_importing_the_backend_imports_no_triton() -> None:
    code = "import sys, qmm.backends.triton_gpu; assert 'triton' not in sys.modules, 'triton was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_triton() -> None:
    text = say("sys.modules['triton'] = None")
    assert "triton >= 3.2" in text and "no triton" in text and "pip install" in text


def test_old_triton() -> None:
    text = say("import types; sys.modules['triton'] = types.SimpleNamespace(__version__='2.3.1')")
    assert "triton >= 3.2" in text and "triton 2.3.1" in text


def test_no_device_and_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    text = say("")
    assert "a CUDA, HIP or XPU device" in text and "TRITON_INTERPRET=1" in text and text.endswith("None\n")
    assert say("", TRITON_INTERPRET="1") == "[]\ninterpreter\n"
