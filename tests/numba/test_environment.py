"""What the backend says about machines it cannot run on, and what importing it does not do."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest

from qmm.backends.numba_gpu import environment

# the packages alone: neither a GPU nor the simulator
needs_numba = pytest.mark.skipif(
    bool(environment.missing(True)), reason="; ".join(map(str, environment.missing(True))) or "numba is here"
)


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Installed versions to pretend; None is not installed."""
    found: dict[str, str | None] = {"numba": "0.68.1", "numba-cuda": "0.30.4", "numpy": "2.4.6"}

    def version(package: str) -> str:
        if found[package] is None:
            raise metadata.PackageNotFoundError(package)
        return str(found[package])

    monkeypatch.setattr(environment.metadata, "version", version)
    environment.missing.cache_clear()
    yield found
    environment.missing.cache_clear()


@pytest.mark.parametrize(
    ("changed", "limits"),
    [
        ({}, []),
        ({"numba": None}, ["the numba package"]),
        ({"numba": None, "numba-cuda": None}, ["the numba package", "the numba-cuda package"]),
        ({"numba-cuda": "0.19.0"}, ["numba-cuda >= 0.30.4"]),
        ({"numba-cuda": "0.30.4rc1"}, []),
        ({"numpy": "2.5.0"}, ["numpy < 2.5 with numba-cuda 0.30.4"]),
        ({"numpy": "2.5.0", "numba-cuda": "0.31.0"}, []),
        (
            {"numpy": "2.5.0.dev0", "numba-cuda": "0.22"},
            ["numba-cuda >= 0.30.4", "numpy < 2.5 with numba-cuda 0.22"],
        ),
    ],
    ids=str,
)
def test_versions(versions: dict[str, str | None], changed: dict[str, str | None], limits: list[str]) -> None:
    versions.update(changed)
    reasons = environment.missing(True)
    assert [r.limit for r in reasons] == limits
    assert all(r.got and r.fix for r in reasons)


def python(code: str, **env: str) -> str:
    """What a fresh process prints."""
    clean = {k: v for k, v in os.environ.items() if k not in ("NUMBA_ENABLE_CUDASIM", "TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_importing_the_backend_imports_no_numba() -> None:
    code = "import sys, qmm; qmm.backends()['numba'].kernels; print('numba' in sys.modules)"
    assert python(code) == "False"


@needs_numba
def test_no_gpu_is_a_reason_with_a_way_out() -> None:
    code = "import qmm; b = qmm.backends()['numba']; print(b.emulated, *b.environment(), sep='|')"
    said = python(code, CUDA_VISIBLE_DEVICES="")
    assert said.startswith("None|needs a CUDA device")
    assert "NUMBA_ENABLE_CUDASIM=1" in said


@needs_numba
def test_the_flag_may_come_after_import_qmm() -> None:
    """It counts until numba is first imported, and is not believed afterwards."""
    code = (
        "import os, torch, qmm\n"
        "b = qmm.backends()['numba']\n"
        "before = b.emulated\n"
        "os.environ['NUMBA_ENABLE_CUDASIM'] = '1'\n"
        "w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)\n"
        "qmm.matmul(torch.randn(2, 64), w, backend='numba')\n"
        "os.environ['NUMBA_ENABLE_CUDASIM'] = '0'\n"
        "print(before, b.emulated)"
    )
    assert python(code, CUDA_VISIBLE_DEVICES="") == "None simulator"
