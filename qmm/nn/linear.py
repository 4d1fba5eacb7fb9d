"""QuantLinear: ``nn.Linear`` over a quantised weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qmm.matmul import matmul
from qmm.nn.held import HeldWeight
from qmm.nn.module import QuantModule, device_of
from qmm.quantize import quantize
from qmm.registry import AUTO
from qmm.weight import QuantizedWeight
from qmm.weight.spec import words_for


class QuantLinear(QuantModule, nn.Linear):  # type: ignore[misc]  # weight is no parameter here
    """``y = activation(x @ W + bias)`` with W quantised; takes the place of an ``nn.Linear``.

    Made by :meth:`from_linear` or :meth:`from_weight`. The constructor makes a layer of zeros for ``load_state_dict``
    to fill (with ``device="meta"`` and ``assign=True`` for a weight of any kind).

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is a bias ``[N]``, an ``nn.Parameter``.
        device: of W and bias.
        dtype: of the bias; its floats decide nothing else (the result has the dtype of ``x``).
        bits: bits of a code.
        group_size: rows of K that share a scale; -1 means K.
        symmetric: no zero points, or packed integer ones.
        backend: as in :func:`qmm.matmul`; on a GPU, the weight is released to its layout.
        activation: fused, as in :func:`qmm.matmul`.
        deterministic: as in :func:`qmm.matmul`.

    It is an ``nn.Linear`` for ``isinstance`` (PEFT and others go by that), but ``weight`` is a
    :class:`qmm.QuantizedWeight`: it has ``device``, ``dtype`` and ``nbytes``, its shape is ``(K, N)``, and arithmetic
    on it fails. W takes no gradient; the bias does where it requires one, and is frozen at first.
    Under autocast ``x`` is cast as for ``nn.Linear``.

    Example:
        >>> import torch, qmm.nn
        >>> layer = qmm.nn.QuantLinear.from_linear(torch.nn.Linear(64, 8), group_size=32)
        >>> layer(torch.randn(3, 64)).shape
        torch.Size([3, 8])
    """

    bias: nn.Parameter | None  # type: ignore[assignment]  # nn.Linear has None as well

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bits: int = 4,
        group_size: int = 128,
        symmetric: bool = True,
        backend: str = AUTO,
        activation: str | None = None,
        deterministic: bool | str = True,
    ) -> None:
        w = _zeros(in_features, out_features, bits, group_size, symmetric, device_of(device))
        vector = torch.zeros(out_features, dtype=dtype, device=w.device) if bias else None
        self._setup(
            HeldWeight(w, backend),
            as_bias(vector, w),
            activation,
            deterministic,
        )

    def _setup(
        self,
        held: HeldWeight,
        bias: nn.Parameter | None,
        activation: str | None = None,
        deterministic: bool | str = True,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would make a full weight
        self.in_features, self.out_features = held.weight.shape
        self.activation, self.deterministic = activation, deterministic
        self.register_parameter("bias", bias)
        self._hold(held)

    @property
    def backend(self) -> str:
        """As in :func:`qmm.matmul`."""
        return self._held.backend

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        bits: int = 4,
        group_size: int = 128,
        *,
        symmetric: bool = True,
        method: str = "minmax",
        scale_dtype: torch.dtype | None = None,
        backend: str = AUTO,
        activation: str | None = None,
    ) -> QuantLinear:
        """Quantise a layer, see :func:`qmm.quantize`. The bias is the layer's own tensor, and frozen.

        Raises:
            TypeError: not an ``nn.Linear``, or one that is quantised already.
            ValueError: as :func:`qmm.quantize`.
        """
        if not isinstance(linear, nn.Linear) or isinstance(linear, QuantLinear):
            raise TypeError(f"linear: must be an nn.Linear; got {type(linear).__name__}")
        w = quantize(
            linear.weight,
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            method=method,
            scale_dtype=scale_dtype,
        )
        layer = cls.from_weight(w, linear.bias, backend=backend, activation=activation)
        layer.train(linear.training)
        return layer

    @classmethod
    def from_weight(
        cls,
        w: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        backend: str = AUTO,
        activation: str | None = None,
        deterministic: bool | str = True,
    ) -> QuantLinear:
        """A layer around a weight ``[K, N]``, which is taken over: on a GPU it is released to the backend's layout.

        Args:
            bias: ``[N]``, floating, on the weight's device; kept, not copied. A tensor becomes a frozen parameter.

        Raises:
            TypeError: ``w`` is no weight, or ``bias`` no tensor.
            ValueError: a bias of another shape or device.
        """
        if not isinstance(w, QuantizedWeight):
            raise TypeError(f"w: must be a qmm.QuantizedWeight; got {type(w).__name__}")
        layer = cls.__new__(cls)
        layer._setup(HeldWeight(w, backend), as_bias(bias, w), activation, deterministic)
        return layer

    def reset_parameters(self) -> None:
        """There are no random quantised weights: load a state_dict.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "a QuantLinear has no random weights: load a state_dict, or use from_linear"
        )

    def forward(self, input: Tensor) -> Tensor:
        """``[..., K] -> [..., N]``, in the dtype of ``input``."""
        kind = input.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind) and input.is_floating_point():
            input = input.to(torch.get_autocast_dtype(kind))
        return matmul(
            input,
            self._held.weight,
            bias=self._parameters["bias"],
            activation=self.activation,
            backend=self._held.backend,
            deterministic=self.deterministic,
        )

    def extra_repr(self) -> str:
        """``K``, ``N``, bits, groups, bytes, state."""
        more = [f"bias={self.bias is not None}"]
        more += [] if self.activation is None else [f"activation={self.activation}"]
        more += [] if self.backend == AUTO else [f"backend={self.backend}"]
        return f"{self._facts()}, {', '.join(more)}"


def as_bias(bias: Tensor | None, w: QuantizedWeight) -> nn.Parameter | None:
    """``bias`` as a frozen parameter on its own memory (a parameter that takes gradients stays frozen here)."""
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(f"bias: must be a floating torch.Tensor; got {got}")
    if tuple(bias.shape) != (w.out_features,):
        raise ValueError(f"bias: shape must be ({w.out_features},), w.out_features; got {tuple(bias.shape)}")
    if bias.device != w.device:
        raise ValueError(f"bias and w must be on one device; got bias on {bias.device} and w on {w.device}")
    return nn.Parameter(bias.detach(), requires_grad=False)


def _zeros(
    k: int, n: int, bits: int, group_size: int, symmetric: bool, device: torch.device
) -> QuantizedWeight:
    """A weight of zeros: all codes, scales and zero points are 0."""
    size = k if group_size == -1 else group_size
    groups = -(-k // max(1, size))

    def words(count: int) -> Tensor:
        return torch.zeros(words_for(count, bits), n, dtype=torch.int32, device=device)

    return QuantizedWeight(
        words(k),
        torch.zeros(groups, n, dtype=torch.float16, device=device),
        bits=bits,
        group_size=size,
        in_features=k,
        zeros=None if symmetric else words(groups),
    )
