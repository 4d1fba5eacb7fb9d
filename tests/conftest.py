"""Session set-up: emulation where there is no GPU (before any import of triton or numba), the known gaps, and a
summary of the accuracy that was measured.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import torch

if not torch.cuda.is_available():
    # both are read when triton and numba.cuda are first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
os.environ.pop("QMM_BACKEND", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores

import pytest

from qmm.testing import apply_known_gaps

GAPS = Path(__file__).parent / "known_gaps"


@pytest.hookimpl(tryfirst=True)  # before -k and -m take tests away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Known gaps are expected failures; GPU tests say why they are skipped."""
    apply_known_gaps(items, GAPS)
    devices = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif item.get_closest_marker("gpu2") and devices < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA GPUs; got {devices}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Cases run and worst error / bound for each target and dtype, from what the suite records.

    Reports carry their properties home from xdist's workers too.
    """
    worst: dict[tuple[str, str], list[float]] = defaultdict(list)
    for report in terminalreporter.getreports("passed"):
        found = dict(report.user_properties)
        if report.when == "call" and "ratio" in found:
            key = str(found["target"]), str(found["dtype"]).removeprefix("torch.")
            worst[key].append(float(found["ratio"]))
    if not worst:
        return
    terminalreporter.section("accuracy: worst error / numerics bound (1 is the limit)")
    width = max(len(target) for target, _ in worst)
    for (target, dtype), ratios in sorted(worst.items()):
        terminalreporter.write_line(
            f"{target:<{width}}  {dtype:<8}  {len(ratios):5d} cases  {max(ratios):.3f}"
        )
