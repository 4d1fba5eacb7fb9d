"""docs/add-a-backend.md, followed literally: its example as an outside package passes the whole suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOC = (Path(__file__).parents[2] / "docs" / "add-a-backend.md").read_text()
SETTINGS = """[pytest]
addopts = --import-mode=importlib -p no:cacheprovider
markers =
    gpu: needs a CUDA GPU
    gpu2: needs two CUDA GPUs
    slow: takes more than a few seconds
"""


def file_of(name: str) -> str:
    """The block behind ``<!-- file: name -->``."""
    found = re.search(rf"<!-- file: {re.escape(name)} -->\n```\w+\n(.*?)```", DOC, re.S)
    assert found, name
    return found[1]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with the package as it lies when installed, and its test."""
    entry = re.search(r'\[project.entry-points."qmm.backends"\]\n(.*)\n', DOC)
    assert entry
    (tmp_path / "qmm_plain.py").write_text(file_of("backends/plain/__init__.py"))
    info = tmp_path / "qmm_plain-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qmm-plain\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[qmm.backends]\n" + entry[1].replace('"', "") + "\n")
    (tmp_path / "test_plain.py").write_text(file_of("test_plain.py"))
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    return tmp_path


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with ``folder`` on its path, in ``folder``."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(folder)
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=280
    )


@pytest.mark.slow
def test_the_example_passes_the_suite(outside: Path) -> None:
    done = python(outside, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "not gpu and not gpu2")
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 150


def test_a_wrong_backend_fails_the_suite(outside: Path) -> None:
    module = outside / "qmm_plain.py"
    right = "out.copy_(ACTIVATIONS[call.activation](acc))"
    assert right in module.read_text()
    module.write_text(module.read_text().replace(right, right.replace("(acc)", "(acc * 1.01)")))
    done = python(
        outside, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "not gpu and not gpu2", "-k", "test_case"
    )
    assert done.returncode == 1, done.stdout[-4000:]
    assert "of the numerics bound" in done.stdout


def test_a_broken_import_is_a_reason(outside: Path) -> None:
    (outside / "qmm_plain.py").write_text("import a_package_that_nobody_has\n")
    code = """
import torch, qmm
backend = qmm.backends()["plain"]
(reason,) = backend.environment()
assert "a_package_that_nobody_has" in reason.got, reason
w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
assert qmm.explain(torch.randn(2, 64), w).backend == "torch"
try:
    qmm.matmul(torch.randn(2, 64), w, backend="plain")
except qmm.UnsupportedError as error:
    assert error.reasons["plain"] == [reason], error.reasons
else:
    raise SystemExit("it ran")
"""
    done = python(outside, "-c", code)
    assert done.returncode == 0, done.stderr
