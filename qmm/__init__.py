"""qmm: activations times quantised weights, fused, on whichever kernel fits, with an honest answer to which one ran.

Importing qmm needs torch alone: no GPU, no triton, no numba; optional packages load when first used.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from qmm.backend import Backend, Kernel, Limits, PreparedLayout, Tier
from qmm.call import MatmulCall
from qmm.errors import FormatWarning, Reason, SlowKernelWarning, UnsupportedError, WeightFormatError
from qmm.explain import Explanation, explain
from qmm.matmul import matmul
from qmm.op import define as _define  # noqa: F401  # so that programs with qmm::matmul in them can be loaded
from qmm.prepare import prepare
from qmm.quantize import quantize
from qmm.registry import backends, use_backend
from qmm.weight import QuantizedWeight, WeightSpec, ZeroKind

if TYPE_CHECKING:
    from qmm import formats, nn
    from qmm.checkpoint import Checkpoint, load, save

__all__ = [
    "Backend",
    "Checkpoint",
    "Explanation",
    "FormatWarning",
    "Kernel",
    "Limits",
    "MatmulCall",
    "PreparedLayout",
    "QuantizedWeight",
    "Reason",
    "SlowKernelWarning",
    "Tier",
    "UnsupportedError",
    "WeightFormatError",
    "WeightSpec",
    "ZeroKind",
    "backends",
    "explain",
    "formats",
    "load",
    "matmul",
    "nn",
    "prepare",
    "quantize",
    "save",
    "use_backend",
]

try:
    __version__ = _version("qmm")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    if name in (
        "formats",
        "nn",
        "integrations",
    ):  # loaded when first named, as is what reads and writes files
        return importlib.import_module(f"qmm.{name}")
    if name in ("Checkpoint", "load", "save"):
        return getattr(importlib.import_module("qmm.checkpoint"), name)
    raise AttributeError(f"module 'qmm' has no attribute {name!r}")
