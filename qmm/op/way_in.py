"""From ``qmm.matmul`` to the operator. torch.compile traces :func:`matmul` here line by line, so it is plain code that
reads attributes; what it must not look into happens in :func:`choose_runner`, whose result is a constant of the trace.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from qmm.backend import Backend
from qmm.call import MatmulCall, check_no_derivative, check_options, check_types
from qmm.dispatch import auto_order, check_kernel, reasons_of, select, unsupported
from qmm.op.modes import modes_active, transforming, wanted
from qmm.op.parts import remember
from qmm.op.spec import runner_text, write
from qmm.registry import AUTO, backends, wanted_backend
from qmm.weight import QuantizedWeight

__all__ = ["choose_runner", "matmul", "wanted"]

# A program is traced once for every M. Who runs it should take few rows and many; the first of these is shown in
# refusals.
_PROBED_ROWS = (1, 17, 4096)


def matmul(
    a: Tensor,
    w: QuantizedWeight,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
    backend: str = AUTO,
    kernel: str | None = None,
    deterministic: bool | str = True,
) -> Tensor:
    """:func:`qmm.matmul` as one call of ``qmm::matmul``; ``out`` is filled from its result."""
    check_types(a, w, bias, out)
    check_no_derivative(a, bias)
    bias_dtype = None if bias is None else bias.dtype
    # first, since it may prepare the weight, which gives it other parts
    runner = w._choose_runner(a.dtype, a.device, bias_dtype, activation, deterministic, backend, kernel)
    held = w._store._held
    parts: Sequence[Tensor] = held.parts
    if isinstance(a, FakeTensor):
        parts = _as_fake(parts, a)
    spec = write(w._facts, held.layout, runner)
    result: Tensor = torch.ops.qmm.matmul(a, parts, spec, bias, activation, str(deterministic))
    if out is None:
        return result
    if out.shape != result.shape:
        raise ValueError(f"out: shape must be {tuple(result.shape)}; got {tuple(out.shape)}")
    return out.copy_(result)


def choose_runner(
    w: QuantizedWeight,
    a_dtype: torch.dtype,
    device: torch.device,
    bias_dtype: torch.dtype | None,
    activation: str | None,
    deterministic: bool | str,
    backend: str,
    kernel: str | None,
) -> str:
    """Who runs a traced call, for any M, as the text of a spec; prepares the weight for it where that can be done now.

    Raises:
        ValueError, TypeError: an option or a name that does not exist.
        UnsupportedError: no backend that was allowed takes such a call.
    """
    check_options(activation, deterministic)
    check_kernel(kernel)
    if device != w.device:
        raise ValueError(f"a and w must be on one device; got a on {device} and w on {w.device}")
    k = w.in_features
    call = MatmulCall(
        m=1,
        n=w.out_features,
        k=k,
        a_shape=(1, k),
        a_strides=(k, 1),
        a_dtype=a_dtype,
        a_aligned=True,
        device=device,
        weight=w.spec,
        fits_float16=w.fits_float16,
        even_groups=w.even_groups,
        released_to=w.released_to,
        bias_dtype=bias_dtype,
        activation=activation,
        deterministic=deterministic,
    )
    name, source = wanted_backend(backend)
    if device.type == "meta":
        chosen = backends()["torch" if name == AUTO else name]
    else:
        chosen = _choose(call, name, source, kernel)
        if not (modes_active() or transforming()):
            w.prepare_for(chosen)
            _stay_in_place(w)
    remember(w)
    return runner_text(chosen.name, kernel)


def _stay_in_place(w: QuantizedWeight) -> None:
    """Let CUDA graphs that torch.compile captures read the weight where it lies, and not from a copy at each replay."""
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:
        for t in w._store.held.parts:
            compiler.mark_static_address(t, guard=False)


def _choose(call: MatmulCall, name: str, source: str, kernel: str | None) -> Backend:
    """The first backend, in the order of kernels, that takes few rows as well as many; else the first of all."""
    calls = [replace(call, m=m, a_shape=(m, call.k)) for m in _PROBED_ROWS]
    taking = [{b.name for b, _ in _willing(c, name, kernel)} for c in calls]
    for candidate, _ in auto_order():
        if all(candidate.name in names for names in taking):
            return candidate
    for candidate, _ in auto_order():
        if any(candidate.name in names for names in taking):
            return candidate
    select(calls[0], name, kernel)  # raises where the kernel's name is unknown
    raise unsupported(calls[0], name, source, kernel)


def _willing(call: MatmulCall, name: str, kernel: str | None) -> list[tuple[Backend, object]]:
    auto = name == AUTO
    return [
        (b, k)
        for b, k in auto_order()
        if name in (AUTO, b.name)
        and kernel in (None, k.name, f"{b.name}.{k.name}")
        and not reasons_of(b, k, call, auto=auto)
    ]


def _as_fake(parts: Sequence[Tensor], a: FakeTensor) -> list[Tensor]:
    """Parts of a real weight as fake tensors of ``a``'s mode, unless that mode takes real ones (as tracers do)."""
    mode = a.fake_mode
    if mode.allow_non_fake_inputs:
        return list(parts)
    return [t if isinstance(t, FakeTensor) else mode.from_tensor(t) for t in parts]
