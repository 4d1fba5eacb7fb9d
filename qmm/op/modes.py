"""Whether torch is looking: a mode, a transform or a tensor subclass that has to see an operator and no kernel."""

from __future__ import annotations

import torch
from torch import Tensor

_NO_DISPATCH = Tensor.__torch_dispatch__
# None of these has a public name; all are in every torch from 2.6 on.
modes_active = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


def wanted(a: object, bias: object) -> bool:
    """Whether a call with these operands goes through ``qmm::matmul`` (compilation is asked for elsewhere)."""
    return modes_active() > 0 or transforming() or _dispatches(a) or _dispatches(bias)


def transforming() -> bool:
    """Whether a transform of ``torch.func`` is going on."""
    return _transform() is not None


def _dispatches(t: object) -> bool:
    """A tensor subclass that takes operators into its own hands, a fake tensor for example."""
    return isinstance(t, Tensor) and type(t).__torch_dispatch__ is not _NO_DISPATCH
