"""C[m, n] = finish(sum over s of partial[s, m, n]): the parts of K added in the order of s, so always the same bits.

Operands: partial float32 ``[splits, M, N]`` contiguous; bias ``[N]``; c ``[M, N]`` with strides. One thread an element.
"""

# numba makes its names at run time:
# mypy: disable-error-code="attr-defined"
from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from qmm.backends.numba_gpu.epilogue import make_finish
from qmm.backends.numba_gpu.facts import ReduceFacts

_ZERO = np.float32(0)


def make_reduce(facts: ReduceFacts) -> Any:
    """The kernel for ``facts`` as a Python function."""
    finish = make_finish(facts.out_dtype, facts.bias_dtype, facts.activation)

    def reduce(partial, bias, c, splits, m_size, n_size, c_stride_m, c_stride_n):  # type: ignore[no-untyped-def]
        at = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        size = m_size * n_size
        if at < size:
            total = _ZERO
            for split in range(splits):
                total = total + partial[split * size + at]
            m = at // n_size
            n = at - m * n_size
            c[m * c_stride_m + n * c_stride_n] = finish(total, bias, n)

    return reduce
