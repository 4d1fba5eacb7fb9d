"""``import qmm`` where nothing optional is there: works, silent, and loads nothing optional even where it is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OPTIONAL = (
    "triton",
    "numba",
    "cupy",
    "gguf",
    "typer",
    "rich",
    "safetensors",
    "transformers",
    "pytest",
    "hypothesis",
)

BLOCK = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r} and blocking:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

blocking = True
sys.meta_path.insert(0, Absent())
import torch  # may import triton where it is present; what qmm adds is what counts
before = set(sys.modules)
"""

CALL = """
import qmm
w = qmm.quantize(torch.arange(64 * 8.0).sin().view(8, 64), group_size=32)
a = torch.ones(3, 64)
result = qmm.matmul(a, w)
assert torch.allclose(result, a @ w.dequantize(), atol=1e-4)
assert torch.equal(result, qmm.matmul(a, w, backend="torch"))
assert qmm.explain(a, w).backend == "torch"
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("TRITON_INTERPRET", "NUMBA_ENABLE_CUDASIM", "QMM_BACKEND")
    }
    clean |= {"CUDA_VISIBLE_DEVICES": "", **environment}
    # torch's own import may warn; from there on every warning is an error
    code = code.replace("import qmm", "import warnings; warnings.simplefilter('error')\nimport qmm", 1)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=clean, timeout=120
    )


def assert_silent(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")


def test_without_anything_optional() -> None:
    """Works and stays silent; the backends that cannot run say which package is missing."""
    assert_silent(
        run(
            BLOCK
            + CALL
            + """
for name in ("triton", "numba"):
    reasons = qmm.backends()[name].environment()
    assert reasons and name in str(reasons[0]), (name, reasons)
    try:
        qmm.matmul(a, w, backend=name)
    except qmm.UnsupportedError as error:
        assert error.reasons[name] and error.reasons["torch"] == [], error.reasons
    else:
        raise AssertionError(f"{name} ran without its package")
assert not [m for m in sys.modules if m.partition(".")[0] in ("triton", "numba")]
"""
        )
    )


@pytest.mark.parametrize("absent", ["triton", "numba"])
def test_without_one_package(absent: str) -> None:
    """Each alone (CASES 114)."""
    code = BLOCK.replace(repr(OPTIONAL), repr((absent,))) + CALL
    assert_silent(run(code))


def test_the_demo_needs_no_test_tool() -> None:
    """README's first line installs no pytest; the demo uses the oracle's numerics all the same."""
    for package in ("gguf", "typer", "rich"):
        pytest.importorskip(package, reason=f"the demo needs {package}")
    code = BLOCK.replace(repr(OPTIONAL), repr(("pytest", "_pytest", "hypothesis")))
    assert_silent(run(code + "import qmm, qmm.testing, qmm.cli.app, qmm.cli.demo, qmm.cli.emulated\n"))


def test_import_and_a_listing_load_nothing_optional() -> None:
    """Even where everything is installed: not on import, not by listing backends, not by quantising."""
    code = f"""
import sys, torch
before = set(sys.modules)
import qmm
qmm.backends()
qmm.quantize(torch.ones(8, 64))
import qmm.backends.torch_ref  # binds the package over the function of that name, which must stay callable
assert "torch" in qmm.backends() and callable(qmm.quantize) and callable(qmm.explain) and callable(qmm.prepare)
added = {{m.partition(".")[0] for m in set(sys.modules) - before}}
assert not added & set({OPTIONAL!r}), added & set({OPTIONAL!r})
import torch.cuda
assert not torch.cuda.is_initialized()
"""
    assert_silent(run(code))


def test_every_public_name_is_there() -> None:
    import qmm

    assert all(hasattr(qmm, name) for name in qmm.__all__)
    assert qmm.__version__ and callable(qmm.backends) and callable(qmm.quantize)
