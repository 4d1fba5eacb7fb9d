"""MatmulCall: the facts of one call, checked once, frozen. Building it reads no tensor data and never synchronises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qmm.backend import ACTIVATIONS, DETERMINISTIC
from qmm.strides import may_overlap, merges_to_rows, overlaps_itself
from qmm.weight.facts import has_values
from qmm.weight.spec import WeightSpec, dtype_name

if TYPE_CHECKING:
    from qmm.weight import QuantizedWeight

A_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_A_DTYPE_NAMES = ", ".join(dtype_name(d) for d in A_DTYPES)


@dataclass(frozen=True)
class MatmulCall:
    """Facts of ``activation(a @ dequantize(w) + bias)``.

    Attributes:
        m: rows of A, the product of its leading sizes.
        n: N, out_features.
        k: K, in_features.
        a_shape: shape of ``a`` as given, ``[..., K]``.
        a_strides: strides of ``a`` as given, in elements.
        a_dtype: dtype of ``a`` and of the result.
        a_aligned: whether the data pointer of ``a`` is a multiple of 16 bytes.
        device: device of every operand.
        weight: facts of the weight.
        fits_float16: whether every weight value is inside float16's range, so that W may be rounded to float16.
        even_groups: whether every group has ``group_size`` rows (the last may be short); act-order may break it.
        released_to: the backend whose prepared layout *is* the weight, or None.
        bias_dtype: dtype of the bias, or None.
        activation: name of the activation, or None.
        out_strides: strides of ``out`` as given, or None where the result is a new tensor.
        unprepared_in_capture: a CUDA graph is being captured and the weight has no prepared layout: none is made then.
        deterministic: ``True`` same call, same bits; ``"batch"`` a row's bits do not depend on M either;
            ``False`` anything goes.

    Example:
        >>> import torch, qmm
        >>> from qmm.call import make_call
        >>> call = make_call(torch.randn(2, 3, 64), qmm.quantize(torch.randn(8, 64), bits=4, group_size=32))
        >>> call.m, call.n, call.k, call.out_shape, call.copies_a
        (6, 8, 64, (2, 3, 8), False)
    """

    m: int
    n: int
    k: int
    a_shape: tuple[int, ...]
    a_strides: tuple[int, ...]
    a_dtype: torch.dtype
    a_aligned: bool
    device: torch.device
    weight: WeightSpec
    fits_float16: bool
    even_groups: bool = True
    released_to: str | None = None
    bias_dtype: torch.dtype | None = None
    activation: str | None = None
    out_strides: tuple[int, ...] | None = None
    deterministic: bool | str = True
    unprepared_in_capture: bool = False

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the result, ``[..., N]``."""
        return (*self.a_shape[:-1], self.n)

    @property
    def copies_a(self) -> bool:
        """Whether the leading dimensions of ``a`` cannot be seen as one row dimension without a copy."""
        return not merges_to_rows(self.a_shape, self.a_strides)

    @property
    def copies_out(self) -> bool:
        """Whether the result is made in a temporary and copied into a strided ``out``."""
        return self.out_strides is not None and not merges_to_rows(self.out_shape, self.out_strides)


def make_call(
    a: Tensor,
    w: QuantizedWeight,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
    deterministic: bool | str = True,
) -> MatmulCall:
    """Check everything that is wrong for every backend, and return the facts.

    Raises:
        TypeError: a wrong type or dtype of ``a``, ``w``, ``bias`` or ``out``.
        ValueError: shapes, devices or options that do not go together.
        NotImplementedError: a gradient is wanted.
    """
    check_types(a, w, bias, out)
    spec = w.spec
    check_last_size(a, spec)
    if a.device != w.device:
        raise ValueError(f"a and w must be on one device; got a on {a.device} and w on {w.device}")
    if bias is not None:
        check_bias(bias, a, spec)
    check_options(activation, deterministic)
    check_no_derivative(a, bias)
    shape = tuple(a.shape)
    if out is not None:
        _check_out(out, a, w, bias, (*shape[:-1], spec.out_features))
    m = 1
    for size in shape[:-1]:
        m *= size
    return MatmulCall(
        m=m,
        n=spec.out_features,
        k=spec.in_features,
        a_shape=shape,
        a_strides=tuple(a.stride()),
        a_dtype=a.dtype,
        a_aligned=has_values(a) and _address(a) % 16 == 0,
        device=a.device,
        weight=spec,
        fits_float16=w.fits_float16,
        even_groups=w.even_groups,
        released_to=w.released_to,
        bias_dtype=None if bias is None else bias.dtype,
        activation=activation,
        out_strides=None if out is None else tuple(out.stride()),
        deterministic=deterministic,
        unprepared_in_capture=(
            a.device.type == "cuda" and not w.is_prepared and torch.cuda.is_current_stream_capturing()
        ),
    )


def describe_call(
    m: int,
    weight: WeightSpec,
    *,
    a_dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    bias_dtype: torch.dtype | None = None,
    activation: str | None = None,
    deterministic: bool | str = True,
) -> MatmulCall:
    """The facts of a call that nobody makes: ``a`` is ``[m, K]``, contiguous and aligned, and no tensor exists.

    Raises:
        ValueError: an option that no call may have.
        TypeError: a dtype that no call may have.

    Example:
        >>> import torch
        >>> from qmm import WeightSpec, ZeroKind
        >>> from qmm.call import describe_call
        >>> spec = WeightSpec(4, 128, 4096, 8192, 32, ZeroKind.NONE, torch.float16)
        >>> describe_call(16, spec, device="cuda").out_shape
        (16, 8192)
    """
    if m < 0:
        raise ValueError(f"m: must be at least 0; got {m}")
    if a_dtype not in A_DTYPES:
        raise TypeError(f"a: dtype must be one of {_A_DTYPE_NAMES}; got {dtype_name(a_dtype)}")
    check_options(activation, deterministic)
    k = weight.in_features
    return MatmulCall(
        m=m,
        n=weight.out_features,
        k=k,
        a_shape=(m, k),
        a_strides=(k, 1),
        a_dtype=a_dtype,
        a_aligned=True,
        device=torch.device(device),
        weight=weight,
        fits_float16=True,
        bias_dtype=bias_dtype,
        activation=activation,
        deterministic=deterministic,
    )


