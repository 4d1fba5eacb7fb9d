"""What ``qmm::matmul`` does when it runs: the backend was chosen at trace time, the kernel is chosen now."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qmm.matmul import again, first, seen_key
from qmm.op.parts import weight_of
from qmm.op.spec import parse

DETERMINISTIC: dict[str, bool | str] = {"True": True, "False": False, "batch": "batch"}


def run(
    a: Tensor,
    parts: Sequence[Tensor],
    spec: str,
    bias: Tensor | None = None,
    activation: str | None = None,
    deterministic: str = "True",
) -> Tensor:
    """See :func:`qmm.matmul`; the result is new and contiguous."""
    found = parse(spec)
    w, living = weight_of(parts, found)
    if deterministic not in DETERMINISTIC:
        raise ValueError(f"deterministic: must be one of {', '.join(DETERMINISTIC)}; got {deterministic!r}")
    exact = DETERMINISTIC[deterministic]
    with torch.no_grad():  # autograd sees the operator, not what is inside
        key = seen_key(a, w, bias, activation, None, found.backend, found.kernel, exact) if living else None
        if key is not None and (seen := w._plans.get(key)) is not None:
            return again(seen, a, w, bias)
        return first(
            a, w, key,
            bias=bias, activation=activation, backend=found.backend, kernel=found.kernel, deterministic=exact,
            prepare=living,
        )  # fmt: skip
