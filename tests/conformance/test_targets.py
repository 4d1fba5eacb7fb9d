"""A backend whose packages are installed is under the suite: else all its tests would go without a word."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

import qmm
from qmm.testing import targets

PACKAGES = {"torch": ("torch",), "triton": ("triton",), "numba": ("numba", "numba-cuda")}


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_installed_is_tested(name: str) -> None:
    for package in PACKAGES[name]:
        try:
            version(package)
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed")
    assert qmm.backends()[name].environment() == []
    found = {t.device for t in targets((name,))}
    assert ("cuda" if torch.cuda.is_available() else "cpu") in found
