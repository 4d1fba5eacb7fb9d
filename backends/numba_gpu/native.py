"""Launching on a GPU: on torch's current stream of the tensors' device, without numba seeing a tensor.

Kernels get plain addresses, so that no array interface is asked (it refuses bfloat16 and tensors that require
grad, and may synchronise), no reference to a tensor stays behind, and a launch costs one argument for each tensor.
"""

# numba makes its names at run time:
# mypy: disable-error-code="attr-defined"
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from cuda import core  # type: ignore[import-untyped, unused-ignore]
from numba import cuda
from torch import Tensor

from qmm.backends.numba_gpu.kernels import Facts, make_kernel, signature


def launch(
    facts: Facts,
    grid: tuple[int, int],
    threads: int,
    pointers: Sequence[Tensor | None],
    scalars: Sequence[int],
    device: torch.device,
) -> None:
    """Start the kernel; returns at once."""
    index = torch.cuda.current_device() if device.index is None else device.index
    addresses = [0 if t is None else t.data_ptr() for t in pointers]
    stream = core.Stream.from_handle(torch.cuda.current_stream(index).cuda_stream)
    kernel = _loaded(facts, index)
    with cuda.gpus[index]:
        core.launch(stream, core.LaunchConfig(grid=grid, block=threads), kernel, *addresses, *scalars)


@cache
def _loaded(facts: Facts, index: int) -> Any:
    """The kernel, loaded on device ``index``, as cuda.core knows it.

    numba's own way in, ``dispatcher[grid, threads, stream](...)``, looks at the type of each of some twenty arguments
    at every call and warns of each grid under 128 blocks. All arguments here are addresses or int64: plain ints.
    """
    with _loading_allowed_in_capture(), cuda.gpus[index]:
        kernel = _compiled(facts, torch.cuda.get_device_capability(index))
        kernel.bind()
        return kernel._codelibrary.get_cufunc().kernel


@cache
def _compiled(facts: Facts, capability: tuple[int, int]) -> Any:
    """One compilation for all devices of one capability, that of the current context."""
    kernel = make_kernel(facts)
    dispatcher = cuda.jit(signature(facts, kernel))(kernel)
    return next(iter(dispatcher.overloads.values()))


@contextmanager
def _loading_allowed_in_capture() -> Iterator[None]:
    """Let this thread load a module although a graph is being captured: loading puts nothing into the graph."""
    from cuda.bindings import driver  # type: ignore[import-untyped, unused-ignore]

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = driver.cuThreadExchangeStreamCaptureMode(relaxed)[1]
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(previous)
