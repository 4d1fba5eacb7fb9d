"""The names of Gluon that move between Triton releases, in one place."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

# 3.6 calls it thread_barrier
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
