"""The definition of ``qmm::matmul``: schema, implementation, what it does to fake tensors, and its rule for vmap.

By ``torch.library.Library`` and not by ``torch.library.custom_op``, whose wrappers cost several microseconds a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qmm.call import check_bias, check_last_size
from qmm.op.run import run
from qmm.op.spec import parse

LIBRARY = torch.library.Library("qmm", "DEF")  # the operators live as long as this object

LIBRARY.define(
    "matmul(Tensor a, Tensor[] parts, str spec, Tensor? bias=None, str? activation=None, "
    'str deterministic="True") -> Tensor',
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("matmul", run, "CompositeExplicitAutograd")


def _fake_matmul(
    a: Tensor,
    parts: Sequence[Tensor],
    spec: str,
    bias: Tensor | None = None,
    activation: str | None = None,
    deterministic: str = "True",
) -> Tensor:
    weight = parse(spec).weight
    check_last_size(a, weight)
    if bias is not None:
        check_bias(bias, a, weight)
    return a.new_empty((*a.shape[:-1], weight.out_features))


def _batched_matmul(
    info: Any,
    in_dims: tuple[Any, ...],
    a: Tensor,
    parts: Sequence[Tensor],
    spec: str,
    bias: Tensor | None = None,
    activation: str | None = None,
    deterministic: str = "True",
) -> tuple[Tensor, int]:
    """The batch is one more leading dimension of ``a``."""
    a_dim, *others = torch.utils._pytree.tree_leaves(in_dims, is_leaf=lambda d: d is None)
    if a_dim is None or any(d is not None for d in others):
        raise NotImplementedError(
            "qmm.matmul under vmap: a alone may be batched; got a batched weight or bias"
        )
    moved = a.movedim(a_dim, 0)
    return torch.ops.qmm.matmul(moved, parts, spec, bias, activation, deterministic), 0


torch.library.register_fake("qmm::matmul", _fake_matmul, lib=LIBRARY)
torch.library.register_vmap("qmm::matmul", _batched_matmul, lib=LIBRARY)
