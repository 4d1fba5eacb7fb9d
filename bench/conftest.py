"""How a time is taken: cold weights on a GPU, plain wall time on a CPU; and the roof that it is held against."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

if not torch.cuda.is_available():
    # both are read when triton and numba.cuda are first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
os.environ.pop("QMM_BACKEND", None)

import pytest

IDLE = 0.25  # seconds before a timing, for the clocks to recover from earlier work
L2_TIMES = 3  # a ring of weights this many times the L2 cache: each call finds its weight cold
GPU_REPLAYS = 7
CPU_ROUNDS = 5


@dataclass(frozen=True)
class Roof:
    """What this machine's memory and its dense matmul sustain, measured here."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, moved: float, flops: float) -> float:
        """The least time for that many bytes and operations."""
        return max(moved / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True)
class Timing:
    """Seconds a call, and how they were taken."""

    seconds: float
    cold: bool
    ring: int


def ring_size(bytes_each: int) -> int:
    """How many copies of a weight make it cold at each call."""
    if not torch.cuda.is_available():
        return 1
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, math.ceil(L2_TIMES * l2 / bytes_each) + 1)


def _graph_seconds(calls: list[Callable[[], Any]], benchmark: Any = None) -> float:
    """Median seconds a call of a CUDA graph that makes each of ``calls`` once (a few times, where they are few)."""
    calls = calls * math.ceil(8 / len(calls))
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    taken: list[float] = []

    def replay() -> None:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()  # type: ignore[no-untyped-call]
        graph.replay()
        stop.record()  # type: ignore[no-untyped-call]
        stop.synchronize()
        taken.append(start.elapsed_time(stop) * 1e-3 / len(calls))

    time.sleep(IDLE)
    if benchmark is None:
        for _ in range(GPU_REPLAYS):
            replay()
    else:  # pytest-benchmark's own columns show a whole replay; seconds a call are in extra_info
        benchmark.pedantic(replay, rounds=GPU_REPLAYS)
    return statistics.median(taken)


@pytest.fixture
def timed(benchmark: Any) -> Callable[..., Timing]:
    """``timed(calls)``: the calls do the same on different copies of the weight. ``once`` for emulated kernels."""

    def measure(calls: list[Callable[[], Any]], once: bool = False) -> Timing:
        if torch.cuda.is_available():
            return Timing(_graph_seconds(calls, benchmark), cold=True, ring=len(calls))
        benchmark.pedantic(calls[0], rounds=1 if once else CPU_ROUNDS, warmup_rounds=0 if once else 1)
        return Timing(benchmark.stats.stats.median, cold=False, ring=1)

    return measure


@pytest.fixture(scope="session")
def roof() -> Roof:
    """Measured once: a large copy (read and written bytes counted), and torch's dense matmul."""
    gpu = torch.cuda.is_available()
    device, dtype, n = ("cuda", torch.float16, 8192) if gpu else ("cpu", torch.float32, 1024)
    source = torch.ones(2**30 if gpu else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, n, n, device=device, dtype=dtype)
    out = torch.empty_like(a)

    def seconds(call: Callable[[], Any]) -> float:
        if gpu:
            return _graph_seconds([call])
        taken = []
        for _ in range(CPU_ROUNDS):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        return min(taken)

    copy = seconds(lambda: target.copy_(source))
    dense = seconds(lambda: torch.mm(a, b, out=out))
    return Roof(2 * source.numel() / copy, 2 * n**3 / dense)


@pytest.fixture
def ring() -> Callable[[int], int]:
    """``ring(bytes)``: how many copies of a weight of that size to rotate."""
    return ring_size
