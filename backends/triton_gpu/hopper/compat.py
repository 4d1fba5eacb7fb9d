"""The names of Gluon that move between Triton releases, in one place.

All else that the kernels use has had one name and one meaning from 3.6 to 3.9.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# thread_barrier up to 3.6
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# async_copy_global_to_shared and async_copy_shared_to_global up to 3.7; 3.8 has both names, 3.9 only these
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
# the same for cp.async
copy_async = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)
