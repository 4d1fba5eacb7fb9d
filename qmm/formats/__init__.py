"""Checkpoint formats, one module each: any quantised checkpoint in, QuantizedWeight out.

A module is loaded when it is first named: ``qmm.formats.gguf``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qmm.formats import awq, bitsandbytes, compressed_tensors, gguf, gptq, hqq, mx, seed

__all__ = ["awq", "bitsandbytes", "compressed_tensors", "gguf", "gptq", "hqq", "mx", "seed"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return importlib.import_module(f"qmm.formats.{name}")
    raise AttributeError(f"module 'qmm.formats' has no attribute {name!r}: formats are {', '.join(__all__)}")
