"""The names of Gluon that move between Triton releases, in one place.

All else that the kernels use has had one name and one meaning from 3.6 to 3.9.
"""

from __future__ import annotations

from typing import Any

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


def in_clusters(compiled: Any, size: int) -> Any:
    """A kernel compiled as one program a cluster, to be launched in clusters of ``size`` programs each.

    Its grid then counts clusters. Triton's own ``num_ctas`` would share every tensor out among them, which this
    kernel does itself. (Warps, programs in a cluster, shared memory) is what the launcher takes from 3.6 to 3.9.
    """
    if size > 1:
        warps, _, shared = compiled.packed_metadata
        compiled.packed_metadata = warps, size, shared
    return compiled
