"""Benchmarks: the emulators where there is no GPU, the clock of what was sampled, and this folder for imports."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    # both are read when triton and numba.cuda are first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
os.environ.pop("QMM_BACKEND", None)
sys.path.append(
    str(Path(__file__).parents[1])
)  # bench.*; behind what is installed, so that the wheel is timed

import pytest

from qmm.timing import CLOCK, Roof, Taken, known_roof, measure_roof, sampler
from qmm.timing.clock import IDLE

GPU = torch.cuda.is_available()
ROUNDS = 7 if GPU else 5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pytest-benchmark's columns show seconds a call, whatever the length of the ring."""
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=CLOCK))


@pytest.fixture
def timed(benchmark: Any) -> Callable[..., tuple[Taken, Taken | None]]:
    """``timed(calls, dense)``: sample ``calls``, and before each sample ``dense``, the dense matmul of the same shape.

    The calls of a list do the same on different copies of the weight. ``once``: one sample, for emulated kernels.
    With ``--benchmark-disable`` each runs once. Returns what was taken of both.
    """
    device = "cuda" if GPU else "cpu"

    def measure(
        calls: Sequence[Callable[[], Any]], dense: Sequence[Callable[[], Any]] = (), once: bool = False
    ) -> tuple[Taken, Taken | None]:
        taken: list[float] = []
        beside: list[float] = []
        sample = partial(seconds_of, calls[0]) if once else sampler(calls, device)
        sample_dense = sampler(dense, device) if dense else None

        def before() -> None:
            if sample_dense is not None:
                time.sleep(IDLE if GPU else 0)
                beside.append(sample_dense())
            time.sleep(IDLE if GPU else 0)

        def call() -> None:
            taken.append(sample())
            CLOCK.now += taken[-1]

        benchmark.pedantic(call, setup=before, rounds=1 if once else ROUNDS)
        return Taken(tuple(taken)), Taken(tuple(beside)) if beside else None

    return measure


def seconds_of(call: Callable[[], Any]) -> float:
    """By the wall clock, with nothing run before."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.fixture(scope="session")
def roof() -> Roof:
    """Of this machine: known, or measured once."""
    known = known_roof(torch.cuda.get_device_name()) if GPU else None
    return known or measure_roof("cuda" if GPU else "cpu")
