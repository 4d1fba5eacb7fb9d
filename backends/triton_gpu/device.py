"""The device that a launch goes to."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it that of the operands, where it is another."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    if device.type == "xpu" and device.index != torch.xpu.current_device():
        return torch.xpu.device(device)
    return contextlib.nullcontext()
