"""What is installed: the list of packages, the wheel, the version, the name ``backends``, the documented variables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"qmm": ROOT / "qmm", "qmm.backends": ROOT / "backends"}


def run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``code`` in a fresh interpreter, with the working directory on its path."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


def listed(text: str, key: str) -> list[str]:
    """The strings of a TOML array; by hand, since tomllib came with Python 3.11."""
    array = re.search(rf"^{key} = \[(.*?)\]", text, re.M | re.S)
    assert array, key
    return re.findall(r'"([^"]+)"', array[1])


def folders() -> set[str]:
    """The dotted name of each folder that has a Python file."""
    found = set()
    for name, folder in SOURCES.items():
        for file in folder.rglob("*.py"):
            found.add(".".join([name, *file.parent.relative_to(folder).parts]))
    return found


def test_packages_list_equals_the_folders() -> None:
    packages = listed((ROOT / "pyproject.toml").read_text(), "packages")
    assert len(packages) == len(set(packages))
    assert set(packages) == folders()


def test_every_package_has_an_init() -> None:
    for name, folder in SOURCES.items():
        for file in folder.rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{name}: {file.parent} has no __init__.py"
    for folder in ("tests", "bench"):
        assert not list((ROOT / folder).rglob("__init__.py")), f"{folder}/ is no package"


def test_plain_backends_is_refused() -> None:
    for code in ("import backends", "import backends.torch_ref"):
        done = run(code, ROOT)
        assert done.returncode == 1
        assert "ImportError: this folder is the package 'qmm.backends'" in done.stderr
        assert "import qmm.backends" in done.stderr


@pytest.mark.parametrize("first", ["", "import qmm.backends.torch_ref"])
def test_backends_can_be_called_before_and_after_an_import(first: str, tmp_path: Path) -> None:
    code = f"""
{first}
import qmm
early = qmm.backends
assert "torch" in early()
from qmm.backends.torch_ref import blocks
assert qmm.backends() == early()
from qmm import backends
assert "torch" in backends()
import qmm.backends.triton_gpu
assert qmm.backends.triton_gpu.BACKEND is qmm.backends()["triton"]
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_version_is_the_changelog_s() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    top = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert version and top
    assert version[1] == top[1]


def test_every_variable_is_on_the_one_page() -> None:
    pattern = re.compile(r"\bQMM_[A-Z0-9_]*[A-Z0-9]\b")
    used = {
        name
        for folder in [*SOURCES.values(), ROOT / "tests", ROOT / "bench"]
        for file in folder.rglob("*.py")
        for name in pattern.findall(file.read_text())
    }
    documented = set(pattern.findall((ROOT / "docs" / "environment.md").read_text()))
    assert "QMM_BACKEND" in used
    assert used == documented


@pytest.mark.slow
def test_wheel_and_sdist(tmp_path: Path) -> None:
    pytest.importorskip("build")
    pytest.importorskip("setuptools", minversion="77", reason="the build needs it, and is not isolated here")
    tree = tmp_path / "tree"  # a copy: setuptools leaves build/ and *.egg-info behind
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=ignored)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")  # made from the sdist
    files = set(zipfile.ZipFile(wheel).namelist())
    expected = {"qmm/py.typed"}
    for name, folder in SOURCES.items():
        base = name.replace(".", "/")
        expected |= {f"{base}/{file.relative_to(folder).as_posix()}" for file in folder.rglob("*.py")}
    packed = {file for file in files if ".dist-info/" not in file}
    assert packed == expected
    assert any(file.endswith("licenses/LICENSE") for file in files)
    metadata = zipfile.ZipFile(wheel).read(next(f for f in files if f.endswith("/METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata
