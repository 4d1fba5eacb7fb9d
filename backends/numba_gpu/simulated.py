"""Launching in numba's simulator: the same kernels on CPU tensors, every thread an operating system thread."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from numba import cuda
from torch import Tensor

from qmm.backends.numba_gpu.kernels import ELEMENTS, Facts, make_kernel

_ONE_AT_A_TIME = threading.Lock()  # the simulator swaps modules in the kernels' globals
# The simulator's manager spins until all threads stand at a barrier; it must not hold the interpreter for long.
_SWITCH_SECONDS = 1e-3


class Memory:
    """Flat memory of one tensor, indexed as a pointer is, but not past the tensor's ends.

    The simulator takes it as it is; an array it would copy, strides, holes and all.
    """

    __slots__ = ("_size", "_values")

    def __init__(self, t: Tensor) -> None:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        flat = t.detach().as_strided((extent,), (1,))
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()]
        self._values = flat.view(bits).numpy().view(ELEMENTS[t.dtype])
        self._size = extent

    def _check(self, at: int) -> None:
        if not 0 <= at < self._size:
            raise IndexError(f"element {at} of a tensor with {self._size}")

    def __getitem__(self, at: int) -> Any:
        self._check(at)
        return self._values[at]

    def __setitem__(self, at: int, value: Any) -> None:
        self._check(at)
        self._values[at] = value


def launch(
    facts: Facts,
    grid: tuple[int, int],
    threads: int,
    pointers: Sequence[Tensor | None],
    scalars: Sequence[int],
    device: torch.device,
) -> None:
    """Run the kernel to its end."""
    memory = [None if t is None else Memory(t) for t in pointers]
    with _ONE_AT_A_TIME:
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            # numpy warns of NaN and Inf, which are as welcome here as on a GPU
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                _kernel(facts)[grid, threads](*memory, *scalars)
        finally:
            sys.setswitchinterval(before)


@cache
def _kernel(facts: Facts) -> Any:
    return cuda.jit(make_kernel(facts))
