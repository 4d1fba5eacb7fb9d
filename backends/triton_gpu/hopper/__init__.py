"""Kernels built for tensor cores of compute capability 8.0 (decode) and 9.0 (wgmma), on one prepared layout."""
