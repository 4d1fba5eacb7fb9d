"""Session set-up: emulation where there is no GPU (before any import of triton or numba), and the known gaps."""

from __future__ import annotations

import os
from pathlib import Path

import torch

if not torch.cuda.is_available():
    # both are read when triton and numba.cuda are first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
os.environ.pop("QMM_BACKEND", None)

import pytest  # noqa: E402

from qmm.testing import apply_known_gaps  # noqa: E402

GAPS = Path(__file__).parent / "known_gaps"


@pytest.hookimpl(tryfirst=True)  # before -k and -m take tests away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Known gaps are expected failures; GPU tests say why they are skipped."""
    apply_known_gaps(items, GAPS)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
