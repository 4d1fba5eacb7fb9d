"""Memory for splits of K that no cluster joins: one workspace for each stream, reused; kernels leave its counters at 0.

Inside graph capture each call has one of its own, which then belongs to the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

_workspaces: dict[tuple[int | None, int], tuple[Tensor, Tensor]] = {}


def workspace(device: torch.device, elements: int, counters: int) -> tuple[Tensor, Tensor]:
    """float32 partial sums, and counters that are 0; what one stream uses is used in order."""
    if torch.cuda.is_current_stream_capturing():
        return (
            torch.empty(elements, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    found = _workspaces.get(key)
    if found is None or found[0].numel() < elements or found[1].numel() < counters:
        if found is not None:  # never smaller than before
            elements, counters = max(elements, found[0].numel()), max(counters, found[1].numel())
        found = (
            torch.empty(elements, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )
        _workspaces[key] = found
    return found