def _address(a: Tensor) -> int:
    try:
        return a.data_ptr()
    except RuntimeError as error:  # the wrapper of a transform has no memory of its own
        raise NotImplementedError(
            "a: must be a tensor with memory (torch.func transforms, such as vmap and jvp, are not supported yet); "
            f"got one without: {error}"
        ) from error


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is going on, so that tensors may carry a tangent."""
    return getattr(forward_ad, "_current_level", 0) >= 0  # cheaper than a look at the tensors; -1 is no level


def _has_tangent(t: Tensor) -> bool:
    return forward_ad.unpack_dual(t).tangent is not None


def check_last_size(a: Tensor, spec: WeightSpec) -> None:
    """K of ``a`` is K of the weight."""
    if a.dim() < 1 or a.shape[-1] != spec.in_features:
        raise ValueError(
            f"a: the last size must equal w.in_features; got a of shape {tuple(a.shape)} "
            f"and w with in_features={spec.in_features}, out_features={spec.out_features}"
        )


def check_bias(bias: Tensor, a: Tensor, spec: WeightSpec) -> None:
    """Shape and device."""
    if tuple(bias.shape) != (spec.out_features,):
        raise ValueError(
            f"bias: shape must be ({spec.out_features},), w.out_features; got {tuple(bias.shape)}"
        )
    if bias.device != a.device:
        raise ValueError(f"a and bias must be on one device; got a on {a.device} and bias on {bias.device}")


def check_options(activation: object, deterministic: object) -> None:
    """Names of options that exist."""
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        raise ValueError(f"activation: must be None or one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    if not isinstance(deterministic, (bool, str)) or deterministic not in DETERMINISTIC:
        raise ValueError(f"deterministic: must be True, False or 'batch'; got {deterministic!r}")


def check_no_derivative(a: Tensor, bias: Tensor | None) -> None:
    """Derivatives that there are none of."""
    if torch.is_grad_enabled() and (a.requires_grad or (bias is not None and bias.requires_grad)):
        raise NotImplementedError(
            "qmm.matmul has no gradient yet, and a or bias requires one: "
            "call it under torch.no_grad(), or pass a.detach()"
        )
    if in_forward_mode() and (_has_tangent(a) or (bias is not None and _has_tangent(bias))):
        raise NotImplementedError(
            "qmm.matmul has no forward-mode gradient yet, and a or bias carries a tangent: "
            "pass torch.autograd.forward_ad.unpack_dual(a).primal"
        )


def check_types(a: object, w: object, bias: object, out: object) -> None:
    """What the operands are, and their dtypes."""
    from qmm.weight import QuantizedWeight

    if not isinstance(w, QuantizedWeight):
        raise TypeError(f"w: must be a qmm.QuantizedWeight; got {type(w).__name__}")
    for name, value in (("a", a), ("bias", bias), ("out", out)):
        if value is None and name != "a":
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: must be a torch.Tensor; got {type(value).__name__}")
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            kind = (
                "a quantized"
                if value.is_quantized
                else "a nested"
                if value.is_nested
                else f"a {value.layout}"
            )
            raise TypeError(f"{name}: must be a dense strided tensor; got {kind} tensor")
    assert isinstance(a, Tensor)
    if a.dtype not in A_DTYPES:
        raise TypeError(f"a: dtype must be one of {_A_DTYPE_NAMES}; got {dtype_name(a.dtype)}")
    if isinstance(bias, Tensor) and bias.dtype not in A_DTYPES:
        raise TypeError(f"bias: dtype must be one of {_A_DTYPE_NAMES}; got {dtype_name(bias.dtype)}")
    if isinstance(out, Tensor) and out.dtype != a.dtype:
        raise TypeError(
            f"out: dtype must be that of a; got out {dtype_name(out.dtype)} and a {dtype_name(a.dtype)}"
        )


def _check_out(
    out: Tensor, a: Tensor, w: QuantizedWeight, bias: Tensor | None, expected: tuple[int, ...]
) -> None:
    if tuple(out.shape) != expected:
        raise ValueError(f"out: shape must be {expected}; got {tuple(out.shape)}")
    if out.device != a.device:
        raise ValueError(f"a and out must be on one device; got a on {a.device} and out on {out.device}")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError("out: must be writable; got an inference tensor outside torch.inference_mode()")
    if out.is_neg():
        raise ValueError("out: must be plain memory; got a lazily negated view (call .resolve_neg() on it)")
    if torch.is_grad_enabled() and out.requires_grad:
        raise ValueError("out: must not require a gradient; got a tensor with requires_grad=True")
    if not has_values(out):
        return
    if overlaps_itself(out):
        raise ValueError(f"out: elements must not share memory; got strides {tuple(out.stride())}")
    inputs = [("a", a), *w.stored_tensors().items()]
    if bias is not None:
        inputs.append(("bias", bias))
    for name, tensor in inputs:
        if may_overlap(out, tensor):
            raise ValueError(f"out: must not share memory with an input; got out overlapping {name}")
