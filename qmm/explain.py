"""Explanation: which kernel would run a call and why, as data and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from qmm.backend import Backend
from qmm.call import MatmulCall, make_call
from qmm.dispatch import auto_order, reasons_of, select
from qmm.errors import Reason, UnsupportedError
from qmm.registry import AUTO, backends, wanted_backend
from qmm.weight import QuantizedWeight
from qmm.weight.spec import dtype_name


@dataclass(frozen=True)
class Explanation:
    """The answer of :func:`explain`; ``str()`` is a table.

    Attributes:
        backend: name of the backend that would run, or None where the call would raise.
        kernel: its kernel, or None.
        config: the kernel's configuration (a frozen dataclass, or None).
        why: why this one.
        reasons: ``{backend: [Reason, ...]}``, empty list for a backend that can run the call.
        kernels: the same per kernel, ``{"backend.kernel": [Reason, ...]}``.
        copies: copies that the call would make before or after the kernel.
        call: the facts of the call.
        weight: what the weight is and where it lives.

    Example:
        >>> import torch, qmm
        >>> told = qmm.explain(torch.randn(2, 64), qmm.quantize(torch.randn(8, 64), bits=4, group_size=32))
        >>> told.backend, told.kernel, told.copies, sorted(told.reasons)
        ('torch', 'blocks', [], ['numba', 'torch', 'triton'])
    """

    backend: str | None
    kernel: str | None
    config: Any
    why: str
    reasons: Mapping[str, Sequence[Reason]]
    kernels: Mapping[str, Sequence[Reason]]
    copies: Sequence[str]
    call: MatmulCall = field(repr=False)
    weight: str = field(repr=False, default="")

    def __str__(self) -> str:
        c = self.call
        shape = "x".join(map(str, c.a_shape))
        rows = [
            ("call", f"a [{shape}] {dtype_name(c.a_dtype)} on {c.device}, M={c.m} N={c.n} K={c.k}"),
            ("weight", self.weight),
            ("runs", f"{self.backend}.{self.kernel}" if self.backend else "nothing: the call would raise"),
        ]
        if self.config is not None:
            rows.append(("config", str(self.config)))
        rows.append(("why", self.why))
        rows += [("copies", text) for text in self.copies or ["none"]]
        for ident, reasons in self.kernels.items():
            if not reasons:
                rows.append((ident, "can run this call"))
            rows += [(ident if i == 0 else "", f"no: {_own(r)}") for i, r in enumerate(reasons)]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


def _own(reason: Reason) -> str:
    """A reason without its kernel, which the row names already."""
    return str(Reason(reason.limit, reason.got, reason.fix))


def explain(
    a: Tensor,
    w: QuantizedWeight,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
    backend: str = AUTO,
    kernel: str | None = None,
    deterministic: bool | str = True,
) -> Explanation:
    """What :func:`qmm.matmul` would do with the same arguments, without running it.

    Returns:
        An :class:`Explanation`; a call that no kernel takes is explained too, and does not raise.

    Raises:
        TypeError, ValueError: what is wrong for every backend, as in :func:`qmm.matmul`.

    Example:
        >>> import torch, qmm
        >>> w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
        >>> qmm.explain(torch.randn(2, 64), w).backend
        'torch'
    """
    call = make_call(a, w, bias=bias, activation=activation, out=out, deterministic=deterministic)
    found = explain_call(call, backend=backend, kernel=kernel, weight=repr(w))
    if bias is not None and not bias.is_contiguous():
        return replace(found, copies=[*found.copies, "bias: made contiguous"])
    return found


def explain_call(
    call: MatmulCall, *, backend: str = AUTO, kernel: str | None = None, weight: str = ""
) -> Explanation:
    """The same for facts alone, e.g. of :func:`qmm.call.describe_call`; ``weight`` is what the table says of it.

    Raises:
        ValueError: an unknown backend or kernel name.
    """
    name, _ = wanted_backend(backend)
    # emulated kernels are not in auto's order, and there the reason is part of the answer
    auto = name == AUTO
    kernels = {f"{b.name}.{k.name}": reasons_of(b, k, call, auto=auto) for b, k in auto_order()}
    reasons = {n: _backend_reasons(n, b, kernels) for n, b in backends().items()}
    try:
        choice = select(call, backend, kernel)
    except UnsupportedError as error:
        chosen: tuple[str | None, str | None, Any, str] = (None, None, None, str(error).splitlines()[0])
    else:
        chosen = (choice.backend.name, choice.kernel.name, choice.config, choice.why)
    return Explanation(*chosen, reasons, kernels, _copies(call, chosen[0]), call, weight)


def _backend_reasons(name: str, backend: Backend, kernels: Mapping[str, Sequence[Reason]]) -> list[Reason]:
    mine = [kernels[f"{name}.{k.name}"] for k in backend.kernels]
    if not mine:
        return backend.environment()
    return [] if any(not rs for rs in mine) else list(dict.fromkeys(r for rs in mine for r in rs))


def _copies(call: MatmulCall, backend: str | None) -> list[str]:
    found = []
    if call.copies_a:
        found.append(f"a: strides {call.a_strides} do not merge into rows: copied to [{call.m}, {call.k}]")
    if call.copies_out:
        found.append(f"out: strides {call.out_strides} do not merge into rows: filled from a temporary")
    if call.released_to is not None and call.released_to != backend:
        found.append(f"w: released to {call.released_to}, restored to the canonical form for this call")
    return found
