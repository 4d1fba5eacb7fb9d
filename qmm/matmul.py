"""qmm.matmul: check the call, choose a kernel, run it. The eager path goes straight to the backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from qmm.call import MatmulCall, in_forward_mode, make_call
from qmm.dispatch import Choice, check_kernel, select, warn_if_slow
from qmm.op.modes import modes_active
from qmm.op.modes import wanted as wanted_by_torch
from qmm.registry import AUTO, wanted_backend
from qmm.strides import as_rows
from qmm.weight import QuantizedWeight

_MAX_PLANS = 256  # per weight; shapes beyond that start the cache anew
_PLAIN = (Tensor, torch.nn.Parameter)


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
    """``activation(a @ dequantize(w) + bias)``, fused, on the kernel that fits.

    Args:
        a: ``[..., K]``, float16, bfloat16 or float32 (float64 on the torch backend), any strides, 1-D and empty
            leading shapes included.
        w: the weight, ``[K, N]``, on the same device.
        bias: ``[N]``, any float dtype, added in float32.
        activation: None, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"silu"``, applied in float32.
        out: ``[..., N]``, dtype and device of ``a``, may be strided, may not overlap an input.
        backend: ``"auto"``, or the name of one: that one runs or raises. ``use_backend`` and ``QMM_BACKEND`` come
            after this argument.
        kernel: name of one kernel (``"tiled"`` or ``"triton.tiled"``), or None.
        deterministic: True: the same call gives the same bits; ``"batch"``: a row's bits do not depend on M either
            (slower); False: anything goes.

    Returns:
        ``[..., N]`` of ``a``'s dtype; ``out`` where it was given. Never aliases an input.

    Raises:
        TypeError, ValueError: what is wrong for every backend.
        UnsupportedError: no kernel that was allowed takes the call; it lists every backend's reasons.

    Accumulation is float32 (float64 for float64), with one rounding to the output dtype; see docs/numerics.md.

    Example:
        >>> import torch, qmm
        >>> w = qmm.quantize(torch.randn(8, 64), bits=4, group_size=32)
        >>> qmm.matmul(torch.randn(3, 64), w).shape
        torch.Size([3, 8])
    """
    if is_compiling():
        return _as_operator(a, w, bias, activation, out, backend, kernel, deterministic)
    key = seen_key(a, w, bias, activation, out, backend, kernel, deterministic)
    if key is not None and (seen := w._plans.get(key)) is not None:
        return again(seen, a, w, bias)
    if wanted_by_torch(a, bias):
        return _as_operator(a, w, bias, activation, out, backend, kernel, deterministic)
    return first(
        a, w, key,
        bias=bias, activation=activation, out=out, backend=backend, kernel=kernel, deterministic=deterministic,
    )  # fmt: skip


def _as_operator(
    a: Tensor,
    w: QuantizedWeight,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor | None,
    backend: str,
    kernel: str | None,
    deterministic: bool | str,
) -> Tensor:
    from qmm.op import way_in

    return way_in.matmul(
        a,
        w,
        bias=bias,
        activation=activation,
        out=out,
        backend=backend,
        kernel=kernel,
        deterministic=deterministic,
    )


def again(
    seen: tuple[MatmulCall, Choice, tuple[int, ...]], a: Tensor, w: QuantizedWeight, bias: Tensor | None
) -> Tensor:
    """A call that was seen before."""
    call, choice, shape = seen
    result = a.new_empty(shape)
    if len(shape) == 2 and bias is None and not a.requires_grad:
        choice.backend.run(call, choice.kernel, choice.config, a, w, None, result)
    else:
        execute(choice, call, a, w, bias, result)
    return result


def first(
    a: Tensor,
    w: QuantizedWeight,
    key: Any = None,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
    backend: str = AUTO,
    kernel: str | None = None,
    deterministic: bool | str = True,
    prepare: bool = True,
) -> Tensor:
    """A call that was not seen before: checked, planned, run, and remembered under ``key``, if there is one.

    ``prepare=False`` runs kernels that read the weight as it is, without making a layout of it.
    """
    call = make_call(a, w, bias=bias, activation=activation, out=out, deterministic=deterministic)
    if not (prepare or w.is_prepared):
        call = replace(call, unprepared_in_capture=True)
    if call.device.type == "meta":
        wanted_backend(backend)  # an unknown name raises here too
        return a.new_empty(call.out_shape) if out is None else out
    choice = _plan(call, w, backend, kernel)
    result = torch.empty(call.out_shape, dtype=a.dtype, device=a.device) if out is None else out
    if call.m == 0:
        return result
    execute(choice, call, a, w, bias, result)
    if key is not None and not call.unprepared_in_capture:
        _remember(w._plans, key, (call, choice, call.out_shape))
    return result


def seen_key(
    a: Tensor,
    w: QuantizedWeight,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor | None,
    backend: str,
    kernel: str | None,
    deterministic: bool | str,
) -> Any:
    """All that ``make_call`` and ``select`` look at, cheaply, or None where a call is out of the ordinary.

    Two calls with one key pass or fail the same checks and run the same kernel, so that a key once seen needs neither.
    """
    if (
        type(a) is not Tensor
        or type(w) is not QuantizedWeight
        or out is not None
        or deterministic is not True
        or a.layout is not torch.strided
        or a.is_nested
        or a.is_neg()
        or a.numel() == 0
        or in_forward_mode()
        or modes_active()
    ):
        return None
    grad = torch.is_grad_enabled() and a.requires_grad
    facts: Any = None
    if bias is not None:
        if type(bias) not in _PLAIN or bias.layout is not torch.strided or bias.is_nested:
            return None
        facts = (bias.shape, bias.stride(), bias.dtype, bias.device)
        grad = grad or (torch.is_grad_enabled() and bias.requires_grad)
    held = w._store._held
    if grad or not (activation is None or isinstance(activation, str)):
        return None
    if not (kernel is None or isinstance(kernel, str)):
        return None
    if not held.prepared and a.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    try:
        offset = a.data_ptr() & 15
    except RuntimeError:  # a wrapper of a transform: make_call refuses it
        return None
    released_to = next(iter(held.prepared)) if held.canonical is None else None
    return (
        a.shape, a.stride(), a.dtype, a.device, offset, facts, activation,
        wanted_backend(backend), kernel, released_to, w._facts,
    )  # fmt: skip


def _plan(call: MatmulCall, w: QuantizedWeight, backend: str, kernel: str | None) -> Choice:
    """The choice for these facts, remembered on the weight."""
    name, source = wanted_backend(backend)
    check_kernel(kernel)
    key = (call, name, source, kernel)
    plans: dict[Any, Choice] = w._plans
    choice = plans.get(key)
    if choice is None:
        choice = select(call, backend, kernel)
        warn_if_slow(choice, call)
        _remember(plans, key, choice)
    return choice


def _remember(plans: dict[Any, Any], key: Any, value: Any) -> None:
    """Both kinds of entries, of choices and of calls seen before, count towards one bound."""
    if len(plans) >= _MAX_PLANS:
        plans.clear()
    plans[key] = value


def execute(
    choice: Choice, call: MatmulCall, a: Tensor, w: QuantizedWeight, bias: Tensor | None, result: Tensor
) -> None:
    """Run a chosen kernel on rows; ``result`` has ``call.out_shape`` and is written whole."""
    rows = as_rows(a.detach().resolve_neg())  # kernels read memory, which a lazily negated view is not
    target = (
        torch.empty(call.m, call.n, dtype=a.dtype, device=a.device) if call.copies_out else _view_rows(result)
    )
    flat_bias = None if bias is None else bias.detach().resolve_neg().contiguous()
    choice.backend.run(call, choice.kernel, choice.config, rows, w, flat_bias, target)
    if call.copies_out:
        result.copy_(target.view(call.out_shape))


def _view_rows(result: Tensor) -> Tensor:
    """``[..., N]`` as ``[M, N]`` without a copy; ``call.copies_out`` has said that this can be done."""
    result = result.detach()
    return result if result.dim() == 2 else result.view(-1, result.shape[-1])
