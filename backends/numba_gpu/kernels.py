"""Facts -> the kernel's Python function and its signature; the same for the GPU and for the simulator."""

# numba makes its names at run time:
# mypy: disable-error-code="attr-defined"
from __future__ import annotations

from typing import Any

import torch

from qmm.backends.numba_gpu.facts import ReduceFacts, TiledFacts
from qmm.backends.numba_gpu.reduce import make_reduce
from qmm.backends.numba_gpu.tiled import make_tiled
from qmm.weight.spec import UINT4

Facts = TiledFacts | ReduceFacts

# How a stored dtype is seen by kernels; numpy and numba use the same names. What numba lacks is seen as its bits, and
# int32 words without their sign.
ELEMENTS = {
    torch.float16: "float16",
    torch.bfloat16: "uint16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "uint8",
    torch.int8: "int8",
    torch.int32: "uint32",
    UINT4: "uint32",  # eight in a word
}
if hasattr(torch, "float8_e8m0fnu"):
    ELEMENTS[torch.float8_e8m0fnu] = "uint8"


def make_kernel(facts: Facts) -> Any:
    """The Python function of the kernel for ``facts``."""
    return make_tiled(facts) if isinstance(facts, TiledFacts) else make_reduce(facts)


def signature(facts: Facts, kernel: Any) -> Any:
    """Pointers, then int64 scalars, as a numba signature; a pointer that is not read is one to bytes."""
    from numba.cuda import types

    pointers = [types.CPointer(getattr(types, ELEMENTS[d] if d else "uint8")) for d in facts.pointers]
    scalars = kernel.__code__.co_argcount - len(pointers)
    return types.void(*pointers, *[types.int64] * scalars)
