"""Samplers: one replay of a CUDA graph over a ring of weights, or one call by the wall clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

IDLE = 0.25  # seconds before a timing, for the clocks to recover from earlier work
L2_TIMES = 3  # a ring of weights this many times the L2 cache: each call finds its weight cold
REPLAYS = 5  # samples of one contestant between two idles
MIN_CALLS = 8  # calls in one graph: the cost of its launch is spread over them
_HOST_BATCH = 200  # calls between two synchronisations: fewer than what a stream queues

Call = Callable[[], Any]
Sampler = Callable[[], float]  # takes one sample: seconds a call


@dataclass(frozen=True)
class Taken:
    """Samples of one contestant, in seconds a call."""

    samples: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Their median."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Largest over smallest, less 1: what is smaller than this between two contestants says nothing."""
        return max(self.samples) / min(self.samples) - 1


class Clock:
    """A timer for pytest-benchmark that goes by what was sampled, so that its columns show seconds a call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds so far."""
        return self.now


CLOCK = Clock()


def ring_size(bytes_each: int, device: torch.device | str) -> int:
    """How many copies of ``bytes_each`` bytes make one cold at each call; 1 without a GPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return 1
    l2: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, math.ceil(L2_TIMES * l2 / max(1, bytes_each)) + 1)


def sampler(calls: Sequence[Call], device: torch.device | str) -> Sampler:
    """What takes a sample of ``calls``, which do the same on different copies of the weight."""
    if torch.device(device).type == "cuda":
        return _graph_sampler(calls)
    return _wall_sampler(calls[0])


def _graph_sampler(calls: Sequence[Call]) -> Sampler:
    """Capture a graph that makes each call once (a few times, where they are few)."""
    repeated = list(calls) * math.ceil(MIN_CALLS / len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compile, prepare and choose outside the capture
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in repeated:
            call()
    graph.replay()
    torch.cuda.synchronize()

    def sample() -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3 / len(repeated)

    return sample


def _wall_sampler(call: Call) -> Sampler:
    call()

    def sample() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return sample


def alternate(
    samplers: Mapping[str, Sampler], *, rounds: int = 2, replays: int = REPLAYS, idle: float = IDLE
) -> dict[str, Taken]:
    """Sample each in turn, ``rounds`` times, the first to go another one each time, with an idle before each turn.

    Args:
        samplers: by name.
        rounds: turns of each.
        replays: samples a turn.
        idle: seconds before a turn; 0 where there is nothing to recover, as on a CPU.

    Returns:
        ``{name: Taken}`` of ``rounds * replays`` samples.
    """
    names, samples = list(samplers), {name: list[float]() for name in samplers}
    for turn in range(rounds):
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            time.sleep(idle)
            samples[name] += [samplers[name]() for _ in range(replays)]
    return {name: Taken(tuple(found)) for name, found in samples.items()}


def host_seconds(call: Call, device: torch.device | str, batches: int = 10) -> float:
    """Seconds that an eager call keeps the host busy: the median over batches, the GPU's own time not waited for."""
    gpu = torch.device(device).type == "cuda"
    taken = []
    for _ in range(batches + 1):  # the first warms up
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_HOST_BATCH):
            call()
        taken.append((time.perf_counter() - start) / _HOST_BATCH)
    return statistics.median(taken[1:])
