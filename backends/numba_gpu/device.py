"""The decorator of device functions: ``cuda.jit(device=True)``, and in the simulator nothing at all.

The simulator's own wrapper swaps modules in and out at every call, for functions that use ``cuda.*``; none here does.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from qmm.backends.numba_gpu.environment import is_simulated


def device_function(function: Any) -> Any:
    """``function``, callable from kernels and from other device functions."""
    return function if is_simulated() else cuda.jit(device=True)(function)
